"""Jobs of plain programs: what the controller decides otherwise for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plain_agent import PlainAgent
from tests.support.scenarios import allocation_row, asked, plain, power_off, ready, trained
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.agent.loop.agent import SIGTERM_SECONDS
from unicron_ctl.agent.loop.plain_ranks import OWN_END_SECONDS, YOUNG_SECONDS, own_end_seconds
from unicron_ctl.agent.ranks.fence import CUT_OFF, NO_WATCHDOG
from unicron_ctl.controller.api.answers import answer
from unicron_ctl.controller.api.node_answers import visible_nodes
from unicron_ctl.controller.job import injection, modes
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.consensus.restart_lease import FENCE_SECONDS, OLD_SECONDS, on_another_clock
from unicron_ctl.shared.protocol import shared_plans, wire
from unicron_ctl.shared.protocol.ranges import LAUNCHES
from unicron_ctl.shared.protocol.structs import RankStep
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.settings.partitions import PartitionConfig

RESET = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:554] Connection closed by peer [10.0.0.2]"


ACTS = {"default": PartitionConfig(mode="act")}
FENCED = on_another_clock(PlainAgent.lease)  # for which a new world waits for what fell silent


def comes(world: World, element: int, node: str, **settings) -> PlainAgent:
    """An agent of plain programs registers."""
    agent = PlainAgent(world, "1", element, node, **settings)
    agent.register()
    agent.status()
    return agent


def start(world: World, nodes: int = 3, **settings) -> list[PlainAgent]:
    agents = [comes(world, element, f"n{element + 1}", nodes=nodes, **settings) for element in range(nodes)]
    world.run(0.3)
    return agents


def plans(world: World) -> list[wire.Plan]:
    return [event.record.plan for event in world.log if event.kind == "plan"]


def test_a_dead_process_leads_to_a_new_world_of_all():
    world, agents = plain(min_nodes=2, seconds=0.3)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2]
    world.run(30)
    agents[1].die(1, last_line="RuntimeError: CUDA error: device-side assert triggered")
    world.run(2.0)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2]
    assert [len(plan.members) for plan in plans(world)] == [3, 3]
    assert world.kinds()[-6:] == ["failure_detected", "rank_start", "break", "reform", "plan", "entered"]
    (failure,) = world.job().failures
    assert failure.record.slots == [1] and failure.resumed_at and failure.restored_at
    assert agents[1].ranks[1].incarnation == 1 and agents[0].ranks[0].incarnation == 0


def test_the_plan_names_the_nodes_of_its_world():
    """An array's agents do not know each other's; JAX and others read them from SLURM_STEP_NODELIST."""
    world, agents = plain(min_nodes=2, seconds=0.3)
    assert shared_plans.nodes(last_share(world)) == ["n1", "n2", "n3"]
    world.run(30)
    agents[1].die(1, code=1)
    power_off(world, "n2")
    world.run(90.0)
    assert sorted(world.job().members) == [0, 2] and shared_plans.nodes(last_share(world)) == ["n1", "n3"]


def last_share(world: World) -> wire.PlanShare:
    return [message for _, message in world.sent if isinstance(message, wire.PlanShare)][-1]


@pytest.mark.parametrize(
    ("ends", "killed"), [((-9,), True), ((1,), False), ((-6,), False), ((-9, 1), False), ((None,), True)]
)
def test_only_after_a_kill_from_outside_there_is_no_error_to_wait_for(ends, killed):
    """The second world counts: the first one lost a rank by its own error."""
    world, agents = plain(seconds=0.3)
    for codes in ((1,), ends):
        for agent, code in zip(agents[1:], codes, strict=False):
            if code is None:
                agent.silent = True
                world.dead_nodes.add(agent.node)
            else:
                agent.die(agent.slots[0], code)
        world.run(12.0)
    breaks = [message for message in agents[0].heard if isinstance(message, wire.Break)]
    last = max(message.generation for message in breaks)
    assert {message.killed for message in breaks if message.generation == last} == {killed}
    assert not breaks[0].killed
    after = breaks[-1]
    assert own_end_seconds(after, 5.0) == (0.0 if killed else OWN_END_SECONDS)
    assert own_end_seconds(after, YOUNG_SECONDS) == 0.0
    if ends == (None,):
        world.run(60.0)
        plan = [event.record.reason for event in world.log if event.kind == "plan"][-1]
        assert f"ready without {agents[1].node}" in plan, "whoever reads the job's log learns which node is lost"
    planned = wire.Break(generation=1, lost=[], reason="a node leaves")
    assert own_end_seconds(planned, 5.0) == SIGTERM_SECONDS, "it may hear of a signal of its own"


@pytest.mark.parametrize("mode", ["restart", "session"])
def test_the_other_rank_of_the_node_is_not_taken_for_lost(mode):
    world = World()
    kind = PlainAgent if mode == "restart" else FakeAgent
    agents = [kind(world, "1", e, f"n{e + 1}", ranks=2, nodes=2) for e in range(2)]
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(0.3)
    agents[1].die(3, code=1, last_line="ValueError: x")
    world.run(3)
    starts = [event.record.slot for event in world.log if event.kind == "rank_start"]
    assert starts == [3] and agents[1].ranks[2].incarnation == 0


def test_a_lost_node_leads_to_a_smaller_world_and_its_return_to_the_whole_one(snapshot):
    world, agents = plain(min_nodes=2, seconds=0.3)
    world.run(100)
    agents[2].silent = True
    world.run(FENCED + 8)
    assert sorted(world.job().members) == [0, 1] and world.job().phase == "running"
    comes(world, 2, "n3", nodes=3, min_nodes=2)
    world.run(3)
    assert sorted(world.job().members) == [0, 1], "others may come in a moment"
    world.run(6)
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"
    assert [f.record.kind_of_failure for f in world.job().failures] == ["node"], (
        "a restart for a newcomer is no failure"
    )
    assert next(event.record.reason for event in reversed(world.log) if event.kind == "break") == snapshot


def fell_silent(**changes) -> World:
    """A world of four that has lost its last agent: it and its node say nothing any more."""
    world, agents = plain(4, seconds=0.3)
    world.run(100)
    for name, value in changes.items():
        setattr(agents[3], name, value)
    agents[3].status()
    agents[3].silent = True
    return world


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_world_waits_for_the_lease_of_what_fell_silent(restarted, snapshot):
    """Its processes may live, and write the same files."""
    world = fell_silent()
    world.run(10)
    if restarted:
        world.restart()
    world.run(FENCED - (10 if restarted else 15))
    assert world.job().phase == "forming" and len(plans(world)) == 1
    (failure,) = world.job().failures
    notes = [[m.text for m in agent.heard if isinstance(m, wire.Note)] for agent in world.agents]
    assert [len(told) for told in notes] == [1, 0, 0, 0] and [failure.record.reason, *notes[0]] == snapshot
    world.run(20 if restarted else 15)
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"


@pytest.mark.parametrize(
    ("lease", "before", "after"), [(FENCE_SECONDS, 5.5, 8.0), (0.0, OLD_SECONDS - 2, OLD_SECONDS + 1)]
)
def test_the_lease_is_the_one_that_the_agent_has_named(lease, before, after):
    """Those of release 0.2 name none."""
    world = fell_silent(lease=lease)
    world.run(before)
    assert world.job().phase == "forming" and len(plans(world)) == 1
    world.run(after - before)
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"


def test_the_doors_of_a_world_are_those_that_its_agents_have_opened_for_it():
    world = World()
    agents = start(world, nodes=2)
    for agent, port in zip(agents, (4001, 4002), strict=True):
        agent.opened = port
    agents[0].die(0, code=1, last_line="ValueError: x")
    world.run(3)
    shares = [agent.held[max(agent.held)].doors for agent in agents]
    assert shares == [["n2:4002"], ["n1:4001"]]
    assert [agent.held[min(agent.held)].doors[0].count("4001") for agent in agents] == [0, 0], "before, of the agents"


def test_an_agent_whose_ranks_have_ended_hears_of_the_break_too():
    """Its door must not keep the processes of others."""
    world, agents = plain(seconds=0.3)
    agents[1].obedient = False
    agents[1].die(1)
    world.run(5.0)
    assert agents[1].ranks[1].state == "exited"
    broken = world.job().broken
    assert broken and [m.generation for m in agents[1].heard if isinstance(m, wire.Break)][:1] == [broken]
    agents[1].left = broken
    agents[1].heard.clear()
    agents[1].status()
    world.run(3.0)
    assert not [m for m in agents[1].heard if isinstance(m, wire.Break)], "it has obeyed"


def test_no_agent_gets_a_plan_before_its_controller_knows_the_doors_of_that_world():
    """Defect: a controller that was started again named the door of an agent in place of the world's, which it had not
    heard. It stays open when the agent leaves the world."""
    world = World()
    agents = [PlainAgent(world, "1", element, f"n{element + 1}", nodes=3) for element in range(3)]
    agents[2].obedient = False
    for agent in agents:
        agent.register()
        agent.status()
    world.run(1.0)
    assert world.job().phase == "entering"
    agents[0].silent = True
    world.restart()
    agents[2].held.clear()
    for agent in agents[1:]:
        agent.register()
        agent.status()
    world.run(1.0)
    assert not agents[2].held
    agents[0].silent = False
    agents[0].register()
    world.run(0.5, heartbeats=False)
    assert not agents[2].held, "it has registered, and not said more"
    agents[0].status()
    world.run(1.0)
    assert [share.doors for share in agents[2].held.values()] == [["n1:9999", "n2:9999"]]


def test_a_controller_that_is_started_again_waits_only_for_agents_of_the_last_world():
    """Defect: it also waited 600 s for an agent that was lost, and waited for, before that world began."""
    world = fell_silent()
    world.run(FENCED + 20)
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"
    world.restart()
    world.run(5)
    world.agents[1].die(1, last_line="RuntimeError: CUDA error: device-side assert triggered")
    world.run(5)
    assert world.job().phase == "running" and [len(plan.members) for plan in plans(world)] == [4, 3, 3]


class SlowToEnd(PlainAgent):
    """Its processes take long to end; it shuts its door at once."""

    lease = FENCE_SECONDS

    def get(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Break):
            return super().get(message)
        self.left = message.generation
        self.status()

    def end(self) -> None:
        self.set(self.element, state="waiting", broken=self.left, generation=0)


def test_a_door_counts_as_shut_since_its_agent_said_so_and_not_since_all_processes_have_ended():
    """Defect: the lease of a silent agent was counted from the end of the others' processes."""
    world, agents = trained(4, kind=SlowToEnd, seconds=0.3)
    world.run(30)
    agents[3].silent = True
    while world.job().phase == "running":
        world.run(0.1)
    world.run(5.0)
    assert world.job().phase == "breaking"
    for agent in agents[:3]:
        agent.end()
    world.run(3.0)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2]


def test_who_counted_as_dead_and_speaks_again_has_an_open_door():
    """Defect: it counted as shut in all later worlds."""
    world = fell_silent(killed=True)
    world.run(12)
    back = world.agents[3]
    assert sorted(world.job().members) == [0, 1, 2] and back.agent in world.core.view.job(world.job()).ended
    back.silent = back.killed = False
    world.run(12)
    assert sorted(world.job().members) == [0, 1, 2, 3]
    back.obedient = False  # it does not hear the Break
    world.agents[1].silent = True
    world.run(9)
    shut = world.core.view.job(world.job()).shut
    assert world.agents[0].agent in shut and back.agent not in shut


@pytest.mark.parametrize("what", [What.NODE_LOST, What.AGENT_DIED])
@pytest.mark.parametrize("dead", [True, False])
def test_what_is_found_of_an_agent_says_nothing_about_its_successor(what, dead):
    world, agents = plain(3, seconds=0.3)
    job = world.core.view.job(world.job())
    for agent in ("one before it", agents[2].agent):
        found = Finding(what, "1", (), world.now, Source.PEER, "", 2, "n3", dead=dead, agent=agent)
        world.core.judge(found)
        is_it = agent == agents[2].agent
        assert bool(world.job().failures) == bool(job.ended or job.fences) == is_it


class PartlyFenced(PlainAgent):
    """Nothing ends the processes of the fourth node."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.fenced = self.element != 3


@pytest.mark.parametrize("restarted", [False, True])
def test_processes_that_nothing_ends_are_waited_for_as_long_as_silence_is(restarted):
    """Another controller, which has never heard the agent, has it in the log."""
    world, agents = trained(4, kind=PartlyFenced, seconds=0.3)
    world.run(100)
    agents[3].silent = True
    world.run(10)
    if restarted:
        world.restart()
    world.run(world.config.state_wait_seconds - 20)
    assert world.job().phase == "forming" and len(plans(world)) == 1
    world.run(30)
    assert sorted(world.job().members) == [0, 1, 2]


@pytest.mark.parametrize("words", [CUT_OFF, NO_WATCHDOG, ""])
def test_a_job_does_not_end_because_its_network_is_away_again_and_again(words):
    """Defect: processes that their lease had ended counted as dead by an error of the program."""
    world, agents = plain(3, seconds=0.3)
    for agent in (agents[0], agents[1], agents[0], agents[1], agents[0]):
        world.run(20)
        agent.die(agent.slots[0], code=-9, lived=15.0, last_line=words)
        world.run(5)
    assert bool(world.job().over) == (not words)


def _say(world: World, states: set[str], reason: str) -> None:
    world.slurm.node_states["n3"], world.slurm.reasons["n3"] = states, reason


def _end_element(world: World) -> None:
    """Its slurmd answers: it has ended the element, which waits again."""
    _say(world, {"IDLE"}, "")
    world.slurm.queue["1", 2].update(state="PENDING", node=None, reason="JobHeldUser")


@pytest.mark.parametrize(
    ("says", "proof"),
    [
        (lambda world: _say(world, {"DOWN"}, "the PDU is off"), True),
        (lambda world: _say(world, {"IDLE", "POWERED_DOWN"}, ""), True),
        (_end_element, True),
        (lambda world: _say(world, {"DOWN", "NOT_RESPONDING"}, "Not responding"), False),
        (lambda world: _say(world, {"DOWN"}, "unicron[node_problem]: lost heartbeat of 1_2"), False),
        (lambda world: _say(world, {"IDLE", "POWERING_DOWN"}, ""), False),
    ],
    ids=["admin", "powered down", "ended", "not responding", "ours", "on the way"],
)
def test_what_slurm_says_of_a_silent_node_ends_the_wait_if_it_is_a_proof(says, proof):
    world, _ = trained(3, 0, kind=PlainAgent)
    world.run(30)
    power_off(world, "n3")
    world.run(8.0)
    assert world.job().phase == "forming"
    says(world)
    world.run(6.0)
    assert (sorted(world.job().members) == [0, 1]) == proof


def lost_with(program: str, **changes) -> World:
    """A world of three on Slurm has lost its last node, which the site's program switches off."""
    world, _ = trained(3, 0, kind=PlainAgent, config={"power_off": program, "partitions": ACTS} | changes)
    world.run(30)
    power_off(world, "n3")
    world.run(8.0)
    return world


def told(world: World) -> str:
    return "\n".join(str(event.record) for event in world.log)


def test_a_node_that_the_sites_program_has_switched_off_is_not_waited_for():
    """It is dead for ever, also for a controller that is started again."""
    world = lost_with("/bin/true %n")
    assert sorted(world.job().members) == [0, 1] and world.job().phase == "running"
    assert asked(world.slurm, "power_off") == ["n3"] and world.job().agents[2].gone == "dead"
    assert "n3 is powered off: its processes are dead" in told(world)
    world.restart()
    assert world.job().agents[2].gone == "dead"


def test_a_node_that_the_program_could_not_switch_off_is_waited_for_and_the_log_says_so():
    world = lost_with("/bin/false %n")
    assert world.job().phase == "forming"
    text = "power off n3: the program of power_off ended with status 1; the lease of its processes is waited for"
    assert text in told(world)
    world.run(FENCED)
    assert sorted(world.job().members) == [0, 1]
    assert asked(world.slurm, "power_off") == ["n3"], "once"


def test_no_node_is_switched_off_without_permission():
    world = lost_with("/bin/true %n", partitions={"default": PartitionConfig(mode="act", actions=["down"])})
    assert world.job().phase == "forming" and not asked(world.slurm, "power_off")
    assert "would power off n3" in told(world)


def test_a_node_is_switched_off_within_10_s_or_not(monkeypatch):
    """Later it may be back, with another job."""
    done = []
    monkeypatch.setattr("tests.support.world.perform", lambda slurm, action: done.append(action))
    world = lost_with("/bin/true %n")
    asked_at = [e.time for e in world.log if e.kind == "slurm_action" and e.record.action == "power_off"]
    assert asked_at and [one.not_after - 10.0 for one in done if one.action == "power_off"] == asked_at


@pytest.mark.parametrize("only", [True, False])
def test_no_more_nodes_are_switched_off_than_may_be_taken_out_of_service(only):
    """Defect: the limit counted only what Unicron sets down itself. Without that permission, or if Slurm had the nodes
    down before, all were switched off."""
    rules = {"default": PartitionConfig(mode="act", actions=["power_off"])} if only else ACTS
    config = {"power_off": "/bin/true %n", "partitions": rules, "max_isolated_nodes": 2, "max_isolated_share": 0.0}
    world, _ = trained(6, 0, kind=PlainAgent, config=config)
    world.run(30)
    for node in ("n6", "n5", "n4"):
        power_off(world, node)
        if not only:
            world.slurm.node_states[node], world.slurm.reasons[node] = {"DOWN", "NOT_RESPONDING"}, "Not responding"
        world.run(60)
    assert asked(world.slurm, "power_off") == ["n6", "n5"] and not asked(world.slurm, "down")
    assert "n4 is not powered off: n5, n6 were taken out of service within" in told(world)
    assert sorted(world.job().members) == [0, 1, 2], "its lease was waited for"
    world.check_replay()


def test_no_node_is_switched_off_under_other_jobs():
    rules = {"default": PartitionConfig(mode="act", actions=["drain", "down", "power_off"])}
    world, _ = trained(3, 0, kind=PlainAgent, config={"power_off": "/bin/true %n", "partitions": rules})
    world.run(30)
    world.slurm.queue["2", 0] = world.slurm.queue["1", 2] | {}
    world.run(5)
    power_off(world, "n3")
    world.run(8.0)
    assert world.job().phase == "forming" and not asked(world.slurm, "power_off")
    assert "n3 is not powered off: other jobs run there" in told(world)


def test_who_comes_back_and_has_stopped_is_waited_for_no_longer():
    world = fell_silent()
    world.run(10)
    silent = world.agents[-1]
    silent.silent = False
    silent.status()
    world.run(8)
    assert sorted(world.job().members) == [0, 1, 2, 3] and world.job().phase == "running"


def test_an_agent_that_died_on_a_living_node_is_not_waited_for():
    """Its node refuses connections at its door: its processes died with it."""
    world = fell_silent(killed=True)
    world.run(12)
    assert sorted(world.job().members) == [0, 1, 2]


def test_no_world_below_the_minimum():
    world, agents = plain(min_nodes=3, seconds=0.3)
    agents[2].silent = True
    world.run(FENCED + 30)
    assert world.job().phase == "forming" and len(plans(world)) == 1
    comes(world, 2, "n3", nodes=3, min_nodes=3)
    world.run(1)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2]


def test_a_newcomer_that_is_not_worth_a_restart_waits_for_the_next_one(snapshot):
    world = World(mtbf_node_hours=0.5, checkpoint_seconds=3600.0)
    agents = start(world, nodes=4)
    agents[3].silent = True
    world.run(FENCED + 8)
    assert len(world.job().members) == 3
    world.run(200)
    comes(world, 3, "n4", nodes=4)
    world.run(30)
    assert len(world.job().members) == 3
    (said,) = [event for event in world.log if event.kind == "newcomers_wait"]
    assert said.record.elements == [3] and said.record.reason == snapshot
    agents[0].die(0)
    world.run(3)
    assert len(world.job().members) == 4, "whoever is there takes part in the next world"


@pytest.mark.parametrize(
    ("nodes", "newcomers", "age", "good"),
    [
        (2, 1, 86400.0, True),
        (7, 1, 86400.0, True),
        (100, 1, 200.0, True),
        (100, 1, 3600.0, False),
        (100, 9, 3600.0, True),
    ],
)
def test_what_a_larger_world_is_worth(nodes, newcomers, age, good):
    decided, reason = modes.worth(nodes, newcomers, age, ControllerConfig())
    assert decided is good and f"{newcomers} more node" in reason


def test_peers_that_die_of_a_death_are_not_blamed():
    """Three times a node dies and its peers say so: none of them is put aside or counted as a bug."""
    world = World()
    start(world, nodes=4)
    for turn in range(3):
        alive = {agent.element: agent for agent in world.agents if not agent.silent}
        alive[3].silent = True
        for element in range(3):
            alive[element].die(element, code=1, lived=30.0, last_line=RESET)
        world.run(FENCED + 8)
        assert sorted(world.job().members) == [0, 1, 2]
        comes(world, 3, "n4", nodes=4, name=f"again{turn}")
        world.run(10)
        assert world.job().phase == "running" and len(world.job().members) == 4
    blamed = [f for f in world.job().failures if f.record.kind_of_failure == "rank"]
    assert len(blamed) == 9 and {f.record.severity for f in blamed} == {3}
    assert not world.core.state.history.by_slot


@pytest.mark.parametrize(
    ("steps", "text"), [(False, "ModuleNotFoundError: No module named 'lr'"), (True, "NameError: name 'lr' is unknown")]
)
def test_a_script_that_fails_everywhere_at_once_ends_the_job(steps, text):
    """Steps excuse it not: they are the same few after each start, as far as anybody knows."""
    world, agents = plain(seconds=0.3)
    for _ in range(8 if steps else 4):
        if world.job().ended:
            break
        for agent in agents if steps else ():
            agent.report(world.job().iteration + 1, RankStep(agent.slots[0], [0], 1.0, None))
        for agent in agents:
            if agent.ranks[agent.element].state == "running":
                agent.die(agent.element, code=2, lived=20.0 if steps else 0.5, last_line=text)
        world.run(12)
    assert (world.job().iteration >= 1) == steps
    assert world.job().ended.code == 2 and text in world.job().ended.reason


def test_worlds_that_break_again_and_again_end_the_job_unless_one_lasts(monkeypatch, snapshot):
    monkeypatch.setattr(modes, "STEADY_SECONDS", 50.0)
    monkeypatch.setattr(modes, "MOST_RESTARTS", 4)
    world, agents = plain(2, seconds=0.3)
    for turn in range(8):
        world.run(60 if turn == 3 else 1)
        if world.job().ended:
            break
        agents[turn % 2].die(turn % 2, code=1, lived=130.0, last_line=RESET)
        world.run(8)
    assert turn == 7 and world.job().restarts == 4, "the steady world after the third break began the count anew"
    assert world.job().ended.reason == snapshot and world.job().ended.code == 1
    assert [event.kind for event in world.log].count("steady") == 1


def test_who_has_ended_starts_again_when_another_fails_and_the_job_ends_when_all_have():
    world, agents = plain(seconds=0.3)
    agents[0].set(0, state="finished")
    agents[1].set(1, state="finished")
    world.run(1)
    assert world.job().phase == "running"
    agents[2].die(2, code=1, lived=300.0, last_line="ValueError: cannot write")
    world.run(3)
    assert world.job().phase == "running" and [a.ranks[a.element].state for a in agents] == ["running"] * 3
    for agent in agents:
        agent.set(agent.element, state="finished")
    world.run(1)
    assert world.job().ended.code == 0


def test_all_agents_of_a_job_are_in_the_same_mode(snapshot):
    world = World()
    start(world, nodes=3)
    other = PlainAgent(world, "1", 2, "n3", mode="session", nodes=3)
    other.register()
    refused = next(m for m in other.heard if isinstance(m, wire.Refusal))
    assert refused.final and refused.reason == snapshot


def test_a_program_that_ends_with_a_status_of_its_own_costs_no_node():
    slurm = FakeSlurm(1)
    slurm.submit("1", 1)
    world = World(slurm)
    (agent,) = start(world, nodes=1)
    for _ in range(4):
        world.run(3)
        if world.job().ended:
            break
        agent.die(0, code=3, lived=1.0, last_line="usage: program FILE")
    assert world.job().ended.code == 3 and "usage: program FILE" in world.job().ended.reason
    assert slurm.node_states["n1"] == {"IDLE"}


def test_the_next_srun_of_a_batch_script_is_a_training_of_its_own(snapshot):
    world, agents = plain(2, seconds=0.3)

    def register(element: int, step: int, mode: str = "restart") -> PlainAgent:
        agent = PlainAgent(world, "1", element, f"n{element + 1}", mode=mode, nodes=2, name=f"{element} in {step}")
        agent.obedient = False  # it would ask once more
        world.to_core(agent, agent.registration(step=step * LAUNCHES))
        agent.obedient = True
        return agent

    early = register(0, 1)
    world.agents.remove(early)
    (waits,) = [m for m in early.heard if isinstance(m, wire.Refusal)]
    assert not waits.final
    for agent in agents:
        agent.set(agent.element, state="finished")
    world.run(1)
    assert world.job().ended and not any(isinstance(m, wire.Welcome) for m in early.heard)
    world.agents.clear()
    second = [register(element, 1, "session") for element in range(2)]
    ready(world, second, after=1)
    assert world.job().phase == "running" and world.job().step == LAUNCHES and world.job().settings.mode == "session"
    requeued = register(1, 0)
    (refused,) = [m for m in requeued.heard if isinstance(m, wire.Refusal)]
    assert refused.alone and [waits.reason, refused.reason] == snapshot
    assert world.job().phase == "running" and world.job().agents[1].agent == second[1].agent


def test_the_next_step_keeps_its_nodes():
    slurm = FakeSlurm(2)
    slurm.submit("1", 2)
    world = World(slurm)
    agents = start(world, nodes=2)
    world.run(3)
    for agent in agents:
        agent.set(agent.element, state="finished")
    assert world.job().ended
    world.agents.clear()
    for element in range(2):
        agent = PlainAgent(world, "1", element, f"n{element + 1}", nodes=2)
        world.to_core(agent, agent.registration(step=1))
        agent.status()
    world.run(5)
    assert world.job().phase == "running" and len(world.job().members) == 2
    assert world.job().allotted == [0, 1] and not world.job().leaving


def test_a_newcomer_is_taken_in_also_where_the_admin_only_observes():
    world = World(observe=True, join_after_seconds=1.0)
    for element in range(2):
        comes(world, element, f"n{element + 1}", nodes=3)
    world.run(3)
    assert len(world.job().members) == 2
    comes(world, 2, "n3", nodes=3)
    world.run(20)
    assert len(world.job().members) == 3 and not world.job().ended


def test_a_node_that_the_plan_takes_leaves_and_the_others_start_again():
    slurm = FakeSlurm(4)
    slurm.submit("1", 3)
    world = World(slurm)
    start(world, nodes=3, weight=1.0)
    world.run(3)
    assert len(world.job().members) == 3
    slurm.submit("2", 2)
    big = PlainAgent(world, "2", 0, "n4", nodes=2, weight=50.0)
    big.register()
    world.run(10)
    assert len(world.job().members) < 3 and world.job().phase == "running"
    assert ("requeue_hold" in {call[0] for call in slurm.calls}) and not world.job().failures


def test_status_names_the_mode(snapshot):
    world = World()
    start(world)
    assert answer(world.core, None, "jobs", {}, EVERYBODY)[0].mode == "restart"
    told = answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)
    assert told.mode == "restart" and told.mode_reason == world.agents[0].settings.mode_reason
    listed = status_tables.jobs(answer(world.core, None, "jobs", {}, EVERYBODY))
    shown = [*listed.lines(), *str(status_tables.explanation(told)[0]).splitlines()]
    assert [line for line in shown if "restart mode" in line] == snapshot


def test_hooks_of_ranks_cannot_be_asked_of_plain_programs(snapshot):
    world = World(allow_inject=True)
    start(world)
    with pytest.raises(injection.NotInjected) as refused:
        injection.perform(world.core.view, world.core.view.job(world.job()), "exception:python")
    assert str(refused.value) == snapshot
    assert injection.perform(world.core.view, world.core.view.job(world.job()), "rank-kill")[0].job == "1"


def test_plain_programs_that_end_with_a_preempted_peer_have_not_failed():
    """Defect: Slurm's SIGTERM ends a plain program by itself, and that and what its peers made of it were failures."""
    world, agents = plain(3, seconds=0.3)
    agents[0].noticed = True
    agents[0].die(0, code=-15)
    agents[1].die(1, code=1, last_line="ConnectionResetError: Connection reset by peer")
    agents[2].die(2, code=1, last_line="ConnectionResetError: Connection reset by peer")
    agents[0].status("stopped by SIGTERM")
    agents[0].silent = True
    world.run(10)
    assert not world.job().failures
    assert sorted(world.job().members) == [1, 2] and world.job().phase == "running"


@pytest.mark.parametrize("min_nodes", [1, 2])
@pytest.mark.parametrize("shape", ["allocation", "array", "full array"])
def test_an_error_of_one_rank_ends_the_job_with_its_status_and_never_shrinks_its_world(shape, min_nodes):
    """Defect: its peers waited for its backoff no longer than 10 s, and nobody for an element that moved: the others
    made a world of their own, and the job ended well."""
    slurm = FakeSlurm(2 if shape == "full array" else 4)
    slurm.submit("1", 2)
    if shape == "allocation":
        slurm.queue = {("1", 0): allocation_row("n[1-2]")}
    world, agents = World(slurm), []

    def add(element: int, node: str, turn: int) -> PlainAgent:
        agent = PlainAgent(world, "1", element, node, nodes=2, min_nodes=min_nodes, name=f"{element}-{turn}")
        agent.settings.allocation = shape == "allocation"
        agent.register()
        agent.status()
        return agent

    agents = [add(0, "n1", 0), add(1, "n2", 0)]
    for turn in range(1, 12):
        world.run(10.0)
        moved = slurm.queue.get(("1", 1), {}).get("node")
        if moved and moved != agents[1].node:
            agents[1].silent = True
            world.agents.remove(agents[1])
            agents[1] = add(1, moved, turn)
        if agents[1].ranks[1].state == "running":
            agents[1].die(1, code=3, lived=2.0, last_line="ValueError: x")
            agents[0].die(0, code=1, lived=2.0, last_line=RESET)
        world.run(60.0)
        if world.job().ended:
            break
    assert {len(plan.members) for plan in plans(world)} == {2}
    assert world.job().ended.code == 3 and "ValueError: x" in world.job().ended.reason
    assert turn <= (8 if shape == "full array" else 5)


def test_nodes_whose_job_has_ended_are_shown_as_used_by_nobody():
    """Defect: their agents end unheard, and the job stood beside idle nodes for minutes."""
    world, agents = plain(seconds=0.3)
    assert any(node.used_by for node in visible_nodes(world.core, EVERYBODY))
    for agent in agents:
        for slot in agent.slots:
            agent.set(slot, state="finished")
    world.run(3.0)
    assert world.job().ended and not any(node.used_by for node in visible_nodes(world.core, EVERYBODY))
