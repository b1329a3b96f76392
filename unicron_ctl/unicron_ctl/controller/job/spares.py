"""Hot spares: elements that are ready to train and are not members (docs/design/hot-spares.md). Pure.

No element is a spare by its number: an element that comes when enough train waits. So a spare takes the place of a lost
element by the same offer as any newcomer, and the lost one becomes the spare when it comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from unicron_ctl.controller.model.agent_view import CAN_ENTER
from unicron_ctl.controller.model.job_state import Failure, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_transition.generations import layout

OWN_SECONDS = 1.0  # a spare takes a process's place after this; joining takes it about as long
STANDING_SECONDS = 1.0  # between two checks of the spares
MOST_NAMED = 20  # elements in a text
HERE = (Phase.RUNNING, Phase.OFFERING)


# ---------------------------------------------------------------- who comes in
def pick(
    job: JobView,
    found: Mapping[int, Sequence[int]],
    room: int,
    inside: Collection[int] = (),
    order: Callable[[int], tuple[object, ...]] = lambda element: (element,),
) -> set[int]:
    """At most `room` elements of those in `found` (element -> its slots that can enter), sorted by `order`; elements
    `inside` take no room. If a replica or a block spans several elements, only those that make whole ones."""
    taken = set(found).intersection(inside)
    if job.state.unit(job.replica) == 1:
        return taken | set(sorted(set(found) - taken, key=order)[: max(0, room)])
    block = job.state.settings.block * job.per_node
    size = math.lcm(job.replica, block) if block > job.per_node else job.replica
    whole = layout.compose(chain.from_iterable(found.values()), size)[0]
    new = [{slot // job.per_node for slot in slots} - taken for slots in whole]
    chosen: set[int] = set()
    for elements in sorted(new, key=lambda elements: sorted(map(order, elements))):
        if len(chosen | elements) <= room:
            chosen |= elements
    return taken | chosen


def entrants(view: View, job: JobView, found: Mapping[int, Sequence[int]]) -> set[int]:
    """The elements that come in, of those that can: as many as there is room for. Elements that have trained, and whose
    processes were started again in place, come first, even if these will only soon be ready."""
    if not job.state.settings.spares:
        return set(found)
    inside = job.state.inside
    whole = {element for element, slots in found.items() if element in inside or len(slots) == job.per_node}
    room = job.room - sum(not late(view, job, element) for element in _returning(view, job, whole))
    again = {e for e in whole if any(job.agents[e].ranks[slot].incarnation > 0 for slot in found[e])}

    def order(element: int) -> tuple[object, ...]:
        return element not in whole, element not in again, element

    if (swap := job.state.swap) is not None:
        taken = pick(job, found, room + len(swap.elements), inside, order)
        if leaving_by_swap(job, (slot for element in taken for slot in found[element])):
            return taken
    return pick(job, found, room, inside, order)


def leaving_by_swap(job: JobView, joiners: Iterable[int]) -> frozenset[int]:
    """The elements of a suspect that these slots replace: they fill its places and all that are empty, and another
    replica has the training state, which one may have lost since the swap was planned."""
    state, swap, inside = job.state, job.state.swap, job.state.inside
    if swap is None or state.plan is None or not inside.issuperset(swap.elements):
        return frozenset()
    gone = {slot for slot in state.plan.members if state.element(slot) in swap.elements}
    if all(gone.intersection(replica) for replica in layout.replicas(state.plan.members, job.replica)):
        return frozenset()
    coming = len({slot // job.per_node for slot in joiners} - inside)
    return swap.elements if coming >= max(0, job.room) + len(swap.elements) else frozenset()


def formers(job: JobView, slots: Iterable[int]) -> list[int]:
    """The slots that form the job, of those that can: all of as many elements as wanted. Ranks that have kept a
    training state are never left out."""
    if not job.state.settings.spares:
        return list(slots)
    found, wanted = job.by_element(slots), job.wanted
    if len(found) <= wanted:
        return [slot for own in found.values() for slot in own]
    statuses = {element: [status for slot in own if (status := job.status(slot))] for element, own in found.items()}
    trained = {e: max(one.iteration + (one.phase == "stepped") for one in ranks) for e, ranks in statuses.items()}
    kept = {e for e, ranks in statuses.items() if any(one.state != "waiting" or one.shards for one in ranks)}
    rest = {element: own for element, own in found.items() if element not in kept or job.state.unit(job.replica) > 1}
    inside = kept & rest.keys()
    chosen = kept | pick(job, rest, wanted - len(kept), inside, lambda element: (-trained[element], element))
    return [slot for element, own in found.items() if element in chosen for slot in own]


def _returning(view: View, job: JobView, found: Collection[int]) -> list[int]:
    """Elements that were lost while their agents live on, and cannot enter yet: their processes start again."""
    state, returning = job.state, []
    gone = {slot // job.per_node: who.agent for slot, who in state.banished.items()}
    for element, name in sorted(gone.items()):
        agent = job.agents.get(element)
        if agent is None or not agent.alive or agent.agent != name or element in state.inside or element in found:
            continue
        allotted = state.allotted is None or element in state.allotted
        stays = element not in state.parted and not view.unfit(agent.node) and not state.moves(element)
        if allotted and stays and not state.torn(element):
            returning.append(element)
    return returning


def late(view: View, job: JobView, element: int) -> str:
    """Why a spare does not wait for the element's own processes; empty while it does."""
    agent = job.agents[element]
    if agent.start_seconds > OWN_SECONDS:
        return f"its process took {agent.start_seconds:.1f} s to start again the last time"
    waits = max((job.state.slot(slot).not_before for slot in agent.slots), default=0.0) - view.now
    if waits > 0:
        return f"its process starts again in {waits:.0f} s"
    return f"its process is not there again after {-waits:.1f} s" if -waits >= OWN_SECONDS else ""


# ---------------------------------------------------------------- in words
@dataclass(frozen=True)
class Swap:
    """A spare element takes a lost one's place."""

    element: int
    failure: Failure
    text: str


def swaps(view: View, job: JobView, joiners: Collection[int]) -> list[Swap]:
    """The failures after which the job is not whole yet, each with the element that takes the lost one's place.
    joiners: slots that come in."""
    state, inside = job.state, job.state.inside
    if not state.settings.spares:
        return []
    coming = [element for element in state.elements(joiners) if element not in inside]
    lost: dict[int, Failure] = {}
    for failure in state.failures:
        element = failure.record.element
        if failure.whole_at is None and failure.broken_at is not None and element >= 0 and element not in inside:
            lost[element] = failure
    free = [element for element in coming if element not in lost]
    found = []
    for failure in (failure for element, failure in lost.items() if element not in coming):
        places = _places(job, failure.record.element)
        free.sort(key=lambda element: (_places(job, element) != places, element))
        if free:
            element = free.pop(0)
            found.append(Swap(element, failure, _words(view, job, element, failure)))
    return found


def _places(job: JobView, element: int) -> set[int]:
    """The places of a replica that an element's ranks have: a spare takes those of the lost one, while others may only
    come back beside it."""
    return {slot % job.replica for slot in range(element * job.per_node, (element + 1) * job.per_node)}


def _words(view: View, job: JobView, element: int, failure: Failure) -> str:
    agent, own = job.agents[element], job.agents.get(failure.record.element)
    since = view.now - max(agent.came.get(slot, view.now) for slot in agent.slots)
    place = f"spare element {element} on {agent.node}, ready for {since:.0f} s, takes the place of element "
    why = late(view, job, failure.record.element) if own is not None and own.alive else "which is gone"
    return f"{place}{failure.record.element} on {failure.record.node}" + (f": {why}" if why else "")


def standing(job: JobView) -> dict[int, str]:
    """The spares, each "ready" or "starting": elements with living agents for which there is no room while the job
    trains."""
    state = job.state
    if not state.settings.spares or state.phase not in HERE:
        return {}
    taken = job.state.inside | frozenset(state.elements(state.joining))
    found = {e: _ready(job, e) for e, a in sorted(job.agents.items()) if a.alive and e not in taken}
    room = max(0, job.wanted - len(taken))
    mine = sorted(found, key=lambda element: (not found[element], element))[room:]
    return {element: "ready" if found[element] else "starting" for element in sorted(mine)}


def _ready(job: JobView, element: int) -> bool:
    agent = job.agents[element]
    ranks = [agent.ranks.get(slot) for slot in agent.slots]
    return all(rank is not None and rank.state in CAN_ENTER and rank.end is None for rank in ranks)


def misfit(job: JobView) -> str:
    """Why the number of spares does not fit, and the number instead; empty if it fits."""
    settings, unit = job.state.settings, job.state.unit(job.replica)
    asked, waiting = settings.spares, settings.max_nodes - job.wanted
    if not asked or asked == waiting:
        return ""
    spares = f"{asked} spare{'s were' if asked > 1 else ' was'} asked for"
    if unit > 1:
        return f"{spares}, and they come and go {unit} at a time: {job.wanted} of {settings.max_nodes} train"
    least = f"at least {settings.min_nodes} of {settings.max_nodes} elements have to train"
    return f"{spares}, but {least}: {waiting or 'none'} wait{'s' if waiting == 1 else ''}"


@dataclass
class LoggedSpares:
    """The spares as the log has them."""

    spares: tuple[tuple[int, str], ...] = ()
    misfit: str = ""
    check_at: float = 0.0
    """When to check them next."""

    @property
    def ready(self) -> list[int]:
        """Elements that wait, and could enter."""
        return [element for element, how in self.spares if how == "ready"]


def report_spares(view: View, job: JobView, last: LoggedSpares) -> Outcome:
    """Records the waiting spares when they change, and once that their number does not fit."""
    out, state = Outcome(), job.state
    if not state.settings.spares or state.phase not in HERE or view.now < last.check_at:
        return out
    last.check_at = view.now + STANDING_SECONDS
    spares, wrong = tuple(standing(job).items()), misfit(job)
    news = [wrong] if wrong != last.misfit and wrong else []
    if spares == last.spares and not news:
        return out
    last.spares, last.misfit = spares, wrong
    ready, starting = ([element for element, how in spares if (how == "ready") is want] for want in (True, False))
    words = [f"elements {some[:MOST_NAMED]} {how}" for some, how in ((ready, "are ready"), (starting, "start")) if some]
    news.append(f"spares: {', '.join(words)}" if words else "no spare is left")
    out.record(state, records.Spares(ready=ready, starting=starting, reason="; ".join(news)))
    return out


def note_swaps(job: JobState, found: Iterable[Swap], out: Outcome) -> None:
    """Adds the swaps to the stories of the failures."""
    for swap in found:
        if swap.text not in swap.failure.actions:
            out.record(job, records.FailureAction(failure=swap.failure.id, text=swap.text))
