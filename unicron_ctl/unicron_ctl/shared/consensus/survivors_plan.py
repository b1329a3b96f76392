"""Decides how a job goes on after a Break: a pure function of the points where its survivors stopped
(docs/design/paper.md, section 5; docs/design/micro-batch-reuse.md).

Only complete replicas go on: healthy ones, which have lost no rank, and those that can be composed of the living ranks
of the others. A rank that completes none is a standby. The assignment is by the replicas' heads.

Invariant: the assignment of the iteration is an exact partition of its micro-batches, and a healthy replica keeps the
micro-batches in its gradient. No rank steps unless the reduce is known to hold every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_detector.words import plural
from unicron_transition.generations import layout


@dataclass(frozen=True)
class Decision:
    """The way on for a job after a Break."""

    members: list[int]  # slots that go on, replica-major
    unusable: dict[int, str]  # survivors that cannot go on and count as lost -> reason
    step: int | None  # ranks that are synced at this iteration step
    iteration: int  # the next one to be computed
    assignment: dict[int, list[int]]  # of that iteration
    reused: int  # micro-batches kept in survivors' gradients
    recomputed: int  # finished micro-batches that are computed again
    redistributed: int  # micro-batches of lost ranks that others compute now
    reason: str
    standbys: list[int] = field(default_factory=list)  # survivors that complete no replica
    state: tuple[int, int] | None = None  # (base, version) of the optimizer's shards from which all go on


class _Way(NamedTuple):
    """The result of the step rule."""

    step: int | None  # ranks that are synced at this iteration step
    iteration: int  # the next one to be computed
    kept: dict[int, list[int]]  # head -> micro-batches in its gradient
    state: tuple[int, int] | None = None


class _Position(NamedTuple):
    """The position of a rank; "stepped at i" counts as "i + 1 with nothing done"."""

    iteration: int
    synced: bool
    done: list[int] = []


def deal(indices: Sequence[int], members: Sequence[int], lanes: int = 1) -> dict[int, list[int]]:
    """Deal the indices round-robin to the members in order, as every rank does by itself in an undisturbed
    iteration. lanes: micro-batches that a member computes at the same time, and so gets at a time."""
    count = len(members)
    return {
        slot: [indices[one] for one in layout.deal(len(indices), count, place, lanes)]
        for place, slot in enumerate(members)
    }


def decide(
    survivors: Mapping[int, RankStatus],
    total: int,
    finished_at: int | None = None,
    lost_done: Mapping[int, Collection[int]] | None = None,
    lost_share: Collection[int] = (),
    lost_iteration: int | None = None,
    size: int = 1,
    former: Sequence[int] = (),
) -> Decision | None:
    """Return the way on for the survivors, which have stopped; None if the job has to be formed anew.

    total: micro-batches per iteration. finished_at: the iteration count of a member that trained to the end. lost_done:
    micro-batches that lost ranks had finished in lost_iteration, by slot; lost_share: those that they had to compute;
    both are only for the report. size: ranks of a replica. former: the broken generation's members, replica-major;
    the home replicas if they are not known.
    """
    again = {index for done in (lost_done or {}).values() for index in done}
    alike = _alike(survivors, total) if size == 1 else None
    if alike is not None and alike.iteration >= (finished_at or 0):
        return _decision(list(alike.kept), {}, alike, total, size, again, lost_share, lost_iteration)
    sharded = any(status.shards for status in survivors.values())
    usable, unusable = _usable(survivors, total, owned_once=size == 1)
    top = max((position.iteration for position in usable.values()), default=0)
    if not sharded:
        top = max(top, finished_at or 0)
        _leave_behind(usable, unusable, top)
    healthy, composed, standbys = _replicas(usable, size, former)
    members = layout.arrange([*healthy, *composed])
    if not members:
        return None
    way = _newest(survivors, members, healthy, size) if sharded else _step_rule(usable, top, members, healthy)
    if way is None:
        return None
    if doubled := _duplicates(way.kept, size):
        return Decision([], {**unusable, **doubled}, None, way.iteration, {}, 0, 0, 0, "")
    if size > 1:
        again |= _finished_micro_batches(usable.values(), way.iteration)
    lanes = next(iter(survivors.values())).lanes
    return _decision(members, unusable, way, total, size, again, lost_share, lost_iteration, standbys, lanes)


def _decision(
    members: list[int],
    unusable: dict[int, str],
    way: _Way,
    total: int,
    size: int,
    again: set[int],
    lost_share: Collection[int],
    lost_iteration: int | None,
    standbys: Sequence[int] = (),
    lanes: int = 1,
) -> Decision:
    """Make the decision. again: micro-batches that other ranks have finished; only those that a member has, too, are in
    a complete gradient."""
    have = set(chain.from_iterable(way.kept.values()))
    assignment = _deal_unfinished(layout.heads(members, size), way.kept, have, total, lanes)
    reused = sum(map(len, way.kept.values()))
    same = way.step is None and lost_iteration == way.iteration
    recomputed = len(again - have) if same else 0
    if way.step is not None:  # that iteration's reduce is kept, with the lost ranks' part
        reused = max(reused, total)
    return Decision(
        members,
        unusable,
        way.step,
        way.iteration,
        assignment,
        reused,
        recomputed,
        len(set(lost_share) - have) if same else 0,
        _why(members, size, way, reused, recomputed, total, standbys),
        list(standbys),
        way.state,
    )


def newest_state(
    reports: Mapping[int, RankStatus], slots: Iterable[int], size: int
) -> tuple[tuple[int, int] | None, set[int]]:
    """Find the newest state of a distributed optimizer of which these slots have every shard at every place. Returns
    (base, version), None if there is none, and the slots that hold shards of it."""
    held: dict[tuple[int, int, int], dict[int, set[int]]] = {}
    holders: dict[tuple[int, int, int], set[int]] = {}
    for slot in slots:
        for shards in reports[slot].shards:
            key = shards.version, shards.base, shards.count
            mine = held.setdefault(key, {}).setdefault(slot % size, set())
            mine.update(index for index in shards.held if index < shards.count)
            holders.setdefault(key, set()).add(slot)
    for key in sorted(held, reverse=True):
        version, base, count = key
        if len(held[key]) == size and all(len(found) == count for found in held[key].values()):
            return (base, version), holders[key]
    return None, set()


def _replicas(
    usable: Collection[int], size: int, former: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return the healthy replicas, those composed of other living ranks, and the slots that complete none."""
    if size == 1:
        return [[slot] for slot in usable], [], []
    if former and len(former) % size == 0:
        groups = layout.replicas(former, size)
    else:
        groups = [list(range(home * size, (home + 1) * size)) for home in sorted({slot // size for slot in usable})]
    places = list(range(size))
    whole = [group for group in groups if [slot % size for slot in group] == places]
    healthy = [group for group in whole if all(slot in usable for slot in group)]
    inside = {slot for group in healthy for slot in group}
    composed, standbys = layout.compose((slot for slot in usable if slot not in inside), size)
    return healthy, composed, standbys


def _leave_behind(usable: dict[int, _Position], unusable: dict[int, str], top: int) -> None:
    """Move ranks that stopped where the commit rule does not allow it from `usable` to `unusable`."""
    behind = [slot for slot, p in usable.items() if p.iteration < top and not (p.iteration == top - 1 and p.synced)]
    for slot in behind:
        unusable[slot] = (
            f"stopped at iteration {usable.pop(slot).iteration}, but others are at {top}: the commit rule was broken"
        )


def _indices(done: Sequence[int], total: int) -> bool:
    """Whether the list is a set of micro-batches."""
    return len(set(done)) == len(done) and (not done or 0 <= min(done) <= max(done) < total)


def _finished_micro_batches(positions: Iterable[_Position], iteration: int) -> set[int]:
    return {index for position in positions if position.iteration == iteration for index in position.done}


def _duplicates(kept: Mapping[int, Sequence[int]], size: int) -> dict[int, str]:
    """Find replicas with a micro-batch that another one has, too; return the reason by head. For single ranks
    :func:`_usable` has found them before."""
    owner: dict[int, int] = {}
    reasons = {}
    for head in sorted(kept) if size > 1 else ():
        taken = next((index for index in kept[head] if index in owner), None)
        if taken is not None:
            reasons[head] = f"has micro-batch {taken} in its gradient, which slot {owner[taken]} has too"
        else:
            owner.update(dict.fromkeys(kept[head], head))
    return reasons


def _alike(survivors: Mapping[int, RankStatus], total: int) -> _Way | None:
    """Return the way on in the usual case, by classes of equal reports: all have stopped in one iteration before its
    reduce was complete. None in any other case, or if a report is unusable."""
    classes = {(status.iteration, status.phase, bool(status.shards)) for status in survivors.values()}
    iterations = {iteration for iteration, _, _ in classes}
    if len(iterations) != 1 or any(phase in ("stepped", "synced") or shards for _, phase, shards in classes):
        return None
    kept = {slot: survivors[slot].done for slot in sorted(survivors)}
    sound = _indices(list(chain.from_iterable(kept.values())), total)
    return _Way(None, iterations.pop(), kept) if sound else None


def _usable(
    survivors: Mapping[int, RankStatus], total: int, owned_once: bool
) -> tuple[dict[int, _Position], dict[int, str]]:
    """Return the positions of ranks with a usable report, and why the others' reports are not. owned_once: a
    micro-batch is one rank's; ranks of a replica share theirs."""
    if owned_once and _all_sound(survivors, total):
        return {slot: _position(survivors[slot]) for slot in sorted(survivors)}, {}
    usable: dict[int, _Position] = {}
    unusable: dict[int, str] = {}
    owners: dict[int, dict[int, int]] = {}  # iteration -> micro-batch -> slot
    for slot in sorted(survivors):
        position = _position(survivors[slot])
        done = position.done
        if not _indices(done, total):
            unusable[slot] = f"reported micro-batches {done[:50]} of {total}: not a set of valid indices"
            continue
        if owned_once:
            owner = owners.setdefault(position.iteration, {})
            if not owner.keys().isdisjoint(done):
                taken = next(index for index in done if index in owner)
                unusable[slot] = f"has micro-batch {taken} in its gradient, which slot {owner[taken]} has too"
                continue
            owner.update(dict.fromkeys(done, slot))
        usable[slot] = position
    return usable, unusable


def _all_sound(survivors: Mapping[int, RankStatus], total: int) -> bool:
    """Whether no micro-batch is invalid or reported twice, which is usual and quickly seen for all ranks at once."""
    done: dict[int, list[int]] = {}
    for status in survivors.values():
        if status.phase != "stepped":
            done.setdefault(status.iteration, []).extend(status.done)
    return all(_indices(indices, total) for indices in done.values())


def _position(status: RankStatus) -> _Position:
    if status.phase == "stepped":
        return _Position(status.iteration + 1, False)
    return _Position(status.iteration, status.phase == "synced", status.done)


def _step_rule(
    usable: Mapping[int, _Position], top: int, members: Sequence[int], healthy: Sequence[Sequence[int]]
) -> _Way:
    """Apply the commit rule. A replica keeps the micro-batches of the next iteration that all of its ranks have."""
    if any(usable[slot].iteration < top for slot in members):  # these are synced, and must step as others have
        return _Way(top - 1, top, _common_micro_batches(usable, healthy, top))
    if all(usable[slot].synced for slot in members):
        return _Way(top, top + 1, {})
    return _Way(None, top, _common_micro_batches(usable, healthy, top))


def _newest(
    survivors: Mapping[int, RankStatus], members: Sequence[int], healthy: Sequence[Sequence[int]], size: int
) -> _Way | None:
    """Go on from the newest state of a distributed optimizer of which the members have all shards; later steps are done
    again. None if a member is in a later iteration: the job is formed anew, and others may still bring the missing
    shards of a newer state."""
    state, _ = newest_state(survivors, members, size)
    if state is None or any(survivors[slot].iteration > state[1] for slot in members):
        return None
    at = {
        slot: _Position(status.iteration, False, status.done)
        for slot, status in survivors.items()
        if status.phase != "stepped"
    }
    return _Way(None, state[1], _common_micro_batches(at, healthy, state[1]), state)


def _common_micro_batches(
    positions: Mapping[int, _Position], healthy: Iterable[Sequence[int]], iteration: int
) -> dict[int, list[int]]:
    """Return by head: the micro-batches of the iteration that all ranks of a healthy replica have."""
    common_of: dict[int, list[int]] = {}
    for replica in healthy:
        if len(replica) == 1:  # thousands of them in a large job
            alone = positions.get(replica[0])
            if alone is not None and alone.iteration == iteration:
                common_of[replica[0]] = list(alone.done)
            continue
        here = [positions[slot] for slot in replica if slot in positions and positions[slot].iteration == iteration]
        if len(here) == len(replica):
            common = set(here[0].done).intersection(*(position.done for position in here[1:]))
            common_of[replica[0]] = [index for index in here[0].done if index in common]
    return common_of


def _deal_unfinished(
    heads: Sequence[int], kept: Mapping[int, Sequence[int]], have: Collection[int], total: int, lanes: int
) -> dict[int, list[int]]:
    """Deal the unfinished micro-batches round-robin, `lanes` at a time, so that the heads' remaining rounds differ by
    one at most."""
    dealt = deal([index for index in range(total) if index not in have], heads, lanes)
    return {slot: [*kept.get(slot, ()), *dealt[slot]] for slot in heads}


def _why(
    members: Sequence[int],
    size: int,
    way: _Way,
    reused: int,
    recomputed: int,
    total: int,
    standbys: Sequence[int],
) -> str:
    one = len(members) == size
    subject = plural(len(members) // size, "rank" if size == 1 else "replica")
    subject += f" of {size} ranks" if size > 1 else ""
    wait = f"; slots {list(standbys[:20])} complete none and wait with their state" if standbys else ""
    if way.step is not None:
        step = "keeps it, steps and goes" if one else "keep it, step and go"
        reduced = f"iteration {way.step} was reduced completely before the loss"
        return f"{reduced}: {subject} {step} on with {way.iteration}{wait}"
    kept = f"{reused} of {total} micro-batches kept, {plural(recomputed, 'finished one')} computed again"
    since = f" from the state after {plural(way.state[1], 'step')}" if way.state is not None else ""
    return f"{subject} {'goes' if one else 'go'} on with iteration {way.iteration}{since}: {kept}{wait}"
