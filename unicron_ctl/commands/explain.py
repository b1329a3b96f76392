"""`unicronctl explain JOB`: why a job is treated as it is.

JSON (`--json`): job, name, state, generation, ended, planned_nodes, plan_reason, plan_trigger, decisions (time, kind,
generation, reason; oldest first) and failures (as in `unicronctl status --json`).
"""

from __future__ import annotations

import json

import click

from unicron_ctl.commands import tables
from unicron_ctl.query import ask


@click.command(name="explain")
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--controller",
    metavar="ADDRESS",
    help="tcp://HOST:PORT [default: UNICRON_CONTROLLER, state folder, configuration].",
)
def command(job: str, as_json: bool, controller: str | None) -> None:
    """Say why a job was treated as it was. JOB is an id or a name."""
    data = ask({"kind": "explain", "job": job}, controller)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        tables.console().print(tables.explanation(data))
