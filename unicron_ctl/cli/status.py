"""`unicronctl status`: jobs, nodes and the last failures.

`unicronctl schema status` describes its JSON.
"""

from __future__ import annotations

import json
import time

import click

from unicron.ctl.cli import status_tables
from unicron.ctl.cli.options import controller_option
from unicron.ctl.protocol.answer_schema import Status
from unicron.ctl.protocol.client import as_struct, ask_controller
from unicron.ctl.system.columns import show
from unicron.ctl.system.errors import FOUND, WRONG_USE, UserError


@click.command(name="status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Keep the tables up to date until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, metavar="SECONDS", help="With --watch."
)
@controller_option()
def command(as_json: bool, watch: bool, interval: float, controller: str | None) -> int:
    """Show jobs, nodes and the last failures.

    The exit status is 3 if something needs an admin.
    """
    if as_json and watch:
        raise UserError("--json and --watch exclude each other: `unicronctl events -f --json` streams", WRONG_USE)
    data = ask_controller({"kind": "status"}, controller)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    elif not watch:
        show(status_tables.status(as_struct(data, Status)))
    else:
        _watch(as_struct(data, Status), interval, controller)
    return FOUND if data["attention"] else 0


def _watch(data: Status, interval: float, controller: str | None) -> None:
    from rich.live import Live

    try:
        with Live(status_tables.watched(data), console=status_tables.console(), auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    data = as_struct(ask_controller({"kind": "status"}, controller), Status)
                    live.update(status_tables.watched(data), refresh=True)
                except UserError as error:  # its death is no event for the jobs, so it is none here either
                    live.update(f"{error}\n(still trying)", refresh=True)
    except KeyboardInterrupt:
        return
