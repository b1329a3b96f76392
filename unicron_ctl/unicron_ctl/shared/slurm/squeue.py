"""Reads what squeue prints, in two listings, so that nothing that users write can pass for anything else.

Names, comments and, without accounting, accounts may hold line ends and any other byte, and Slurm prints them as they
are (seen with sbatch and `scontrol update` of 22.05.8). So the first listing, one line an element, has only numbers,
times, states and names that slurmctld has looked up itself. All texts come in the second, in columns of fixed width,
which squeue cuts and fills by bytes, so each byte's place tells its meaning.

Pending elements of an array that Slurm has not split off yet are all alike, and there may be 100,000. Only the first
are read, since no more can start than there are nodes.
"""

from __future__ import annotations

import calendar
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from unicron_ctl.shared.slurm import asked
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import WAITS, element_state, on_hold

_SEPARATOR = "\x1f"
# For `squeue -o`, which fills nothing up. Source: man squeue.
_FACTS = ("%F", "%K", "%A", "%T", "%u", "%U", "%V", "%l", "%Q", "%S", "%P", "%v", "%N", "%Y", "%x")
FACTS_FORMAT = _SEPARATOR.join(_FACTS)
# For `squeue -O`: column and width. The first ones are needed; squeue -o has no letter for some of them.
NEEDED_COLUMNS = (("ArrayJobID", 11), ("ArrayTaskID", 11), ("RestartCnt", 6), ("exit_code", 9), ("Reason", 64))
ALL_COLUMNS = (
    *NEEDED_COLUMNS,
    ("Account", 64),
    ("QOS", 64),
    ("Feature", 128),
    *asked.COLUMNS,
    ("Name", 64),
    ("Comment", 64),
    ("admin_comment", 128),
)
# Of arrays that are large, where all else is the array's: what may differ between its elements.
OWN_COLUMNS = (*NEEDED_COLUMNS, ("admin_comment", 48))
_NOTHING = ("(null)", "N/A", "n/a", "None", "")
CUT = "…"  # the end of a text that was too long for its column
_WORD = re.compile(r"[A-Z][A-Z0-9_]*|\?")  # a state; "?" if that Slurm has no word for it
Key = tuple[str, str]


@dataclass(frozen=True)
class Fact:
    """One line of the first listing."""

    info: ElementInfo
    """Without the texts of the second listing."""
    is_array: bool
    key: Key
    """The line's place in the second listing."""


def columns_format(columns: Iterable[tuple[str, int]]) -> str:
    """Return the format for `squeue -O`."""
    return ",".join(f"{name}:{width}{_SEPARATOR}" for name, width in columns)


def row_size(columns: Iterable[tuple[str, int]]) -> int:
    """Return the bytes of a row, its line end included."""
    return sum(width + 1 for _, width in columns) + 1


def parse_facts(text: str, most: float = float("inf")) -> list[Fact]:
    """Read the first listing; of each array's pending elements that share its record, only `most`. A line that cannot
    be read is left out."""
    alike: Counter[tuple[str, ...]] = Counter()
    found, at = [], 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end]
        at = end + 1
        shared = _shares_record(line)
        if shared:
            alike[shared] += 1
            if alike[shared] > most:  # the following ones are skipped, without a look at each
                passed = _more_of(*shared).match(text, at)
                at = passed.end() if passed else at
                continue
        if (fact := _fact(line)) is not None:
            found.append(fact)
    return found


@lru_cache(maxsize=256)
def _more_of(job: str, state: str) -> re.Pattern[str]:
    """Return a pattern for following lines of pending elements of the array that share its record."""
    head = _SEPARATOR.join((job, f"[^{_SEPARATOR}\n]*", job, state, ""))
    return re.compile(rf"(?:{head}[^\n]*\n)*")


def _shares_record(line: str) -> tuple[str, ...]:
    """Return the array's id and the state of a pending element that shares its record; else empty."""
    head = line.split(_SEPARATOR, 4)
    alike = len(head) == 5 and head[3] in WAITS and head[0] == head[2] and head[0].isdecimal()
    return (head[0], head[3]) if alike else ()


def _fact(line: str) -> Fact | None:
    values = [value.strip() for value in line.split(_SEPARATOR)]
    if len(values) != len(_FACTS):
        return None
    job, index, slurm_id, state, user, uid, submitted, limit, priority, starts, partition, reservation = values[:12]
    node, planned, excluded = values[12:]
    at = parse_time(submitted)
    if not (job.isdecimal() and slurm_id.isdecimal() and uid.isdecimal() and _WORD.fullmatch(state)) or at is None:
        return None
    if not index.isdecimal() and index != "N/A":
        return None
    importance = int(priority) if priority.isdecimal() else 0
    info = ElementInfo(
        job=job,
        element=int(index) if index.isdecimal() else 0,
        slurm_id=slurm_id,
        state=element_state(state),
        node=None if node in _NOTHING else node,
        user=user,
        uid=int(uid),
        submitted=at,
        partition=value_or_empty(partition),
        reservation=value_or_empty(reservation),
        excluded_nodes=_hosts(value_or_empty(excluded)),
        time_limit=parse_limit(limit),
        priority=importance,
        starts=parse_time(starts),
        planned_nodes=_hosts(value_or_empty(planned)),
        array=index.isdecimal(),
        on_hold=on_hold(state, importance),
    )
    return Fact(info, index.isdecimal(), (job, index))


def parse_columns(
    data: bytes, columns: tuple[tuple[str, int], ...], wanted: Iterable[Key] | None = None
) -> dict[Key, dict[str, str]] | None:
    """Read the second listing by array's id and index: column -> text; only of those `wanted`, if given. None if it has
    other columns. A text that fills its column may go on, and gets an ellipsis."""
    size = row_size(columns)
    if len(data) % size:
        return None
    (_, first), (_, second) = columns[:2]
    keys = None if wanted is None else {_cell(job, first) + _SEPARATOR.encode() + _cell(i, second) for job, i in wanted}
    found = {}
    for start in range(0, len(data), size):
        if keys is not None and data[start : start + first + 1 + second] not in keys:
            if data[start + size - 1 : start + size] != b"\n":
                return None
            continue
        row, at = {}, start
        for name, width in columns:
            cell = data[at : at + width]
            if data[at + width : at + width + 1] != _SEPARATOR.encode():
                return None
            text = cell.decode(errors="ignore").rstrip(" ")
            row[name] = text + CUT if cell[-1:] not in b" " else text
            at += width + 1
        if data[at : at + 1] != b"\n":
            return None
        found[row["ArrayJobID"], row["ArrayTaskID"]] = row
    return found


def _cell(text: str, width: int) -> bytes:
    return text.encode().ljust(width)


def complete(fact: Fact, texts: Mapping[str, str]) -> ElementInfo:
    """Return an element of the first listing with the texts of the second, as far as that has its columns."""
    reason, restarts = texts["Reason"], texts["RestartCnt"]
    size, gres = asked.parse({name: value_or_empty(texts.get(name, "")) for name, _ in asked.COLUMNS})
    required = value_or_empty(texts.get("ReqNodes", ""))
    return replace(
        fact.info,
        reason="" if reason == "None" else reason,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        exit_code=code_and_signal(texts["exit_code"]),
        account=value_or_empty(texts.get("Account", "")),
        qos=value_or_empty(texts.get("QOS", "")),
        features=value_or_empty(texts.get("Feature", "")),
        gres=gres,
        required_nodes=_hosts("" if required.endswith(CUT) else required),
        asked=size,
        name=texts.get("Name", ""),
        comment=value_or_empty(texts.get("Comment", "")),
        admin_comment=value_or_empty(texts.get("admin_comment", "")),
    )


def value_or_empty(text: str) -> str:
    """Return the text, "" for the words by which Slurm says that there is none."""
    return "" if text in _NOTHING else text


def plain_gres(text: str) -> str:
    """Convert "gres:gpu:a100:4" (22.05) and "gres/gpu:a100:4" (newer) to "gpu:a100:4", also in a list with commas."""
    return ",".join(re.sub(r"^gres[:/]", "", item.strip()) for item in text.split(",") if item.strip())


@lru_cache(maxsize=65536)
def parse_time(text: str) -> float | None:
    """Convert Slurm's time, in UTC as the client asks for it, to seconds since the epoch; None for "Unknown"."""
    try:
        return float(calendar.timegm(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def parse_limit(text: str) -> float | None:
    """Convert "1-02:30:00", "30:00" or "5" (minutes) to seconds; None for "UNLIMITED" and whatever is no time."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return 60.0 * int(text) if text.isdecimal() else None


def code_and_signal(text: str) -> str:
    """Convert squeue's exit_code, a wait status (wait(2)), to Slurm's usual form: "35072" to "137:0", "9" to "0:9"."""
    if not text.isdecimal():
        return text if ":" in text else ""
    status = int(text)
    return f"{status >> 8 & 0xFF}:{status & 0x7F}" if status else ""


def nodes_of(element: ElementInfo) -> Sequence[str]:
    """Return the names of the element's nodes."""
    return names_of(element.node)


def names_of(text: str | None) -> Sequence[str]:
    """Return the names in a host list; a long one is read once."""
    return _names(text) if text and ("[" in text or "," in text) else [text] if text else []


@lru_cache(maxsize=1024)
def _names(text: str) -> tuple[str, ...]:
    return tuple(hosts(text))


@lru_cache(maxsize=1024)
def _hosts(text: str) -> frozenset[str]:
    return frozenset(hosts(text))
