"""Failure traces: what happens to which node when. Readers for our own CSV and for public churn traces; other public
formats are in unicron_planner.simulate.formats.

Ours: CSV with the header `seconds,event,node,cause`; event is `fail` or `join`. A failure of severity 1 takes the
node away until it joins again; other failures do not. Public churn traces (for example those in the
repository uclasystem/bamboo, folder traces/): lines `milliseconds,add|remove,node` without a header.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate import causes, formats
from unicron_planner.simulate.causes import CAUSES, Cause

HEADER = ["seconds", "event", "node", "cause"]
LARGEST = 5_000_000  # lines
DAY = 86400.0
UNIX = 1e8  # seconds, 3 years: the times of a trace that begins later are Unix times


@dataclass(frozen=True)
class TraceEvent:
    """One line of a trace."""

    seconds: float
    event: str  # "fail" or "join"
    node: str
    cause: Cause | None = None
    """None for a join."""
    notice: float = 0.0
    """Seconds by which the event is announced ahead, as when a spot instance is taken back."""

    @property
    def failure(self) -> Cause:
        """The cause of a failure. Raises PlanError where there is none."""
        if self.cause is None:
            raise PlanError(f"the trace's event at {self.seconds:g} s, {self.event} of {self.node}, has no cause")
        return self.cause


@dataclass(frozen=True)
class Trace:
    """Events in order of time, and the second at which the replay ends."""

    events: tuple[TraceEvent, ...]
    until: float
    name: str = "trace"
    notes: tuple[str, ...] = ()  # lines for people on how the file was read


def with_notice(trace: Trace, seconds: float) -> Trace:
    """Returns the trace with each loss of a node announced this many seconds ahead. Raises PlanError."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise PlanError(f"a notice must be 0 seconds or more, not {seconds}")
    leaves = (replace(e, notice=seconds) if e.cause and e.cause.severity == 1 else e for e in trace.events)
    return replace(trace, events=tuple(leaves))


def load(path: str | Path, until: float | None = None) -> Trace:
    """Reads a trace from a file of any supported kind. Raises PlanError with one line. until: its end in seconds, by
    default a day after the last event."""
    text = _text(path)
    if text.lstrip()[:1] in ("[", "{"):
        return _make_trace(formats.from_json(path, text), until, path)
    try:
        lines = formats.read_csv(text)
    except csv.Error:
        raise PlanError(f"{path} is not a CSV file") from None
    if len(lines) > LARGEST:
        raise PlanError(f"{path} has more than {LARGEST} lines")
    if not lines:
        raise PlanError(f"{path} is empty: a trace starts with the header {','.join(HEADER)}")
    first = [field.strip().lower() for field in lines[0][1]]
    if first == HEADER:
        events = _infer([_own(path, number, row) for number, row in lines[1:]])
    elif formats.is_counts(first):
        return _make_trace(formats.from_counts(path, lines), until, path)
    elif len(first) == 3 and first[1] in ("add", "remove"):
        events = [_churn(path, number, row) for number, row in lines]
    elif formats.is_start_stop(first):
        return _make_trace(formats.from_csv(path, lines), until, path)
    elif separator := formats.other_separator(next(filter(str.strip, text.split("\n"))), ",|"):
        raise PlanError(f"{path}: there are {separator} between its fields: write commas, and decimals with a point")
    else:
        raise PlanError(
            f"{path}: the first line must be the header {','.join(HEADER)}, a header with node, start and stop, or be "
            "ms,add|remove,node or date, time, nodes"
        )
    return make(_from_zero(events), until, Path(path).stem)


def _make_trace(outages: formats.FileOutages, until: float | None, path: str | Path) -> Trace:
    trace = make(_from_zero(_nodes_away(outages.rows)), until, Path(path).stem)
    return replace(trace, notes=outages.notes)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a text file") from None


def _from_zero(events: list[TraceEvent]) -> list[TraceEvent]:
    """Makes Unix times count from the first event: else the replay would begin with decades without a failure."""
    zero = min((event.seconds for event in events), default=0.0)
    return [replace(event, seconds=event.seconds - zero) for event in events] if zero >= UNIX else events


def _nodes_away(rows: Iterable[formats.Away]) -> list[TraceEvent]:
    """For each outage the loss of the node, and its return if there is one."""
    events = []
    for row in rows:
        events.append(TraceEvent(row.start, "fail", row.node, row.cause))
        if math.isfinite(row.end):
            events.append(TraceEvent(row.end, "join", row.node))
    return events


def make(events: Iterable[TraceEvent], until: float | None = None, name: str = "trace") -> Trace:
    """Makes a Trace of events in any order."""
    ordered = sorted(events, key=lambda event: event.seconds)
    end = (ordered[-1].seconds if ordered else 0.0) + DAY if until is None else until
    if not math.isfinite(end) or end <= 0:
        raise PlanError(f"the end of the replay must be above 0 seconds, not {end}")
    return Trace(tuple(event for event in ordered if event.seconds < end), end, name)


def _seconds(path: str | Path, number: int, text: str, scale: float = 1.0) -> float:
    try:
        value = float(text) * scale
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise PlanError(f"{path}, line {number}: the time {text!r} is not a number of 0 or more")
    return value


def _own(path: str | Path, number: int, row: list[str]) -> TraceEvent | tuple[float, str, str]:
    if len(row) < 3 or len(row) > 4:
        raise PlanError(f"{path}, line {number}: expected {','.join(HEADER)}, found {len(row)} fields")
    seconds, event, node, cause = [*(field.strip() for field in row), ""][:4]
    when = _seconds(path, number, seconds)
    if event.lower() not in ("fail", "join"):
        raise PlanError(f"{path}, line {number}: the event must be fail or join, not {event!r}")
    if not node:
        raise PlanError(f"{path}, line {number}: the node's name is missing")
    if event.lower() == "join":
        return TraceEvent(when, "join", node)
    found = causes.find(cause) if cause else CAUSES["node_failed"]
    return TraceEvent(when, "fail", node, found) if found else (when, node, cause)


def _infer(rows: list[TraceEvent | tuple[float, str, str]]) -> list[TraceEvent]:
    """Guesses the kind of causes that are not in the table: the node was lost if its next event is a join, else a
    process."""
    ordered = sorted(rows, key=lambda row: row.seconds if isinstance(row, TraceEvent) else row[0])
    following: dict[str, str] = {}
    out = []
    for row in reversed(ordered):
        if not isinstance(row, TraceEvent):
            when, node, name = row
            lost = following.get(node) == "join"
            row = TraceEvent(when, "fail", node, Cause(name, 1 if lost else 2, "node_health" if lost else "process"))
        following[row.node] = row.event
        out.append(row)
    return out[::-1]


def _churn(path: str | Path, number: int, row: list[str]) -> TraceEvent:
    if len(row) != 3 or row[1].strip() not in ("add", "remove") or not row[2].strip():
        raise PlanError(f"{path}, line {number}: expected milliseconds,add|remove,node")
    when, node = _seconds(path, number, row[0], 1e-3), row[2].strip()
    if row[1].strip() == "add":
        return TraceEvent(when, "join", node)
    return TraceEvent(when, "fail", node, CAUSES["lost_connection"])


def write(trace: Trace, path: str | Path) -> None:
    """Writes our CSV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(
            [f"{event.seconds:.3f}", event.event, event.node, event.cause.name if event.cause else ""]
            for event in trace.events
        )
