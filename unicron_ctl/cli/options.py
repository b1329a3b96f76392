"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def controller_option(when: str = "") -> Callable[[Any], Any]:
    """`--controller ADDRESS`, passed on as `controller`; `when` goes before its help."""
    return click.option(
        "--controller",
        metavar="ADDRESS",
        help=f"{when}tcp://HOST:PORT [default: UNICRON_CONTROLLER, state folder, configuration].",
    )
