"""Compare the controller's log with the failures of the simulated agents, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.scale.traced import Injected
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event

ACTIONS = {1: "isolate", 2: "restart", 3: "reattempt"}  # of each severity, the first time
FOUND_SECONDS = 30.0  # from a failure until its record at the latest
EARLY_SECONDS = 0.5  # by which a record may be older than its failure: it has the time at which a rank saw it
AFTER_SECONDS = 1.0  # after all train again until a failure's consequences are over: the log is behind the agents
MOVE_SECONDS = 5.0  # for an element to leave its node; its ranks may train until then


@dataclass
class Judged:
    """The verdict on a run."""

    detected: list[tuple[str, float]] = field(default_factory=list)
    """(cause, seconds to its record) of each failure that was decided rightly."""
    wrong: list[str] = field(default_factory=list)
    """A line for each mistake."""


@dataclass
class _Found:
    """One failure of the log, with its last verdict."""

    time: float
    record: records.FailureDetected
    severity: int
    action: str
    cause: str


def failures(events: Iterable[Event]) -> dict[int, _Found]:
    """Return the failures of the log by number, with their later verdicts."""
    found: dict[int, _Found] = {}
    for event in events:
        match event.record:
            case records.FailureDetected() as record:
                found[event.id] = _Found(event.time, record, record.severity, record.action, record.cause)
            case records.FailureVerdict() as more if more.failure in found:
                one = found[more.failure]
                one.severity = more.severity or one.severity
                one.action, one.cause = more.action or one.action, more.cause or one.cause
    return found


def judge(injected: Sequence[Injected], events: Sequence[Event], ranks: int) -> Judged:
    """Judge whether each failure has a record of its own with the right severity and action, and nothing else happened.

    No healthy rank may be started or left out, no healthy element requeued, and no living node taken out of service.
    Ranks, elements and nodes of a failure may be touched until all train again.
    """
    out, recorded = Judged(), failures(events)
    matches = _match(injected, recorded)
    for place, one in enumerate(injected):
        mine = [recorded[number] for number in sorted(matches.get(place, []))]
        what = f"{one.cause} (SEV{one.severity}) at element {one.elements[0]}"
        if any(_right(one, found) for found in mine):
            out.detected.append((one.cause, min(found.time for found in mine) - one.at))
        else:
            verdicts = (f"{found.cause}: SEV{found.severity}, {found.action}" for found in mine)
            out.wrong.append(f"{what}: {', '.join(verdicts) or 'not found'}")
    explained = {number for mine in matches.values() for number in mine}
    for number in recorded.keys() - explained:
        found = recorded[number]
        about = f"slots {found.record.slots[:8]} of element {found.record.element}"
        out.wrong.append(f"a failure that did not happen: {found.cause}, SEV{found.severity}, {about}")
    out.wrong += filter(None, (_wrongly_touched(event, injected, ranks) for event in events))
    return out


def _match(injected: Sequence[Injected], recorded: dict[int, _Found]) -> dict[int, list[int]]:
    """Return the numbers of each failure's records; a record belongs to one failure only.

    Each failure first gets the first right record. A failure without one gets any record about it. The remaining
    records belong to a failure if they are no graver and came before all trained again.
    """
    matches: dict[int, list[int]] = {}
    free = dict(sorted(recorded.items()))
    for fits in (_right, lambda one, found: True):
        for number, found in list(free.items()):
            able = [
                place
                for place, one in enumerate(injected)
                if place not in matches and _about(one, found, one.at + FOUND_SECONDS) and fits(one, found)
            ]
            if able:
                matches[able[-1]] = [number]
                del free[number]
    for number, found in free.items():
        able = [
            place
            for place, one in enumerate(injected)
            if _about(one, found, _over(one)) and found.severity >= one.severity
        ]
        if able:
            matches[able[-1]].append(number)
    return matches


def _right(one: Injected, found: _Found) -> bool:
    return found.severity == one.severity and found.action == ACTIONS[one.severity]


def _about(one: Injected, found: _Found, until: float) -> bool:
    """Return whether the record names a rank of the failure, or of severity 1 its element."""
    if not one.at - EARLY_SECONDS <= found.time <= until:
        return False
    return found.record.element in one.elements if one.severity == 1 else bool({*found.record.slots} & {*one.slots})


def _over(one: Injected) -> float:
    """Return when the failure's consequences are over."""
    if not one.whole:
        return one.at + FOUND_SECONDS
    return max(one.whole + AFTER_SECONDS, one.at + (MOVE_SECONDS if one.severity == 1 else 0.0))


def _wrongly_touched(event: Event, injected: Sequence[Injected], ranks: int) -> str:
    """Describe the healthy rank, element or node that the record touched; empty if there is none."""
    hit = [one for one in injected if one.at - EARLY_SECONDS <= event.time <= _over(one)]
    left = {element for one in hit if one.severity == 1 for element in one.elements}
    touched = {slot for element in left for slot in range(element * ranks, element * ranks + ranks)}
    touched |= {slot for one in hit if one.severity == 2 for slot in one.slots}
    match event.record:
        case records.Break(lost=lost, reason=why) if others := {one.slot for one in lost} - touched:
            return f"left out although nothing happened to them: slots {sorted(others)[:8]} ({why})"
        case records.RankStart(slot=slot, reason=why) if slot not in touched:
            return f"started again although nothing happened to it: slot {slot} ({why})"
        case records.SlurmAction(action="requeue" | "requeue_hold" | "hold" | "cancel" as action, element=element):
            return "" if element in left else f"{action} of element {element}, to which nothing happened"
        case records.SlurmAction(action="down" | "drain" as action, node=node):
            died = any(one.node == node for one in hit if one.cause == "node_failed")
            return "" if died else f"{action} of {node}, which had not died"
    return ""
