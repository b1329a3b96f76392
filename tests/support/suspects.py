"""Two jobs at one moment, of which a test says who is silent and what others find: for the failure detector's pure
parts. All spans are numbers that a float holds exactly at a real date, so a test can stand on both sides of a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from functools import cache

from tests.support.clock import START
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.failure_detector.probes import Tick
from unicron_ctl.controller.model import allocation
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.suspicion import OWN, Answer, Key, Suspicion
from unicron_ctl.controller.model.view import Listing, SlurmView, View
from unicron_ctl.shared.protocol.reach import Reach

NOW = START + 4096.0
PERIOD, LEASE, LATE = 1.25, 2.25, 1.625  # of heartbeats; without one an agent is lost, or suspected
STATE_WAIT = 64.0
LETTERS = {"R": Reach.REACHED, "X": Reach.REFUSED, "S": Reach.SILENT, "U": Reach.UNKNOWN}


@cache
def _trained(slurm: bool, observe: bool) -> World:
    """A world in which all jobs train; made once, for what is decided of it takes longer than a test."""
    usual = {"heartbeat_period": PERIOD, "state_wait_seconds": STATE_WAIT, "slurm_poll_seconds": 60.0}
    world = World(FakeSlurm(10) if slurm else None, observe, **usual)
    nodes = (f"n{n}" for n in range(1, 10))
    for job, count in (("1", 5), ("2", 3), ("3", 1)):
        if world.slurm is not None:
            world.slurm.submit(job, count)
        for element in range(count):
            agent = FakeAgent(world, job, element, next(nodes), nodes=count)
            agent.settings.user = f"user{job}"
            agent.register()
            agent.ready()
    for turn in range(6):
        world.now += 0.45
        for agent in world.agents if turn % 3 == 2 else ():
            agent.status()
        world.core.tick(world.now)
        world.deliver()
    assert all(job.phase == "running" for job in world.core.state.jobs.values())
    return world


class Company:
    """Job 1 runs on n1 to n5, job 2 of another user on n6 to n8, job 3 on n9 alone; n10 is idle. Everybody was heard
    just now, and Slurm was asked a second ago. slurm: what it shows, once :meth:`list_slurm` has asked it."""

    def __init__(self, slurm: bool = True, observe: bool = False) -> None:
        world = _trained(slurm, observe)
        made = world.core.view
        state, live, self.slurm = deepcopy((made.state, made.live, world.slurm or FakeSlurm(0)))
        self.view = View(made.config, made.classifier, state, live, SlurmView(used=slurm), NOW, made.started_at)
        for agent in self.view.live.agents():
            agent.last_heard = NOW
        self.list_slurm()

    def list_slurm(self, asked_at: float = NOW - 1.0, **states: str) -> None:
        """Slurm shows these states, words with commas, of these nodes; all others are as they were."""
        for node, words in states.items():
            self.slurm.node_states[node] = set(words.split(","))
        if self.view.slurm.used:
            self.view.slurm.seen = Listing(
                asked_at, self.slurm.nodes(), list(allocation.by_node(self.slurm.elements(), self.view.state.jobs))
            )

    def agent(self, element: int = 0, job: str = "1") -> AgentView:
        found = self.view.live.agent(job, element)
        assert found is not None
        return found

    def last_heard(self, at: float, element: int = 0, job: str = "1") -> AgentView:
        """The agent's last word came at that time."""
        agent = self.agent(element, job)
        agent.last_heard = at
        order = sorted(self.view.live.leases.items(), key=lambda item: item[1].last_heard)
        self.view.live.leases = OrderedDict(order)
        return agent

    def suspect(
        self, element: int = 0, seconds: float = 10.0, answers: str = "", asked: float = 1.75, job: str = "1"
    ) -> Suspicion:
        """The agent has been silent for so long, and others were asked about it so many seconds ago (:meth:`ask`)."""
        agent = self.last_heard(NOW - seconds, element, job)
        slurmd = f"{agent.node}:slurmd" if self.view.slurm.used else ""
        found = Suspicion(job, element, agent.agent, agent.node, NOW - seconds, (agent.door, slurmd))
        self.view.suspicions.open[found.key] = found
        self.ask(found, answers, asked)
        return found

    def ask(self, found: Suspicion, answers: str, asked: float) -> None:
        """A round of questions began so many seconds ago.

        answers: words like "own=SS 2=XR b0=RU": who answered (this controller, an element of job 1, one of job 2), and
        what it found at the agent's door and at slurmd: Reached, refused (X), Silent, Unknown.
        """
        self.view.suspicions.begin_round(found, NOW - asked)
        for word in answers.split():
            who, _, letters = word.partition("=")
            key: Key = OWN if who == "own" else ("2", int(who[1:])) if who[0] == "b" else ("1", int(who))
            found.asked[key] = found.begun
            found.answers[key] = Answer(who, LETTERS[letters[0]], LETTERS[letters[1]])

    def tick(self) -> Tick:
        return Tick(self.view)
