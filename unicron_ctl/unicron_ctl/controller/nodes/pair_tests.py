"""Which node is tested in pairs now, and what follows (docs/design/detection.md). Pure.

A node is tested because a job left it or it failed (a *suspect*), or because it stood out among its peers. It is tested
only while it is idle, with idle nodes as partners, one at a time, and only if that is worth it: what such a test has
found so far, against the nodes that it keeps from others. A node that is proven bad is drained within the bounds
(:mod:`unicron_ctl.controller.nodes.isolation`); one that passes may have its job back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unicron_ctl.controller.model.cluster_state import PairResults
from unicron_ctl.controller.model.requests import TestPairs
from unicron_ctl.controller.model.view import SUSPECT_SECONDS, Listing, Outcome, View
from unicron_ctl.controller.nodes import readmission
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.partitions import ACT
from unicron_ctl.shared.slurm.pairs import Findings
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.slurm.states import OCCUPIES
from unicron_detector.health.pair_test import learned_limit

IDLE_SECONDS = 60.0  # a node that a job wants is given to it within that time
TEST_SECONDS = 40.0  # a test takes about so long, with Slurm's part
LOST_SECONDS = 3600.0  # node-seconds that the next job loses by a node that should have been found
WAITED_FOR = 10.0  # times that a node-second costs more while somebody waits for nodes
PARTNERS = 3  # the node's own, and a pair that can testify if the first test fails
AGAIN_SECONDS = 3600.0  # after a test that settled nothing
VERDICTS: dict[str, Literal["good", "warning", "bad"]] = {"good": "good", "slow": "warning", "bad": "bad"}
FAILURE, ODD = "failure", "odd"  # kinds of evidence, in the order of risk


@dataclass(frozen=True)
class Candidate:
    """A node that should be tested."""

    node: str
    evidence: str
    why: str
    since: float
    job: str
    """The job that the evidence comes from, if it is known."""


@dataclass
class PairTests:
    """The test under way; lost with the process, as the test is."""

    running: Candidate | None = None
    idle_since: dict[str, float] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    """After a test that settled nothing."""


def next_test(view: View, known: PairTests, listing: Listing) -> Outcome:
    """Request the test that is most worth it, if one is."""
    out = Outcome()
    free = _free_nodes(view, listing)
    known.idle_since = {name: known.idle_since.get(name, view.now) for name in free}
    if known.running is not None or not view.config.pair_tests or view.suspicions.doubt:
        return out
    ready = {name: node for name, node in free.items() if view.now - known.idle_since[name] >= IDLE_SECONDS}
    found = candidates(view)
    doubtful = {one.node for one in found}
    others = [node for name, node in ready.items() if name not in doubtful]
    for one in found:
        node = ready.get(one.node)
        if node is None or view.now < known.not_before.get(one.node, 0.0) or not (partners := _partners(node, others)):
            continue
        worth, sums = _is_worth_it(view, one, len(partners) + 1, listing, node)
        if worth:
            known.running = one
            reason = f"{one.node} is tested with {', '.join(partners)}: {one.why}; {sums}"
            record = records.PairTest(one.node, "chosen", one.evidence, list(partners), reason=reason)
            out.records.append((one.job, 0, record))
            partition = node.partitions[0] if node.partitions else ""
            out.requests.append(TestPairs(one.node, partners, partition, _limits(view, partition)))
            break
    return out


def _limits(view: View, partition: str) -> dict[str, float]:
    """Return what is slow in the partition, by backend, where enough is known."""
    limits = {kind: learned_limit(seconds) for kind, seconds in view.state.pair_seconds.items()}
    return {kind: limit for kind, limit in limits.items() if limit is not None and kind.startswith(f"{partition} ")}


def candidates(view: View) -> list[Candidate]:
    """Return the nodes that should be tested, the most suspect first."""
    found = []
    for name, known in view.state.nodes.items():
        if known.downed:
            continue
        tested = known.paired.at if known.paired is not None else 0.0
        if suspicion := readmission.suspect(view, name):
            since = known.suspected_at or max((fault.time for fault in view.state.history.of_node(name)), default=0.0)
            if tested <= since:  # a test that did not clear it is not made again without news
                found.append(Candidate(name, FAILURE, suspicion, since, _suspected_by(view, name, suspicion)))
        elif known.odd and tested < known.odd_at and view.now - known.odd_at < SUSPECT_SECONDS:
            found.append(Candidate(name, ODD, known.odd, known.odd_at, known.odd_in))
    return sorted(found, key=lambda one: (one.evidence != FAILURE, one.since, one.node))


def _suspected_by(view: View, node: str, suspicion: str) -> str:
    """Return the job that the evidence is of, if it is known. Others that avoid the node may not read it."""
    whose = (job.job for job in view.state.jobs.values() if node in job.avoid and job.avoid[node].reason == suspicion)
    return next(whose, "")


def _free_nodes(view: View, listing: Listing) -> dict[str, NodeInfo]:
    busy = {name for name, there in listing.by_node.items() if any(e.state in OCCUPIES for e in there)}
    return {node.name: node for node in listing.nodes if node.name not in busy and _is_free(view, node)}


def _is_free(view: View, node: NodeInfo) -> bool:
    """Whether nothing runs on the node or is to start there, and the admin allows tests."""
    partitions = node.partitions or ("",)
    pinned = any(node.name in pin.node.split(",") for pin in view.state.pins.values())
    allowed = all(view.rules(name).mode == ACT for name in partitions)
    return node.states == {"IDLE"} and not node.reservations and not pinned and allowed and not view.unfit(node.name)


def _partners(node: NodeInfo, others: Iterable[NodeInfo]) -> tuple[str, ...]:
    """Return idle nodes of the same kind."""
    alike = [one.name for one in others if one.name != node.name and one.partitions == node.partitions]
    alike_gres = {one.name for one in others if one.gres == node.gres}
    return tuple([name for name in alike if name in alike_gres][:PARTNERS])


def _is_worth_it(view: View, one: Candidate, nodes: int, listing: Listing, node: NodeInfo) -> tuple[bool, str]:
    """Compare what a test may save with what it costs."""
    results = view.state.pair_results.get(one.evidence, PairResults()).of(view.now)
    chance = (results.confirmed + 1) / (results.tested + 2)  # Laplace's rule of succession
    gain, cost = chance * LOST_SECONDS, nodes * TEST_SECONDS
    if any(set(e.partition.split(",")) & set(node.partitions) for e in listing.waiting):
        cost *= WAITED_FOR
    sums = f"of {results.tested:.3g} nodes so tested lately {results.confirmed:.3g} were at fault"
    return gain > cost, f"{sums}, so it saves {gain:.0f} node-seconds and costs {cost:.0f}"


# ---------------------------------------------------------------- the result
def on_findings(
    view: View, known: PairTests, gate: readmission.Gate, request: TestPairs, found: Findings | str
) -> Outcome:
    """Take in what the test has found, or why it could not be made."""
    out, one = Outcome(), known.running
    known.running = None
    evidence, job = (one.evidence, one.job) if one is not None and one.node == request.node else (ODD, "")
    state, why = ("not_run", found) if isinstance(found, str) else _verdict(found, request.node)
    seconds, kind = ([], "") if isinstance(found, str) else _figures(found, request)
    if state in ("not_run", "unclear"):
        known.not_before[request.node] = view.now + AGAIN_SECONDS
    words = {"good": "passed", "slow": "is slow", "bad": "is bad", "unclear": "is not cleared", "not_run": "not tested"}
    reason = (
        f"{request.node}: {words[state]}: {why}; "
        + {
            "good": "it is no suspect any more, and its jobs may use it again",
            "slow": "the job that left it does not come back to it",
            "bad": "it is drained, within the bounds",
            "unclear": "it stays as it is",
            "not_run": f"`{readmission.pair_test_command(request.node)}` tests it",
        }[state]
    )
    record = records.PairTest(
        request.node, state, evidence, list(request.partners), alike=kind, seconds=seconds, reason=reason
    )
    out.records.append((job, 0, record))
    if (verdict := VERDICTS.get(state)) is not None:
        report = readmission.Report(
            node=request.node, source="pair-test", verdict=verdict, reason=why, at=view.now, drain=state == "bad"
        )
        out.merge([readmission.on_health_report(view, gate, report)])
    return out


def _verdict(found: Findings, node: str) -> tuple[str, str]:
    judgement = found.judgement
    if node in judgement.bad:
        return "bad", found.why_bad(node)
    if node in judgement.slow:
        return "slow", judgement.slow[node]
    if node in judgement.good:
        return "good", "an exact sum, its bytes there and back, a product, and its speed are as they should be"
    if node in judgement.unknown:
        return "unclear", judgement.unknown[node]
    return "not_run", found.left_out.get(node, "no test of it ended")


def _figures(found: Findings, request: TestPairs) -> tuple[list[float], str]:
    """Return the seconds for a gigabyte of the pairs that are sound, and what they may be compared with."""
    good = set(found.judgement.good)
    sound = [test for test in found.tests if test.bandwidth and good.issuperset(test.nodes)]
    backends: Sequence[str] = sorted({test.backend for test in sound})
    if len(backends) != 1:
        return [], ""
    return [1e9 / test.bandwidth for test in sound if test.bandwidth], f"{request.partition} {backends[0]}"
