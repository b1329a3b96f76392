"""Which node the controller has tested in pairs, when, and what follows."""

from __future__ import annotations

import pytest

from tests.support.scenarios import recorded
from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.model.cluster_state import PAIR_HALF_LIFE
from unicron_ctl.controller.model.requests import TestPairs
from unicron_ctl.controller.nodes.pair_tests import AGAIN_SECONDS, IDLE_SECONDS, candidates
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm.pairs import Findings, PairTest
from unicron_detector.health.pair_test import Judgement, learned_limit


def cluster(nodes: int = 4, **settings) -> World:
    world = World(FakeSlurm(nodes), **settings)
    world.run(2.0)
    return world


def stands_out(world: World, node: str = "n2", job: str = "") -> None:
    record = records.Anomaly(node, [node], None, "packet_loss", {}, {}, 9.0, reason=f"{node}: packet_loss is 0.2")
    world.core.append(job, 0, record)


def were_sound(world: World, count: int) -> None:
    """So many nodes stood out before, and passed their tests."""
    for _ in range(count):
        world.core.append("", 0, records.PairTest("n1", "good", "odd", reason="test"))


def suspected(world: World, node: str = "n2") -> None:
    world.core.append("", 0, records.NodeAvoided(0, node, suspect=True, reason=f"job 9 leaves {node}"))


def findings(node: str, verdict: str, seconds: float = 1.0) -> Findings:
    judgement = {
        "good": Judgement(good=(node, "n1")),
        "bad": Judgement(bad={node: "failed twice"}, good=("n1",)),
        "slow": Judgement(slow={node: "3 s, over the limit of 1.5 s"}, good=("n1",)),
        "unclear": Judgement(unknown={node: "failed, but never beside a good node"}),
    }[verdict]
    tests = [PairTest(1, (node, "n1"), verdict != "bad", "", "gloo", 1e9 / seconds)]
    return Findings(tests, judgement)


def answer(world: World, found: Findings | str) -> None:
    world.core.on_pair_test(world.pair_tests[-1], found)


def states(world: World) -> list[str]:
    return [record.state for record in recorded(world, records.PairTest)]


def test_a_node_that_stood_out_is_tested_once_it_has_been_idle_and_only_once(snapshot):
    world = cluster()
    stands_out(world)
    world.run(IDLE_SECONDS - 10.0)
    assert not world.pair_tests, "somebody may be about to get it"
    world.run(20.0)
    (request,) = world.pair_tests
    assert request == TestPairs("n2", ("n1", "n3", "n4"), request.partition, {})
    answer(world, findings("n2", "good"))
    world.run(7200.0)
    assert len(world.pair_tests) == 1, "there is no news"
    assert [record.reason for record in recorded(world, records.PairTest)] == snapshot
    assert world.core.state.node("n2").paired.verdict == "good"
    stands_out(world)
    world.run(10.0)
    assert len(world.pair_tests) == 2
    assert not world.slurm.calls


@pytest.mark.parametrize("reason", ["runs", "no partner", "switched off", "observe"])
def test_no_test_disturbs_work_or_goes_against_the_admin(reason):
    settings = {"pair_tests": False} if reason == "switched off" else {}
    world = World(FakeSlurm(1 if reason == "no partner" else 4), reason == "observe", **settings)
    if reason == "runs":
        world.slurm.submit("1", 4)
        world.run(2.0)
        world.start_job(nodes=4)
    stands_out(world, "n1")
    suspected(world, "n1")
    world.run(10 * IDLE_SECONDS)
    assert not world.pair_tests


def test_a_suspect_comes_before_a_node_that_only_stood_out_and_suspects_are_no_partners():
    world = cluster(5)
    stands_out(world, "n1")
    suspected(world, "n2")
    world.run(2 * IDLE_SECONDS)
    assert [(one.node, one.partners) for one in world.pair_tests] == [("n2", ("n3", "n4", "n5"))]


def test_a_suspect_is_tested_in_the_name_of_the_job_that_suspects_it():
    """Another job that avoids the node may be another user's, who must not read the first one's failures."""
    world = cluster(6)
    for job in ("1", "2"):
        world.slurm.submit(job, 1)
        world.run(2.0)
        world.start_job(job, nodes=1)
    avoided = {"1": (True, "job 1 leaves n5: AssertionError: loss of project X"), "2": (False, "job 2 leaves n5")}
    for job, (suspect, reason) in avoided.items():
        world.core.append(job, 1, records.NodeAvoided(9, "n5", suspect=suspect, reason=reason))
    (found,) = candidates(world.core.view)
    assert (found.node, found.job, found.why) == ("n5", "1", avoided["1"][1])
    gone = world.core.state.jobs.pop("1")
    assert candidates(world.core.view)[0].job == ""
    world.core.state.jobs["1"] = gone


def test_a_bad_node_is_drained_and_stays_so():
    world = cluster(20)
    suspected(world)
    world.run(IDLE_SECONDS + 10.0)
    answer(world, findings("n2", "bad"))
    world.run(30.0)
    assert [call for call in world.slurm.calls if call[0] == "drain"], "within the bounds"
    assert "DRAIN" in world.slurm.node_states["n2"] and states(world) == ["chosen", "bad"]
    world.run(AGAIN_SECONDS)
    assert "DRAIN" in world.slurm.node_states["n2"] and len(world.pair_tests) == 1


def test_a_slow_node_is_a_suspect_and_stays_in_service():
    world = cluster()
    stands_out(world)
    world.run(IDLE_SECONDS + 10.0)
    answer(world, findings("n2", "slow"))
    world.run(30.0)
    assert not world.slurm.calls and "slow in a pair test" in recorded(world, records.NeedsAdmin)[-1].reason


@pytest.mark.parametrize("found", ["Slurm gave no nodes", findings("n2", "unclear")])
def test_a_test_that_settles_nothing_is_made_again_later(found):
    world = cluster()
    stands_out(world)
    world.run(IDLE_SECONDS + 10.0)
    answer(world, found)
    world.run(AGAIN_SECONDS - 60.0)
    assert len(world.pair_tests) == 1 and world.core.state.node("n2").paired is None
    world.run(120.0)
    assert len(world.pair_tests) == 2


def test_what_tests_have_found_decides_whether_another_is_worth_it():
    world = cluster()
    were_sound(world, 50)
    stands_out(world)
    world.run(10 * IDLE_SECONDS)
    assert not world.pair_tests, "in 50 tests such evidence was right in none"
    suspected(world, "n3")
    world.run(10.0)
    assert [one.node for one in world.pair_tests] == ["n3"]


def test_what_tests_have_found_counts_half_after_four_weeks():
    world = cluster()
    were_sound(world, 30)
    stands_out(world)
    world.run(2 * IDLE_SECONDS)
    assert not world.pair_tests, "in 30 tests such evidence was right in none"
    world.now += PAIR_HALF_LIFE
    world.run(1.0)
    stands_out(world)
    world.run(2 * IDLE_SECONDS)
    assert [one.node for one in world.pair_tests] == ["n2"] and "of 15 nodes" in recorded(world, records.PairTest)[
        -1
    ].reason
    answer(world, findings("n2", "good"))
    world.run(1.0)
    assert world.core.state.pair_results["odd"].tested == pytest.approx(16.0, abs=0.01)
    world.check_replay()


def test_the_limit_for_speeds_is_learned_from_earlier_pairs():
    assert learned_limit([1.0] * 7) is None
    assert learned_limit([1.0] * 8) == 1.25
    assert learned_limit([0.8, 1.2] * 8) == pytest.approx(1.0 + 6 * 1.4826 * 0.2)
    world = cluster()
    for number in range(8):
        if number:
            world.run(10.0)
        stands_out(world)
        world.run(IDLE_SECONDS + 10.0 if not number else 10.0)
        answer(world, findings("n2", "good", 1.0 + number / 100))
    world.run(10.0)
    stands_out(world)
    world.run(10.0)
    ((_, limit),) = world.pair_tests[-1].limits.items()
    assert limit == pytest.approx(1.035 * 1.25)
    world.check_replay()
