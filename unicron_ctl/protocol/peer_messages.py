"""Messages between the agents of a job, who stand in for a controller that is away (docs/design/agreement.md).

It is single-decree Paxos for each generation: a leader asks all (Prepare), goes on with a majority's Promise, and what
a majority has accepted is the plan. Everything may be lost, doubled or late.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from unicron.ctl.protocol import ranges
from unicron.ctl.protocol.wire import MAX_BYTES, VERSION, BadMessage, LostRank, Message, PlanShare, RankStatus

# A number, and the element of the leader whose it is: no two leaders have the same.
Ballot = tuple[ranges.Count, Annotated[int, Meta(ge=-1, lt=ranges.MOST_ELEMENTS)]]
NO_BALLOT: Ballot = (0, -1)


class Proposal(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A plan that is to follow generation `since`. No two proposals have the same prefix in `share`.

    share: as from the controller; for leaders with everybody's micro-batches. by: the agent that made it.
    """

    since: ranges.Count
    ballot: Ballot
    share: PlanShare
    lost: Annotated[list[LostRank], Meta(max_length=ranges.MOST_SLOTS)]
    by: ranges.NoName


class PeerMessage(Message):
    """generation: the one that broke. element: the sender's."""

    generation: ranges.Count
    element: ranges.Element


class Trouble(PeerMessage, tag="trouble"):
    """To a leader: a rank of mine needs the controller, which does not answer."""


class Prepare(PeerMessage, tag="prepare"):
    """From a leader: promise to follow no lower ballot, unless you hear the controller."""

    ballot: Ballot


class Promise(PeerMessage, tag="promise"):
    """To the leader, at once and again whenever one of the agent's ranks changes.

    hears: there is no promise, the controller has spoken. seen: the highest generation that the agent knows of.
    """

    ballot: Ballot
    hears: bool = False
    seen: ranges.Count = 0
    store: ranges.NoName = ""
    ranks: Annotated[dict[ranges.Slot, RankStatus], Meta(max_length=ranges.MOST_RANKS)] = {}
    accepted: Proposal | None = None


class Halt(PeerMessage, tag="halt"):
    """From a leader that a majority has promised: a Break."""

    ballot: Ballot
    broken: ranges.Count
    reason: ranges.Reason
    lost: ranges.Slots = []


class Propose(PeerMessage, tag="propose"):
    """From a leader: accept this."""

    ballot: Ballot
    proposal: Proposal


class Accept(PeerMessage, tag="accept"):
    """To the leader: the proposal of this ballot is accepted, or followed."""

    ballot: Ballot


class Outvoted(PeerMessage, tag="outvoted"):
    """To a leader: another ballot, this one, is ahead of yours."""

    ballot: Ballot


class Chosen(PeerMessage, tag="chosen"):
    """A majority has accepted it: follow it."""

    proposal: Proposal


AnyPeer = Trouble | Prepare | Promise | Halt | Propose | Accept | Outvoted | Chosen
_decoder = msgspec.msgpack.Decoder(AnyPeer)


def decode(data: bytes) -> AnyPeer:
    """The message in `data`. Raises :class:`BadMessage` with the reason."""
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        message: AnyPeer = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from None
    if message.v != VERSION:
        raise BadMessage(f"protocol version {message.v}, this side speaks {VERSION}")
    return message
