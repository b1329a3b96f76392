"""The planner's input of this moment, as `unicronctl plan --live` asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from unicron_ctl.controller.api import privacy
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.plan import planning
from unicron_ctl.controller.plan.inputs import inputs, usable_nodes, why_fixed
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol.answer_schema import Scenario, ScenarioCluster, ScenarioJob
from unicron_ctl.shared.protocol.questions import NoArguments


def scenario(core: Core, store: Store, question: NoArguments, asker: Asker) -> Scenario:
    """The planner's input of this moment, in the structure of a scenario file (unicron_planner/problem/scenario.py)."""
    config, seen = core.config, core.view.slurm.seen
    running = [state for state in core.state.jobs.values() if not state.over and not why_fixed(core.view, state)]
    found = inputs(core.view, running)
    rates = [i.rate / i.measured_nodes for i in found if i.rate and i.measured_nodes]
    usual = sum(rates) / len(rates) if rates else planning.NOMINAL_RATE
    cluster = ScenarioCluster(
        nodes=len(usable_nodes(core.view, seen, running)) if seen else sum(i.nodes for i in found),
        mtbf_node_hours=config.mtbf_node_hours,
        transition_seconds=config.transition_seconds,
    )
    shown = [i for i in found if not privacy.hidden(core.view, core.state.jobs[i.job], asker)]
    return Scenario(cluster=cluster, job=[_job(core, i, usual, asker) for i in shown])


def _job(core: Core, i: planning.JobInput, usual: float, asker: Asker) -> ScenarioJob:
    full = asker.may_read(core.state.jobs[i.job])
    job = ScenarioJob(
        name=i.job,
        weight=i.weight,
        min_nodes=i.min_nodes,
        max_nodes=i.max_nodes,
        nodes=i.nodes,
        lost_worker=i.alive < i.nodes,
        owner=i.whose,
        unit=i.unit,
        keep=min(i.alive, i.unit),
        node_names=sorted(a.node for a in core.view.live.jobs[i.job].agents.values() if a.alive) if full else [],
    )
    if i.layouts:
        job.layouts = {name: _sizes(i, table) for name, table in i.layouts.items()}
        job.layout, job.transition = i.layout, {"restart": i.restart_seconds}
    else:
        job.flops = _sizes(i, planning.throughput(i, usual))
    if saved := planning.spares(i, usual, core.config.mtbf_node_hours):
        job.spares = _sizes(i, saved)
    return job


def _sizes(i: planning.JobInput, table: Mapping[int, float]) -> dict[str, float]:
    return {str(nodes): rate for nodes, rate in planning.in_blocks(i, table).items()}
