"""What is known of the nodes' health, and whether a node that was set down may come back.

Reports come from the admission program (:mod:`unicron_ctl.node.admission`), which Slurm starts on every node whose
slurmd answers, also on one that is down and has no agent. They come as orders with a munge credential, not as hints or
from agents: a datagram can be forged, and an agent is its user's process, who must not be able to call a node sound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.node import PASSING, HealthReport
from unicron_ctl.controller.model.requests import OURS, Action
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.slurm.client import NodeInfo

REFRESH_SECONDS = 3600.0  # a report that says nothing new is recorded this often; in between only its age is kept
VERDICTS = ("good", "warning", "unknown", "bad")
SOURCES = ("prolog", "interval", "pair-test")
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


@dataclass
class Gate:
    """What is remembered of reports and of nodes that wait; lost with the process."""

    heard: dict[str, float] = field(default_factory=dict)
    """node -> when its last report came."""
    back: dict[str, tuple[float, float]] = field(default_factory=dict)
    """node -> (its slurmd's start, when that was first seen)."""
    said: dict[str, str] = field(default_factory=dict)
    """node -> why it is not given back yet."""
    verified: dict[str, bool] = field(default_factory=dict)
    """node -> whether checks had passed when it was decided to resume it."""


def take(view: View, gate: Gate, report: Report) -> Outcome:
    """A report that was checked at the edge."""
    known = view.state.node(report.node)
    paired = report.source == "pair-test"
    last = known.paired if paired else known.health
    if not paired:
        gate.heard[report.node] = view.now
    out = Outcome(hurry=known.downed)
    news = last is None or _gist(last.verdict, last.reason) != _gist(report.verdict, report.reason)
    old = last is not None and view.now - last.at >= REFRESH_SECONDS
    if news or known.downed or known.unverified or paired or old:
        record = records.NodeHealth(
            node=report.node,
            source=report.source,
            verdict=report.verdict,
            checked_at=report.at,
            reason=report.reason,
        )
        out.record(None, record)
    return out


def nodes_back(view: View, gate: Gate, out: Outcome) -> list[Action]:
    """Nodes that we set down and that may come back; those that somebody else gave back are noted."""
    found = []
    for name in sorted(view.state.out_of_service):
        known, node = view.state.node(name), view.slurm.node(name)
        if not known.downed or node is None:
            continue
        if node.healthy and not known.going_down:
            out.record(None, records.NodeResumed(node=name, reason=f"{name} was given back to Slurm by somebody else"))
        elif (
            _ours(node)
            and "NOT_RESPONDING" not in node.states
            and node.slurmd_start is not None
            and node.slurmd_start > known.lost_at > 0
        ):
            admission = _ask(view, gate, name, node.slurmd_start, out)
            if admission.admit:
                gate.verified[name] = admission.verified
                found.append(Action("resume", "", -1, name, f"{name} was set down here; {admission.reason}"))
    return found


def _ask(view: View, gate: Gate, node: str, slurmd_start: float, out: Outcome) -> Admission:
    """May the node come back? Says once why not."""
    start, since = gate.back.get(node, (0.0, 0.0))
    if start != slurmd_start:
        since = view.now
        gate.back[node] = slurmd_start, since
    found = decide(
        view.config.admission,
        view.config.admission_seconds,
        view.state.node(node).health,
        any(known.health for known in view.state.nodes.values()),
        slurmd_start,
        view.now - since,
    )
    if not found.admit and gate.said.get(node) != found.reason:
        out.record(None, records.AdmissionWaits(node=node, reason=f"{node} stays down: {found.reason}"))
    gate.said[node] = "" if found.admit else found.reason
    return found


def shown(view: View, gate: Gate, node: str) -> dict[str, Any]:
    """For `unicronctl nodes`: health, pair_test, unverified, suspect, admission."""
    known = view.state.node(node)
    return {
        "health": _plain(known.health, gate.heard.get(node, 0.0)),
        "pair_test": _plain(known.paired, 0.0),
        "unverified": known.unverified,
        "suspect": suspect(view, node),
        "admission": gate.said.get(node, "") if known.downed else "",
    }


def suspect(view: View, node: str) -> str:
    """Why the node should be tested, empty when nothing speaks against it. A passed paired test clears it."""
    known, history = view.state.node(node), view.state.history
    cleared = known.paired.at if known.paired and known.paired.verdict == "good" else 0.0
    if known.suspected_at > cleared and view.now - known.suspected_at < SUSPECT_SECONDS:
        return known.suspicion
    times = history.node_moments(node, view.now)
    last = max((fault.time for fault in history.by_node.get(node, ())), default=0.0)
    if times >= 2 and last > cleared:
        return f"{times} faults of hardware or network in 24 h"
    return ""


def _plain(report: HealthReport | None, heard: float) -> dict[str, Any] | None:
    if report is None:
        return None
    at = max(report.at, heard)
    return {"verdict": report.verdict, "reason": report.reason, "source": report.source, "at": at}


def _gist(verdict: str, reason: str) -> tuple[str, str]:
    """What makes two reports different: times and sizes in a reason change at every check."""
    return verdict, re.sub(r"[-+\d.]+", "", reason)


def _ours(node: NodeInfo) -> bool:
    return "DOWN" in node.states and "DRAIN" not in node.states and node.reason.startswith(f"{OURS}[")


def pair_test_command(node: str) -> str:
    """What an admin can do about a suspect."""
    return f"unicronctl pair-test --nodes {node}"


@dataclass(frozen=True)
class Report:
    """A node's health as somebody reports it; `at` is the node's clock."""

    node: str
    source: str
    verdict: str
    reason: str
    at: float


def checked(args: dict[str, Any]) -> Report | str:
    """The report in these arguments, or what is wrong with it."""
    node, source, verdict, reason = (str(args.get(key, "")) for key in ("node", "source", "verdict", "reason"))
    at = args.get("at")
    if not node or len(node) > 256:
        return "health: a report must name its node"
    if source not in SOURCES or verdict not in VERDICTS:
        return f"health: source is one of {', '.join(SOURCES)}, verdict one of {', '.join(VERDICTS)}"
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e11:
        return "health: at must be seconds since the epoch"
    return Report(node, source, verdict, " ".join(reason.split())[:400], float(at))
