"""A suspect node gives its place to a ready spare at an iteration boundary (docs/design/slow-ranks.md). Pure.

Whoever has evidence against a node asks :func:`plan_swap`. The members train on until the spare is in, by the same
offer as after a loss. Then the job leaves the node as it leaves any suspect (`nodes/isolation.py`): a pair test decides
whether the node comes back. If something forbids the swap nothing moves, and the log says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron_ctl.controller.job import spares
from unicron_ctl.controller.job.candidates import remaining
from unicron_ctl.controller.job.modes import restart_cost
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import isolation
from unicron_ctl.controller.sense.outliers import Standing
from unicron_ctl.controller.sense.timing import WINDOW, JobTimes
from unicron_ctl.shared.log import records
from unicron_detector.words import plural

TOGETHER_SECONDS = 60.0  # at most, from one sign of a fault to the other
UNSURE = frozenset({"link_loss"})  # metrics that do not say which node is at fault


@dataclass(frozen=True)
class Suspect:
    """An element whose node should leave the job for a test."""

    element: int
    reason: str
    """The evidence, in words."""
    lost: float
    """Seconds of the job that the node has cost so far."""
    unclear: str = ""
    """Why another node may be to blame as well; empty if none is."""


class Refusal(NamedTuple):
    """The suspect keeps its place."""

    why: str
    waits: bool = False
    """Just until it has cost as much as a swap, which is no news."""


@dataclass
class SwapNotes:
    """The suspect that keeps its place, as the log has it; lost with the process."""

    element: int = -1
    why: str = ""
    """Why it keeps its place; empty if nobody is suspected."""
    told: set[str] = field(default_factory=set)
    """The gists of all reasons so far."""

    def forget(self) -> None:
        self.element, self.why = -1, ""
        self.told.clear()


def advance(view: View, job: JobView, times: JobTimes, notes: SwapNotes, odd: Sequence[Standing] = ()) -> Outcome:
    """Begin, drop or end the job's swap. odd: the nodes and ranks that stand out among their peers."""
    out, state = Outcome(), job.state
    if state.swap is not None:
        _follow(view, job, out)
        return out
    if (suspect := find_suspect(state, times) or find_odd(state, times, odd, view.now)) is None:
        notes.forget()
    elif state.phase is Phase.RUNNING and (kept := plan_swap(view, job, suspect, out)) is not None:
        _note_kept(state, suspect, kept, notes, out)
    return out


def find_suspect(job: JobState, times: JobTimes) -> Suspect | None:
    """Return the element that should leave, if there is one: that of a rank that holds up the others."""
    slow = times.straggler
    if slow is None or slow.slot is None or slow.slot not in job.members:
        return None
    return Suspect(job.element(slow.slot), slow.reason, times.straggler_cost, times.unclear)


def find_odd(job: JobState, times: JobTimes, odd: Sequence[Standing], now: float) -> Suspect | None:
    """Return the element whose node has stood out since the job became slow, if it is the only one and no rank of
    another node explains it: where all wait for lost packets, no rank is slower than the others."""
    slow, monitor = times.degraded, times.monitor
    nodes = {node for item in odd for node in item.nodes}
    if slow is None or len(nodes) != 1 or any(item.metric in UNSURE for item in odd):
        return None
    (node,) = nodes
    if slow.slot is not None and slow.node != node:
        return None
    apart = TOGETHER_SECONDS + 2 * WINDOW * monitor.average  # a slow job is known some iterations later
    elements = {job.element(slot) for slot in job.members if job.node(slot) == node}
    if len(elements) != 1 or all(abs(item.since - slow.since) > apart for item in odd):
        return None
    share = max(0.0, 1.0 - monitor.usual / monitor.average) if monitor.average else 0.0
    reason = f"{odd[0].reason}, and the job is slow since: {slow.reason}"
    return Suspect(elements.pop(), reason, share * (now - slow.since))


# ---------------------------------------------------------------- the decision
def plan_swap(view: View, job: JobView, suspect: Suspect, out: Outcome) -> Refusal | None:
    """Record that the suspect leaves when spares take its place. Return why it keeps its place; None if it leaves."""
    state, agent = job.state, job.agents.get(suspect.element)
    if agent is None or not agent.alive or suspect.element not in state.inside or state.departing:
        return Refusal("its job changes at this moment", waits=True)
    along, cost = leaves_along(job, suspect.element), _cost(view, job)
    if why := _why_not(view, job, suspect, along):
        return Refusal(why)
    if suspect.lost < cost:
        cheap = f"it has cost {suspect.lost:.1f} s so far, and a swap costs {cost:.1f} s"
        return Refusal(cheap, waits=True)
    if why := isolation.why_kept(view, state, agent, suspect.reason, True, out):
        return Refusal(why)
    who = f"{agent.node} gives its place to a spare at the next boundary"
    if not state.mode.joins:
        who = f"{agent.node} gives its place to a spare, and all processes start again"
    reason = f"{who}: {suspect.reason}; it has cost {suspect.lost:.1f} s, a swap costs {cost:.1f} s"
    swap = records.NodeSwap(suspect.element, agent.node, "planned", agent.agent, list(along), reason=reason)
    out.record(state, swap)
    return None


def _why_not(view: View, job: JobView, suspect: Suspect, along: Iterable[int]) -> str:
    """Return why the job keeps the suspect, as far as Slurm and the bounds have no say; empty if it need not."""
    state, needed = job.state, 1 + len(list(along))
    if view.config.swap_slow_nodes == "off":
        return "swap_slow_nodes is off"
    if not state.mode.joins and view.config.swap_slow_nodes != "always":
        return 'all processes of a plain program would start again: swap_slow_nodes = "always" allows it'
    if suspect.unclear:
        return suspect.unclear
    if not state.settings.spares:
        return "the job has no spares (--unicron-spares)"
    if state.mode.joins and not _state_stays(job, {suspect.element, *along}):
        return "no other replica has the training state"
    if (ready := _ready(job)) < needed:
        return f"only {ready} of {plural(needed, 'spare')} is ready" if ready else "no spare is ready"
    return ""


def _ready(job: JobView) -> int:
    return sum(how == "ready" for how in spares.standing(job).values())


def _cost(view: View, job: JobView) -> float:
    """Return the seconds that a swap costs the job. A suspect leaves when it has cost as much: whatever its future, the
    job then loses at most twice what it had to (the ski-rental rule)."""
    if job.state.mode.joins:
        return view.config.transition_seconds
    return restart_cost(view.now - job.state.since, view.config)


def leaves_along(job: JobView, element: int) -> tuple[int, ...]:
    """Return the elements that leave with this one: those of its block, and of the replicas that they break up."""
    state = job.state
    gone = set(state.mates(element)) & state.inside
    broken = (group for group in state.groups() if job.replica > 1 and gone & set(state.elements(group)))
    for group in list(broken):
        gone |= set(state.elements(group))
    return tuple(sorted(gone - {element}))


def _state_stays(job: JobView, gone: set[int]) -> bool:
    state = job.state
    named = [slot for slot in state.members if state.element(slot) in gone]
    return state.plan is not None and bool(remaining(state.plan.members, named, job.replica))


def _note_kept(job: JobState, suspect: Suspect, kept: Refusal, notes: SwapNotes, out: Outcome) -> None:
    """Record why the suspect keeps its place, once for each reason."""
    if notes.element != suspect.element:
        notes.forget()
    notes.element, notes.why, gist = suspect.element, kept.why, _gist(kept.why)
    if kept.waits or gist in notes.told:
        return
    notes.told.add(gist)
    node = job.agents[suspect.element].node if suspect.element in job.agents else ""
    reason = f"{node} keeps its place although {suspect.reason}: {kept.why}"
    out.record(job, records.NodeSwap(suspect.element, node, "withheld", reason=reason))


def _gist(why: str) -> str:
    """Return the part of a reason that counts as news: seconds change at every look."""
    return "".join(letter for letter in why if not letter.isdigit())


# ---------------------------------------------------------------- a planned swap
def _follow(view: View, job: JobView, out: Outcome) -> None:
    """End a swap whose element trains no more; drop one for which no spare is ready any more."""
    state, swap = job.state, job.state.swap
    assert swap is not None
    agent = job.agents.get(swap.element)
    if swap.element not in state.inside and swap.element not in state.elements(state.joining):
        if agent is not None and agent.agent == swap.agent:
            _leave_node(view, job, swap.element, swap.reason, out)
    elif state.phase is Phase.RUNNING:
        if _ready(job) < len(swap.elements):
            node = agent.node if agent is not None else ""
            reason = f"{node} keeps its place after all: no spare is ready any more"
            out.record(state, records.NodeSwap(swap.element, node, "dropped", reason=reason))


def _leave_node(view: View, job: JobView, element: int, reason: str, out: Outcome) -> None:
    """Leave the node, which is a suspect from now on."""
    state, agent = job.state, job.agents[element]
    if isolation.leave_node(view, state, agent, None, agent.slots, reason, True, out):
        if any(isinstance(record, records.NodeAvoided) for _, _, record in out.records):
            return
    words = f"job {state.job} trains without {agent.node}: {reason}"
    avoided = records.NodeAvoided(element=element, node=agent.node, agent=agent.agent, suspect=True, reason=words)
    out.record(state, avoided)
