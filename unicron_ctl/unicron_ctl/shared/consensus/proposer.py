"""Plays the proposer of single-decree Paxos: an agent that stands in for the controller for one generation. Pure.

IDLE -> PREPARING -> HALTING -> ACCEPTING -> TEACHING   a ballot that wins
PREPARING -> ACCEPTING                                  an earlier ballot may have won: its plan is proposed again
"""

from __future__ import annotations

import enum

import msgspec

from unicron_ctl.shared.consensus.proposals import (
    Membership,
    elements_of,
    has_stopped,
    is_whole,
    make_proposal,
    proposal_for,
)
from unicron_ctl.shared.protocol import shared_plans, structs
from unicron_ctl.shared.protocol.peer_messages import (
    NO_BALLOT,
    Accept,
    Acceptance,
    AnyPeer,
    Ballot,
    Halt,
    Learn,
    Prepare,
    Promise,
    Proposal,
)

GATHER_SECONDS = 0.3  # for the other agents to promise, once a quorum has
RESEND_SECONDS = 0.3  # between two messages to an agent that has not answered
REST_SECONDS, REST_ITERATIONS = 10.0, 3.0  # for a rank to stop: the larger of the two
BALLOT_SECONDS = 15.0  # without progress; then a ballot is given up
PAUSE_SECONDS = 2.0  # after a ballot that was given up
TEACH_SECONDS = 10.0  # for which a chosen plan is sent to agents that do not answer
IN_GENERATION = ("running", "entering", "stopped", "finished")  # states of a rank that is not lost


class ProposerState(enum.StrEnum):
    """A state of the proposer."""

    IDLE = "idle"
    PREPARING = "preparing"
    HALTING = "halting"
    ACCEPTING = "accepting"
    TEACHING = "teaching"


class ProposerEvent(enum.StrEnum):
    """An event of the proposer."""

    REQUESTED = "requested"  # ranks need a plan, and the controller does not answer
    FREE = "free"  # a quorum has promised, and none of it has accepted a proposal
    BOUND = "bound"  # a quorum has promised, and an agent of it has accepted a proposal
    HALTED = "halted"  # all ranks have stopped
    CHOSEN = "chosen"  # a quorum has accepted
    GIVEN_UP = "given up"  # an agent hears the controller, another ballot is higher, or this one makes no progress
    LEARNED = "learned"  # all agents have learned the plan, or their time is over


_S, _E = ProposerState, ProposerEvent
TABLE: dict[ProposerState, dict[ProposerEvent, ProposerState]] = {
    _S.IDLE: {_E.REQUESTED: _S.PREPARING},
    _S.PREPARING: {_E.FREE: _S.HALTING, _E.BOUND: _S.ACCEPTING, _E.GIVEN_UP: _S.IDLE},
    _S.HALTING: {_E.HALTED: _S.ACCEPTING, _E.GIVEN_UP: _S.IDLE},
    _S.ACCEPTING: {_E.CHOSEN: _S.TEACHING, _E.GIVEN_UP: _S.IDLE},
    _S.TEACHING: {_E.LEARNED: _S.IDLE},
}
"""Events that are not listed change nothing."""


class Proposer:
    """An agent's attempts to have a plan chosen, for one generation. The caller delivers and empties :attr:`outbox`."""

    def __init__(self, me: structs.Peer, membership: Membership) -> None:
        self._me, self._membership = me, membership
        self.state = ProposerState.IDLE
        self.outbox: list[tuple[int, AnyPeer]] = []  # element and message
        self.chosen: Proposal | None = None
        self._ballot: Ballot = NO_BALLOT
        self._highest = 0  # the highest ballot number that any agent has named
        self._promises: dict[int, Promise] = {}
        self._running: dict[int, float] = {}  # slot that has not stopped -> seconds to wait for it
        self._accepted: set[int] = set()  # elements that have accepted, then those that have learned
        self._proposal: Proposal | None = None
        self._broken = 0  # the generation that is halted
        self._lost: set[int] = set()  # members that are known to be lost
        self._reported = 0  # how many of them the others have heard of
        self._closed = False  # agents that have not answered by now are lost
        self._since = self._sent_at = self._quorum_at = 0.0
        self._not_before = float("-inf")

    # ------------------------------------------------------------ messages
    def on_request(self, now: float) -> None:
        """Begin a ballot for an agent that needs a plan and gets no answer from the controller."""
        if now >= self._not_before and self.chosen is None:
            self._step(ProposerEvent.REQUESTED, now)

    def on_promise(self, message: Promise, now: float) -> None:
        """Take in an agent's promise, or its refusal because it hears the controller."""
        if message.ballot != self._ballot or self.state in (ProposerState.IDLE, ProposerState.TEACHING):
            return
        if message.controller_alive:
            self._give_up(now)
            return
        new = message.element not in self._promises
        self._promises[message.element] = message
        if self.state is ProposerState.HALTING:
            if message.seen > self._broken:
                self._halt_all()
            else:
                self._note_ranks(message)
                if new:
                    self.outbox.append((message.element, self._halt()))
        self.tick(now)

    def on_accepted(self, message: Acceptance, now: float) -> None:
        """Note that an agent has accepted the proposal, or has learned that it was chosen."""
        if message.ballot == self._ballot and self.state in (ProposerState.ACCEPTING, ProposerState.TEACHING):
            self._accepted.add(message.element)
            self.tick(now)

    def on_nack(self, ballot: Ballot, now: float) -> None:
        """Take in a ballot that another agent knows and that may be higher."""
        self._highest = max(self._highest, ballot[0])
        if ballot > self._ballot:
            self._give_up(now)

    # ------------------------------------------------------------ time
    def tick(self, now: float) -> None:
        """Take the next step if it is due, and repeat messages that were not answered."""
        match self.state:
            case ProposerState.PREPARING:
                self._check_promises(now)
            case ProposerState.HALTING:
                self._check_halted(now)
            case ProposerState.ACCEPTING:
                if len(self._accepted) >= self._membership.quorum:
                    self.chosen = self._proposal
                    self._step(ProposerEvent.CHOSEN, now)
            case ProposerState.TEACHING:
                if len(self._accepted) == len(self._membership.elements) or now - self._since >= TEACH_SECONDS:
                    self._step(ProposerEvent.LEARNED, now)
        in_ballot = self.state in (ProposerState.PREPARING, ProposerState.ACCEPTING)
        if in_ballot and now - self._since >= BALLOT_SECONDS:
            self._give_up(now)
        if self.state is not ProposerState.IDLE and now - self._sent_at >= RESEND_SECONDS:
            self._send_all(now)

    def _check_promises(self, now: float) -> None:
        if len(self._promises) < self._membership.quorum:
            return
        self._quorum_at = now
        bound = self._latest_accepted()
        if bound is None:
            self._step(ProposerEvent.FREE, now)
        elif is_whole(bound):
            self._propose(bound, now, ProposerEvent.BOUND)
        else:
            self._give_up(now)  # only the controller, or a proposer that is away, has all of it

    def _latest_accepted(self) -> Proposal | None:
        """Return the accepted proposal of the highest ballot among the promises; a whole one if there is one."""
        proposals = [promise.accepted for promise in self._promises.values() if promise.accepted is not None]
        return max(proposals, key=lambda proposal: (proposal.ballot, is_whole(proposal)), default=None)

    def _check_halted(self, now: float) -> None:
        waited = now - self._quorum_at
        gathering = len(self._promises) < len(self._membership.elements) and waited < GATHER_SECONDS
        self._report_lost(gathering)
        if gathering or any(waited < seconds for seconds in self._running.values()):
            return
        made = make_proposal(
            self._membership, self._promises, self._next_generation(), self._ballot, self._me.agent, self._running
        )
        if made is None:
            self._give_up(now)
        else:
            self._propose(made[0], now, ProposerEvent.HALTED)

    def _note_ranks(self, promise: Promise) -> None:
        """Note which of an agent's ranks are lost, and which still run."""
        for slot, status in promise.ranks.items():
            if slot not in self._membership.slots:
                continue
            if status.end is not None or status.state not in IN_GENERATION:
                self._lost.add(slot)
            else:
                self._lost.discard(slot)
            if has_stopped(status, self._broken):
                self._running.pop(slot, None)
            else:
                self._running[slot] = max(REST_SECONDS, REST_ITERATIONS * status.iteration_seconds)

    def _report_lost(self, gathering: bool) -> None:
        """Tell the ranks of broken replicas which members are lost, so that they do not wait for them. Agents that have
        not answered when the gathering ends count as lost."""
        if self._membership.plan.replica == 1:
            return
        if not gathering and not self._closed:
            self._closed = True
            silent = set(self._membership.elements) - self._promises.keys()
            per_node = self._membership.per_node
            self._lost |= {slot for slot in self._membership.plan.members if slot // per_node in silent}
        if len(self._lost) != self._reported:
            self._reported = len(self._lost)
            self.outbox += [(element, self._halt()) for element in self._promises]

    def _next_generation(self) -> int:
        """Return the number of the plan: above every number that any agent knows."""
        accepted = (promise.accepted for promise in self._promises.values())
        numbers = [shared_plans.whole(proposal.share).generation for proposal in accepted if proposal is not None]
        return max([self._broken, *numbers]) + 1

    # ------------------------------------------------------------ steps
    def _propose(self, proposal: Proposal, now: float, event: ProposerEvent) -> None:
        self._proposal = msgspec.structs.replace(proposal, ballot=self._ballot)
        self._step(event, now)

    def _give_up(self, now: float) -> None:
        self._not_before = now + PAUSE_SECONDS
        self._step(ProposerEvent.GIVEN_UP, now)

    def _step(self, event: ProposerEvent, now: float) -> None:
        following = TABLE[self.state].get(event)
        if following is None:
            return
        self.state, self._since = following, now
        if following is ProposerState.PREPARING:
            self._highest += 1
            self._ballot = (self._highest, self._me.element)
            self._promises, self._accepted, self._proposal = {}, set(), None
            self._lost, self._reported, self._closed = set(), 0, False
        elif following is ProposerState.HALTING:
            self._halt_all()
        elif following is ProposerState.TEACHING:
            self._accepted.clear()  # from now on those that have learned
        if following not in (ProposerState.IDLE, ProposerState.HALTING):
            self._send_all(now)

    def _halt_all(self) -> None:
        """End every generation that any agent knows, at all agents that promised."""
        self._broken = max(promise.seen for promise in self._promises.values())
        self._running.clear()
        for promise in self._promises.values():
            self._note_ranks(promise)
        self.outbox += [(element, self._halt()) for element in self._promises]

    def _send_all(self, now: float) -> None:
        """Send the present message to all agents that have not answered it."""
        self._sent_at = now
        running = set(elements_of(self._running, self._membership.per_node))
        for element in self._membership.elements:
            match self.state:
                case ProposerState.PREPARING | ProposerState.HALTING if element not in self._promises:
                    self.outbox.append((element, Prepare(**self._header(), ballot=self._ballot)))
                case ProposerState.HALTING if element in running:
                    self.outbox.append((element, self._halt()))
                case ProposerState.ACCEPTING | ProposerState.TEACHING if element not in self._accepted:
                    self.outbox.append((element, self._proposal_message(element)))

    def _proposal_message(self, element: int) -> Accept | Learn:
        assert self._proposal is not None
        own = proposal_for(self._proposal, element, self._membership)
        if self.state is ProposerState.TEACHING:
            return Learn(**self._header(), proposal=own)
        return Accept(**self._header(), ballot=self._ballot, proposal=own)

    def _halt(self) -> Halt:
        reason = "ranks are lost while the controller is away"
        lost = sorted(self._lost) if self._membership.plan.replica > 1 else []
        return Halt(**self._header(), ballot=self._ballot, broken=self._broken, reason=reason, lost=lost)

    def _header(self) -> dict[str, int]:
        return {"generation": self._membership.plan.generation, "element": self._me.element}
