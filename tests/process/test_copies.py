"""Copies of the training state in other nodes: the last node of a part of the model is lost with its memory, and the
job goes on from the copy, without a file."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.flips import flip
from tests.support.halves import SETTINGS, SHARED_EXPERTS, Halves
from unicron_transition.snapshot import folders

pytestmark = pytest.mark.process


def losses(rows: list[dict]) -> dict[int, float]:
    return {row["iteration"]: row["loss"] for row in rows}


KINDS = pytest.mark.parametrize(
    "kind", [{}, pytest.param(SHARED_EXPERTS, marks=pytest.mark.wide)], ids=["tensors", "experts"]
)


@KINDS
def test_a_node_that_alone_had_half_of_the_model_is_lost_with_its_memory(tmp_path: Path, kind: dict[str, str]) -> None:
    with Halves(tmp_path, nodes=2, **SETTINGS | kind) as job:
        cut = job.both_copied()
        job.power_failure(1, "n1")
        before = job.array.losses(0)
        job.array.start(1, SLURMD_NODENAME="n5")
        plan = job.on_again()
        # The copy may be that of the last boundary: then nothing is computed again.
        assert cut <= plan["iteration"] <= before[-1]["iteration"] + 1 and not plan.get("joiners")
        assert f"from iteration {plan['iteration']}" in plan["reason"]
        again, first = losses(job.array.losses(0)[len(before) :]), losses(before)
        assert min(again) == plan["iteration"]
        assert {i: again[i] for i in again.keys() & first.keys()} == pytest.approx(
            {i: first[i] for i in again.keys() & first.keys()}, rel=1e-6
        )
        assert job.job()["ledger_violations"] == 0 and job.agents[0].alive
        incarnations = [rank["incarnation"] for element in job.job()["elements"] for rank in element["ranks"]]
        assert incarnations == [0, 0], "the survivor went back without a new process"


@pytest.mark.parametrize(
    "ends", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.wide)], ids=["the job ends", "on demand"]
)
def test_while_the_job_waits_for_a_lost_half_the_whole_state_goes_to_files(
    tmp_path: Path, ends: signal.Signals
) -> None:
    """The survivor has both halves of the cut, and of newer iterations its own one alone."""
    saves = tmp_path / "saves"
    kind = {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": "100000"}
    with Halves(tmp_path, nodes=2, **SETTINGS | kind) as job:
        cut = job.both_copied()
        job.power_failure(1, "n1")
        job.wait(lambda: job.rank(0)["state"] == "stopped", "the survivor rests")
        job.agents[0].process.send_signal(ends)
        whole = job.wait(lambda: folders.whole(saves), "a whole checkpoint")
        assert whole[0].iteration >= cut and len(whole[0].paths) == 2
        assert ends != signal.SIGTERM or job.agents[0].wait() == 128 + ends


@pytest.mark.long
def test_a_hot_spare_takes_a_lost_half_with_the_state_that_lies_in_its_own_node(tmp_path: Path) -> None:
    """Only the spare has a copy of that half, and nobody has to send it anything. Whoever comes last of the two nodes
    whose ranks could train the first half is the spare."""
    with Halves(tmp_path, nodes=3, UNICRON_SPARES="1", **SETTINGS) as job:
        job.wait(lambda: job.job().get("members") and job.job()["spares_ready"] == 1, "two train, one is ready")
        (spare,) = (one["element"] for one in job.job()["spares"])
        assert spare in (0, 2)
        lost, own = 2 - spare, f"n{spare}"
        job.wait(lambda: job.trains([lost, 1], 1), "training")
        job.wait(lambda: job.copies(own, lost) and job.copies(f"n{lost}", 1), "copies of both halves")
        job.wait(lambda: not job.copies("n1", lost), "a first copy from before the spare was ready is let go of")
        cut = job.copies(own, lost)[0].key.iteration
        job.wait(lambda: job.trains([lost, 1], cut + 3), "some iterations more")
        assert not job.copies("n1", lost)
        job.power_failure(lost, f"n{lost}")
        before = job.array.losses(1)
        plan = job.on_again()
        assert sorted(plan["members"]) == sorted([1, spare]) and plan["iteration"] >= cut and not plan.get("joiners")
        again, first = losses(job.array.losses(spare)), losses(before)
        assert min(again) == plan["iteration"]
        both = again.keys() & first.keys()
        assert {i: again[i] for i in both} == pytest.approx({i: first[i] for i in both}, rel=1e-6)
        assert job.job()["ledger_violations"] == 0


@pytest.mark.long
@KINDS
def test_two_copies_bear_the_loss_of_both_nodes_that_train_a_half(tmp_path: Path, kind: dict[str, str]) -> None:
    """Two replicas: the halves of both nodes are gone, each with the memory in which it lay."""
    with Halves(tmp_path, nodes=4, UNICRON_STATE_COPIES="2", **SETTINGS | kind) as job:
        job.wait(lambda: job.trains([0, 1, 2, 3], 1), "training")
        first = job.wait(
            lambda: [one for n in ("n1", "n3") for s in (0, 2) for one in job.copies(n, s)], "a third copy"
        )
        cut = first[0].key.iteration
        job.wait(lambda: job.trains([0, 1, 2, 3], cut + 3), "some iterations more")
        before = job.array.losses(1)
        for element in (0, 2):
            job.power_failure(element, f"n{element}")
        for element in (0, 2):
            job.array.start(element, SLURMD_NODENAME=f"n{5 + element}")
        plan = job.on_again()
        assert cut <= plan["iteration"] <= before[-1]["iteration"] + 1 and len(plan["members"]) == 4
        assert f"from iteration {plan['iteration']} (place 0: " in plan["reason"], "from a copy, and from no file"
        again, first_time = losses(job.array.losses(1)[len(before) :]), losses(before)
        both = again.keys() & first_time.keys()
        assert {i: again[i] for i in both} == pytest.approx({i: first_time[i] for i in both}, rel=1e-6)
        assert job.job()["ledger_violations"] == 0


@pytest.mark.wide
def test_a_controller_that_is_started_again_goes_on_with_cuts_while_all_ranks_train(tmp_path: Path) -> None:
    with Halves(tmp_path, nodes=2, **SETTINGS) as job:
        job.both_copied()
        job.kill()
        there = {each: job.copies(*each)[-1].key.iteration for each in (("n0", 1), ("n1", 0))}
        job.start()
        for each, last in there.items():
            job.wait(lambda each=each, last=last: job.copies(*each)[-1].key.iteration > last, "a newer copy")
        assert not job.events("failure_detected")


@pytest.mark.wide  # as in test_memory, where the data come from another node
def test_a_copy_of_which_a_bit_has_flipped_is_seen_and_never_trained_with(tmp_path: Path) -> None:
    with Halves(tmp_path, nodes=2, **SETTINGS) as job:
        job.both_copied()
        job.power_failure(1, "n1")
        for found in job.copies("n0", 1):
            flip(found.path)
        job.array.start(1, SLURMD_NODENAME="n5")
        job.wait(lambda: "do not match their checksum" in job.agents[0].log, "the damage is seen")
        plan = job.on_again()
        assert plan["iteration"] == 0 and "is left behind" in plan["reason"], "there is no file either, and it says so"
