"""`unicronctl pause` and `resume`: nothing changes in Slurm for a while, and jobs heal on their own nodes."""

from __future__ import annotations

import click

from unicron_ctl.shared.commands.options import DURATION, controller_option, print_json
from unicron_ctl.shared.commands.status_tables import paused_lines
from unicron_ctl.shared.protocol.answer_schema import PauseState
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text

LONGEST = 365 * 86400.0  # the controller has the same limit


@click.command(name="pause")
@click.argument("partition", default="")
@click.option("--for", "seconds", type=DURATION, help="Such as 30m, 2h, 1d [default: until resume].")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
@controller_option()
def command(partition: str, seconds: float | None, as_json: bool, controller: str | None) -> None:
    """Change nothing in Slurm, in PARTITION or at all.

    Jobs heal on their own nodes, and `unicronctl events` says what would be done. A restart of unicrond does not end
    it. The health checks that slurmd runs on the nodes drain bad nodes all the same.
    """
    if seconds is not None and not 1.0 <= seconds <= LONGEST:
        raise UserError("--for is 1s to 365d; without it the pause lasts until `unicronctl resume`", WRONG_USE)
    _show({"kind": "pause", "partition": partition, "seconds": seconds or 0.0}, as_json, controller)


@click.command(name="resume")
@click.argument("partition", default="")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
@controller_option()
def resume(partition: str, as_json: bool, controller: str | None) -> None:
    """End a pause of PARTITION, or all: the modes of unicron.toml count again."""
    _show({"kind": "resume", "partition": partition}, as_json, controller)


def _show(order: dict[str, object], as_json: bool, controller: str | None) -> None:
    answer = ask_controller(order, controller)
    if as_json:
        print_json(answer)
        return
    state = as_struct(answer, PauseState)
    for line in paused_lines(state.until) or ["nothing is paused"]:
        print_text(line)
    print_text(", ".join(f"{name}: {mode}" for name, mode in state.modes.items()))
