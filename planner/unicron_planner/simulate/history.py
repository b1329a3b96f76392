"""The cost of a site's own history of failures, and what it would have been with Unicron.

The history is what `sacct` prints (see COMMAND). Of each run of a job that a failure has ended, and that went on later,
three things were lost on all of its nodes: the wait until it ran again, which the history tells; the start; and the
work since the last checkpoint, on average half of the time between two. The last two are no more than the run itself.
With Unicron the others go on: all of them wait for detection and transition, and compute at most half an iteration
again; the place of a lost node is empty for as long as the wait was. Waiting is told apart, too: it delays the job, but
others may use its nodes meanwhile.

Hangs, and jobs that ran slowly, are not in such a history. Nor is why a run waited: that its user had to mend a bug
first counts as any other wait. Runs of the same user, name and size may be independent of each other.
"""

from __future__ import annotations

import bisect
import datetime
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate import formats
from unicron_planner.simulate.causes import CAUSES, Cause
from unicron_planner.simulate.policies import CHECKPOINT, ITERATION, POLICIES, SETUP, detection_seconds

COMMAND = "sacct -a -D -X -P -S START -o Cluster,JobID,User,JobName,State,ExitCode,Submit,Start,End,NNodes"
COLUMNS = ("jobid", "user", "jobname", "state", "exitcode", "submit", "start", "end", "nnodes")
AGAIN_SECONDS = 86400.0  # a job of the same name that is submitted so soon after a failure goes on from it [choice]
EARLY_SECONDS = 600.0  # what fails so soon after its start has done it itself, unless its node went [choice]
TRANSITION_SECONDS = 60.0  # our target for one transition of a large model (unicron_planner.simulate.cases)
HOUR = 3600.0
_SHAPES = {
    "jobid": re.compile(r"\d+\S*"),
    "exitcode": re.compile(r"\d+:\d+"),
    "nnodes": re.compile(r"\d+"),
}
BLANK = "| \t\r"
MOST_LINES = 1000  # of one record: each but the last ends within the job's name


@dataclass(frozen=True)
class Run:
    """One run of a job. Times are seconds since the epoch."""

    job: str
    user: str
    name: str
    state: str
    exit_code: str
    submit: float
    start: float
    end: float  # infinite while it lasts
    nodes: int
    cluster: str = ""  # empty if the file has none

    @property
    def whose(self) -> tuple[str, str]:
        """Jobs of another user or another cluster have nothing to do with it, whatever their number."""
        return self.cluster, self.user


@dataclass(frozen=True)
class Failure:
    """One failure in the history, and what it cost."""

    run: Run
    """The run that it ended."""
    cause: Cause
    waited: float
    """Seconds until the job ran again."""
    lost: float
    """Node-seconds; `waiting` of them without the nodes."""
    with_unicron: float
    """Node-seconds with Unicron; `waiting_with_unicron` of them without the nodes."""
    waiting_with_unicron: float

    @property
    def waiting(self) -> float:
        return self.run.nodes * self.waited


@dataclass(frozen=True)
class Costs:
    """Costs of a failure, in seconds."""

    checkpoint: float = CHECKPOINT
    """Between two checkpoints."""
    setup: float = SETUP
    """From the start of a run to its first iteration."""
    transition: float = TRANSITION_SECONDS
    """D_transition with Unicron."""
    least_nodes: int = 2
    """Smaller jobs do not count."""


@dataclass(frozen=True)
class History:
    """The account of a site's history."""

    runs: int
    worked: float
    """Node-seconds of all runs that count."""
    failures: tuple[Failure, ...]
    early: int
    """Failures so soon after a start that the script is at fault."""
    left: int
    """Failures after which no job went on."""
    requeued: int
    """Runs that ended as REQUEUED; why is unknown."""

    @property
    def lost(self) -> float:
        return math.fsum(failure.lost for failure in self.failures)

    @property
    def with_unicron(self) -> float:
        return math.fsum(failure.with_unicron for failure in self.failures)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `unicronctl simulate --from-sacct`."""
        waiting = math.fsum(failure.waiting for failure in self.failures)
        waiting_with_unicron = math.fsum(failure.waiting_with_unicron for failure in self.failures)
        return {
            "runs": self.runs,
            "node_hours": self.worked / HOUR,
            "failures": len(self.failures),
            "causes": dict(Counter(failure.cause.name for failure in self.failures).most_common()),
            "lost_node_hours": self.lost / HOUR,
            "lost_node_hours_with_unicron": self.with_unicron / HOUR,
            "saved_node_hours": (self.lost - self.with_unicron) / HOUR,
            "waiting_node_hours": waiting / HOUR,
            "waiting_node_hours_with_unicron": waiting_with_unicron / HOUR,
            "saved_waiting_node_hours": (waiting - waiting_with_unicron) / HOUR,
            "not_counted": {
                "script's own": self.early,
                "nobody went on": self.left,
                "requeued, why is not told": self.requeued,
            },
        }


# ------------------------------------------------------------ reading
def load(path: str | Path, left_out: list[str] | None = None) -> list[Run]:
    """The runs in a file that COMMAND made, or in several of them joined, by start, without those that never started.
    left_out: receives why a record cannot be read, if others can. Raises PlanError, one line."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror or error}") from None
    rows = list(enumerate(text.split("\n"), 1))
    head = next((line for _, line in rows if line.strip(BLANK)), "")
    header = [field.strip().lower() for field in head.split("|")]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        found = formats.other_separator(head, "|")
        why = f"has {found} between its fields, not bars" if found else f"has no column {', '.join(missing)}"
        raise PlanError(f"{path} {why}: make it with {COMMAND} > FILE")
    runs, wrong, read = [], list[PlanError](), 0
    for number, row in _records([row for row in rows if row[1] != head], header):
        try:
            run = _run(path, number, dict(zip(header, _fields(path, number, row, header), strict=True)))
        except PlanError as error:
            wrong.append(error)
            continue
        read += 1
        if run is not None:
            runs.append(run)
    if wrong and (left_out is None or not read):
        raise wrong[0]
    if left_out is not None:
        left_out += map(str, wrong)
    return sorted(_whole(runs), key=lambda run: (run.start, run.job))


def _records(rows: Sequence[tuple[int, str]], header: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, fields) of each record. A job's name may contain line feeds, which sacct prints as
    they are: lines are joined until the fields after the name fit their columns. A line that is a record by itself is
    one, and what is left over is not."""
    held: list[str] = []
    first = 0
    for number, line in rows:
        if not held and not line.strip(BLANK):
            continue
        alone, joined = line.split("|"), "\n".join([*held, line]).split("|")
        if _is_whole(alone, header) or not held or len(held) >= MOST_LINES:
            if held:
                yield first, "\n".join(held).split("|")
            held, first, joined = [], number, alone
        if _is_whole(joined, header):
            held = []
            yield first, joined
        else:
            held.append(line)
    if held:
        yield first, "\n".join(held).split("|")


def _is_whole(row: Sequence[str], header: Sequence[str]) -> bool:
    """Whether this row is a complete record."""
    if len(row) < len(header):
        return False
    before = header.index("jobname")
    behind = dict(zip(header[before + 1 :], row[len(row) - len(header) + before + 1 :], strict=True))
    found = {**dict(zip(header[:before], row, strict=False)), **behind}
    return all(shape.fullmatch(found[name].strip()) for name, shape in _SHAPES.items() if name in found)


def _whole(runs: Sequence[Run]) -> Iterator[Run]:
    """Each run once. In joined files it may be there twice, at first without its end. The components of a heterogeneous
    job (7+0, 7+1), which start and end together, are one run."""
    parts: dict[tuple[tuple[str, str], str, float, float], dict[str, Run]] = {}
    for run in runs:
        job, _, component = run.job.partition("+")
        known = parts.setdefault((run.whose, job, run.submit, run.start), {})
        if component not in known or math.isinf(known[component].end):
            known[component] = run
    for (_, job, *_), known in parts.items():
        worst = min(known.values(), key=_severity)
        nodes, end = sum(run.nodes for run in known.values()), max(run.end for run in known.values())
        yield replace(worst, job=job, nodes=nodes, end=end)


def _fields(path: str | Path, number: int, row: Sequence[str], header: Sequence[str]) -> list[str]:
    """Splits a row into the header's fields. A job's name may contain the separator, which sacct does not escape."""
    more, name = len(row) - len(header), header.index("jobname")
    if more < 0:
        what = f"expected {len(header)} fields, found {len(row)}"
        raise PlanError(f"{path}, line {number}: {what}: is the file cut off? Make it with {COMMAND} > FILE")
    joined = [*row[:name], "|".join(row[name : name + more + 1]), *row[name + more + 1 :]]
    return [field.strip() for field in joined]


def _run(path: str | Path, number: int, row: Mapping[str, str]) -> Run | None:
    """The run; None for a step, or if it never started."""
    if "." in row["jobid"]:
        return None
    submit, start, end = (_moment(path, number, row[name]) for name in ("submit", "start", "end"))
    if not math.isfinite(start):
        return None
    try:
        nodes = int(row["nnodes"])
    except ValueError:
        raise PlanError(f"{path}, line {number}: NNodes must be a number, not {row['nnodes']!r}") from None
    state = row["state"].split()[0].upper() if row["state"] else ""
    job, user, name, cluster = row["jobid"], row["user"], row["jobname"], row.get("cluster", "")
    return Run(job, user, name, state, row["exitcode"], submit, start, max(end, start), nodes, cluster)


def _moment(path: str | Path, number: int, text: str) -> float:
    """Seconds since the epoch; infinite if it has not happened."""
    if text in ("", "Unknown", "None", "NONE"):
        return math.inf
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        why = f"{text!r} is no time as sacct prints it: unset SLURM_TIME_FORMAT, and make it with {COMMAND} > FILE"
        raise PlanError(f"{path}, line {number}: {why}") from None


# ------------------------------------------------------------ judging
def cause_of(run: Run) -> Cause | None:
    """The failure that ended a run (sacct(1), JOB STATE CODES); None if none did."""
    if run.state in ("NODE_FAIL", "BOOT_FAIL"):
        return CAUSES["node_failed"]
    if run.state == "OUT_OF_MEMORY":
        return CAUSES["host_out_of_memory"]
    if run.state == "FAILED":
        code, _, signal = run.exit_code.partition(":")
        killed = signal not in ("", "0") or (code.isdecimal() and int(code) > 128)
        return CAUSES["killed_from_outside" if killed else "exited_abnormally"]
    return None


def _severity(run: Run) -> float:
    cause = cause_of(run)
    return math.inf if cause is None else cause.severity


def judge(runs: Sequence[Run], costs: Costs | None = None) -> History:
    """Works out what the failures cost, and would have cost with Unicron. runs: by start, as from :func:`load`."""
    costs = costs or Costs()
    counted = [run for run in runs if run.nodes >= costs.least_nodes]
    by_job, alike = defaultdict(list), defaultdict(list)
    for run in counted:
        if (run.whose, run.job) not in by_job:  # its later runs continue only itself
            alike[run.whose, run.name, run.nodes].append(run)
        by_job[run.whose, run.job].append(run)
    for others in alike.values():
        others.sort(key=lambda run: run.submit)
    failures, early, left, taken = [], 0, 0, set[Run]()
    for run in sorted(counted, key=lambda run: run.end):
        cause = cause_of(run)
        if cause is None or not math.isfinite(run.end):
            continue
        if cause.severity > 1 and run.end - run.start < EARLY_SECONDS:
            early += 1
            continue
        same = alike[run.whose, run.name, run.nodes]
        following = _next_run(run, by_job[run.whose, run.job]) or _next(run, same, taken)
        if following is not None:
            taken.add(following)
            waited = following.start - run.end
            failures.append(_failure(run, cause, waited if waited >= 0 else waited + HOUR, costs))
        else:
            left += 1
    last = max((run.start if math.isinf(run.end) else run.end for run in counted), default=0.0)
    worked = math.fsum(run.nodes * (min(run.end, last) - run.start) for run in counted)
    requeued = sum(run.state == "REQUEUED" for run in counted)
    return History(len(counted), worked, tuple(failures), early, left, requeued)


def _next_run(run: Run, runs: Sequence[Run]) -> Run | None:
    """The next run of the same job, if it is not too late. In the hour that occurs twice, when clocks go back, it seems
    to begin before this one has ended: sacct prints no time zone."""
    place = bisect.bisect_right(runs, run.start, key=lambda other: other.start)
    soon = place < len(runs) and runs[place].submit <= run.end + AGAIN_SECONDS
    return runs[place] if soon and runs[place].start >= run.end - HOUR else None


def _next(run: Run, others: Sequence[Run], taken: Collection[Run]) -> Run | None:
    """The run that continues the work of `run`: submitted after its start and not too late, not `taken` by another
    failure, and not a task of the same array; None if there is none."""
    begin = bisect.bisect_left(others, run.start, key=lambda other: other.submit)
    end = bisect.bisect_right(others, run.end + AGAIN_SECONDS, key=lambda other: other.submit)
    found = (other for other in others[begin:end] if other.start >= run.end and _array(other) != _array(run))
    return min(
        (other for other in found if other not in taken), key=lambda other: (other.start, other.job), default=None
    )


def _array(run: Run) -> str:
    """The job's id without its task."""
    return run.job.partition("_")[0]


def _failure(run: Run, cause: Cause, waited: float, costs: Costs) -> Failure:
    policy = POLICIES["unicron"]
    lost = run.nodes * (waited + min(costs.setup + costs.checkpoint / 2, run.end - run.start))
    transition = policy.transition[cause.severity]
    stands = detection_seconds(policy, cause) + policy.redo * ITERATION
    stands += costs.transition if transition is None else transition
    empty = waited if cause.severity == 1 else 0.0
    return Failure(run, cause, waited, lost, min(lost, run.nodes * stands + empty), empty)
