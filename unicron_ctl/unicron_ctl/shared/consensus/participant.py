"""Plays one agent's part in the consensus: acceptor, proposer and learner of each generation's plan.

The code is pure. It gets messages and the time, and returns messages for agents and orders for the ranks
(docs/design/consensus.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from unicron_ctl.shared.consensus.acceptor import Acceptor, AcceptorAction, AcceptorState
from unicron_ctl.shared.consensus.proposals import Membership, is_agents_prefix, is_whole, proposal_for
from unicron_ctl.shared.consensus.proposer import Proposer, ProposerState
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.protocol.peer_messages import (
    Accept,
    Acceptance,
    AnyPeer,
    Ballot,
    Halt,
    Learn,
    Nack,
    PlanRequest,
    Prepare,
    Promise,
    Proposal,
)

REPEAT_SECONDS = 0.5  # between two requests for a plan; if a proposer has not answered, the next one is asked
TICK_SECONDS = 0.02  # between two ticks while something is going on
INSTANCES_KEPT = 2  # the present one and the one before, whose last messages may still come
ASK_SECONDS = 1.0  # between the controller's answer and the next question
TELL_SECONDS = 0.25  # without the controller's answer; then a proposer is asked for a plan
AWAY_SECONDS = 0.7  # without the controller's answer; then it counts as away


class ControllerSilence:
    """Measures how long an agent's question to the controller has had no answer, on a clock that does not jump."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._answered_at = float("-inf")

    def on_question(self, now: float) -> None:
        """Note that the agent asks the controller for an answer."""
        if self._asked_at is None:
            self._asked_at = now

    def on_answer(self, now: float) -> None:
        """Note a message of the controller, whatever it is."""
        self._asked_at, self._answered_at = None, now

    @property
    def waiting(self) -> bool:
        """Whether a question has no answer."""
        return self._asked_at is not None

    def may_ask(self, now: float) -> bool:
        """Whether no question is open and the last answer is old enough for another one."""
        return self._asked_at is None and now - self._answered_at >= ASK_SECONDS

    def seconds(self, now: float) -> float:
        """Return for how long the open question has had no answer; 0 without one."""
        return 0.0 if self._asked_at is None else now - self._asked_at


class _Instance:
    """The Paxos instance of one generation."""

    def __init__(self, me: structs.Peer, membership: Membership) -> None:
        self.membership, self.acceptor = membership, Acceptor()
        self.learned: Proposal | None = None
        proposes = any(peer.agent == me.agent for peer in membership.proposers)
        self.proposer = Proposer(me, membership) if proposes else None

    @property
    def number(self) -> int:
        return self.membership.plan.generation


class Participant:
    """One agent's part in the consensus. The caller carries out :attr:`outbox` and :attr:`orders`, and empties them."""

    def __init__(self, me: structs.Peer, per_node: int) -> None:
        self._me, self._per_node = me, per_node
        self._silence = ControllerSilence()
        self._instances: dict[int, _Instance] = {}
        self._offers: dict[int, Membership] = {}  # plans for an iteration boundary, not entered yet
        self._current = 0  # the generation that the ranks are in, or were last sent to
        self._seen = 0  # the highest generation that this agent knows of
        self._obeyed = 0  # the highest that the controller has ended, or has sent the ranks to
        self._ranks: Mapping[int, structs.RankStatus] = {}
        self._store = ""
        self._next_proposer = 0
        self._requested_at = self._answered_at = float("-inf")  # a plan was requested; a proposer answered
        self.agreed: wire.Agreement | None = None
        self.over = 0  # the highest generation on whose successor this agent votes no more
        self.outbox: list[tuple[structs.Peer, AnyPeer]] = []  # receiver and message
        self.orders: list[wire.Break | wire.Plan] = []  # for the ranks
        self.status_due = False  # a status to the controller, with `agreed` and `over`, is due at once
        self.known: Mapping[str, structs.Peer] = {}
        """The agents of the present generations, by public key; a new object when it changes."""

    # ------------------------------------------------------------ the controller
    def on_controller(self, now: float) -> None:
        """Take note of the controller, which decides while it is there. Any message of it counts."""
        self._silence.on_answer(now)
        instance = self._instances.get(self._current)
        if instance is not None and instance.acceptor.on_controller_spoke() is AcceptorAction.DECLINE:
            self._decline(instance, instance.acceptor.highest, now)

    def on_break(self, order: wire.Break) -> None:
        """Take note of the controller's Break. Ranks in a later generation ignore it by themselves."""
        self._seen, self._obeyed = max(self._seen, order.generation), max(self._obeyed, order.generation)

    def cede_votes(self, generation: int) -> None:
        """Cede this agent's votes on what follows generations up to this one to the controller."""
        self.over = max(self.over, generation)

    def on_plan(self, share: wire.PlanShare) -> wire.Plan | None:
        """Return the controller's plan for the ranks; None if they have agreed on another one. Raises BadMessage."""
        plan = shared_plans.whole(share)
        instance = self._instances.get(plan.generation)
        if plan.generation < self._fence or (instance is not None and instance.membership.plan.prefix != plan.prefix):
            return None
        if self.agreed is not None and plan.generation == self._fence:
            if plan.prefix != self.agreed.plan.prefix and (self.agreed.chosen or not is_agents_prefix(plan.prefix)):
                return None  # else the others chose this one: only one of two ballots can have won
            if plan.generation == self._current:
                self.agreed = None  # the controller has adopted it
                return None
        self.agreed = None
        self._seen = max(self._seen, plan.generation)
        membership = self._membership(plan, share)
        if plan.boundary:
            self._offers = {number: one for number, one in self._offers.items() if number > self._current}
            self._offers[plan.generation] = membership
        else:
            self._obeyed = max(self._obeyed, plan.generation)
            self._enter_generation(membership)
        return plan

    def should_ask(self, now: float) -> bool:
        """Whether a status should ask the controller for an answer at once."""
        return self._needs_controller and self._silence.may_ask(now)

    def on_status(self, now: float) -> bool:
        """Note that a status is sent; return whether it has to ask for an answer, which is not needed just after
        one."""
        if self.should_ask(now):
            self._silence.on_question(now)
        return self._silence.waiting

    # ------------------------------------------------------------ the ranks
    def on_ranks(self, ranks: Mapping[int, structs.RankStatus], store: str, now: float) -> None:
        """Take in changes of the agent's ranks."""
        self._ranks, self._store = ranks, store
        inside = max((max(status.generation, status.entering) for status in ranks.values()), default=0)
        if inside > self._current and inside in self._offers:
            self._enter_generation(self._offers.pop(inside))
        instance = self._instances.get(self._current)
        if instance is not None and instance.acceptor.state is AcceptorState.PROMISED:
            self._send_promise(instance, instance.acceptor.promised[1], now)
        self.tick(now)

    # ------------------------------------------------------------ the other agents
    def on_message(self, message: AnyPeer, now: float) -> None:
        """Handle a message of another agent, whose element is authenticated."""
        instance = self._instances.get(message.generation)
        if instance is None:
            return
        if any(peer.element == message.element for peer in instance.membership.proposers):
            self._answered_at = now
        ceded = instance.number <= self.over and instance.learned is None
        match message:
            case PlanRequest():
                self._on_request(instance, message, now)
            case Prepare() | Accept() if ceded:
                pass  # as if this agent were dead: a quorum of the others may still decide
            case Prepare() | Accept() | Halt() if message.generation != self._current:
                self._answer_late(instance, message, now)
            case Prepare():
                self._answer(instance, instance.acceptor.on_prepare(message.ballot), message, now)
            case Accept():
                self._answer(instance, instance.acceptor.on_accept(message.proposal), message, now)
            case Halt():
                self._on_halt(instance, message, now)
            case Learn():
                self._on_learn(instance, message, now)
            case Promise() if instance.proposer is not None:
                instance.proposer.on_promise(message, now)
            case Acceptance() if instance.proposer is not None:
                instance.proposer.on_accepted(message, now)
            case Nack() if instance.proposer is not None:
                instance.proposer.on_nack(message.ballot, now)
        self.tick(now)

    def _on_request(self, instance: _Instance, message: PlanRequest, now: float) -> None:
        if instance.proposer is None:
            return
        if instance.learned is not None or message.generation != self._current:
            self._answer_late(instance, message, now)
        else:
            instance.proposer.on_request(now)

    def _answer_late(self, instance: _Instance, message: PlanRequest | Prepare | Accept | Halt, now: float) -> None:
        """Answer an agent that is still in a generation which is over here."""
        to, learned, header = message.element, instance.learned, self._header(instance)
        match message:
            case _ if learned is not None and is_whole(learned):
                mine = proposal_for(learned, to, instance.membership)
                self._send(instance, to, Learn(**header, proposal=mine), now)
            case Prepare() if learned is not None:
                promise = self._promise(instance, message.ballot)
                promise.accepted = learned
                self._send(instance, to, promise, now)
            case Accept() if learned is not None and _prefix(message.proposal) == _prefix(learned):
                self._send(instance, to, Acceptance(**header, ballot=message.ballot), now)
            case Accept() if learned is not None:  # of a lower ballot: another plan has followed
                self._send(instance, to, Nack(**header, ballot=max(instance.acceptor.highest, learned.ballot)), now)
            case Prepare() | Accept() | Halt() if learned is None:
                self._decline(instance, message.ballot, now)

    def _answer(self, instance: _Instance, action: AcceptorAction, message: Prepare | Accept, now: float) -> None:
        match action:
            case AcceptorAction.ASK_CONTROLLER:
                self.status_due = self.status_due or not self._silence.waiting
            case AcceptorAction.PROMISE:
                self._send_promise(instance, message.element, now)
            case AcceptorAction.ACCEPTED:
                assert isinstance(message, Accept)
                self.agreed, self.status_due = _agreement(message.proposal, False), True
                self._send(instance, message.element, Acceptance(**self._header(instance), ballot=message.ballot), now)
            case AcceptorAction.NACK:
                nack = Nack(**self._header(instance), ballot=instance.acceptor.highest)
                self._send(instance, message.element, nack, now)
            case AcceptorAction.DECLINE:
                self._decline(instance, message.ballot, now)

    def _on_halt(self, instance: _Instance, message: Halt, now: float) -> None:
        acceptor = instance.acceptor
        if acceptor.state is not AcceptorState.PROMISED or message.ballot != acceptor.promised:
            return
        self._seen = max(self._seen, message.broken)
        self.orders.append(wire.Break(generation=message.broken, lost=message.lost, reason=message.reason))
        self._send_promise(instance, message.element, now)

    def _on_learn(self, instance: _Instance, message: Learn, now: float) -> None:
        """Follow the chosen plan, unless the controller has sent the ranks elsewhere."""
        proposal, plan = message.proposal, shared_plans.whole(message.proposal.share)
        if instance.learned is None and message.generation == self._current and plan.generation > self._obeyed:
            instance.learned = instance.acceptor.accepted = proposal
            self._seen = max(self._seen, plan.generation)
            self.agreed, self.status_due = _agreement(proposal, True), True
            lost = [one.slot for one in proposal.lost]
            # Ranks of an agent that was left out still run, and need the Break.
            self.orders += [wire.Break(generation=plan.generation - 1, lost=lost, reason=plan.reason), plan]
            self._enter_generation(self._membership(plan, proposal.share))
        self._send(instance, message.element, Acceptance(**self._header(instance), ballot=proposal.ballot), now)

    # ------------------------------------------------------------ time
    def seconds_to_tick(self, now: float) -> float:
        """Return the seconds until :meth:`tick` is due; infinity while nothing is going on."""
        proposers = (instance.proposer for instance in self._instances.values())
        busy = any(proposer and proposer.state is not ProposerState.IDLE for proposer in proposers)
        if busy or (self._needs_controller and self._silence.waiting):
            return TICK_SECONDS
        return ASK_SECONDS if self._needs_controller else float("inf")

    def tick(self, now: float) -> None:
        """Act on time: on a controller that has been silent for too long, on messages that have to be repeated."""
        instance = self._instances.get(self._current)
        if instance is not None:
            silent = self._silence.seconds(now)
            if silent >= AWAY_SECONDS and instance.acceptor.on_controller_silent() is AcceptorAction.PROMISE:
                self._send_promise(instance, instance.acceptor.promised[1], now)
            if silent >= TELL_SECONDS and self._needs_plan and now - self._requested_at >= REPEAT_SECONDS:
                self._request_plan(instance, now)
        for one in list(self._instances.values()):
            if one.proposer is not None:
                one.proposer.tick(now)
                outbox, one.proposer.outbox = one.proposer.outbox, []
                for element, message in outbox:
                    self._send(one, element, message, now)

    def _request_plan(self, instance: _Instance, now: float) -> None:
        """Ask the proposer that answers for a plan, or one after the other."""
        proposers = instance.membership.proposers
        if not proposers:
            return
        if self._requested_at > self._answered_at:
            self._next_proposer += 1
        self._requested_at = now
        to = proposers[self._next_proposer % len(proposers)].element
        self._send(instance, to, PlanRequest(**self._header(instance)), now)

    # ------------------------------------------------------------ helpers
    @property
    def _fence(self) -> int:
        """The highest generation that the agents agreed on: the controller's plans for lower ones come too late."""
        return self.agreed.generation if self.agreed is not None else 0

    @property
    def _needs_plan(self) -> bool:
        """Whether a member of the present generation has died here, or has stopped in it."""
        instance = self._instances.get(self._current)
        return instance is not None and any(
            slot in instance.membership.slots
            and status.state != "finished"
            and (status.end is not None or (status.state == "stopped" and status.broken >= instance.number))
            for slot, status in self._ranks.items()
        )

    @property
    def _needs_controller(self) -> bool:
        instance = self._instances.get(self._current)
        return instance is not None and (instance.acceptor.state is not AcceptorState.IDLE or self._needs_plan)

    def _membership(self, plan: wire.Plan, share: wire.PlanShare) -> Membership:
        proposers = shared_plans.proposers(share)
        peers = {peer.element: peer for peer in (*proposers, *share.peers)}
        return Membership(plan, peers, proposers, self._per_node)

    def _enter_generation(self, membership: Membership) -> None:
        number = membership.plan.generation
        if number <= self._current:
            return
        self._current = number
        self._next_proposer, self._requested_at, self._answered_at = 0, float("-inf"), float("-inf")
        self._instances[number] = _Instance(self._me, membership)
        for old in sorted(self._instances)[:-INSTANCES_KEPT]:
            del self._instances[old]
        agents = (peer for instance in self._instances.values() for peer in instance.membership.peers.values())
        self.known = {peer.key: peer for peer in agents}

    def _send_promise(self, instance: _Instance, element: int, now: float) -> None:
        """Promise the acceptor's ballot to a proposer, and report the ranks' state."""
        numbers = (max(status.generation, status.entering, status.broken) for status in self._ranks.values())
        promise = self._promise(instance, instance.acceptor.promised)
        promise.seen, promise.store = max([self._seen, self._current, *numbers]), self._store
        promise.ranks, promise.accepted = dict(self._ranks), instance.acceptor.accepted
        self._send(instance, element, promise, now)

    def _decline(self, instance: _Instance, ballot: Ballot, now: float) -> None:
        """Tell the ballot's proposer that the controller lives, so that there is no promise (any more)."""
        promise = self._promise(instance, ballot)
        promise.controller_alive = True
        self._send(instance, ballot[1], promise, now)

    def _promise(self, instance: _Instance, ballot: Ballot) -> Promise:
        return Promise(generation=instance.number, element=self._me.element, ballot=ballot)

    def _header(self, instance: _Instance) -> dict[str, int]:
        return {"generation": instance.number, "element": self._me.element}

    def _send(self, instance: _Instance, element: int, message: AnyPeer, now: float) -> None:
        if element == self._me.element:
            self.on_message(message, now)
        elif (peer := instance.membership.peers.get(element)) is not None:
            self.outbox.append((peer, message))


def _prefix(proposal: Proposal) -> str:
    return shared_plans.whole(proposal.share).prefix


def _agreement(proposal: Proposal, chosen: bool) -> wire.Agreement:
    plan = shared_plans.whole(proposal.share)
    return wire.Agreement(
        generation=plan.generation,
        since=proposal.since,
        plan=plan,
        lost=proposal.lost,
        reason=plan.reason,
        by=proposal.by,
        chosen=chosen,
    )
