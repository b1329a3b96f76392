"""`unicronctl plan`: the best assignment of nodes to jobs, for a scenario file or for the cluster as it is now."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click
import msgspec

from unicron_ctl.shared.commands.options import controller_option, print_json
from unicron_ctl.shared.protocol.answer_schema import Ahead, Alternative, Assignment
from unicron_ctl.shared.system.columns import Listing, show
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_planner.ahead.lookahead import Lookahead
from unicron_planner.ahead.whatif import suppose_all
from unicron_planner.problem.objective import PlanError, Scenario
from unicron_planner.problem.scenario import check_minima, from_dict, load
from unicron_planner.solver.explain import explain
from unicron_planner.solver.plan import flops_text, nodes_text
from unicron_planner.solver.solve import solve


@click.command(name="plan")
@click.argument("scenario", required=False, type=click.Path(), metavar="SCENARIO.toml")
@click.option("--live", is_flag=True, help="Plan for the cluster as the controller sees it now.")
@click.option(
    "--if",
    "suppositions",
    multiple=True,
    metavar="TEXT",
    help='Suppose something first, for example --if "node n3 fails"; can be repeated.',
)
@click.option("--explain", "explained", metavar="JOB", help="Add why this job gets what it gets; the second-best plan.")
@click.option("--ahead", is_flag=True, help="Also list the plan for every next event.")
@click.option("--oversubscribed", is_flag=True, help="Allow minimum sizes that add up to more than the nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@controller_option("With --live: ")
def command(
    scenario: str | None,
    live: bool,
    suppositions: tuple[str, ...],
    explained: str | None,
    ahead: bool,
    oversubscribed: bool,
    as_json: bool,
    controller: str | None,
) -> None:
    """Compute the best assignment of nodes to jobs.

    The plan maximises the weighted achieved FLOP/s of the whole cluster over the time to the next failure, less what
    the transitions cost.
    """
    if bool(scenario) == live:
        raise click.UsageError("give either a SCENARIO.toml or --live")
    try:
        names: dict[str, str] = {}
        if scenario:
            before = load(scenario)
            if not oversubscribed:
                check_minima(before)
        else:
            before, names = _live(controller)
            suppositions = tuple(by_id(text, names) for text in suppositions)
            explained = explained and by_id(f"job {explained}", names).removeprefix("job ")
        _run(before, suppositions, explained, ahead, as_json, names)
    except PlanError as error:
        raise UserError(str(error), WRONG_USE) from None


def _live(controller: str | None) -> tuple[Scenario, dict[str, str]]:
    """Return the controller's scenario, which names jobs by their ids, and the jobs' names by id."""
    from unicron_ctl.shared.protocol.client import ask_controller

    scenario = from_dict(ask_controller({"kind": "scenario"}, controller))
    names = {job["job"]: job["name"] for job in ask_controller({"kind": "jobs"}, controller)}
    return scenario, {job.name: names[job.name] for job in scenario.jobs if job.name in names}


def by_id(text: str, names: Mapping[str, str]) -> str:
    """Replace "job NAME" in the text by "job ID". Raises PlanError if several jobs have the name."""
    for name in sorted(set(names.values()) - names.keys(), key=len, reverse=True):
        pattern = re.compile(rf"\bjob {re.escape(name)}(?!\S)", re.I)
        if pattern.search(text):
            ids = [job for job, job_name in names.items() if job_name == name]
            if len(ids) > 1:
                raise PlanError(f"{len(ids)} jobs are called {name}: say which by its id ({', '.join(ids)})")
            return pattern.sub(f"job {ids[0]}", text)
    return text


def _run(
    before: Scenario,
    suppositions: tuple[str, ...],
    explained: str | None,
    ahead: bool,
    as_json: bool,
    names: Mapping[str, str],
) -> None:
    scenario = suppose_all(before, suppositions)
    plan = solve(scenario)
    out = msgspec.convert(plan.to_dict(), Assignment)
    if explained:
        out.explanation = msgspec.convert(explain(scenario, explained, plan).to_dict(), Alternative)
    if ahead:
        table = Lookahead(scenario, pairs=False)
        out.ahead = [Ahead(event=list(event), assignment=each.assignment) for event, each in table.entries.items()]
    if as_json:
        print_json(out, indent=2)
    else:
        _show(scenario, out, names)


def _show(scenario: Scenario, out: Assignment, names: Mapping[str, str]) -> None:
    labels = {job.name: f"{job.name} {names[job.name]}" if job.name in names else job.name for job in scenario.jobs}
    table = Listing("job", "now", "plan", "why", cut=["job"])
    for job in scenario.jobs:
        table.add_row(labels[job.name], str(job.nodes), str(out.assignment[job.name]), out.reasons[job.name])
    show([table])
    print_text(f"{nodes_text(scenario.nodes)}, {out.spares} spare; {flops_text(out.waf)} weighted")
    if out.explanation:
        print_text(out.explanation.text, lines=True)
    for row in out.ahead or ():
        changed = [f"{name} {count}" for name, count in row.assignment.items()]
        print_text(f"if {' '.join(row.event)}: {', '.join(changed)}")
