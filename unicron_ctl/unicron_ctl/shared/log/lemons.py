"""A node's history over weeks: one that fails again and again, and passes its tests in between, is a *lemon*. A pure
function over the records that the log still has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.thinning import DAY, LONG
from unicron_ctl.shared.protocol.answer_schema import NodeHistory, NodeMark

WEIGHTS: dict[type[records.Record], float] = {
    records.NodeLost: 2.0,
    records.NodeIsolated: 2.0,
    records.FailureDetected: 2.0,  # of the hardware
    records.NodeAvoided: 1.5,  # as a suspect
    records.JobDegraded: 1.0,
    records.Anomaly: 0.5,
    records.NodeHealth: 1.0,  # bad
}
"""Each kind of record, and what it counts against its node."""
SECONDS = LONG.seconds
HALF_LIFE = 7 * DAY
MOMENT = 600.0  # seconds; records closer together are one incident, of which the heaviest counts
LEMON = 3.0  # about two lost nodes in two weeks
AFTER_TEST = 0.5  # what a passed pair test leaves of all before it: a lemon passes tests, too


def history(events: Iterable[Event], node: str, now: float) -> NodeHistory:
    """Return the node's incidents, and a score that an incident raises by its weight and a week halves. events: in
    order."""
    marks = list[NodeMark]()
    score, last = 0.0, now - SECONDS
    for at, incident in _incidents(event for event in events if now - event.time <= SECONDS and _is_of(event, node)):
        score *= 0.5 ** ((at - last) / HALF_LIFE)
        last = at
        heaviest = max(incident, key=_weight)
        if _passed(heaviest):
            score *= AFTER_TEST
        score += _weight(heaviest)
        kind = heaviest.record.kind
        marks.append(NodeMark(time=at, kind=kind, weight=_weight(heaviest), reason=heaviest.record.reason[:400]))
    score *= 0.5 ** ((now - last) / HALF_LIFE)
    hint = f"sbatch --exclude={node}" if score >= LEMON else ""
    return NodeHistory(node=node, since=now - SECONDS, score=round(score, 2), lemon=LEMON, marks=marks, hint=hint)


def _is_of(event: Event, node: str) -> bool:
    record = event.record
    match record:
        case records.FailureDetected(node=name, escalation=memory):
            return name == node and memory is not None and memory.scope == "hardware"
        case records.NodeAvoided(node=name, suspect=suspect):
            return name == node and suspect
        case records.NodeHealth(node=name, verdict=verdict, source=source):
            return name == node and (verdict == "bad" or (source == "pair-test" and verdict == "good"))
        case records.NodeLost(node=name) | records.NodeIsolated(node=name) | records.JobDegraded(node=name):
            return name == node
        case records.Anomaly(node=name):
            return name == node
    return False


def _incidents(events: Iterable[Event]) -> Iterator[tuple[float, list[Event]]]:
    """Yield (time, its events) of each incident. A test's result is one of its own."""
    found, first = list[tuple[int, Event]](), -MOMENT
    number = 0
    for event in events:
        if event.time - first >= MOMENT or _passed(event) or (found and _passed(found[-1][1])):
            number, first = number + 1, event.time
        found.append((number, event))
    for _, group in groupby(found, key=lambda pair: pair[0]):
        each = [event for _, event in group]
        yield each[0].time, each


def _passed(event: Event) -> bool:
    return isinstance(event.record, records.NodeHealth) and event.record.verdict == "good"


def _weight(event: Event) -> float:
    return 0.0 if _passed(event) else WEIGHTS[type(event.record)]
