"""What is told of nodes."""

from __future__ import annotations

import msgspec
from msgspec.structs import asdict

from unicron_ctl.controller.api import privacy
from unicron_ctl.controller.api.job_answers import anomalies
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.controller.nodes import readmission
from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_ctl.shared.slurm.states import OCCUPIES


def visible_nodes(core: Core, asker: Asker, brief: bool = False) -> list[schema.Node]:
    """All nodes that Slurm shows, and those on which an agent speaks. brief: without what they have measured."""
    if not privacy.sees_nodes(core.view, asker):
        return []
    seen = core.view.slurm.seen
    users: dict[str, list[str]] = {}
    for e in seen.elements if seen else ():
        if e.node and e.state in OCCUPIES:
            users.setdefault(e.node, []).append(e.label)
    over = {job.job for job in core.state.jobs.values() if job.ended}  # nobody hears how their agents end
    agents = {view.node: view for view in core.view.live.agents() if view.alive and view.job not in over}
    names = seen.by_name if seen else {}
    odd = _anomalies_of_nodes(core) if asker.reads_all else {}
    mine = privacy.own_jobs(core.view, asker)
    waiting, asked = _waiting(core), core.view.suspicions.nodes()
    listed = []
    for name in sorted({*names, *agents}):
        info, view, known = names.get(name), agents.get(name), core.state.nodes.get(name)
        checks = readmission.node_checks(core.view, core.slurm.gate, name) if asker.reads_all else schema.NodeChecks()
        node = schema.Node(
            node=name,
            partitions=list(info.partitions) if info else [],
            states=sorted(info.states) if info else [],
            healthy=info.healthy if info else view is not None,
            reason=info.reason if info else "",
            used_by=users.get(name, [f"{view.job}_{view.element}"] if view else []),
            downed_by_unicron=bool(known and known.downed),
            lost_at=known.lost_at if known and known.lost_at else None,
            last_heard=view.last_heard if view else None,
            asked_since=asked.get(name),
            anomalies=odd.get(name, []),
            spare_of=waiting.get(name, {}),
            metrics=_metrics(core, view.job, view.element) if view and asker.reads_all and not brief else {},
            last_event=_last_event(known) if asker.reads_all else None,
            **asdict(checks),
        )
        listed.append(privacy.of_node(core.view, node, asker, mine))
    return listed


def _waiting(core: Core) -> dict[str, dict[str, str]]:
    """Node -> JOB_ELEMENT of the hot spares on it -> ready or starting."""
    found: dict[str, dict[str, str]] = {}
    for state in core.state.jobs.values():
        view = core.view.job(state)
        for element, how in (spares.standing(view) if not state.over else {}).items():
            found.setdefault(view.agents[element].node, {})[state.label(element)] = how
    return found


def _last_event(known: NodeState | None) -> schema.NodeEvent | None:
    """What the node's kernel, memory cgroup or links said last."""
    if known is None or not known.events:
        return None
    last = known.events[-1]
    return msgspec.convert(asdict(last.said) | {"time": last.time}, schema.NodeEvent)


def _anomalies_of_nodes(core: Core) -> dict[str, list[schema.Anomaly]]:
    """The present anomalies of all jobs, by node."""
    found: dict[str, list[schema.Anomaly]] = {}
    for job in core.runtimes:
        for item in anomalies(core, job):
            for name in item.nodes:
                found.setdefault(name, []).append(item)
    return found


def _metrics(core: Core, job: str, element: int) -> dict[str, float]:
    """What the element's agent measured last on its node."""
    runtime = core.runtimes.get(job)
    sample = runtime.sensors.peers.samples.get(element) if runtime else None
    return sample.values if sample else {}
