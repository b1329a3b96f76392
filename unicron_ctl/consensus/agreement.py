"""One agent's part in what the agents of a job agree on while the controller is away. Pure: fed with messages and the
time, it says what is to be sent and what the ranks are to be told (docs/design/agreement.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unicron.ctl.consensus.acceptor import Act, Stand, Voter
from unicron.ctl.consensus.compose import Company, by_agents, part, whole
from unicron.ctl.consensus.controller_silence import ASK_SECONDS, AWAY_SECONDS, TELL_SECONDS, Silence
from unicron.ctl.consensus.proposer import Lead, Leader
from unicron.ctl.protocol import peer_messages, shared_plans, wire

REPEAT_SECONDS = 0.5  # between two words of trouble; when no leader has answered, the next one is told
LOOK_SECONDS = 0.02  # between two looks at the clock while something is going on
TERMS_KEPT = 2  # the present one, and the one before, whose last messages may still come


class _Term:
    """What belongs to one generation."""

    def __init__(self, me: wire.Peer, company: Company) -> None:
        self.company, self.voter = company, Voter()
        self.taken: peer_messages.Proposal | None = None  # what followed
        self.leader = Leader(me, company) if any(peer.agent == me.agent for peer in company.leaders) else None

    @property
    def number(self) -> int:
        return self.company.plan.generation

    def peer(self, element: int) -> wire.Peer | None:
        return self.company.peers.get(element)


class Agreement:
    """me: this agent. per_node: ranks of an agent.

    :attr:`sends` (to whom, what) and :attr:`orders` for the ranks are emptied by whoever carries them out;
    :attr:`news` is set when the controller should get a status at once. :attr:`agreed` is for that status, and
    :attr:`over`: the highest generation of those on which this agent votes no more.
    """

    def __init__(self, me: wire.Peer, per_node: int) -> None:
        self._me, self._per_node = me, per_node
        self._silence = Silence()
        self._terms: dict[int, _Term] = {}
        self._offers: dict[int, Company] = {}  # at a boundary: not entered yet
        self._current = 0  # the generation that the ranks are in, or were last sent to
        self._seen = 0  # the highest generation that was heard of
        self._obeyed = 0  # the highest that the controller has ended, or has sent the ranks to
        self._ranks: Mapping[int, wire.RankStatus] = {}
        self._store = ""
        self._target = 0  # of the leaders: who is told of trouble
        self._told_at = self._led_at = float("-inf")
        self.agreed: wire.Agreed | None = None
        self.over = 0
        self.sends: list[tuple[wire.Peer, peer_messages.AnyPeer]] = []
        self.orders: list[wire.Break | wire.Plan] = []
        self.news = False
        self.known: Mapping[str, wire.Peer] = {}
        """The agents of the generations that matter, by public key; another object when it changes."""

    # ------------------------------------------------------------ the controller
    def word(self, now: float) -> None:
        """The controller has said something, whatever it is: it decides."""
        self._silence.word(now)
        term = self._terms.get(self._current)
        if term is not None and term.voter.word() is Act.DECLINE:
            self._decline(term, term.voter.current, now)

    def break_(self, order: wire.Break) -> None:
        """The controller's Break; ranks that went on to a later generation pass over it by themselves."""
        self._seen, self._obeyed = max(self._seen, order.generation), max(self._obeyed, order.generation)

    def give_up(self, generation: int) -> None:
        """The controller has this agent's vote on what follows generations up to this one."""
        self.over = max(self.over, generation)

    def plan(self, share: wire.PlanShare) -> wire.Plan | None:
        """The controller's plan as the ranks are to see it, None when they agreed on another one before.

        Raises BadMessage for a plan that is none.
        """
        plan = shared_plans.whole(share)
        term = self._terms.get(plan.generation)
        if plan.generation < self._fence or (term is not None and term.company.plan.prefix != plan.prefix):
            return None
        if self.agreed is not None and plan.generation == self._fence:
            if plan.prefix != self.agreed.plan.prefix and (self.agreed.chosen or not by_agents(plan.prefix)):
                return None  # else it is what the others chose: of two ballots only one can have been
            self.agreed = None  # the controller has made it its own
            if plan.generation == self._current:
                return None
        if plan.generation > self._fence:
            self.agreed = None
        self._seen = max(self._seen, plan.generation)
        company = self._company(plan, shared_plans.leaders(share), share.peers)
        if plan.boundary:
            self._offers = {number: one for number, one in self._offers.items() if number > self._current}
            self._offers[plan.generation] = company
        else:
            self._obeyed = max(self._obeyed, plan.generation)
            self._seat(company)
        return plan

    def to_ask(self, now: float) -> bool:
        """Whether a status should ask the controller for an answer at once."""
        return self._needy and self._silence.to_ask(now)

    def asks(self, now: float) -> bool:
        """A status goes out: whether it is to ask for an answer. Not when the controller has just sent a Break."""
        if self.to_ask(now):
            self._silence.ask(now)
        return self._silence.pending

    # ------------------------------------------------------------ the ranks
    def ranks(self, ranks: Mapping[int, wire.RankStatus], store: str, now: float) -> None:
        """The agent's ranks have changed."""
        self._ranks, self._store = ranks, store
        inside = max((max(status.generation, status.entering) for status in ranks.values()), default=0)
        if inside > self._current and inside in self._offers:
            self._seat(self._offers.pop(inside))
        term = self._terms.get(self._current)
        if term is not None and term.voter.stand is Stand.PLEDGED:
            self._send(term, term.voter.ballot[1], self._promise(term), now)
        self.tick(now)

    # ------------------------------------------------------------ the others
    def receive(self, message: peer_messages.AnyPeer, now: float) -> None:
        """From another agent of the generation; that it comes from that element has been proved."""
        term = self._terms.get(message.generation)
        if term is None:
            return
        if any(peer.element == message.element for peer in term.company.leaders):
            self._led_at = now
        match message:
            case peer_messages.Trouble():
                self._on_trouble(term, message, now)
            case peer_messages.Prepare() | peer_messages.Propose() if term.number <= self.over and term.taken is None:
                pass  # as if it were dead: a majority of the others may still decide
            case peer_messages.Prepare() | peer_messages.Propose() | peer_messages.Halt() if (
                message.generation != self._current
            ):
                self._tell_late(term, message, now)
            case peer_messages.Prepare():
                self._answer(term, term.voter.prepare(message.ballot), message, now)
            case peer_messages.Propose():
                self._answer(term, term.voter.propose(message.proposal), message, now)
            case peer_messages.Halt():
                self._on_halt(term, message, now)
            case peer_messages.Chosen():
                self._on_chosen(term, message, now)
            case peer_messages.Promise() if term.leader is not None:
                term.leader.promised(message, now)
            case peer_messages.Accept() if term.leader is not None:
                term.leader.accepted(message, now)
            case peer_messages.Outvoted() if term.leader is not None:
                term.leader.outvoted(message.ballot, now)
        self.tick(now)

    def _on_trouble(self, term: _Term, message: peer_messages.Trouble, now: float) -> None:
        if term.leader is None:
            return
        if term.taken is not None or message.generation != self._current:
            self._tell_late(term, message, now)
        else:
            term.leader.trouble(now)

    def _tell_late(
        self,
        term: _Term,
        message: peer_messages.Trouble | peer_messages.Prepare | peer_messages.Propose | peer_messages.Halt,
        now: float,
    ) -> None:
        """To one who is still in a generation that is over here."""
        number, me, to, taken = term.number, self._me.element, message.element, term.taken
        match message:
            case _ if taken is not None and whole(taken):
                self._send(
                    term,
                    to,
                    peer_messages.Chosen(generation=number, element=me, proposal=part(taken, to, term.company)),
                    now,
                )
            case peer_messages.Prepare() if taken is not None:
                self._send(
                    term,
                    to,
                    peer_messages.Promise(generation=number, element=me, ballot=message.ballot, accepted=taken),
                    now,
                )
            case peer_messages.Propose() if taken is not None and _prefix(message.proposal) == _prefix(taken):
                self._send(term, to, peer_messages.Accept(generation=number, element=me, ballot=message.ballot), now)
            case peer_messages.Propose() if taken is not None:  # a lower ballot's: another plan has followed
                ahead = max(term.voter.current, taken.ballot)
                self._send(term, to, peer_messages.Outvoted(generation=number, element=me, ballot=ahead), now)
            case peer_messages.Prepare() | peer_messages.Propose() | peer_messages.Halt() if taken is None:
                self._decline(term, message.ballot, now)

    def _answer(
        self, term: _Term, act: Act, message: peer_messages.Prepare | peer_messages.Propose, now: float
    ) -> None:
        """What the vote says, to the leader."""
        match act:
            case Act.ASK:
                self.news = self.news or not self._silence.pending
            case Act.PROMISE:
                self._send(term, message.element, self._promise(term), now)
            case Act.ACCEPT:
                assert isinstance(message, peer_messages.Propose)
                self.agreed, self.news = _agreed(message.proposal, False), True
                self._send(
                    term,
                    message.element,
                    peer_messages.Accept(generation=term.number, element=self._me.element, ballot=message.ballot),
                    now,
                )
            case Act.REFUSE:
                self._send(
                    term,
                    message.element,
                    peer_messages.Outvoted(generation=term.number, element=self._me.element, ballot=term.voter.current),
                    now,
                )
            case Act.DECLINE:
                self._decline(term, message.ballot, now)

    def _on_halt(self, term: _Term, message: peer_messages.Halt, now: float) -> None:
        if term.voter.stand is not Stand.PLEDGED or message.ballot != term.voter.ballot:
            return
        self._seen = max(self._seen, message.broken)
        self.orders.append(wire.Break(generation=message.broken, lost=message.lost, reason=message.reason))
        self._send(term, message.element, self._promise(term), now)

    def _on_chosen(self, term: _Term, message: peer_messages.Chosen, now: float) -> None:
        """Follow, unless the controller has sent the ranks elsewhere."""
        proposal, plan = message.proposal, shared_plans.whole(message.proposal.share)
        if term.taken is None and message.generation == self._current and plan.generation > self._obeyed:
            term.taken, term.voter.accepted = proposal, proposal
            self._seen = max(self._seen, plan.generation)
            self.agreed, self.news = _agreed(proposal, True), True
            lost = [one.slot for one in proposal.lost]
            over = wire.Break(generation=plan.generation - 1, lost=lost, reason=plan.reason)
            self.orders += [over, plan]  # the ranks of one who was left out still run
            self._seat(self._company(plan, shared_plans.leaders(proposal.share), proposal.share.peers))
        self._send(
            term,
            message.element,
            peer_messages.Accept(generation=term.number, element=self._me.element, ballot=proposal.ballot),
            now,
        )

    # ------------------------------------------------------------ time
    def wait(self, now: float) -> float:
        """Seconds until :meth:`tick` is to be called whatever happens; infinity while nothing is going on."""
        busy = any(term.leader and term.leader.lead is not Lead.RESTING for term in self._terms.values())
        if busy or (self._needy and self._silence.pending):
            return LOOK_SECONDS
        return ASK_SECONDS if self._needy else float("inf")

    def tick(self, now: float) -> None:
        """What time brings: the controller has been silent for too long, a message has to be repeated."""
        term = self._terms.get(self._current)
        if term is not None:
            silent = self._silence.seconds(now)
            if silent >= AWAY_SECONDS and term.voter.silence() is Act.PROMISE:
                self._send(term, term.voter.ballot[1], self._promise(term), now)
            if silent >= TELL_SECONDS and self._troubled and now - self._told_at >= REPEAT_SECONDS:
                self._tell(term, now)
        for one in list(self._terms.values()):
            if one.leader is not None:
                one.leader.tick(now)
                sends, one.leader.sends = one.leader.sends, []
                for element, message in sends:
                    self._send(one, element, message, now)

    def _tell(self, term: _Term, now: float) -> None:
        """The leader that answers, else one after the other."""
        leaders = term.company.leaders
        if not leaders:
            return
        if self._told_at > self._led_at:
            self._target += 1
        self._told_at = now
        peer = leaders[self._target % len(leaders)]
        self._send(term, peer.element, peer_messages.Trouble(generation=term.number, element=self._me.element), now)

    # ------------------------------------------------------------ helpers
    @property
    def _fence(self) -> int:
        """The highest generation that was accepted from the others: the controller's word on lower ones is too late."""
        return self.agreed.generation if self.agreed is not None else 0

    @property
    def _troubled(self) -> bool:
        """A member of the present generation has died here, or has stopped in it."""
        term = self._terms.get(self._current)
        if term is None:
            return False
        return any(
            slot in term.company.slots
            and status.state != "finished"
            and (status.end is not None or (status.state == "stopped" and status.broken >= term.number))
            for slot, status in self._ranks.items()
        )

    @property
    def _needy(self) -> bool:
        term = self._terms.get(self._current)
        return term is not None and (term.voter.stand is not Stand.FREE or self._troubled)

    def _company(self, plan: wire.Plan, leaders: Sequence[wire.Peer], known: Collection[wire.Peer]) -> Company:
        inside = {peer.element: peer for peer in (*leaders, *known)}
        return Company(plan, inside, leaders, self._per_node)

    def _seat(self, company: Company) -> None:
        """The ranks are in this generation from now on."""
        number = company.plan.generation
        if number <= self._current:
            return
        self._current = number
        self._target, self._told_at, self._led_at = 0, float("-inf"), float("-inf")
        self._terms[number] = _Term(self._me, company)
        for old in sorted(self._terms)[:-TERMS_KEPT]:
            del self._terms[old]
        self.known = {peer.key: peer for term in self._terms.values() for peer in term.company.peers.values()}

    def _promise(self, term: _Term) -> peer_messages.Promise:
        numbers = (max(status.generation, status.entering, status.broken) for status in self._ranks.values())
        seen = max([self._seen, self._current, *numbers])
        return peer_messages.Promise(
            generation=term.number,
            element=self._me.element,
            ballot=term.voter.ballot,
            seen=seen,
            store=self._store,
            ranks=dict(self._ranks),
            accepted=term.voter.accepted,
        )

    def _decline(self, term: _Term, ballot: peer_messages.Ballot, now: float) -> None:
        """The controller lives: no promise, or none any more."""
        self._send(
            term,
            ballot[1],
            peer_messages.Promise(generation=term.number, element=self._me.element, ballot=ballot, hears=True),
            now,
        )

    def _send(self, term: _Term, element: int, message: peer_messages.AnyPeer, now: float) -> None:
        if element == self._me.element:
            self.receive(message, now)
        elif (peer := term.peer(element)) is not None:
            self.sends.append((peer, message))


def _prefix(proposal: peer_messages.Proposal) -> str:
    """By which a plan is known."""
    return shared_plans.whole(proposal.share).prefix


def _agreed(proposal: peer_messages.Proposal, chosen: bool) -> wire.Agreed:
    plan = shared_plans.whole(proposal.share)
    return wire.Agreed(
        generation=plan.generation,
        since=proposal.since,
        plan=plan,
        lost=proposal.lost,
        reason=plan.reason,
        by=proposal.by,
        chosen=chosen,
    )
