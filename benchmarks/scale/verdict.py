"""What the controller made of each failure, by its own log, beside what was done to the agents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.scale.traced import Injected
from unicron_ctl.controller.log import records
from unicron_ctl.controller.log.records import Event

ACTIONS = {1: "isolate", 2: "restart", 3: "reattempt"}  # of each severity, the first time
FOUND_SECONDS = 30.0  # a failure is looked for in the log that long after it happened


@dataclass
class Judged:
    """detected: seconds from each failure that was found to its event. wrong: what does not fit, in words."""

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
    """Each failure was found, with its severity and the action that belongs to it; and nobody else was touched: no
    other rank started or left out, no other element requeued, no node taken out of service that had not died."""
    out, known = Judged(), failures(events)
    explained: set[int] = set()
    for one in injected:
        mine = {number: found for number, found in known.items() if _belongs(one, found)}
        explained |= mine.keys()
        right = [f for f in mine.values() if f.severity == one.severity and f.action == ACTIONS[one.severity]]
        what = f"{one.cause} (SEV{one.severity}) at element {one.elements[0]}"
        if right:
            out.detected.append((one.cause, min(f.time for f in mine.values()) - one.at))
        elif mine:
            said = ", ".join(f"{f.cause}: SEV{f.severity}, {f.action}" for f in mine.values())
            out.wrong.append(f"{what}: {said}")
        else:
            out.wrong.append(f"{what}: not found")
    for number, found in known.items():
        if number not in explained:
            about = f"slots {found.record.slots[:8]} of element {found.record.element}"
            out.wrong.append(f"a failure that did not happen: {found.cause}, SEV{found.severity}, {about}")
    out.wrong += _strangers(injected, events, ranks)
    return out


def _belongs(one: Injected, found: _Found) -> bool:
    if not -0.5 <= found.time - one.at <= FOUND_SECONDS:
        return False
    alike = found.cause == one.cause and len(found.record.slots) > 1 and one.severity == 3  # the whole job's
    return alike or found.record.element in one.elements


def _strangers(injected: Sequence[Injected], events: Sequence[Event], ranks: int) -> list[str]:
    left = {element for one in injected if one.severity == 1 for element in one.elements}
    died = {one.node for one in injected if one.cause == "node_failed"}
    touched = {slot for element in left for slot in range(element * ranks, element * ranks + ranks)}
    touched |= {slot for one in injected if one.severity == 2 for slot in one.slots}
    found = []
    for event in events:
        match event.record:
            case records.Break(lost=lost, reason=why) if others := {one.slot for one in lost} - touched:
                found.append(f"left out although nothing happened to them: slots {sorted(others)[:8]} ({why})")
            case records.RankStart(slot=slot, reason=why) if slot not in touched:
                found.append(f"started again although nothing happened to it: slot {slot} ({why})")
            case records.SlurmAction(action=action, element=element) if (
                action in ("requeue", "requeue_hold", "hold", "cancel") and element not in left
            ):
                found.append(f"{action} of element {element}, to which nothing happened")
            case records.SlurmAction(action=action, node=node) if action in ("down", "drain") and node not in died:
                found.append(f"{action} of {node}, which had not died")
    return found
