"""The options that choose what commands show: --user, --partition, --node, --since."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from unicron_ctl.shared.commands.times import SINCE

Filters = dict[str, str | float]  # arguments of a question to the controller


_OPTIONS: dict[str, Callable[[Any], Any]] = {  # by the argument of the question
    "user": click.option("--user", metavar="USER", help="Only this user's jobs."),
    "partition": click.option("--partition", metavar="NAME", help="Only jobs and nodes of this partition."),
    "nodes": click.option("--node", "nodes", metavar="N1,N[2-8],...", help="Only what concerns these nodes."),
    "since": click.option(
        "--since", type=SINCE, metavar="WHEN", help="Only since then: 2h, 14:30, 2026-11-27 or 2026-11-27T14:30."
    ),
}


def filter_options(*names: str) -> Callable[[Any], Any]:
    """Add some of the options user, partition, nodes and since. A command gets their values as `filters`."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**options: Any) -> Any:
            values = {name: options.pop(name) for name in names}
            return function(filters={name: value for name, value in values.items() if value}, **options)

        decorated: Callable[..., Any] = command
        for name in reversed(names):
            decorated = _OPTIONS[name](decorated)
        return decorated

    return add
