"""Options that several commands share, and how `--json` prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import click
import msgspec

from unicron_ctl.shared.system.printable import print_text

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Number(click.FloatRange):
    """A finite number within a range. Click's own takes nan for a number in every range, and so float() does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return _finite(self, super().convert(value, param, ctx), value, param, ctx)


class Duration(click.ParamType[float]):
    """Seconds, written as people do: 90, 90s, 30m, 2h, 1d, 1h30m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhdw]?)", value)
        if not parts or "".join(number + unit for number, unit in parts) != value:
            self.fail(f"{value!r} is no duration: write 30m, 2h or 1d", param, ctx)
        return _finite(self, sum(float(number) * UNITS[unit or "s"] for number, unit in parts), value, param, ctx)


def _finite(
    kind: click.ParamType[float], number: float, value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> float:
    if not math.isfinite(number):
        kind.fail(f"{value!r} is no finite number", param, ctx)
    return number


def print_json(data: object, indent: int | None = None) -> None:
    """Print plain data or structs as JSON, on one line unless `indent` is set."""
    print_text(json.dumps(msgspec.to_builtins(data), indent=indent), lines=True)


DURATION = Duration()


def controller_option(when: str = "") -> Callable[[Any], Any]:
    """`--controller ADDRESS`, passed on as `controller`; `when` goes before its help."""
    return click.option(
        "--controller",
        metavar="ADDRESS",
        help=f"{when}tcp://HOST:PORT [default: UNICRON_CONTROLLER, state folder, configuration].",
    )
