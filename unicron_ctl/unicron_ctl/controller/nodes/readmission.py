"""The nodes' health, and whether a node that was taken out of service may come back.

Reports come from the admission program (:mod:`unicron_ctl.nodes.admission`), which Slurm starts on every node whose
slurmd answers, even on one that is down and has no agent. They carry a munge credential: a datagram can be forged, and
an agent is its user's process, which must not be able to declare a node sound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unicron_ctl.controller.model.node_state import PASSING, HealthReport, NodeState
from unicron_ctl.controller.model.requests import Action, Knock
from unicron_ctl.controller.model.view import SUSPECT_SECONDS, Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import answer_schema
from unicron_ctl.shared.slurm.drains import ours
from unicron_ctl.shared.slurm.slurm_client import NodeInfo

REFRESH_SECONDS = 3600.0  # a report without news is recorded this often; in between only its age is kept
# slurmd runs its checks as it starts, before or after the time that Slurm reports as its start, in whole seconds.
START_SLACK = 5.0
REACH_SECONDS = 5.0  # between two tries to reach the slurmd of a node that was set down
UNKNOWN = answer_schema.NodeChecks(unverified=False)  # of a node without anything to report
BACK_SECONDS = 10.0  # for which slurmd must have answered; then the node is back although nobody restarted it


@dataclass(frozen=True)
class Admission:
    """The decision whether a node may come back now."""

    admit: bool
    verified: bool
    """A check of its hardware says so."""
    reason: str


def decide(
    policy: str,
    limit: float,
    report: HealthReport | None,
    anybody_reports: bool,
    slurmd_start: float,
    waited: float,
) -> Admission:
    """Decide whether a node that was set down may get work after its slurmd was started again. Pure.

    report: its last one. anybody_reports: some node of the cluster ever did. waited: seconds since the controller first
    saw the new slurmd. Times of report and slurmd are by the node's own clock.
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
    """The memory of reports and of nodes that wait; lost with the process."""

    heard: dict[str, float] = field(default_factory=dict)
    """node -> when its last report came."""
    back: dict[str, tuple[float, float]] = field(default_factory=dict)
    """node -> (its slurmd's start, when that was first seen)."""
    tried: dict[str, float] = field(default_factory=dict)
    """node -> when its slurmd was last tried to be reached."""
    reached: dict[str, float] = field(default_factory=dict)
    """node -> since when its slurmd has answered each time."""
    waiting: dict[str, str] = field(default_factory=dict)
    """node -> why it is not given back yet."""
    verified: dict[str, bool] = field(default_factory=dict)
    """node -> whether checks had passed when it was decided to resume it."""


class Report(msgspec.Struct, kw_only=True):
    """A node's health as an admission check or a paired test reports it."""

    node: Annotated[str, Meta(min_length=1, max_length=256)]
    source: Literal["prolog", "interval", "pair-test"]
    verdict: Literal["good", "warning", "unknown", "bad"]
    reason: str = ""
    at: Annotated[float, Meta(ge=0, lt=1e11)]  # by the node's clock
    drain: bool = False  # if bad, the node should be drained

    def __post_init__(self) -> None:
        self.reason = " ".join(self.reason.split())[:400]


def on_health_report(view: View, gate: Gate, report: Report) -> Outcome:
    """Record a report if it has news."""
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
            drain=report.drain,
            reason=report.reason,
        )
        out.record(None, record)
    return out


def nodes_back(view: View, gate: Gate, out: Outcome) -> list[Action]:
    """Return requests to resume nodes that were set down here and may come back; record those that others gave back."""
    found = []
    for name in sorted(view.state.out_of_service):
        known, node = view.state.node(name), view.slurm.node(name)
        if not known.downed or node is None:
            continue
        if node.healthy and not known.going_down:
            if ("resume", "", -1, name) in view.state.intents:
                continue  # requested here
            if view.slurm.seen is None or view.slurm.seen.asked_at <= known.out_at:
                continue  # Slurm was asked before it had taken the node out
            reason = f"{name} was given back to Slurm by somebody else"
            out.record(None, records.NodeResumed(node=name, by_others=True, reason=reason))
            continue
        admission = _back(view, gate, node, out) if ours(node) and not known.going_down else None
        if admission is not None and admission.admit:
            gate.verified[name] = admission.verified
            found.append(Action("resume", "", -1, name, f"{name} was taken out of service here; {admission.reason}"))
    return found


def _back(view: View, gate: Gate, node: NodeInfo, out: Outcome) -> Admission | None:
    """Return whether a node that was taken out here may come back; None while it is not there."""
    known = view.state.node(node.name)
    if known.proven_bad:
        return _judge_mended(known)
    if "NOT_RESPONDING" not in node.states and node.slurmd_start is not None and _another_slurmd(known, node):
        return _judge_return(view, gate, node.name, node.slurmd_start, out)
    if view.now - gate.tried.get(node.name, -REACH_SECONDS) >= REACH_SECONDS:
        gate.tried[node.name] = view.now
        out.requests.append(Knock(node.name, f"{node.address}:{node.port}"))
    since = gate.reached.get(node.name, 0.0)
    if since <= known.downed_at or view.now - since < BACK_SECONDS:
        return None
    return _judge_return(view, gate, node.name, since, out, heard=True)


def _another_slurmd(known: NodeState, node: NodeInfo) -> bool:
    """Whether the slurmd that Slurm shows is not the one that was lost. Both times are Slurm's if possible: the clocks
    of this host and of the node may differ, and may be set."""
    if known.lost_slurmd:
        return node.slurmd_start != known.lost_slurmd
    return (node.slurmd_start or 0.0) > known.lost_at > 0


def _judge_mended(known: NodeState) -> Admission:
    """Decide about a node that was drained as proven bad: its checks must have passed since then, and so must a pair
    test if one proved it bad."""
    report, paired = known.health, known.paired
    if paired is not None and paired.verdict == "bad":
        return Admission(False, False, f"its pair test failed: {paired.reason}")
    if report is None or report.verdict not in PASSING or report.at <= known.downed_at:
        return Admission(False, False, "no admission check has passed since it was drained")
    return Admission(True, True, "it has passed the admission checks since")


def on_knock(view: View, gate: Gate, node: str, answers: bool) -> None:
    """Take in whether the slurmd of a node that was set down answered."""
    if answers:
        since = gate.reached.get(node, 0.0)
        gate.reached[node] = since if since > view.state.node(node).downed_at else view.now
    else:
        gate.reached.pop(node, None)


def _judge_return(
    view: View, gate: Gate, node: str, slurmd_start: float, out: Outcome, heard: bool = False
) -> Admission:
    """Decide whether the node may come back; record once why not. heard: `slurmd_start` is when it was heard again, by
    this controller's clock."""
    report = view.state.node(node).health
    if report is not None and heard:
        report = replace(report, checked_at=report.at)
    start, since = gate.back.get(node, (0.0, 0.0))
    if start != slurmd_start:
        since = view.now
        gate.back[node] = slurmd_start, since
    found = decide(
        view.config.admission,
        view.config.admission_seconds,
        report,
        any(known.health for known in view.state.nodes.values()),
        slurmd_start,
        view.now - since,
    )
    if not found.admit and gate.waiting.get(node) != found.reason:
        stays = "drained" if view.state.node(node).drained else "down"
        out.record(None, records.AdmissionWaits(node=node, reason=f"{node} stays {stays}: {found.reason}"))
    gate.waiting[node] = "" if found.admit else found.reason
    return found


def node_checks(view: View, gate: Gate, node: str) -> answer_schema.NodeChecks:
    """Return the fields of `unicronctl nodes` that only admins see."""
    if node not in view.state.nodes and node not in view.state.history.by_node:
        return UNKNOWN
    known = view.state.node(node)
    return answer_schema.NodeChecks(
        health=_plain(known.health, gate.heard.get(node, 0.0)),
        pair_test=_plain(known.paired, 0.0),
        unverified=known.unverified,
        suspect=suspect(view, node),
        admission=gate.waiting.get(node, "") if known.downed else "",
    )


def suspect(view: View, node: str) -> str:
    """Return why the node should be tested; empty if nothing speaks against it. A passed paired test clears it."""
    known, history = view.state.node(node), view.state.history
    if known.downed and known.proven_bad:
        return ""
    paired = known.paired
    if paired is not None and paired.verdict == "warning" and view.now - paired.at < SUSPECT_SECONDS:
        return f"slow in a pair test: {paired.reason}"
    cleared = paired.at if paired is not None and paired.verdict == "good" else 0.0
    if known.suspected_at > cleared and view.now - known.suspected_at < SUSPECT_SECONDS:
        return known.suspicion
    faults = history.of_node(node)
    if not faults:
        return ""
    times = history.node_moments(node, view.now)
    last = max(fault.time for fault in faults)
    if times >= 2 and last > cleared:
        return f"{times} faults of hardware or network in 24 h"
    return ""


def _plain(report: HealthReport | None, heard: float) -> answer_schema.HealthReport | None:
    if report is None:
        return None
    at = max(report.at, heard)
    return answer_schema.HealthReport(verdict=report.verdict, reason=report.reason, source=report.source, at=at)


def _gist(verdict: str, reason: str) -> tuple[str, str]:
    """Return the part of a report that counts as news: times and sizes in a reason change at every check."""
    return verdict, re.sub(r"[-+\d.]+", "", reason)


def pair_test_command(node: str) -> str:
    """Return the command with which an admin tests a suspect."""
    return f"unicronctl pair-test --nodes {node}"
