"""All simulated agents of one job in one thread: connections, heartbeats, iterations, and obedience to the controller.

Ranks stop and enter together, as real ones do in their collectives: their reports leave in one burst when the Break has
reached every agent that trains, and they enter a generation when its plan has reached every member.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.scale.agents import JOB, Agent, Layout
from benchmarks.scale.alone import Alone
from benchmarks.scale.lines import Failed, Sockets
from unicron_ctl.shared.protocol import wire

TURN_SECONDS = 0.002  # between two looks at the connections
ITERATION_SECONDS = 1.0
STEPS_SPREAD = 0.3  # seconds over which the agents' reports of one iteration are spread
ENTERED_SPREAD = 0.3  # seconds over which their statuses are spread when they have entered
ENTER_SECONDS = 0.3  # to build a generation's groups
READY_SECONDS = 1.0  # from the start of a rank until it can enter
REGISTER_RATE = 1000.0  # agents a second that register at the start
REGISTER_AGAIN = 3.0  # seconds without a Welcome
LATE_REPORT = 3.0  # seconds after which the agents with the Break report without the rest
PROBE_PERIOD = 0.02  # seconds between two questions whose answers are timed
ASK_PERIOD = 0.5  # seconds between two questions for the job's state
Lines = Sockets | Alone
"""A line to the controller for each agent, by its index, and one more for questions."""


@dataclass
class Round:
    """One message to many agents."""

    generation: int
    awaited: set[int]
    """Elements that do not have it yet."""
    last: float = 0.0
    """When the last of the others got it."""
    sent_back: tuple[float, float] = (0.0, 0.0)
    """When the first and the last report was sent after a Break."""

    def take(self, element: int, at: float) -> bool:
        """Note that an agent has it. Return whether it was the last one."""
        if element not in self.awaited:
            return False
        self.awaited.discard(element)
        self.last = max(self.last, at)
        return not self.awaited


@dataclass
class Training:
    """The iteration that the members compute, in the generation of the layout."""

    layout: Layout
    iteration: int
    began: float
    running: bool = True

    @property
    def generation(self) -> int:
        return self.layout.plan.generation


@dataclass
class StepReports:
    """An iteration that has ended."""

    training: Training
    at: float
    left: deque[int]
    """Elements that have not reported it yet."""
    offer: Layout | None
    """The generation that they enter with it."""


@dataclass
class Counts:
    """Counts of the time in which the job trains undisturbed."""

    heartbeats: int = 0
    steps: int = 0
    late: float = 0.0
    """The most seconds by which a heartbeat was late."""
    round_trips: list[float] = field(default_factory=list)
    """Seconds until each question was answered."""


def names(agents: int) -> list[str]:
    """Return the names of the lines: one for each agent, and the last one for questions."""
    return [f"{JOB}-{index}" for index in range(agents + 1)]


class Simulation:
    """`agents` agents with `ranks` ranks each, on the `lines` of :func:`names`.

    All that waits for the controller raises Failed.
    """

    def __init__(self, lines: Lines, agents: int, ranks: int) -> None:
        self.ranks_per_agent, self.total = ranks, agents * ranks
        self.agents = [Agent(element, ranks, self.total) for element in range(agents)]
        self.lines, self._question = lines, agents
        self._period, self._progress_seconds, self._metrics_seconds = 1.0, 0.0, 0.0  # as the controller wants them
        now = lines.now()
        self._beats, self._metrics_beats = itertools.cycle(range(agents)), itertools.cycle(range(agents))
        self._next_beat = self._next_metrics = self._next_probe = now
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._layouts: dict[bytes, Layout] = {}
        self.training: Training | None = None
        self._reports: StepReports | None = None
        self.breaking: Round | None = None
        self.planning: Round | None = None
        self.offering: Round | None = None
        self.killed: set[int] = set()  # slots whose rank has ended on purpose
        self.started: dict[int, float] = {}  # slot -> when its last process was ordered
        self.lost: set[int] = set()  # elements that the controller wrongly took for lost
        self.probing = False
        self._asked: deque[float] = deque()
        self._next_look, self._state = now, ""  # when the job's state is asked for next; the last answer
        self.counts = Counts()

    def close(self) -> None:
        """Close all lines."""
        self.lines.close()

    # ------------------------------------------------------------ time
    def start(self) -> None:
        """Let all agents register, as when Slurm starts a job."""
        now = self.lines.now()
        for agent in self.agents:
            self._later(now + agent.element / REGISTER_RATE, lambda a=agent: self._register(a))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.lines.now() + seconds
        while self.lines.now() < end:
            self._turn()

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Let time pass until the condition holds. Raises :class:`Failed` after `seconds`."""
        end = self.lines.now() + seconds
        while not condition():
            if self.lines.now() > end:
                raise Failed(f"not within {seconds:g} s: {what}")
            self._turn()

    def _turn(self) -> None:
        began = self.lines.now()
        self._read()
        now = self.lines.now()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        self._iterate(now)
        self._beat(now)
        self._ask(now)
        self.lines.flush()
        left = TURN_SECONDS - (self.lines.now() - began)
        if left > 0:
            self.lines.rest(left)

    def _later(self, due: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due, next(self._order), action))

    def _beat(self, now: float) -> None:
        """Send heartbeats and the nodes' metrics, spread evenly over their periods."""
        training = self.training
        while self._next_beat <= now:
            agent = self.agents[next(self._beats)]
            if agent.welcomed:
                if training is not None and training.running:
                    part = (now - training.began) / ITERATION_SECONDS
                    agent.progress(training.generation, training.iteration, part, ITERATION_SECONDS, now)
                self._say(agent)
                self.counts.heartbeats += 1
                self.counts.late = max(self.counts.late, now - self._next_beat)
            self._next_beat += self._period / len(self.agents)
        while self._metrics_seconds and self._next_metrics <= now:
            agent = self.agents[next(self._metrics_beats)]
            if agent.welcomed:
                self._send(agent.element, agent.metrics())
            self._next_metrics += self._metrics_seconds / len(self.agents)

    def _ask(self, now: float) -> None:
        if self.probing and now >= self._next_probe:
            self._next_probe = max(self._next_probe + PROBE_PERIOD, now)
            self._asked.append(self.lines.now())
            self._send(self._question, wire.encode(wire.Ask(what="ping")))

    # ------------------------------------------------------------ training
    def _iterate(self, now: float) -> None:
        training = self.training
        if training is not None and training.running and now >= training.began + ITERATION_SECONDS:
            self._finish_reports()
            ended = Training(training.layout, training.iteration, training.began)
            offer = self._agreed_offer()
            self._reports = StepReports(ended, now, deque(range(len(self.agents))), offer)
            training.iteration += 1
            training.began = max(training.began + ITERATION_SECONDS, now - ITERATION_SECONDS)
            if offer is not None:
                training.layout, self.offering = offer, None
        reports = self._reports
        if reports is not None:
            while reports.left and now >= reports.at + STEPS_SPREAD * reports.left[0] / len(self.agents):
                self._report_steps(reports, reports.left.popleft(), now)

    def _agreed_offer(self) -> Layout | None:
        """Return the offer that every member holds."""
        if self.offering is None or self.offering.awaited:
            return None
        held = (agent.layout for agent in self.agents if agent.layout is not None)
        return next(layout for layout in held if layout.plan.generation == self.offering.generation)

    def _report_steps(self, reports: StepReports, element: int, now: float) -> None:
        agent, training = self.agents[element], reports.training
        if agent.steps(training.generation, training.iteration, ITERATION_SECONDS, now):
            self.counts.steps += 1
            if self._progress_seconds < self._period:  # else the next status takes it along
                self._send(element, agent.say_steps())
        if reports.offer is not None:
            agent.enter(reports.offer, training.iteration + 1, now)
            self._say(agent)
        else:
            agent.deal(training.layout)

    def _finish_reports(self) -> None:
        """Report the last iteration for those who have not done so."""
        while self._reports is not None and self._reports.left:
            self._report_steps(self._reports, self._reports.left.popleft(), self.lines.now())

    def complete(self) -> bool:
        """Return whether every rank of the job trains in one generation."""
        training = self.training
        if training is None or not training.running or len(training.layout.places) < self.total:
            return False
        return all(
            rank.state == "running" and rank.generation == training.generation
            for agent in self.agents
            for rank in agent.ranks.values()
        )

    def settled(self) -> bool:
        """Return whether every rank trains and the controller's state of the job says so, too."""
        if not self.complete():
            self._state = ""
            return False
        now = self.lines.now()
        if now >= self._next_look:
            self._next_look = now + ASK_PERIOD
            self._asked.append(now)
            self._send(self._question, wire.encode(wire.Ask(what="status", args={"brief": True})))
        return self._state == "running"

    def fail(self, victims: dict[int, list[int]]) -> float:
        """Let the ranks of `victims` (element -> slots) die. Return when the first report of it was sent."""
        now = self.lines.now()
        self.killed = {slot for slots in victims.values() for slot in slots}
        for element, slots in victims.items():
            for slot in slots:
                self.agents[element].die(slot, now)
        messages = [(element, self.agents[element].say(now)) for element in victims]
        self.breaking = self.planning = None
        self.started = {}
        began = self.lines.now()
        for element, message in messages:
            self._send(element, message)
        return began

    def await_break(self, seconds: float) -> Round:
        """Let time pass until all agents that train have the Break, or have stopped to wait for it."""
        self.until(
            lambda: self.breaking is not None and self.breaking.sent_back[1] > 0,
            seconds,
            "the Break is at all agents that train",
        )
        assert self.breaking is not None
        return self.breaking

    def await_plan(self, seconds: float) -> Round:
        """Let time pass until all members have the plan."""
        self.until(
            lambda: self.planning is not None and not self.planning.awaited, seconds, "the plan is at all members"
        )
        assert self.planning is not None
        return self.planning

    # ------------------------------------------------------------ out
    def _send(self, index: int, data: bytes) -> None:
        self.lines.send(index, data)

    def _say(self, agent: Agent) -> None:
        self._send(agent.element, agent.say(self.lines.now()))

    def _register(self, agent: Agent) -> None:
        if not agent.welcomed:
            self._send(agent.element, agent.register())
            self._later(self.lines.now() + REGISTER_AGAIN, lambda: self._register(agent))

    # ------------------------------------------------------------ in
    def _read(self) -> None:
        for index, messages, at in self.lines.receive():
            if index == self._question:
                self._on_answers(messages, at)
                continue
            for data in messages:
                self._on_message(self.agents[index], data, at)

    def _on_answers(self, messages: list[bytes], at: float) -> None:
        for data in messages:
            asked = self._asked.popleft()
            answer = wire.decode(data, wire.Answer)
            if not answer.ok:  # as when too many questions wait
                raise Failed(f"a question was refused: {answer.error}")
            if "jobs" in answer.data:  # else it is a ping's
                whole = [job["state"] for job in answer.data["jobs"] if len(job["members"]) == self.total]
                self._state = whole[0] if whole else ""
            else:
                self.counts.round_trips.append(at - asked)

    def _on_message(self, agent: Agent, data: bytes, at: float) -> None:
        message = wire.decode(data, wire.ToAgent)
        agent.heartbeats.on_message(message)
        match message:
            case wire.Break():
                self._on_break(agent, message, at)
            case wire.PlanShare():
                self._on_plan(agent, message, at)
            case wire.StartRank():
                self.started[message.slot] = at
                if agent.start(message.slot, message.incarnation, self.lines.now()):
                    self._say(agent)
                    self._later(self.lines.now() + READY_SECONDS, lambda: self._ready(agent))
            case wire.Welcome():
                self._on_welcome(agent, message)
            case wire.Ping():
                self._say(agent)
            case wire.Refusal():
                self._on_refused(agent, message)
            case wire.Withdraw():
                if self.offering is not None and self.offering.generation == message.generation:
                    self.offering = None
            case wire.StopRank():
                if agent.ranks[message.slot].incarnation == message.incarnation:
                    self.killed.add(message.slot)
                    agent.die(message.slot, self.lines.now())
                    self._say(agent)
            case wire.Stacks():
                fields = {"how": "none", "state": "S", "text": "simulated"}
                trace = wire.StackTrace(job=JOB, slot=message.slot, incarnation=message.incarnation, **fields)
                self._send(agent.element, wire.encode(trace))
            case wire.End():
                raise Failed(f"the controller ended agent {agent.element}: {message.reason}")

    def _on_welcome(self, agent: Agent, message: wire.Welcome) -> None:
        self._period, self._metrics_seconds = message.heartbeat_period, message.metrics_seconds
        self._progress_seconds = message.progress_seconds
        self._next_metrics = max(self._next_metrics, self.lines.now() - 0.1)
        agent.heartbeats.period = message.heartbeat_period
        if not agent.welcomed:
            agent.welcomed = True
            self._later(self.lines.now() + READY_SECONDS, lambda: self._ready(agent))
        self._say(agent)

    def _on_refused(self, agent: Agent, message: wire.Refusal) -> None:
        if message.final:
            raise Failed(f"the controller refused agent {agent.element}: {message.reason}")
        if agent.welcomed:
            agent.welcomed = False
            self._register(agent)

    def _ready(self, agent: Agent) -> None:
        agent.ready(self.lines.now())
        self._say(agent)

    # ------------------------------------------------------------ generations
    def _on_break(self, agent: Agent, message: wire.Break, at: float) -> None:
        generation = message.generation
        self.lost |= {slot // self.ranks_per_agent for slot in set(message.lost) - self.killed}
        if self.breaking is None or self.breaking.generation < generation:
            self._finish_reports()
            if self.training is not None and self.training.generation <= generation:
                self.training.running = False
            stopping = {a.element for a in self.agents if a.stops(generation)}
            self.breaking = Round(generation, stopping)
            if stopping:
                self._later(self.lines.now() + LATE_REPORT, lambda: self._report_late(generation))
            if self.offering is not None and self.offering.generation <= generation:
                self.offering = None
        agent.note_break(generation)
        if self.breaking.generation == generation and self.breaking.take(agent.element, at):
            self._report_stopped(generation)

    def _report_stopped(self, generation: int) -> None:
        """Report that all ranks have stopped, in one burst: real agents encode their reports side by side."""
        now, training = self.lines.now(), self.training
        messages = []
        for agent in self.agents:
            if not agent.stops(generation) or (self.breaking is not None and agent.element in self.breaking.awaited):
                continue
            if training is not None:
                agent.progress(training.generation, training.iteration, 0.0, ITERATION_SECONDS, now)
            agent.stop(generation, now)
            messages.append((agent.element, agent.say(now)))
        if not messages:
            return
        began = self.lines.now()
        for element, message in messages:
            self._send(element, message)
        if self.breaking is not None:
            self.breaking.sent_back = began, self.lines.now()

    def _report_late(self, generation: int) -> None:
        """Report without the agents that still have no Break."""
        if self.breaking is not None and self.breaking.generation == generation and self.breaking.awaited:
            self._report_stopped(generation)
            self._later(self.lines.now() + LATE_REPORT, lambda: self._report_late(generation))

    def _on_plan(self, agent: Agent, part: wire.PlanShare, at: float) -> None:
        key = bytes(part.common)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = Layout.of(part)
            while len(self._layouts) > 4:
                del self._layouts[next(iter(self._layouts))]
        plan = layout.plan
        if agent.layout is not None and plan.generation <= agent.layout.plan.generation:
            return  # it was repeated
        agent.layout, agent.assignment = layout, part.assignment
        known = self.offering if plan.boundary else self.planning
        if known is None or known.generation < plan.generation:
            members = {slot // self.ranks_per_agent for slot in plan.members}
            known = Round(plan.generation, members)
            if plan.boundary:
                self.offering = known
            else:
                self.planning = known
        last = known.generation == plan.generation and known.take(agent.element, at)
        if plan.boundary:
            agent.obey(layout, self.lines.now())
            if any(slot in layout.places for slot in plan.joiners if slot in agent.ranks):
                self._say(agent)
        elif last:
            self._enter(layout)

    def _enter(self, layout: Layout) -> None:
        """Let all members enter the generation, which they have when their groups are built."""
        now = self.lines.now()
        for agent in self.agents:
            if agent.layout is layout:
                agent.obey(layout, now)
                self._say(agent)
        self._later(self.lines.now() + ENTER_SECONDS, lambda: self._entered(layout))

    def _entered(self, layout: Layout) -> None:
        plan, now = layout.plan, self.lines.now()
        if self.breaking is not None and self.breaking.generation >= plan.generation:
            return  # it was broken on the way
        iteration = plan.iteration if plan.iteration is not None else self.training.iteration if self.training else 0
        for agent in self.agents:
            agent.enter(layout, iteration, now)
            if agent.layout is layout:
                self._later(
                    now + ENTERED_SPREAD * agent.element / len(self.agents), lambda entered=agent: self._say(entered)
                )
        self.training = Training(layout, iteration, now)
