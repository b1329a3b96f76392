"""Readers for public formats of failure traces (unicron_planner.simulate.trace has our own and the churn traces).

- A JSON list of faults that start and end on nodes, one object each: `node_id`, `event_time` in days, `event_type`
  (`fault_start`, `fault_end`), `fault_type` (for example stepfun-ai/InfiniteHBD-Trace, of arXiv 2502.03885).
- JSON with the times between which nodes were away: a list of `{"node", "start", "end"}`, or by node a list of
  `[start, end]`.
- CSV with a header that names a node, a start and a stop.
- What `sacctmgr show event -P` prints, as it is or with commas in place of its bars. Rows without a node are the
  cluster's own. A node that was DOWN, FAIL or in an error has failed, and one that Unicron, NHC or Slurm itself
  drained. One that an admin drained, that was put into maintenance, rebooted or powered down has not.
- Numbers of nodes over time: lines `date, time, nodes` (uclasystem/bamboo, traces/gcloud), or JSON with `gap_seconds`
  and `data` (skypilot-org/spot-traces). They do not show which node left: the last to come is the first to leave.

A table that names jobs is refused, because its rows may be their runs. In a table with a state or status, only rows of
nodes that are away count; an unknown word is refused. A note says what is left out.

Times of the last two are seconds, or dates and times of ISO 8601; then the earliest is second 0. Digits alone are
seconds; if all of them could be dates (20250131), they are refused. A node is away from its first open fault until the
last one has ended.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate import causes
from unicron_planner.simulate.causes import CAUSES, Cause

DAY = 86400.0
NODES = ("node", "node_id", "node_name", "nodename", "host", "hostname", "machine", "machine_id", "server", "instance")
STARTS = ("start", "start_time", "begin", "fault_start", "down", "failed", "timestart", "event_start_time")
STOPS = ("stop", "stop_time", "end", "end_time", "fault_end", "up", "repaired", "timeend", "event_stop_time")
JOBS = ("job", "job_id", "jobid", "job_name", "jobname", "task", "task_id", "taskid", "task_name", "taskname")
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
OPEN = ("", "none", "null", "unknown", "nan", "inf")  # ends that nobody knows
BARE_DATE = re.compile(r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])")
MOST_NODES = 100_000
LATEST = 1e11  # seconds; Unix times in milliseconds are above
STATES = ("state", "status", "node_state", "node_status", "health", "availability", "condition")
AWAY = frozenset(
    "down fail failed failing failure fault faulty error not_responding dead lost offline unavailable broken unhealthy "
    "crashed outage preempted inactive".split()
)
THERE = frozenset(
    "idle allocated alloc mixed mix completing comp up ok good healthy available online running active ready in_use "
    "maint maintenance drain drained draining drng planned reserved resv powered_down powering_down powering_up "
    "power_up power_down cloud reboot rebooting reboot_issued reboot_requested resume future undrain blocked "
    "dynamic_norm dynamic_future".split()
)
# How reasons begin that Unicron, LBNL's NHC, slurmd and slurmctld (24.11.5 and 26.05.5) give a node that they drain.
OF_PROGRAMS = re.compile(
    r"unicron\[|NHC\b|Kill task failed|Prolog error|Epilog error|Prolog failed|Not responding|Node unexpectedly "
    r"rebooted|ResumeTimeout reached|Low (CPUs|RealMemory|TmpDisk|socket)|batch job complete failure|\S+ count "
    r"(too low|reported lower|changed)|gres/\S+ count",
    re.IGNORECASE,
)
CAUSE_NAMES = ("cause", "reason", "fault", "fault_type", "type", "desc", "description")
# Words of public traces, in the order in which they count, and what they are in our table.
WORDS = (
    ("ecc", "ecc_error"),
    ("nvlink", "nvlink_error"),
    ("nic", "nic_error"),
    ("cable", "nic_error"),
    ("optical", "nic_error"),
    ("link down", "nic_error"),
    ("gpu", "gpu_lost"),
    ("disk", "local_disk_error"),
    ("raid", "local_disk_error"),
    ("kernel", "kernel_error"),
    ("operating system", "kernel_error"),
    ("hardware", "host_hardware_error"),
)


class Away(NamedTuple):
    """A node is away from `start` to `end`, in seconds; `end` is infinite if it does not come back."""

    node: str
    start: float
    end: float
    cause: Cause


class FileOutages(NamedTuple):
    """The outages in a file, and notes for people on how it was read."""

    rows: list[Away]
    notes: tuple[str, ...] = ()


def cause_of(text: str) -> Cause:
    """A cause of severity 1, because the node is away."""
    found = causes.find(text)
    if found is not None and found.severity == 1:
        return found
    lower = text.lower()
    name = next((name for word, name in WORDS if re.search(rf"\b{word}", lower)), "node_failed")
    return CAUSES[name]


def merge_outages(rows: Iterable[Away]) -> list[Away]:
    """Sorts the outages by time, and joins those of one node that overlap, with the first one's cause."""
    out: list[Away] = []
    last: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (row.start, row.node)):
        before = last.get(row.node)
        if before is not None and row.start <= out[before].end:
            out[before] = out[before]._replace(end=max(out[before].end, row.end))
        else:
            last[row.node] = len(out)
            out.append(row)
    return out


# ------------------------------------------------------------ JSON
def from_json(path: str | Path, text: str) -> FileOutages:
    """Raises PlanError, one line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not valid JSON: {error}") from None
    if isinstance(data, Mapping) and isinstance(data.get("metadata"), Mapping) and "gap_seconds" in data["metadata"]:
        return _at_even_steps(path, data["metadata"]["gap_seconds"], data.get("data"))
    lists = data.items() if isinstance(data, Mapping) else [("", data)]
    rows = [_json_row(path, node, item) for node, items in lists for item in _list(path, items)]
    if rows and "event_type" in rows[0]:
        return FileOutages(merge_outages(_opened_and_closed(path, rows)))
    _check_no_jobs(path, {name for row in rows for name in row})
    state = next((name for name in STATES if any(name in row for row in rows)), None)
    if state is None:
        return FileOutages(merge_outages(_between(path, rows)))
    gone = [_is_away(path, number, str(row.get(state, "")), state) for number, row in enumerate(rows, 1)]
    return FileOutages(
        merge_outages(_between(path, [row for row, away in zip(rows, gone, strict=True) if away])),
        _skip_note(gone, state),
    )


def _json_row(path: str | Path, node: str, item: object) -> Mapping[str, Any]:
    """The fault as an object. It is of the node whose list it is in, unless it names one itself."""
    if node and isinstance(item, list) and len(item) == 2:
        return {"node": node, "start": item[0], "end": item[1]}
    if not isinstance(item, Mapping):
        raise PlanError(f"{path}: expected objects with a node, a start and an end, or pairs [start, end] by node")
    return {**item, "node": node} if node and _first(item, NODES) is None else item


def _opened_and_closed(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> list[Away]:
    """Reads events of faults in any order, with times in days. An end without a begin on that node is left out."""
    events: list[tuple[float, bool, str, str]] = []
    for number, row in enumerate(rows, 1):
        what, node, fault = row.get("event_type"), _node_name(path, number, row), _words(row.get("fault_type"))
        if what not in ("fault_start", "fault_end"):
            raise PlanError(f"{path}, event {number}: event_type must be fault_start or fault_end, not {what!r}")
        when = _number(path, number, row.get("event_time")) * DAY
        events.append((when, what == "fault_end", node, fault))
    found: list[Away] = []
    opened: dict[tuple[str, str], list[int]] = defaultdict(list)
    for when, ends, node, fault in sorted(events):
        if not ends:
            opened[node, fault].append(len(found))
            found.append(Away(node, when, math.inf, cause_of(fault)))
        elif opened[node, fault]:
            at = opened[node, fault].pop(0)
            found[at] = found[at]._replace(end=when)
    return found


def _list(path: str | Path, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{path}: expected a list of faults, or such lists by node")
    return value


def _words(value: object) -> str:
    """A description as text: itself, or the words of all its parts."""
    if isinstance(value, Mapping):
        return " ".join(str(part) for part in value.values())
    return "" if value is None else str(value)


# ------------------------------------------------------------ CSV
def is_start_stop(header: Sequence[str]) -> bool:
    """The header (lower case) names a node, a start and a stop."""
    return all(_column(header, names) is not None for names in (NODES, STARTS, STOPS))


def from_csv(path: str | Path, rows: Sequence[tuple[int, list[str]]]) -> FileOutages:
    """rows: (line number, fields), the header first. Raises PlanError, one line."""
    header = [_plain(field) for field in rows[0][1]]
    node, start, stop = (_column(header, names) for names in (NODES, STARTS, STOPS))
    cause = _column(header, CAUSE_NAMES)
    assert node is not None and start is not None and stop is not None
    if "event_type" in header:
        why = "event_type may mark the times between outages, too: keep the rows of the outages, without this column"
        raise PlanError(f"{path}: {why}")
    _check_no_jobs(path, header)
    body, notes = _outages(path, header, rows[1:])
    faults = []
    for number, row in body:
        if len(row) <= max(node, start, stop):
            raise PlanError(f"{path}, line {number}: expected {len(header)} fields, found {len(row)}")
        text = row[cause] if cause is not None and cause < len(row) else ""
        faults.append({"node": row[node], "start": row[start], "end": row[stop], "cause": text, "line": number})
    return FileOutages(merge_outages(_between(path, faults)), notes)


def _check_no_jobs(path: str | Path, columns: Iterable[str]) -> None:
    """Raises PlanError for a table whose rows begin and end on nodes because jobs do."""
    if found := next((name for name in columns if _plain(name) in JOBS), ""):
        why = f"its rows may be runs of jobs, for they have {found}: keep those of outages, without it"
        raise PlanError(f"{path}: {why}")


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    plain = [_plain(field) for field in header]
    return next((plain.index(name) for name in names if name in plain), None)


def _plain(field: str) -> str:
    return re.sub(r"[\s-]+", "_", field.strip().lower())


def other_separator(head: str, wanted: str) -> str:
    """The name of the separator that a header has in place of those in `wanted`; "" if it has none."""
    counts = {words: head.strip().count(mark) for mark, words in SEPARATORS.items() if mark not in wanted}
    most = max(counts, key=lambda words: counts[words])
    if any(mark in head for mark in wanted) and counts[most] <= sum(map(head.count, wanted)):
        return ""
    return most if counts[most] else "spaces" if "  " in head.strip() and not any(map(head.count, wanted)) else ""


def read_csv(text: str) -> list[tuple[int, list[str]]]:
    """(line number, fields) of each line that is not empty. Raises csv.Error."""
    lines = text.split("\n")
    head = next((line for line in lines if line.strip()), "")
    if "|" in head and "," not in head:  # sacctmgr quotes nothing
        rows = [line.rstrip("\r").split("|") for line in lines]
        if rows and head.rstrip().endswith("|"):
            rows = [row[:-1] if len(row) > 1 and not row[-1].strip() else row for row in rows]
        return [(number, row) for number, row in enumerate(rows, 1) if any(map(str.strip, row))]
    return [(number, row) for number, row in enumerate(csv.reader(lines), 1) if any(map(str.strip, row))]


def _outages(
    path: str | Path, header: Sequence[str], rows: Sequence[tuple[int, list[str]]]
) -> tuple[Sequence[tuple[int, list[str]]], tuple[str, ...]]:
    """The rows in which a node is away, and notes on the others. Raises PlanError."""
    if {"nodename", "timestart", "timeend", "state"} <= set(header):
        return _failures_of_slurm(header, rows)
    if {"nodename", "timestart", "timeend"} <= set(header):
        why = "without the column State maintenance looks like a failure: print State and Reason, too"
        raise PlanError(f"{path}: {why}")
    at = _column(header, STATES)
    if at is None:
        return rows, ()
    gone = [len(row) <= at or _is_away(path, number, row[at], header[at]) for number, row in rows]
    return [row for row, away in zip(rows, gone, strict=True) if away], _skip_note(gone, header[at])


def _is_away(path: str | Path, number: int, text: str, column: str) -> bool:
    """Whether a node in this state is away. Raises PlanError for an unknown word."""
    words = [
        word.strip("*~#!%$@^-") for word in re.split(r"[+\s]+", text.strip().lower().replace("not responding", "down"))
    ]
    for word in words:
        if word not in AWAY and word not in THERE:
            why = f"keep the rows of the outages, without the column {column}"
            raise PlanError(f"{path}, line {number}: whether a node that is {text!r} is there is not known: {why}")
    planned = any(word.startswith(("maint", "power", "reboot")) for word in words) or re.search(r"[$@^~#!%]", text)
    return not planned and any(word in AWAY for word in words)


def _skip_note(gone: Sequence[bool], column: str) -> tuple[str, ...]:
    out = len(gone) - sum(gone)
    why = f"by their {column} the node was there, or taken on purpose"
    return (f"{out} of {len(gone)} rows are left out: {why}",) if out else ()


def _failures_of_slurm(
    header: Sequence[str], rows: Sequence[tuple[int, list[str]]]
) -> tuple[Sequence[tuple[int, list[str]]], tuple[str, ...]]:
    """The rows of nodes that failed, of what sacctmgr printed, and a note on the others."""
    node, state = header.index("nodename"), header.index("state")
    reason = header.index("reason") if "reason" in header else len(header) - 1
    kept, others = [], []
    for number, row in rows:
        more = len(row) - len(header)
        if more > 0:  # a reason may have the separator in it
            row = [*row[:reason], ",".join(row[reason : reason + more + 1]), *row[reason + more + 1 :]]
        if len(row) > max(node, state):
            if not row[node].strip():
                continue
            why = row[reason].strip() if len(row) > reason else ""
            if not _has_failed(row[state], why if "reason" in header else ""):
                others.append(f"{row[node].strip()}, {row[state].strip()}" + (f", {why!r}" if why else ""))
                continue
        kept.append((number, row))
    if not others:
        return kept, ()
    first = f"rows are left out: drained by somebody, in maintenance, rebooted or powered down (the first: {others[0]})"
    return kept, (f"{len(others)} of {len(others) + len(kept)} {first}",)


def _has_failed(state: str, reason: str) -> bool:
    """Whether a node's state in Slurm's accounting is a failure. Suffixes of a state (sinfo(1)): `$` maintenance, `@`
    and `^` a reboot on request, `~`, `#`, `!` and `%` power saving."""
    words = re.split(r"[+\s]+", state.strip().upper())
    if re.search(r"[$@^~#!%]", state) or any(word.startswith(("MAINT", "POWER", "REBOOT")) for word in words):
        return False
    bare = {word.rstrip("*-") for word in words}
    if bare & {"DOWN", "FAIL", "FAILING", "ERROR", "NOT_RESPONDING"}:
        return True
    return bool(bare & {"DRAIN", "DRAINED", "DRAINING"}) and OF_PROGRAMS.match(reason) is not None


# ------------------------------------------------------------ counts
def is_counts(first: Sequence[str]) -> bool:
    """The line is a date, a time and a number of nodes."""
    words = [word.strip() for word in first]
    return len(words) == 3 and _date(f"{words[0]} {words[1]}") is not None and words[2].isdecimal()


def from_counts(path: str | Path, lines: Sequence[tuple[int, list[str]]]) -> FileOutages:
    """Reads lines of a date, a time and a number of nodes. Raises PlanError."""
    points: list[tuple[float, int]] = []
    for number, row in lines:
        if not is_counts(row):
            raise PlanError(f"{path}, line {number}: expected `date, time, nodes`, such as 2026-01-31, 00:10:00, 16")
        moment, _ = _moment(path, number, f"{row[0].strip()} {row[1].strip()}")
        points.append((moment, int(row[2])))
    return _of_counts(path, sorted(points))


def _at_even_steps(path: str | Path, step: object, data: object) -> FileOutages:
    """Reads numbers of nodes, one every `step` seconds (skypilot-org/spot-traces). Raises PlanError."""
    seconds = _number(path, 1, step)
    counts = _list(path, data)
    if any(type(count) is not int or count < 0 for count in counts):
        raise PlanError(f"{path}: its data must be numbers of nodes of 0 or more")
    if not counts or max(counts) <= 1:
        raise PlanError(
            f"{path}: its data are 0 and 1, of which either may be a node that is there: for each change write a line "
            "`milliseconds,add,node1` or `milliseconds,remove,node1`, and give that file"
        )
    return _of_counts(path, [(seconds * number, count) for number, count in enumerate(counts)])


def _of_counts(path: str | Path, points: Sequence[tuple[float, int]]) -> FileOutages:
    """Numbers the nodes from 1; if k are there, those above k are away."""
    most = max(count for _, count in points)
    if most > MOST_NODES:
        raise PlanError(f"{path}: {most} nodes are more than {MOST_NODES}: is this the number of nodes?")
    rows: list[Away] = []
    since: dict[int, float] = {}
    zero, there = points[0][0], most
    for when, count in points:
        for node in range(there + 1, count + 1):
            rows.append(Away(f"node{node}", since.pop(node), when - zero, CAUSES["lost_connection"]))
        since |= dict.fromkeys(range(count + 1, there + 1), when - zero)
        there = count
    rows += [Away(f"node{node}", start, math.inf, CAUSES["lost_connection"]) for node, start in since.items()]
    note = f"{path} tells how many nodes there are, up to {most}, not which: the last to come is the first to leave"
    return FileOutages(merge_outages(rows), (note,))


# ------------------------------------------------------------ both
def _between(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> list[Away]:
    if _bare_dates(rows):
        raise PlanError(
            f"{path}: its times may be dates or seconds: write dates as 2025-01-31, or count seconds from 0"
        )
    spans: list[tuple[str, float, float, Cause]] = []
    dated: set[bool] = set()
    for position, row in enumerate(rows, 1):
        number = row.get("line", position)
        begin, date = _moment(path, number, _first(row, STARTS))
        end, end_date = _moment(path, number, _first(row, STOPS), open_end=True)
        dated |= {date, end_date if math.isfinite(end) else date}
        if len(dated) > 1:
            raise PlanError(f"{path}, line {number}: some times are dates and others seconds: write all in one way")
        if end < begin:
            raise PlanError(f"{path}, line {number}: ends before it starts")
        spans.append((_node_name(path, number, row), begin, end, cause_of(_words(_first(row, CAUSE_NAMES)))))
    zero = min((span[1] for span in spans), default=0.0) if True in dated else 0.0
    return [Away(node, begin - zero, end - zero, cause) for node, begin, end, cause in spans]


def _bare_dates(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all times are eight digits that could be a date or seconds."""
    found = False
    for row in rows:
        for names in (STARTS, STOPS):
            text = _text(_first(row, names))
            if BARE_DATE.fullmatch(text):
                found = True
            elif text.lower() not in OPEN:
                return False
    return found


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _node_name(path: str | Path, number: int, row: Mapping[str, Any]) -> str:
    name = _text(_first(row, NODES))
    if not name:
        raise PlanError(f"{path}, line {number}: the node's name is missing")
    return name


def _moment(path: str | Path, number: int, value: object, open_end: bool = False) -> tuple[float, bool]:
    """(seconds, whether it was a date)."""
    text = _text(value)
    if open_end and text.lower() in OPEN:
        return math.inf, False
    moment = _date(text)
    if moment is None:
        return _number(path, number, value), False
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp(), True


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()


def _date(text: str) -> datetime.datetime | None:
    """The date, or None. Eight digits are seconds, although fromisoformat takes them for a date."""
    if re.fullmatch(r"[\d.]+", text):
        return None
    try:
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except ValueError:
        return None


def _number(path: str | Path, number: int, value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise PlanError(f"{path}, line {number}: the time {value!r} is neither a number of 0 or more nor an ISO date")
    if seconds > LATEST:
        raise PlanError(f"{path}, line {number}: the time {value!r} is after the year 5000: give seconds or ISO dates")
    return seconds
