"""`unicronctl explain JOB`: why a job is treated as it is. `unicronctl schema explain` describes its JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from unicron_ctl.cli import status_tables
from unicron_ctl.cli.options import controller_option
from unicron_ctl.shared.protocol.answer_schema import Explanation
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.columns import show
from unicron_ctl.shared.system.printable import print_text


def alternative(scenario: Any, job: str) -> Any:
    """The planner's choice for the job at present and its second choice; None where it has none."""
    from unicron_planner.problem.objective import PlanError
    from unicron_planner.problem.scenario import from_dict
    from unicron_planner.solver.explain import explain

    try:
        return explain(from_dict(scenario), job).to_dict()
    except PlanError:  # the job has no nodes and no throughput yet
        return None


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
