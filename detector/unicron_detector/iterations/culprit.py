"""Which rank makes the others wait: from phase times, and from who has entered the collective.

Pure, standard library only. A synchronous step hides its straggler: every rank's iteration takes equally long, because
the fast ones wait in the reduce. So the phases in which a rank works by itself are compared with those of its peers,
and the reduce is read the other way round: who waits least came last (MegaScale and C4; docs/design/paper.md, section
8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

PHASES = ("data", "forward", "backward", "reduce", "step")
OWN_PHASES = ("data", "forward", "backward", "step")
NOTICEABLE = 0.1  # a slowdown of the whole iteration by less does not count


@dataclass(frozen=True)
class Culprit:
    """A slow or stuck rank. ``slot`` is None when no single rank is (the network). ``slowdown``: ratio to the peers in
    that phase, infinite when it is stuck."""

    slot: int | None
    phase: str
    slowdown: float
    reason: str


@dataclass(frozen=True)
class Progress:
    """Progress of a rank: the number of collectives it has entered, when it entered the last one (seconds on the
    controller's clock, None if unknown), and the phase it reported last."""

    collectives: int
    entered_at: float | None = None
    phase: str = ""


def slowest(
    phases: Mapping[int, Mapping[str, float]],
    usual: Mapping[int, Mapping[str, float]] | None = None,
) -> Culprit | None:
    """The straggler of a slow but finished iteration, or None when the ranks do not differ.

    ``phases``: slot -> phase -> seconds (means of some recent iterations are better than one). ``usual``: the same
    while all was well; a rank without two peers is compared with its own usual times.
    """
    found = [
        culprit
        for slot in sorted(phases)
        for phase in OWN_PHASES
        if (culprit := _own_phase(slot, phase, phases, usual or {})) is not None
    ]
    if found:
        return max(found, key=lambda item: (_seconds_lost(item, phases), -(item.slot or 0)))
    return _by_waiting(phases, usual or {})


def _seconds_lost(culprit: Culprit, phases: Mapping[int, Mapping[str, float]]) -> float:
    """The seconds that the culprit's phase takes over its reference: what the others wait for."""
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
    """By the reduce alone: one rank that waits far less than all others came last (it lost the time outside the
    measured phases); all waiting longer than usual is the network's doing."""
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


def stuck(progress: Mapping[int, Progress], slots: Iterable[int] | None = None) -> list[Culprit]:
    """Find the ranks that have not entered the collective in which the others wait, past the iteration's deadline.

    ``progress``: slot -> Progress of those that report; ``slots``: all slots of the job (a silent one is stuck, too).
    Returns the culprits, furthest behind first; empty when nobody is behind (then all wait in the same collective,
    which the network does not finish: the caller reports an nccl_timeout without a culprit).
    """
    everyone = sorted(set(slots) if slots is not None else set(progress))
    silent = [slot for slot in everyone if slot not in progress]
    if not progress:
        return []
    ahead = max(item.collectives for item in progress.values())
    waiting = sum(1 for item in progress.values() if item.collectives == ahead)
    found = [Culprit(slot, "silent", float("inf"), f"slot {slot} reports nothing") for slot in silent]
    behind = sorted((item.collectives, slot) for slot, item in progress.items() if item.collectives < ahead)
    for count, slot in behind:
        phase = progress[slot].phase or "unknown"
        reason = (
            f"slot {slot} is in {phase} and has entered {count} collectives; {waiting} rank"
            f"{'s have' if waiting != 1 else ' has'} entered {ahead} and wait{'s' if waiting == 1 else ''} for it"
        )
        found.append(Culprit(slot, phase, float("inf"), reason))
    if not found:
        return _last_to_enter(progress)
    return found


Groups = Mapping[str, tuple[int, int, str]]


def lagging(ranks: Mapping[int, Groups]) -> list[Culprit]:
    """Find the ranks that have not begun a collective in which others wait, and wait in no group themselves.

    ``ranks``: slot -> process group -> (collectives begun, ended, the last one in words). Empty when nobody lags.
    """
    most: dict[str, int] = {}
    for groups in ranks.values():
        for name, (begun, _, _) in groups.items():
            most[name] = max(begun, most.get(name, 0))
    waits = {name: [s for s, groups in ranks.items() if _waits(groups, name, most[name])] for name in most}
    waiting = {slot for slots in waits.values() for slot in slots}
    found: dict[int, Culprit] = {}
    for name, count in sorted(most.items()):
        if not waits[name]:
            continue
        words = ranks[waits[name][0]][name][2]
        for slot in sorted(ranks.keys() - waiting - found.keys()):
            if name in ranks[slot] and ranks[slot][name][0] < count:
                others = f"{len(waits[name])} other{'s wait' if len(waits[name]) > 1 else ' waits'}"
                reason = f"slot {slot} has not begun collective {count} of group {name} ({words}), in which {others}"
                found[slot] = Culprit(slot, "computing", float("inf"), reason)
    return [found[slot] for slot in sorted(found)]


def all_wait(ranks: Mapping[int, Groups]) -> bool:
    """Each rank is in a collective that nobody has yet to begin."""
    return all(any(ended < begun for begun, ended, _ in groups.values()) for groups in ranks.values())


def _waits(groups: Groups, name: str, most: int) -> bool:
    begun, ended, _ = groups.get(name, (0, 0, ""))
    return begun == most and ended < begun


def _last_to_enter(progress: Mapping[int, Progress]) -> list[Culprit]:
    """All are in the same collective: the one that came much later than the rest, if there is one."""
    entered = sorted((item.entered_at, slot) for slot, item in progress.items() if item.entered_at is not None)
    if len(entered) < 3:
        return []
    first, (before, _), (last, slot) = entered[0][0], entered[-2], entered[-1]
    if last - before > max(4.0 * (before - first), 0.1):
        reason = f"slot {slot} entered the collective {last - before:.3f} s after all others"
        return [Culprit(slot, progress[slot].phase or "unknown", 1.0 + (last - before), reason)]
    return []
