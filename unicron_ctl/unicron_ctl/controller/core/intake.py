"""Takes in messages of agents: into the volatile knowledge, and into the log if they are news by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from unicron_ctl.controller.core.registrations import Registrations
from unicron_ctl.controller.failure_detector import network_partitions, probes
from unicron_ctl.controller.job import adoption
from unicron_ctl.controller.job.orders import ending
from unicron_ctl.controller.job.registration import Request, progress_seconds, released, replaced_by_another
from unicron_ctl.controller.job.runtime import JobRuntime, ready_ranks
from unicron_ctl.controller.judge import node_failures as judge_nodes
from unicron_ctl.controller.model.agent_view import AgentView, Route
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import AgentRecord, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.quotas import OF_NODE_EVENTS, LogQuota
from unicron_ctl.controller.model.view import Outcome, Send, View
from unicron_ctl.controller.sense import fencing
from unicron_ctl.controller.sense.sensors import When
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import datagrams, structs, wire
from unicron_ctl.shared.system.throttle import Throttle

WHOLE_SECONDS = 0.5  # between two questions to one agent for a whole status
HINT_SECONDS = 0.5  # between two questions to one agent because of hints
# Questions to agents, with early listings of Slurm, because of all hints together, a second and at once: anybody can
# send a hint, and each question goes to witnesses, too.
HINTS = 0.5, 4.0
AgentMessage = wire.Metrics | wire.ReachAnswer | wire.RecallAnswer | wire.NodeEvent


def tables_of(tables: list[structs.StepTable], reports: list[structs.StepReport]) -> list[structs.StepTable]:
    """Returns the steps of a message as tables; agents of release 0.2 send reports."""
    made = (structs.step_table(r.generation, r.iteration, r.total, r.at, r.ranks, r.number) for r in reports)
    return [*tables, *made]


class Intake:
    """The core's part that reads messages."""

    def __init__(
        self,
        view: View,
        runtime: Callable[[JobState], JobRuntime],
        node_events: judge_nodes.NodeEventQueue,
        carry_out: Callable[[Outcome], bool],  # the core's
        run_sensors: Callable[[JobState, When], None],  # the turn's
        written: LogQuota,
    ) -> None:
        self._view, self._runtime, self._node_events, self._carry_out = view, runtime, node_events, carry_out
        self._run_sensors, self._written = run_sensors, written
        self.registrations = Registrations(view, carry_out, self._on_replaced, written)
        self._hints = Throttle(*HINTS)

    def receive(self, route: Route, message: wire.Message, key: str, asker: Asker) -> bool:
        """Takes in a message that passed the checks at the edge. key: the CURVE key of its connection. Returns whether
        it may call for a decision before the next tick."""
        match message:
            case wire.Going():
                return self._on_going(route, message, key)
            case wire.Register():
                self.registrations.on_register(Request(route, message, key, asker, self._view.now))
            case wire.Status():
                self._on_status(route, message, key)
            case wire.Steps():
                self._on_steps(route, message, key)
            case wire.Metrics() | wire.ReachAnswer() | wire.RecallAnswer() | wire.NodeEvent():
                if (agent := self._of_agent(route, key, message)) is not None:
                    self._on_agent_message(self._view.job(self._view.state.jobs[message.job]), agent, message)
            case wire.StackTrace() | wire.Timing() | wire.InjectRefused():
                if (job := self._speaker(route, key, message.job, message.slot)) is not None:
                    self._on_rank_message(job, message)
        return True

    # ------------------------------------------------------------ the sender
    def knows(self, message: wire.Message, key: str) -> bool:
        """Whether the message comes from an agent that was accepted, by its key."""
        job = self._view.state.jobs.get(getattr(message, "job", ""))
        if job is None:
            return False
        slot, element = getattr(message, "slot", None), getattr(message, "element", -1)
        known = job.agents.get(element if slot is None else job.element(slot))
        return known is not None and known.key == key and getattr(message, "agent", known.agent) == known.agent

    def _of_agent(
        self,
        route: Route,
        key: str,
        message: wire.Steps | AgentMessage,
    ) -> AgentView | None:
        """Returns the agent that sent the message, if it is authentic; its lease begins again."""
        agent = self._view.live.agent(message.job, message.element)
        if agent is None or agent.agent != message.agent or message.job not in self._view.state.jobs:
            return None
        return agent if self._heard(agent, route, key) else None

    def _speaker(self, route: Route, key: str, name: str, slot: int) -> JobState | None:
        """Returns the job, if the message comes from the agent that has this slot."""
        job = self._view.state.jobs.get(name)
        agent = self._view.live.agent(name, job.element(slot)) if job else None
        if agent is None or slot not in agent.slots or (not key and agent.route != route):
            return None
        return job if self._heard(agent, route, key) else None

    def _heard(self, agent: AgentView, route: Route, key: str) -> bool:
        """Whether this agent sent the message, by its key, over any connection. Without encryption its id suffices."""
        if agent.key != key:
            return False
        agent.route = route
        self._view.live.note_word(agent, self._view.now)
        return True

    # ------------------------------------------------------------ agents
    def _on_replaced(self, job: JobState, before: AgentRecord) -> None:
        self._runtime(job).sensors.before = before
        self._run_sensors(job, When.REGISTERED)
        missed = self._view.job(job).missed
        for slot in [slot for slot, (agent, _) in missed.items() if agent == before.agent]:
            del missed[slot]

    def _sender(
        self, route: Route, message: wire.Status | wire.Going, key: str
    ) -> tuple[JobState, AgentView] | tuple[None, None]:
        """Returns the job and the agent if the agent is taken in; else it gets the reason."""
        state, agent = self._view.state.jobs.get(message.job), self._view.live.agent(message.job, message.element)
        refusal = self._refusal_of(state, message, key)
        if refusal is None and self.registrations.waits((message.job, message.element, message.agent)):
            return None, None
        if refusal is None and (state is None or agent is None or agent.agent != message.agent or agent.key != key):
            replaced = state is not None and message.agent in state.superseded
            first = wire.Refusal(reason="register first")
            refusal = replaced_by_another(message.job, message.element) if replaced else first
        if refusal is not None or state is None or agent is None:
            self._carry_out(Outcome(sends=[Send(route, refusal)] if refusal is not None else []))
            return None, None
        return state, agent

    def _on_going(self, route: Route, message: wire.Going, key: str) -> bool:
        """Takes in a brief status. Returns whether it may call for a decision."""
        state, agent = self._sender(route, message, key)
        if state is None or agent is None:
            return True
        if message.tables and not state.over:
            self._take_steps(state, agent, message.tables)
        was_expired, agent.route, agent.expired = agent.expired, route, False
        changed = agent.on_going(message, self._view.now)
        job, stands = self._view.job(state), message.progress[0].states
        usual = state.phase is Phase.RUNNING and not was_expired and not stands
        self._view.live.note_word(agent, self._view.now)
        if changed is None:
            if self._view.now - agent.repeated.get("whole", -WHOLE_SECONDS) >= WHOLE_SECONDS:
                agent.repeated["whole"] = self._view.now
                self._carry_out(Outcome(sends=[Send(route, wire.Ping())]))
            changed = []
        if was_expired:
            self._revive_agent(job, agent)
            changed = list(agent.slots)
        fencing.on_word(self._view, job, agent)
        if usual:
            job.going.add(agent.element)
        elif stands:
            self._note_changes(job, agent, changed)
        else:
            job.changed.update(changed)
        return not usual

    def _on_status(self, route: Route, message: wire.Status, key: str) -> None:
        state, agent = self._sender(route, message, key)
        if state is None or agent is None:
            return
        if (message.tables or message.steps) and not state.over:
            self._take_steps(state, agent, tables_of(message.tables, message.steps))
        was_expired, agent.route, agent.expired = agent.expired, route, False
        changed = agent.on_status(message, self._view.now)
        self._view.live.note_word(agent, self._view.now)
        if message.answer and not 0 < message.begins <= state.broken:  # a world that is over must not begin
            self._carry_out(Outcome(sends=[Send(route, wire.Pong(number=message.number))]))
        job = self._view.job(state)
        if was_expired:
            self._revive_agent(job, agent)
        fencing.on_word(self._view, job, agent)
        if was_expired or message.leaving:
            changed = list(agent.slots)
        if agent.status.cold:
            self._carry_out(self._runtime(state).note_cold_starts(state, agent))
        if message.noticed and not message.leaving:
            self._note_notice(job, agent)
        if message.leaving:
            self._view.live.drop_lease(agent)
            self._runtime(state).sensors.speaker = agent
            self._run_sensors(state, When.LEAVING)
        self._note_changes(job, agent, changed)

    def _on_agent_message(self, job: JobView, agent: AgentView, message: AgentMessage) -> None:
        view, state = self._view, job.state
        match message:
            case wire.Metrics():
                if view.config.metrics_seconds and not state.over:
                    self._runtime(state).sensors.peers.on_metrics(agent, message, view.now)
            case wire.ReachAnswer():
                probes.on_reached(view.suspicions, agent, state.label(agent.element), message)
                network_partitions.on_reached(job.survey, agent, message)
            case wire.RecallAnswer():
                adoption.take_in_plan(job, agent, message)
            case wire.NodeEvent():
                room = self._written.allows(message.job, state.owner, view.now, OF_NODE_EVENTS)
                self._carry_out(judge_nodes.record_node_event(view, agent, message, self._node_events, room))

    def _note_notice(self, job: JobView, agent: AgentView) -> None:
        """Records that the agent's element will end, so that it leaves at the next boundary."""
        job.touched.add(agent.element)
        if job.state.over or job.state.noticed.get(agent.element) == agent.agent:
            return
        job.touched.update(job.state.noticed)  # it may be the last one without a notice
        agent.noticed_at, agent.shown = self._view.now, "" if self._view.slurm.used else "unknown"
        reason = f"element {agent.element} on {agent.node} is to end: its ranks leave at the next boundary"
        out = Outcome(hurry=True)
        out.record(job.state, records.EndNotice(element=agent.element, agent=agent.agent, reason=reason))
        self._carry_out(out)

    def _refusal_of(self, state: JobState | None, message: wire.Status | wire.Going, key: str) -> wire.Message | None:
        """Returns the answer to the last agent of an element whose job has ended or is set aside; None if its status
        counts."""
        record = state.agents.get(message.element) if state is not None else None
        if state is None or record is None or record.agent != message.agent or record.key != key:
            return None
        if state.ended:
            return ending(state.ended)
        if not released(state):
            return None
        return wire.Refusal(reason=state.set_aside, final=True, alone=state.sweep)

    def _revive_agent(self, job: JobView, agent: AgentView) -> None:
        """Takes in that an agent whose lease had run out speaks again."""
        back = Outcome()
        back.record(job.state, records.AgentBack(element=agent.element, agent=agent.agent, node=agent.node))
        self._carry_out(back)
        self._carry_out(adoption.reinstate(job, agent))
        agent.progress.update(dict.fromkeys(agent.slots, self._view.now))  # it could not report before

    def _note_changes(self, job: JobView, agent: AgentView, changed: Sequence[int]) -> None:
        """Puts the changes of a status on the lists for sensors and orders."""
        if adoption.unknown(job.state, agent):
            job.ahead.add(agent.element)
        if agent.status.agreed is not None:
            job.touched.add(agent.element)
        if changed:
            if agent.common is not None and len(changed) == len(agent.slots):
                job.together.add(agent.element)
            else:
                job.changed.update(changed)
            job.notice_agent(agent)
            if agent.fresh and not job.state.over:
                job.note_shape(agent, changed)
                self._carry_out(ready_ranks(job.state, agent, changed))
        elif job.state.phase is Phase.BREAKING:
            for slot in agent.slots:  # an unchanged status also shows rest
                if slot in job.awaited:
                    job.notice(slot, self._view.now)

    # ------------------------------------------------------------ ranks
    def _on_steps(self, route: Route, message: wire.Steps, key: str) -> None:
        agent = self._of_agent(route, key, message)
        job = self._view.state.jobs.get(message.job)
        if agent is not None and job is not None and not job.over:
            self._take_steps(job, agent, tables_of(message.tables, message.reports))

    def _take_steps(self, state: JobState, agent: AgentView, tables: Iterable[structs.StepTable]) -> None:
        job, runtime, now = self._view.job(state), self._runtime(state), self._view.now
        held = structs.hold_seconds(self._view.config.heartbeat_period, progress_seconds(self._view, state))
        for report in tables:
            whole, agent.steps = report.number == agent.steps + 1, report.number
            if report.slots != agent.slots and not set(report.slots) <= set(agent.slots):
                report = report.only(agent.slots)
            if report.generation > state.generation:  # its other members are not known yet
                runtime.unheard_until = max(runtime.unheard_until, report.iteration)
                continue
            if state.plan is not None and report.generation == state.plan.generation:
                job.stepped.note_iteration(report.iteration, now, held)
            if report.slots and (found := runtime.on_steps(job, report, now, whole)):
                self._carry_out(found)

    def _on_rank_message(self, job: JobState, message: wire.StackTrace | wire.Timing | wire.InjectRefused) -> None:
        """Records the answer to a question, once; other messages are ignored."""
        if job.over:
            return
        out, runtime = Outcome(), self._runtime(job)
        if isinstance(message, wire.Timing):
            self._carry_out(runtime.on_timing(job, message))
            return
        asked = runtime.sensors.iterations.stacks_due if isinstance(message, wire.StackTrace) else runtime.injected
        if message.slot not in asked:
            return
        asked.discard(message.slot)
        if isinstance(message, wire.StackTrace):
            how = f"{message.how}, state {message.state}"
            how = how if message.text else f"no stack trace; process state {message.state or 'unknown'}"
            record = records.Stacks(
                slot=message.slot,
                incarnation=message.incarnation,
                node=job.node(message.slot),
                how=message.how,
                state=message.state[:200],
                text=message.text[:16000],
                reason=f"slot {message.slot}: {how[:300]}",
            )
            out.record(job, record)
            runtime.sensors.iterations.asked.discard(message.slot)
        else:
            reason = f"{message.fault} was not injected into slot {message.slot}: {message.reason[:400]}"
            out.record(job, records.InjectRefused(slot=message.slot, fault=message.fault, reason=reason), 0)
        self._carry_out(out)

    # ------------------------------------------------------------ hints
    def on_hint(self, hint: datagrams.Hint) -> Outcome:
        """Takes in a datagram of the plugin, which anybody may have sent: the agent and Slurm are asked, and no lease
        is shortened."""
        out, now = Outcome(), self._view.now
        agent = self._agent_of(hint)
        if hint.kind != "task_exit" or agent is None:
            return out
        agent.task_status = hint.status
        if not agent.alive:
            out.hurry = hint.job in self._view.state.jobs and self._view.state.jobs[hint.job].gives_back(agent.element)
            return out
        if now - agent.repeated.get("hint", -HINT_SECONDS) >= HINT_SECONDS and self._hints.allows("", now):
            agent.repeated["hint"] = now
            out.hurry = True
            out.suspects.append(agent)
        return out

    def _agent_of(self, hint: datagrams.Hint) -> AgentView | None:
        """Returns the agent of the task. A datagram has Slurm's own number of the element, and the node."""
        job, live = self._view.state.jobs.get(hint.job), self._view.live
        if job is None:
            return None
        numbers = range(job.settings.max_nodes) if job.settings.allocation else job.nodes_of_block(hint.element)
        agents = [agent for number in numbers if (agent := live.agent(hint.job, number)) is not None]
        return next((agent for agent in agents if len(numbers) == 1 or agent.node == hint.node), None)
