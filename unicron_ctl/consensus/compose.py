"""The plan that a leader makes of its peers' reports, as the controller would make it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from unicron.ctl.consensus import resume
from unicron.ctl.protocol import shared_plans, wire
from unicron.ctl.protocol.peer_messages import Ballot, Promise, Proposal
from unicron.transition.generations.layout import heads

LEADERS = 4  # agents that may stand in for the controller; when all of them are dead it is waited for


@dataclass(frozen=True)
class Company:
    """One generation: its plan, its agents by element, and the first of them, who lead. Others than leaders know the
    leaders only. per_node: ranks of an agent, whose element is slot // per_node."""

    plan: wire.Plan
    peers: Mapping[int, wire.Peer]
    leaders: Sequence[wire.Peer]
    per_node: int

    @cached_property
    def slots(self) -> frozenset[int]:
        """Its members."""
        return frozenset(self.plan.members)

    @cached_property
    def elements(self) -> list[int]:
        """Of all its agents, ascending."""
        return elements_of(self.plan.members, self.per_node)

    @cached_property
    def majority(self) -> int:
        """So many agents decide, however many are lost: two halves never both have them."""
        return len(self.elements) // 2 + 1


def elements_of(slots: Iterable[int], per_node: int) -> list[int]:
    """The elements that have these slots, ascending."""
    return sorted({slot // per_node for slot in slots})


def leading(plan: wire.Plan, peer: Callable[[int], wire.Peer | None], per_node: int) -> list[wire.Peer]:
    """Who leads in a plan's generation: the agents of the lowest members, of those that others can reach.

    peer: the agent of an element.
    """
    elements = dict.fromkeys(slot // per_node for slot in sorted(plan.members))
    reached = (found for element in elements if (found := peer(element)) is not None and found.address)
    return list(islice(reached, LEADERS))


def resting(status: wire.RankStatus, broken: int) -> bool:
    """Nothing more is to be expected of the rank before a plan. broken: the generation whose Break it has to know."""
    if status.end is not None or status.state == "stopped":
        return status.end is not None or status.broken >= broken
    return status.state not in ("running", "entering")


def compose(
    company: Company, promises: Mapping[int, Promise], number: int, ballot: Ballot, by: str, late: Collection[int] = ()
) -> tuple[Proposal, wire.Plan] | None:
    """The proposal for generation `number`, with the whole plan; None when nobody can go on or no store is left.

    promises: element -> what its agent reported, all ranks at rest but those in `late`, which are left out.
    """
    ranks = {
        slot: status
        for promise in promises.values()
        for slot, status in promise.ranks.items()
        if slot in company.slots and slot not in late
    }
    ends = [_end(status) for status in ranks.values() if status.state == "finished"]
    reports = {slot: status for slot, status in ranks.items() if status.state == "stopped" and status.end is None}
    former, size = company.plan.members, company.plan.replica
    decision = None
    while reports:
        total = max(status.micro_batches for status in reports.values())
        decision = resume.decide(reports, total, max(ends, default=None), size=size, former=former)
        if decision is None or not decision.unusable:
            break
        reports = {slot: status for slot, status in reports.items() if slot not in decision.unusable}
    if decision is None or not reports:
        return None
    going = elements_of(decision.members, company.per_node)
    store = next((promises[element].store for element in (*going, *sorted(promises)) if promises[element].store), "")
    if not store:
        return None
    lost = [slot for slot in company.plan.members if slot not in reports and not _finished(ranks.get(slot))]
    said = f"agreed by {len(promises)} of {len(company.elements)} agents while the controller was away"
    plan = wire.Plan(
        generation=number,
        members=decision.members,
        store=store,
        prefix=f"{company.plan.prefix.partition('.')[0]}.g{number}.{ballot[0]}.{ballot[1]}",
        step=decision.step,
        iteration=decision.iteration,
        assignment=decision.assignment,
        reason=f"{said}: {decision.reason}",
        replica=size,
        state=decision.state,
    )
    common = shared_plans.common(plan, leading(plan, company.peers.get, company.per_node))
    gone = [_lost(company, slot, promises) for slot in lost]
    share = shared_plans.share(plan, common, plan.members)
    return Proposal(since=company.plan.generation, ballot=ballot, share=share, lost=gone, by=by), plan


def part(proposal: Proposal, element: int, company: Company) -> Proposal:
    """The proposal as one agent gets it: all of it for those who lead or will, else the micro-batches of the replicas
    in which it has a rank."""
    ahead = {peer.element for peer in (*company.leaders, *shared_plans.leaders(proposal.share))}
    common, dealt = proposal.share.common, proposal.share.assignment
    if element in ahead:
        share = wire.PlanShare(common=common, assignment=dealt, peers=list(company.peers.values()))
    else:
        own = range(element * company.per_node, (element + 1) * company.per_node)
        mine = shared_plans.heads(proposal.share, own)
        share = wire.PlanShare(common=common, assignment={slot: dealt[slot] for slot in mine if slot in dealt})
    return Proposal(since=proposal.since, ballot=proposal.ballot, share=share, lost=proposal.lost, by=proposal.by)


def whole(proposal: Proposal) -> bool:
    """It says what everybody computes, so it can be proposed again."""
    plan = shared_plans.whole(proposal.share)
    return all(slot in plan.assignment for slot in heads(plan.members, plan.replica))


def by_agents(prefix: str) -> bool:
    """It is that of a plan made here: the job's id, the generation, and the ballot."""
    return prefix.count(".") == 3


def _finished(status: wire.RankStatus | None) -> bool:
    return status is not None and status.state == "finished"


def _end(status: wire.RankStatus) -> int:
    return status.iteration + 1 if status.phase == "stepped" else status.train_iterations


def _lost(company: Company, slot: int, promises: Mapping[int, Promise]) -> wire.LostRank:
    """The incarnation is -1 where the rank's agent did not answer."""
    element = slot // company.per_node
    peer, promise = company.peers.get(element), promises.get(element)
    status = promise.ranks.get(slot) if promise is not None else None
    return wire.LostRank(slot, peer.agent if peer else "", status.incarnation if status else -1)
