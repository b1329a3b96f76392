"""An element of a real job is requeued, and the job goes on from its nodes' memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, TINY, json_lines
from tests.support.processes import ROOT, call, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm
SCRIPT = """#!/bin/bash
export PYTHONPATH={root} UNICRON_CONTROLLER={address} UNICRON_NODE_ADDRESS=127.0.0.1 OMP_NUM_THREADS=1
export UNICRON_RANKS_PER_NODE=1 UNICRON_REGISTER_TIMEOUT=60 TINY_LAYOUT="2 1 1"
export TINY_OUT={out} TINY_SAVE=0 TINY_ITERATIONS={iterations} TINY_SLOW=0.1
exec {agent} run -- {python} {script}
"""


def test_an_element_that_is_requeued_goes_on_with_what_the_nodes_have_in_memory(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """Each of two nodes has half of the model, and there are no files."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    out.mkdir()
    said = {"root": ROOT, "address": controller.address, "out": out, "iterations": FOREVER, "script": TINY}
    script.write_text(SCRIPT.format(**said, agent=" ".join(AGENT), python=AGENT[0]))
    options = ["--parsable", "-N1", "--exclusive", "--gres=gpu:1", "--array=0-1", "--requeue", "--open-mode=append"]
    options += ["-o", str(tmp_path / "%a.out")]
    environment = outside_slurm() | cluster.env()
    done = call("sbatch", *options, script, environment=environment)
    assert done.returncode == 0, done.stderr

    def trains(least: int) -> bool:
        job = controller.job()
        return bool(job) and (job["members"], job["state"]) == ([0, 1], "running") and job["iteration"] >= least

    controller.wait(lambda: trains(1), "both halves train")
    controller.wait(lambda: len(_copied(cluster)) >= 2, "each has a copy in the other node")
    generation, least = controller.job()["generation"], min(_copied(cluster))
    controller.wait(lambda: trains(least + 3), "and they train on")
    requeued = call("scontrol", "requeue", f"{done.stdout.strip()}_1", environment=environment)
    assert requeued.returncode == 0, requeued.stderr
    controller.wait(lambda: controller.job()["generation"] > generation and trains(least), "on again")
    plan = next(event["plan"] for event in controller.events("plan") if event["generation"] > generation)
    assert plan["iteration"] >= least and plan["members"] == [0, 1]
    before = {row["iteration"]: row["loss"] for row in json_lines(out / "losses.0")}
    last = max(before)
    controller.wait(lambda: trains(last + 2), "it trains on")
    assert controller.job()["ledger_violations"] == 0


@pytest.mark.wide
def test_an_allocation_that_loses_its_batch_host_goes_on_with_what_the_others_have_in_memory(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """Without --no-kill Slurm requeues the whole job, on other nodes."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    out.mkdir()
    said = {"root": ROOT, "address": controller.address, "out": out, "iterations": FOREVER, "script": TINY}
    text = SCRIPT.format(**said, agent=f"srun {' '.join(AGENT)}", python=AGENT[0])
    script.write_text(text.replace(' TINY_LAYOUT="2 1 1"', ""))
    options = ["-N2", "--exclusive", "--gres=gpu:1", "--requeue", "--open-mode=append", "-o", str(tmp_path / "out.txt")]
    environment = outside_slurm() | cluster.env()

    def slurm(*words: str) -> str:
        done = call(*words, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def trains(least: int) -> bool:
        job = controller.job()
        return bool(job) and (len(job["members"]), job["state"]) == (2, "running") and job["iteration"] >= least

    number = slurm("sbatch", "--parsable", *options, str(script))
    controller.wait(lambda: trains(5), "both train")
    generation, node = controller.job()["generation"], slurm("squeue", "-h", "-j", number, "-o", "%B")
    cluster.power_off(node)
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
    controller.wait(lambda: controller.job()["generation"] > generation and trains(6), "on again")
    assert slurm("squeue", "-h", "-j", number, "-O", "RestartCnt") == "1"
    plan = next(e["plan"] for e in reversed(controller.events("plan")) if e["plan"]["members"] == [0, 1])
    assert plan["iteration"] >= 5, "it begins where it was, and there are no files"


def _copied(cluster: LocalCluster) -> list[int]:
    """The iterations of which there are copies: the last number in their names."""
    found = cluster.layout.memory_dir.glob("*/unicron.*/copy-*.image")
    return [int(path.stem.rsplit("-", 1)[1]) for path in found]
