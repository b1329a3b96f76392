"""Lists the orders that an agent lacks now. Level-triggered: an order is due until the agent's status shows that it was
obeyed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial

import msgspec

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import Ending, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import look_again
from unicron_ctl.shared.consensus.proposals import elements_of, proposers_of
from unicron_ctl.shared.consensus.restart_lease import tried_by
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.protocol.reach import door_at
from unicron_ctl.shared.slurm.states import WORKS
from unicron_transition.generations.layout import heads_of

SAVING_LOOK_SECONDS = 0.2  # between two checks whether ranks still save
BREAKABLE = frozenset({"waiting", "entering", "running", "stopped", "standby"})


class StandingOrders:
    """Orders that are the same for all agents of a job, made and encoded once: the Break, and the common part of the
    plan.

    Parameters
    ----------
    arrivals :
        When an agent last registered, because the plan has the addresses of the agents that lead.
    plan :
        By default that of the job's phase.
    blocked :
        Ranks that stopped where the others of their replica wait for them; to these they are as good as lost.
    """

    def __init__(
        self,
        job: JobState,
        arrivals: float = 0.0,
        plan: wire.Plan | None = None,
        blocked: frozenset[int] = frozenset(),
    ) -> None:
        self.plan = plan or _plan(job)
        self._job, self._known, self._arrivals = job, job.plan, arrivals
        self.members = frozenset(self.plan.members) if self.plan is not None else frozenset()
        self.plan_key = f"plan {self.plan.generation}" if self.plan is not None else ""
        self._blocked = blocked
        lost = sorted(job.lost.keys() | blocked)
        self.broken = wire.Break(generation=job.broken, lost=lost, reason=job.why, killed=_lost_to_kills(job))
        # For a rank that stops, further losses matter only within its replica.
        self.break_key = f"break {job.broken} {len(lost) if job.replica > 1 else bool(lost)}"

    def holds(self, job: JobState, arrivals: float, blocked: frozenset[int] = frozenset()) -> bool:
        """Whether new orders would be the same. Each turn asks this; making the plan of a large job takes
        milliseconds."""
        plans = self.plan is _plan(job) and self._known is job.plan and self._arrivals == arrivals
        broken = self.broken.generation == job.broken and self.broken.reason == job.why
        return self._job is job and plans and broken and self.broken.lost == sorted(job.lost.keys() | blocked)

    @cached_property
    def hit(self) -> frozenset[int]:
        """Slots that must stop at once, without finishing what they have begun."""
        return self._job.hit(self._blocked) if self._job.phase is Phase.BREAKING else frozenset()

    @cached_property
    def inside(self) -> frozenset[int]:
        """Members of the plan that the job is in, or enters."""
        return frozenset(self._known.members if self._known is not None else ())

    @cached_property
    def _heads(self) -> dict[int, int]:
        if self.plan is None or self.plan.replica == 1:  # each member is its own head
            return {}
        return heads_of(self.plan.members, self.plan.replica)

    @cached_property
    def confirmed(self) -> StandingOrders:
        """Orders about the job's present plan, for agents that made it without the controller."""
        return StandingOrders(self._job, self._arrivals, self._job.plan)

    @cached_property
    def _proposers(self) -> list[structs.Peer]:
        return proposers_of(self.plan, partial(peer_of, self._job), self._job.per_node) if self.plan is not None else []

    @cached_property
    def _proposing(self) -> frozenset[int]:
        """Elements whose agents act for the controller while it is away."""
        return frozenset(peer.element for peer in self._proposers)

    @cached_property
    def common(self) -> msgspec.Raw:
        """The part of the plan that all agents get, encoded."""
        if self.plan is None:
            return msgspec.Raw(b"")
        return shared_plans.common(self.plan, self._proposers, () if self._job.mode.keeps_state else self._nodes)

    @cached_property
    def _nodes(self) -> list[str]:
        """The names of the members' nodes; [] if one is unknown."""
        agents = self._job.agents
        complete = all(element in agents for element in self._elements)
        return [agents[element].node for element in self._elements] if complete else []

    def share(self, agent: AgentView, live: Mapping[int, AgentView]) -> wire.PlanShare:
        """The agent's part of the plan, which must exist. live: the job's agents."""
        assert self.plan is not None
        peers = self.peers if agent.element in self._proposing else ()
        doors = self._doors(agent.element, live) if self._job.mode.fenced else ()
        return shared_plans.share(self.plan, self.common, agent.slots, peers, self._heads, doors)

    @cached_property
    def _elements(self) -> list[int]:
        return elements_of(self.plan.members, self._job.per_node) if self.plan is not None else []

    def _doors(self, element: int, live: Mapping[int, AgentView]) -> list[str]:
        """Doors at which a plain world's agent checks that the others are there: all, or in a large world a part."""
        doors = (self._door(other, live.get(other)) for other in tried_by(element, self._elements))
        return [door for door in doors if door]

    def knows_doors(self, element: int, live: Mapping[int, AgentView]) -> bool:
        """Whether this controller has heard which doors the agent is to try in its next world."""
        pairs = ((live.get(one), self._job.agents.get(one)) for one in tried_by(element, self._elements))
        return all(agent and record and agent.agent == record.agent and agent.ranks for agent, record in pairs)

    def _door(self, element: int, agent: AgentView | None) -> str:
        """The element's door for its next world; that of its agent if it has no other, as in release 0.2."""
        record = self._job.agents.get(element)
        if record is None:
            return ""
        own = agent.status.world if agent is not None and agent.agent == record.agent else 0
        return door_at(record.door.rpartition(":")[0], f":{own}") if own and record.door else record.door

    @cached_property
    def peers(self) -> list[structs.Peer]:
        """The agents of the plan's members, for the agents that lead."""
        return [peer for element in self._elements if (peer := peer_of(self._job, element)) is not None]


def _lost_to_kills(job: JobState) -> bool:
    """Whether every rank that the present Break leaves out was killed by SIGKILL, or is gone with its agent or node; no
    program does that by itself."""
    found = {slot: False for slot in job.lost}
    for failure in job.failures:
        record = failure.record
        if failure.generation == job.broken:
            outside = record.kind_of_failure in ("node", "agent") or record.exit_code == -signal.SIGKILL
            found.update((slot, outside) for slot in record.slots if slot in found)
    return bool(found) and all(found.values())


def _plan(job: JobState) -> wire.Plan | None:
    """The plan that the job enters, or the one that is offered."""
    return {Phase.ENTERING: job.plan, Phase.OFFERING: job.offer}.get(job.phase)


def peer_of(job: JobState, element: int) -> structs.Peer | None:
    """The element's agent as others reach it; None if they cannot."""
    one = job.agents.get(element)
    return structs.Peer(element, one.agent, one.peer, one.peer_key) if one is not None and one.peer else None


def ending(ended: Ending) -> wire.Message:
    """The message to agents of a job that is over. Agents of a disowned job may ask again, because Slurm may be
    wrong."""
    if ended.disowned:
        return wire.Refusal(reason=ended.reason)
    return wire.End(code=ended.code, reason=ended.reason)


Order = wire.Message | Callable[[], wire.Message]
"""A message, or a function that makes it, so that an order that was sent a moment ago is not made again."""


def due_orders(job: JobView, agent: AgentView, orders: StandingOrders, now: float) -> Iterator[tuple[str, Order]]:
    """(key, order) for every order that this agent has not obeyed yet. The key identifies the order.

    A process that starts later needs no order yet; see :func:`next_start`.
    """
    if not agent.alive:
        return
    if job.state.ended:
        yield "end", ending(job.state.ended)
        return
    if job.state.gives_back(agent.element):
        yield "end", wire.End(code=0, reason=f"the plan gives {agent.node} back to Slurm: this agent ends")
        return
    if agent.status.noticed and (released := _release_order(job, agent)) is not None:
        yield "released", released
    elif agent.status.noticed and agent.shown in WORKS and agent.grace:
        yield "grace", wire.Grace(seconds=agent.grace)
    if _must_break(job.state, agent, orders):
        yield orders.break_key, orders.broken
    if stale := _withdrawn(job.state, agent, orders):
        yield f"withdraw {stale}", wire.Withdraw(generation=stale, reason="another member of the offer failed")
    plan, agreed, present = orders.plan, agent.status.agreed, job.state.plan
    if plan is not None and _lacks(agent, orders.members, plan.generation) and not awaits_doors(job, agent, orders):
        yield orders.plan_key, partial(orders.share, agent, job.agents)
    elif agreed is not None and present is not None and agreed.generation <= present.generation:
        yield f"confirm {present.generation}", partial(orders.confirmed.share, agent, job.agents)
    if agent.element in job.restarts:
        yield from _processes(job, agent, now)


def awaits_doors(job: JobView, agent: AgentView, orders: StandingOrders) -> bool:
    """Whether the agent gets its plan later: this controller, started again, has not heard all doors of that world. A
    world waits for all its agents anyway, and the doors of agents themselves do not do: they stay open when these leave
    it."""
    if not job.state.mode.fenced or orders.plan is None or not _lacks(agent, orders.members, orders.plan.generation):
        return False
    return not orders.knows_doors(agent.element, job.agents)


def _release_order(job: JobView, agent: AgentView) -> wire.Release | None:
    """The message that an agent whose element will end need not wait any more; None while it has to: for its ranks to
    leave, or for Slurm to show whether it preempts the element or ends it."""
    state = job.state
    others = any(other.alive and not other.status.noticed for other in job.agents.values())
    inside = any(slot in state.members or slot in state.joining for slot in agent.slots)
    if not agent.shown or (others and inside):
        return None
    out = others and (bool(state.members) or not state.mode.keeps_state)
    return wire.Release(out=out, stay=agent.shown in WORKS)


def _must_break(job: JobState, agent: AgentView, orders: StandingOrders) -> bool:
    if not job.broken:
        return False
    if agent.status.world and job.phase in (Phase.BREAKING, Phase.FORMING) and agent.status.left < job.broken:
        if job.world.get(agent.element) == agent.agent:
            return True  # its door keeps others in a world that is over, also after its own ranks have ended
    if job.replica == 1 and agent.broken >= job.broken:
        return False
    breaking = job.phase is Phase.BREAKING
    for slot, status in agent.ranks.items():
        stops = status.state in BREAKABLE or (not job.mode.finishes_alone and status.state == "finished")
        if not stops or max(status.generation, status.entering) > job.broken:
            continue
        if status.broken >= job.broken:
            # It finishes what it has begun, unless its replica is hit, perhaps only after it heard of the Break.
            if job.replica > 1 and status.state in ("entering", "running") and slot in orders.hit:
                return True
            continue
        # A joiner of a broken offer that still waits has to hear of the Break, too, and so has every rank while the job
        # breaks.
        if breaking or status.state in ("entering", "running") or agent.status.begins:
            return True
    return False


def _withdrawn(job: JobState, agent: AgentView, orders: StandingOrders) -> int:
    """The generation that a newcomer of this agent waits to enter in vain; 0 if none does. It was withdrawn, or the
    agents agreed on another plan with its number."""
    if job.plan is None or job.phase not in (Phase.RUNNING, Phase.OFFERING):
        return 0
    outside = (slot for slot, status in agent.ranks.items() if status.state == "entering" and slot not in job.members)
    waits = [agent.ranks[slot].entering for slot in outside if slot not in orders.inside]
    first, last = job.plan.generation, job.generation if job.offer is None else job.offer.generation - 1
    return max((generation for generation in waits if first <= generation <= last), default=0)


def _lacks(agent: AgentView, members: frozenset[int], generation: int) -> bool:
    for slot, status in agent.ranks.items():
        if slot in members:
            if status.state in BREAKABLE and max(status.generation, status.entering) < generation:
                return True
        elif status.state in ("stopped", "running") and status.generation < generation:
            return True
    return False


def _processes(job: JobView, agent: AgentView, now: float) -> Iterator[tuple[str, wire.Message]]:
    state = job.state
    for slot, status in agent.ranks.items():
        process = state.slot(slot)
        if status.incarnation >= process.wanted:
            continue
        if status.state not in ("exited", "finished"):
            save = status.state == "stopped" and now < state.saving_until
            order = wire.StopRank(slot=slot, incarnation=status.incarnation, reason=process.why, save=save)
            yield f"{'save' if save else 'stop'} {slot} {status.incarnation}", order
        elif now >= process.not_before and not _saving(job, now):
            start = wire.StartRank(slot=slot, incarnation=process.wanted, reason=process.why, layout=state.layout)
            yield f"start {slot} {process.wanted}", start


def _saving(job: JobView, now: float) -> bool:
    """Whether a rank still writes its part of the state from which all will begin."""
    state = job.state
    if now >= state.saving_until:
        return False
    if now >= job.saves_look_at:
        stopped = ((slot, status) for _, slot, status in job.all_ranks() if status.state == "stopped")
        job.saves = any(status.incarnation < state.slot(slot).wanted for slot, status in stopped)
        job.saves_look_at = look_again(now, len(job.agents), SAVING_LOOK_SECONDS)
    return job.saves


def next_start(job: JobView, agent: AgentView, now: float) -> float | None:
    """When the next process of this agent may start; None if none starts later."""
    state = job.state
    first = job.saves_look_at if _saving(job, now) else now
    times = [
        max(known.not_before, first)
        for slot, status in agent.ranks.items()
        if status.incarnation < (known := state.slot(slot)).wanted and now < max(known.not_before, first)
    ]
    return min(times, default=None)
