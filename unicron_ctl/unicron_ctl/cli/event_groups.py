"""Events as lines: on a terminal those that say the same of several nodes, elements or slots are one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unicron_ctl.shared.commands.times import moment
from unicron_ctl.shared.commands.trouble import nameless, with_names
from unicron_ctl.shared.slurm.host_lists import fold

TOGETHER = 10.0  # seconds from the first of equal events to the last one of its line
ABOUT = ("id", "time", "job", "generation", "kind")  # fields of every event
FAILURE = "failure_detected"
Event = dict[str, Any]
Group = list[Event]


def alone(events: Iterable[Event]) -> list[Group]:
    """Each event by itself."""
    return [[event] for event in events]


def together(events: Iterable[Event]) -> list[Group]:
    """Events that are equal but for their names, in the order of the first of each group."""
    groups: list[Group] = []
    latest: dict[tuple[str, str, str], Group] = {}
    known: dict[int, Event] = {}
    for event in events:
        if event["kind"] == FAILURE:
            known[event["id"]] = {name: event[name] for name in ("node", "element", "slots") if name in event}
        elif isinstance(failure := event.get("failure"), int):  # what is done about it is said of its node
            event = known.get(failure, {}) | event
        key = event["kind"], event["job"], _nameless(event)
        group = latest.get(key)
        if group is None or event["time"] - group[0]["time"] > TOGETHER:
            group = latest[key] = []
            groups.append(group)
        group.append(event)
    return groups


def line(event: Event) -> str:
    """One event on one line, with nothing folded."""
    return f"{moment(event['time'])} {event['kind']}{_job(event)}{_generations([event])}: {_text_of(event)}"


def line_of(group: Group) -> str:
    """One line for all events of a group: the time of the first, their nodes as a host list, and how many they are."""
    first, text = group[0], _nameless(group[0])
    where = ""
    for mark, names in enumerate(zip(*map(_names, group), strict=True)):
        told = with_names(text, [name for name in names if name], _mark(mark))
        if mark == 0 and told == text:  # the text names no node
            nodes = {node for event in group for node in _nodes(event)}
            where = f" on {fold(nodes)}" if nodes and fold(nodes) not in text else ""
        text = told
    times = f" ({len(group)} times)" if len(group) > 1 else ""
    return f"{moment(first['time'])} {first['kind']}{_job(first)}{_generations(group)}{where}: {text}{times}"


def _job(event: Event) -> str:
    return f" job {event['job']}" if event["job"] else ""


def _generations(group: Group) -> str:
    found = sorted({event["generation"] for event in group} - {0})
    return "" if not found else f" g{found[0]}" if len(found) == 1 else f" g{found[0]}-{found[-1]}"


def _text_of(event: Event, folds: bool = False) -> str:
    """Return the words of an event. folds: nodes as a host list."""
    told = event.get("reason") or event.get("text")
    if not told:
        rest = {key: value for key, value in event.items() if key not in ABOUT}
        if folds and _list_field(event, "nodes"):
            rest["nodes"] = fold(event["nodes"])
        told = ", ".join(f"{key}={value}" for key, value in rest.items())
    told = " ".join(str(told).split())
    if folds and len(listed := _list_field(event, "nodes")) > 1:
        for between in (", ", ",", " "):
            told = told.replace(between.join(listed), fold(listed))
    return told


def _nodes(event: Event) -> list[str]:
    return [event["node"]] if event.get("node") else _list_field(event, "nodes")


def _list_field(event: Event, field: str) -> list[Any]:
    """The field where it is a list: of some kinds it is a count."""
    return found if isinstance(found := event.get(field), list) else []


def _names(event: Event) -> list[str]:
    """Return the names that set an event apart from its equals, in a fixed order; "" for one that it has not."""
    element, slots = event.get("element"), _list_field(event, "slots") or [one[0] for one in _list_field(event, "lost")]
    numbered = isinstance(element, int) and element >= 0
    return [
        event.get("node") or "",
        f"{event['job']}_{element}" if numbered and event["job"] else "",
        f"element={element}" if numbered else "",
        f"slot {slots[0]}" if len(slots) == 1 else "",
    ]


def _nameless(event: Event) -> str:
    """Return the words of an event, with a mark in place of each of its names."""
    text = _text_of(event, folds=True)
    for mark, name in enumerate(_names(event)):
        text = nameless(text, name, _mark(mark))
    return text


def _mark(number: int) -> str:
    """No answer of the controller has a control character."""
    return chr(number)
