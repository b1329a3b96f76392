"""`unicronctl retire`: gives back to Slurm all that Unicron has taken, before Unicron is removed."""

from __future__ import annotations

import click

from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.slurm import CommandLineClient, SlurmError
from unicron_ctl.shared.slurm.leftovers import leftovers, take_all_back
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.printable import print_text

SECONDS = 20.0  # for one Slurm command


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(dry_run: bool, yes: bool) -> None:
    """Give back to Slurm all that Unicron has taken: nodes, holds, comments.

    For the removal of Unicron, after unicrond was stopped on all its hosts: nothing is changed while one answers. It
    asks Slurm alone and needs a Slurm administrator. Nodes that the health checks proved bad return, too; each line
    says why a node was out.
    """
    client = CommandLineClient(timeout=SECONDS)
    try:
        remains = leftovers(client.nodes(), client.elements())
    except SlurmError as error:
        raise UserError(f"Slurm did not answer, and nothing was changed: {error}") from None
    for what in remains:
        print_text(what.line())
    if not remains:
        print_text("nothing of Unicron's is left in Slurm")
    if dry_run or not remains:
        return
    _refuse_beside_a_controller()
    if not yes:
        click.confirm("go on?", abort=True)
    if refused := take_all_back(client, remains):
        raise UserError("; ".join(refused))


def _refuse_beside_a_controller() -> None:
    """Raises UserError while a controller answers, on this host or as a standby on another."""
    try:
        ask_controller({"kind": "ping"})
    except UserError:
        return
    raise UserError("nothing was changed: a controller answers, and these are its nodes and holds; stop it first")
