"""Compare the controller's log with what was done to the agents, failure by failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.scale.traced import Injected
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event

ACTIONS = {1: "isolate", 2: "restart", 3: "reattempt"}  # of each severity, the first time
FOUND_SECONDS = 30.0  # a failure is looked for in the log that long after it happened
EARLY_SECONDS = 0.5  # a record may bear a time before that of its failure: ranks tell the time of what they saw
AFTER_SECONDS = 1.0  # what a failure brings about is over so long after all train again: the log is behind the agents
MOVE_SECONDS = 5.0  # an element leaves its node within it; one whose ranks go on till then looks whole all the time


@dataclass
class Judged:
    """The verdict on a run.

    detected: seconds from each failure that was found to its event. wrong: what does not fit, in words.
    """

    detected: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class _Found:
    """One failure of the log, as it stands at the end."""

    time: float
    record: records.FailureDetected
    severity: int
    action: str
    cause: str


def failures(events: Iterable[Event]) -> dict[int, _Found]:
    """Failure's number -> it, with what became known later."""
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
    """Each failure was found, by a record of its own with its severity and the action that belongs to it; and nobody
    else was touched: no other rank started or left out, no other element requeued, no node taken out of service that
    had not died. Who failed may be touched from then until all train again, and not later."""
    out, known = Judged(), failures(events)
    answers = _answers(injected, known)
    for place, one in enumerate(injected):
        mine = [known[number] for number in sorted(answers.get(place, []))]
        what = f"{one.cause} (SEV{one.severity}) at element {one.elements[0]}"
        if any(_right(one, found) for found in mine):
            out.detected.append((one.cause, min(found.time for found in mine) - one.at))
        elif mine:
            said = ", ".join(f"{found.cause}: SEV{found.severity}, {found.action}" for found in mine)
            out.wrong.append(f"{what}: {said}")
        else:
            out.wrong.append(f"{what}: not found")
    explained = {number for mine in answers.values() for number in mine}
    for number in known.keys() - explained:
        found = known[number]
        about = f"slots {found.record.slots[:8]} of element {found.record.element}"
        out.wrong.append(f"a failure that did not happen: {found.cause}, SEV{found.severity}, {about}")
    out.wrong += _strangers(injected, events, ranks)
    return out


def _answers(injected: Sequence[Injected], known: dict[int, _Found]) -> dict[int, list[int]]:
    """Failure's place -> the records about it, of which none is about another one, too. First each failure gets the
    first record that is right; then each without one a record about it, whatever that says; what is left is about a
    failure where it is no graver and came before all trained again."""
    answers: dict[int, list[int]] = {}
    free = dict(sorted(known.items()))
    for fits in (_right, lambda one, found: True):
        for number, found in list(free.items()):
            able = [
                place
                for place, one in enumerate(injected)
                if place not in answers and _about(one, found, one.at + FOUND_SECONDS) and fits(one, found)
            ]
            if able:
                answers[able[-1]] = [number]
                del free[number]
    for number, found in free.items():
        able = [
            place
            for place, one in enumerate(injected)
            if _about(one, found, _over(one)) and found.severity >= one.severity
        ]
        if able:
            answers[able[-1]].append(number)
    return answers


def _right(one: Injected, found: _Found) -> bool:
    return found.severity == one.severity and found.action == ACTIONS[one.severity]


def _about(one: Injected, found: _Found, until: float) -> bool:
    """Whether the record names who failed; of a failure that takes no node, a rank of it."""
    if not one.at - EARLY_SECONDS <= found.time <= until:
        return False
    return found.record.element in one.elements if one.severity == 1 else bool({*found.record.slots} & {*one.slots})


def _over(one: Injected) -> float:
    """When what the failure brings about is over."""
    if not one.whole:
        return one.at + FOUND_SECONDS
    return max(one.whole + AFTER_SECONDS, one.at + (MOVE_SECONDS if one.severity == 1 else 0.0))


def _strangers(injected: Sequence[Injected], events: Sequence[Event], ranks: int) -> list[str]:
    """Describe each record that touched somebody to whom nothing had happened."""
    found = (_stranger(event, _hit(injected, event.time), ranks) for event in events)
    return [text for text in found if text]


def _hit(injected: Sequence[Injected], time: float) -> list[Injected]:
    """Return the failures that were not over at a time."""
    return [one for one in injected if one.at - EARLY_SECONDS <= time <= _over(one)]


def _stranger(event: Event, hit: Sequence[Injected], ranks: int) -> str:
    """Describe whom the record touched beside those who were hit; empty where it touched nobody else."""
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
