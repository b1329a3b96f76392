"""Options that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import click

Filters = dict[str, Any]  # what is asked for: arguments of a question
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Duration(click.ParamType[float]):
    """Seconds, written as people do: 90, 90s, 30m, 2h, 1d, 1h30m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhdw]?)", value)
        if not parts or "".join(number + unit for number, unit in parts) != value:
            self.fail(f"{value!r} is no duration: write 30m, 2h or 1d", param, ctx)
        return sum(float(number) * UNITS[unit or "s"] for number, unit in parts)


DURATION = Duration()


def controller_option(when: str = "") -> Callable[[Any], Any]:
    """`--controller ADDRESS`, passed on as `controller`; `when` goes before its help."""
    return click.option(
        "--controller",
        metavar="ADDRESS",
        help=f"{when}tcp://HOST:PORT [default: UNICRON_CONTROLLER, state folder, configuration].",
    )


def filter_options(*names: str) -> Callable[[Any], Any]:
    """Options that choose what is shown; they are passed on together as `filters`, the arguments of the controller's
    question. names: of user, partition, node and since."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return function(
                filters={_ARGUMENTS.get(name, name): said for name, said in values.items() if said}, **given
            )

        found: Callable[..., Any] = command
        for name in reversed(names):
            found = _filter(name)(found)
        return found

    return add


_ARGUMENTS = {"node": "nodes", "kind": "kinds"}


def _filter(name: str) -> Callable[[Any], Any]:
    match name:
        case "user":
            return click.option("--user", metavar="USER", help="Only this user's jobs.")
        case "partition":
            return click.option("--partition", metavar="NAME", help="Only jobs and nodes of this partition.")
        case "node":
            return click.option("--node", metavar="N1,N[2-8],...", help="Only what is about these nodes: a host list.")
        case "since":
            from unicron.ctl.cli.times import SINCE

            text = "Only what was since then: 2h, 14:30, 2026-11-27 or 2026-11-27T14:30."
            return click.option("--since", type=SINCE, metavar="WHEN", help=text)
    raise ValueError(name)
