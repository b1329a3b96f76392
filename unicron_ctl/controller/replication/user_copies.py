"""Copies of what scripts without a session keep with `unicron.memory`: which nodes give theirs to which, and from
what the job can go on. Pure (docs/design/memory.md, "For scripts without a session").

A state of which each rank has its own part is of use only if the parts are of one iteration. So the controller names
cuts here, too, but it does not know which iterations a script saves: a cut is the first one from a number on. Where the
word came too late for some of the ranks they have kept different ones, and the next cut is named further ahead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.job_state import Phase
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.view import View
from unicron.ctl.controller.replication.copies import (
    AHEAD,
    AHEAD_SECONDS,
    CUT_SECONDS,
    LOOK_SECONDS,
    MOST_LATE,
    Cuts,
    Pace,
    changed,
    holder,
    name,
    note_change,
    order,
    patient,
    redirect,
    with_memory,
)
from unicron.ctl.controller.replication.rings import Away, Ring, pass_over, passed_over
from unicron.ctl.protocol import wire
from unicron.transition.snapshot.images import SAME, USER

HEARD_SECONDS = 1.0  # how old the word of an agent may be


# ---------------------------------------------------------------- which copies are made
def cut(view: View, job: JobView, cuts: Cuts, waiting: Sequence[int] = ()) -> Iterator[tuple[AgentView, wire.Cut]]:
    """The cut that each agent is to keep, for those that have not heard of it. Called at every tick."""
    state = job.state
    if not state.restart_mode or state.over or state.phase is not Phase.RUNNING or state.plan is None:
        return
    if changed(job, cuts):
        cuts.targets, cuts.look_at, cuts.pace = {}, 0.0, Pace()
    newest = newest_saved(job)
    if newest is None or view.now < cuts.look_at:
        return
    cuts.look_at = view.now + LOOK_SECONDS
    same = newest.mark == SAME
    if note_change(job, cuts, waiting) or same is not cuts.pace.same:
        cuts.pace.same = same
        cuts.targets = targets(job, view.slurm.domains, same, False, passed_over(cuts.refusing))
    redirect(view, job, cuts, partial(targets, job, view.slurm.domains, same, False))
    if _measured(view, cuts.pace, newest.iteration):
        _ask(view, job, cuts, newest)
    asked = bool(cuts.targets) and cuts.asked >= 0
    for agent in [agent for agent in job.alive() if agent.cut != cuts.number] if asked else []:
        yield agent, order(cuts, agent, 1 if same else len(agent.slots))


def newest_saved(job: JobView) -> wire.Image | None:
    """That the present world has saved."""
    plan = job.state.plan
    saved = [agent.saved for agent in job.alive() if agent.saved is not None]
    mine = [one for one in saved if plan is not None and one.base == plan.generation]
    return max(mine, key=lambda one: one.iteration, default=None)


def _measured(view: View, pace: Pace, iteration: int) -> bool:
    """Takes in what the ranks have saved; whether it is known how fast they get on."""
    if pace.iteration < 0:
        pace.iteration, pace.at = iteration, view.now
    if view.now - pace.at >= 2 * HEARD_SECONDS:
        pace.rate = max(0, iteration - pace.iteration) / (view.now - pace.at)
        pace.iteration, pace.at = iteration, view.now
        return True
    return pace.rate > 0.0


def _ask(view: View, job: JobView, cuts: Cuts, newest: wire.Image) -> None:
    """Name another cut where the last one is good, or has come to nothing."""
    if not cuts.targets or view.now - cuts.asked_at < CUT_SECONDS:
        return
    good = newest_good(job)
    late = cuts.asked > good and len(_kept(job, cuts.asked, newest.base)) != 1 and newest.iteration > cuts.asked
    if not late and patient(view, job, cuts, good):
        return
    pace = cuts.pace
    pace.late = min(MOST_LATE, pace.late + 1) if late else 0
    cuts.good = good if good >= 0 else _standing(job)
    ahead = max(AHEAD, math.ceil((AHEAD_SECONDS + HEARD_SECONDS) * pace.rate)) << pace.late
    name(view, job, cuts, max(newest.iteration, cuts.asked) + 1 + ahead)


def _kept(job: JobView, asked: int, base: int) -> set[int]:
    """Which iterations the ranks of this world have kept for this cut: several, or none, where the word came too late
    for some of them, or for all."""
    images = (image for agent in job.alive() for image in agent.images)
    return {each.iteration for each in images if each.kind == USER and each.iteration >= asked and each.base == base}


def targets(
    job: JobView,
    domains: Mapping[str, str],
    replicated: bool = False,
    spares: bool = True,
    away: Away = MappingProxyType({}),
) -> dict[int, list[wire.Holder]]:
    """By element of the world, to whom it gives what its ranks have kept: before all those that fail with another
    switch, and of these first the next ones of the world on other nodes, then those that wait; nothing where all nodes
    have the same and are enough. domains: node -> with what it fails. spares: False where a world without them could
    not get what they have, so that they come after all of the world."""
    inside = sorted(job.state.inside)
    able = {agent.element: agent for agent in with_memory(job)}
    more = job.state.settings.copies
    if replicated and len({able[element].node for element in inside if element in able}) > more:
        return {}
    world, members = [able[element] for element in inside if element in able], set(inside)
    rings = Ring(world, domains), Ring([able[each] for each in sorted(able) if each not in members], domains)
    found: dict[int, list[AgentView]] = {}
    for one in world:
        has = {one.node}
        chosen = found[one.element] = []
        while len(chosen) < more and (to := _next(rings, one.element, has, domains, spares)) is not None:
            has.add(to.node)
            chosen.append(to)
    for one in world:
        if gone := away.get(one.element):
            has = {one.node, *(to.node for to in found[one.element])}
            pass_over(gone, found[one.element], has, partial(_next, rings, one.element, has, domains, spares, gone))
    return {giver: [holder(to) for to in chosen] for giver, chosen in found.items() if chosen}


def _next(
    rings: Sequence[Ring],
    giver: int,
    has: set[str],
    domains: Mapping[str, str],
    spares: bool,
    away: Collection[str] = (),
) -> AgentView | None:
    """Who gets the next one; rings: of the world, and of those that wait. away: nodes that are passed over."""
    used, none = {domains.get(node, "") for node in has}, frozenset[str]()
    order = [(ring, avoid) for avoid in (used, none) for ring in rings]
    for ring, avoid in order if spares else [(ring, avoid) for ring in rings for avoid in (used, none)]:
        if (found := ring.next(giver, has.union(away), avoid)) is not None:
            ring.give(found)
            return found
    return None


# ---------------------------------------------------------------- from what the job can go on
def newest_good(job: JobView) -> int:
    """The newest iteration of which every rank's part lies in enough nodes' memory; of what all ranks have alike any
    part is one. -1 where there is none."""
    agents, size = with_memory(job), len(job.state.members)
    most = min(1 + job.state.settings.copies, len({agent.node for agent in agents}))
    return max((iteration for iteration, of in _whole(agents, most) if of in (SAME, size)), default=-1)


def _standing(job: JobView) -> int:
    """What there is stays until there is a better one: the newest that is whole, and if this world has none, what one
    of another size has left, for a world of that size may come back. -1 where there is none."""
    whole, size = _whole(with_memory(job), 1), len(job.state.members)
    return max(whole, key=lambda each: (each[1] in (SAME, size), each[0]), default=(-1, SAME))[0]


def _whole(agents: Iterable[AgentView], most: int) -> list[tuple[int, int | str]]:
    """Iterations of which every part lies in so many nodes, and of what size of world they are: SAME where all ranks
    have the same."""
    nodes: dict[tuple[int, int | str, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for agent in agents:
        for image in agent.images:
            if image.kind == USER:
                of, place = (SAME, 0) if image.mark == SAME else (image.size, image.place)
                nodes[image.iteration, of, image.base][place].add(agent.node)
    return [
        (iteration, of)
        for (iteration, of, _), places in nodes.items()
        if len(places) == (1 if of == SAME else of) and all(len(each) >= most for each in places.values())
    ]
