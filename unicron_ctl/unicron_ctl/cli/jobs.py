"""`unicronctl jobs`: the jobs alone. JSON (`--json`) is the list under "jobs" of `unicronctl status --json`."""

from __future__ import annotations

import json

import click

from unicron_ctl.cli.filter_options import Filters, filter_options
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.commands.options import controller_option
from unicron_ctl.shared.protocol.answer_schema import Job
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.columns import show, terminal_width
from unicron_ctl.shared.system.printable import print_text


@click.command(name="jobs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@filter_options("user", "partition", "nodes", "since")
@controller_option()
def command(as_json: bool, filters: Filters, controller: str | None) -> None:
    """List protected jobs. With --since: those that have run since then."""
    data = ask_controller({"kind": "jobs", **filters}, controller)
    if as_json:
        print_text(json.dumps(data, indent=2), lines=True)
    else:
        folded, chosen = terminal_width() is not None, bool(filters)
        show([status_tables.jobs(as_struct(data, list[Job]), folded, chosen)])
