"""What is known of the nodes' health, and whether a node that was set down may come back.

Reports come from the admission program (:mod:`unicron_ctl.node.admission`), which Slurm starts on every node whose slurmd
answers, also on one that is down and has no agent. They come as orders with a munge credential, not as hints or from
agents: a datagram can be forged, and an agent is its user's process, who must not be able to call a node sound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unicron_ctl.controller.placement import OURS, Action
from unicron_ctl.controller.state import HealthReport, NodeState
from unicron_ctl.slurm.client import NodeInfo

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

REFRESH_SECONDS = 3600.0  # a report that says nothing new is recorded this often; in between only its age is kept
VERDICTS = ("good", "warning", "unknown", "bad")
SOURCES = ("prolog", "interval", "pair-test")
PASSING = ("good", "warning")
# slurmd runs its checks as it starts, before or after the moment that Slurm calls its start, which has whole seconds.
START_SLACK = 5.0
SUSPECT_SECONDS = 86400.0  # as long as a flapping node is remembered (detector.escalation.Policy.flap_window)


@dataclass(frozen=True)
class Admission:
    """Whether the node may come back now. verified: a check of its hardware says so."""

    admit: bool
    verified: bool
    reason: str


def decide(
    policy: str,
    limit: float,
    report: HealthReport | None,
    anybody_reports: bool,
    slurmd_start: float,
    waited: float,
) -> Admission:
    """May a node that was set down and whose slurmd was started again since get work? Pure.

    report: its last one. anybody_reports: some node of the cluster ever did. waited: seconds since the controller first
    saw the new slurmd. Times of report and slurmd are the node's own clock.
    """
    if policy == "off":
        return Admission(True, True, "its slurmd has been started again since, and admission is off")
    if report is not None and report.verdict == "bad":
        return Admission(False, False, f"its hardware is proven bad: {report.reason}")
    if report is not None and report.checked_at >= slurmd_start - START_SLACK and report.verdict in PASSING:
        return Admission(True, True, "its slurmd has been started again since, and it has passed the admission checks")
    missing = "no admission check has passed since its slurmd was started again"
    if policy == "require":
        return Admission(False, False, f'{missing}, and admission = "require"')
    if not anybody_reports:
        return Admission(True, False, f"{missing}: no node of this cluster reports its health")
    if waited >= limit:
        return Admission(True, False, f"{missing} {waited:.0f} s ago: it comes back unverified")
    return Admission(False, False, f"{missing}: waiting for one for {limit:g} s")


class Gate:
    """One per cluster: the reports, and the nodes that wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._heard: dict[str, float] = {}
        self._back: dict[str, tuple[float, float]] = {}  # node -> (its slurmd's start, when that was first seen)
        self._said: dict[str, str] = {}
        self._verified: dict[str, bool] = {}

    def take(self, node: str, source: str, verdict: str, reason: str, at: float) -> None:
        """A report that was checked at the edge; `at` is the node's clock."""
        engine = self._engine
        known = engine.state.nodes.get(node) or NodeState()
        last = known.paired if source == "pair-test" else known.health
        if source != "pair-test":
            self._heard[node] = engine.now
        news = last is None or _gist(last.verdict, last.reason) != _gist(verdict, reason)
        if news or known.downed or known.unverified or source == "pair-test" or engine.now - last.at >= REFRESH_SECONDS:
            engine.emit("node_health", node=node, source=source, verdict=verdict, reason=reason, checked_at=at)
        if known.downed:
            engine.cluster.hurry()

    def nodes_back(self) -> list[Action]:
        """Nodes that we set down and that may come back; those that somebody else gave back are noted."""
        engine, found = self._engine, []
        for name, known in list(engine.state.nodes.items()):
            node = engine.cluster.node_info(name)
            if not known.downed or node is None:
                continue
            if node.healthy and not engine.cluster.being_set_down(name):
                reason = f"{name} was given back to Slurm by somebody else"
                engine.emit("node_resumed", node=name, reason=reason)
            elif (
                _ours(node)
                and "NOT_RESPONDING" not in node.states
                and node.slurmd_start is not None
                and node.slurmd_start > known.lost_at > 0
            ):
                admission = self.ask(name, node.slurmd_start)
                if admission.admit:
                    self._verified[name] = admission.verified
                    found.append(Action("resume", "", -1, name, f"{name} was set down here; {admission.reason}"))
        return found

    def verified(self, node: str) -> bool:
        """Whether checks had passed when it was decided to resume the node."""
        return self._verified.pop(node, True)

    def ask(self, node: str, slurmd_start: float) -> Admission:
        """May the node come back? Says once why not."""
        engine = self._engine
        start, since = self._back.get(node, (0.0, 0.0))
        if start != slurmd_start:
            since = engine.now
            self._back[node] = slurmd_start, since
        nodes = engine.state.nodes
        found = decide(
            engine.config.admission,
            engine.config.admission_seconds,
            nodes[node].health if node in nodes else None,
            any(known.health for known in nodes.values()),
            slurmd_start,
            engine.now - since,
        )
        if not found.admit and self._said.get(node) != found.reason:
            engine.emit("admission_waits", node=node, reason=f"{node} stays down: {found.reason}")
        self._said[node] = "" if found.admit else found.reason
        return found

    def waiting(self, node: str) -> str:
        """Why the node is not given back yet, empty when it does not wait."""
        return self._said.get(node, "")

    def view(self, node: str) -> dict[str, Any]:
        """For `unicronctl nodes`: health, unverified, suspect, admission."""
        known = self._engine.state.nodes.get(node) or NodeState()
        return {
            "health": self._report(known.health, self._heard.get(node, 0.0)),
            "pair_test": self._report(known.paired, 0.0),
            "unverified": known.unverified,
            "suspect": self.suspect(node),
            "admission": self.waiting(node) if known.downed else "",
        }

    def suspect(self, node: str) -> str:
        """Why the node should be tested, empty when nothing speaks against it. A passed paired test clears it."""
        engine = self._engine
        known = engine.state.nodes.get(node) or NodeState()
        cleared = known.paired.at if known.paired and known.paired.verdict == "good" else 0.0
        if known.suspected_at > cleared and engine.now - known.suspected_at < SUSPECT_SECONDS:
            return known.suspicion
        times = engine.state.history.node_moments(node, engine.now)
        last = max((fault.time for fault in engine.state.history.by_node.get(node, ())), default=0.0)
        if times >= 2 and last > cleared:
            return f"{times} faults of hardware or network in 24 h"
        return ""

    @staticmethod
    def _report(report: HealthReport | None, heard: float) -> dict[str, Any] | None:
        if report is None:
            return None
        return {
            "verdict": report.verdict,
            "reason": report.reason,
            "source": report.source,
            "at": max(report.at, heard),
        }


def _gist(verdict: str, reason: str) -> tuple[str, str]:
    """What makes two reports different: times and sizes in a reason change at every check."""
    return verdict, re.sub(r"[-+\d.]+", "", reason)


def _ours(node: NodeInfo) -> bool:
    return "DOWN" in node.states and "DRAIN" not in node.states and node.reason.startswith(f"{OURS}[")


def pair_test_command(node: str) -> str:
    """What an admin can do about a suspect."""
    return f"unicronctl pair-test --nodes {node}"


def checked(args: dict[str, Any]) -> tuple[str, str, str, str, float] | str:
    """(node, source, verdict, reason, at) of a report, or what is wrong with it."""
    node, source, verdict, reason = (str(args.get(key, "")) for key in ("node", "source", "verdict", "reason"))
    at = args.get("at")
    if not node or len(node) > 256:
        return "health: a report must name its node"
    if source not in SOURCES or verdict not in VERDICTS:
        return f"health: source is one of {', '.join(SOURCES)}, verdict one of {', '.join(VERDICTS)}"
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e11:
        return "health: at must be seconds since the epoch"
    return node, source, verdict, " ".join(reason.split())[:400], float(at)
