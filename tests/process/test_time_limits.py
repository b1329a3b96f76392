"""Time limits of real ranks under real agents and a real controller: what is slow, far away or alone is no hang."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.jobs import FOREVER, World, json_lines
from tests.support.processes import wait_for

pytestmark = pytest.mark.process
PATIENT = "hang_floor_seconds = 60.0\n"  # a busy machine is no hang where that is not the question


def faults(*wanted: dict) -> str:
    return json.dumps([{"incarnation": 0, **fault} for fault in wanted])


def kill(job: World, slot: int) -> None:
    os.kill(job.rank(slot)["pid"], signal.SIGKILL)


@pytest.mark.long
def test_a_rank_in_the_scripts_own_code_is_waited_for_when_a_peer_dies(tmp_path):
    evaluation = {"slot": 0, "iteration": "any", "at": "outside", "kind": "sleep", "delay": 14, "file": "evaluate"}
    settings = f"report_timeout = 9.0\nfault_grace = 0.5\n{PATIENT}"
    with World(tmp_path, 3, settings, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02", TINY_FAULT=faults(evaluation)) as job:
        job.wait(lambda: job.trains([0, 1, 2], 10), "10 iterations")
        (tmp_path / "evaluate").touch()
        wait_for(lambda: list(tmp_path.glob("fault.0.0.*")), "slot 0 evaluates")
        kill(job, 2)
        job.trains_on([0, 1, 2])
        assert {tuple(f["slots"]) for f in job.failures()} == {(2,)}, job.failures()
        assert job.rank(0)["incarnation"] == 0 and not job.events("reform")
        assert job.job()["ledger_violations"] == 0


@pytest.mark.long
def test_a_hang_right_after_a_recovery_is_found_by_the_usual_time(tmp_path):
    with World(tmp_path, 3, "hang_floor_seconds = 6.0\n", TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02") as job:
        job.wait(lambda: job.trains([0, 1, 2], 30), "30 iterations")
        job.agents[2].kill()
        job.wait(lambda: job.trains([0, 1]), "the others go on")
        os.kill(job.rank(1)["pid"], signal.SIGSTOP)
        within = 55.0  # 3 times the floor; 10 times would be more
        failure = job.wait(
            lambda: next((f for f in job.failures() if f["slots"] == [1]), None), "the hang is found", within
        )
        assert failure["kind"] == "hang"
        job.trains_on([0, 1])


@pytest.mark.long
def test_a_network_that_loses_packets_is_no_hang(tmp_path):
    """For 5 s nothing that is sent to slot 1 arrives, and the limit of an iteration is 3 s."""
    loss = {"slot": 1, "iteration": "any", "at": "outside", "kind": "loss", "delay": 5.0, "file": "loss"}
    with World(
        tmp_path, 3, "hang_floor_seconds = 3.0\n", TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02", TINY_FAULT=faults(loss)
    ) as job:
        job.wait(lambda: job.trains([0, 1, 2], 30), "30 iterations")
        (tmp_path / "loss").touch()
        (struck,) = wait_for(lambda: list(tmp_path.glob("fault.1.0.*")), "packets are lost")
        lossy = int(struck.suffix[1:]) + 1
        job.wait(lambda: job.trains([0, 1, 2], lossy + 5), "the job trains on")
        seconds = {event["iteration"]: event["seconds"] for event in job.events("step")}
        assert seconds[lossy] > 3.0, "the network was gone for a while"
        assert lossy not in [event["iteration"] for event in job.events("hang")], job.events("hang")


@pytest.mark.long
def test_a_newcomer_that_dies_before_its_boundary_stops_nobody(tmp_path):
    wait = {"slot": 0, "iteration": "any", "at": "outside", "kind": "wait", "gate": "open", "file": "close"}
    with World(tmp_path, 3, PATIENT, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02", TINY_FAULT=faults(wait)) as job:
        job.wait(lambda: job.trains([0, 1, 2], 10), "10 iterations")
        kill(job, 2)
        job.wait(lambda: job.trains([0, 1]), "the others go on")
        (tmp_path / "close").touch()
        wait_for(lambda: list(tmp_path.glob("fault.0.0.*")), "slot 0 is in the script's own code")
        job.wait(lambda: job.job()["state"] == "offering" and job.rank(2)["state"] == "entering", "slot 2 waits")
        before, generation = len(job.events("break")), job.rank(1)["generation"]
        kill(job, 2)
        job.wait(lambda: job.events("offer_withdrawn"), "the offer is withdrawn")
        (tmp_path / "gate.open").touch()
        job.trains_on([0, 1, 2])
        assert len(job.events("break")) == before and job.rank(0)["incarnation"] == job.rank(1)["incarnation"] == 0
        steps = json_lines(tmp_path / "losses.1")
        assert [one["iteration"] for one in steps] == list(range(len(steps)))
        assert job.rank(1)["generation"] > generation and job.job()["ledger_violations"] == 0


@pytest.mark.long
def test_a_stopped_rank_that_gets_no_plan_saves_its_state(tmp_path):
    """The controller is gone, and so is half of the job: the one that is left may not go on alone."""
    saves = tmp_path / "saves"
    settings = {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": "0", "UNICRON_PLAN_TIMEOUT": "6"}
    with World(tmp_path, 2, PATIENT, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02", **settings) as job:
        job.wait(lambda: job.trains([0, 1], 10), "10 iterations")
        assert not saves.exists()
        job.kill()
        job.agents[1].kill()
        files = wait_for(lambda: saves.is_dir() and list(saves.glob("*/*.image")), "it saves its state")
        last = json_lines(tmp_path / "losses.0")[-1]["iteration"]
        assert [path.parent.name for path in files] == [f"iteration-{last + 1:08d}"]
        wait_for(lambda: "no plan within 6 s" in job.agents[0].log, "and then it ends")
        assert "the state was saved" in job.agents[0].log
