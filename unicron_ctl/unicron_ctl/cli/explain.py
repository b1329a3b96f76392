"""`unicronctl explain JOB`: why a job is treated as it is. `unicronctl schema explain` describes its JSON."""

from __future__ import annotations

import json

import click

from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.commands.alternative import alternative
from unicron_ctl.shared.commands.options import controller_option
from unicron_ctl.shared.protocol.answer_schema import Explanation
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.columns import show
from unicron_ctl.shared.system.printable import print_text


@click.command(name="explain")
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@controller_option()
def command(job: str, as_json: bool, controller: str | None) -> None:
    """Explain why a job was treated as it was. JOB is an id or a name."""
    data = ask_controller({"kind": "explain", "job": job}, controller)
    data["alternative"] = (
        None if data["ended"] else alternative(ask_controller({"kind": "scenario"}, controller), data["job"])
    )
    if as_json:
        print_text(json.dumps(data, indent=2), lines=True)
    else:
        show(status_tables.explanation(as_struct(data, Explanation)))
