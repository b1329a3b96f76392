"""Prints events as lines. On a terminal, equal events of several nodes, elements or slots are one line. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unicron_ctl.shared.commands.times import moment
from unicron_ctl.shared.commands.trouble import nameless, with_names
from unicron_ctl.shared.slurm.host_lists import fold
from unicron_detector.words import number_spans

RANKS = "failure_detected", "rank_start", "exit_noted"  # kinds of events about several ranks, which no text names
TOGETHER = 10.0  # seconds from the first to the last event of a line
ABOUT = ("id", "time", "job", "generation", "kind")  # fields of every event
FAILURE = "failure_detected"
Event = dict[str, Any]
Group = list[Event]


def alone(events: Iterable[Event]) -> list[Group]:
    """Each event by itself."""
    return [[event] for event in events]


def together(events: Iterable[Event]) -> list[Group]:
    """Group events that differ in nothing but names, in the order of each group's first event."""
    groups: list[Group] = []
    latest: dict[tuple[str, str, str], Group] = {}
    failures: dict[int, Event] = {}
    for event in events:
        if event["kind"] == FAILURE:
            failures[event["id"]] = {name: event[name] for name in ("node", "element", "slots") if name in event}
        elif isinstance(failure := event.get("failure"), int):  # an action on a failure belongs to its node
            event = failures.get(failure, {}) | event
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
        named = with_names(text, [name for name in names if name], chr(mark))
        if mark == 0 and named == text:  # the text names no node
            nodes = {node for event in group for node in _nodes(event)}
            where = f" on {fold(nodes)}" if nodes and fold(nodes) not in text else ""
        text = named
    slots = {slot for event in group for slot in _slots(event)} if first["kind"] in RANKS else ()
    if len(slots) > 1:
        where += f"{',' if where else ' of'} {number_spans('slot', slots)}"
    times = f" ({len(group)} times)" if len(group) > 1 else ""
    return f"{moment(first['time'])} {first['kind']}{_job(first)}{_generations(group)}{where}: {text}{times}"


def _job(event: Event) -> str:
    return f" job {event['job']}" if event["job"] else ""


def _generations(group: Group) -> str:
    numbers = sorted({event["generation"] for event in group} - {0})
    return "" if not numbers else f" g{numbers[0]}" if len(numbers) == 1 else f" g{numbers[0]}-{numbers[-1]}"


def _text_of(event: Event, folds: bool = False) -> str:
    """Return an event's reason or text, or else its fields. folds: nodes as a host list."""
    text = event.get("reason") or event.get("text")
    nodes = _list_field(event, "nodes") if folds else []
    if not text:
        rest = {key: value for key, value in event.items() if key not in ABOUT}
        if nodes:
            rest["nodes"] = fold(nodes)
        text = ", ".join(f"{key}={value}" for key, value in rest.items())
    text = " ".join(str(text).split())
    if len(nodes) > 1:
        for between in (", ", ",", " "):
            text = text.replace(between.join(nodes), fold(nodes))
    return text


def _nodes(event: Event) -> list[str]:
    return [event["node"]] if event.get("node") else _list_field(event, "nodes")


def _slots(event: Event) -> list[int]:
    """Return the slots of an event about ranks."""
    own = [event["slot"]] if isinstance(event.get("slot"), int) else []
    return [*own, *_list_field(event, "others")] or _list_field(event, "slots")


def _list_field(event: Event, field: str) -> list[Any]:
    """Return the field if it is a list; in some kinds of events it is a count."""
    return value if isinstance(value := event.get(field), list) else []


def _names(event: Event) -> list[str]:
    """Return the names that equal events differ in, in a fixed order; "" for one that the event lacks."""
    element, slots = event.get("element"), _list_field(event, "slots") or [one[0] for one in _list_field(event, "lost")]
    numbered = isinstance(element, int) and element >= 0
    return [
        event.get("node") or "",
        f"{event['job']}_{element}" if numbered and event["job"] else "",
        f"element={element}" if numbered else "",
        f"slot {slots[0]}" if len(slots) == 1 else "",
    ]


def _nameless(event: Event) -> str:
    """Return an event's text with a control character, which no answer of the controller has, for each of its names."""
    text = _text_of(event, folds=True)
    for mark, name in enumerate(_names(event)):
        text = nameless(text, name, chr(mark))
    return text
