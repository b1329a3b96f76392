"""The core takes in all inputs, asks sensors and deciders, and is the only place that appends and folds records, and
sends messages and requests.

    input -> volatile knowledge (`model.view.Live`) -> sensors -> findings -> judge -> records
          -> the job's next event -> its transition -> records -> orders to its agents

The server stores `events` before it sends `outbox` or starts `requests`, so that a restart knows of everything that was
done. An error in the handling of one job sets aside that job only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unicron_ctl.controller.core.intake import Intake
from unicron_ctl.controller.core.job_containment import COMPLAIN_AGAIN, JobContainment
from unicron_ctl.controller.core.turn import Turns
from unicron_ctl.controller.failure_detector import ending_nodes, leases, network_partitions, probes, self_suspicion
from unicron_ctl.controller.job import adoption, registration
from unicron_ctl.controller.job.modes import mode_of
from unicron_ctl.controller.job.runtime import JobRuntime
from unicron_ctl.controller.judge import node_failures as judge_nodes
from unicron_ctl.controller.judge.judge import judge
from unicron_ctl.controller.model import allocation, permission
from unicron_ctl.controller.model.agent_view import Route
from unicron_ctl.controller.model.asker import EVERYBODY, Asker
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.finding import Finding, What
from unicron_ctl.controller.model.fold import fold
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.quotas import LogQuota
from unicron_ctl.controller.model.requests import Action, Knock, Probe, Run, TestPairs
from unicron_ctl.controller.model.view import Listing, Live, Outcome, Send, SlurmView, View
from unicron_ctl.controller.nodes import isolation, pair_tests, readmission
from unicron_ctl.controller.plan import reconcile, slurm_actions
from unicron_ctl.controller.plan.inputs import around, inputs, replan, why_fixed
from unicron_ctl.controller.sense import iterations, members, outliers
from unicron_ctl.controller.sense.sensors import CLUSTER_SENSORS, ClusterSensor, When
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.log.savings import PLAN
from unicron_ctl.shared.protocol import datagrams, wire
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.slurm.pairs import Findings
from unicron_ctl.shared.slurm.slurm_client import UNSAID, ElementInfo, NodeInfo, Site
from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.text_budget import Budget

STALL_SECONDS = 0.5  # a tick later than this shows that this process stood still, not the agents
ATTENTION_SECONDS = 5.0  # between two checks for what needs an admin
PHASE_RECORDS = frozenset(
    (
        records.Break,
        records.PlanMade,
        records.GenerationAdopted,
        records.NumberUsed,
        records.MembersReinstated,
        records.Offer,
        records.OfferWithdrawn,
        records.GenerationEntered,
        records.Reform,
        records.JobEnded,
        records.JobRegistered,
    )
)


@dataclass
class Core:
    """All jobs, and the only door to the log."""

    config: ControllerConfig
    state: ClusterState
    started_at: float
    classifier: Classifier = field(default_factory=Classifier)
    has_slurm: bool = False

    def __post_init__(self) -> None:
        self.budget = Budget()
        self._charged: str | None = None  # the job that the view's classifier charges
        self.events: list[Event] = []
        self.outbox: list[Send] = []
        self.requests: list[Any] = []
        self.last_tick = self.started_at
        self.view = View(
            self.config,
            self.classifier,
            self.state,
            Live(),
            SlurmView(self.has_slurm),
            self.started_at,
            self.started_at,
        )
        self.runtimes: dict[str, JobRuntime] = {}
        self.slurm = slurm_actions.Desk()
        self.node_events = judge_nodes.NodeEventQueue(waiting=judge_nodes.undecided_events(self.state.nodes))
        self._looked_at = self.started_at
        self._observed: set[tuple[str, str]] = set()  # (job, action) that the admin does not allow: recorded once
        self.written = LogQuota()
        self._containment = JobContainment(self.view, self.append, self.written)
        self._dirty: set[str] = set()
        self._findings: deque[Finding] = deque()
        self._judging = False
        self.turns = Turns(self.view, self.runtime, self.carry_out, self._send)
        self.intake = Intake(
            self.view, self.runtime, self.node_events, self.carry_out, self.turns.run_sensors, self.written
        )
        for job in self.state.jobs.values():
            if not job.over:
                self.view.job(job).begin_phase()

    @property
    def now(self) -> float:
        """Seconds since the epoch; it never goes backwards within one process."""
        return self.view.now

    @now.setter
    def now(self, value: float) -> None:
        self.view.now = max(self.view.now, value)

    @property
    def busy(self) -> bool:
        """A job is being healed, or formed."""
        return any(job.phase in (Phase.BREAKING, Phase.ENTERING) for job in self.state.jobs.values() if not job.over)

    def configure(self, config: ControllerConfig, classifier: Classifier) -> None:
        """Takes a new configuration."""
        self.config = self.view.config = config
        self.classifier = self.view.classifier = classifier
        self._charged = None
        if not config.metrics_seconds:  # peers are no longer compared, so that none stands out
            for runtime in self.runtimes.values():
                runtime.sensors.peers = outliers.JobPeers()

    def runtime(self, job: JobState) -> JobRuntime:
        """Returns the volatile knowledge about the job."""
        if job.job not in self.runtimes:
            self.runtimes[job.job] = JobRuntime.for_job(self.view.job(job), self.config)
        return self.runtimes[job.job]

    # ------------------------------------------------------------ the door
    def append(self, job: str, generation: int, record: Record) -> Event:
        """Records one decision and folds it into the state."""
        event = Event(self.state.last_event + 1, self.view.now, job, generation, record)
        if len(event.payload) > records.REASON and (shorter := records.with_short_texts(record)) is not record:
            record, event = shorter, Event(event.id, event.time, job, generation, shorter)
        size = len(event.payload)  # raises for a record that the log cannot hold, before it is folded
        fold(self.state, event)
        self.events.append(event)
        self._containment.charge(event, size)
        if type(record) in PHASE_RECORDS:
            self._phase_changed(job, record)
        elif isinstance(record, records.RankStart):
            state = self.state.jobs[job]
            view, element = self.view.job(state), state.element(record.slot)
            view.touched.add(element)
            view.restarts.add(element)
            if (agent := view.agents.get(element)) is not None:
                agent.can_enter = None
        elif isinstance(record, records.NodeEvent):
            self.node_events.note(event)
        return event

    def carry_out(self, outcome: Outcome) -> bool:
        """Carries out a decider's outcome. Returns False if it is empty."""
        if outcome.hurry:
            self.slurm.hurry(self.now)
        if not outcome:
            return False
        failure: int | None = None
        for job, generation, record in outcome.records:
            if isinstance(record, records.ActionObserved) and record.action != PLAN:
                if (job, record.would) in self._observed:
                    continue
                self._observed.add((job, record.would))
            if getattr(record, "failure", 0) == records.THIS_FAILURE:
                assert failure is not None, f"{record.kind} follows no failure"
                record = msgspec.structs.replace(record, failure=failure)
            number = self.append(job, generation, record).id
            failure = number if isinstance(record, records.FailureDetected) else failure
        self.outbox += outcome.sends
        for agent in outcome.suspects:
            if agent.alive and agent.suspect_since is None:
                self.view.live.suspect(agent, self.now)
                self._send(Send(agent.route, wire.Ping()))
        for request in outcome.requests:
            self._request(request)
        for finding in outcome.findings:
            self.judge(finding)
        return True

    def judge(self, finding: Finding) -> None:
        """Makes a failure of a finding, if it is one. Findings that result from it are judged after it."""
        self._findings.append(finding)
        if self._judging:
            return
        self._judging = True
        try:
            while self._findings:
                finding = self._findings.popleft()
                self._containment.attempt(finding.job, f"a finding ({finding.what})", self._judge, finding)
        finally:
            self._judging = False

    def _judge(self, finding: Finding) -> None:
        recorded = self.state.last_event
        job = self.state.jobs.get(finding.job)
        self._read_for(finding.job)
        self.carry_out(self._with_peers(judge(self.view, finding)))
        if job is None or job.over or self.state.last_event == recorded:
            return
        self._dirty.add(finding.job)
        if finding.what in (What.HANG, What.COLLECTIVE):
            live = self.view.job(job)
            self.carry_out(network_partitions.start_survey(self.view, live, live.survey, finding.slots))
        if finding.what is What.HANG and not finding.seen:
            iterations.on_hang_recorded(self.runtime(job).sensors.iterations, finding, job.failures[-1].id)

    def _with_peers(self, outcome: Outcome) -> Outcome:
        """Adds earlier oddities of a failure's node to its reason."""
        for index, (job, generation, record) in enumerate(outcome.records):
            if isinstance(record, records.FailureDetected) and record.node:
                peers = (runtime.sensors.peers for runtime in self.runtimes.values())
                if evidence := outliers.evidence(peers, record.node, self.now):
                    outcome.records[index] = job, generation, records.with_reason(record, record.reason + evidence)
        return outcome

    def _send(self, send: Send) -> None:
        self.outbox.append(send)

    def _request(self, request: Any) -> None:
        if isinstance(request, Run):
            for job, generation, record in slurm_actions.record_intents(self.view, request).records:
                self.append(job, generation, record)
            self.slurm.under_way.update(action.key for action in request.actions)
            self.slurm.busy = self.slurm.busy or not request.urgent
        self.requests.append(request)

    def _phase_changed(self, name: str, record: Record) -> None:
        job = self.state.jobs[name]
        if isinstance(record, records.JobRegistered):
            self.forget(name)
        elif isinstance(record, records.JobEnded):
            self.runtimes.pop(name, None)
            self._observed = {key for key in self._observed if key[0] != name}
            for gone in self.view.live.jobs.keys() - self.state.jobs.keys():
                self.forget(gone)
        if not job.over:
            self.runtime(job).on_phase_changed(record)
        self.turns.begun.add(name)
        self._dirty.add(name)

    def forget(self, job: str) -> None:
        """Drops the volatile knowledge about a job that is over."""
        self.view.live.forget(job)
        self.view.slurm.expected.pop(job, None)
        self.runtimes.pop(job, None)

    # ------------------------------------------------------------ inputs
    def receive(self, route: Route, message: wire.Message, now: float, key: str = "", asker: Asker = EVERYBODY) -> None:
        """Takes in a message of an agent that passed the checks at the edge; call `advance_jobs` before sending.

        key: the CURVE public key of its connection. asker: of a registration, the user of its credential.
        """
        self._notice_time(now)
        if self.view.alone and self.intake.knows(message, key):
            self._heard_again()
        name: str = getattr(message, "job", "")
        recorded, news = self.state.last_event, True
        self._read_for(name)
        try:
            news = self.intake.receive(route, message, key, asker)
        except Exception as error:
            self._containment.set_aside(name, repr(message), error)
        if self.state.last_event > recorded:
            self._containment.enforce_quota(name)
            news = True
        if news and name in self.state.jobs:
            self._dirty.add(name)

    def hint(self, hint: datagrams.Hint, now: float) -> None:
        """Takes in a datagram of the plugin, which is not trusted alone."""
        self.now = now
        self._containment.attempt(hint.job, "a hint", lambda: self.carry_out(self.intake.on_hint(hint)))

    def advance_jobs(self) -> None:
        """Advances every job with news as far as it can go now.

        A Break and a plan go out first; then `pending` is set, because their consequences remain to be computed.
        """
        self._dirty |= self.turns.later
        self.turns.later.clear()
        while self._dirty:
            name = min(self._dirty)
            self._dirty.discard(name)
            job = self.state.jobs.get(name)
            if job is not None and name not in self.turns.later:
                self._containment.attempt(name, f"its state ({job.phase})", self.turns.advance, job)
                self._containment.enforce_quota(name)
        self.budget.renew()

    def _read_for(self, job: str) -> None:
        """Charges the classification of texts from now on to this job."""
        if job != self._charged:
            self._charged, self.view.classifier = job, self.classifier.within(self.budget, job)

    @property
    def pending(self) -> bool:
        """`advance_jobs` should be called again once the decisions have gone out."""
        return bool(self.turns.later)

    def tick(self, now: float) -> None:
        """Handles the passing of time: leases, time-outs, repeated orders, Slurm's turn."""
        self._notice_time(now)
        self.last_tick = now
        self._containment.attempt("", "agents that wait for Slurm's word", self.intake.registrations.on_time)
        self._containment.attempt("", "what nodes said", self._settle_node_events)
        for sensor in CLUSTER_SENSORS:
            self._containment.attempt("", sensor.name, self._sense_cluster, sensor)
        self._containment.attempt("", "nodes that were not taken", self._take_deferred)
        self._containment.attempt("", "what needs an admin", self._look_for_admins, now)
        if self.view.alone:
            self._containment.attempt("", "Slurm's turn", self._ask_slurm)
            return
        for job in list(self.state.jobs.values()):
            if not job.over:
                self._containment.attempt(job.job, "a tick", self._tick, job)
        self.advance_jobs()
        for job in list(self.state.jobs.values()):
            if not job.set_aside:
                self._containment.attempt(job.job, "its orders", self.turns.repeat_orders, job)
        self._containment.attempt("", "Slurm's turn", self._ask_slurm)

    def _look_for_admins(self, now: float) -> None:
        if now - self._looked_at >= ATTENTION_SECONDS:
            self._looked_at = now
            self.carry_out(isolation.admin_news(self.view))

    def _ask_slurm(self) -> None:
        self.carry_out(self.slurm.tick(self.view, self.intake.registrations.waiting_jobs()))

    def _settle_node_events(self) -> None:
        for outcome in judge_nodes.settle_node_events(self.view, self.node_events):
            self.carry_out(outcome)

    def _notice_time(self, now: float) -> None:
        """Excuses all agents after a stall: they waited for this process, and none of them was silent."""
        late = now - self.last_tick
        self.now = now
        if late <= STALL_SECONDS:
            return
        self.last_tick = now
        self._excuse(late)

    def _excuse(self, seconds: float) -> None:
        """Adds the seconds to all deadlines: only this process, or its network, was late."""
        self.view.live.shift(seconds)
        self.view.suspicions.shift(seconds)
        for runtime in self.runtimes.values():
            runtime.sensors.iterations.shift(seconds)
        self.view.started_at += seconds

    def _heard_again(self) -> None:
        """Ends the controller's doubt about itself: an agent is heard after none was."""
        since = self.view.suspicions.alone_since
        if since is not None:
            self.carry_out(self_suspicion.end_alone(self.view, since))
            self._excuse(self.now - since)
            self.view.live.renew(self.now)
            self.view.suspicions.renew_ending(self.now)

    def _sense_cluster(self, sensor: ClusterSensor) -> None:
        for agent in leases.late_agents(self.view):
            if self.view.unread(agent.route):  # it is not silent, this controller is behind
                self.view.live.note_word(agent, self.now)
        outcome = sensor.sense(self.view)
        for finding in outcome.findings:
            self._fell_silent(finding)
        self.carry_out(outcome)

    def _take_deferred(self) -> None:
        if self.state.deferred:
            self.carry_out(isolation.take_deferred(self.view))

    def _fell_silent(self, finding: Finding) -> None:
        """Marks an agent as judged: its next message is not waited for."""
        agent, live = self.view.live.agent(finding.job, finding.element), self.view.live.jobs.get(finding.job)
        if agent is None or live is None:
            return
        agent.expired = True
        self.view.live.drop_lease(agent)
        live.changed.update(agent.slots)
        live.ready.discard(agent.element)

    def _tick(self, state: JobState) -> None:
        job, runtime = self.view.job(state), self.runtime(state)
        if job.ahead:
            self.turns.advance(state)
            return
        if job.going and job.state.job not in self.turns.begun:
            members.take_in_progress(job, runtime.sensors.iterations.standing)
        self.turns.run_sensors(state, When.TICK)
        self.carry_out(mode_of(state).report(self.view, job, runtime.newcomers))
        self.turns.advance(state)
        self.carry_out(adoption.report_awaited(self.view, job, runtime))

    # ------------------------------------------------------------ results of slow work
    def on_probe(self, probe: Probe, place: int, answer: Reach | None) -> None:
        """Takes in the answer of one of the addresses; the next tick judges it."""
        probes.on_probe(self.view.suspicions, probe, place, answer)

    def on_slurm_error(self, message: str) -> None:
        """Takes in that Slurm did not answer the question."""
        self.slurm.on_listing(self.now, self.config.slurm_poll_seconds, self.now - self.slurm.asked_at, failed=True)
        if not self.view.slurm.error:
            self.view.slurm.error_since = self.now
        other = message != self.view.slurm.error and self.now - self.view.slurm.error_logged >= COMPLAIN_AGAIN
        if other or not self.view.slurm.error:
            self.append("", 0, records.SlurmFailed(reason=message))
            self.view.slurm.error_logged = self.now
        self.view.slurm.error = message

    def on_listing(
        self, nodes: Iterable[NodeInfo], elements: Iterable[ElementInfo], site: Site = UNSAID, took: float = 0.0
    ) -> None:
        """Takes in a new listing. took: seconds that Slurm's programs needed for it."""
        self.view.slurm.private, self.view.slurm.domains = site.private, site.domains
        self.view.slurm.kill_wait, self.view.slurm.grace = site.kill_wait, site.grace
        self.view.slurm.shrinks = site.shrinks
        self.slurm.on_listing(self.now, self.config.slurm_poll_seconds, took)
        if self.view.slurm.error:
            self.append("", 0, records.SlurmBack(reason="Slurm answers again"))
            self.view.slurm.error = ""
        rows = list(elements)
        listed = list(allocation.by_node(rows, self.state.jobs))
        listing = self.view.slurm.seen = Listing(self.slurm.asked_at, list(nodes), listed, rows)
        attempt = self._containment.attempt
        attempt("", "agents that wait for Slurm's word", self.intake.registrations.on_listing)
        for job in self.view.managed_jobs():
            attempt(job.job, "what Slurm says of it", self._take_in_job, listing, job)
        if not self.view.alone:
            attempt("", "planning", self._plan, listing)
        self.advance_jobs()

    def _take_in_job(self, listing: Listing, job: JobState) -> None:
        """Confirms the job's agents, and notes which of its elements Slurm preempts or ends."""
        self.carry_out(registration.confirm_agents(self.view, listing, job))
        if job.over:
            return
        for element in job.noticed:
            agent = self.view.live.agent(job.job, element)
            if agent is not None and agent.noticed_at is not None and listing.asked_at > agent.noticed_at:
                info = listing.of(job.job).get(element)
                agent.shown = info.state if info is not None else "gone"
                agent.restarts = info.restarts if info is not None else 0
                agent.grace = self.view.slurm.grace.get(info.partition, 0.0) if info is not None else 0.0
                self.view.job(job).touched.add(element)
        self.turns.run_sensors(job, When.LISTING)

    def _plan(self, listing: Listing) -> None:
        """Plans the nodes of all jobs, and asks Slurm for the actions that bring the plan about."""
        view, desk = self.view, self.slurm
        self.carry_out(reconcile.before_planning(view, desk, listing))
        managed = view.managed_jobs()
        there = around(view, listing, managed)
        for job in managed:  # one that cannot be planned for must not keep the others waiting
            self._containment.attempt(job.job, "its part in the plan", inputs, view, [job], there)
        # A job that has registered since Slurm was asked is still listed as a foreign one, without details.
        brief = {element.job for element in listing.elements if element.brief}
        jobs = registration.confirmed_jobs(view, view.managed_jobs())
        jobs = [job for job in jobs if listing.of(job.job) or job.job not in brief]
        kept = [job for job in jobs if why_fixed(view, job)]
        self.carry_out(reconcile.keeping(view, listing, kept))
        jobs = [job for job in jobs if job not in kept]
        planned = [job for job in jobs if permission.acts(view, job)]
        if planned:
            self.carry_out(replan(view, planned, desk.aheads))
            self.carry_out(reconcile.placing(view, desk, listing, planned))
        for job in planned:
            live = view.job(job)
            live.touched.update(element for element in live.agents if job.gives_back(element))
        self.carry_out(reconcile.watching(view, desk, listing, [job for job in jobs if job not in planned]))
        self.carry_out(pair_tests.next_test(view, desk.pair_tests, listing))
        self._dirty.update(job.job for job in (*jobs, *kept))

    def on_action(self, action: Action, error: str) -> None:
        """Takes in that Slurm carried out an action, or refused it."""
        self._containment.attempt(action.job, f"Slurm's answer to {action.label}", self._action_done, action, error)

    def on_pair_test(self, request: TestPairs, found: Findings | str) -> None:
        """Takes in the result of a pair test, or why there is none."""
        self.carry_out(pair_tests.on_findings(self.view, self.slurm.pair_tests, self.slurm.gate, request, found))

    def on_knock(self, request: Knock, answer: Reach | None) -> None:
        """Takes in the answer of a node's slurmd."""
        ending_nodes.on_knock(self.view, request, answer)
        if self.state.node(request.node).downed:
            readmission.on_knock(self.view, self.slurm.gate, request.node, answer is Reach.REACHED)

    def _action_done(self, action: Action, error: str) -> None:
        self.slurm.under_way.discard(action.key)
        self.carry_out(slurm_actions.on_outcome(self.view, self.slurm.retries, self.slurm.gate, action, error))

    def on_actions_done(self, urgent: bool = False) -> None:
        """Takes in that all actions of a request were tried, and asks Slurm for their effect."""
        self.slurm.on_actions_done(self.now, urgent)
