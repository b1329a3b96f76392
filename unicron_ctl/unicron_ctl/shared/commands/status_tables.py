"""The controller's answers as listings; shared by status, top, jobs, nodes, explain, pause and the page.

On a pipe each item has its line, in the order of the answer. `folded`, for people: the worst comes first, and nodes of
which the same is to be said are one line, with a host list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.text import Text

from unicron_ctl.shared.commands import trouble
from unicron_ctl.shared.commands.times import duration, short
from unicron_ctl.shared.protocol.answer_schema import Explanation, Failure, Job, JobBase, Node, NodeEvent, Status
from unicron_ctl.shared.slurm.host_lists import fold, natural
from unicron_ctl.shared.system.columns import Cell, Listing
from unicron_detector.words import plural

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_HEALTHS = {"bad": "red"}
STATE_STYLES = {
    "running": "green",
    "offering": "green",
    "breaking": "red",
    "entering": "yellow",
    "forming": "yellow",
    "ended": "dim",
}


def status(data: Status, folded: bool = False, chosen: bool = False) -> list[Listing | Text]:
    """The controller's status as listings and lines, what needs an admin first. chosen: it is a part of it."""
    return [*needs_an_admin(data, folded), *tables(data, folded, chosen)]


def tables(data: Status, folded: bool = False, chosen: bool = False) -> list[Listing | Text]:
    """Return the status without what needs an admin."""
    there = [job for job in data.jobs if not job.ended]
    held = [*_doubts(data), *paused_lines(data.controller.paused)]
    parts: list[Listing | Text] = [Text(line, style="yellow") for line in held]
    parts += [jobs(there, folded, chosen)] if there or not data.jobs else []
    if over := len(data.jobs) - len(there):
        parts.append(Text(f"jobs that have ended: {over} (`unicronctl jobs`)", style="dim"))
    parts.append(nodes(data.nodes, folded))
    if data.failures:
        last = data.failures[-8:]
        parts.append(failures(last[::-1] if folded else last))
    parts += [Text(line, style="yellow") for line in data.observed]
    parts.append(Text(_foot(data), style="dim"))
    return parts


def needs_an_admin(data: Status, folded: bool) -> list[Text]:
    """A line each."""
    return [Text(line, style="bold red") for line in trouble.needs_an_admin(data.attention, folded)]


def _doubts(data: Status) -> list[str]:
    """Why the controller does less than it may."""
    controller, found = data.controller, []
    if controller.alone_since is not None:
        found.append(f"unicrond hears no agent for {duration(controller.time - controller.alone_since)}: does nothing")
    if controller.most_silent_since is not None:
        seconds = controller.time - controller.most_silent_since
        found.append(f"most agents fell silent together {duration(seconds)} ago: takes no node, requeues nothing")
    if controller.slurm.error:
        found.append(f"Slurm: {controller.slurm.error}")
    return found


def _foot(data: Status) -> str:
    controller = data.controller
    words = [f"WAF {rate(data.waf)}", f"unicrond up {duration(controller.time - controller.since)}"]
    words.append(", ".join(f"{name}: {mode}" for name, mode in controller.modes.items()))
    slurm = controller.slurm
    if slurm.used and slurm.last_answer and not slurm.error:
        words.append(f"Slurm answered {duration(controller.time - slurm.last_answer)} ago")
    return ", ".join(words)


class Column(NamedTuple):
    """One column of a table: all that it needs beside its field in `answer_schema`."""

    heading: str
    cell: Callable[[Any], Cell]
    """Makes the cell of one item."""
    leaves: int = 0
    """Its place in the order in which a narrow terminal leaves columns out; 0: it stays."""
    cut: bool = False
    """A narrow terminal cuts its cells."""


JOB_COLUMNS = (
    Column("jobid", lambda job: job.job),
    Column("name", lambda job: job.name, cut=True),
    Column("state", lambda job: Text(job_state(job), style=STATE_STYLES.get(job.state, ""))),
    Column("nodes", lambda job: f"{job.nodes}/{job.max_nodes}"),  # those that train, and the most that it can use
    Column("plan", lambda job: "-" if job.ended or job.planned_nodes is None else str(job.planned_nodes)),
    Column("iteration", lambda job: iterations(job)),
    Column("s/iter", lambda job: number(job.iteration_seconds, 3), leaves=5),
    Column("loss", lambda job: number(job.loss, 4), leaves=3),
    Column("weight", lambda job: f"{job.weight:g}", leaves=1),
    Column("WAF", lambda job: rate(job.waf, "").replace(" ", ""), leaves=2),
    Column("gen", lambda job: str(job.generation), leaves=4),
    Column("failures", lambda job: str(job.failures)),
)
FAILURE_COLUMNS = (
    Column("when", lambda failure: short(failure.detected_at)),
    Column("jobid", lambda failure: failure.job),
    Column("where", lambda failure: failure.node if failure.kind == "node" else f"slot{failure.slot}"),
    Column("sev", lambda failure: str(failure.severity)),
    Column("cause", lambda failure: failure.cause),
    Column("by", lambda failure: failure.detected_by.replace(" ", "-"), leaves=1),
    Column("again", lambda failure: number(again_after(failure), 2)),  # seconds until the job trained again
    Column("kept", lambda failure: str(failure.reused_micro_batches), leaves=3),
    Column("twice", lambda failure: str(failure.recomputed_micro_batches), leaves=2),
    Column("done", lambda failure: "; ".join(failure.actions) or failure.action),
)


def listing(columns: Sequence[Column], items: Iterable[object]) -> Listing:
    """Return the table with a row for each item."""
    optional = sorted((column for column in columns if column.leaves), key=lambda column: column.leaves)
    table = Listing(
        *(column.heading for column in columns),
        optional=[column.heading for column in optional],
        cut=[column.heading for column in columns if column.cut],
    )
    for item in items:
        table.add_row(*(column.cell(item) for column in columns))
    return table


def jobs(listed: Sequence[Job], folded: bool = False, chosen: bool = False) -> Listing:
    """Return the table of jobs. chosen: they are a part of them."""
    ordered = trouble.jobs_by_trouble(listed) if folded else listed
    table = listing(JOB_COLUMNS, ordered)
    for job in ordered:
        for note in job_notes(job):
            table.add_note(f"{job.job}: {note}")
    if not listed:
        table.add_note("no such job" if chosen else "no job yet: submit one with `sbatch --unicron`")
    return table


def iterations(job: Job) -> str:
    """Return the job's iteration, and how many it is to do where that is known."""
    wanted = f"/{job.train_iterations}" if job.train_iterations else ""
    return f"{job.iteration}{wanted}" if job.iteration >= 0 else "-"


def job_state(job: Job) -> str:
    """A job's state in one word."""
    if job.ended:
        return f"ended({job.ended.code})"
    return "aside" if job.set_aside else str(job.state)


def job_notes(job: Job) -> list[str]:
    """Return the notes of one job below the table."""
    found = [
        *_obstacle_notes(job),
        replicas(job),
        spares(job),
        blocks(job),
        f"silent, not lost: element {', '.join(job.silent)}" if job.silent else "",
        f"left out, since it and others do not reach each other: element {', '.join(job.left_out)}"
        if job.left_out
        else "",
        "restart mode" if job.mode == "restart" and not job.ended else "",
        goodput(job),
        *_rank_notes(job),
        not_finite(job),
        _slow(job) if not job.ended else "",
        f"last failure: {failure_text(job.last_failure)}" if job.last_failure else "",
    ]
    return [note for note in found if note]


def _obstacle_notes(job: Job) -> Iterator[str]:
    see = f"see `unicronctl explain {job.job}`"
    if job.set_aside and not job.ended:
        yield f"set aside: {see}"
    if job.waits:
        yield f"{job.waits}: {see}"
    for one in job.barred:
        yield f"{plural(len(one.elements), 'element')} cannot start: {one.reason} ({one.words})"


def _rank_notes(job: Job) -> Iterator[str]:
    ranks = [rank for element in job.elements for rank in element.ranks] if not job.ended else []
    see = f"see `unicronctl explain {job.job}`"
    if cold := sum(rank.start.startswith("cold") for rank in ranks):
        yield f"{cold} of {plural(len(ranks), 'rank')} started cold: {see}"
    if forgets := sum(bool(rank.forgets) for rank in ranks):
        yield f"{forgets} of {plural(len(ranks), 'rank')} keep no state in memory: {see}"


def replicas(job: JobBase) -> str:
    """Return how a job's ranks make replicas, who waits to complete one, and how else it could run; "" where a rank is
    a replica and nothing else is possible."""
    others = [name for name in job.layouts if name != job.layout]
    if (job.replica == 1 and not others) or job.ended:
        return ""
    count, standbys = job.replicas, job.standbys
    named = f"{job.layout}: " if job.layout else ""
    waiting = f", standbys: slots {_few(standbys)}" if standbys else ""
    size = plural(job.replica, "rank")
    planned = job.planned_layout or job.layout
    also = f"; goes on as {planned}" if planned != job.layout else f"; or {', '.join(others)}" if others else ""
    return f"{named}{plural(count, 'replica')} of {size}{waiting}{also}"


def goodput(job: JobBase) -> str:
    """Return the share of the job's time that was not lost; empty while nothing was lost."""
    if job.goodput is None or not job.lost_seconds:
        return ""
    return f"goodput {100.0 * job.goodput:.1f} %, {duration(job.lost_seconds)} lost"


def _few(slots: list[int]) -> str:
    """The first slots, and how many more there are."""
    more = f" and {len(slots) - 8} more" if len(slots) > 8 else ""
    return f"{' '.join(map(str, slots[:8]))}{more}"


def spares(job: JobBase) -> str:
    """The spares that wait to take a lost element's place; empty where none are wanted."""
    if not job.spares_wanted or job.ended:
        return ""
    waiting = [f"element {one.element} ({one.node}): spare, {one.state}" for one in job.spares[:8]]
    more = f" and {len(job.spares) - 8} more" if len(job.spares) > 8 else ""
    return ", ".join(waiting) + more if waiting else "no spare waits"


def blocks(job: JobBase) -> str:
    """The elements that have several nodes each, with these; empty where they have one."""
    more = f"; and {len(job.blocks) - 8} more" if len(job.blocks) > 8 else ""
    return "; ".join(job.blocks[:8]) + more


def not_finite(job: JobBase) -> str:
    """Since when the loss is NaN; empty while it is a number."""
    since = job.nan_since
    return f"loss is nan since iteration {since}" if since is not None else ""


def _slow(job: Job) -> str:
    """Return the straggler of a degraded job, and the peers that stand out, in a few words."""
    slow, found = job.degraded, []
    if slow:
        factor = f" {slow.slowdown:.1f}x" if slow.slowdown else ""
        who = f"slot {slow.slot}{factor} in {slow.phase}"
        found.append(f"slow: {who if slow.slot is not None else slow.phase or 'all ranks'}")
    if job.anomalies:
        found.append("odd: " + ", ".join(f"{item.peer} {item.metric}" for item in job.anomalies[:3]))
    return ", ".join(found)


def nodes(listed: Sequence[Node], folded: bool = False) -> Listing:
    """The table of nodes."""
    if folded:
        return folded_nodes(listed)
    table = Listing("node", "state", "jobs", "health", "reason")
    for node in listed:
        said = health(node)
        table.add_row(
            node.node,
            _states(node),
            ",".join(node.used_by) or "-",
            Text(said.plain.split()[0].rstrip(":;"), style=said.style),
            _remarks(node) or "-",
        )
        if not _short(said.plain):
            table.add_note(Text(f"{node.node}: health {said.plain}", style=said.style))
        if node.last_event:
            table.add_note(f"{node.node}: {node_event(node.last_event)}")
    return table


def folded_nodes(listed: Sequence[Node]) -> Listing:
    """The table of nodes for people: the worst first, and those together of which the same is to be said."""
    table = Listing("nodes", "count", "state", "jobs", "health", "reason")
    rows, notes = Together(), Together()
    for node in sorted(listed, key=lambda one: (trouble.of_node(one), natural(one.node))):
        said = health(node, aged=False)
        users = sorted({user.rpartition("_")[0] or user for user in node.used_by}, key=natural)
        word = said.plain.split()[0].rstrip(":;")
        rows.add(node.node, str(_states(node)), ",".join(users) or "-", word, _remarks(node) or "-")
        if not _short(said.plain):
            notes.add(node.node, f"health {said.plain}")
        if node.last_event:
            notes.add(node.node, node_event(node.last_event, timed=False))
    healthy = {node.node for node in listed if node.healthy}
    for names, (state, users_, word, reason) in rows:
        style = "" if names[0] in healthy else "red"
        table.add_row(
            fold(names),
            str(len(names)),
            Text(state, style=style),
            users_,
            Text(word, style=_HEALTHS.get(word, "")),
            reason,
        )
    for names, (said_,) in notes:
        table.add_note(f"{fold(names)}: {said_}")
    return table


class Together:
    """Nodes by what is said of them, in the order in which it was said first; their own names in it do not count."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], list[str]] = {}

    def add(self, node: str, *words: str) -> None:
        """Takes what is said of a node."""
        self._groups.setdefault(tuple(trouble.nameless(word, node) for word in words), []).append(node)

    def __iter__(self) -> Iterator[tuple[list[str], tuple[str, ...]]]:
        for words, names in self._groups.items():
            yield names, tuple(trouble.with_names(word, names) for word in words)


def _states(node: Node) -> Text:
    return Text("+".join(node.states).lower() or "-", style="" if node.healthy else "red")


def _short(said: str) -> bool:
    """A health that one word tells: passed, or never looked at."""
    return said in ("unknown", "ok") or (said.startswith("ok (") and said.endswith(")") and ";" not in said)


def _remarks(node: Node) -> str:
    """Slurm's reason, whether it is asked who reaches the node, and by what it stands out among its peers."""
    odd = (
        ["its agent is silent or gone; others are asked whether they reach it"] if node.asked_since is not None else []
    )
    odd += [anomaly.reason for anomaly in node.anomalies]
    odd += [f"{element}: spare, {how}" for element, how in node.spare_of.items()]
    return "; ".join([node.reason, *odd] if node.reason else odd)


def node_event(event: NodeEvent, timed: bool = True) -> str:
    """Return the node's last event, and what became of it."""
    times = f" ({event.count} times)" if event.count > 1 and timed else ""
    when = f"{short(event.time)} " if timed else ""
    return f"{when}{event.source}: {event.text[:70]}{times}: {event.cause}, {event.action}"


def health(node: Node, aged: bool = True) -> Text:
    """Return the words of the admission checks and the paired test, their age, and whether the node is a suspect."""
    words, style, now = [], "", time.time()
    for name, report in (("", node.health), ("pair test ", node.pair_test)):
        if report is None:
            continue
        age = f" ({duration(max(0.0, now - report.at))})" if aged else ""
        verdict = {"good": "ok", "warning": "ok", "bad": "bad: ", "unknown": "unknown: "}[report.verdict]
        words.append(f"{name}{verdict}{'' if verdict == 'ok' else report.reason}{age}")
        style = "red" if verdict == "bad: " else style
    words = words or ["unknown"]
    words += ["unverified"] if node.unverified else []
    words += [node.admission] if node.admission else []
    if node.suspect:
        words.append(f"suspect ({node.suspect}): unicronctl pair-test --nodes {node.node}")
        style = style or "yellow"
    return Text("; ".join(words), style=style)


def failures(listed: Sequence[Failure]) -> Listing:
    """Return the table of failures. `kept` and `twice` are micro-batches."""
    return listing(FAILURE_COLUMNS, listed)


def again_after(failure: Failure) -> float | None:
    """Return the seconds until the job trained again; None before that."""
    resumed = failure.stepped_at or failure.resumed_at
    return resumed - failure.detected_at if resumed else None


def explanation(data: Explanation) -> list[Listing | Text]:
    table = Listing("when", "gen", "what", "why")
    for decision in data.decisions:
        table.add_row(short(decision.time), str(decision.generation or "-"), decision.kind, decision.reason)
    parts: list[Listing | Text] = [Text("\n".join([*standing(data), *obstacles(data)])), table]
    if data.failures:
        parts.append(failures(data.failures))
    return parts


def standing(data: Explanation) -> list[str]:
    """The job's state, replicas and spares, one fact a line."""
    lines = [f"job {data.job} ({data.name}): {data.state}, generation {data.generation}"]
    if data.mode == "restart":
        lines.append(f"restart mode: all processes start again when one fails ({data.mode_reason})")
    if said := goodput(data):
        lines.append(f"{said} of {duration(data.trained_seconds + data.lost_seconds)} from the first step to the last")
    if data.ended:
        lines.append(f"ended with {data.ended.code}: {data.ended.reason}")
    if data.set_aside and not data.ended:
        lines.append(f"set aside: {data.set_aside}")
    if said := replicas(data):
        lines.append(f"replicas: {said}")
    if said := spares(data):
        lines.append(f"spares: {said}")
    if said := blocks(data):
        lines.append(f"elements: {said}")
    if data.waits:
        lines.append(f"waits: {data.waits}")
    return lines


def obstacles(data: Explanation) -> list[str]:
    """Return the limits of the job, and its plan."""
    lines = []
    if said := not_finite(data):
        lines.append(f"{said}: the training goes on, and its snapshots and checkpoints have the same loss")
    for reason, slots in data.cold.items():
        lines.append(f"started cold: slot{'s' if len(slots) > 1 else ''} {_few(slots)}: {reason}")
    for reason, slots in data.forgets.items():
        lines.append(f"keeps no state in memory: slot{'s' if len(slots) > 1 else ''} {_few(slots)}: {reason}")
    for one in data.waiting:
        after = "" if one.starts else ": they cannot start until that changes"
        lines.append(
            f"pending: element{'s' if len(one.elements) > 1 else ''} {_few(one.elements)}: "
            f"{one.reason or 'no reason yet'} ({one.words}){after}"
        )
    if data.bounds:
        lines.append(f"bounds: {data.bounds}")
    if data.plan_reason and data.planned_nodes is not None:
        lines.append(f"plan: {plural(data.planned_nodes, 'node')}; {data.plan_reason} ({data.plan_trigger})")
    if data.alternative:
        lines.append(f"now: {data.alternative.text}")
    return lines


def failure_text(failure: Failure) -> str:
    """A failure and its remedy in a few words."""
    where = failure.node if failure.kind == "node" else f"slot {failure.slot}"
    again = again_after(failure)
    done = f", trained again after {again:.2f} s" if again is not None else ""
    return f"{short(failure.detected_at)} {failure.kind} {where} SEV{failure.severity}{done}"


def rate(flops: float | None, unit: str = "FLOP/s") -> str:
    """The rate with a prefix: 1.9 PFLOP/s."""
    if not flops:
        return "-"
    for size, prefix in PREFIXES:
        if flops >= size:
            return f"{flops / size:.3g} {prefix}{unit}"
    return f"{flops:.3g} {unit}"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def paused_lines(until: dict[str, float]) -> list[str]:
    """Return a line for each pause. until: by partition; 0 for no end."""
    found = []
    for name, end in until.items():
        what = f"partition {name}" if name else "everything"
        command = f"unicronctl resume {name}".strip()
        over = f"{datetime.fromtimestamp(end):%Y-%m-%dT%H:%M}" if end else f"`{command}`"
        found.append(f"{what} is paused until {over}")
    return found
