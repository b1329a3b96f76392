"""An agent that stands in for the controller, for one generation: a state machine as a table. Pure.

RESTING -> ASKING -> HALTING -> PROPOSING -> ANNOUNCING     one ballot that wins
ASKING -> PROPOSING                                         an earlier one may have won: its plan is proposed again
"""

from __future__ import annotations

import enum

from unicron.ctl.consensus.compose import Company, compose, elements_of, part, resting, whole
from unicron.ctl.protocol import shared_plans, wire
from unicron.ctl.protocol.peer_messages import (
    NO_BALLOT,
    Accept,
    AnyPeer,
    Ballot,
    Chosen,
    Halt,
    Prepare,
    Promise,
    Proposal,
    Propose,
)

GATHER_SECONDS = 0.3  # for the other agents to promise, once a majority has
RESEND_SECONDS = 0.3  # between two messages to an agent that has not answered
REST_SECONDS = 10.0  # for a rank to stop, or three of its iterations
REST_ITERATIONS = 3.0
BALLOT_SECONDS = 15.0  # without a step forward; then a ballot is given up
PAUSE_SECONDS = 2.0  # after a ballot that was given up
ANNOUNCE_SECONDS = 10.0  # for which a plan is announced to those who do not answer

INSIDE = ("running", "entering", "stopped", "finished")  # states of a rank that is in its generation, or ended well
Sends = list[tuple[int, AnyPeer]]  # (element, message)


class Lead(enum.StrEnum):
    """Where a leader is."""

    RESTING = "resting"
    ASKING = "asking"
    HALTING = "halting"
    PROPOSING = "proposing"
    ANNOUNCING = "announcing"


class Happens(enum.StrEnum):
    """What happens to it."""

    TROUBLE = "trouble"  # ranks need the controller, which does not answer
    MAJORITY = "majority"  # has promised, and nobody has accepted anything
    BOUND = "bound"  # has promised, and one of them has accepted a plan
    RESTED = "rested"  # everybody's ranks have stopped
    TAKEN = "taken"  # a majority has accepted
    STOPPED = "stopped"  # somebody hears the controller, or another ballot is ahead, or nothing comes of this one
    OVER = "over"  # everybody follows, or was told often enough


_L, _H = Lead, Happens
TABLE: dict[Lead, dict[Happens, Lead]] = {
    _L.RESTING: {_H.TROUBLE: _L.ASKING},
    _L.ASKING: {_H.MAJORITY: _L.HALTING, _H.BOUND: _L.PROPOSING, _H.STOPPED: _L.RESTING},
    _L.HALTING: {_H.RESTED: _L.PROPOSING, _H.STOPPED: _L.RESTING},
    _L.PROPOSING: {_H.TAKEN: _L.ANNOUNCING, _H.STOPPED: _L.RESTING},
    _L.ANNOUNCING: {_H.OVER: _L.RESTING},
}
"""What is not there changes nothing."""


class Leader:
    """me: the agent. :attr:`sends` is emptied by whoever delivers it."""

    def __init__(self, me: wire.Peer, company: Company) -> None:
        self._me, self._company = me, company
        self.lead = Lead.RESTING
        self.sends: Sends = []
        self.chosen: Proposal | None = None
        self._ballot: Ballot = NO_BALLOT
        self._highest = 0  # number of any ballot that was heard of
        self._promises: dict[int, Promise] = {}
        self._awaited: dict[int, float] = {}  # slot that has not stopped -> seconds for which it is waited for
        self._accepts: set[int] = set()
        self._proposal: Proposal | None = None
        self._broken = 0  # the generation that is halted
        self._lost: set[int] = set()  # members that are lost, as far as it is known
        self._told = 0  # how many of them the others have been told of
        self._closed = False  # who has not answered by now is lost
        self._since = self._sent_at = self._majority_at = 0.0
        self._not_before = float("-inf")

    # ------------------------------------------------------------ what it hears
    def trouble(self, now: float) -> None:
        """Something needs the controller, which does not answer."""
        if now >= self._not_before and self.chosen is None:
            self._step(Happens.TROUBLE, now)

    def promised(self, message: Promise, now: float) -> None:
        """An agent's promise, or its word that it hears the controller."""
        if message.ballot != self._ballot or self.lead in (Lead.RESTING, Lead.ANNOUNCING):
            return
        if message.hears:
            self._stop(now)
            return
        new = message.element not in self._promises
        self._promises[message.element] = message
        if self.lead is Lead.HALTING:
            if message.seen > self._broken:
                self._halt_all()
            else:
                self._look(message)
                if new:
                    self.sends.append((message.element, self._halt()))
        self.tick(now)

    def accepted(self, message: Accept, now: float) -> None:
        """An agent has accepted, or follows."""
        if message.ballot == self._ballot and self.lead in (Lead.PROPOSING, Lead.ANNOUNCING):
            self._accepts.add(message.element)
            self.tick(now)

    def outvoted(self, ballot: Ballot, now: float) -> None:
        """Another ballot is ahead."""
        self._highest = max(self._highest, ballot[0])
        if ballot > self._ballot:
            self._stop(now)

    # ------------------------------------------------------------ time
    def tick(self, now: float) -> None:
        """Take the next step if it is time, say again what was not answered."""
        match self.lead:
            case Lead.ASKING:
                self._asking(now)
            case Lead.HALTING:
                self._halting(now)
            case Lead.PROPOSING:
                if len(self._accepts) >= self._company.majority:
                    self.chosen = self._proposal
                    self._step(Happens.TAKEN, now)
            case Lead.ANNOUNCING:
                if len(self._accepts) == len(self._company.elements) or now - self._since >= ANNOUNCE_SECONDS:
                    self._step(Happens.OVER, now)
        if self.lead in (Lead.ASKING, Lead.PROPOSING) and now - self._since >= BALLOT_SECONDS:
            self._stop(now)
        if self.lead is not Lead.RESTING and now - self._sent_at >= RESEND_SECONDS:
            self._say(now)

    def _asking(self, now: float) -> None:
        if len(self._promises) >= self._company.majority:
            self._majority_at = now
            bound = self._bound()
            if bound is None:
                self._step(Happens.MAJORITY, now)
            elif whole(bound):
                self._propose(bound, now, Happens.BOUND)
            else:
                self._stop(now)  # only the controller, or a leader that is away, can put it together

    def _bound(self) -> Proposal | None:
        """The latest proposal that one of those who promised has accepted, the whole of it where there is one."""
        found = [promise.accepted for promise in self._promises.values() if promise.accepted is not None]
        return max(found, key=lambda proposal: (proposal.ballot, whole(proposal)), default=None)

    def _halting(self, now: float) -> None:
        waited = now - self._majority_at
        gathering = len(self._promises) < len(self._company.elements) and waited < GATHER_SECONDS
        self._name_lost(gathering)
        if gathering:
            return
        if any(waited < seconds for seconds in self._awaited.values()):
            return
        made = compose(self._company, self._promises, self._number(), self._ballot, self._me.agent, self._awaited)
        if made is None:
            self._stop(now)
        else:
            self._propose(made[0], now, Happens.RESTED)

    def _look(self, promise: Promise) -> None:
        """Which of an agent's ranks are still waited for."""
        for slot, status in promise.ranks.items():
            if slot in self._company.slots:
                if status.end is not None or status.state not in INSIDE:
                    self._lost.add(slot)
                else:
                    self._lost.discard(slot)
                if resting(status, self._broken):
                    self._awaited.pop(slot, None)
                else:
                    self._awaited[slot] = max(REST_SECONDS, REST_ITERATIONS * status.iteration_seconds)

    def _name_lost(self, gathering: bool) -> None:
        """Ranks of replicas that are hit must not wait for what a lost one was to send them. Who has not answered once
        all could have is lost, too."""
        if self._company.plan.replica == 1:
            return
        if not gathering and not self._closed:
            self._closed = True
            silent = set(self._company.elements) - self._promises.keys()
            self._lost |= {slot for slot in self._company.plan.members if slot // self._company.per_node in silent}
        if len(self._lost) != self._told:
            self._told = len(self._lost)
            self.sends += [(element, self._halt()) for element in self._promises]

    def _number(self) -> int:
        """Of the plan: above all that anybody has heard of."""
        accepted = (promise.accepted for promise in self._promises.values())
        numbers = [shared_plans.whole(proposal.share).generation for proposal in accepted if proposal is not None]
        return max([self._broken, *numbers]) + 1

    # ------------------------------------------------------------ steps
    def _propose(self, proposal: Proposal, now: float, happens: Happens) -> None:
        self._proposal = Proposal(
            since=proposal.since, ballot=self._ballot, share=proposal.share, lost=proposal.lost, by=proposal.by
        )
        self._step(happens, now)

    def _stop(self, now: float) -> None:
        self._not_before = now + PAUSE_SECONDS
        self._step(Happens.STOPPED, now)

    def _step(self, happens: Happens, now: float) -> None:
        following = TABLE[self.lead].get(happens)
        if following is None:
            return
        self.lead, self._since = following, now
        if following is Lead.ASKING:
            self._highest = max(self._highest, self._ballot[0]) + 1
            self._ballot = (self._highest, self._me.element)
            self._promises, self._accepts, self._proposal = {}, set(), None
            self._lost, self._told, self._closed = set(), 0, False
        elif following is Lead.HALTING:
            self._halt_all()
        elif following is Lead.ANNOUNCING:
            self._accepts.clear()  # from now on: who follows
        if following not in (Lead.RESTING, Lead.HALTING):
            self._say(now)

    def _halt_all(self) -> None:
        """The generations that anybody has heard of are over, for all who promised."""
        self._broken = max(promise.seen for promise in self._promises.values())
        self._awaited.clear()
        for promise in self._promises.values():
            self._look(promise)
        self.sends += [(element, self._halt()) for element in self._promises]

    def _say(self, now: float) -> None:
        """The present message to everybody who has not answered it."""
        self._sent_at = now
        running = set(elements_of(self._awaited, self._company.per_node))
        for element in self._company.elements:
            match self.lead:
                case Lead.ASKING:
                    if element not in self._promises:
                        self.sends.append((element, Prepare(**self._head(), ballot=self._ballot)))
                case Lead.HALTING:
                    if element not in self._promises:
                        self.sends.append((element, Prepare(**self._head(), ballot=self._ballot)))
                    elif element in running:
                        self.sends.append((element, self._halt()))
                case Lead.PROPOSING | Lead.ANNOUNCING:
                    if element not in self._accepts:
                        self.sends.append((element, self._tell(element)))

    def _tell(self, element: int) -> AnyPeer:
        assert self._proposal is not None
        own = part(self._proposal, element, self._company)
        if self.lead is Lead.ANNOUNCING:
            return Chosen(**self._head(), proposal=own)
        return Propose(**self._head(), ballot=self._ballot, proposal=own)

    def _halt(self) -> Halt:
        reason = "ranks are lost while the controller is away"
        lost = sorted(self._lost) if self._company.plan.replica > 1 else []
        return Halt(**self._head(), ballot=self._ballot, broken=self._broken, reason=reason, lost=lost)

    def _head(self) -> dict[str, int]:
        return {"generation": self._company.plan.generation, "element": self._me.element}
