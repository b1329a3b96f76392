"""How a job goes on after a Break: a pure function of where its survivors stopped (docs/design/paper.md,
section 5; docs/design/micro-batch-reuse.md).

Invariant: the assignment of the iteration is an exact partition of its micro-batches, and what a survivor has in its
gradient stays with it. Nobody steps unless the reduce is known to hold every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unicron_ctl.protocol.wire import RankStatus


@dataclass(frozen=True)
class Decision:
    """members: who goes on, in order. unusable: survivors that cannot, by slot with the reason; they count as lost.
    step: whoever is synced at this iteration steps. iteration: the one that is computed next, with its assignment.
    reused: micro-batches kept in survivors' gradients. recomputed: finished by lost ranks, computed again.
    redistributed: all that was the lost ranks' to compute and now is others'.
    """

    members: list[int]
    unusable: dict[int, str]
    step: int | None
    iteration: int
    assignment: dict[int, list[int]]
    reused: int
    recomputed: int
    redistributed: int
    reason: str


class _Position(NamedTuple):
    """Where a rank stands, "stepped at i" being "i + 1 with nothing done"."""

    iteration: int
    synced: bool
    done: list[int] = []  # nobody changes it


def deal(indices: Sequence[int], members: Sequence[int]) -> dict[int, list[int]]:
    """The indices round-robin over the members in order: what every rank does by itself in an undisturbed iteration."""
    return {slot: list(indices[place :: len(members)]) for place, slot in enumerate(members)}


def decide(
    survivors: Mapping[int, RankStatus],
    total: int,
    finished_at: int | None = None,
    lost_done: Mapping[int, Collection[int]] | None = None,
    lost_share: Collection[int] = (),
    lost_iteration: int | None = None,
) -> Decision | None:
    """The way on for the survivors (each stopped), or None where nobody can: the job is formed anew.

    total: micro-batches per iteration. finished_at: the iteration count of a member that trained to the end.
    lost_done: what lost ranks had finished, by slot, and lost_share what they were to compute, in lost_iteration;
    both serve the report only.
    """
    usable, unusable = _usable(survivors, total)
    if not usable:
        return None
    top = max(position.iteration for position in usable.values())
    if finished_at is not None:
        top = max(top, finished_at)
    behind = [slot for slot, p in usable.items() if p.iteration < top and not (p.iteration == top - 1 and p.synced)]
    for slot in behind:
        unusable[slot] = (
            f"stopped at iteration {usable.pop(slot).iteration}, but others are at {top}: the commit rule was broken"
        )
    if not usable:
        return None
    members = sorted(usable)
    step, iteration, kept = _step_rule(usable, top)
    assignment = _assign(members, kept, total)
    reused = sum(len(done) for done in kept.values())
    same = step is None and lost_iteration == iteration
    again = {index for done in (lost_done or {}).values() for index in done} if same else set()
    survivors_have = {index for done in kept.values() for index in done}
    recomputed = len(again - survivors_have)
    if step is not None:
        # The reduce of that iteration is kept whole, the lost ranks' part of it included.
        reused = max(reused, total)
    return Decision(
        members,
        unusable,
        step,
        iteration,
        assignment,
        reused,
        recomputed,
        len(set(lost_share) - survivors_have) if same else 0,
        _why(members, step, iteration, reused, recomputed, total),
    )


def _usable(survivors: Mapping[int, RankStatus], total: int) -> tuple[dict[int, _Position], dict[int, str]]:
    """Positions of those whose report can be worked with, and why the others' cannot."""
    if _all_sound(survivors, total):
        return {slot: _position(survivors[slot]) for slot in sorted(survivors)}, {}
    usable: dict[int, _Position] = {}
    unusable: dict[int, str] = {}
    owners: dict[int, dict[int, int]] = {}  # iteration -> micro-batch -> slot
    for slot in sorted(survivors):
        status = survivors[slot]
        if status.phase == "stepped":
            usable[slot] = _Position(status.iteration + 1, False)
            continue
        owner, done = owners.setdefault(status.iteration, {}), status.done
        if len(set(done)) != len(done) or (done and not 0 <= min(done) <= max(done) < total):
            unusable[slot] = f"reported micro-batches {done[:50]} of {total}: not a set of valid indices"
            continue
        taken = next((index for index in done if index in owner), None) if owner else None
        if taken is not None:
            unusable[slot] = f"has micro-batch {taken} in its gradient, which slot {owner[taken]} has too"
            continue
        owner.update(dict.fromkeys(done, slot))
        usable[slot] = _Position(status.iteration, status.phase == "synced", done)
    return usable, unusable


def _all_sound(survivors: Mapping[int, RankStatus], total: int) -> bool:
    """Nobody has what another has too, or what does not exist: the usual case, found out for all at once."""
    done: dict[int, list[int]] = {}
    for status in survivors.values():
        if status.phase != "stepped":
            done.setdefault(status.iteration, []).extend(status.done)
    return all(
        len(set(indices)) == len(indices) and (not indices or 0 <= min(indices) <= max(indices) < total)
        for indices in done.values()
    )


def _position(status: RankStatus) -> _Position:
    if status.phase == "stepped":
        return _Position(status.iteration + 1, False)
    return _Position(status.iteration, status.phase == "synced", status.done)


def _step_rule(usable: Mapping[int, _Position], top: int) -> tuple[int | None, int, dict[int, list[int]]]:
    """(who is synced at it steps, the iteration to compute, what stays in whose gradient)."""
    at_top = {slot: position for slot, position in usable.items() if position.iteration == top}
    if len(at_top) < len(usable) or not at_top:  # some are synced at top - 1: others have stepped it, so must they
        return top - 1, top, {slot: position.done for slot, position in at_top.items()}
    if all(position.synced for position in at_top.values()):
        return top, top + 1, {}
    return None, top, {slot: position.done for slot, position in at_top.items()}


def _assign(members: Sequence[int], kept: Mapping[int, Sequence[int]], total: int) -> dict[int, list[int]]:
    """Everyone keeps what it has; the rest is dealt round-robin, so that the remaining work differs by one at most."""
    have = {index for done in kept.values() for index in done}
    found = {slot: list(kept.get(slot, ())) for slot in members}
    for place, index in enumerate(index for index in range(total) if index not in have):
        found[members[place % len(members)]].append(index)
    return found


def _why(members: Sequence[int], step: int | None, iteration: int, reused: int, recomputed: int, total: int) -> str:
    ranks = f"{len(members)} rank{'s' if len(members) != 1 else ''}"
    if step is not None:
        return (
            f"iteration {step} was reduced completely before the loss: {ranks} keep it, step and go on with {iteration}"
        )
    kept = f"{reused} of {total} micro-batches are kept, {recomputed} finished ones are computed again"
    return f"{ranks} go on with iteration {iteration}: {kept}"
