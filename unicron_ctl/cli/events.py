"""`unicronctl events`: the event log. JSON (`--json`) is one object a line: id, time, job, generation, kind and what
the kind adds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from unicron.ctl.cli.filter_options import Filters, filter_options
from unicron.ctl.cli.options import controller_option
from unicron.ctl.cli.times import moment
from unicron.ctl.protocol.answer_schema import ASKED_TOO_MUCH, CUT, READ
from unicron.ctl.protocol.client import ask_controller
from unicron.ctl.system.errors import UserError

POLL_SECONDS = 0.5
PAGE, MOST = 1000, 5000  # events in one answer when following, and at most
QUIET = "step timing ranks_ready"  # too many to be read
BUSY_SECONDS, BUSY_TRIES = 1.0, 60  # the controller's quota fills up again
Event = dict[str, Any]


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
    help="Show at most so many old events.",
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
    """Show the event log, the last events of those that are chosen."""
    quiet = "" if as_json or steps or kinds else QUIET
    chosen = {"kinds": " ".join(kinds).replace(",", " "), "without": quiet, "job": job, **filters}
    log = Log({"kind": "events", **chosen}, lambda question: ask_controller(question, controller))
    try:
        found, earlier = (list(log.later(after, limit)), False) if after else log.newest(limit)
        for event in found:
            _print(event, as_json)
        if earlier and "since" in filters:
            click.echo(f"unicronctl: there are earlier ones: -n {min(MOST, 10 * limit)} shows more", err=True)
        after = log.read
        while follow:
            time.sleep(POLL_SECONDS)
            try:
                for event in log.later(after, PAGE):
                    _print(event, as_json)
            except UserError as error:
                click.echo(f"unicronctl: {error} (still trying)", err=True)
            after = log.read
    except KeyboardInterrupt:
        return


class Log:
    """The controller's log, read in pieces: an answer holds as much as costs the controller little."""

    def __init__(self, question: dict[str, Any], ask: Callable[[dict[str, Any]], list[Event]]) -> None:
        self._question, self._ask = question, ask
        self.read = 0
        """The id of the event up to which the log was read."""

    def newest(self, limit: int) -> tuple[list[Event], bool]:
        """The last events, oldest first, and whether there are earlier ones. Raises UserError."""
        found: list[Event] = []
        before, more = 0, True
        while more and len(found) <= limit:
            piece = self._ask_for_events(before=before, limit=limit + 1 - len(found))
            if piece and piece[-1]["kind"] == READ:
                self.read = max(self.read, piece.pop()["id"])
            if more := bool(piece) and piece[0]["kind"] == CUT:
                before = piece.pop(0)["id"]
            found = piece + found
        return found[-limit:], len(found) > limit

    def later(self, after: int, limit: int) -> Iterator[Event]:
        """The next events. Raises UserError."""
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


def _print(event: Event, as_json: bool) -> None:
    click.echo(json.dumps(event) if as_json else _line(event))


def _line(event: Event) -> str:
    """One event on one line."""
    job = f" job {event['job']}" if event["job"] else ""
    generation = f" g{event['generation']}" if event["generation"] else ""
    rest = (
        event.get("reason")
        or event.get("text")
        or ", ".join(f"{k}={v}" for k, v in event.items() if k not in ("id", "time", "job", "generation", "kind"))
    )
    return f"{moment(event['time'])} {event['kind']}{job}{generation}: {' '.join(str(rest).split())}"
