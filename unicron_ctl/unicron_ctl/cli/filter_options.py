"""The options that choose what commands show: --user, --partition, --node, --since."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from unicron_ctl.shared.commands.times import SINCE

Filters = dict[str, str | float]  # arguments of a question


_OPTIONS: dict[str, Callable[[Any], Any]] = {  # by the argument of the question
    "user": click.option("--user", metavar="USER", help="Only this user's jobs."),
    "partition": click.option("--partition", metavar="NAME", help="Only jobs and nodes of this partition."),
    "nodes": click.option(
        "--node", "nodes", metavar="N1,N[2-8],...", help="Only what is about these nodes: a host list."
    ),
    "since": click.option(
        "--since",
        type=SINCE,
        metavar="WHEN",
        help="Only what was since then: 2h, 14:30, 2026-11-27 or 2026-11-27T14:30.",
    ),
}


def filter_options(*names: str) -> Callable[[Any], Any]:
    """Options that choose what is shown; they are passed on together as `filters`, the arguments of the controller's
    question. names: of user, partition, nodes and since."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return function(filters={name: value for name, value in values.items() if value}, **given)

        found: Callable[..., Any] = command
        for name in reversed(names):
            found = _OPTIONS[name](found)
        return found

    return add
