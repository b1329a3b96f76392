"""`unicronctl events`: the event log. JSON (`--json`) is one object a line: id, time, job, generation, kind and what
the kind adds.
"""

from __future__ import annotations

import json
import time
from typing import Any

import click

from unicron.ctl.cli import status_tables
from unicron.ctl.cli.options import controller_option
from unicron.ctl.protocol.client import ask_controller
from unicron.ctl.system.errors import UserError

POLL_SECONDS = 0.5
PAGE = 1000
QUIET = "step timing ranks_ready"  # too many to be read


@click.command(name="events")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--job", metavar="JOB", help="Only this job, by id or name.")
@click.option("--after", type=click.IntRange(0), default=0, metavar="ID", help="Only events with a higher id.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 5000),
    default=100,
    show_default=True,
    help="Show at most this many old events.",
)
@click.option("--steps", is_flag=True, help="Show optimizer steps, too (JSON always has them).")
@controller_option()
def command(
    follow: bool, as_json: bool, job: str | None, after: int, limit: int, steps: bool, controller: str | None
) -> None:
    """Show the event log."""
    question = {"kind": "events", "job": job, "without": "" if as_json or steps else QUIET}
    found = ask_controller({**question, "after": after, "limit": limit}, controller)
    try:
        while True:
            for event in found:
                after = event["id"]
                click.echo(json.dumps(event) if as_json else _line(event))
            if not follow:
                return
            if len(found) < limit:
                time.sleep(POLL_SECONDS)
            try:
                found = ask_controller({**question, "after": after, "limit": PAGE}, controller)
            except UserError as error:
                found = []
                click.echo(f"unicronctl: {error} (still trying)", err=True)
    except KeyboardInterrupt:
        return


def _line(event: dict[str, Any]) -> str:
    """One event on one line."""
    job = f" job {event['job']}" if event["job"] else ""
    generation = f" g{event['generation']}" if event["generation"] else ""
    rest = event.get("reason") or ", ".join(
        f"{k}={v}" for k, v in event.items() if k not in ("id", "time", "job", "generation", "kind")
    )
    return f"{status_tables.clock(event['time'])} {event['kind']}{job}{generation}: {' '.join(str(rest).split())}"
