"""Defines the messages by which a job's agents agree on a plan while the controller is away: single-decree Paxos for
each generation (docs/design/consensus.md).

A proposer sends Prepare to all, goes on with a quorum's Promise, and the proposal that a quorum has accepted is the
plan. Every message may be lost, doubled or late.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from unicron_ctl.shared.protocol import ranges, wire
from unicron_ctl.shared.protocol.structs import LostRank, RankStatus
from unicron_ctl.shared.protocol.wire import Message, PlanShare

# A number, and the proposer's element, so that no two proposers have the same ballot.
Ballot = tuple[ranges.Count, Annotated[int, Meta(ge=-1, lt=ranges.MOST_ELEMENTS)]]
NO_BALLOT: Ballot = (0, -1)


class Proposal(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A plan to follow generation `since`. No two proposals have the same prefix in `share`."""

    since: ranges.Count
    ballot: Ballot
    share: PlanShare  # as from the controller; for proposers with all micro-batches
    lost: Annotated[list[LostRank], Meta(max_length=ranges.MOST_SLOTS)]
    by: ranges.NoName  # the agent that made it


class PeerMessage(Message):
    """A message between two agents of a job."""

    generation: ranges.Count  # the one that broke
    element: ranges.Element  # the sender's


class PlanRequest(PeerMessage, tag="plan_request"):
    """To a proposer: a rank of this agent needs a plan, and the controller does not answer."""


class Prepare(PeerMessage, tag="prepare"):
    """From a proposer: promise to accept no lower ballot, unless you hear the controller."""

    ballot: Ballot


class Promise(PeerMessage, tag="promise"):
    """To the proposer, at once and after each change of the agent's ranks."""

    ballot: Ballot
    controller_alive: bool = False  # there is no promise, because the controller lives
    seen: ranges.Count = 0  # the highest generation that the agent knows
    store: ranges.NoName = ""
    ranks: Annotated[dict[ranges.Slot, RankStatus], Meta(max_length=ranges.MOST_RANKS)] = {}
    accepted: Proposal | None = None  # the latest proposal that it has accepted


class Halt(PeerMessage, tag="halt"):
    """From a proposer that has a quorum's promise: a Break for the ranks."""

    ballot: Ballot
    broken: ranges.Count
    reason: ranges.Reason
    lost: ranges.Slots = []


class Accept(PeerMessage, tag="accept"):
    """From a proposer: accept this proposal."""

    ballot: Ballot
    proposal: Proposal


class Acceptance(PeerMessage, tag="accepted"):
    """To the proposer: the proposal of this ballot is accepted, or learned."""

    ballot: Ballot


class Nack(PeerMessage, tag="nack"):
    """To a proposer: this agent knows a higher ballot than yours."""

    ballot: Ballot


class Learn(PeerMessage, tag="learn"):
    """To the learners: a quorum has accepted this proposal, follow it."""

    proposal: Proposal


AnyPeer = PlanRequest | Prepare | Promise | Halt | Accept | Acceptance | Nack | Learn


def decode(data: bytes) -> AnyPeer:
    """Decode a message. Raises :class:`wire.BadMessage` with the reason."""
    message: AnyPeer = wire.decode(data, AnyPeer)
    return message
