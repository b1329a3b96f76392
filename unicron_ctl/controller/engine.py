"""The controller without its sockets: messages and ticks in; events, messages and requests for slow work out.

Whoever drives it stores `events` before it sends `outbox` or starts `requests`, so that nothing is done that a restart
would not know of. The engine itself blocks on nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from detector.classify import Classifier
from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller import actions, deadlines, failures, machine, monitoring, orders, peers, restarting, steps
from unicron_ctl.controller.cluster import Cluster
from unicron_ctl.controller.fold import fold
from unicron_ctl.controller.ledger import JobLedger
from unicron_ctl.controller.node_events import NodeEvents
from unicron_ctl.controller.signals import Signal, Surroundings, next_signal, waiting_elements
from unicron_ctl.controller.soft import AgentView, JobView
from unicron_ctl.controller.state import ClusterState, Identity, JobState
from unicron_ctl.controller.store import Event
from unicron_ctl.protocol import wire

STALL_SECONDS = 0.5  # a tick that is later than this says that this process stood still, not the agents
STEPS_PER_TURN = 50  # of one job's state machine; more would be a loop


@dataclass(frozen=True)
class Probe:
    """Ask the node's slurmd whether it is there: a TCP connect."""

    job: str
    element: int
    agent: str
    node: str
    address: str
    port: int
    failure: int


@dataclass
class Engine:
    """All jobs. `now` is seconds since the epoch, and never goes backwards within one process."""

    config: ControllerConfig
    state: ClusterState
    started_at: float
    classifier: Classifier = field(default_factory=Classifier)
    has_slurm: bool = False

    def __post_init__(self) -> None:
        self.agents: dict[tuple[str, int], AgentView] = {}
        self._of_job: dict[str, dict[int, AgentView]] = {}
        self.ledgers: dict[str, JobLedger] = {}
        self.disturbed_until: dict[str, float] = {}
        self.kept_waiting: dict[str, tuple[int, tuple[int, ...]]] = {}  # job -> what was said of its newcomers
        self.watches: dict[str, monitoring.JobWatch] = {}
        self.peers: dict[str, peers.JobPeers] = {}
        self.events: list[Event] = []
        self.outbox: list[tuple[tuple[bytes, ...], wire.Message]] = []
        self.requests: list[Any] = []
        self.now = self.last_tick = self.started_at
        self.cluster = Cluster(self)
        self.node_events = NodeEvents(self)
        self.clocks = deadlines.Clocks()
        for job in self.state.jobs.values():  # reports that the process before this one had read are lost with it
            self.ledgers[job.job] = JobLedger(closed=job.iteration)
            self.disturbed_until[job.job] = job.iteration + 3
        self.state.last_event = max(self.state.last_event, 0)

    # ------------------------------------------------------------ recording
    def emit(self, kind: str, job: str = "", generation: int = 0, **payload: Any) -> Event:
        """Records an event and takes it into the state. The payload goes through JSON first, as it will at a replay."""
        plain = json.loads(json.dumps(payload))
        event = Event(self.state.last_event + 1, self.now, job, generation, kind, plain)
        fold(self.state, event)
        self.events.append(event)
        return event

    def send(self, route: tuple[bytes, ...], message: wire.Message) -> None:
        self.outbox.append((route, message))

    def view(self, job: JobState) -> JobView:
        """The job with what its agents say."""
        return JobView(job, self._of_job.setdefault(job.job, {}))

    def watch(self, job: JobState) -> monitoring.JobWatch:
        """What is known of the job's iteration times."""
        if job.job not in self.watches:
            self.watches[job.job] = monitoring.JobWatch.fresh(self.config)
        return self.watches[job.job]

    # ------------------------------------------------------------ messages
    def receive(self, route: tuple[bytes, ...], message: wire.Message, now: float) -> None:
        """A message of an agent that passed the checks at the edge."""
        self.now = max(self.now, now)
        match message:
            case wire.Register():
                self._on_register(route, message)
            case wire.Status():
                self._on_status(route, message)
            case wire.Step():
                self._on_step(route, message)
            case wire.StackTrace():
                if job := self._speaker(route, message.job, message.slot):
                    monitoring.on_stacks(self, job, message)
            case wire.NodeEvent():
                self.node_events.receive(route, message)
            case wire.InjectRefused():
                if self._speaker(route, message.job, message.slot):
                    told = f"{message.fault} was not injected into slot {message.slot}: {message.reason[:400]}"
                    self.emit("inject_refused", message.job, slot=message.slot, fault=message.fault, reason=told)
            case wire.Metrics():
                peers.take(self, route, message)
            case wire.Timing():
                if self._speaker(route, message.job, message.slot):
                    self.emit("timing", message.job, message.generation, slot=message.slot, seconds=message.seconds)

    def hint(self, hint: wire.Hint, now: float) -> None:
        """A datagram of the plugin: never trusted alone. A living agent answers the question that it leads to."""
        self.now = max(self.now, now)
        view = self.agents.get((hint.job, hint.element))
        if hint.kind == "task_exit" and view is not None:
            view.task_status = hint.status
            self.suspect(view)

    def suspect(self, view: AgentView) -> None:
        """Slurm says that an agent has ended: it is asked, and has `hint_grace` to answer."""
        if view.alive and view.suspect_since is None:
            view.suspect_since = self.now
            self.send(view.route, wire.Ping())

    def forget(self, job: str) -> None:
        """What is known for now of a job that is over."""
        for element in self._of_job.pop(job, {}):
            self.agents.pop((job, element), None)
        for memory in (self.ledgers, self.watches, self.peers, self.disturbed_until, self.kept_waiting):
            memory.pop(job, None)

    def _on_register(self, route: tuple[bytes, ...], message: wire.Register) -> None:
        if refused := steps.turn_away(self, message):
            self.send(route, refused)
            return
        job = self.state.jobs.get(message.job)
        problem = _register_problem(message, job)
        if problem:
            self.send(route, wire.Refused(reason=problem, final=True))
            return
        if job is None:
            steps.begin(self, message)
            job = self.state.jobs[message.job]
        if job.ended:
            self.send(route, wire.End(code=job.ended["code"], reason=job.ended["reason"]))
            return
        record = job.agents.get(message.element)
        key = (message.job, message.element)
        if record is None or record.agent != message.agent:
            self.emit(
                "agent_registered",
                message.job,
                element=message.element,
                agent=message.agent,
                node=message.node,
                address=message.address,
                slots=message.slots,
            )
            self.agents.pop(key, None)
            self._of_job.get(message.job, {}).pop(message.element, None)
            self.cluster.hurry()
        elif record.gone:
            self.emit("agent_back", message.job, element=message.element, agent=message.agent, node=message.node)
        view = self.agents.get(key)
        if view is None:
            view = self.agents[key] = AgentView(
                message.job,
                message.element,
                message.agent,
                message.node,
                route,
                list(message.slots),
                self.now,
                last_registered=self.now,
            )
            self._of_job.setdefault(message.job, {})[message.element] = view
        view.route, view.last_heard, view.expired, view.suspect_since = route, self.now, False, None
        view.repeated.clear()
        self.send(route, self._welcome())

    def _welcome(self) -> wire.Welcome:
        config = self.config
        return wire.Welcome(
            heartbeat_period=config.heartbeat_period,
            controller="unicrond",
            metrics_seconds=config.metrics_seconds,
            metrics_directory=config.metrics_directory,
        )

    def _on_status(self, route: tuple[bytes, ...], message: wire.Status) -> None:
        job, view = self.state.jobs.get(message.job), self.agents.get((message.job, message.element))
        if job is not None and job.ended:
            self.send(route, wire.End(code=job.ended["code"], reason=job.ended["reason"]))
            return
        if job is None or view is None or view.agent != message.agent:
            replaced = job is not None and message.agent in job.superseded
            reason = (
                f"another agent has taken element {message.element} of job {message.job}"
                if replaced
                else "register first"
            )
            self.send(route, wire.Refused(reason=reason, final=replaced))
            return
        if message.sent < view.sent:
            return
        was_gone = view.expired
        view.route, view.expired = route, False
        news = view.take(message, self.now)
        if was_gone:
            self.emit("agent_back", job.job, element=view.element, agent=view.agent, node=view.node)
        if message.leaving:
            failures.on_leaving(self, job, view, message.leaving)
        for slot, rank in view.ranks.items():
            ready = rank.state in ("waiting", "entering", "running") and not job.restart_mode  # a program says nothing
            if ready and job.slot(slot).ready != Identity(view.agent, rank.incarnation):
                self.emit("rank_ready", job.job, slot=slot, agent=view.agent, incarnation=rank.incarnation)
        if (
            news or was_gone or message.leaving
        ):  # a mere heartbeat changes nothing; the next tick looks at everything anyhow
            self.update(job)

    def _on_step(self, route: tuple[bytes, ...], message: wire.Step) -> None:
        job = self._speaker(route, message.job, message.slot)
        if job is None or job.ended:
            return
        bound = float("inf") if job.phase == machine.State.BREAKING else self.disturbed_until.get(job.job, -1)
        ledger = self.ledgers.setdefault(job.job, JobLedger())
        self.watch(job).take(message)
        for account in ledger.add(message, set(job.members) - set(job.lost), lambda iteration: iteration <= bound):
            status = next((s for _, slot, s in self.view(job).all_ranks() if slot == message.slot), None)
            self.emit(
                "step",
                job.job,
                account.generation,
                iteration=account.iteration,
                loss=account.loss,
                seconds=account.seconds,
                ranks=account.ranks,
                nodes=len(job.elements(job.members)),
                flops=status.flops_per_iteration if status else 0.0,
                train_iterations=status.train_iterations if status else 0,
                micro_batches=account.total,
                computed=account.computed,
                unreported=account.unreported,
            )
            monitoring.stepped(self, job, account)
            if account.problems:
                reason = f"iteration {account.iteration}: {'; '.join(account.problems[:5])}"
                self.emit(
                    "ledger_violation",
                    job.job,
                    account.generation,
                    iteration=account.iteration,
                    problems=account.problems[:50],
                    reason=reason,
                )

    def _speaker(self, route: tuple[bytes, ...], job: str, slot: int) -> JobState | None:
        """The job, if the message comes from the agent that has this slot."""
        state = self.state.jobs.get(job)
        view = self.agents.get((job, state.element(slot))) if state else None
        if view is None or view.route != route or slot not in view.slots:
            return None
        view.last_heard = self.now
        return state

    # ------------------------------------------------------------ time
    def tick(self, now: float) -> None:
        """What time alone brings: leases, time-outs, repeated orders, Slurm's turn."""
        late = now - self.last_tick
        if late > STALL_SECONDS:  # everyone was waiting for us: nobody has been silent
            for view in self.agents.values():
                view.last_heard += late
                view.progress = {slot: at + late for slot, at in view.progress.items()}
            for watch in self.watches.values():
                watch.shift(late)
            self.started_at += late
        self.now, self.last_tick = max(self.now, now), now
        self.node_events.tick()
        for job in list(self.state.jobs.values()):
            if not job.ended:
                failures.leases(self, job)
                monitoring.look(self, job)
                peers.look(self, job)
                failures.notes(self, job)
                restarting.look(self, job, waiting_elements(self.view(job), self.surroundings(job)))
                self.update(job)
            elif self._of_job.get(job.job):
                self._send_orders(job)
        deadlines.look(self)
        self.cluster.tick()

    # ------------------------------------------------------------ one job
    def update(self, job: JobState) -> None:
        """Brings the job as far as it can go now."""
        failures.exits(self, job)
        self._advance(job)
        failures.revive(self, job)
        self._send_orders(job)

    def surroundings(self, job: JobState) -> Surroundings:
        return Surroundings(
            self.config, self.classifier, self.started_at, self.cluster.expected(job), self.cluster.put_aside()
        )

    def _advance(self, job: JobState) -> None:
        for _ in range(STEPS_PER_TURN):
            signal = next_signal(self.view(job), self.surroundings(job), self.now)
            if signal is None or not self.drive(job, signal):
                return
        raise RuntimeError(f"job {job.job}: the state machine does not come to rest in {job.phase}")

    def drive(self, job: JobState, signal: Signal) -> bool:
        """One step of the job's state machine. False when the event changes nothing in this state."""
        before = machine.State(job.phase)
        if self.config.observe and machine.step(before, signal.event)[1] is machine.Action.BREAK:
            signal = actions.observed(self, job, signal)
        following, action = machine.step(before, signal.event)
        if action is machine.Action.IGNORE:
            return False
        actions.PERFORM[action](self, job, signal)
        if job.phase not in (following, before) and not job.ended:  # a loss may show the job to fail by its own bug
            raise RuntimeError(f"job {job.job}: {signal.event} in {before} led to {job.phase} instead of {following}")
        return True

    def _send_orders(self, job: JobState) -> None:
        view = self.view(job)
        for agent, key, message in orders.due(view, self.now):
            last = agent.repeated.get(key)
            if last is not None and self.now - last < self.config.repeat_seconds:
                continue
            if self.config.observe and isinstance(message, wire.Break | wire.StartRank | wire.StopRank):
                continue
            if len(agent.repeated) > 200:
                agent.repeated.clear()
            agent.repeated[key] = self.now
            self.send(agent.route, message)


def _register_problem(message: wire.Register, job: JobState | None) -> str:
    """Why an agent cannot be taken; empty when it can."""
    per_node = message.settings.ranks_per_node
    first = message.element * per_node
    if not message.job or not message.agent:
        return "a job and an agent need a name"
    if message.element < 0 or per_node < 1 or sorted(message.slots) != list(range(first, first + per_node)):
        return f"element {message.element} with {per_node} ranks must have the slots {first} to {first + per_node - 1}"
    if job is None:
        return ""
    if message.agent in job.superseded:
        return f"another agent has taken element {message.element} of job {message.job}"
    if per_node != job.settings.ranks_per_node:
        had = job.settings.ranks_per_node
        return f"job {message.job} has {had} ranks per node, this agent {per_node}: they must be the same"
    if message.settings.mode != job.settings.mode:
        had, other, why = job.settings.mode, message.settings.mode, message.settings.mode_reason
        differs = f"job {message.job} is healed in {had} mode, this agent would be in {other} mode ({why})"
        return f"{differs}: submit with --unicron-mode={had} or --unicron-mode={other}, so that all are the same"
    return ""
