"""Names cuts, iterations whose state all nodes keep and some copy to others (docs/design/memory.md). Pure.

A cut is *good* if every part of it is in enough nodes: the job can go on from it although that many nodes fail at once.
Agents report what they have, so a restarted controller knows which cuts are good.

Invariant: an order names the newest good state (`Cuts.good`; before there is one, the newest whole one), and agents
keep that and the cut until a later order. So once a cut was good, some good state is in memory at each moment, even if
the next cut is incomplete or fails. Numbers of orders only rise, above all that agents have heard (`_renumber`), so a
late order undoes nothing. Copies end (`none`) only after enough nodes have trained every place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from unicron_ctl.controller.model import healing_modes
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.replication import nearest
from unicron_ctl.controller.replication.receivers import NOBODY, passed_over, refusing
from unicron_ctl.controller.replication.script_states import ScriptStates
from unicron_ctl.controller.replication.shards import Shards
from unicron_ctl.controller.replication.strategy import Pace, ReplicationStrategy, StoredState, with_memory
from unicron_ctl.controller.replication.whole_states import WholeStates
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import ranges, structs, wire
from unicron_ctl.shared.system.throttle import Throttle

CUT_SECONDS = 5.0  # between two cuts, at least
LOOK_SECONDS = 0.5  # between two checks whether it is good
PART_SECONDS = 10.0  # for every part of a cut to be somewhere, once ranks are past it; then another one is tried
CUT_LIMIT_SECONDS = 120.0  # for a cut to become good while no byte moves; then another one is tried
AHEAD = 2  # iterations that a cut is ahead of the ranks, at least
MOST_LATE = 6  # doublings of that, if ranks heard of it too late
REDIRECTS = 1 / 60, 12.0  # searches for other targets a second, and at once: all agents are told each result
FAR = 10.0  # times the expected time: the limit of waiting for images, whatever their progress
MOST_NAMED = 3  # places in a text
SCRIPT_STATES, SHARDS, WHOLE_STATES = ScriptStates(), Shards(), WholeStates()


@dataclass
class Cuts:
    """The memory of one job's cuts; it is lost with the process."""

    asked: int = -1  # the iteration of the last cut
    number: int = 0  # of the last order
    asked_at: float = 0.0  # when the last cut was named
    late: int = 0  # cuts in a row that came too late for ranks
    moved: int = 0  # bytes of images that all agents together had moved
    moved_at: float = 0.0  # when they last rose
    passed_at: float = math.inf
    """When ranks were first seen past the last cut while a part of it was missing."""
    good: int = -1  # the iteration from which the job can go on
    look_at: float = 0.0
    there: tuple[object, ...] = ()  # the generation and the agents at the last check
    since: int = 0  # the iteration at which they were there first
    none: bool = False  # no copies should be kept
    targets: dict[int, list[structs.Holder]] = field(default_factory=dict)
    """By element, the receivers of what it has."""
    refusing: dict[int, dict[str, str]] = field(default_factory=dict)
    """By element, nodes that have refused its copies, and why, until it reports none."""
    redirect_at: float = 0.0  # no other receivers are chosen sooner
    redirects: Throttle = field(default_factory=lambda: Throttle(*REDIRECTS))
    refusals_on_record: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Giver's node -> nodes whose refusal is on record."""
    refusals_to_record: dict[tuple[str, str], str] = field(default_factory=dict)
    """(giver's node, refusing node) -> why, for the next record."""
    without_memory: dict[int, list[str]] = field(default_factory=dict)
    """place -> nodes without a memory, because of which no copies are made."""
    gaps_on_record: list[str] = field(default_factory=list)  # such nodes
    pace: Pace = field(default_factory=Pace)


def strategy_of(job: JobView) -> ReplicationStrategy:
    """Return the strategy for the kind of state that the job's ranks keep."""
    if job.state.mode is healing_modes.RESTART:
        return SCRIPT_STATES
    return SHARDS if job.sharded else WHOLE_STATES


def cut_orders(
    view: View, job: JobView, cuts: Cuts, waiting: Sequence[int] = ()
) -> Iterator[tuple[AgentView, wire.Cut]]:
    """Yield the cut for each agent that has not heard of it. waiting: hot spares' elements. Called every tick."""
    state, kind = job.state, strategy_of(job)
    if state.over or state.phase is not Phase.RUNNING or state.plan is None:
        return
    if view.now >= cuts.look_at or _regrouped(job, cuts):
        cuts.look_at = view.now + LOOK_SECONDS
        _update(view, job, kind, cuts, waiting)
    if not cuts.none and (not cuts.targets or cuts.asked < 0):
        return
    for agent in job.alive():
        if agent.status.cut == cuts.number:
            continue
        if cuts.none:
            yield agent, wire.Cut(iteration=cuts.asked, number=cuts.number, none=True)
        else:
            to, parts = cuts.targets.get(agent.element, []), kind.parts(job, agent)
            yield agent, wire.Cut(iteration=cuts.asked, number=cuts.number, good=cuts.good, targets=to, parts=parts)


def _update(view: View, job: JobView, kind: ReplicationStrategy, cuts: Cuts, waiting: Sequence[int]) -> None:
    """Take in which agents are there and what they have, and decide whether to name another cut."""
    if not kind.begun(job):
        cuts.targets = {}
        return
    if _membership_changed(job, kind, cuts, waiting):
        cuts.without_memory = kind.without_memory(job)
        cuts.targets = {} if cuts.without_memory else kind.targets(view, job, waiting, NOBODY)
    if cuts.targets:
        _redirect(view, job, kind, cuts, waiting)
        _name_next(view, job, kind, cuts)
    elif kind.removable:
        _let_go(view, job, kind, cuts)


def _regrouped(job: JobView, cuts: Cuts) -> bool:
    """Whether the job is in another generation than at the last check."""
    return job.state.plan is not None and job.state.plan.generation != next(iter(cuts.there), -1)


def _membership_changed(job: JobView, kind: ReplicationStrategy, cuts: Cuts, waiting: Sequence[int]) -> bool:
    """Whether other agents are there than at the last check: newcomers have heard of no cut, and lost copies must be
    made again."""
    assert job.state.plan is not None
    agents = [(agent.element, agent.node, agent.images_at) for agent in job.alive()]
    there = job.state.plan.generation, kind.alike(job), *agents, *waiting
    if there == cuts.there:
        return False
    if _regrouped(job, cuts):
        cuts.asked = -1  # its iterations may be lower
    cuts.there, cuts.asked_at, cuts.since, cuts.none = there, -math.inf, kind.first_iteration(job), False
    cuts.refusing, cuts.redirect_at = {}, 0.0  # a node that was passed over may have room now
    return True


# ---------------------------------------------------------------- the next cut
def newest_good(job: JobView, stored: Iterable[StoredState]) -> int:
    """Return the newest iteration of which every part is in enough nodes' memory; -1 if there is none."""
    enough = min(1 + job.state.settings.copies, len({agent.node for agent in with_memory(job)}))
    return max((one.iteration for one in stored if one.fits and one.nodes >= enough), default=-1)


def newest_whole(stored: Iterable[StoredState]) -> int:
    """Return the newest iteration of which every part is in any node's memory, preferably one that fits; -1 if there is
    none."""
    return max(((one.fits, one.iteration) for one in stored), default=(True, -1))[1]


def behind(job: JobView) -> float:
    """Return the seconds of work that are repeated if the job goes on from living nodes' memory; infinity if they have
    no whole state."""
    newest, times = newest_whole(strategy_of(job).stored_states(job)), [seconds for _, seconds, _ in job.state.recent]
    if newest < 0 or not times or not job.state.mode.reports:  # a plain script's numbers are its own
        return math.inf
    return (job.state.iteration + 1 - newest) * sum(times) / len(times)


def _name_next(view: View, job: JobView, kind: ReplicationStrategy, cuts: Cuts) -> None:
    """Name another cut if the last one is good, or has failed."""
    rate = kind.rate(view, job, cuts.pace)
    if rate is None or view.now - cuts.asked_at < CUT_SECONDS:
        return
    stored, first = kind.stored_states(job), kind.first_iteration(job)
    good, whole = newest_good(job, stored), newest_whole(stored)
    past = 0 <= cuts.asked < first - AHEAD
    late = past and good < cuts.asked and len(kind.kept_iterations(job, cuts.asked)) != 1
    if not late and not (past and _incomplete(view, cuts, whole)) and _patient(view, job, cuts, good):
        return
    cuts.late = min(MOST_LATE, cuts.late + 1) if late else 0
    cuts.good = good if good >= 0 else whole  # what there is stays until there is a better one
    ahead = max(AHEAD, math.ceil(kind.lead_seconds * rate)) << cuts.late
    _name_cut(view, job, cuts, max(first, cuts.asked + 1) + ahead)


def _incomplete(view: View, cuts: Cuts, whole: int) -> bool:
    """Whether ranks have been past the last cut for a while and a part of it is missing: some heard of it too late, or
    had no room."""
    if whole >= cuts.asked:
        cuts.passed_at = math.inf
        return False
    cuts.passed_at = min(cuts.passed_at, view.now)
    return view.now - cuts.passed_at >= PART_SECONDS


def _patient(view: View, job: JobView, cuts: Cuts, good: int) -> bool:
    """Whether the last cut is given more time: it is not good yet, but may become so while bytes of images move."""
    moved, waited = sum(agent.status.moved for agent in job.alive()), view.now - cuts.asked_at
    if moved != cuts.moved:
        cuts.moved, cuts.moved_at = moved, view.now
    still = view.now - max(cuts.asked_at, cuts.moved_at)
    sizes = [sum(image.bytes for image in agent.status.images) for agent in job.alive()]
    longest = max(sizes, default=0) / nearest.usual(job.alive())  # one node sends all that it keeps
    return cuts.asked > good and still < CUT_LIMIT_SECONDS and waited < CUT_LIMIT_SECONDS + FAR * longest


def _name_cut(view: View, job: JobView, cuts: Cuts, iteration: int) -> None:
    cuts.asked, cuts.asked_at, cuts.passed_at = iteration, view.now, math.inf
    _renumber(job, cuts)


def _renumber(job: JobView, cuts: Cuts) -> None:
    cuts.number = 1 + max([cuts.number, *(agent.status.cut for agent in job.alive())])


def _let_go(view: View, job: JobView, kind: ReplicationStrategy, cuts: Cuts) -> None:
    """End all copies: the job has grown, and enough nodes have trained every place for a while."""
    if cuts.none or cuts.without_memory or not any(agent.status.images for agent in job.alive()):
        return
    if kind.first_iteration(job) > cuts.since + AHEAD:
        cuts.none, cuts.good = True, -1
        _name_cut(view, job, cuts, -1)


def _redirect(view: View, job: JobView, kind: ReplicationStrategy, cuts: Cuts, waiting: Sequence[int]) -> None:
    """Replace receivers that took nothing, within the same cut; what was copied of it stays good.

    The new receivers stay, even if the first ones would take copies again.
    """
    if view.now < cuts.redirect_at or cuts.redirects.rest("", view.now) < 1.0:
        return
    before, cuts.refusing = cuts.refusing, refusing(with_memory(job), cuts.refusing)
    new = {element: nodes.keys() - before.get(element, {}).keys() for element, nodes in cuts.refusing.items()}
    if not any(new.values()):
        return
    cuts.redirects.charge("", view.now, 1.0)
    cuts.redirect_at = view.now + CUT_SECONDS
    targets = kind.targets(view, job, waiting, passed_over(cuts.refusing))
    if targets != cuts.targets:
        cuts.targets = targets
        _renumber(job, cuts)
    for element, nodes in ((giver, nodes) for giver, nodes in new.items() if giver in targets):
        to, giver = {job.agents[one.element].node for one in targets[element]}, job.agents[element].node
        again = not to.isdisjoint(cuts.refusing[element])
        then = "no other node has taken it, so it is tried again" if again else "another node gets it"
        recorded = cuts.refusals_on_record[giver]
        for node in sorted(nodes - recorded)[: ranges.MOST_PASSED_OVER - len(recorded)]:
            recorded.add(node)
            cuts.refusals_to_record[giver, node] = f"{cuts.refusing[element][node]}; {then}"


# ---------------------------------------------------------------- records
def report_gaps(job: JobView, cuts: Cuts) -> Outcome:
    """Record, once, which nodes prevent copies, and which copies did not get through."""
    nodes, out = sorted({node for bare in cuts.without_memory.values() for node in bare}), Outcome()
    if nodes and nodes != cuts.gaps_on_record:
        cuts.gaps_on_record, places = nodes, [*cuts.without_memory]
        reason = (
            "no copies of the training state are made in other nodes: nothing is kept in the memory of "
            f"{first_of(nodes, ', ')}, and what is trained there alone (places {places[:MOST_NAMED]}) cannot be "
            "copied; the job's log says why"
        )
        out.record(job.state, records.NoCopies(nodes=nodes, places=places, reason=reason))
    new, cuts.refusals_to_record = [*cuts.refusals_to_record.items()], {}
    if new:
        words = first_of([f"from {giver} to {node} ({why})" for (giver, node), why in new], ", ")
        reason = f"a copy of the training state did not get through {words}"
        out.record(job.state, records.CopiesRefused(ways=[way for way, _ in new], reason=reason))
    return out


def first_of(words: Sequence[str], between: str) -> str:
    """Return the first few, and how many more there are, for people."""
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return between.join(words[:MOST_NAMED]) + more
