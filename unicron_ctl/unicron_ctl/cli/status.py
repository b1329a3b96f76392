"""`unicronctl status`: jobs, nodes and the last failures.

`unicronctl schema status` describes its JSON.
"""

from __future__ import annotations

import json

import click

from unicron_ctl.cli.filter_options import Filters, filter_options
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.commands.options import controller_option
from unicron_ctl.shared.protocol.answer_schema import Status
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.columns import show, terminal_width
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text

INTERVAL = 2.0  # seconds


@click.command(name="status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="The same as `unicronctl top`.")
@filter_options("user", "partition", "nodes", "since")
@controller_option()
def command(as_json: bool, watch: bool, filters: Filters, controller: str | None) -> int:
    """Show what needs an admin, jobs, nodes and the last failures.

    The options choose jobs, nodes and failures; what needs an admin is always said. The exit status is 3 if something
    does.
    """
    if as_json and watch:
        raise UserError("--json and --watch exclude each other: `unicronctl events -f --json` streams", WRONG_USE)
    if watch:
        from unicron_ctl.cli import top

        top.watch(INTERVAL, filters, controller)
        return 0
    data = ask_controller({"kind": "status", **filters}, controller)
    if as_json:
        print_text(json.dumps(data, indent=2), lines=True)
    else:
        show(status_tables.status(as_struct(data, Status), terminal_width() is not None, bool(filters)))
    return PROBLEM_FOUND if data["attention"] else 0
