"""Network partitions: nodes that reach this controller but not each other, so that their collectives never end.

When a job hangs, or does not get into a generation, its agents are asked whether they reach each other (a survey). If
two rounds find the same cut, the fewest nodes are left out without which all others reach each other. No node is
blamed, and nodes that were left out return once they are reached.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from operator import neg

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import Survey
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Reach

SURVEY_SECONDS = 1.5  # to wait for answers
ENTER_SECONDS = 2.5  # of entering, before members are asked whether they reach each other
PARTED_SECONDS = 5.0  # between two checks whether nodes that were left out are reached again
MOST_ASKED = 60  # others that one agent is asked about at once; it tries 64 addresses, two of a silent node among them
NEXT_TO_IT = 16  # others on each side that a collective's ring or tree is likely to need
MOST_NAMED = 8  # elements about which all others are asked


def start_survey(view: View, job: JobView, survey: Survey, slots: Iterable[int] = ()) -> Outcome:
    """Ask all agents of the job whether they reach each other, unless a survey runs or was tried just now.

    slots: those that others wait for; in a large job all agents are asked about them first.
    """
    out = Outcome()
    if survey.last_attempt != view.now and (not survey.open or survey.left_out_answers is not None):
        survey.last_attempt, survey.last_unreachable, survey.left_out_answers = view.now, None, None
        _ask_agents(view, job, survey, _round(job, survey, job.state.elements(slots)), out)
        survey.rounds_done += 1
    return out


def check_partitions(view: View, job: JobView, survey: Survey) -> Outcome:
    """Evaluate the answers, ask again to confirm a cut, and start surveys that are due."""
    out, state = Outcome(), job.state
    if survey.open:
        if not survey.asked or view.now - survey.begun > SURVEY_SECONDS:
            survey.number = 0
            _conclude(view, job, survey, out)
    elif state.phase is Phase.ENTERING and job.awaited and job.seconds_in_phase(view.now) > ENTER_SECONDS:
        if survey.generation != state.generation:
            survey.generation, survey.rounds_left = state.generation, _rounds(job)
        if survey.rounds_left and view.now - survey.begun > SURVEY_SECONDS:
            survey.rounds_left -= 1
            out.merge([start_survey(view, job, survey, job.awaited)])
    elif state.parted and view.now >= survey.retry_at:
        survey.retry_at, survey.last_unreachable, survey.left_out_answers = view.now + PARTED_SECONDS, None, set()
        _ask_about_parted(view, job, survey, out)
    return out


def _ask_about_parted(view: View, job: JobView, survey: Survey, out: Outcome) -> None:
    parted = job.state.parted
    inside = job.state.elements(job.state.members) or sorted(job.agents)
    there = [e for e in inside if e not in parted and _alive(job, e)]
    if len(there) > MOST_ASKED:  # too many to ask the parted about, so they are asked about the parted
        _ask_agents(view, job, survey, dict.fromkeys(there, sorted(parted)[:MOST_ASKED]), out)
    elif there:
        _ask_agents(view, job, survey, dict.fromkeys(parted, there), out)
    else:
        _rejoin(job, parted, "there is nobody else", out)


def _conclude(view: View, job: JobView, survey: Survey, out: Outcome) -> None:
    if survey.left_out_answers is not None:
        if survey.left_out_answers & job.state.parted.keys():  # the parted were asked
            reached = survey.left_out_answers - {witness for witness, _ in survey.unreachable}
        else:
            about = {other for other in sorted(job.state.parted)[:MOST_ASKED] if _alive(job, other)}
            complete = survey.left_out_answers and not survey.asked
            reached = about - {other for _, other in survey.unreachable} if complete else set()
        _rejoin(job, reached, "the others are reached again", out)
        survey.left_out_answers = None
    elif survey.last_unreachable is not None:
        _leave_out(view, job, survey.unreachable & survey.last_unreachable, out)
    elif survey.unreachable:
        survey.last_unreachable = survey.unreachable
        pairs: dict[int, list[int]] = {}
        for witness, other in sorted(survey.unreachable):
            pairs.setdefault(witness, []).append(other)
        _ask_agents(view, job, survey, pairs, out)


def _round(job: JobView, survey: Survey, named: list[int]) -> dict[int, list[int]]:
    """Return the questions of a round: all agents are asked about all others. In a large job they are asked about the
    named ones, if these are few, and in each round about others further away, until all pairs have been covered."""
    elements = job.state.elements({**job.state.members, **job.state.joining})
    count = len(elements)
    if count <= MOST_ASKED + 1:
        return {element: elements[place + 1 :] + elements[:place] for place, element in enumerate(elements)}
    named = named if len(named) <= MOST_NAMED else []
    ways, most = _ways(count), MOST_ASKED - MOST_NAMED
    first = survey.rounds_done % _rounds(job) * most
    steps = ways[first : first + most]
    found = {}
    for place, element in enumerate(elements):
        others = [*named, *(elements[(place + step) % count] for step in steps)]
        found[element] = [other for other in dict.fromkeys(others) if other != element]
    return found


def _ways(count: int) -> list[int]:
    """Return the distances at which others are asked about, each pair once. The next ones and powers of two come first,
    since rings and trees use them."""
    ways = range(1, count // 2 + 1)
    first = [*range(1, NEXT_TO_IT + 1), *(1 << bit for bit in range(count.bit_length()))]
    return list(dict.fromkeys([*(step for step in first if step in ways), *ways]))


def _rounds(job: JobView) -> int:
    """Return the number of rounds that cover all pairs; one unless the job is large."""
    count = len(job.state.elements({**job.state.members, **job.state.joining}))
    return -(-(count // 2) // (MOST_ASKED - MOST_NAMED))


def _ask_agents(view: View, job: JobView, survey: Survey, wanted: Mapping[int, list[int]], out: Outcome) -> None:
    asked = {}
    for element, others in wanted.items():
        agent = job.agents.get(element)
        reachable = [other for other in others if other in job.agents and job.agents[other].door]
        if agent is not None and agent.alive and reachable:
            asked[element] = reachable
    if not asked:
        return
    survey.begin_round(view.now, asked)
    for element, others in asked.items():
        targets = [job.agents[other].door for other in others]
        out.send(job.agents[element], wire.Reach(number=survey.number, targets=targets))


def on_reached(survey: Survey, agent: AgentView, message: wire.ReachAnswer) -> None:
    """Take in one agent's answer. Only silence is a cut: a refusal shows that the node is reached."""
    others = survey.asked.get(agent.element) if message.number == survey.number and survey.open else None
    if others is None or len(message.words) != len(others):
        return
    del survey.asked[agent.element]
    silent = [other for other, word in zip(others, message.words, strict=True) if word == Reach.SILENT]
    survey.unreachable.update((agent.element, other) for other in silent)
    if survey.left_out_answers is not None:
        survey.left_out_answers.add(agent.element)


def _leave_out(view: View, job: JobView, cut: set[tuple[int, int]], out: Outcome) -> None:
    """Report the elements without which all others reach each other. Those that are silent to this controller, too, are
    left to their leases."""
    state = job.state
    inside = set(state.inside)
    pairs = {(a, b) for a, b in cut if a in inside and b in inside}
    silent = {element for name, element in view.suspicions.open if name == state.job}
    for element in sorted(fewest_to_leave_out(pairs) - silent):
        others = sorted({b for a, b in pairs if a == element} | {a for a, b in pairs if b == element})
        names = ", ".join(state.agents[other].node for other in others[:8])
        node = state.agents[element].node
        reason = f"{node} and {names} do not reach each other, though both reach this controller; {node} is left out"
        slots = tuple(slot for slot in sorted(state.members) if state.element(slot) == element)
        where = slots, view.now, Source.PEER, reason, element, node
        out.findings.append(Finding(What.PARTED, state.job, *where, by="witnesses"))


def fewest_to_leave_out(pairs: set[tuple[int, int]]) -> set[int]:
    """Return nearly the fewest elements without which no pair is left: first those in most pairs, then the last.

    If a cut separates two halves, they are the smaller half.
    """
    neighbours: dict[int, set[int]] = {}
    for a, b in pairs:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    found: set[int] = set()
    heap = [(-len(others), -element) for element, others in neighbours.items()]
    heapq.heapify(heap)
    while heap:
        count, worst = map(neg, heapq.heappop(heap))
        if not count or worst in found or len(neighbours[worst]) != count:
            continue  # outdated: with fewer pairs it is in the heap again
        found.add(worst)
        for other in neighbours[worst]:
            neighbours[other].discard(worst)
            heapq.heappush(heap, (-len(neighbours[other]), -other))
    return found


def _alive(job: JobView, element: int) -> bool:
    return element in job.agents and job.agents[element].alive


def _rejoin(job: JobView, elements: Iterable[int], why: str, out: Outcome) -> None:
    for element in sorted(elements):
        reason = f"{job.state.agents[element].node} is a candidate again: {why}"
        out.record(job.state, records.ElementReconnected(element=element, reason=reason))
