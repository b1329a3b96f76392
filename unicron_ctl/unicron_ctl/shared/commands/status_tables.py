"""The controller's answers as listings; shared by status, top, jobs, nodes, explain, pause and the page.

On a pipe each item has its line, in the order of the answer. `folded` is for people: the worst comes first, and nodes
with the same values are one line, with a host list. `chosen` means that options have left a part out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.text import Text

from unicron_ctl.shared.commands import trouble
from unicron_ctl.shared.commands.times import duration, short
from unicron_ctl.shared.protocol.answer_schema import (
    Explanation,
    Failure,
    Job,
    JobBase,
    Node,
    NodeEvent,
    NodeHistory,
    Status,
)
from unicron_ctl.shared.slurm.host_lists import fold, natural
from unicron_ctl.shared.system.columns import Cell, Listing
from unicron_detector.words import number_spans, plural

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
STATE_STYLES = {
    "running": "green",
    "offering": "green",
    "breaking": "red",
    "entering": "yellow",
    "forming": "yellow",
    "ended": "dim",
}


def status(data: Status, folded: bool = False, chosen: bool = False) -> list[Listing | Text]:
    """Return the controller's status as listings and lines, what needs an admin first."""
    return [*needs_an_admin(data, folded), *tables(data, folded, chosen)]


def tables(data: Status, folded: bool = False, chosen: bool = False) -> list[Listing | Text]:
    """Return the status without what needs an admin."""
    living = [job for job in data.jobs if not job.ended]
    limits = [*_restraints(data), *paused_lines(data.controller.paused)]
    parts: list[Listing | Text] = [Text(line, style="yellow") for line in limits]
    parts += [jobs(living, folded, chosen)] if living or not data.jobs else []
    if ended := len(data.jobs) - len(living):
        parts.append(Text(f"jobs that have ended: {ended} (`unicronctl jobs`)", style="dim"))
    parts.append(nodes(data.nodes, folded))
    if data.failures:
        last = data.failures[-8:]
        parts.append(failures(last[::-1] if folded else last))
    parts += [Text(line, style="yellow") for line in data.observed]
    parts.append(Text(_foot(data), style="dim"))
    return parts


def needs_an_admin(data: Status, folded: bool) -> list[Text]:
    """Return a line for each thing that needs an admin."""
    return [Text(line, style="bold red") for line in trouble.needs_an_admin(data.attention, folded)]


def _restraints(data: Status) -> list[str]:
    """Return the reasons why the controller does less than its configuration allows."""
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
    """A column of a table. A new one needs an entry here and a field in `answer_schema`."""

    heading: str
    cell: Callable[[Any], Cell]
    """Makes the cell of an item."""
    leaves: int = 0
    """Its place in the order in which a narrow terminal leaves columns out; 0 if it stays."""
    cut: bool = False
    """Whether a narrow terminal cuts its cells."""


JOB_COLUMNS = (
    Column("jobid", lambda job: job.job),
    Column("name", lambda job: job.name, cut=True),
    Column("state", lambda job: Text(job_state(job), style=STATE_STYLES.get(job.state, ""))),
    Column("nodes", lambda job: f"{job.nodes}/{job.max_nodes}"),  # those that train, of the most that it can use
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
    Column(
        "where", lambda failure: failure.node if failure.kind == "node" else slots_of(failure).replace(" ", "") or "-"
    ),
    Column("sev", lambda failure: str(failure.severity)),
    Column("cause", lambda failure: failure.cause),
    Column("by", lambda failure: failure.detected_by.replace(" ", "-"), leaves=1),
    Column("again", lambda failure: number(again_after(failure), 2)),  # seconds until the job trained again
    Column("kept", lambda failure: str(failure.reused_micro_batches), leaves=3),
    Column("twice", lambda failure: str(failure.recomputed_micro_batches), leaves=2),
    Column("done", lambda failure: "; ".join(failure.actions) or failure.action),
)


def droppable(columns: Sequence[Column]) -> list[str]:
    """Return the headings of the columns that a narrow terminal leaves out, the first to go first."""
    return [column.heading for column in sorted(columns, key=lambda column: column.leaves) if column.leaves]


def listing(columns: Sequence[Column], items: Iterable[object]) -> Listing:
    """Return the table with a row for each item."""
    cut = [column.heading for column in columns if column.cut]
    table = Listing(*(column.heading for column in columns), optional=droppable(columns), cut=cut)
    for item in items:
        table.add_row(*(column.cell(item) for column in columns))
    return table


def jobs(listed: Sequence[Job], folded: bool = False, chosen: bool = False) -> Listing:
    """Return the table of jobs."""
    ordered = trouble.jobs_by_trouble(listed) if folded else listed
    table = listing(JOB_COLUMNS, ordered)
    for job in ordered:
        for note in job_notes(job):
            table.add_note(f"{job.job}: {note}")
    if not listed:
        table.add_note("no such job" if chosen else "no job yet: submit one with `sbatch --unicron`")
    return table


def iterations(job: Job) -> str:
    """Return the job's iteration, and the number of all its iterations if that is known."""
    total = f"/{job.train_iterations}" if job.train_iterations else ""
    return f"{job.iteration}{total}" if job.iteration >= 0 else "-"


def job_state(job: Job) -> str:
    """Return the job's state in one word."""
    if job.ended:
        return f"ended({job.ended.code})"
    return "aside" if job.set_aside else str(job.state)


def job_notes(job: Job) -> list[str]:
    """Return the notes of one job below the table."""
    apart = f"left out, since it and others do not reach each other: element {', '.join(job.left_out)}"
    found = [
        *_obstacle_notes(job),
        replicas(job),
        spares(job),
        blocks(job),
        f"silent, not lost: element {', '.join(job.silent)}" if job.silent else "",
        apart if job.left_out else "",
        "restart mode" if job.mode == "restart" and not job.ended else "",
        goodput(job),
        *_rank_notes(job),
        not_finite(job),
        made_again(job),
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
    """Return a job's replicas and standbys, and its other layouts; "" if each rank is a replica and there is no other
    layout."""
    others = [name for name in job.layouts if name != job.layout]
    if (job.replica == 1 and not others) or job.ended:
        return ""
    layout = f"{job.layout}: " if job.layout else ""
    waiting = f", standbys: slots {_few(job.standbys)}" if job.standbys else ""
    planned = job.planned_layout or job.layout
    also = f"; goes on as {planned}" if planned != job.layout else f"; or {', '.join(others)}" if others else ""
    return f"{layout}{plural(job.replicas, 'replica')} of {plural(job.replica, 'rank')}{waiting}{also}"


def goodput(job: JobBase) -> str:
    """Return the share of the job's time that was not lost; "" if none was lost."""
    if job.goodput is None or not job.lost_seconds:
        return ""
    return f"goodput {100.0 * job.goodput:.1f} %, {duration(job.lost_seconds)} lost"


def _few(slots: list[int]) -> str:
    """Return the first slots, and how many more there are."""
    more = f" and {len(slots) - 8} more" if len(slots) > 8 else ""
    return f"{' '.join(map(str, slots[:8]))}{more}"


def spares(job: JobBase) -> str:
    """Return the spares that wait to take a lost element's place; "" if the job wants none."""
    if not job.spares_wanted or job.ended:
        return ""
    waiting = [f"element {one.element} ({one.node}): spare, {one.state}" for one in job.spares[:8]]
    more = f" and {len(job.spares) - 8} more" if len(job.spares) > 8 else ""
    return ", ".join(waiting) + more if waiting else "no spare waits"


def blocks(job: JobBase) -> str:
    """Return the elements with their nodes; "" if each has one node."""
    more = f"; and {len(job.blocks) - 8} more" if len(job.blocks) > 8 else ""
    return "; ".join(job.blocks[:8]) + more


def not_finite(job: JobBase) -> str:
    """Return the iteration since which the loss is NaN; "" while it is a number."""
    return f"loss is nan since iteration {job.nan_since}" if job.nan_since is not None else ""


def made_again(job: JobBase) -> str:
    """Return up to which iteration the job goes once more; "" if it does not."""
    if job.unsound_until is None:
        return ""
    return f"has gone back to a sound state: iterations up to {job.unsound_until} are made again"


def _slow(job: Job) -> str:
    """Return the straggler of a degraded job, and the peers that stand out, in a few words."""
    found = []
    if slow := job.degraded:
        factor = f" {slow.slowdown:.1f}x" if slow.slowdown else ""
        who = f"slot {slow.slot}{factor} in {slow.phase}"
        found.append(f"slow: {who if slow.slot is not None else slow.phase or 'all ranks'}")
        if slow.swap:
            found.append(f"{slow.node} keeps its place: {slow.swap}")
    if job.anomalies:
        found.append("odd: " + ", ".join(f"{item.peer} {item.metric}" for item in job.anomalies[:3]))
    return ", ".join(found)


def nodes(listed: Sequence[Node], folded: bool = False) -> Listing:
    """Return the table of nodes."""
    if folded:
        return folded_nodes(listed)
    table = Listing("node", "state", "jobs", "health", "reason")
    for node in listed:
        report = health(node)
        word = Text(_first_word(report), style=report.style)
        table.add_row(node.node, _states(node), ",".join(node.used_by) or "-", word, _remarks(node) or "-")
        if not _is_short(report.plain):
            table.add_note(Text(f"{node.node}: health {report.plain}", style=report.style))
        if node.last_event:
            table.add_note(f"{node.node}: {node_event(node.last_event)}")
    return table


def folded_nodes(listed: Sequence[Node]) -> Listing:
    """Return the table of nodes for people: the worst first, and nodes with equal values on one line."""
    table = Listing("nodes", "count", "state", "jobs", "health", "reason")
    rows, notes = NodeGroups(), NodeGroups()
    for node in sorted(listed, key=lambda one: (trouble.of_node(one), natural(one.node))):
        report = health(node, aged=False)
        users = sorted({user.rpartition("_")[0] or user for user in node.used_by}, key=natural)
        rows.add(node.node, str(_states(node)), ",".join(users) or "-", _first_word(report), _remarks(node) or "-")
        if not _is_short(report.plain):
            notes.add(node.node, f"health {report.plain}")
        if node.last_event:
            notes.add(node.node, node_event(node.last_event, timed=False))
    healthy = {node.node for node in listed if node.healthy}
    for names, (state, jobs_, word, reason) in rows:
        states = Text(state, style="" if names[0] in healthy else "red")
        verdict = Text(word, style="red" if word == "bad" else "")
        table.add_row(fold(names), str(len(names)), states, jobs_, verdict, reason)
    for names, (note,) in notes:
        table.add_note(f"{fold(names)}: {note}")
    return table


class NodeGroups:
    """Groups nodes with equal texts, in the order of each group's first node. A node's own name in a text does not
    count."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], list[str]] = {}

    def add(self, node: str, *texts: str) -> None:
        """Add a node with its texts."""
        self._groups.setdefault(tuple(trouble.nameless(text, node) for text in texts), []).append(node)

    def __iter__(self) -> Iterator[tuple[list[str], tuple[str, ...]]]:
        for texts, names in self._groups.items():
            yield names, tuple(trouble.with_names(text, names) for text in texts)


def _states(node: Node) -> Text:
    return Text("+".join(node.states).lower() or "-", style="" if node.healthy else "red")


def _first_word(report: Text) -> str:
    return report.plain.split()[0].rstrip(":;")


def _is_short(report: str) -> bool:
    """Whether one word says all about a node's health: it passed, or it was never checked."""
    return report in ("unknown", "ok") or (report.startswith("ok (") and report.endswith(")") and ";" not in report)


def _remarks(node: Node) -> str:
    """Return Slurm's reason, and why the node stands out."""
    asked = "its agent is silent or gone; others are asked whether they reach it"
    found = [node.reason] if node.reason else []
    found += [asked] if node.asked_since is not None else []
    found += [anomaly.reason for anomaly in node.anomalies]
    found += [f"{element}: spare, {how}" for element, how in node.spare_of.items()]
    return "; ".join(found)


def node_event(event: NodeEvent, timed: bool = True) -> str:
    """Return the node's last event, and the action that it led to."""
    times = f" ({event.count} times)" if event.count > 1 and timed else ""
    when = f"{short(event.time)} " if timed else ""
    return f"{when}{event.source}: {event.text[:70]}{times}: {event.cause}, {event.action}"


def health(node: Node, aged: bool = True) -> Text:
    """Return the results of the admission checks and the pair test, their age, and whether the node is a suspect."""
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
    """Return a job's state, obstacles, decisions and failures."""
    table = Listing("when", "gen", "what", "why")
    for decision in data.decisions:
        table.add_row(short(decision.time), str(decision.generation or "-"), decision.kind, decision.reason)
    parts: list[Listing | Text] = [Text("\n".join([*standing(data), *obstacles(data)])), table]
    if data.failures:
        parts.append(failures(data.failures))
    return parts


def node_history(data: NodeHistory) -> list[Listing | Text]:
    """Return a node's incidents, and how they add up."""
    table = Listing("when", "what", "counts", "why")
    for mark in data.marks:
        table.add_row(short(mark.time), mark.kind, f"{mark.weight:g}", mark.reason)
    if not data.marks:
        table.add_note(f"nothing is held against {data.node} since {short(data.since)}")
    table.add_note(f"score {data.score:g}: each counts half as much a week later; a lemon has {data.lemon:g} or more")
    if data.hint:
        table.add_note(f"{data.node} is a lemon, leave it out: {data.hint}")
    return [table]


def standing(data: Explanation) -> list[str]:
    """Return the job's state, replicas and spares, one fact a line."""
    lines = [f"job {data.job} ({data.name}): {data.state}, generation {data.generation}"]
    if data.mode == "restart":
        lines.append(f"restart mode: all processes start again when one fails ({data.mode_reason})")
    if share := goodput(data):
        lines.append(f"{share} of {duration(data.trained_seconds + data.lost_seconds)} from the first step to the last")
    if data.ended:
        lines.append(f"ended with {data.ended.code}: {data.ended.reason}")
    if data.set_aside and not data.ended:
        lines.append(f"set aside: {data.set_aside}")
    verified = f"the state of iteration {data.verified}, by an audit" if data.verified is not None else ""
    facts = {"replicas": replicas(data), "spares": spares(data), "elements": blocks(data), "waits": data.waits}
    facts |= {"verified": verified}
    return lines + [f"{name}: {text}" for name, text in facts.items() if text]


def obstacles(data: Explanation) -> list[str]:
    """Return the limits of the job, and its plan."""
    lines = []
    if loss := not_finite(data):
        lines.append(f"{loss}: the training goes on, and its snapshots and checkpoints have the same loss")
    if again := made_again(data):
        lines.append(again)
    for what, by_reason in (("started cold", data.cold), ("keeps no state in memory", data.forgets)):
        for reason, slots in by_reason.items():
            lines.append(f"{what}: slot{'s' if len(slots) > 1 else ''} {_few(slots)}: {reason}")
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


def slots_of(failure: Failure) -> str:
    """Return "slot 4" or "slots 4-7"; empty if no rank is at fault."""
    return number_spans("slot", failure.slots) if failure.slots else ""


def where_of(failure: Failure) -> str:
    """Return the failure's node, if that has failed, or its slots."""
    return failure.node if failure.kind == "node" else slots_of(failure)


def failure_text(failure: Failure) -> str:
    """Return a failure and the time of its recovery in a few words."""
    again = again_after(failure)
    done = f", trained again after {again:.2f} s" if again is not None else ""
    what = " ".join(filter(None, (failure.kind, where_of(failure))))
    return f"{short(failure.detected_at)} {what} SEV{failure.severity}{done}"


def rate(flops: float | None, unit: str = "FLOP/s") -> str:
    """Write a rate with a prefix: 1.9 PFLOP/s."""
    if not flops:
        return "-"
    for size, prefix in PREFIXES:
        if flops >= size:
            return f"{flops / size:.3g} {prefix}{unit}"
    return f"{flops:.3g} {unit}"


def number(value: float | None, digits: int) -> str:
    """Write a number with so many decimals, or "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def paused_lines(until: dict[str, float]) -> list[str]:
    """Return a line for each pause. until: the end of each partition's pause, 0 for none."""
    found = []
    for name, end in until.items():
        command = f"unicronctl resume {name}".strip()
        limit = f"{datetime.fromtimestamp(end):%Y-%m-%dT%H:%M}" if end else f"`{command}`"
        found.append(f"{f'partition {name}' if name else 'everything'} is paused until {limit}")
    return found
