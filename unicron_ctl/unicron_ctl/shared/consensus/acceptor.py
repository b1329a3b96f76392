"""Plays the acceptor of single-decree Paxos: one agent's vote on the plan that follows one generation. Pure.

IDLE -> CHECKING -> PROMISED    a proposer prepares a ballot, and the controller does not answer
CHECKING, PROMISED -> IDLE      the controller speaks: the promise is withdrawn

Invariant: `promised` and `prepared` only rise, and a proposal is accepted only in PROMISED and only for the ballot
`promised`. So an agent that has promised a ballot accepts no lower one, even if its messages come late, and a ballot
that a quorum has promised shows its proposer everything that a lower one may have chosen. `accepted` stays in every
state, even if the promise is withdrawn: a quorum may have accepted it, and each later promise reports it.
"""

from __future__ import annotations

import enum

from unicron_ctl.shared.protocol.peer_messages import NO_BALLOT, Ballot, Proposal


class AcceptorState(enum.StrEnum):
    """A state of the acceptor."""

    IDLE = "idle"
    CHECKING = "checking"  # before a promise, whether the controller lives
    PROMISED = "promised"  # to the proposer of `promised`


class AcceptorEvent(enum.StrEnum):
    """An event of the acceptor."""

    PREPARE = "prepare"  # for a ballot above all known ones
    PREPARE_AGAIN = "prepare again"  # for the promised ballot
    STALE = "stale"  # a message for a lower ballot, or an Accept for a ballot that was not promised
    ACCEPT = "accept"  # for the promised ballot
    CONTROLLER_SILENT = "controller silent"
    CONTROLLER_SPOKE = "controller spoke"


class AcceptorAction(enum.StrEnum):
    """The acceptor's answer to an event."""

    IGNORE = "ignore"
    ASK_CONTROLLER = "ask controller"
    PROMISE = "promise"
    ACCEPTED = "accepted"
    NACK = "nack"
    DECLINE = "decline"  # tells the proposer that the controller lives


_S, _E, _A = AcceptorState, AcceptorEvent, AcceptorAction
TABLE: dict[AcceptorState, dict[AcceptorEvent, tuple[AcceptorState, AcceptorAction]]] = {
    _S.IDLE: {
        _E.PREPARE: (_S.CHECKING, _A.ASK_CONTROLLER),
        _E.PREPARE_AGAIN: (_S.IDLE, _A.DECLINE),  # the controller has spoken since that promise
        _E.STALE: (_S.IDLE, _A.NACK),
        _E.ACCEPT: (_S.IDLE, _A.DECLINE),
        _E.CONTROLLER_SILENT: (_S.IDLE, _A.IGNORE),
        _E.CONTROLLER_SPOKE: (_S.IDLE, _A.IGNORE),
    },
    _S.CHECKING: {
        _E.PREPARE: (_S.CHECKING, _A.ASK_CONTROLLER),
        _E.PREPARE_AGAIN: (_S.CHECKING, _A.NACK),
        _E.STALE: (_S.CHECKING, _A.NACK),
        _E.ACCEPT: (_S.CHECKING, _A.NACK),
        _E.CONTROLLER_SILENT: (_S.PROMISED, _A.PROMISE),
        _E.CONTROLLER_SPOKE: (_S.IDLE, _A.DECLINE),
    },
    _S.PROMISED: {
        _E.PREPARE: (_S.CHECKING, _A.ASK_CONTROLLER),
        _E.PREPARE_AGAIN: (_S.PROMISED, _A.PROMISE),
        _E.STALE: (_S.PROMISED, _A.NACK),
        _E.ACCEPT: (_S.PROMISED, _A.ACCEPTED),
        _E.CONTROLLER_SILENT: (_S.PROMISED, _A.IGNORE),
        _E.CONTROLLER_SPOKE: (_S.IDLE, _A.DECLINE),
    },
}


class Acceptor:
    """An agent's promises and accepted proposals, for one generation."""

    def __init__(self) -> None:
        self.state = AcceptorState.IDLE
        self.promised = NO_BALLOT  # the highest ballot that was promised
        self.prepared = NO_BALLOT  # the highest for which a promise was requested
        self.accepted: Proposal | None = None
        """The latest accepted proposal; the agent follows no other plan of the same or a lower number."""

    def on_prepare(self, ballot: Ballot) -> AcceptorAction:
        """Handle a request for a promise."""
        if ballot > self.highest:
            self.prepared = ballot
            return self._step(AcceptorEvent.PREPARE)
        if self.state is AcceptorState.CHECKING and ballot == self.prepared:
            return AcceptorAction.ASK_CONTROLLER
        return self._step(AcceptorEvent.PREPARE_AGAIN if ballot == self.promised else AcceptorEvent.STALE)

    def on_accept(self, proposal: Proposal) -> AcceptorAction:
        """Handle a request to accept a proposal."""
        action = self._step(AcceptorEvent.ACCEPT if proposal.ballot == self.promised else AcceptorEvent.STALE)
        if action is AcceptorAction.ACCEPTED:
            self.accepted = proposal
        return action

    def on_controller_silent(self) -> AcceptorAction:
        """Give the promise that is being checked, because the controller is away."""
        action = self._step(AcceptorEvent.CONTROLLER_SILENT)
        if action is AcceptorAction.PROMISE:
            self.promised = self.prepared
        return action

    def on_controller_spoke(self) -> AcceptorAction:
        """Withdraw the promise, because the controller lives. DECLINE: tell the proposer of :attr:`highest`."""
        return self._step(AcceptorEvent.CONTROLLER_SPOKE)

    @property
    def highest(self) -> Ballot:
        """The highest ballot that this acceptor knows."""
        return max(self.promised, self.prepared)

    def _step(self, event: AcceptorEvent) -> AcceptorAction:
        self.state, action = TABLE[self.state][event]
        return action
