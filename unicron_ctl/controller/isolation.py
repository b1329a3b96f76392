"""How many living nodes may be set down without an admin, and which ones need one.

A detector that is wrong about one node is wrong about many: a bad rule or a fault of the switch must not take the
cluster out of service. Nodes whose slurmd does not answer are not counted, for they are lost and nobody decided that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from detector.severity import Severity
from unicron_ctl.controller.placement import Action
from unicron_ctl.controller.state import JobState
from unicron_ctl.slurm.client import NodeInfo

if TYPE_CHECKING:
    from unicron_ctl.config import ControllerConfig
    from unicron_ctl.controller.engine import Engine


def allowed(config: ControllerConfig, cluster_nodes: int) -> int:
    """How many nodes may be set down within the window."""
    return max(config.max_isolated_nodes, int(config.max_isolated_share * cluster_nodes))


def withheld(
    node: str,
    isolated: Mapping[str, Mapping[str, Any]],
    cluster_nodes: int,
    job: str,
    job_nodes: Collection[str],
    config: ControllerConfig,
    now: float,
) -> str:
    """Why the node must not be set down now, and what to do; empty when it may be. Pure.

    isolated: node -> {"at", "job"} of those that were set down and not given back since. job_nodes: where the job runs.
    """
    window = config.isolation_window_seconds
    recent = {name: item for name, item in isolated.items() if now - item["at"] < window and name != node}
    most = allowed(config, cluster_nodes)
    todo = f"look at it, then `scontrol update NodeName={node} State=DRAIN Reason=...`, or raise the limit"
    if len(recent) >= most:
        return (
            f"{_names(recent)} set down within {window:g} s, and no more than {most} of {cluster_nodes} nodes "
            f"may be (max_isolated_nodes, max_isolated_share): {todo}"
        )
    own = {name: item for name, item in recent.items() if item["job"] == job}
    size = len({*job_nodes, *own, node})
    most = max(1, int(config.max_isolated_job_share * size))
    if len(own) >= most:
        return (
            f"of job {job}, {_names(own)} set down within {window:g} s, and no more than {most} of its {size} nodes "
            f"may be (max_isolated_job_share): {todo}"
        )
    return ""


def _names(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{shown} {'were' if len(names) > 1 else 'was'}" if names else "none was"


class Isolation:
    """One per engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.refused: dict[str, dict[str, Any]] = {}  # nodes that Slurm does not set down -> {"since", "job", "reason"}

    def may(self, job: JobState, node: NodeInfo, failure: int, reason: str) -> bool:
        """Whether the living node may be set down; records the decision."""
        engine = self._engine
        if "DRAIN" in node.states and "DOWN" not in node.states:
            text = f"{node.name} is drained ({node.reason or 'no reason given'}): that is an admin's matter"
            engine.emit("failure_action", job.job, failure=failure, text=text)
            return False
        if "DOWN" in node.states or node.name in engine.cluster.put_aside() or engine.config.observe:
            return True
        here = {record.node for record in job.agents.values() if not record.gone}
        count = len(engine.cluster.seen.nodes) if engine.cluster.seen else 0
        why = withheld(node.name, engine.state.isolated, count, job.job, here, engine.config, engine.now)
        if not why:
            engine.emit("isolated", job.job, node=node.name, reason=f"{node.name} is put aside: {reason}")
            return True
        record = engine.state.failure(job.job, failure)
        engine.emit("failure_action", job.job, failure=failure, text=f"{node.name} is not set down: {why}")
        engine.emit(
            "isolation_withheld",
            job.job,
            node=node.name,
            slots=record["slots"] if record else [],
            reason=f"{node.name} stays in service although {reason}: {why}",
        )
        return False

    def on_refused(self, action: Action, error: str) -> None:
        """The node gets no work of ours all the same, and Slurm is asked again."""
        engine = self._engine
        if action.node in self.refused:
            return
        reason = (
            f"Slurm does not set {action.node} down ({error}): it gets no work here, but other jobs may run on it. "
            f"Set it down by hand: `scontrol update NodeName={action.node} State=DOWN Reason=...`"
        )
        self.refused[action.node] = {"since": engine.now, "job": action.job, "reason": reason}
        engine.emit(
            "action_failed",
            action.job,
            node=action.node,
            slot=-1,
            failed="isolate",
            action="isolate",
            severity=int(Severity.SEV1),
            reason=reason,
        )

    def attention(self) -> list[dict[str, Any]]:
        """Nodes for which an admin is needed: node, since, job, reason."""
        engine = self._engine
        window = engine.config.isolation_window_seconds
        found = [
            {"node": node, **item}
            for node, item in sorted(engine.state.withheld.items())
            if engine.now - item["since"] < window
            and (info := engine.cluster.node_info(node)) is not None
            and info.healthy
        ]
        return found + [{"node": node, **item} for node, item in sorted(self.refused.items())]
