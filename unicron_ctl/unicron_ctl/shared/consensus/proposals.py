"""Makes a proposal from the peers' promises: the plan that the controller would make. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import msgspec

from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.protocol.peer_messages import Ballot, Promise, Proposal
from unicron_transition.generations.layout import heads

PROPOSERS = 4  # agents that may stand in for the controller; if all of them are dead, the job waits for it


@dataclass(frozen=True)
class Membership:
    """The agents that decide what follows one generation."""

    plan: wire.Plan  # the generation's
    peers: Mapping[int, structs.Peer]
    """Its agents by element; an agent that is no proposer knows only the proposers."""
    proposers: Sequence[structs.Peer]
    per_node: int  # ranks of an agent, whose element is slot // per_node

    @cached_property
    def slots(self) -> frozenset[int]:
        """The members."""
        return frozenset(self.plan.members)

    @cached_property
    def elements(self) -> list[int]:
        """The elements of all its agents, ascending."""
        return elements_of(self.plan.members, self.per_node)

    @cached_property
    def quorum(self) -> int:
        """The number of agents that decides, however many are lost: any two quorums have an agent in common."""
        return len(self.elements) // 2 + 1


def elements_of(slots: Iterable[int], per_node: int) -> list[int]:
    """Return the elements that have these slots, ascending."""
    return sorted({slot // per_node for slot in slots})


def proposers_of(plan: wire.Plan, peer: Callable[[int], structs.Peer | None], per_node: int) -> list[structs.Peer]:
    """Return the agents that may propose what follows a plan: those of the lowest members that others can reach. peer:
    returns an element's agent."""
    elements = elements_of(plan.members, per_node)
    reached = (found for element in elements if (found := peer(element)) is not None and found.address)
    return list(islice(reached, PROPOSERS))


def has_stopped(status: structs.RankStatus, broken: int) -> bool:
    """Whether the rank does nothing more before it gets a plan. broken: the generation whose Break it has to know."""
    if status.end is not None or status.state == "stopped":
        return status.end is not None or status.broken >= broken
    return status.state not in ("running", "entering")


def make_proposal(
    membership: Membership,
    promises: Mapping[int, Promise],
    number: int,
    ballot: Ballot,
    by: str,
    late: Collection[int] = (),
) -> tuple[Proposal, wire.Plan] | None:
    """Make the proposal for generation `number`, with the whole plan; None if no rank can go on or no store is left.

    promises: each agent's report, by element. late: slots that have not stopped; the plan leaves them out.
    """
    ranks = {
        slot: status
        for promise in promises.values()
        for slot, status in promise.ranks.items()
        if slot in membership.slots and slot not in late
    }
    reports, decision = _decide(membership, ranks)
    if decision is None or not reports:
        return None
    going = elements_of(decision.members, membership.per_node)
    store = next((promises[element].store for element in (*going, *sorted(promises)) if promises[element].store), "")
    if not store:
        return None
    finished = {slot for slot, status in ranks.items() if status.state == "finished"}
    lost = [slot for slot in membership.plan.members if slot not in reports and slot not in finished]
    agreed = f"agreed by {len(promises)} of {len(membership.elements)} agents while the controller was away"
    plan = wire.Plan(
        generation=number,
        members=decision.members,
        store=store,
        prefix=agents_prefix(membership.plan.prefix, number, ballot),
        step=decision.step,
        iteration=decision.iteration,
        assignment=decision.assignment,
        reason=f"{agreed}: {decision.reason}",
        replica=membership.plan.replica,
        state=decision.state,
    )
    common = shared_plans.common(plan, proposers_of(plan, membership.peers.get, membership.per_node))
    gone = [_lost_rank(membership, slot, promises) for slot in lost]
    share = shared_plans.share(plan, common, plan.members)
    return Proposal(since=membership.plan.generation, ballot=ballot, share=share, lost=gone, by=by), plan


def _decide(
    membership: Membership, ranks: Mapping[int, structs.RankStatus]
) -> tuple[dict[int, structs.RankStatus], survivors_plan.Decision | None]:
    """Return the usable ranks' reports, and how these ranks go on."""
    ends = [
        status.iteration + 1 if status.phase == "stepped" else status.train_iterations
        for status in ranks.values()
        if status.state == "finished"
    ]
    reports = {slot: status for slot, status in ranks.items() if status.state == "stopped" and status.end is None}
    plan, decision = membership.plan, None
    while reports:
        total = max(status.micro_batches for status in reports.values())
        decision = survivors_plan.decide(
            reports, total, max(ends, default=None), size=plan.replica, former=plan.members
        )
        if decision is None or not decision.unusable:
            break
        reports = {slot: status for slot, status in reports.items() if slot not in decision.unusable}
    return reports, decision


def proposal_for(proposal: Proposal, element: int, membership: Membership) -> Proposal:
    """Return one agent's part of a proposal: all of it for present and coming proposers, else the micro-batches of the
    replicas in which the agent has a rank."""
    proposers = {peer.element for peer in (*membership.proposers, *shared_plans.proposers(proposal.share))}
    common, assignment = proposal.share.common, proposal.share.assignment
    if element in proposers:
        share = wire.PlanShare(common=common, assignment=assignment, peers=list(membership.peers.values()))
    else:
        own = range(element * membership.per_node, (element + 1) * membership.per_node)
        mine = shared_plans.heads(proposal.share, own)
        share = wire.PlanShare(
            common=common, assignment={slot: assignment[slot] for slot in mine if slot in assignment}
        )
    return msgspec.structs.replace(proposal, share=share)


def is_whole(proposal: Proposal) -> bool:
    """Whether the proposal has all micro-batches, so that it can be proposed again."""
    plan = shared_plans.whole(proposal.share)
    return all(slot in plan.assignment for slot in heads(plan.members, plan.replica))


def agents_prefix(former: str, generation: int, ballot: Ballot) -> str:
    """Return the store prefix of a plan that agents make: JOB.gGENERATION.ROUND.ELEMENT; the controller's have no
    ballot: JOB.gGENERATION. former: the prefix of the plan before."""
    return f"{former.partition('.')[0]}.g{generation}.{ballot[0]}.{ballot[1]}"


def is_agents_prefix(prefix: str) -> bool:
    """Whether :func:`agents_prefix` made it."""
    return prefix.count(".") == 3


def _lost_rank(membership: Membership, slot: int, promises: Mapping[int, Promise]) -> structs.LostRank:
    """Name a lost rank; its incarnation is -1 if its agent did not answer."""
    element = slot // membership.per_node
    peer, promise = membership.peers.get(element), promises.get(element)
    status = promise.ranks.get(slot) if promise is not None else None
    return structs.LostRank(slot, peer.agent if peer else "", status.incarnation if status else -1)
