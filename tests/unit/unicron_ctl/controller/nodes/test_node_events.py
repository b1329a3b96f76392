"""Events of nodes in the controller: their effects, and what they never do."""

from __future__ import annotations

import pytest

from tests.support.questions import told
from tests.support.scenarios import calls, follow, trained
from tests.support.training import events
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.judge import node_failures as node_events
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.nodes.isolation import attention
from unicron_ctl.shared.protocol import datagrams, structs, wire
from unicron_ctl.shared.system.throttle import NAMES

GPU_LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PAGE_FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault"
OOM = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:900000kB, anon-rss:800000kB"


class Speaker:
    """Sends an agent's node events, numbered."""

    def __init__(self, agent: FakeAgent):
        self.agent, self.number = agent, 0

    def send(self, text: str, source: str = "kernel", at: float | None = None, number: int | None = None) -> None:
        self.number = number if number is not None else self.number + 1
        self.agent.world.to_core(
            self.agent,
            wire.NodeEvent(
                job=self.agent.job,
                element=self.agent.element,
                agent=self.agent.agent,
                number=self.number,
                source=source,
                text=text,
                at=self.agent.world.now if at is None else at,
            ),
        )


def cluster(nodes: int = 4, **settings) -> tuple[World, list[FakeAgent]]:
    """A job on `nodes` nodes of a Slurm with a spare one, which trains."""
    return trained(nodes, 1, config={"max_isolated_job_share": 1.0, **settings}, seconds=3.0)


def down(world: World) -> list[str]:
    """Nodes that were taken out of service."""
    return [call[3] for call in calls(world, "down", "drain")]


def nodes_left(world: World) -> list[tuple[str, str]]:
    """(job, node) that it was moved off."""
    return [(call[1], call[3]) for call in world.slurm.calls if call[0] == "requeue_hold"]


def test_a_fatal_line_of_the_kernel_moves_its_job_off_the_node_and_leaves_the_node_in_service():
    world, agents = cluster()
    agents[1].silent = False
    Speaker(agents[1]).send(GPU_LOST)
    world.run(0.5)
    assert not nodes_left(world), "others may say the same: it is held for a moment"
    world.run(1.5)
    assert nodes_left(world) == [("1", "n2")] and not down(world), "an agent is its user's process"
    assert world.slurm.queue["1", 1]["node"] == "n5"
    assert sorted(world.job().plan.members) == [0, 2, 3]
    (failure,) = world.job().failures
    assert (
        failure.record.kind_of_failure,
        failure.record.node,
        failure.record.severity,
        failure.record.cause,
        failure.record.action,
    ) == (
        "node",
        "n2",
        1,
        "gpu_lost",
        "isolate",
    )
    assert failure.record.detected_by == "kernel log" and "fallen off the bus" in failure.record.reason
    agents[1].status(leaving="stopped by SIGTERM")  # Slurm ends what runs there
    agents[1].silent = True
    world.run(3)
    assert len(world.job().failures) == 1 and nodes_left(world) == [("1", "n2")], "one event, one failure"
    shown = next(node for node in told(world.core, "nodes") if node["node"] == "n2")
    assert shown["healthy"] and "fallen off the bus" in shown["suspect"]
    (item,) = attention(world.core.view)
    assert item.node == "n2" and "unicronctl pair-test --nodes n2" in item.reason


def test_what_a_users_process_says_is_about_its_own_job_and_counts_once():
    world, agents = cluster()
    world.slurm.submit("2", 1)
    world.slurm.queue["2", 0].update(state="RUNNING", node="n2", reason="")
    other = FakeAgent(world, "2", 0, "n2", nodes=1)
    other.register()
    other.ready()
    world.run(2)
    first, second = Speaker(agents[1]), Speaker(other)
    first.send(PAGE_FAULT)
    first.send(PAGE_FAULT, number=1)
    assert len(events(world, "node_event")) == 1
    first.send(GPU_LOST)
    world.run(2)
    assert nodes_left(world) == [("1", "n2")] and not down(world)
    assert {event.job for event in events(world, "failure_detected")} == {"1"}
    assert world.job("2").phase == "running" and world.slurm.queue["2", 0]["state"] == "RUNNING"
    other.die(0, -6)
    world.run(1)
    assert "Xid" not in world.job("2").failures[-1].record.reason, "nor does it explain what happens to others"
    second.send(GPU_LOST)
    world.run(2)
    assert {event.job for event in events(world, "failure_detected")} == {"1", "2"}, "each by its own word"


def test_users_can_take_no_nodes_out_of_service_whatever_they_print():
    """Defect: 48 of 100 nodes in an hour, within the limits of then."""
    world, _ = cluster(8)
    ecc = structs.Fault(type="RuntimeError", text="CUDA error: uncorrectable ECC error encountered", at=0.0, fatal=True)
    for _ in range(6):
        for agent in list(world.agents):
            if not agent.silent:
                agent.set(agent.slots[0], fault=ecc)
                Speaker(agent).send(GPU_LOST)
            world.run(1)
        follow(world, "1", 8)
        world.run(3)
        for agent in world.agents:
            if not agent.silent and agent.ranks[agent.slots[0]].state == "starting":
                agent.ready()
    assert not down(world) and all("DOWN" not in states for states in world.slurm.node_states.values())
    assert len(nodes_left(world)) <= world.config.max_requeues_per_job


def test_what_many_nodes_of_a_job_say_at_once_moves_it_off_none(snapshot):
    world, agents = cluster(5)
    for agent in agents[:3]:
        Speaker(agent).send(GPU_LOST)
        world.run(0.2)
    world.run(3)
    assert not nodes_left(world) and world.job().phase == "running" and not world.job().failures
    verdicts = events(world, "node_verdict")
    assert [event.record.action for event in verdicts] == ["shared"] * 3
    assert verdicts[0].record.reason == snapshot


def test_it_is_only_recorded_where_the_configuration_or_slurm_leaves_it_at_that(snapshot):
    world, agents = cluster(act_on_node_events=False)
    Speaker(agents[1]).send(GPU_LOST)
    world.run(3)
    assert not nodes_left(world) and not world.job().failures and world.job().phase == "running"
    assert events(world, "node_event")[0].record.reason == snapshot

    alone = World()
    agent = alone.start_job(nodes=2)[1]
    Speaker(agent).send(GPU_LOST)
    alone.run(3)
    assert alone.job().phase == "running" and not alone.job().failures
    assert "no Slurm" in events(alone, "node_verdict")[0].record.reason


def test_observe_mode_says_what_it_would_do():
    world, agents = cluster(observe=True)
    Speaker(agents[1]).send(GPU_LOST)
    world.run(3)
    assert not nodes_left(world) and world.job().phase == "running"
    assert "would leave n2" in events(world, "node_verdict")[0].record.reason


def test_a_wait_that_a_restart_interrupts_is_finished_by_the_next_controller():
    world, agents = cluster()
    Speaker(agents[1]).send(GPU_LOST)
    state = replay(world.log)
    assert node_events.undecided_events(state.nodes) == {("n2", events(world, "node_event")[0].id)}


def test_a_line_about_a_process_explains_the_end_of_that_rank_and_no_other():
    world, agents = cluster()
    for agent in agents:
        agent.set(agent.slots[0], pid=4242 if agent is agents[1] else 100)
    Speaker(agents[1]).send(PAGE_FAULT)
    assert not world.job().failures, "the line alone is no failure"
    world.run(0.5)
    agents[1].die(1, -6, last_line="terminate called")
    agents[2].die(2, -6, last_line="terminate called")
    world.run(0.5)
    first, second = world.job().failures
    assert (first.record.cause, first.record.severity, first.record.action) == ("illegal_memory_access", 2, "restart")
    assert "Xid" in first.record.reason and "n2 said 0." in first.record.reason
    assert second.record.cause == "exited_abnormally" and "Xid" not in second.record.reason
    assert not down(world)


def test_a_line_that_comes_after_the_end_of_the_rank_still_explains_it():
    world, agents = cluster()
    agents[1].set(1, pid=4242)
    agents[1].die(1, -9)
    world.run(0.3)
    assert world.job().failures[0].record.cause == "killed_from_outside"
    Speaker(agents[1]).send(OOM, at=world.now - 0.4)
    (failure,) = world.job().failures
    assert failure.record.cause == "host_out_of_memory" and "Killed process 4242" in failure.record.reason
    world.run(1)
    assert len(world.job().failures) == 1


def test_an_end_by_the_cgroups_oom_kill_is_out_of_memory():
    world, agents = cluster()
    agents[1].set(1, state="exited", exit=structs.Exit(code=-9, at=world.now, lived=60.0, oom=True))
    world.run(0.3)
    assert world.job().failures[0].record.cause == "host_out_of_memory"
    assert "out-of-memory kill" in world.job().failures[0].record.reason


def test_a_fatal_line_and_the_death_of_its_rank_are_one_failure_whichever_comes_first():
    for line_first in (True, False):
        world, agents = cluster()
        agents[1].set(1, pid=4242)
        if line_first:
            Speaker(agents[1]).send(GPU_LOST)
            agents[1].die(1, 1, last_line="RuntimeError: CUDA error: unknown error")
        else:
            agents[1].die(1, 1, last_line="RuntimeError: CUDA error: unknown error")
            Speaker(agents[1]).send(GPU_LOST)
        world.run(3)
        (failure,) = world.job().failures
        assert (failure.record.severity, failure.record.cause, failure.record.action) == (1, "gpu_lost", "isolate"), (
            line_first
        )
        assert nodes_left(world) == [("1", "n2")] and not down(world)
        world.check_replay()


def test_a_link_flap_is_recorded_and_explains_the_collective_that_breaks_soon_after():
    world, agents = cluster()
    Speaker(agents[1]).send("link ib0: link_downed rose by 1 within 5 s", source="link")
    world.run(1)
    assert not world.job().failures and world.job().phase == "running" and not down(world)
    event = events(world, "node_event")[0].record
    assert (event.cause, event.severity, event.action) == ("link_flapping", 3, "report")
    agents[1].set(
        1,
        state="stopped",
        broken=world.job().generation,
        fault=structs.Fault(type="RuntimeError", text="Connection reset by peer", at=world.now),
    )
    world.run(2)
    failure = world.job().failures[0]
    assert (failure.record.cause, failure.record.severity, failure.record.action) == ("link_flapping", 3, "reattempt")
    assert "link ib0" in failure.record.reason


def test_an_unknown_line_or_a_strangers_word_does_nothing():
    world, agents = cluster()
    Speaker(agents[1]).send("usb 1-1: new high-speed USB device number 2")
    assert events(world, "node_event")[0].record.action == "report"
    stranger = FakeAgent(world, "1", 1, "n2", name="stranger")
    Speaker(stranger).send(GPU_LOST)
    world.run(2)
    assert len(events(world, "node_event")) == 1 and not down(world)


def test_a_node_that_does_not_stop_talking_is_cut_short():
    world, agents = cluster()
    speaker = Speaker(agents[1])
    for number in range(200):
        speaker.send(f"NVRM: Xid (PCI:0000:3b:00): 13, pid={number}, name=python")
    assert len(events(world, "node_event")) == node_events.PER_MINUTE
    assert len(events(world, "node_events_dropped")) == 1
    world.run(61)
    speaker.send(PAGE_FAULT)
    assert len(events(world, "node_event")) == node_events.PER_MINUTE + 1


def test_senseless_numbers_and_texts_are_taken_without_harm():
    world, agents = cluster()
    speaker = Speaker(agents[1])
    for number, at in enumerate((float("nan"), float("inf"), -1e300)):
        speaker.send(f"NVRM: Xid (PCI:0000:0{number}:00): 31, pid=999999999999999999999, \0 {'x' * 100_000}", at=at)
    agents[1].die(1, -6)
    world.run(1)
    assert all(len(event.record.text) <= node_events.TEXT_KEPT for event in events(world, "node_event"))
    assert len(world.job().failures) == 1


def test_nodes_shows_the_last_event():
    world, agents = cluster()
    Speaker(agents[1]).send(PAGE_FAULT)
    listed = {node["node"]: node["last_event"] for node in told(world.core, "nodes")}
    assert listed["n2"]["cause"] == "illegal_memory_access" and listed["n1"] is None


# ---------------------------------------------------------------- Slurm's own word
@pytest.mark.parametrize(
    ("state", "cause"), [("OUT_OF_MEMORY", "host_out_of_memory"), ("TIMEOUT", "killed_from_outside")]
)
def test_a_lost_agents_failure_tells_what_slurm_says_of_its_element(state, cause):
    world, agents = cluster()
    agents[1].silent = True
    world.slurm.queue["1", 1].update(state=state, node=None)
    world.run(4)
    failure = world.job().failures[0]
    assert (failure.record.slots, failure.record.cause, failure.slurm) == ([1], cause, state)
    assert f"Slurm: 1_1 is {state}" in failure.record.reason
    assert sum(event.kind == "failure_verdict" and event.record.slurm is not None for event in world.log) == 1


@pytest.mark.by_hand
def test_slurms_word_is_for_the_agents_failure_also_where_its_rank_failed_after_it():
    world, agents = cluster()
    agents[1].die(1, -15)
    agents[1].status(leaving="stopped by SIGTERM")
    agents[1].silent = True
    world.job().failures.reverse()  # as where one message has told both, and the agent was judged first
    assert [failure.record.kind_of_failure for failure in world.job().failures] == ["agent", "rank"]
    world.slurm.queue["1", 1].update(state="CANCELLED", node=None)
    world.run(4)
    assert [failure.slurm for failure in world.job().failures] == ["CANCELLED", ""]


def test_an_element_that_slurm_shows_ended_is_found_without_waiting_for_the_lease():
    world, agents = cluster(heartbeat_period=5.0, report_timeout=20.0, restart_grace=10.0)
    agents[1].silent = True
    world.slurm.queue["1", 1].update(state="FAILED", node=None)
    began = world.now
    world.run(2.5)
    failure = world.job().failures[0]
    assert failure.record.detected_by == "its port is closed" and failure.detected_at - began < 2.5


def test_a_hints_status_names_no_cause(snapshot) -> None:
    """Defect: whoever sent a datagram said how the agent had died, in Slurm's name."""
    world, agents = cluster()
    agents[1].silent = True
    world.core.hint(datagrams.Hint(v=1, kind="task_exit", job="1", element=1, node="n2", status=9), world.now)
    world.run(1, heartbeats=True)
    failure = world.job().failures[0]
    assert failure.record.cause != "killed_from_outside" and failure.record.reason == snapshot


def test_few_of_those_who_said_something_are_remembered() -> None:
    """Defect: each job's agent on each node was remembered for as long as the controller ran."""
    queue, out = node_events.NodeEventQueue(), Outcome()
    for number in range(3 * NAMES):
        assert queue.may_record(f"n{number}", "1", 100.0 * number, True, out)
        assert not queue.may_record(f"n{number}", "2", 100.0 * number, False, Outcome())
    assert len(queue.throttle.buckets) <= NAMES and len(queue.silenced) <= NAMES and not out.records
