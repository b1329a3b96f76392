"""The two-round paired test, which finds the bad ones among suspect nodes with tests that need two nodes each.

Pure scheduling and decision; the caller runs the test (a short all-reduce and matrix product) on each group. Round 1
pairs the nodes with one another. A pair that fails makes both suspects. Round 2 pairs each suspect with a good node: it
is bad if it fails again, and cleared if it passes. Mechanism: DLRover, SuperBench (docs/design/paper.md, section 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Group = tuple[str, ...]
LEARNED_PAIRS = 8  # that a limit is learned from
SPREADS, MARGIN = 6.0, 0.25  # beyond the median: robust deviations of earlier pairs, and at least this share of it


@dataclass(frozen=True)
class Outcome:
    """The result of one group's test."""

    passed: bool
    seconds: float | None = None  # None if it did not end


@dataclass(frozen=True)
class Judgement:
    """The judgement of all nodes: node -> reason."""

    bad: Mapping[str, str] = field(default_factory=dict)
    slow: Mapping[str, str] = field(default_factory=dict)
    """Nodes that work, but slow their partners."""
    good: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Nodes that were not tested beside a good partner, and so are not isolated."""


def first_round(nodes: Sequence[str]) -> list[Group]:
    """Return pairs of the nodes in this order. An odd one joins the last group.

    A single node without a partner gives no group. Raises ValueError for a node named twice.
    """
    if len(set(nodes)) != len(nodes):
        raise ValueError("a node is named twice; name each node once")
    groups: list[Group] = [(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2 and groups:
        groups[-1] = (*groups[-1], nodes[-1])
    return groups


def suspects(results: Mapping[Group, Outcome], slower: float = 1.5, known: float | None = None) -> list[str]:
    """Return the nodes of groups that failed, or that took ``slower`` times the median of those that passed, or longer
    than the ``known`` limit."""
    limit = _limit(results, slower, known)
    doubtful = {node for group, outcome in results.items() if not _fine(outcome, limit) for node in group}
    cleared = {node for group, outcome in results.items() if _fine(outcome, limit) for node in group}
    return sorted(doubtful - cleared)


def second_round(
    results: Mapping[Group, Outcome], slower: float = 1.5, known: float | None = None
) -> list[list[Group]]:
    """Return waves of pairs (suspect, partner) for round 2; the pairs of one wave share no node and may run at once.

    Partners are nodes that passed round 1. Without any, suspects of different failed groups are
    paired with each other: two innocents may meet and clear each other.
    """
    questionable = suspects(results, slower, known)
    if not questionable:
        return []
    limit = _limit(results, slower, known)
    partners = sorted({node for group, outcome in results.items() if _fine(outcome, limit) for node in group})
    if partners:
        starts = range(0, len(questionable), len(partners))
        return [list(zip(questionable[start:], partners, strict=False)) for start in starts]
    return _across(results, questionable)


def _across(results: Mapping[Group, Outcome], questionable: Sequence[str]) -> list[list[Group]]:
    groups = [group for group in results if set(group) <= set(questionable)]
    if len(groups) < 2:
        return []
    wave: list[Group] = []
    used: set[str] = set()
    order = [node for rank in range(max(map(len, groups))) for group in groups for node in group[rank : rank + 1]]
    home = {node: index for index, group in enumerate(groups) for node in group}
    for node in order:
        if node in used:
            continue
        partner = next((other for other in order if other not in used and home[other] != home[node]), None)
        if partner is not None:
            wave.append((node, partner))
            used |= {node, partner}
    return [wave] if wave else []


def judge(
    first: Mapping[Group, Outcome],
    second: Mapping[Group, Outcome],
    slower: float = 1.5,
    known: float | None = None,
) -> Judgement:
    """Judge both rounds. Only a suspect that failed beside a node proven good is bad."""
    limit = _limit(first, slower, known)
    questionable = suspects(first, slower, known)
    trusted = {node for group, outcome in first.items() if _fine(outcome, limit) for node in group}
    cleared = {node for group, outcome in second.items() if _fine(outcome, limit) for node in group}
    bad: dict[str, str] = {}
    slow: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for node in sorted(set(questionable) - cleared):
        tests = [(group, outcome) for group, outcome in second.items() if node in group]
        proof = [(group, outcome) for group, outcome in tests if (trusted | cleared) & (set(group) - {node})]
        if not proof:
            unknown[node] = "failed, but never beside a node known to be good"
            continue
        group, outcome = proof[0]
        partner = next(other for other in group if other != node and other in trusted | cleared)
        if not outcome.passed:
            bad[node] = f"failed in round 1 and again beside {partner}, which is good"
        else:
            slow[node] = f"{outcome.seconds:.3g} s beside {partner}, over the limit of {limit:.3g} s, in both rounds"
    good = sorted((trusted | cleared) - set(bad) - set(slow))
    return Judgement(bad, slow, tuple(good), unknown)


def _limit(results: Mapping[Group, Outcome], slower: float, known: float | None) -> float:
    """Return the seconds over which a passed test is slow: those that are known from earlier tests; else from the
    present ones, and infinite with fewer than three times to compare."""
    if known is not None:
        return known
    times = [outcome.seconds for outcome in results.values() if outcome.passed and outcome.seconds is not None]
    return slower * median(times) if len(times) >= 3 else float("inf")


def learned_limit(times: Sequence[float]) -> float | None:
    """Return the seconds over which a pair is slow, from the times of earlier pairs of the same kind that were sound;
    None while they are too few."""
    if len(times) < LEARNED_PAIRS:
        return None
    usual = median(times)
    spread = 1.4826 * median(abs(each - usual) for each in times)
    return usual + max(SPREADS * spread, MARGIN * usual)


def _fine(outcome: Outcome, limit: float) -> bool:
    return outcome.passed and (outcome.seconds is None or outcome.seconds <= limit)
