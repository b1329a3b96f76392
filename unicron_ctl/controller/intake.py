"""Messages of agents into what is known for now, and into the log where they are news by themselves."""

from __future__ import annotations

from collections.abc import Callable

from unicron_ctl.controller.job import registration
from unicron_ctl.controller.job.desk import JobDesk
from unicron_ctl.controller.judge import nodes as judge_nodes
from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.job import JobState, Phase
from unicron_ctl.controller.model.live import AgentView, Route
from unicron_ctl.controller.model.view import Outcome, Send, View
from unicron_ctl.controller.sense import members
from unicron_ctl.protocol import wire

PROGRESS_SECONDS = 0.2  # between two statuses of an agent that tell of nothing but progress, in jobs that are not large
LARGE_JOB = 64  # nodes; above, progress is told with the heartbeats


class Intake:
    """One per core. desk: what is remembered of a job. take: the core's door."""

    def __init__(
        self,
        view: View,
        desk: Callable[[JobState], JobDesk],
        talk: judge_nodes.Talk,
        take: Callable[[Outcome], bool],
    ) -> None:
        self._view, self._desk, self._talk, self._take = view, desk, talk, take

    def receive(self, route: Route, message: wire.Message) -> None:
        """A message that passed the checks at the edge."""
        match message:
            case wire.Register():
                self._register(route, message)
            case wire.Status():
                self._status(route, message)
            case wire.Steps():
                self._steps(route, message)
            case wire.Metrics():
                if (agent := self._of_agent(route, message.job, message.element, message.agent)) is not None:
                    job = self._view.state.jobs[message.job]
                    if self._view.config.metrics_seconds and not job.over:
                        self._desk(job).peers.take(agent, message, self._view.now)
            case wire.NodeEvent():
                if (agent := self._of_agent(route, message.job, message.element, message.agent)) is not None:
                    self._take(judge_nodes.take(self._view, agent, message, self._talk))
            case wire.StackTrace() | wire.Timing() | wire.InjectRefused():
                if (known := self._speaker(route, message.job, message.slot)) is not None:
                    self._of_rank(known, message)

    # ------------------------------------------------------------ who speaks
    def _of_agent(self, route: Route, job: str, element: int, name: str) -> AgentView | None:
        """The agent that this is, if the message comes over its own connection; its lease begins again."""
        agent = self._view.live.agent(job, element)
        if agent is None or agent.route != route or agent.agent != name or job not in self._view.state.jobs:
            return None
        self._view.live.heard(agent, self._view.now)
        return agent

    def _speaker(self, route: Route, name: str, slot: int) -> JobState | None:
        """The job, if the message comes from the agent that has this slot."""
        job = self._view.state.jobs.get(name)
        agent = self._view.live.agent(name, job.element(slot)) if job else None
        if agent is None or agent.route != route or slot not in agent.slots:
            return None
        self._view.live.heard(agent, self._view.now)
        return job

    # ------------------------------------------------------------ agents
    def _register(self, route: Route, message: wire.Register) -> None:
        refused = registration.answer(self._view, message)
        if refused is not None:
            self._take(Outcome(sends=[Send(route, refused)]))
            return
        if registration.begins(self._view, message):
            self._take(registration.begin(message))
        job = self._view.state.jobs[message.job]
        known = job.agents.get(message.element)
        if known is None or known.agent != message.agent:
            self._view.live.remove(message.job, message.element)
        self._take(registration.join(job, message))
        live, now = self._view.live, self._view.now
        agent = live.agent(message.job, message.element)
        if agent is None:
            slots = list(message.slots)
            agent = AgentView(message.job, message.element, message.agent, message.node, route, slots, now)
            agent.last_registered = now
            live.add(agent)
            live.jobs[message.job].last_arrival = now
        agent.route, agent.expired = route, False
        agent.number = 0  # whatever it sends from now on is newer
        agent.repeated.clear()
        live.heard(agent, now)
        mine = live.jobs[message.job]
        mine.touched.add(message.element)
        mine.changed.update(message.slots)
        self._take(Outcome(sends=[Send(route, self._welcome(job))]))

    def _welcome(self, job: JobState) -> wire.Welcome:
        config = self._view.config
        large = job.settings.max_nodes > LARGE_JOB
        return wire.Welcome(
            heartbeat_period=config.heartbeat_period,
            controller="unicrond",
            metrics_seconds=config.metrics_seconds,
            metrics_directory=config.metrics_directory,
            progress_seconds=max(PROGRESS_SECONDS, config.heartbeat_period) if large else PROGRESS_SECONDS,
        )

    def _status(self, route: Route, message: wire.Status) -> None:
        job, agent = self._view.state.jobs.get(message.job), self._view.live.agent(message.job, message.element)
        if job is not None and job.ended:
            end = wire.End(code=job.ended.code, reason=job.ended.reason)
            self._take(Outcome(sends=[Send(route, end)]))
            return
        if job is None or agent is None or agent.agent != message.agent:
            self._take(Outcome(sends=[Send(route, self._unknown(job, message))]))
            return
        was_expired, agent.route, agent.expired = agent.expired, route, False
        changed = agent.take(message, self._view.now)
        self._view.live.heard(agent, self._view.now)
        if message.answer:
            self._take(Outcome(sends=[Send(route, wire.Pong(number=message.number))]))
        view = self._view.job(job)
        if was_expired:
            back = Outcome()
            back.record(job, records.AgentBack(element=agent.element, agent=agent.agent, node=agent.node))
            self._take(back)
            changed = list(agent.slots)
        if message.leaving:
            self._view.live.silenced(agent)
            changed = list(agent.slots)
            if (left := members.leaving(self._view, view, agent)) is not None:
                self._take(Outcome(findings=[left]))
        if changed or was_expired:
            view.live.changed.update(changed)
            view.notice_agent(agent)
            if agent.fresh:
                self._take(registration.ready_ranks(job, agent, changed))
        elif job.phase is Phase.BREAKING:
            for slot in agent.slots:  # rest is also shown by having nothing new to say
                if slot in view.live.awaited:
                    view.notice(slot, self._view.now)

    def _unknown(self, job: JobState | None, message: wire.Status) -> wire.Refused:
        replaced = job is not None and message.agent in job.superseded
        if replaced:
            reason = f"another agent has taken element {message.element} of job {message.job}"
            return wire.Refused(reason=reason, final=True)
        return wire.Refused(reason="register first")

    # ------------------------------------------------------------ ranks
    def _steps(self, route: Route, message: wire.Steps) -> None:
        agent = self._of_agent(route, message.job, message.element, message.agent)
        job = self._view.state.jobs.get(message.job)
        if agent is None or job is None or job.over:
            return
        whole, agent.steps = message.number == agent.steps + 1, message.number
        message.ranks = [rank for rank in message.ranks if rank.slot in agent.slots]
        if message.ranks:
            self._take(self._desk(job).take_steps(self._view.job(job), message, self._view.now, whole))

    def _of_rank(self, job: JobState, message: wire.StackTrace | wire.Timing | wire.InjectRefused) -> None:
        out = Outcome()
        if isinstance(message, wire.Timing):
            if not job.over:
                self._take(self._desk(job).take_timing(job, message))
            return
        if isinstance(message, wire.StackTrace):
            how = f"{message.how}, state {message.state}"
            said = how if message.text else f"no stack trace; process state {message.state or 'unknown'}"
            record = records.Stacks(
                slot=message.slot,
                incarnation=message.incarnation,
                node=job.node(message.slot),
                how=message.how,
                state=message.state[:200],
                text=message.text[:16000],
                reason=f"slot {message.slot}: {said[:300]}",
            )
            out.record(job, record)
            if not job.over:
                self._desk(job).watch.asked.discard(message.slot)
        else:
            told = f"{message.fault} was not injected into slot {message.slot}: {message.reason[:400]}"
            refused = records.InjectRefused(slot=message.slot, fault=message.fault, reason=told)
            out.record(job, refused, 0)
        self._take(out)

    # ------------------------------------------------------------ hints
    def hint(self, hint: wire.Hint) -> Outcome:
        """A datagram of the plugin. A living agent answers the question that it leads to."""
        agent = self._view.live.agent(hint.job, hint.element)
        if hint.kind != "task_exit" or agent is None:
            return Outcome()
        agent.task_status = hint.status
        return self.suspect(agent)

    def suspect(self, agent: AgentView) -> Outcome:
        """Slurm says that the agent has ended: it is asked, and has `hint_grace` to answer."""
        out = Outcome()
        if agent.alive and agent.suspect_since is None:
            self._view.live.suspect(agent, self._view.now)
            out.send(agent, wire.Ping())
        return out
