"""`unicronctl events`: the event log. `--json` prints a line for each: id, time, job, generation, kind, its fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import click

from unicron_ctl.cli.event_groups import Event, Group, alone, line, line_of, together
from unicron_ctl.cli.filter_options import Filters, filter_options
from unicron_ctl.shared.commands.options import controller_option, print_json
from unicron_ctl.shared.protocol.answer_schema import ASKED_TOO_MUCH, CUT, READ
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.columns import show, terminal_width
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.printable import print_text

POLL_SECONDS = 0.5
PAGE, MOST = 1000, 5000  # events in one answer when following, and at most
QUIET = "step timing ranks_ready"  # kinds of which there are too many to read
BUSY_SECONDS, BUSY_TRIES = 1.0, 60  # for the controller's quota to fill up again


@click.command(name="events")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--job", metavar="JOB", help="Only this job, by id or name.")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind; several with commas, or again.")
@filter_options("nodes", "user", "partition", "since")
@click.option("--after", type=click.IntRange(0), default=0, metavar="ID", help="Only events with a higher id.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, MOST),
    default=100,
    show_default=True,
    help="Show at most so many old events; on a terminal lines.",
)
@click.option("--steps", is_flag=True, help="Show optimizer steps, too (JSON always has them).")
@controller_option()
def command(
    follow: bool,
    as_json: bool,
    job: str | None,
    kinds: tuple[str, ...],
    filters: Filters,
    after: int,
    limit: int,
    steps: bool,
    controller: str | None,
) -> None:
    """Show the event log, the last events of those that are chosen.

    On a terminal equal events of several nodes are one line.
    """
    folds = not as_json and terminal_width() is not None
    grouped = together if folds else alone
    quiet = "" if as_json or steps or kinds else QUIET
    chosen = {"kinds": " ".join(kinds).replace(",", " "), "without": quiet, "job": job, **filters}
    log = Log({"kind": "events", **chosen}, lambda question: ask_controller(question, controller))
    try:
        groups, earlier = (grouped(log.later(after, limit)), False) if after else log.newest(limit, grouped)
        _print(groups, as_json, folds)
        if earlier and "since" in filters:
            print_text(f"unicronctl: there are earlier ones: -n {min(MOST, 10 * limit)} shows more", err=True)
        after = log.read
        while follow:
            time.sleep(POLL_SECONDS)
            fresh, problem = list[Event](), ""
            try:
                for event in log.later(after, PAGE):
                    fresh.append(event)
            except UserError as error:
                problem = f"unicronctl: {error} (still trying)"
            _print(grouped(fresh), as_json, folds)
            if problem:
                print_text(problem, err=True)
            after = log.read
    except KeyboardInterrupt:
        return


class Log:
    """Reads the controller's log in pieces, since the controller bounds the work for one answer."""

    def __init__(self, question: Mapping[str, object], ask: Callable[[Mapping[str, object]], list[Event]]) -> None:
        self._question, self._ask = question, ask
        self.read = 0
        """The id of the last event read."""

    def newest(self, limit: int, grouped: Callable[[list[Event]], list[Group]] = alone) -> tuple[list[Group], bool]:
        """Return the last groups of events, oldest first, and whether there are earlier ones. Raises UserError."""
        chosen: list[Event] = []
        groups: list[Group] = []
        before, more = 0, True
        while more and len(groups) <= limit and len(chosen) <= MOST:
            most = limit + 1 - len(groups) if len(groups) == len(chosen) else PAGE
            piece = self._ask_for_events(before=before, limit=most)
            if piece and piece[-1]["kind"] == READ:
                self.read = max(self.read, piece.pop()["id"])
            more = len(piece) >= most or (bool(piece) and piece[0]["kind"] == CUT)
            before = piece[0]["id"] if piece else before
            chosen = [event for event in piece if event["kind"] != CUT] + chosen
            groups = grouped(chosen)
        return groups[-limit:], more or len(groups) > limit

    def later(self, after: int, limit: int) -> Iterator[Event]:
        """Yield the next events. Raises UserError."""
        self.read, more = after, True
        while more and limit > 0:
            piece = self._ask_for_events(after=self.read, limit=limit)
            more = bool(piece) and piece[-1]["kind"] == CUT
            for event in piece:
                self.read = max(self.read, event["id"])
                if event["kind"] not in (CUT, READ):
                    limit -= 1
                    yield event

    def _ask_for_events(self, **arguments: int) -> list[Event]:
        tries = 0
        while True:
            try:
                return self._ask({**self._question, "mark": True, **arguments})
            except UserError as error:
                if str(error) != ASKED_TOO_MUCH or tries >= BUSY_TRIES:
                    raise
            tries += 1
            time.sleep(BUSY_SECONDS)


def _print(groups: list[Group], as_json: bool, folds: bool) -> None:
    if as_json:
        for group in groups:
            for event in group:
                print_json(event)
    else:
        show(line_of(group) if folds else line(group[0]) for group in groups)
