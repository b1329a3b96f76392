"""The answers about nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from unicron_ctl.controller.api import privacy
from unicron_ctl.controller.api.job_answers import anomalies
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.controller.nodes import readmission
from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo
from unicron_ctl.shared.slurm.states import OCCUPIES


def visible_nodes(core: Core, asker: Asker, brief: bool = False) -> list[schema.Node]:
    """Return all nodes that Slurm shows, and those with a living agent. brief: without their metrics."""
    if not privacy.sees_nodes(core.view, asker):
        return []
    seen = core.view.slurm.seen
    ended = {job.job for job in core.state.jobs.values() if job.ended}  # their agents end without telling
    facts = _Facts(
        infos=seen.by_name if seen else {},
        agents={view.node: view for view in core.view.live.agents() if view.alive and view.job not in ended},
        users=_users(seen.elements if seen else ()),
        spares=_waiting(core),
        asked=core.view.suspicions.nodes(),
        anomalies=_anomalies_of_nodes(core) if asker.reads_all else {},
    )
    mine = {name for name, job in core.state.jobs.items() if asker.may_read(job)}
    listed = (_node(core, name, facts, asker, brief) for name in sorted({*facts.infos, *facts.agents}))
    return [privacy.of_node(core.view, node, asker, mine) for node in listed]


class _Facts(NamedTuple):
    """Facts by node, found for all nodes at once."""

    infos: Mapping[str, NodeInfo]
    agents: Mapping[str, AgentView]
    users: Mapping[str, list[str]]
    spares: Mapping[str, dict[str, str]]
    asked: Mapping[str, float]
    anomalies: Mapping[str, list[schema.Anomaly]]


def _node(core: Core, name: str, facts: _Facts, asker: Asker, brief: bool) -> schema.Node:
    info, view, state = facts.infos.get(name), facts.agents.get(name), core.state.nodes.get(name)
    of_agent = [f"{view.job}_{view.element}"] if view else []
    checks, metrics, last_event = schema.NodeChecks(), dict[str, float](), None
    if asker.reads_all:
        checks, last_event = readmission.node_checks(core.view, core.slurm.gate, name), _last_event(state)
        metrics = _metrics(core, view) if view and not brief else {}
    return schema.Node(
        node=name,
        partitions=list(info.partitions) if info else [],
        states=sorted(info.states) if info else [],
        healthy=info.healthy if info else view is not None,
        reason=info.reason if info else "",
        used_by=facts.users.get(name, of_agent),
        downed_by_unicron=bool(state and state.downed),
        lost_at=state.lost_at or None if state else None,
        last_heard=view.last_heard if view else None,
        asked_since=facts.asked.get(name),
        anomalies=facts.anomalies.get(name, []),
        spare_of=facts.spares.get(name, {}),
        metrics=metrics,
        last_event=last_event,
        **asdict(checks),
    )


def _users(elements: Iterable[ElementInfo]) -> dict[str, list[str]]:
    """Return by node: the elements that occupy it."""
    users: dict[str, list[str]] = {}
    for e in elements:
        if e.node and e.state in OCCUPIES:
            users.setdefault(e.node, []).append(e.label)
    return users


def _waiting(core: Core) -> dict[str, dict[str, str]]:
    """Return by node: the hot spares on it, each as JOB_ELEMENT -> ready or starting."""
    waiting: dict[str, dict[str, str]] = {}
    for state in core.state.jobs.values():
        view = core.view.job(state)
        for element, how in (spares.standing(view) if not state.over else {}).items():
            waiting.setdefault(view.agents[element].node, {})[state.label(element)] = how
    return waiting


def _last_event(state: NodeState | None) -> schema.NodeEvent | None:
    if state is None or not state.events:
        return None
    last = state.events[-1]
    return msgspec.convert(asdict(last.said) | {"time": last.time}, schema.NodeEvent)


def _anomalies_of_nodes(core: Core) -> dict[str, list[schema.Anomaly]]:
    """Return the present anomalies of all jobs, by node."""
    by_node: dict[str, list[schema.Anomaly]] = {}
    for job in core.runtimes:
        for item in anomalies(core, job):
            for name in item.nodes:
                by_node.setdefault(name, []).append(item)
    return by_node


def _metrics(core: Core, view: AgentView) -> dict[str, float]:
    runtime = core.runtimes.get(view.job)
    sample = runtime.sensors.peers.samples.get(view.element) if runtime else None
    return sample.values if sample else {}
