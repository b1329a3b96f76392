"""Any interleaving of inputs, sensible or not, gives the same state live and replayed, and costs no job its care."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.support.world import MICRO_BATCHES, FakeAgent, FakeSlurm, World
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.shared.protocol import datagrams, structs, wire

JOBS, ELEMENTS = ("1", "2"), 3
TIMES = st.floats(0.0, 5000.0)
TEXTS = st.sampled_from(
    ["", "Connection reset by peer", "CUDA error: device-side assert triggered", "Timed out waiting 2000ms", "x"]
)
FAULTS = st.builds(
    structs.Fault, type=st.just("RuntimeError"), text=TEXTS, at=TIMES, fatal=st.booleans(), lived=st.floats(0.0, 900.0)
)
EXITS = st.builds(
    structs.Exit,
    code=st.sampled_from([0, 1, 7, -9, -11, 137]),
    at=TIMES,
    lived=st.floats(0.0, 900.0),
    last_line=TEXTS,
    oom=st.booleans(),
)
STATUSES = st.builds(
    structs.RankStatus,
    state=st.sampled_from(
        ["starting", "waiting", "entering", "running", "stopped", "standby", "left", "exited", "finished"]
    ),
    incarnation=st.integers(0, 2),
    generation=st.integers(0, 5),
    entering=st.integers(0, 5),
    broken=st.integers(0, 5),
    iteration=st.integers(0, 3),
    phase=st.sampled_from(["computing", "reducing", "synced", "stepped"]),
    done=st.lists(st.integers(-1, MICRO_BATCHES), max_size=3),
    micro_batches=st.sampled_from([0, MICRO_BATCHES]),
    train_iterations=st.sampled_from([0, 4]),
    exit=st.none() | EXITS,
    fault=st.none() | FAULTS,
    note=st.none() | FAULTS,
    process=st.sampled_from(["", "S", "T"]),
    idle=st.floats(0.0, 100.0),
    replica=st.sampled_from([1, 1, 2, 3]),
    shards=st.lists(
        st.builds(
            structs.Shards,
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(1, 3),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=2,
    ),
)
RANK_STEPS = st.builds(
    structs.RankStep,
    slot=st.integers(0, ELEMENTS),
    micro_batches=st.lists(st.integers(-1, MICRO_BATCHES), max_size=MICRO_BATCHES),
    seconds=st.floats(0.0, 9.0),
    loss=st.sampled_from([1.0, float("nan"), float("inf")]),
    phases=st.sampled_from([[], [0.1] * len(structs.PHASES), [float("nan")] * len(structs.PHASES)]),
)
INPUTS: dict[str, st.SearchStrategy[Any]] = {
    "status": st.tuples(STATUSES, st.sampled_from(["", "", "", "finished", "stopped by Slurm (SIGTERM)"])),
    "obey": st.none(),  # the agent does what it was told, from now on or no longer
    "register": st.sampled_from(["same", "new process", "new node"]),
    "steps": st.tuples(st.integers(0, 4), st.lists(RANK_STEPS, max_size=2, unique_by=lambda step: step.slot)),
    "hint": st.integers(0, 9),
    "node event": st.sampled_from(["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "all is well"]),
    "stacks": st.integers(0, ELEMENTS),
    "timing": st.floats(0.0, 9.0),
    "metrics": st.floats(0.0, 9.0),
    "silence": st.none(),
    "time": st.floats(0.05, 4.0),
    "stall": st.floats(1.0, 60.0),
    "slurm": st.sampled_from(["down", "cancel", "requeue", "resume", "no answer"]),
    "restart": st.none(),
}


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, str, int, Any]]:
    """(what, job, element, with what)."""
    verbs = draw(st.lists(st.sampled_from(sorted(INPUTS)), max_size=25))
    return [
        (verb, draw(st.sampled_from(JOBS)), draw(st.integers(0, ELEMENTS - 1)), draw(INPUTS[verb])) for verb in verbs
    ]


class Stage:
    """Two jobs in a cluster, the second with a hot spare, and whatever is done to them."""

    def __init__(self, observe: bool) -> None:
        self.slurm = FakeSlurm(7)
        self.world = World(self.slurm, observe=observe, report_timeout=2.0, enter_timeout=3.0, restart_grace=2.0)
        self.agents: dict[tuple[str, int], FakeAgent] = {}
        for job in JOBS:
            self.slurm.submit(job, ELEMENTS)
            for element in range(ELEMENTS):
                self._start(job, element, self.slurm.queue[job, element]["node"] or "n9")
        self.world.run(0.3)

    def _start(self, job: str, element: int, node: str) -> None:
        settings = {"nodes": ELEMENTS, "spares": int(job == JOBS[1])}
        agent = self.agents[job, element] = FakeAgent(self.world, job, element, node, **settings)
        agent.register()
        agent.ready()

    def happens(self, verb: str, job: str, element: int, detail: Any) -> None:  # noqa: C901  (one branch an event)
        agent, world = self.agents[job, element], self.world
        slot, where = agent.slots[0], {"job": job, "element": element, "agent": agent.agent}
        match verb:
            case "status":
                status, leaving = detail
                status.changed = agent.ranks[slot].changed + 1e-6
                agent.ranks[slot] = status
                agent.status(leaving)
            case "obey":
                agent.obedient = not agent.obedient
            case "register" if detail == "same":
                agent.register()
            case "register":
                self._start(job, element, agent.node if detail == "new process" else "n7")
            case "steps":
                iteration, ranks = detail
                generation = agent.ranks[slot].generation
                report = structs.StepReport(generation, iteration, MICRO_BATCHES, world.now, ranks)
                world.to_core(agent, wire.Steps(**where, reports=[report]))
            case "node event":
                told = wire.NodeEvent(**where, number=len(world.log), source="kernel", text=detail, at=world.now)
                world.to_core(agent, told)
            case "stacks":
                told = wire.StackTrace(job=job, slot=detail, incarnation=0, how="py-spy", state="S", text="in fetch")
                world.to_core(agent, told)
            case "timing":
                world.to_core(
                    agent, wire.Timing(job=job, slot=slot, generation=1, at=world.now, seconds={"store": detail})
                )
            case "metrics":
                world.to_core(agent, wire.Metrics(**where, host=agent.node, node={"cpu_busy": detail}))
            case "hint":
                node = agent.node
                hint = datagrams.Hint(v=1, kind="task_exit", job=job, element=element, node=node, status=detail)
                world.core.hint(hint, world.now)
                world.deliver()
            case "silence":
                agent.silent = not agent.silent
            case "time":
                world.run(detail)
            case "stall":
                world.now += detail
                world.core.tick(world.now)
                world.deliver()
            case "restart":
                world.restart()
            case "slurm":
                self._slurm(detail, agent)

    def _slurm(self, what: str, agent: FakeAgent) -> None:
        self.slurm.refuse = "no answer" if what == "no answer" else ""
        if what in ("down", "resume") and agent.node in self.slurm.node_states:
            self.slurm.down(agent.node, "by an admin") if what == "down" else self.slurm.resume(agent.node)
        elif what == "cancel":
            self.slurm.cancel(agent.job, agent.element)
        elif what == "requeue":
            self.slurm.requeue(agent.job, agent.element)
        self.world.run(1.2)


@settings(max_examples=cases(100), deadline=None)
@given(stories(), st.booleans())
def test_any_interleaving_of_inputs_gives_the_same_state_live_and_replayed(
    story: list[tuple[str, str, int, Any]], observe: bool
) -> None:
    stage = Stage(observe)
    world, generations = stage.world, dict.fromkeys(JOBS, 0)
    for verb, job, element, detail in story:
        stage.happens(verb, job, element, detail)
        assert not [event for event in world.log if event.kind == "job_set_aside"]
        for name in JOBS:
            assert world.job(name).generation >= generations[name]
            generations[name] = world.job(name).generation
    world.run(5.0)
    world.check_replay()
    half = len(world.log) // 2
    assert replay(world.log[half:], replay(world.log[:half])) == world.core.state
