"""The planner's input of this moment, as `unicronctl plan --live` asks for it."""

from __future__ import annotations

from typing import Any

from unicron.ctl.controller.api import privacy
from unicron.ctl.controller.core.core import Core
from unicron.ctl.controller.log.store import Store
from unicron.ctl.controller.model.asker import Asker
from unicron.ctl.controller.plan import planning
from unicron.ctl.controller.plan.inputs import inputs, usable_nodes


def scenario(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """The planner's input of this moment, in the structure of a scenario file (planner/problem/scenario.py)."""
    config, seen = core.config, core.view.slurm.seen
    running = [state for state in core.state.jobs.values() if not state.over]
    found = inputs(core.view, running)
    count = len(usable_nodes(core.view, seen, running)) if seen else sum(i.nodes for i in found)
    rates = [i.rate / i.measured_nodes for i in found if i.rate and i.measured_nodes]
    usual = sum(rates) / len(rates) if rates else planning.UNMEASURED
    return {
        "cluster": {
            "nodes": count,
            "mtbf_node_hours": config.mtbf_node_hours,
            "transition_seconds": config.transition_seconds,
        },
        "job": [
            {
                "name": i.job,
                "weight": i.weight,
                "min_nodes": i.min_nodes,
                "max_nodes": i.max_nodes,
                "nodes": i.nodes,
                "lost_worker": i.alive < i.nodes,
                "owner": i.whose,
                "unit": i.unit,
                "keep": min(i.alive, i.unit),
                "node_names": sorted(a.node for a in core.view.live.jobs[i.job].agents.values() if a.alive)
                if asker.may_order(core.state.jobs[i.job])
                else [],
                **_throughputs(i, usual),
                **_saved(i, usual, config.mtbf_node_hours),
            }
            for i in found
            if not privacy.hidden(core.view, core.state.jobs[i.job], asker)
        ],
    }


def _throughputs(i: planning.JobInput, usual: float) -> dict[str, Any]:
    """What the job can do by node count, and by layout where it has several."""
    if not i.layouts:
        return {"flops": {str(n): rate for n, rate in planning.throughput(i, usual).items()}}
    tables = {name: {str(n): rate for n, rate in table.items()} for name, table in i.layouts.items()}
    return {"layouts": tables, "layout": i.layout, "transition": {"restart": i.restart_seconds}}


def _saved(i: planning.JobInput, usual: float, mtbf_node_hours: float) -> dict[str, Any]:
    """What its hot spares save, by node count."""
    found = planning.spares(i, usual, mtbf_node_hours)
    return {"spares": {str(nodes): saved for nodes, saved in found.items()}} if found else {}
