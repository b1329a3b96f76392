"""Iteration times at the controller: slow jobs are reported with their straggler, hanging ranks are found, named,
dumped and replaced."""

from __future__ import annotations

import pytest

from tests.support.training import ORDERS, USUAL, events, hang, phases, sent, train
from tests.support.world import FakeAgent, World
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire


@pytest.fixture
def world():
    made = World(hang_floor_seconds=0.5)
    made.start_job()
    return made


@pytest.fixture
def trained(world):
    train(world, 20)
    return world


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


def test_a_hanging_rank_is_named_dumped_stopped_and_replaced(trained):
    world = trained
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
    reason = events(world, "hang")[0].record.reason
    assert "slot 1 is in micro-batch 1 of iteration 20, 2 others wait in the reduce of iteration 20" in reason
    assert [m.slot for m in sent(world, wire.Stacks)] == [1, 0], "the culprit, and one who waits"
    assert not sent(world, ORDERS), "the stacks come first"
    answer_stacks(world)
    assert {e.record.slot: e.record.text for e in events(world, "stacks")} == {0: "in fetch", 1: "in fetch"}
    world.run(0.3)
    assert sent(world, wire.Break)[0].lost == [1]
    assert [m.slot for m in sent(world, wire.StopRank)] == [1] and sent(world, wire.StartRank)[0].slot == 1
    assert len(events(world, "failure_detected")) == 1, "its death is no second failure"
    assert sorted(world.job("1").members) == [0, 2]
    world.check_replay()


def test_stacks_that_do_not_come_are_not_waited_for_long(trained):
    hang(trained, [2])
    trained.run(3 * USUAL + 0.4)
    assert events(trained, "hang") and not sent(trained, ORDERS)
    trained.run(1.2)
    assert sent(trained, wire.Break)[0].lost == [2]


def test_a_rank_that_goes_on_while_its_stacks_are_taken_is_left_alone(trained):
    hang(trained, [1])
    trained.run(3 * USUAL + 0.4)
    assert events(trained, "hang")
    train(trained, 3)
    assert not sent(trained, ORDERS) and "is not stopped" in events(trained, "failure_action")[0].record.text


def test_nobody_behind_is_a_collective_that_hangs_and_is_tried_again_in_place(trained):
    hang(trained, [])
    trained.run(3 * USUAL + 0.5)
    failure = events(trained, "failure_detected")[0].record
    assert failure.cause == "nccl_timeout" and failure.severity == 3 and failure.action == "reattempt"
    order = sent(trained, wire.Break)[0]
    assert order.lost == [] and not sent(trained, (wire.StopRank, wire.StartRank))
    assert sorted(trained.job("1").members) == [0, 1, 2] and trained.job("1").generation == 2
    trained.check_replay()


def test_a_second_hang_right_after_the_recovery_is_found_too(trained):
    hang(trained, [])
    trained.run(3 * USUAL + 0.5)
    assert trained.job("1").phase == "running"
    began = trained.now
    hang(trained, [1])
    trained.run(3 * 0.5 + 0.5)
    assert events(trained, "failure_detected")[1].record.slots == [1]
    assert events(trained, "hang")[1].time - began <= 3 * 0.5 + 0.3, "3 iterations, of the floor at least"


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


def test_a_hang_right_after_a_long_first_iteration_and_a_recovery_is_found_by_the_usual_time(world):
    """Its ranks compiled for 13 s in their first iteration: that says nothing of those who train on."""
    train(world, 1, seconds=13.0)
    train(world, 20)
    world.agents[2].die(2)
    world.run(0.5)
    assert sorted(world.job("1").members) == [0, 1] and world.job("1").phase == "running"
    began = world.now
    hang(world, [1])
    world.run(5.0)
    assert events(world, "hang")[0].record.culprits[0].slot == 1 and events(world, "hang")[0].time - began < 3.0


def test_iterations_that_are_made_again_are_no_hang(trained):
    """Defect: a job that had begun anew from an older state stood still for as long as it made up for that."""
    world = trained
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


def test_a_newcomer_may_compile_as_long_as_the_first_ones_did(world):
    train(world, 1, seconds=13.0)
    train(world, 20)
    rejoin(world, 1)
    hang(world, [1])
    world.run(30)
    assert not events(world, "hang"), "3x 13 s"
    world.run(12)
    assert events(world, "hang")[0].record.culprits[0].slot == 1


def test_the_others_hang_as_soon_as_ever_beside_a_newcomer(world):
    train(world, 1, seconds=13.0)
    train(world, 20)
    rejoin(world, 1)
    hang(world, [0])
    world.run(3.0)
    assert events(world, "hang")[0].record.culprits[0].slot == 0


def test_a_newcomer_under_a_restarted_controller_has_the_time_of_a_first_iteration(trained):
    trained.restart()
    for agent in trained.agents:
        agent.status()
    trained.run(1)
    train(trained, 12)
    trained.restart()
    for agent in trained.agents:
        agent.status()
    rejoin(trained, 1)
    hang(trained, [1])
    trained.run(100)
    assert not events(trained, "hang")


# ---------------------------------------------------------------- a network that loses packets
def pulse(world: World, slot: int, seconds: float, step: float = 0.5) -> None:
    """The rank's transport gets on for so long, and nothing else happens."""
    for _ in range(round(seconds / step)):
        world.agents[slot].set(slot, moved=world.agents[slot].ranks[slot].moved + 100)
        world.run(step)


def test_a_collective_that_gets_on_is_no_hang_however_slowly(trained):
    hang(trained, [])
    pulse(trained, 2, 30)
    assert not events(trained, "hang") and not events(trained, "overdue") and not sent(trained, ORDERS)
    train(trained, 2)
    assert not sent(trained, ORDERS)


def test_a_collective_that_stops_to_move_hangs_three_iterations_later(trained):
    hang(trained, [])
    pulse(trained, 2, 10)
    moved = trained.now
    trained.run(3 * USUAL + 0.5)
    assert events(trained, "hang")[0].time - moved <= 3 * USUAL + 0.5
    assert "iteration 20 runs for 1" in events(trained, "hang")[0].record.reason, "since it began"


def test_who_is_behind_is_no_culprit_while_the_others_collective_moves(trained):
    """Under loss a rank may still be in the reduce before, and its peers' packets are sent again."""
    hang(trained, [1], where="reducing", others="synced")
    pulse(trained, 0, 10)
    assert not events(trained, "hang")


def test_stacks_that_were_asked_for_are_no_verdict_when_the_collective_moves_again(trained):
    hang(trained, [1])
    trained.run(3 * USUAL + 0.4)
    assert events(trained, "hang")
    pulse(trained, 0, 4)
    assert not sent(trained, ORDERS) and "is not stopped" in events(trained, "failure_action")[0].record.text


def test_an_old_word_of_progress_excuses_nobody(trained):
    """A rank's status holds the last one until its next message."""
    hang(trained, [])
    pulse(trained, 2, 1)
    for _ in range(8):
        for agent in trained.agents:
            agent.status()
        trained.run(0.4)
    assert events(trained, "hang")


def test_all_compute_is_no_hang_of_anybody(trained):
    hang(trained, [0, 1, 2])
    trained.run(30)
    assert len(events(trained, "overdue")) == 1 and not events(trained, "hang") and not sent(trained, ORDERS)


def test_most_ranks_behind_get_more_time(trained):
    hang(trained, [0, 1])
    trained.run(3 * USUAL * 3 - 0.3)
    assert len(events(trained, "overdue")) == 1 and not sent(trained, ORDERS)
    trained.run(2.0)
    assert sent(trained, wire.Break)[0].lost == [0, 1]


def test_the_script_may_take_its_time_between_iterations(trained):
    """A checkpoint by slot 0, while the others wait in the next reduce."""
    trained.agents[0].set(0, iteration=19, phase="stepped")
    for slot in (1, 2):
        trained.agents[slot].set(slot, iteration=20, phase="reducing")
    trained.run(590)
    assert not events(trained, "hang") and not events(trained, "overdue")
    trained.run(20)
    assert "slot 0 is in the script's own code after iteration 19" in events(trained, "hang")[0].record.reason


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


def test_a_process_stopped_by_a_signal_outside_an_iteration_hangs_at_once(trained):
    outside(trained, 0, 3 * USUAL + 0.6, process="T")
    hung = events(trained, "hang")
    assert hung[0].record.culprits == [records.HangCulprit(0, "n1", "stepped")]
    assert "its process is stopped by a signal" in hung[0].record.reason
    assert "stopped by a signal" in events(trained, "failure_detected")[0].record.reason


def test_an_idle_process_outside_hangs_when_it_never_took_long_before(trained):
    trained.core.config.hang_idle_seconds = 20.0
    train(trained, 20, outside={0: 2.0})
    outside(trained, 0, 19, idle=0.0)
    assert not events(trained, "hang")
    outside(trained, 0, 4, idle=19.0)
    assert "it does nothing there, and no rank was outside for more than 2.00 s" in (
        events(trained, "hang")[0].record.reason
    )


def test_a_longer_checkpoint_is_allowed_three_times_that(trained):
    trained.core.config.hang_idle_seconds = 20.0
    train(trained, 20, outside={1: 30.0})
    outside(trained, 0, 85, idle=0.0)
    assert not events(trained, "hang"), "another rank may write the next one"
    outside(trained, 0, 10, idle=85.0)
    assert events(trained, "hang")


def test_an_idle_rank_that_was_stopped_wrongly_has_more_time_the_next_time(trained):
    trained.core.config.hang_idle_seconds = 20.0
    train(trained, 20, outside={0: 0.0})
    outside(trained, 0, 22, idle=0.0)
    assert events(trained, "hang") and trained.core.runtimes["1"].sensors.times.patience.longest_outside > 20


def test_a_first_checkpoint_computes_or_writes_and_has_the_full_time(trained):
    trained.core.config.hang_idle_seconds = 20.0
    train(trained, 20)
    outside(trained, 0, 300, step=2.0, process="D")
    assert not events(trained, "hang")


def test_nobody_is_idle_too_long_before_it_has_been_outside_often(world):
    world.core.config.hang_idle_seconds = 20.0
    train(world, 12)
    outside(world, 0, 100, step=2.0, idle=0.0)
    assert not events(world, "hang")


def test_a_process_stopped_in_the_same_collective_is_named(trained):
    hang(trained, [])
    trained.agents[2].set(2, process="T")
    trained.run(3 * USUAL + 0.5)
    (failure,) = [event.record for event in events(trained, "failure_detected")]
    assert failure.slots == [2] and failure.cause == "task_hang"
    assert "in the reduce of iteration 20 like the others, its process is stopped by a signal" in failure.reason


def test_a_job_that_somebody_has_suspended_as_a_whole_is_left_alone(trained):
    hang(trained, [1])
    for agent in trained.agents:
        agent.set(agent.element, process="T")
    trained.run(60)
    assert len(events(trained, "overdue")) == 1 and not events(trained, "hang") and not sent(trained, ORDERS)


def test_only_who_has_no_excuse_is_stopped(trained):
    """Slot 0 writes a checkpoint, slot 2 is stopped meanwhile: both are behind."""
    trained.agents[0].set(0, iteration=19, phase="stepped")
    trained.agents[2].set(2, iteration=19, phase="stepped", process="T")
    trained.agents[1].set(1, iteration=20, phase="reducing")
    trained.run(3 * USUAL * 3 + 2.0)
    assert [e.record.slots for e in events(trained, "failure_detected")] == [[2]]
    assert sent(trained, wire.Break)[0].lost == [2]


def test_a_collective_that_hangs_again_and_again_leads_to_restarts_in_turn_and_costs_no_node(trained):
    world = trained
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
    assert "no node can be named" in events(world, "failure_detected")[-1].record.reason
    assert not [e for e in world.log if e.kind in ("slurm_action", "isolated", "reform", "job_ended")]
    world.check_replay()


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


def test_ranks_that_all_say_that_a_collective_timed_out_are_one_fault_of_the_job(trained):
    for turn in range(2):
        for agent in trained.agents:
            fault = structs.Fault(
                type="RuntimeError", text="Timed out waiting 2000ms for recv operation", at=trained.now
            )
            agent.set(agent.element, state="stopped", broken=trained.job("1").generation, fault=fault)
        trained.run(1.5)
        found = events(trained, "failure_detected")
        assert [f.record.cause for f in found] == ["nccl_timeout"] * (turn + 1)
        assert found[-1].record.action == ("restart" if turn else "reattempt")
        for agent in trained.agents:
            for slot in agent.slots:
                agent.ranks[slot].fault = None
        if not turn:
            assert trained.job("1").phase == "running"
            train(trained, 3)
    trained.check_replay()


def test_the_first_iteration_has_its_own_limit(world):
    """Ranks compile and open their data."""
    world.core.config.first_iteration_seconds = 40.0
    hang(world, [1])
    world.run(39)
    assert not events(world, "hang") and not events(world, "overdue")
    world.run(3)
    assert events(world, "failure_detected")[0].record.slots == [1]


def test_before_its_speed_is_learned_a_job_has_a_generous_limit_from_what_was_seen(world):
    train(world, 4)
    hang(world, [1])
    world.run(4.5)
    assert not events(world, "hang"), "10x the floor of 0.5 s"
    world.run(1.5)
    assert events(world, "hang")[0].record.culprits[0].slot == 1


def test_a_long_first_iteration_makes_the_next_ones_limits_longer(world):
    train(world, 1, seconds=20.0)
    train(world, 3)
    hang(world, [1])
    world.run(55)
    assert not events(world, "hang"), "3x the longest"
    world.run(10)
    assert events(world, "hang")


def test_a_silent_node_is_the_leases_matter(trained):
    """Its rank is behind, too, and 3x the average comes before the lease."""
    trained.core.config.lease_periods = 5.0
    trained.agents[1].silent = True
    hang(trained, [1])
    trained.run(2.5)
    assert not events(trained, "hang")
    trained.run(3.5)
    assert [e.record.kind_of_failure for e in events(trained, "failure_detected")] == ["node"]


def test_a_late_tick_of_the_controller_is_no_hang(trained):
    hang(trained, [1])
    trained.run(0.5)
    trained.now += 30.0
    trained.core.tick(trained.now)
    trained.deliver()
    trained.run(0.3)
    assert not events(trained, "hang")
    trained.run(0.8)
    assert events(trained, "hang")


def test_no_hang_is_seen_while_what_ranks_have_said_waits_to_be_read(trained):
    """Defect: a controller that was seconds behind judged ranks by what they had said before, and called a job that
    trained a hanging one."""
    world = trained
    hang(world, [1])
    world.core.view.unread = lambda route: route == world.agents[2].route
    world.run(20.0)
    assert not events(world, "hang")
    world.core.view.unread = lambda route: False
    world.run(USUAL * 3 + 0.5)
    assert len(events(world, "hang")) == 1, "once all is read, it is"


def test_a_job_that_recovers_or_grows_is_not_judged(trained):
    trained.agents[0].obedient = False
    trained.agents[1].die(1)
    trained.run(8)
    assert trained.job("1").phase == "breaking" and not events(trained, "hang")


def test_a_hang_while_a_newcomer_waits_to_be_taken_in_is_found_as_soon(trained):
    newcomer = FakeAgent(trained, "1", 3, "n4")
    newcomer.register()
    newcomer.ready()
    trained.run(0.5)
    assert trained.job("1").phase == "offering"
    train(trained, 1)
    hang(trained, [1])
    trained.run(3 * USUAL + 0.5)
    assert [e.record.slots for e in events(trained, "failure_detected")] == [[1]]
    trained.run(1.5)
    assert sent(trained, wire.Break)[0].lost == [1]
    trained.check_replay()


def test_a_hang_is_healed_also_where_the_admin_only_observes(trained):
    trained.core.config.partitions["default"].mode = "observe"
    hang(trained, [1])
    trained.run(10)
    assert sent(trained, wire.Break)[0].lost == [1] and not trained.job("1").ended


def test_the_switch_turns_it_off(trained):
    trained.core.config.monitor_iterations = False
    hang(trained, [1])
    trained.run(10)
    assert not events(trained, "hang")


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
    world.check_replay()


def test_uneven_shares_are_no_slowness(world):
    train(world, 120)
    train(world, 20, seconds=USUAL * 1.5)
    assert events(world, "degraded")[0].record.slot is None, "the whole job is slower, no rank differs"


def test_a_rank_that_is_slow_from_the_start_is_named(world):
    """The job's baseline is learned with it."""
    train(world, 60, slow={1: 1.5})
    degraded = events(world, "degraded")
    assert len(degraded) == 1 and degraded[0].record.slot == 1 and degraded[0].record.phase == "backward"
    assert 1.2 < degraded[0].record.slowdown < 1.6
    assert "in all of the last 48 iterations" in degraded[0].record.reason
    train(world, 100, slow={1: 1.5})
    assert len(events(world, "degraded")) == 1
    train(world, 24)
    assert "slot 1 is no slower" in events(world, "degraded_over")[0].record.reason
    assert not sent(world, ORDERS)
    world.check_replay()


def test_long_healthy_training_raises_no_alarm(world):
    train(world, 600)
    assert not [e.kind for e in world.log if e.kind in ("hang", "overdue", "degraded", "failure_detected")]


def test_hostile_phases_are_ignored(world):
    for nonsense in ([float("nan")] * 6, [1.0] * 50, [-1.0] * 6, [float("inf")] * 6, [1e300] * 6, []):
        world.agents[0].report(0, structs.RankStep(0, [0], 0.1, 1.0, None, nonsense))
    assert len(phases(1)) == len(structs.PHASES)
    assert world.core.runtimes["1"].sensors.times.phases.comparable() == {}


def test_an_exception_that_nothing_caught_is_acted_upon_before_the_process_ends(trained):
    fault = structs.Fault(
        type="RuntimeError", text="CUDA error: device-side assert triggered", at=1.0, fatal=True, lived=60
    )
    trained.agents[1].set(1, fault=fault)
    found = events(trained, "failure_detected")
    assert [e.record.detected_by for e in found] == ["exception"] and found[0].record.slots == [1]
    assert sent(trained, wire.Break)[0].lost == [1] and [m.slot for m in sent(trained, wire.StopRank)] == [1]
    trained.run(0.3)
    assert sent(trained, wire.StartRank)[0].incarnation == 1
    assert len(events(trained, "failure_detected")) == 1, "its end is no second failure"
    trained.check_replay()
