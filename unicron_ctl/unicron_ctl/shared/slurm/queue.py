"""Reads the whole queue: who occupies nodes, and who waits for nodes that our jobs could take. Pure.

A queue may hold 100,000 jobs, most of which matter only because others like them come first. So squeue sorts by
priority and prints columns of fixed width, in which everything that makes two pending jobs alike lies side by side.
Each row costs two slices of bytes and a look into a set, and only the first row of each kind is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from unicron_ctl.shared.slurm import asked, squeue
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, Queue
from unicron_ctl.shared.slurm.states import OVER, WAITS, element_state, on_hold

Columns = tuple[tuple[str, int], ...]
_IDENTITY: Columns = (
    ("ArrayJobID", 11),
    ("ArrayTaskID", 11),
    ("JobID", 11),
    ("State", 14),
    ("UserName", 32),
    ("NodeList", 128),
    ("PriorityLong", 11),
)
_KIND: Columns = (
    ("Reason", 32),
    ("Partition", 64),
    ("StartTime", 20),
    ("TimeLimit", 14),
    ("SchedNodes", 96),
    ("HetJobID", 11),
    ("HetJobOffset", 5),  # so that components are told apart that ask for the same
)
_REQUEST: Columns = (("Feature", 96), ("Reservation", 64), *asked.COLUMNS, ("ExcNodes", 96))
# The second form is for requests that break the columns: without them, such a job may get any node of its partitions.
COLUMNS: tuple[Columns, ...] = ((*_IDENTITY, *_KIND, *_REQUEST), (*_IDENTITY, *_KIND))
# Columns that older releases do not know. squeue leaves out such a column, with exit status 0.
_SINCE = {"ExcNodes": (23, 2)}
WAITS_FOR_NODES = ("Resources", "Priority")
_PENDING, _OVER = (frozenset(word.encode() for word in words) for words in (WAITS, OVER))
ON_ONE_NODE = 8  # elements on the same nodes that are told apart
_SEPARATOR = b"\x1f"


def forms(release: str) -> tuple[Columns, ...]:
    """Return the forms in which squeue of this release ("22.05.8") is asked in turn, until the answer can be read."""
    number = tuple(int(part) for part in release.split(".")[:2] if part.isdecimal())
    known = tuple(one for one in COLUMNS[0] if not number or number >= _SINCE.get(one[0], (0,)))
    return known, *COLUMNS[1:]


def parse(data: bytes, columns: Columns, but: Collection[str] = ()) -> Queue | None:
    """Read squeue's answer, sorted by priority, without the jobs `but`. None if it has other columns."""
    size, at = squeue.row_size(columns), _offsets(columns)
    if len(data) % size or not _aligned(data, columns, size):
        return None
    found, ours = Queue(rows=len(data) // size), {job.encode().ljust(11) for job in but}
    seen: set[bytes] = set()
    on_nodes: Counter[bytes] = Counter()
    state, state_end = at["State"], at["State"] + 14
    kind, nodes, nodes_end = at["Reason"], at["NodeList"], at["NodeList"] + 128
    for start in range(0, len(data), size):
        what = data[start + state : start + state_end].rstrip()
        if what in _PENDING:
            key = data[start + kind : start + size]
            if key in seen:
                continue
        elif what in _OVER:
            continue
        else:
            where = data[start + nodes : start + nodes_end]
            if on_nodes[where] >= ON_ONE_NODE:
                continue
        if data[start : start + 11] in ours:
            continue
        if what in _PENDING:
            seen.add(key)
        else:
            on_nodes[where] += 1
            found.cut = found.cut or where[-1:] != b" "
        found.elements.append(_element(data[start : start + size], columns, at))
    return found


def _offsets(columns: Columns) -> dict[str, int]:
    found, at = {}, 0
    for name, width in columns:
        found[name] = at
        at += width + 1
    return found


def _aligned(data: bytes, columns: Columns, size: int) -> bool:
    """Say whether each row ends with a line end, and each column with a separator."""
    count = len(data) // size
    if data[size - 1 :: size] != b"\n" * count:
        return False
    end = -1
    for _, width in columns:
        end += width + 1
        if data[end::size] != _SEPARATOR * count:
            return False
    return True


def _element(row: bytes, columns: Columns, at: dict[str, int]) -> ElementInfo:
    """Return a row's element. A text that is too long for its column is unknown; then the job may get any node."""
    cells = {}
    for name, width in columns:
        cell = row[at[name] : at[name] + width]
        fits = cell[-1:] == b" " or name in ("ArrayTaskID", "UserName")
        cells[name] = squeue.value_or_empty(cell.decode(errors="ignore").rstrip(" ")) if fits else ""
    index, nodes = cells["ArrayTaskID"], cells["NodeList"]
    priority, reasons = cells["PriorityLong"], cells["Reason"].split(",")
    size, gres = asked.parse(cells)
    importance = int(priority) if priority.isdecimal() else 0
    # squeue prints an array's pending elements in one row, with all their reasons.
    reason = next((one for one in reasons if one in WAITS_FOR_NODES), cells["Reason"])
    return ElementInfo(
        job=cells["ArrayJobID"],
        element=int(index) if index.isdecimal() else 0,
        slurm_id=cells["JobID"],
        state=element_state(cells["State"]),
        node=nodes or None,
        reason=reason,
        user=cells["UserName"],
        partition=cells["Partition"],
        features=cells.get("Feature", ""),
        gres=gres,
        reservation=cells.get("Reservation", ""),
        excluded_nodes=frozenset(hosts(cells.get("ExcNodes", ""))),
        time_limit=squeue.parse_limit(cells["TimeLimit"]),
        priority=importance,
        starts=squeue.parse_time(cells["StartTime"]),
        planned_nodes=frozenset(hosts(cells["SchedNodes"])),
        required_nodes=frozenset(hosts(cells.get("ReqNodes", ""))),
        asked=size,
        hetero=cells["HetJobID"],
        brief=True,
        array=index.isdecimal(),
        on_hold=on_hold(cells["State"], importance),
    )
