"""`unicronctl jobs`: the jobs alone. JSON (`--json`) is the list under "jobs" of `unicronctl status --json`."""

from __future__ import annotations

import json

import click

from unicron.ctl.cli import status_tables
from unicron.ctl.cli.options import controller_option
from unicron.ctl.protocol.answer_schema import Job
from unicron.ctl.protocol.client import as_struct, ask_controller
from unicron.ctl.system.columns import show


@click.command(name="jobs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@controller_option()
def command(as_json: bool, controller: str | None) -> None:
    """List protected jobs."""
    data = ask_controller({"kind": "jobs"}, controller)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        show([status_tables.jobs(as_struct(data, list[Job]))])
