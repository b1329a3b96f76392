"""In how many nodes the training state is, which copies are made of it, and who gets one when ranks need it. Pure
(docs/design/memory.md).

A place of the layout that several nodes train needs no copies: each replica is one. For the others the controller names
cuts, iterations of which all nodes keep the state and some give it to others. A cut of which every place is in enough
nodes is *good*: the job can go on from it whatever that many nodes fail at once. Which cuts are good is what the agents
say that they have, so a controller that was restarted knows it, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from unicron.ctl.controller.log import records
from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.job_state import Phase
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.live import Fetching, Told
from unicron.ctl.controller.model.throttle import Throttle
from unicron.ctl.controller.model.view import Outcome, View
from unicron.ctl.controller.replication import nearest
from unicron.ctl.controller.replication.forming import Formed, states
from unicron.ctl.controller.replication.rings import Away, Ring, pass_over, passed_over, refusing
from unicron.ctl.protocol import ranges, wire
from unicron.ctl.protocol.wire import RankStatus
from unicron.transition.snapshot.images import STATE

CUT_SECONDS = 5.0  # between two cuts, at least
LOOK_SECONDS = 0.5  # between two looks whether it is good
PART_SECONDS = 10.0  # for every part of a cut to be somewhere, once ranks are past it; then another one is tried
CUT_LIMIT_SECONDS = 120.0  # for a cut to become good without a byte on its way; then another one is tried
AHEAD_SECONDS = 1.0  # for the word to reach all ranks before they come by the iteration
AHEAD = 2  # iterations, at least
MOST_LATE = 6  # doublings of that, where the word has come too late
REDIRECTS = 1 / 60, 12.0  # looks for other targets a second, and at once: all agents are told what comes of each
FETCH_SECONDS = 120.0  # without an image, or a byte of one; then the job goes on from what its ranks have
FETCH_AGAIN_SECONDS = 1.0
FAR = 10.0  # times what is expected: the most that is waited for images, however they get on
NAMED = 3  # places in a text

State = tuple[int, str]  # (iteration, mark)


@dataclass
class Pace:
    """late: how often a cut came too late for ranks. Of scripts without a session also what was the newest that they
    had saved, when, and how many a second. same: all ranks have saved the same, once it is known."""

    iteration: int = -1
    at: float = 0.0
    rate: float = 0.0
    late: int = 0
    same: bool | None = None


@dataclass
class Cuts:
    """What is remembered for now of one job's: the last that was asked for, its number, and when; the newest from which
    it can go on; and, of those who were there at the last look, in how many more nodes which places are to be, and who
    gives what he has to whom. refusing: by element, which nodes have taken none from it, and why, until it tells of
    none; others are looked for no sooner than redirect_at, and as often as `redirects` allows. refused: of which nodes
    it is on record that they took none, by their giver's; unsaid: (giver's, theirs) -> why, what is to come there.
    unkept: place -> the nodes, all without a memory, on whose account no copies are made; said: which of these nodes
    are on record. moved: bytes of images that all agents together had moved, and when that rose last. none: nobody is
    to keep any."""

    asked: int = -1
    number: int = 0
    asked_at: float = 0.0
    moved: int = 0
    moved_at: float = 0.0
    passed_at: float = math.inf  # when ranks were first seen past the last one, and a part of it nowhere
    good: int = -1
    look_at: float = 0.0
    there: tuple[object, ...] = ()
    since: int = 0  # the iteration at which they were there first
    none: bool = False
    wanting: dict[int, int] = field(default_factory=dict)
    targets: dict[int, list[wire.Holder]] = field(default_factory=dict)
    refusing: dict[int, dict[str, str]] = field(default_factory=dict)
    refused: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unsaid: dict[tuple[str, str], str] = field(default_factory=dict)
    redirect_at: float = 0.0
    redirects: Throttle = field(default_factory=lambda: Throttle(*REDIRECTS))
    unkept: dict[int, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    pace: Pace = field(default_factory=lambda: Pace())


# ---------------------------------------------------------------- who has what
def holders(job: JobView) -> dict[int, set[int]]:
    """place -> elements whose members train it."""
    found: dict[int, set[int]] = defaultdict(set)
    for slot in job.state.members:
        found[slot % job.replica].add(job.state.element(slot))
    return found


def with_memory(job: JobView) -> list[AgentView]:
    """Living agents that keep training state in memory, in order of their elements. One that could make no folder for
    it does not, and says so in the job's log."""
    return [agent for agent in job.alive() if agent.images_at]


def wanting(job: JobView) -> dict[int, int]:
    """place -> in how many more nodes' memory its state is to be than train it; nothing where all places are trained by
    enough nodes, or nobody else has a memory. Where copies are made of one place they are of all, so a node that trains
    without a memory does not count then."""
    nodes, wanted = {agent.node for agent in with_memory(job)}, 1 + job.state.settings.copies
    trained = {place: {job.agents[e].node for e in found if e in job.agents} for place, found in holders(job).items()}
    if not job.live.remembers or not any(len(found) < wanted and nodes - found for found in trained.values()):
        return {}
    most, have = min(wanted, len(nodes)), {place: len(nodes & found) for place, found in trained.items()}
    return {place: most - count for place, count in sorted(have.items()) if count < most}


def unkept(job: JobView) -> dict[int, list[str]]:
    """place -> the nodes that train it, where none of them has a memory: no state of memory is whole."""
    agents, able = job.agents, {agent.element for agent in with_memory(job)}
    return {
        place: sorted({agents[element].node for element in found if element in agents})
        for place, found in sorted(holders(job).items())
        if able.isdisjoint(found)
    }


def images(agents: Iterable[AgentView]) -> dict[State, dict[int, dict[str, tuple[AgentView, wire.Image]]]]:
    """state -> place -> node -> who has it."""
    found: dict[State, dict[int, dict[str, tuple[AgentView, wire.Image]]]] = defaultdict(lambda: defaultdict(dict))
    for agent in agents:
        for image in agent.images:
            if image.kind == STATE:  # shards have their own way (unicron.transition.sharded.safekeeping)
                found[image.iteration, image.mark][image.place][agent.node] = agent, image
    return found


def newest_good(job: JobView, enough: bool = True) -> int:
    """The newest iteration of which every place's state lies in enough nodes' memory, or, if that is not asked, in any;
    -1 where there is none."""
    agents, size = with_memory(job), job.replica
    most = min(1 + job.state.settings.copies, len({agent.node for agent in agents})) if enough else 1
    whole = [
        iteration
        for (iteration, _), places in images(agents).items()
        if len(places) == size and all(len(nodes) >= most for nodes in places.values())
    ]
    return max(whole, default=-1)


def behind(job: JobView, newest_good: Callable[..., int] = newest_good) -> float:
    """Seconds of work that are done again when the job goes on from what living nodes have in memory; infinity where
    they have no whole state."""
    newest, times = newest_good(job, enough=False), [seconds for _, seconds, _ in job.state.recent]
    if newest < 0 or not times:
        return math.inf
    return (job.state.iteration + 1 - newest) * sum(times) / len(times)


# ---------------------------------------------------------------- making copies
def cut(view: View, job: JobView, cuts: Cuts, waiting: Sequence[int] = ()) -> Iterator[tuple[AgentView, wire.Cut]]:
    """The cut that each agent is to keep, for those that have not heard of it. waiting: elements that are hot spares.
    Called at every tick."""
    state = job.state
    if state.over or state.phase is not Phase.RUNNING or state.plan is None or state.restart_mode:
        return
    if job.live.sharded:  # another way (shard_copies)
        return
    if view.now >= cuts.look_at or changed(job, cuts):
        cuts.look_at = view.now + LOOK_SECONDS
        if note_change(job, cuts, waiting):
            missing = wanting(job)
            cuts.unkept = unkept(job) if missing else {}
            cuts.wanting = missing if not cuts.unkept else {}
            cuts.targets = targets(job, cuts.wanting, view.slurm.domains, waiting)
        if cuts.wanting:
            redirect(view, job, cuts, partial(targets, job, cuts.wanting, view.slurm.domains, waiting))
            ask(view, job, cuts)
        else:
            end(view, job, cuts)
    for agent in [agent for agent in job.alive() if agent.cut != cuts.number] if cuts.wanting or cuts.none else []:
        places = {slot % job.replica for slot in agent.slots if slot in state.members}
        yield agent, order(cuts, agent, len(places))


def order(cuts: Cuts, agent: AgentView, parts: int) -> wire.Cut:
    """What an agent is told. parts: of the state that its ranks keep."""
    if cuts.none:
        return wire.Cut(iteration=cuts.asked, number=cuts.number, none=True)
    to = cuts.targets.get(agent.element, [])
    return wire.Cut(iteration=cuts.asked, number=cuts.number, good=cuts.good, targets=to, parts=parts)


def changed(job: JobView, cuts: Cuts) -> bool:
    """There is another generation than at the last look."""
    return job.state.plan is not None and job.state.plan.generation != next(iter(cuts.there), -1)


def note_change(job: JobView, cuts: Cuts, waiting: Sequence[int]) -> bool:
    """Whether somebody else is there than at the last look to keep copies: whoever came has heard of no cut, and what
    was lost is to be made again."""
    assert job.state.plan is not None
    agents = [(one.element, one.node, one.images_at) for one in job.alive()]
    there = job.state.plan.generation, *agents, *waiting
    if there == cuts.there:
        return False
    if changed(job, cuts):
        cuts.asked = -1  # its iterations may be lower
    cuts.there, cuts.asked_at, cuts.since, cuts.none = there, -math.inf, reached(job), False
    cuts.refusing, cuts.redirect_at = {}, 0.0  # who was passed over may be the one with room now
    return True


def ask(view: View, job: JobView, cuts: Cuts, newest_good: Callable[..., int] = newest_good) -> None:
    """Name another cut where the last one is good, or has come to nothing."""
    if view.now - cuts.asked_at < CUT_SECONDS:
        return
    good, pace, first = newest_good(job), cuts.pace, reached(job)
    past = 0 <= cuts.asked < first - AHEAD  # ranks are past the last cut
    late = past and not any(image.iteration == cuts.asked for agent in job.alive() for image in agent.images)
    if not late and not (past and _in_part(view, job, cuts, newest_good)) and patient(view, job, cuts, good):
        return
    pace.late = min(MOST_LATE, pace.late + 1) if late else 0
    cuts.good = good if good >= 0 else newest_good(job, enough=False)  # what there is stays until there is a better one
    ahead = max(AHEAD, math.ceil(AHEAD_SECONDS / max(job.state.seconds or AHEAD_SECONDS, 1e-3))) << pace.late
    name(view, job, cuts, max(first, cuts.asked + 1) + ahead)


def patient(view: View, job: JobView, cuts: Cuts, good: int) -> bool:
    """The last cut is given time: it is not good yet, and as long as bytes of images move it may become so."""
    moved, waited = sum(agent.moved for agent in job.alive()), view.now - cuts.asked_at
    if moved != cuts.moved:
        cuts.moved, cuts.moved_at = moved, view.now
    still = view.now - max(cuts.asked_at, cuts.moved_at)
    return cuts.asked > good and still < CUT_LIMIT_SECONDS and waited < CUT_LIMIT_SECONDS + FAR * _seconds(job)


def _in_part(view: View, job: JobView, cuts: Cuts, newest_good: Callable[..., int]) -> bool:
    """Ranks have been past the last cut for a while, and of a part of the state nobody has it: some heard of it too
    late, or had no room."""
    if newest_good(job, enough=False) >= cuts.asked:
        cuts.passed_at = math.inf
        return False
    cuts.passed_at = min(cuts.passed_at, view.now)
    return view.now - cuts.passed_at >= PART_SECONDS


def reached(job: JobView) -> int:
    """The iteration that the first ranks are in, in this generation: it may have gone back behind what is on record."""
    said = (
        [0]
        if job.state.plan is None
        else [
            status.iteration
            for _, slot, status in job.all_ranks()
            if slot in job.state.members and status.generation == job.state.plan.generation
        ]
    )
    return max([job.live.stepped.iteration + 1, *said])


def name(view: View, job: JobView, cuts: Cuts, iteration: int) -> None:
    """This one is the cut from now on, for all who have heard of others."""
    cuts.asked, cuts.asked_at, cuts.passed_at = iteration, view.now, math.inf
    _number(job, cuts)


def _number(job: JobView, cuts: Cuts) -> None:
    """All agents are told the cut, whatever they have heard."""
    cuts.number = 1 + max([cuts.number, *(agent.cut for agent in job.alive())])


def redirect(view: View, job: JobView, cuts: Cuts, targets: Callable[[Away], dict[int, list[wire.Holder]]]) -> None:
    """Whoever gives to one that took nothing gives the same cut to another one; what has been copied of it stays good.
    Called at every look. That a word is over is no reason to look again: whoever takes the copies goes on taking them.
    """
    if view.now < cuts.redirect_at or cuts.redirects.left("", view.now) < 1.0:
        return
    before, cuts.refusing = cuts.refusing, refusing(with_memory(job), cuts.refusing)
    new = {element: found.keys() - before.get(element, {}).keys() for element, found in cuts.refusing.items()}
    if not any(new.values()):
        return
    cuts.redirects.charge("", view.now, 1.0)
    cuts.redirect_at = view.now + CUT_SECONDS
    found = targets(passed_over(cuts.refusing))
    if found != cuts.targets:
        cuts.targets = found
        _number(job, cuts)
    for element, nodes in ((giver, nodes) for giver, nodes in new.items() if giver in found):
        to, giver = {job.agents[one.element].node for one in found[element]}, job.agents[element].node
        again = not to.isdisjoint(cuts.refusing[element])
        then = "no other node has taken it, so it is tried again" if again else "another node gets it"
        for node in sorted(nodes - cuts.refused[giver])[: ranges.MOST_PASSED_OVER - len(cuts.refused[giver])]:
            cuts.refused[giver].add(node)
            cuts.unsaid[giver, node] = f"{cuts.refusing[element][node]}; {then}"


def _seconds(job: JobView) -> float:
    """That the longest way of a copy should take, by what is known of images and of how they went before: one node
    sends all that it keeps."""
    sizes = [sum(image.bytes for image in agent.images) for agent in job.alive()]
    return max(sizes, default=0) / nearest.usual(job.alive())


def end(view: View, job: JobView, cuts: Cuts) -> None:
    """The job has grown: every place is in enough nodes that train it, and has been for a while. Copies only take
    memory then."""
    able = (job.live.remembers or job.live.sharded) and not cuts.unkept
    if cuts.none or not able or not any(agent.images for agent in job.agents.values() if agent.alive):
        return
    if reached(job) > cuts.since + AHEAD:
        cuts.none, cuts.good = True, -1
        name(view, job, cuts, -1)


def say(job: JobView, cuts: Cuts) -> Outcome:
    """Puts on record, once, on whose account there are no copies, and to whom some did not get through."""
    nodes, places, out = sorted({each for found in cuts.unkept.values() for each in found}), [*cuts.unkept], Outcome()
    if nodes and nodes != cuts.said:
        cuts.said = nodes
        some = ", ".join(nodes[:NAMED]) + (f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else "")
        reason = (
            f"no copies of the training state are made in other nodes: nothing is kept in the memory of {some}, and "
            f"what is trained there alone (places {places[:NAMED]}) cannot be copied; the job's log says why"
        )
        out.record(job.state, records.NoCopies(nodes=nodes, places=places, reason=reason))
    new, cuts.unsaid = [*cuts.unsaid.items()], {}
    if new:
        words = [f"from {giver} to {node} ({why})" for (giver, node), why in new[:NAMED]]
        more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
        reason = f"a copy of the training state did not get through {', '.join(words)}{more}"
        out.record(job.state, records.CopiesRefused(ways=[way for way, _ in new], reason=reason))
    return out


def targets(
    job: JobView,
    missing: Mapping[int, int],
    domains: Mapping[str, str],
    waiting: Collection[int] = (),
    away: Away = MappingProxyType({}),
) -> dict[int, list[wire.Holder]]:
    """By element, to whom it gives what it has of a cut; of several that train a place the first gives it. domains:
    node -> with what it fails. waiting: elements that are hot spares, which begin with what they have when they take a
    place."""
    if not missing:
        return {}
    agents, room = {agent.element: agent for agent in with_memory(job)}, Receivers(job, domains, waiting)
    able = {place: found & agents.keys() for place, found in holders(job).items()}
    givers = {place: min(able[place]) for place in missing if able.get(place)}
    there = {place: {agents[element].node for element in able[place]} for place in givers}
    beside: dict[int, set[str]] = defaultdict(set)
    for place, giver in givers.items():
        beside[giver] |= there[place]
    chosen: dict[int, list[AgentView]] = {}  # by place
    for place in sorted(givers, key=room.spared, reverse=True):  # a spare is then given the giver's others, too
        giver, has, chosen[place] = givers[place], there[place], []
        while len(chosen[place]) < missing[place] and (one := room.next(place, giver, has, beside[giver])) is not None:
            has.add(one.node)
            chosen[place].append(one)
    found: dict[int, dict[int, wire.Holder]] = defaultdict(dict)
    for place, some in chosen.items():
        giver, has = givers[place], there[place]
        if gone := away.get(giver):
            pass_over(gone, some, has, partial(room.next, place, giver, has, beside[giver], gone))
        found[giver] |= {one.element: holder(one) for one in some}
    return {giver: list(each.values()) for giver, each in found.items() if each}


class Receivers:
    """Who could be given a copy. Whatever fails with the nodes that have the state comes last: with their switch, or
    their block. An agent gives all that it has to each of its targets, so of the rest whoever is given another place
    of the giver's comes first. Then a hot spare whose ranks would take that place, then who was given least of the
    elements after the giver's; of these those first that train nothing of what it gives."""

    def __init__(self, job: JobView, domains: Mapping[str, str], waiting: Collection[int]) -> None:
        able = with_memory(job)
        self._ring, self._domains = Ring(able, domains), domains
        self._given: dict[int, list[AgentView]] = defaultdict(list)  # by who gives them something
        self._spares: dict[int, list[AgentView]] = defaultdict(list)  # by the places that they would take
        for one in able:
            for place in {slot % job.replica for slot in one.slots} if one.element in waiting else ():
                self._spares[place].append(one)

    def spared(self, place: int) -> bool:
        """A hot spare's ranks would take it."""
        return bool(self._spares[place])

    def next(
        self, place: int, giver: int, has: set[str], beside: set[str], away: Collection[str] = ()
    ) -> AgentView | None:
        """The next one for a state of which these nodes have a copy; it is given one. beside: nodes that train what
        else the giver gives. away: nodes that are passed over."""
        given = self._given[giver]
        for avoid in ({self._domains.get(node, "") for node in has}, set[str]()):
            if (found := self._first(given, has.union(away), avoid)) is not None:
                return found
            for nodes in (has.union(beside, away), has.union(away)):
                found = self._first(self._spares[place], nodes, avoid) or self._ring.next(giver, nodes, avoid)
                if found is not None:
                    self._ring.give(found)
                    given.append(found)
                    return found
        return None

    def _first(self, among: Iterable[AgentView], has: Collection[str], avoid: Collection[str]) -> AgentView | None:
        able = (one for one in among if one.node not in has)
        return next((one for one in able if self._domains.get(one.node, "") not in avoid), None)


def holder(agent: AgentView) -> wire.Holder:
    """As others reach it."""
    return wire.Holder(element=agent.element, address=agent.images_at, token=agent.token)


# ---------------------------------------------------------------- getting them back
@dataclass(frozen=True)
class Wanted:
    """state: newer than what the ranks could form with; ways: what makes it theirs, place by place."""

    state: State
    ways: list[nearest.Way]


def waits(view: View, job: JobView, more: Wanted | None) -> Outcome | None:
    """The job is not formed yet: its ranks get a newer state first. None where there is none, or it does not come."""
    fetching = job.live.fetching
    if more is None:
        fetching.began = None
        return None
    moved = sum(agent.moved for agent in job.alive())
    if fetching.began is None or fetching.state != more.state:
        longest = max((way.seconds for way in more.ways), default=0.0)
        job.live.fetching = fetching = Fetching(more.state, view.now, moved, view.now, FETCH_SECONDS + FAR * longest)
    elif moved != fetching.moved or len(more.ways) != fetching.left:
        fetching.moved, fetching.moved_at = moved, view.now
    fetching.left = len(more.ways)
    _note(job, fetching, more.ways)
    assert fetching.began is not None
    if view.now - fetching.moved_at >= FETCH_SECONDS or view.now - fetching.began >= fetching.most:
        return None
    out = Outcome()
    if view.now >= fetching.again_at:
        fetching.again_at = view.now + FETCH_AGAIN_SECONDS
        for way in more.ways:
            out.send(way.receiver, wire.Fetch(image=way.image, holder=holder(way.source)))
    return out


def _note(job: JobView, fetching: Fetching, ways: Iterable[nearest.Way]) -> None:
    """From where the images come, for people: that of the first order stays, for figures change with every look, unless
    its source has failed the receiver."""
    for way in ways:
        image = (way.image.kind, way.image.place, way.image.shard)
        known = fetching.words.get(image)
        receiver = job.agents.get(known.receiver) if known is not None else None
        if known is None or receiver is None or known.source in receiver.failing:
            fetching.words[image] = Told(way.receiver.element, way.source.images_at, way.words)


def _words(fetching: Fetching) -> str:
    """Where the images come from, for people."""
    said = [f"place {place}: {told.words}" for (_, place, _), told in fetching.words.items()]
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return f"{'; '.join(said[:NAMED])}{more}; the other places have a rank with it"


def fetched(job: JobView, iteration: int) -> str:
    """For the plan's reason: where the state came from, if some of it had to be got, or that a newer one did not come;
    what is remembered of that is over then."""
    fetching, job.live.fetching = job.live.fetching, Fetching()
    if not fetching.words or fetching.state[0] < iteration:
        return ""
    late = f"iteration {fetching.state[0]} did not come: " if fetching.state[0] > iteration else ""
    return f" ({late}{_words(fetching)})"


def wanted(view: View, job: JobView, reports: Mapping[int, RankStatus], found: Formed | None) -> Wanted | None:
    """The newest state of which every place is with a rank that could begin with it, or in a living node's memory; None
    where the ranks have nothing newer to get."""
    size = job.replica
    agents = with_memory(job)
    there, able = images(agents), {agent.element for agent in agents}
    ranks: dict[State, set[int]] = defaultdict(set)
    for slot, status in reports.items():
        for one in states(status):
            ranks[one].add(slot % size)
    receivers = {slot: status for slot, status in reports.items() if job.state.element(slot) in able}
    for one in sorted(there, reverse=True):
        if found is not None and one[0] <= found.iteration:
            return None
        missing = [place for place in range(size) if place not in ranks[one]]
        ways = nearest.ways(job, receivers, missing, there[one], view.slurm.domains)
        if ways or not missing:
            return Wanted(one, ways) if ways else None
    return None
