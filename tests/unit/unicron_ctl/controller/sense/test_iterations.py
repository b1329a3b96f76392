"""Iteration times at the controller: slow jobs are reported with their straggler, hanging ranks are found, named,
dumped and replaced."""

from __future__ import annotations

import random

import pytest

from tests.support.training import ORDERS, USUAL, events, hang, phases, sent, train, trained_world
from tests.support.world import FakeAgent, World
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire


@pytest.fixture
def world():
    return trained_world(iterations=0)


@pytest.fixture
def training():
    return trained_world()


def answer_stacks(world: World, text: str = "in fetch") -> None:
    """Agents answer Stacks, as real ones do."""
    for name, message in [(name, m) for name, m in world.sent if isinstance(m, wire.Stacks)]:
        agent = next(a for a in world.agents if a.agent == name)
        world.to_core(
            agent,
            wire.StackTrace(
                job="1",
                slot=message.slot,
                incarnation=message.incarnation,
                how="faulthandler",
                state="S (sleeping)",
                text=text,
            ),
        )


def test_a_hanging_rank_is_named_dumped_stopped_and_replaced(training, snapshot):
    world = training
    began = world.now
    hang(world, [1])
    world.run(USUAL * 3 + 0.5)
    found = events(world, "failure_detected")
    assert (
        len(found) == 1
        and found[0].record.slots == [1]
        and found[0].record.cause == "task_hang"
        and found[0].record.severity == 2
    )
    assert found[0].record.detected_by == "statistics" and found[0].time - began <= 3 * USUAL + 0.5
    assert events(world, "hang")[0].record.reason == snapshot
    assert [m.slot for m in sent(world, wire.Stacks)] == [1, 0], "the culprit, and one who waits"
    assert not sent(world, ORDERS), "the stacks come first"
    answer_stacks(world)
    assert {e.record.slot: e.record.text for e in events(world, "stacks")} == {0: "in fetch", 1: "in fetch"}
    world.run(0.3)
    assert sent(world, wire.Break)[0].lost == [1]
    assert [m.slot for m in sent(world, wire.StopRank)] == [1] and sent(world, wire.StartRank)[0].slot == 1
    assert len(events(world, "failure_detected")) == 1, "its death is no second failure"
    assert sorted(world.job("1").members) == [0, 2]


SHARDS = {  # of the rank that has not come, the one that waits for it in their group, and one in another group
    0: {"alike.0.2": (4, 4, "gloo:all_reduce"), "mesh.1.0.1": (9, 9, "gloo:all_gather")},
    1: {"alike.1.2": (4, 4, "gloo:all_reduce"), "mesh.1.0.1": (10, 9, "gloo:all_gather")},
    2: {"alike.0.2": (5, 4, "gloo:all_reduce"), "alike.1.2": (5, 4, "gloo:all_reduce")},
}


def test_of_ranks_that_are_equally_far_the_one_that_others_wait_for_is_named(training):
    hang(training, [0, 1])
    for agent in training.agents:
        for slot in agent.slots:
            agent.set(slot, collectives=SHARDS[slot])
    training.run(3 * USUAL + 0.5)
    (hung,) = (event.record for event in events(training, "hang"))
    assert [culprit.slot for culprit in hung.culprits] == [0] and hung.culprits[0].phase == "computing"
    assert (
        "slot 0 has not begun collective 5 of group alike.0.2 (gloo:all_reduce), in which 1 other waits" in hung.reason
    )


def test_what_a_flight_recorder_says_against_the_ranks_own_word_does_not_count(training):
    hang(training, [1])
    for agent in training.agents:
        for slot in agent.slots:
            agent.set(slot, collectives=SHARDS[slot])
    training.run(3 * USUAL + 0.5)
    assert [culprit.slot for culprit in events(training, "hang")[0].record.culprits] == [1]


def test_a_rank_that_goes_on_while_its_stacks_are_taken_is_left_alone(training):
    hang(training, [1])
    training.run(3 * USUAL + 0.4)
    assert events(training, "hang")
    train(training, 3)
    assert not sent(training, ORDERS) and "is not stopped" in events(training, "failure_action")[0].record.text


def test_nobody_behind_is_a_collective_that_hangs_and_is_tried_again_in_place(training):
    hang(training, [])
    training.run(3 * USUAL + 0.5)
    failure = events(training, "failure_detected")[0].record
    assert failure.cause == "nccl_timeout" and failure.severity == 3 and failure.action == "reattempt"
    order = sent(training, wire.Break)[0]
    assert order.lost == [] and not sent(training, (wire.StopRank, wire.StartRank))
    assert sorted(training.job("1").members) == [0, 1, 2] and training.job("1").generation == 2


def test_a_second_hang_right_after_the_recovery_is_found_too(training):
    hang(training, [])
    training.run(3 * USUAL + 0.5)
    assert training.job("1").phase == "running"
    began = training.now
    hang(training, [1])
    training.run(3 * 0.5 + 0.5)
    assert events(training, "failure_detected")[1].record.slots == [1]
    assert events(training, "hang")[1].time - began <= 3 * 0.5 + 0.3, "3 iterations, of the floor at least"


def test_iterations_that_are_made_again_are_no_hang(training):
    """Defect: a job that had begun anew from an older state stood still for as long as it made up for that."""
    world = training
    for agent in world.agents:
        agent.die(agent.element, 1)
    for agent in world.agents:
        world.run(0.5)
        agent.ready()
    world.run(0.2)
    assert world.job("1").plan.iteration == 0 and world.job("1").phase == "running"
    for iteration in range(20):
        hang(world, [1])  # for a moment: one is always the last
        train(world, 1, first=iteration)
    train(world, 5)
    assert not events(world, "hang") and world.job("1").iteration == 24
    began = world.now
    hang(world, [1])
    world.run(5.0)
    assert events(world, "hang")[0].time - began < 3.0


def rejoin(world: World, slot: int, code: int = -9) -> None:
    """The rank dies, its new process comes back and is taken in."""
    agent = world.agents[slot]
    agent.die(slot, code)
    agent.ready()
    world.run(0.5)
    for other in world.agents:
        other.take_offer()
    world.run(0.2)
    assert world.job("1").phase == "running" and slot in world.job("1").members


def outside(world: World, slot: int, seconds: float, step: float = 0.5, **process) -> None:
    """A rank does not come back from the script's own code while the others wait; `idle` grows with the time."""
    last = world.job("1").iteration
    for other in (0, 1, 2):
        if other != slot:
            world.agents[other].set(other, iteration=last + 1, phase="reducing")
    for turn in range(round(seconds / step)):
        idle = {"idle": process["idle"] + turn * step} if "idle" in process else {}
        world.agents[slot].set(slot, iteration=last, phase="stepped", **{**process, **idle})
        world.run(step)


# ---------------------------------------------------------------- the time that a rank has
def compile_once(world: World) -> None:
    """The job's ranks compile_once for 13 s in their first iteration."""
    train(world, 1, seconds=13.0)
    train(world, 20)


def after_a_recovery(world: World) -> None:
    """That says nothing of those who train on."""
    compile_once(world)
    world.agents[2].die(2)
    world.run(0.5)
    assert sorted(world.job("1").members) == [0, 1] and world.job("1").phase == "running"


def with_a_newcomer(world: World) -> None:
    compile_once(world)
    rejoin(world, 1)


def with_a_newcomer_after_a_restart(world: World) -> None:
    train(world, 20)
    for _ in range(2):
        world.restart()
        for agent in world.agents:
            agent.status()
        world.run(1)
        train(world, 12)
    rejoin(world, 1)


def after_a_long_first_iteration(world: World) -> None:
    train(world, 1, seconds=20.0)
    train(world, 3)


@pytest.mark.parametrize(
    ("before", "slot", "quiet", "then"),
    [
        pytest.param(lambda world: None, 1, 39.0, 3.0, id="the first iteration has its own limit, 40 s"),
        pytest.param(lambda world: train(world, 4), 1, 4.5, 1.5, id="not learned: 10x the floor of 0.5 s"),
        pytest.param(after_a_long_first_iteration, 1, 55.0, 10.0, id="3x the longest"),
        pytest.param(after_a_recovery, 1, 0.5, 2.5, id="the usual time after a recovery"),
        pytest.param(with_a_newcomer, 1, 30.0, 12.0, id="a newcomer may compile as long as the first ones"),
        pytest.param(with_a_newcomer, 0, 0.5, 2.5, id="the others beside it have the usual time"),
        pytest.param(with_a_newcomer_after_a_restart, 1, 35.0, 8.0, id="a newcomer that nobody has seen compile"),
    ],
)
def test_a_rank_that_hangs_is_found_after_its_time_and_not_before(world, before, slot: int, quiet: float, then: float):
    world.core.config.first_iteration_seconds = 40.0
    before(world)
    hang(world, [slot])
    world.run(quiet)
    assert not events(world, "hang") and not events(world, "overdue")
    world.run(then)
    assert [culprit.slot for culprit in events(world, "hang")[0].record.culprits] == [slot]


BUSY, IDLE = {"process": "D"}, {"process": "S"}


@pytest.mark.parametrize(
    ("longest", "process", "quiet", "then"),
    [
        pytest.param({0: 2.0}, IDLE, 19.0, 4.0, id="it never took long, and does nothing"),
        pytest.param({1: 30.0}, IDLE, 85.0, 10.0, id="3x the longest of any rank, who may write the next checkpoint"),
        pytest.param({}, BUSY, 590.0, 20.0, id="it computes or writes: a first checkpoint"),
        pytest.param(None, IDLE, 590.0, 20.0, id="it has not been there often"),
    ],
)
def test_a_rank_outside_an_iteration_has_its_time(world, longest, process: dict, quiet: float, then: float):
    world.core.config.hang_idle_seconds = 20.0
    train(world, 12 if longest is None else 40, outside=longest)
    step = 0.5 if quiet < 100 else 2.0
    for seconds, idle, hangs in ((quiet, 0.0, False), (then, quiet, True)):
        outside(world, 0, seconds, step, **(process if process is BUSY else {**process, "idle": idle}))
        assert bool(events(world, "hang")) == hangs, seconds
    (hung,) = (event.record for event in events(world, "hang"))
    assert hung.iteration == world.job("1").iteration + 1
    assert [(culprit.slot, culprit.phase) for culprit in hung.culprits] == [(0, "stepped")]


def test_stacks_that_do_not_come_are_not_waited_for_long(training):
    hang(training, [2])
    training.run(3 * USUAL + 0.4)
    assert events(training, "hang") and not sent(training, ORDERS)
    training.run(1.2)
    assert sent(training, wire.Break)[0].lost == [2]


@pytest.mark.parametrize("why", ["switched off", "a late tick", "unread messages"])
def test_no_hang_is_seen_while_the_controller_does_not_look_or_is_behind(training, why: str):
    """Defect: a controller that was seconds behind judged ranks by what they had said before, and called a job that
    trained a hanging one."""
    hang(training, [1])
    if why == "switched off":
        training.core.config.monitor_iterations = False
        training.run(10)
    elif why == "a late tick":
        training.run(0.5)
        training.now += 30.0
        training.core.tick(training.now)
        training.deliver()
        training.run(0.3)
    else:
        training.core.view.unread = lambda route: route == training.agents[2].route
        training.run(20)
    assert not events(training, "hang")
    training.core.config.monitor_iterations, training.core.view.unread = True, lambda route: False
    training.run(USUAL * 3 + 0.5)
    assert len(events(training, "hang")) == 1


# ---------------------------------------------------------------- a network that loses packets
def pulse(world: World, slot: int, seconds: float, step: float = 0.5) -> None:
    """The rank's transport gets on for so long, and nothing else happens."""
    for _ in range(round(seconds / step)):
        world.agents[slot].set(slot, moved=world.agents[slot].ranks[slot].moved + 100)
        world.run(step)


def test_a_collective_that_gets_on_is_no_hang_however_slowly(training):
    hang(training, [])
    pulse(training, 2, 30)
    assert not events(training, "hang") and not events(training, "overdue") and not sent(training, ORDERS)
    train(training, 2)
    assert not sent(training, ORDERS)


def test_a_collective_that_stops_to_move_hangs_three_iterations_later(training):
    hang(training, [])
    pulse(training, 2, 10)
    moved = training.now
    training.run(3 * USUAL + 0.5)
    assert events(training, "hang")[0].time - moved <= 3 * USUAL + 0.5
    assert "iteration 20 runs for 1" in events(training, "hang")[0].record.reason, "since it began"


def test_who_is_behind_is_no_culprit_while_the_others_collective_moves(training):
    """Under loss a rank may still be in the reduce before, and its peers' packets are sent again."""
    hang(training, [1], where="reducing", others="synced")
    pulse(training, 0, 10)
    assert not events(training, "hang")


def test_stacks_that_were_asked_for_are_no_verdict_when_the_collective_moves_again(training):
    hang(training, [1])
    training.run(3 * USUAL + 0.4)
    assert events(training, "hang")
    pulse(training, 0, 4)
    assert not sent(training, ORDERS) and "is not stopped" in events(training, "failure_action")[0].record.text


def test_an_old_word_of_progress_excuses_nobody(training):
    """A rank's status holds the last one until its next message."""
    hang(training, [])
    pulse(training, 2, 1)
    for _ in range(8):
        for agent in training.agents:
            agent.status()
        training.run(0.4)
    assert events(training, "hang")


@pytest.mark.parametrize(
    ("who", "process"), [([0, 1, 2], ""), ([1], "T")], ids=["all compute", "somebody has suspended the whole job"]
)
def test_a_job_that_may_be_healthy_is_left_alone(training, who: list[int], process: str):
    hang(training, who)
    for agent in training.agents:
        agent.set(agent.element, process=process)
    training.run(60)
    assert len(events(training, "overdue")) == 1 and not events(training, "hang") and not sent(training, ORDERS)


def test_most_ranks_behind_get_more_time(training):
    hang(training, [0, 1])
    training.run(3 * USUAL * 3 - 0.3)
    assert len(events(training, "overdue")) == 1 and not sent(training, ORDERS)
    training.run(2.0)
    assert sent(training, wire.Break)[0].lost == [0, 1]


def test_a_process_stopped_by_a_signal_outside_an_iteration_hangs_at_once(training, snapshot):
    outside(training, 0, 3 * USUAL + 0.6, process="T")
    hung = events(training, "hang")
    assert hung[0].record.culprits == [records.HangCulprit(0, "n1", "stepped")]
    assert [hung[0].record.reason, events(training, "failure_detected")[0].record.reason] == snapshot


def test_an_idle_rank_that_was_stopped_wrongly_has_more_time_the_next_time(training):
    training.core.config.hang_idle_seconds = 20.0
    train(training, 20, outside={0: 0.0})
    outside(training, 0, 22, idle=0.0)
    assert events(training, "hang") and training.core.runtimes["1"].sensors.times.patience.longest_outside > 20


def test_a_process_stopped_in_the_same_collective_is_named(training, snapshot):
    hang(training, [])
    training.agents[2].set(2, process="T")
    training.run(3 * USUAL + 0.5)
    (failure,) = [event.record for event in events(training, "failure_detected")]
    assert failure.slots == [2] and failure.cause == "task_hang"
    assert failure.reason == snapshot


def test_only_who_has_no_excuse_is_stopped(training):
    """Slot 0 writes a checkpoint, slot 2 is stopped meanwhile: both are behind."""
    training.agents[0].set(0, iteration=19, phase="stepped")
    training.agents[2].set(2, iteration=19, phase="stepped", process="T")
    training.agents[1].set(1, iteration=20, phase="reducing")
    training.run(3 * USUAL * 3 + 2.0)
    assert [e.record.slots for e in events(training, "failure_detected")] == [[2]]
    assert sent(training, wire.Break)[0].lost == [2]


def test_a_collective_that_hangs_again_and_again_leads_to_restarts_in_turn_and_costs_no_node(training, snapshot):
    world = training
    seen = []
    for _ in range(4):
        hang(world, [])
        world.run(12)
        failure = events(world, "failure_detected")[-1].record
        seen.append((failure.severity, failure.action))
        for agent in world.agents:
            for slot in agent.slots:
                if agent.ranks[slot].state == "starting":
                    agent.set(slot, state="waiting")
        world.run(1)
        for agent in world.agents:
            agent.take_offer()
        world.run(0.5)
        assert sorted(world.job("1").members) == [0, 1, 2] and world.job("1").phase == "running"
        train(world, 14)
        world.run(90)
    assert seen == [(3, "reattempt"), (2, "restart"), (2, "restart"), (2, "restart")]
    started = [sorted(m.slot for m in group) for group in _starts(world)]
    assert started == [[1, 2], [0, 2], [1, 2]] or len({tuple(group) for group in started}) > 1
    assert {slot for group in started for slot in group} == {0, 1, 2}, "each process was replaced"
    assert events(world, "failure_detected")[-1].record.reason == snapshot
    assert not [e for e in world.log if e.kind in ("slurm_action", "isolated", "reform", "job_ended")]


def _starts(world: World) -> list[list[wire.StartRank]]:
    """Orders to start ranks, in groups of one generation's loss."""
    groups, seen = [], set()
    for _, message in world.sent:
        if isinstance(message, wire.Break):
            groups.append([])
        elif isinstance(message, wire.StartRank) and (message.slot, message.incarnation) not in seen:
            seen.add((message.slot, message.incarnation))
            groups[-1].append(message)
    return [group for group in groups if group]


def test_ranks_that_all_say_that_a_collective_timed_out_are_one_fault_of_the_job(training):
    for turn in range(2):
        for agent in training.agents:
            fault = structs.Fault(
                type="RuntimeError", text="Timed out waiting 2000ms for recv operation", at=training.now
            )
            agent.set(agent.element, state="stopped", broken=training.job("1").generation, fault=fault)
        training.run(1.5)
        found = events(training, "failure_detected")
        assert [f.record.cause for f in found] == ["nccl_timeout"] * (turn + 1)
        assert found[-1].record.action == ("restart" if turn else "reattempt")
        for agent in training.agents:
            for slot in agent.slots:
                agent.ranks[slot].fault = None
        if not turn:
            assert training.job("1").phase == "running"
            train(training, 3)


def test_a_silent_node_is_the_leases_matter(training):
    """Its rank is behind, too, and 3x the average comes before the lease."""
    training.core.config.lease_periods = 5.0
    training.agents[1].silent = True
    hang(training, [1])
    training.run(2.5)
    assert not events(training, "hang")
    training.run(3.5)
    assert [e.record.kind_of_failure for e in events(training, "failure_detected")] == ["node"]


def test_a_job_that_recovers_or_grows_is_not_judged(training):
    training.agents[0].obedient = False
    training.agents[1].die(1)
    training.run(8)
    assert training.job("1").phase == "breaking" and not events(training, "hang")


def test_a_hang_while_a_newcomer_waits_to_be_taken_in_is_found_as_soon(training):
    newcomer = FakeAgent(training, "1", 3, "n4")
    newcomer.register()
    newcomer.ready()
    training.run(0.5)
    assert training.job("1").phase == "offering"
    train(training, 1)
    hang(training, [1])
    training.run(3 * USUAL + 0.5)
    assert [e.record.slots for e in events(training, "failure_detected")] == [[1]]
    training.run(1.5)
    assert sent(training, wire.Break)[0].lost == [1]


def test_a_hang_is_healed_also_where_the_admin_only_observes(training):
    training.core.config.partitions["default"].mode = "observe"
    hang(training, [1])
    training.run(10)
    assert sent(training, wire.Break)[0].lost == [1] and not training.job("1").ended


def test_a_straggler_is_named_with_its_slowdown_and_nothing_is_broken(world):
    """Eight micro-batches on three ranks: 3, 3, 2. The rank with the fewest is the slow one, although it is not the
    last."""
    train(world, 120)
    assert not events(world, "degraded")
    train(world, 20, seconds=USUAL * 1.5, slow={2: 2.0})
    degraded = events(world, "degraded")
    assert len(degraded) == 1 and degraded[0].record.slot == 2 and degraded[0].record.phase == "backward"
    assert degraded[0].record.slowdown > 1.3 and degraded[0].record.node == "n3"
    assert world.core.runtimes["1"].sensors.times.degraded.slot == 2
    assert not sent(world, ORDERS) and not events(world, "failure_detected")
    train(world, 40)
    assert len(events(world, "degraded_over")) == 1 and world.core.runtimes["1"].sensors.times.degraded is None


def test_uneven_shares_are_no_slowness(world):
    train(world, 120)
    train(world, 20, seconds=USUAL * 1.5)
    assert events(world, "degraded")[0].record.slot is None, "the whole job is slower, no rank differs"


def test_a_rank_that_is_slow_from_the_start_is_named(world, snapshot):
    """The job's baseline is learned with it."""
    train(world, 60, slow={1: 1.5})
    degraded = events(world, "degraded")
    assert len(degraded) == 1 and degraded[0].record.slot == 1 and degraded[0].record.phase == "backward"
    assert 1.2 < degraded[0].record.slowdown < 1.6
    assert degraded[0].record.reason == snapshot
    train(world, 100, slow={1: 1.5})
    assert len(events(world, "degraded")) == 1
    train(world, 24)
    assert "slot 1 is no slower" in events(world, "degraded_over")[0].record.reason
    assert not sent(world, ORDERS)


def test_one_that_becomes_half_as_fast_is_named_within_five_iterations_and_its_cost_adds_up(world):
    """Eight micro-batches on three ranks: 3, 3 and 2, so that the slow one makes the others wait for 4 in place of
    8 / 3."""
    train(world, 200)
    train(world, 5, slow={2: 3.0})
    (named,) = events(world, "degraded")
    assert named.record.slot == 2 and named.record.iteration <= 204
    before = world.core.runtimes["1"].sensors.times.straggler_cost
    train(world, 10, slow={2: 3.0})
    cost = (world.core.runtimes["1"].sensors.times.straggler_cost - before) / 10
    own, fair = 2 * (0.001 + 0.03 + 0.18), 8 / 3 * (0.001 + 0.03 + 0.06)
    assert cost == pytest.approx(own - fair, abs=0.01)


def test_micro_batches_of_any_length_are_no_slowness(world):
    rng = random.Random(3)
    for _ in range(300):
        train(world, 1, slow={slot: rng.choice((0.2, 0.5, 1.0, 2.0, 3.0)) for slot in range(3)})
    assert not [event for event in events(world, "degraded") if event.record.slot is not None]


@pytest.mark.parametrize(("stage", "unclear"), [(3, False), (None, True)])
def test_of_a_pipeline_the_slowest_stage_is_named_if_the_times_show_it(stage: int | None, unclear: bool):
    """Two replicas of two stages, each rank on a node of its own: slots 0 and 1, 2 and 3."""
    world = World(hang_floor_seconds=0.5)
    agents = world.start_job(nodes=4, replica=2)
    rng = random.Random(4)
    for iteration in range(100):
        world.run(0.4)
        for agent in agents:
            (slot,), first = agent.slots, agent.element % 2 == 0
            factor = 1.0 if slot < 2 else 2.0 if slot == stage or stage is None else 1.5
            times = [value * factor * rng.gauss(1, 0.02) for value in phases(4)[:3]] + [0.02, 0.01, 0.0]
            agent.report(
                iteration,
                structs.RankStep(slot, [*range(agent.element // 2, 8, 2)] if first else [], 0.4, 1.0, None, times),
            )
    times = world.core.runtimes["1"].sensors.times
    assert times.straggler is not None and bool(times.unclear) == unclear
    assert times.straggler.slot == (2 if stage is None else stage)


@pytest.mark.parametrize(("known", "named", "within"), [(True, [0], 1.5), (False, [0, 1], 3.0)])
def test_the_ranks_of_a_replica_are_not_blamed_before_they_say_how_far_their_collectives_are(known, named, within):
    world = World(hang_floor_seconds=0.5, stacks_seconds=0.0)
    world.start_job(nodes=4, replica=2)
    for iteration in range(20):
        world.iterate("1", iteration)
        world.run(0.1)
    hang(world, [0, 1])
    began = world.now
    while world.now < began + 0.4:
        world.run(0.1)
    shards = {0: {"mesh.1.0.1": (9, 9, "gloo:all_gather")}, 1: {"mesh.1.0.1": (10, 9, "gloo:all_gather")}}
    for agent in world.agents:
        for slot in set(agent.slots) & shards.keys():
            agent.set(slot, collectives=shards[slot] if known else {})
    while not events(world, "hang") and world.now < began + 5.0:
        world.run(0.1)
    (hung,) = events(world, "hang")
    assert [culprit.slot for culprit in hung.record.culprits] == named
    assert within - 0.3 <= hung.time - began <= within + 0.3


def test_long_healthy_training_raises_no_alarm(world):
    train(world, 600)
    assert not [e.kind for e in world.log if e.kind in ("hang", "overdue", "degraded", "failure_detected")]


def test_hostile_phases_are_ignored(world):
    for nonsense in ([float("nan")] * 6, [1.0] * 50, [-1.0] * 6, [float("inf")] * 6, [1e300] * 6, []):
        world.agents[0].report(0, structs.RankStep(0, [0], 0.1, 1.0, None, nonsense))
    assert len(phases(1)) == len(structs.PHASES)
    assert world.core.runtimes["1"].sensors.times.phases.comparable() == {}


def test_shard_groups_are_compared_by_their_rounds():
    """Of five micro-batches one group of two computes three, in two rounds, and another one two, in one."""
    world = World()
    agents = world.start_job(nodes=4, replica=2, lanes=2)
    for agent, done in zip(agents, ([0, 1, 4], [], [2, 3], []), strict=True):
        rounds, (slot,) = 2 if agent.element < 2 else 1, agent.slots
        times = [0.0, 0.1 * rounds, 0.2 * rounds, 0.6 - 0.3 * rounds, 0.1, 0.0]
        agent.report(0, structs.RankStep(slot, done, 0.7, 1.0, None, times), total=5)
    found = world.core.runtimes["1"].sensors.times.phases.comparable()
    assert found.keys() == {0, 2}, "the heads"
    assert [found[0][phase] for phase in structs.PHASES] == pytest.approx(
        [found[2][p] for p in structs.PHASES], abs=1e-6
    )


def test_an_exception_that_nothing_caught_is_acted_upon_before_the_process_ends(training):
    fault = structs.Fault(
        type="RuntimeError", text="CUDA error: device-side assert triggered", at=1.0, fatal=True, lived=60
    )
    training.agents[1].set(1, fault=fault)
    found = events(training, "failure_detected")
    assert [e.record.detected_by for e in found] == ["exception"] and found[0].record.slots == [1]
    assert sent(training, wire.Break)[0].lost == [1] and [m.slot for m in sent(training, wire.StopRank)] == [1]
    training.run(0.3)
    assert sent(training, wire.StartRank)[0].incarnation == 1
    assert len(events(training, "failure_detected")) == 1, "its end is no second failure"
