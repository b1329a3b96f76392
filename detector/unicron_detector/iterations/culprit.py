"""Finds the rank that makes the others wait, from phase times and from the progress of collectives. Pure, standard
library only.

A synchronous step hides its straggler: every rank's iteration takes equally long, because the fast ones wait in the
reduce. So the phases in which a rank works by itself are compared with those of its peers, and the reduce is read the
other way round: the rank that waits least came last (MegaScale and C4; docs/design/paper.md, section 8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

PHASES = ("data", "forward", "backward", "reduce", "step")
OWN_PHASES = ("data", "forward", "backward", "step")
NOTICEABLE = 0.1  # a smaller slowdown of the whole iteration does not count


@dataclass(frozen=True)
class Culprit:
    """A slow or stuck rank, or the network."""

    slot: int | None  # None for the network
    phase: str
    slowdown: float  # ratio to the peers in the phase, infinite if stuck
    reason: str


def slowest(
    phases: Mapping[int, Mapping[str, float]],
    usual: Mapping[int, Mapping[str, float]] | None = None,
) -> Culprit | None:
    """Return the straggler of a slow but finished iteration, or None if the ranks do not differ.

    phases: slot -> phase -> seconds; means of some recent iterations are better than one. usual: the same while all was
    well; a rank without two peers is compared with its own usual times.
    """
    examined = (_own_phase(slot, phase, phases, usual or {}) for slot in sorted(phases) for phase in OWN_PHASES)
    culprits = [culprit for culprit in examined if culprit is not None]
    if culprits:
        return max(culprits, key=lambda item: (_seconds_lost(item, phases), -(item.slot or 0)))
    return _by_waiting(phases, usual or {})


def _seconds_lost(culprit: Culprit, phases: Mapping[int, Mapping[str, float]]) -> float:
    """Return by how much the culprit's phase exceeds its reference: the time that the others wait."""
    own = 0.0 if culprit.slot is None else phases[culprit.slot][culprit.phase]
    return own - own / culprit.slowdown


def _own_phase(
    slot: int,
    phase: str,
    phases: Mapping[int, Mapping[str, float]],
    usual: Mapping[int, Mapping[str, float]],
) -> Culprit | None:
    own = phases[slot].get(phase, 0.0)
    peers = [times.get(phase, 0.0) for other, times in phases.items() if other != slot]
    if len(peers) >= 2:
        reference, against = median(peers), f"{len(peers)} peers' {median(peers):.3f} s"
        spread = 1.4826 * median(abs(value - reference) for value in peers)
    else:
        reference = usual.get(slot, {}).get(phase, 0.0)
        against, spread = f"its own usual {reference:.3f} s", 0.02 * reference
        if not reference and len(peers) == 1:
            reference, against = peers[0], f"its one peer's {peers[0]:.3f} s"
    whole = sum(phases[slot].get(name, 0.0) for name in OWN_PHASES)
    excess = own - reference
    # It must matter for the whole iteration and stand out from the peers' own differences.
    if reference <= 0.0:
        noticeable = excess > 0.5 * whole and len(phases) > 1 and own > 0.01
        slowdown = own / 1e-3 if noticeable else 1.0
    else:
        noticeable = excess > NOTICEABLE * (whole - excess) and excess > 4.0 * spread
        slowdown = own / reference
    if not noticeable:
        return None
    return Culprit(slot, phase, slowdown, f"slot {slot} takes {own:.3f} s in {phase}, {slowdown:.1f}x {against}")


def _by_waiting(
    phases: Mapping[int, Mapping[str, float]],
    usual: Mapping[int, Mapping[str, float]],
) -> Culprit | None:
    """Judge by the reduce alone. One rank that waits far less than all others came last, and lost the time outside the
    measured phases; if all wait longer than usual, it is the network."""
    waits = {slot: times.get("reduce", 0.0) for slot, times in phases.items()}
    if len(waits) < 3:
        return None
    last = min(waits, key=lambda slot: (waits[slot], slot))
    others = [seconds for slot, seconds in waits.items() if slot != last]
    typical = median(others)
    own = sum(phases[last].get(name, 0.0) for name in OWN_PHASES)
    if typical - waits[last] > NOTICEABLE * max(own + waits[last], 1e-9) and min(others) > 2.0 * waits[last]:
        slowdown = (own + typical) / max(own + waits[last], 1e-9)
        reason = (
            f"slot {last} waits {waits[last]:.3f} s in the reduce where the others wait {typical:.3f} s: "
            "it comes last, and the time is lost outside the measured phases"
        )
        return Culprit(last, "other", slowdown, reason)
    normal = [times["reduce"] for times in usual.values() if "reduce" in times]
    everyone = median(waits.values())
    if normal and everyone > 2.0 * median(normal) and everyone - median(normal) > NOTICEABLE * max(own, 1e-9):
        slowdown = everyone / max(median(normal), 1e-9)
        reason = f"every rank's reduce takes {everyone:.3f} s, {slowdown:.1f}x the usual: the network, not one rank"
        return Culprit(None, "reduce", slowdown, reason)
    return None


Groups = Mapping[str, tuple[int, int, str]]


def lagging(ranks: Mapping[int, Groups]) -> list[Culprit]:
    """Return the ranks that have not begun a collective in which others wait, and wait in no group themselves.

    ranks: slot -> process group -> (collectives begun, ended, the last one in words).
    """
    most: dict[str, int] = {}
    for groups in ranks.values():
        for name, (begun, _, _) in groups.items():
            most[name] = max(begun, most.get(name, 0))
    waits = {name: [s for s, groups in ranks.items() if _waits(groups, name, most[name])] for name in most}
    waiting = {slot for slots in waits.values() for slot in slots}
    culprits: dict[int, Culprit] = {}
    for name, count in sorted(most.items()):
        if not waits[name]:
            continue
        words = ranks[waits[name][0]][name][2]
        for slot in sorted(ranks.keys() - waiting - culprits.keys()):
            if name in ranks[slot] and ranks[slot][name][0] < count:
                others = f"{len(waits[name])} other{'s wait' if len(waits[name]) > 1 else ' waits'}"
                reason = f"slot {slot} has not begun collective {count} of group {name} ({words}), in which {others}"
                culprits[slot] = Culprit(slot, "computing", float("inf"), reason)
    return [culprits[slot] for slot in sorted(culprits)]


def all_wait(ranks: Mapping[int, Groups]) -> bool:
    """Whether each rank is in a collective that all ranks have begun."""
    return all(any(ended < begun for begun, ended, _ in groups.values()) for groups in ranks.values())


def _waits(groups: Groups, name: str, most: int) -> bool:
    begun, ended, _ = groups.get(name, (0, 0, ""))
    return begun == most and ended < begun
