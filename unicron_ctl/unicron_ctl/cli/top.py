"""`unicronctl top`: the controller's status, kept up to date, the worst first. `unicronctl status --watch` is the same.

It fills the terminal. What needs an admin comes first and is cut last; the tables share the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import click
from rich.console import Console, Group
from rich.text import Text

from unicron_ctl.cli.filter_options import Filters, filter_options
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.commands.options import Number, controller_option
from unicron_ctl.shared.protocol.answer_schema import Status
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.columns import lines_of
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.live_region import LiveRegion

LEAST_LINES = 3  # of a table that has more: its heading, the worst item, and how many more there are


@click.command(name="top")
@click.option(
    "--interval", type=Number(0.2), default=2.0, show_default=True, metavar="SECONDS", help="Between updates."
)
@filter_options("user", "partition", "nodes", "since")
@controller_option()
def command(interval: float, filters: Filters, controller: str | None) -> None:
    """Show what is wrong, and all else, until Ctrl-C.

    What needs an admin is always at the top, whatever is chosen.
    """
    watch(interval, filters, controller)


def watch(interval: float, filters: Filters, controller: str | None) -> None:
    """Show the status until Ctrl-C. Raises UserError."""
    console = Console(highlight=False)
    if not console.is_terminal:
        raise UserError(
            "this is for a terminal: `unicronctl status` prints it once, `unicronctl events -f` streams", WRONG_USE
        )

    def ask_status() -> Status:
        return as_struct(ask_controller({"kind": "status", **filters}, controller), Status)

    data = ask_status()
    with contextlib.suppress(KeyboardInterrupt), LiveRegion(console, auto_refresh=False) as region:
        follow(ask_status, data, region, lambda: console.size, interval, bool(filters))


def follow(
    ask: Callable[[], Status],
    data: Status,
    region: LiveRegion,
    size: Callable[[], tuple[int, int]],
    interval: float,
    chosen: bool,
) -> None:
    """Show the answers of `ask` until Ctrl-C. chosen: they are a part of the status."""
    trouble = ""
    while True:
        width, height = size()
        region.show_now(Group(*picture(data, width, height, trouble, chosen)))
        time.sleep(interval)
        try:
            data, trouble = ask(), ""
        except UserError as error:  # the controller may be gone for a while: jobs train on, and this waits
            trouble = f"{error} (still trying; what is below is old)"


def picture(data: Status, width: int, height: int, trouble: str = "", chosen: bool = False) -> list[Text]:
    """Draw at most `height` - 1 lines, so that nothing scrolls, none longer than `width`.

    trouble: why the status is old. chosen: it is a part of the whole.
    """
    head = [Text(trouble, "bold red")] if trouble else []
    first = lines_of([*head, *status_tables.needs_an_admin(data, folded=True)], width)
    rest = [lines_of([part], width) for part in status_tables.tables(data, folded=True, chosen=chosen)]
    room = height - 1
    shown = cut(first, max(LEAST_LINES, room - LEAST_LINES * len(rest)), "`unicronctl status` shows all")
    shares = share_lines([len(lines) + 1 for lines in rest], room - len(shown))
    for lines, share in zip(rest, shares, strict=True):
        shown += cut([*lines, Text()], share, "")
    return shown[:room]


def share_lines(wanted: Sequence[int], room: int) -> list[int]:
    """Share the room between tables that want so many lines. Those that want more than their share get equal shares."""
    shares = [0] * len(wanted)
    left = room
    for position, place in enumerate(sorted(range(len(wanted)), key=lambda place: wanted[place])):
        shares[place] = max(0, min(wanted[place], left // (len(wanted) - position)))
        left -= shares[place]
    return shares


def cut(lines: list[Text], most: int, hint: str) -> list[Text]:
    """Return the first lines, and as the last one how many more there are."""
    if len(lines) <= most:
        return lines
    more = f"... {len(lines) - most + 1} more lines" + (f": {hint}" if hint else "")
    return [*lines[: max(0, most - 1)], Text(more, "bold red" if hint else "dim")][: max(0, most)]
