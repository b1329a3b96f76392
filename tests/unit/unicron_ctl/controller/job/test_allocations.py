"""Jobs that are one allocation of several nodes: each node is an element, Slurm is asked for none of them, and what it
takes away stays away."""

from __future__ import annotations

import pytest

from tests.support.scenarios import allocation_comes, allocation_job, allocation_row, power_off, ready, trains
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.job import job_events
from unicron_ctl.controller.job.job_events import START_SECONDS
from unicron_ctl.controller.model import allocation
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.ranges import LAUNCHES
from unicron_ctl.shared.slurm.slurm_client import ElementInfo

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OF_ELEMENTS = {"requeue", "requeue_hold", "hold", "release", "pin", "start_now"}


def listed(node: str | None, state: str = "RUNNING", restarts: int = 0, **facts) -> ElementInfo:
    return ElementInfo("1", 0, "1", state, node, "", "job1", "ann", "", restarts, **facts)


def by_node(info: ElementInfo, world: World | None = None) -> dict[int, str | None]:
    jobs = world.core.state.jobs if world is not None else {}
    return {each.element: each.node for each in allocation.by_node([info], jobs)}


def training(nodes: int = 3, free: int = 1) -> tuple[World, list[FakeAgent]]:
    """A job that is one allocation trains on all of its nodes."""
    world, agents = allocation_job(nodes, free)
    world.run(1.5)
    trains(world, agents)
    return world, agents


def gone(agents: list[FakeAgent]) -> None:
    """The agents are killed; their nodes live."""
    for agent in agents:
        agent.silent = agent.killed = True


def finish(agents: list[FakeAgent]) -> None:
    """All of their ranks train to the end."""
    for agent in agents:
        for slot in agent.slots:
            agent.set(slot, state="finished")


def test_each_node_is_an_element_in_the_order_in_which_slurm_gave_it():
    assert by_node(listed("n[1-2],m3")) == {0: "n1", 1: "n2", 2: "m3"}
    assert by_node(listed("n1")) == {0: "n1"} and by_node(listed(None, "PENDING")) == {0: None}


def test_the_job_has_as_many_elements_as_nodes_and_all_of_them_train():
    world, _ = training()
    job = world.job()
    assert job.nodes == ["n1", "n2", "n3"] and job.settings.max_nodes == 3 and job.settings.allocation
    assert "1" not in world.core.state.assignment, "the plan leaves it as it is"


@pytest.mark.parametrize(("stated", "seconds"), [(True, START_SECONDS), (False, 100.0)])
def test_the_first_world_waits_for_the_slowest_node(stated, seconds, monkeypatch):
    """A script that assumes all of its nodes fails in a smaller world: so the owner's 1 is not the default."""
    monkeypatch.setattr(job_events, "BEGIN_SECONDS", 100.0)
    for comes in (True, False):
        world, agents = allocation_job(stated=stated)
        ready(world, agents[:2], 1.5, seconds - 10.0)
        assert world.job().phase == "forming"
        if comes:
            agents[2].ready()
        world.run(1.0 if comes else 12.0)
        assert len(world.job().members) == (3 if comes else 2)


def test_the_first_world_waits_for_no_node_that_is_lost():
    world, agents = allocation_job()
    ready(world, agents[:2], 1.5, 0.0)
    power_off(world, "n3")
    world.slurm.queue["1", 0]["node"] = "n[1-2]"
    world.run(START_SECONDS)
    assert set(world.job().members) == {0, 1}


def test_a_lost_node_is_drained_and_never_set_down_and_the_others_go_on(snapshot):
    world, _ = training()
    power_off(world, "n3")
    world.run(8.0)
    assert set(world.job().members) == {0, 1}
    asked = {(call[0], call[3]) for call in world.slurm.calls}
    assert ("drain", "n3") in asked and not any(action == "down" for action, _ in asked)
    assert world.slurm.reasons["n3"] == snapshot, "no other job ran there"
    world.slurm.queue["1", 0]["node"] = "n[1-2]"  # Slurm takes it out of the allocation
    world.run(70.0)
    assert set(world.job().members) == {0, 1} and world.job().phase == "running"
    assert by_node(world.slurm.elements()[0], world) == {0: "n1", 1: "n2"}
    assert not OF_ELEMENTS & {call[0] for call in world.slurm.calls}


def test_the_first_node_that_is_lost_leaves_the_others_their_numbers():
    world, _ = training()
    power_off(world, "n1")
    world.slurm.queue["1", 0]["node"] = "n[2-3]"
    world.run(8.0)
    assert set(world.job().members) == {1, 2}
    assert by_node(world.slurm.elements()[0], world) == {1: "n2", 2: "n3"}


def test_an_agent_that_dies_does_not_come_back_and_nothing_waits_for_it(snapshot):
    world, agents = training()
    gone(agents[1:2])
    world.run(8.0)
    assert set(world.job().members) == {0, 2}
    failure = world.job().failures[-1]
    assert failure.record.reason == snapshot and failure.record.action == "none"
    world.run(world.config.restart_seconds + 60.0)
    assert not OF_ELEMENTS & {call[0] for call in world.slurm.calls}
    assert not any(isinstance(event.record, records.ActionFailed) for event in world.log)


def fail(world: World, agents: list[FakeAgent], code: int, text: str = "", times: int = 9) -> None:
    """The first process of each node ends so as often as it is started."""
    for _ in range(times):
        for agent in agents:
            if agent.ranks[agent.slots[0]].state != "exited":
                agent.die(agent.slots[0], code, lived=5.0, last_line=text)
        ready(world, agents, 70.0, 2.0)


def test_a_program_that_crashes_again_and_again_ends_the_job_and_takes_no_node_out_of_it():
    """Defect: the second crash took its node out, and the job went on with half of its world."""
    world, agents = training(nodes=2, free=2)
    fail(world, agents, -6)
    job = world.job()
    assert job.ended is not None and job.ended.code == 1
    assert not job.avoid and {failure.record.action for failure in job.failures} == {"restart", "end_job"}
    assert not world.core.state.withheld, "nobody calls an admin for it"


def test_a_node_with_a_fault_of_its_hardware_is_left_out():
    world, agents = training(nodes=4, free=0)
    world.iterate("1", 0)
    fail(world, agents[1:2], 1, ECC, times=2)
    assert set(world.job().members) == {0, 2, 3} and "n2" in world.job().avoid


@pytest.mark.parametrize(("text", "asked"), [("", set()), (ECC, {"requeue_hold"})])
def test_a_plain_job_on_one_node_is_requeued_for_a_fault_of_its_node_only(text, asked):
    """Defect: a second crash requeued it, and its batch script ran from the start."""
    world = World(FakeSlurm(4))
    world.slurm.queue["1", 0] = allocation_row("n1")
    agent = FakeAgent(world, "1", 0, "n1", nodes=1)
    agent.register()
    world.run(1.5)
    trains(world, [agent])
    world.iterate("1", 0)
    fail(world, [agent], -6 if not text else 1, text, times=3)
    assert {"requeue", "requeue_hold"} & {call[0] for call in world.slurm.calls} == asked


@pytest.mark.parametrize("nodes", [["n1", "n3", "n4"], ["n1", "n3"]])
@pytest.mark.parametrize("seen_waiting", [True, False])
def test_a_job_that_slurm_requeues_begins_on_its_new_nodes_under_the_same_id(nodes, seen_waiting):
    world, agents = training()
    gone(agents)
    if seen_waiting:
        world.slurm.queue["1", 0] = allocation_row(None, "PENDING", restarts=1)
        world.run(3.0)
    world.slurm.queue["1", 0] = allocation_row(",".join(nodes), restarts=1)
    world.run(1.5 if seen_waiting else 8.0)
    again = [allocation_comes(world, element, node, nodes=len(nodes)) for element, node in enumerate(nodes)]
    world.run(1.5)
    assert world.job().nodes == nodes and world.job().nodes_of_restart == 1
    trains(world, again)
    assert world.job().settings.max_nodes == len(nodes)


def test_the_steps_of_a_job_that_slurm_requeues_are_counted_anew():
    """Defect: the steps of its script were over for the job, and ran unprotected."""
    world = World(FakeSlurm(4))
    world.slurm.queue["1", 0] = allocation_row("n1")

    def begin(step: int, requeues: int) -> FakeAgent:
        world.agents.clear()
        agent = FakeAgent(world, "1", 0, "n1", nodes=1, name=f"step {step} of {requeues}")
        agent.obedient = False  # it would register once more
        world.to_core(agent, agent.registration(step=step * LAUNCHES, requeues=requeues))
        agent.obedient = True
        world.run(1.5)
        agent.ready()
        world.run(1.5)
        assert world.job().phase == "running" and world.job().step == step * LAUNCHES and not agent.silent
        return agent

    def welcome(agent: FakeAgent) -> str:
        return next(message.run for message in agent.heard if isinstance(message, wire.Welcome))

    def end(agent: FakeAgent) -> None:
        finish([agent])
        world.run(1.5)
        assert world.job().ended

    end(begin(0, 0))
    broken_off = begin(1, 0)
    world.slurm.queue["1", 0]["restarts"] = 1
    world.run(1.5)
    again = begin(0, 1)
    end(again)
    resumed = begin(1, 1)
    assert welcome(resumed) == welcome(broken_off) != welcome(again), "what it kept in memory is its own"
    end(resumed)
    end(begin(0, 2))


@pytest.mark.parametrize(
    ("left", "refused", "asked"),
    [
        ("n[2-3]", "", ["requeue"]),
        ("n[2-3]", "Requested operation is presently disabled", ["requeue", "cancel"]),
        ("n[1-3]", "", []),
    ],
)
def test_the_script_of_an_allocation_without_its_batch_host_runs_again_once_the_training_has_ended(
    left, refused, asked
):
    """Defect: the job was cancelled, and what its script has behind the training never ran."""
    world, agents = training()
    world.slurm.queue["1", 0]["node"], world.slurm.refuse_requeue = left, refused
    finish(agents)
    world.run(9.0)
    assert world.job().ended is not None
    assert [call[0] for call in world.slurm.calls if call[1] == "1"] == asked
    if asked == ["requeue"]:
        assert world.slurm.queue["1", 0]["state"] == "PENDING", "it waits for nodes and is not cancelled"


def test_other_jobs_do_not_get_the_nodes_of_an_allocation():
    world, _ = training()
    world.slurm.submit("2", 4, state="PENDING", reason="JobHeldUser")
    world.slurm.queue["2", 0] |= {"state": "RUNNING", "node": "n4", "reason": ""}
    world.run(1.5)
    FakeAgent(world, "2", 0, "n4", nodes=4).register()
    world.run(3.0)
    assert world.core.state.assignment == {"2": 1}


def test_another_job_of_the_same_id_is_not_ended_for_the_one_before():
    """Defect: a new cluster counted its jobs from 1 again, and the second of them was cancelled at once."""
    world, agents = training()
    finish(agents)
    world.run(3.0)
    world.slurm.queue["1", 0] = allocation_row("n[2-4]") | {"submitted": world.now + 60.0}
    world.run(5.0)
    assert not [call for call in world.slurm.calls if call[0] == "cancel"]


@pytest.mark.parametrize("over", [False, True])
def test_a_step_that_comes_after_a_later_one_has_begun_goes_on_unprotected(over, snapshot):
    """Defect: it was said to be over, and where the later one had ended it never ran."""
    world, agents = allocation_job()
    for agent in agents:
        world.to_core(agent, agent.registration(step=LAUNCHES))
    world.run(1.5)
    trains(world, agents)
    finish(agents if over else [])
    world.run(1.5)
    assert bool(world.job().ended) is over
    world.agents.clear()
    late = FakeAgent(world, "1", 0, "n1", name="late", nodes=3)
    late.settings.allocation, late.obedient = True, False
    world.to_core(late, late.registration(step=0))
    answers = [message for message in late.heard if isinstance(message, wire.Refusal | wire.End | wire.Welcome)]
    assert [type(message) for message in answers] == [wire.Refusal] and answers[0].alone
    assert answers[0].reason == snapshot


@pytest.mark.parametrize("lives", [False, True])
def test_a_step_that_was_killed_holds_the_job_no_longer_than_its_agents(lives):
    """Defect: after `timeout 8h srun ...` the next srun of the script ran unprotected, "while step 0 runs"."""
    world, agents = training()
    gone(agents[lives:])
    world.run(3.0)

    def came(element: int) -> FakeAgent:
        agent = FakeAgent(world, "1", element, f"n{element + 1}", name=f"later {element}", nodes=3)
        agent.settings.allocation, agent.obedient = True, False
        world.to_core(agent, agent.registration(step=LAUNCHES))
        return agent

    later = [came(element) for element in range(3)]
    world.run(1.5)
    if lives:
        answers = [message for agent in later for message in agent.heard]
        assert all(isinstance(answer, wire.Refusal) and not answer.final for answer in answers) and answers
        assert world.job().step == 0
        return
    assert world.job().step == LAUNCHES and [agent.agent for agent in world.job().agents.values()] == [
        agent.agent for agent in later
    ]


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL"])
def test_a_job_that_ended_while_the_controller_was_away_is_over(state):
    """Defect: it was forming until Slurm had forgotten it, for its end might have been that of an array's element."""
    world, agents = training(nodes=2, free=2)
    gone(agents)
    world.slurm.queue["1", 0] = allocation_row("n[1-2]", state)
    world.restart()
    world.run(60.0)
    job = world.job()
    assert job.ended is not None and (job.ended.code == 0) == (state == "COMPLETED")
