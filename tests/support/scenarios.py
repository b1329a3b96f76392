"""Scenarios that many tests of the controller begin with, and what happens in them: a job that trains, with or without
Slurm; as an array, in blocks, as one allocation; a node that is lost, cut off or back.

Each of the builders returns the world and the job's agents. `config` is for the controller, all else for the agents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from tests.support.plain_agent import PlainAgent
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.plan.placement import Placement
from unicron_ctl.shared.log.records import Record
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo
from unicron_ctl.shared.slurm.squeue import names_of

Scenario = tuple[World, list[FakeAgent]]
R = TypeVar("R", bound=Record)
M = TypeVar("M", bound=wire.Message)


# ---------------------------------------------------------------- jobs that train
def ready(world: World, agents: Collection[FakeAgent], before: float = 0.0, after: float = 2.0) -> None:
    """Their ranks get ready. before, after: seconds that pass."""
    world.run(before)
    for agent in agents:
        agent.ready()
    world.run(after)


def trains(world: World, agents: Collection[FakeAgent]) -> None:
    """Job 1 trains with all ranks of these agents once they are ready."""
    ready(world, agents)
    assert world.job().phase == "running" and len(world.job().inside) == len(agents)


def trained(
    nodes: int = 3,
    free: int | None = None,
    *,
    kind: type[FakeAgent] = FakeAgent,
    config: Mapping[str, Any] | None = None,
    seconds: float = 2.0,
    **settings: Any,
) -> Scenario:
    """Job 1 trains on n1, n2, ..., as an array. free: idle nodes beside them; without it there is no Slurm."""
    world = World(FakeSlurm(nodes + free) if free is not None else None, **(config or {}))
    if world.slurm is not None:
        world.slurm.submit("1", nodes)
    agents = [kind(world, "1", element, f"n{element + 1}", nodes=nodes, **settings) for element in range(nodes)]
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(seconds)
    assert world.job().phase == "running"
    return world, agents


def plain(nodes: int = 3, free: int | None = None, **more: Any) -> Scenario:
    """As :func:`trained`, in restart mode."""
    return trained(nodes, free, kind=PlainAgent, **more)


def arrays(
    nodes: int, *jobs: tuple[str, int, float], config: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[World, FakeSlurm]:
    """Each of the jobs (id, elements, weight) has the nodes that Slurm gives it, and trains."""
    slurm = FakeSlurm(nodes)
    world = World(slurm, **(config or {}))
    for job, count, _ in jobs:
        slurm.submit(job, count)
    for job, count, weight in jobs:
        follow(world, job, count, weight, **settings)
    ready(world, world.agents, 0.6, 3.0)
    return world, slurm


def on_slurm(nodes: int, elements: int, spares: int = 0, **config: Any) -> tuple[World, FakeSlurm]:
    """Job 1, an array, has made an iteration on a Slurm of so many nodes."""
    world, slurm = arrays(nodes, ("1", elements, 1.0), config=config, spares=spares)
    world.iterate("1", 0)
    return world, slurm


def allocation_row(nodes: str | None, state: str = "RUNNING", restarts: int = 0) -> dict[str, Any]:
    """The row of `FakeSlurm.queue` of a job that is one allocation of these nodes."""
    facts = {"reason": "", "admin_comment": "", "pin": None, "array": False}
    return {"state": state, "node": nodes, "restarts": restarts, **facts}


def allocation_job(
    nodes: int = 3, free: int = 1, stated: bool = False, config: Mapping[str, Any] | None = None, **settings: Any
) -> Scenario:
    """Job 1 has n1, n2, ... as one allocation, with an agent on each. stated: its owner has stated a minimum."""
    world = World(FakeSlurm(nodes + free), **(config or {}))
    world.slurm.queue["1", 0] = allocation_row(f"n[1-{nodes}]")
    return world, [
        allocation_comes(world, element, f"n{element + 1}", nodes, stated, **settings) for element in range(nodes)
    ]


def allocation_comes(
    world: World, element: int, node: str, nodes: int = 3, stated: bool = False, no_kill: bool = False, **settings: Any
) -> FakeAgent:
    """An agent of an allocation registers."""
    agent = FakeAgent(world, "1", element, node, nodes=nodes, **settings)
    agent.settings.allocation, agent.settings.min_stated, agent.settings.no_kill = True, stated, no_kill
    agent.register()
    return agent


def blocks(free: int = 1, **settings: Any) -> tuple[World, dict[int, FakeAgent]]:
    """Job 1 is an array of three elements of two nodes, with an agent on each; agents by number."""
    world = World(FakeSlurm(6 + free))
    world.slurm.submit("1", 3, 2)
    agents: dict[int, FakeAgent] = {}
    for element in range(3):
        block_comes(world, agents, element, 6, **settings)
    return world, agents


def block_comes(world: World, agents: dict[int, FakeAgent], element: int, nodes: int = 6, **settings: Any) -> None:
    """The agents of an element of several nodes register, where Slurm runs it."""
    names = names_of(world.slurm.queue["1", element]["node"])
    for place, name in enumerate(names):
        number = len(names) * element + place
        agent = agents[number] = FakeAgent(world, "1", number, name, nodes=nodes, **settings)
        agent.settings.block, agent.settings.min_nodes = len(names), max(len(names), agent.settings.min_nodes)
        agent.register()


def follow(world: World, job: str, count: int, weight: float = 1.0, **settings: Any) -> list[FakeAgent]:
    """Agents start where Slurm runs elements of the job, and end where it does not. Returns those that start."""
    fresh = []
    for agent in world.agents:
        entry = world.slurm.queue[agent.job, agent.element]
        if agent.job == job and (entry["state"] != "RUNNING" or entry["node"] != agent.node):
            agent.silent = True
    for (owner, element), entry in world.slurm.queue.items():
        place = job, element, entry["node"]
        here = any((agent.job, agent.element, agent.node) == place and not agent.silent for agent in world.agents)
        if owner == job and entry["state"] == "RUNNING" and not here and entry["node"] not in world.dead_nodes:
            agent = FakeAgent(world, *place, nodes=count, weight=weight, **settings)
            agent.register()
            fresh.append(agent)
    return fresh


def start(world: World, job: str, count: int, weight: float = 1.0, **settings: Any) -> list[FakeAgent]:
    """As :func:`follow`; the ranks of those that start are ready at once."""
    fresh = follow(world, job, count, weight, **settings)
    ready(world, fresh, after=0.0)
    return fresh


def submit(world: World, job: str, count: int, weight: float = 1.0, **facts: Any) -> list[FakeAgent]:
    """The job's elements are submitted, and agents come where Slurm runs them. facts: of `FakeSlurm.submit`."""
    world.slurm.submit(job, count, **facts)
    return start(world, job, count, weight)


def grow_back(world: World, count: int = 3, seconds: float = 1.0) -> None:
    """Agents start where Slurm runs elements (:func:`follow`), and their ranks come in at the next boundary."""
    ready(world, follow(world, "1", count), after=seconds)
    boundary(world, 0.0)


# ---------------------------------------------------------------- what happens
def boundary(world: World, after: float = 0.3, before: float = 0.0) -> None:
    """An iteration ends: all who train take what they are offered. before, after: seconds that pass."""
    world.run(before)
    for agent in world.agents:
        if not agent.silent:
            agent.take_offer()
    world.run(after)


def power_off(world: World, *nodes: str) -> None:
    """The nodes are gone without a word, and nobody reaches them."""
    world.dead_nodes.update(nodes)
    for agent in world.agents:
        agent.silent = agent.silent or agent.node in nodes


def kill_agent(world: World, element: int) -> None:
    """The agent of job 1's element dies; its node lives."""
    next(agent for agent in world.agents if agent.element == element and not agent.silent).silent = True


def restart_controller(world: World) -> None:
    """Another controller starts from the log, and all agents that live register with it."""
    world.restart()
    for agent in world.agents:
        if not agent.silent:
            agent.register()
            agent.status()


def cut_off(world: World, agents: Collection[FakeAgent]) -> None:
    """Neither the controller nor other nodes reach these agents, and they live."""
    apart = {agent.node for agent in agents}
    others = {"", *(agent.node for agent in world.agents if agent.node not in apart)}
    for agent in agents:
        agent.silent = agent.cut = True
        world.cuts |= {frozenset((agent.node, other)) for other in others}


def heal(world: World) -> None:
    """Everybody reaches everybody again."""
    world.cuts.clear()
    for agent in world.agents:
        agent.silent = agent.cut = False


# ---------------------------------------------------------------- what came of it
def calls(world: World, *actions: str) -> list[tuple[str, str, int, str]]:
    """What Slurm was asked for, of these actions: (action, job, element, node)."""
    return [call for call in world.slurm.calls if call[0] in actions]


def asked(slurm: FakeSlurm, action: str) -> list[str]:
    """The nodes for which Slurm was asked for this action."""
    return [call[3] for call in slurm.calls if call[0] == action]


def failures(world: World, job: str = "1") -> list[tuple[str, str]]:
    """(kind, node) of the job's failures."""
    return [(one.record.kind_of_failure, one.record.node) for one in world.job(job).failures]


def recorded(world: World, kind: type[R]) -> list[R]:
    """The records of this kind, of all jobs."""
    return [event.record for event in world.log if isinstance(event.record, kind)]


def messages(agent: FakeAgent, kind: type[M]) -> list[M]:
    """What the agent was sent, of this kind."""
    return [message for message in agent.heard if isinstance(message, kind)]


# ---------------------------------------------------------------- rows of Slurm's listings
def node_row(name: str, *states: str) -> NodeInfo:
    """A node, idle or in these states."""
    return NodeInfo(name, frozenset(states or {"IDLE"}), "", "127.0.0.1", 1, 1.0, 1)


def element_row(
    job: str,
    number: int,
    state: str = "RUNNING",
    where: str | None = None,
    reason: str = "",
    comment: str = "",
    restarts: int = 0,
) -> ElementInfo:
    """An element of an array of Ann's. comment: its AdminComment."""
    place = job, number, f"{job}{number}", state, where, reason
    return ElementInfo(*place, f"job{job}", "ann", "", restarts, admin_comment=comment)


def labels(placement: Placement) -> list[str]:
    """The actions of a placement, in words."""
    return [action.label for action in placement.actions]


def tell(
    world: World, node: str, verdict: str, reason: str = "why", source: str = "interval", drain: bool = False
) -> None:
    """A node reports what its health check has found."""
    arguments = {"node": node, "source": source, "verdict": verdict, "reason": reason, "at": world.now, "drain": drain}
    assert answers.answer(world.core, None, "health", arguments, EVERYBODY) == {"taken": True}
    world.log.extend(world.core.events)
    world.core.events = []


def replica_that_waits() -> Scenario:
    """Of two replicas of two ranks one has lost a rank, and in the other slot 3 has met an error of its own: slot 2
    would wait for it in the pipeline, and is told of both."""
    world = World(report_timeout=2.0)
    agents = world.start_job(nodes=4, ranks=1, replica=2)
    assert world.job().phase == "running"
    for agent in agents[2:]:
        agent.prompt = False
    agents[1].die(1)
    agents[3].set(3, state="stopped", broken=1)
    world.run(0.5)
    assert [m.lost for m in agents[2].heard if isinstance(m, wire.Break)] == [[1], [1, 3]]
    return world, agents
