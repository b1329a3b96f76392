"""The proposal that a proposer makes of its peers' promises: the plan that the controller would make. Pure."""

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

PROPOSERS = 4  # agents that may stand in for the controller; when all of them are dead the job waits for it


@dataclass(frozen=True)
class Membership:
    """The agents that decide what follows one generation: its plan, its agents by element, and those that may propose.

    Agents that are no proposers know only the proposers. per_node: ranks of an agent; its element is slot // per_node.
    """

    plan: wire.Plan
    peers: Mapping[int, structs.Peer]
    proposers: Sequence[structs.Peer]
    per_node: int

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
        """So many agents decide, however many are lost: any two quorums have an agent in common."""
        return len(self.elements) // 2 + 1


def elements_of(slots: Iterable[int], per_node: int) -> list[int]:
    """The elements that have these slots, ascending."""
    return sorted({slot // per_node for slot in slots})


def proposers_of(plan: wire.Plan, peer: Callable[[int], structs.Peer | None], per_node: int) -> list[structs.Peer]:
    """The agents that may propose what follows a plan: those of the lowest members that others can reach.

    peer: the agent of an element.
    """
    elements = dict.fromkeys(slot // per_node for slot in sorted(plan.members))
    reached = (found for element in elements if (found := peer(element)) is not None and found.address)
    return list(islice(reached, PROPOSERS))


def has_stopped(status: structs.RankStatus, broken: int) -> bool:
    """True if the rank does nothing more before a plan comes. broken: the generation whose Break it has to know."""
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
    """The proposal for generation `number`, with the whole plan; None when nobody can go on or no store is left.

    promises: what each agent reported, by element. late: slots that have not stopped; the plan leaves them out.
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
    lost = [slot for slot in membership.plan.members if slot not in reports and not _finished(ranks.get(slot))]
    who = f"agreed by {len(promises)} of {len(membership.elements)} agents while the controller was away"
    plan = wire.Plan(
        generation=number,
        members=decision.members,
        store=store,
        prefix=agents_prefix(membership.plan.prefix, number, ballot),
        step=decision.step,
        iteration=decision.iteration,
        assignment=decision.assignment,
        reason=f"{who}: {decision.reason}",
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
    """(reports of the ranks that can be used, how these go on)."""
    ends = [_iterations(status) for status in ranks.values() if status.state == "finished"]
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
    """The proposal as one agent gets it: the whole for present and coming proposers, else the micro-batches of the
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
    """True if the proposal says what everybody computes, so that it can be proposed again."""
    plan = shared_plans.whole(proposal.share)
    return all(slot in plan.assignment for slot in heads(plan.members, plan.replica))


def agents_prefix(former: str, generation: int, ballot: Ballot) -> str:
    """The store prefix of a plan that agents make: JOB.gGENERATION.ROUND.ELEMENT. former: that of the plan before.

    The controller's have no ballot: JOB.gGENERATION.
    """
    job = former.partition(".")[0]
    return f"{job}.g{generation}.{ballot[0]}.{ballot[1]}"


def is_agents_prefix(prefix: str) -> bool:
    """True if :func:`agents_prefix` made it."""
    return prefix.count(".") == 3


def _finished(status: structs.RankStatus | None) -> bool:
    return status is not None and status.state == "finished"


def _iterations(status: structs.RankStatus) -> int:
    return status.iteration + 1 if status.phase == "stepped" else status.train_iterations


def _lost_rank(membership: Membership, slot: int, promises: Mapping[int, Promise]) -> structs.LostRank:
    """The incarnation is -1 where the rank's agent did not answer."""
    element = slot // membership.per_node
    peer, promise = membership.peers.get(element), promises.get(element)
    status = promise.ranks.get(slot) if promise is not None else None
    return structs.LostRank(slot, peer.agent if peer else "", status.incarnation if status else -1)
