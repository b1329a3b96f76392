"""Finds the generation that ranks can form from their states. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from unicron_ctl.shared.consensus.survivors_plan import newest_state
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_detector.words import plural
from unicron_transition.generations import layout

NOTHING = -1, ""  # in place of the states of a rank that has none


@dataclass(frozen=True)
class FormableGeneration:
    """A generation that the ranks can form."""

    members: list[int]  # replica-major
    joiners: list[int]
    source: int | None  # the head of the replica whose ranks give their state to the joiners
    iteration: int
    state: tuple[int, int] | None = None  # as in `wire.Plan`
    why: str = ""  # the state's origin, unless that is plain


def formable(reports: Mapping[int, RankStatus], size: int) -> FormableGeneration | None:
    """Return the generation that these ranks, each able to enter, can form; None if they have no state in common.

    It begins with the newest iteration of which there is a state for every place, of one mark or, with a distributed
    optimizer, with the newest state whose shards are all there. There must be a rank for every place. Before anybody
    has trained, the shards are what earlier processes left in the nodes' memory, and a checkpoint may be newer.
    """
    held = max((shards.version for status in reports.values() for shards in status.shards), default=None)
    if held is None:
        return _from_files(reports, size)
    from_shards = _from_shards(reports, size)
    if any(_has_been_in(status) for status in reports.values()):
        return from_shards
    from_files = _from_files(reports, size)
    if from_files is None or (from_shards is not None and from_shards.iteration >= from_files.iteration):
        return from_shards
    partial = f"the nodes' memory has only a part of the state after {plural(held, 'step')}"
    older = partial if from_shards is None else from_shards.why
    return replace(from_files, why=f"{older}: all go on from what ranks start with, iteration {from_files.iteration}")


def _from_files(reports: Mapping[int, RankStatus], size: int) -> FormableGeneration | None:
    """Form from states that the ranks began with, or have trained if each rank has a whole one."""
    at: dict[tuple[int, str], list[int]] = {}
    for slot, status in sorted(reports.items()):
        for state in states(status):
            at.setdefault(state, []).append(slot)
    at.pop(NOTHING, None)
    for iteration, mark in sorted(at, reverse=True):
        sources, _ = layout.compose(at[iteration, mark], size)
        if sources:
            source = min(sources)
            others, _ = layout.compose((slot for slot in reports if slot not in source), size)
            joiners = sorted(slot for replica in others for slot in replica)
            return FormableGeneration(layout.arrange([source, *others]), joiners, source[0], iteration)
    return None


def soundly(reports: Mapping[int, RankStatus], newest: int, from_script: bool) -> dict[int, RankStatus]:
    """Return the reports without states after iteration `newest`, which are unsound. from_script: a script's own
    initial state of that iteration will do; any other one would repeat the whole training."""
    found = {}
    for slot, status in reports.items():
        left = [
            (iteration, mark)
            for iteration, mark in states(status)
            if iteration <= newest and (_is_kept(status, mark) or (from_script and iteration == newest))
        ]
        shards = [each for each in status.shards if each.version <= newest]
        found[slot] = msgspec.structs.replace(status, kept=left or [NOTHING], shards=shards)
    return found


def _is_kept(status: RankStatus, mark: str) -> bool:
    """Whether a state is not the script's initial one. A rank with shards does not say, but whether there is a
    checkpoint."""
    return bool(mark) or (not status.kept and status.saved > 0)


def states(status: RankStatus) -> list[tuple[int, str]]:
    """Return (iteration, mark) of the states with which the rank could begin."""
    return [(iteration, mark) for iteration, mark in status.kept] or [(next_iteration(status), "")]


def left_behind(reports: Mapping[int, RankStatus], found: FormableGeneration) -> str:
    """Describe a newer state than that of `found`, of which only parts are there; empty if there is none."""
    newest = max(max(status.kept)[0] if status.kept else next_iteration(status) for status in reports.values())
    if newest <= found.iteration:
        return ""
    have = [slot for slot, status in sorted(reports.items()) if newest in dict(states(status))]
    return (
        f"; iteration {newest} is left behind: only slots {have[:20]} have a state of it, and a replica needs one for "
        "every place"
    )


def taken_over(reports: Mapping[int, RankStatus], found: FormableGeneration) -> str:
    """Describe joiners that could begin with an older state of their own, but take the newer one of a whole replica, so
    that no work is repeated. Empty if there are none."""
    if not found.iteration:
        return ""  # none is older
    older = {slot: max((i for i, _ in states(reports[slot])), default=-1) for slot in found.joiners if slot in reports}
    behind = {slot: iteration for slot, iteration in older.items() if 0 < iteration < found.iteration}
    if not behind or found.source is None:
        return ""
    return (
        f"; slots {sorted(behind)[:20]} have iteration {max(behind.values())} at most, and take the state from the "
        f"replica of slot {found.source}: that costs a transfer, and no iteration is done again"
    )


def next_iteration(status: RankStatus) -> int:
    """Return the iteration that comes next for the rank's parameters."""
    return status.iteration + (status.phase == "stepped")


def _from_shards(reports: Mapping[int, RankStatus], size: int) -> FormableGeneration | None:
    _, holders = newest_state(reports, reports, size)
    first, _ = layout.compose(holders, size)
    inside = {slot for replica in first for slot in replica}
    others, _ = layout.compose((slot for slot in reports if slot not in inside), size)
    members = layout.arrange([*first, *others])
    state, holders = newest_state(reports, members, size)
    if state is None:
        return None
    # Ranks of one replica must enter alike: those that go on with the iteration in which they stopped compare what is
    # in their gradients, and no others do.
    mixed = any(reports[slot].state != "stopped" or reports[slot].iteration > state[1] for slot in members)
    anew = {slot for slot in members if mixed and _has_been_in(reports[slot])}
    sources = [replica for replica in first if holders.issuperset(replica)]
    joiners = sorted(slot for slot in members if slot not in holders or slot in anew)
    kept = any(_has_been_in(status) for status in reports.values())
    why = "" if kept else f"the nodes' memory has the state after {plural(state[1], 'step')}"
    return FormableGeneration(members, joiners, min(sources)[0] if sources else None, state[1], state, why)


def without_match(reports: Mapping[int, RankStatus]) -> list[int]:
    """Return the ranks that restart if :func:`formable` finds nothing: those that have been in a generation, and
    newcomers that came with an older checkpoint than others."""
    fresh = {slot: next_iteration(status) for slot, status in reports.items() if not _has_been_in(status)}
    newest = max(fresh.values(), default=-1)
    return [slot for slot in reports if slot not in fresh or fresh[slot] < newest]


def _has_been_in(status: RankStatus) -> bool:
    return status.state != "waiting"
