"""A real Slurm is asked gently: limits of arrays and QOS are read, and cost a bounded number of RPCs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.controller import Controller, quick_on_slurm
from tests.support.jobs import sleepers
from tests.support.processes import call, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.protocol.reach import Reach, reach

pytestmark = pytest.mark.slurm
POLL = 0.5  # seconds, as `quick_on_slurm` has it
SECONDS = 20.0  # for which RPCs are counted
Start = Callable[..., tuple[Controller, str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(cluster, *options) runs an array of four elements whose agents keep a sleeping rank each."""
    started: list[Controller] = []

    def run(cluster: LocalCluster, *options: str) -> tuple[Controller, str]:
        environment = outside_slurm() | cluster.env()
        controller = Controller(tmp_path, quick_on_slurm("act"), environment)
        started.append(controller)
        usual = ["--parsable", "-N1", "--exclusive", "--requeue", "-o", "/dev/null"]
        done = call("sbatch", *usual, *options, sleepers(tmp_path, controller), environment=environment)
        assert done.returncode == 0, done.stderr
        return controller, done.stdout.strip()

    yield run
    for controller in started:
        controller.close()


def rpcs(cluster: LocalCluster) -> Counter[str]:
    """slurmctld's own count of what it was asked, by kind."""
    said = call("sdiag", environment=outside_slurm() | cluster.env()).stdout
    part = said.split("by message type")[1].split("by user")[0]
    return Counter({name: int(count) for name, count in re.findall(r"(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)", part)})


def counted(cluster: LocalCluster, seconds: float) -> Counter[str]:
    """What it is asked in the next seconds."""
    before = rpcs(cluster)
    time.sleep(seconds)  # this is what is measured
    return rpcs(cluster) - before


def works(controller: Controller, job: str, nodes: int) -> None:
    controller.wait(lambda: controller.job().get("state") == "running", "the job runs")
    controller.wait(lambda: controller.job()["nodes"] == nodes, f"it has {nodes} nodes")
    controller.wait(lambda: controller.job()["planned_nodes"] == nodes, "it is planned for no more")


def waits_for(controller: Controller, job: str, reason: str, words: str) -> None:
    """explain names the reason, in words too, and nothing is asked for again and again."""

    def said() -> list[dict]:
        return controller.ask("explain", job=job)["waiting"]

    wait_for(lambda: {one["reason"] for one in said()} == {reason}, f"{reason} is named", now=said)
    assert [(one["starts"], words in one["words"]) for one in said()] == [(False, True)]
    assert sum(len(one["elements"]) for one in said()) == 2


def gently(cluster: LocalCluster, controller: Controller) -> None:
    before = len(controller.events("slurm_action"))
    asked = counted(cluster, SECONDS)
    assert len(controller.events("slurm_action")) == before, "Slurm has said why they cannot start"
    assert not asked["REQUEST_UPDATE_JOB"], asked
    listings = asked["REQUEST_NODE_INFO"]
    assert 1 <= listings <= SECONDS / POLL + 3, asked
    reads = sum(count for kind, count in asked.items() if kind.startswith("REQUEST_JOB") or "JOB_INFO" in kind)
    assert reads <= 4 * (listings + 1), asked


@pytest.mark.wide
def test_an_array_that_may_run_two_at_once_makes_nobody_ask_slurm_all_the_time(
    cluster: LocalCluster, start: Start
) -> None:
    """Defect: 18 listings and 36 calls of scontrol a second."""
    controller, job = start(cluster, "--gres=gpu:1", "--array=0-3%2")
    works(controller, job, 2)
    waits_for(controller, job, "JobArrayTaskLimit", "--array=...%N")
    gently(cluster, controller)
    done = call(
        "scontrol", "update", f"JobId={job}", "ArrayTaskThrottle=4", environment=outside_slurm() | cluster.env()
    )
    assert done.returncode == 0, done.stderr
    works_with_all = lambda: controller.job()["planned_nodes"] == 4  # noqa: E731
    controller.wait(works_with_all, "those that were let go are noticed")


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[LocalCluster]:
    """A QOS lets a user run two jobs."""
    lines = ("AccountingStorageEnforce=associations,limits,qos",)
    cluster = LocalCluster(tmp_path / "state", nodes=5, gpus_per_node=0, with_accounting=True, config_lines=lines)
    try:
        cluster.up()
        environment = outside_slurm() | cluster.env()
        user = "root" if os.getuid() == 0 else os.environ["USER"]
        for words in (
            ["add", "account", "lab", "Description=x", "Organization=x"],
            ["add", "user", user, "Account=lab", "DefaultAccount=lab"],
            ["modify", "qos", "normal", "set", "MaxJobsPerUser=2"],
        ):
            done = call("sacctmgr", "-i", *words, environment=environment)
            assert done.returncode == 0 or "exists" in done.stdout + done.stderr, done.stdout + done.stderr
        yield cluster
    finally:
        cluster.down()


@pytest.mark.wide
def test_a_limit_of_a_qos_makes_nobody_ask_slurm_all_the_time(limited: LocalCluster, start: Start) -> None:
    controller, job = start(limited, "--array=0-3", "--account=lab")
    works(controller, job, 2)
    waits_for(controller, job, "QOSMaxJobsPerUserLimit", "its QOS lets a user have no more jobs at once")
    gently(limited, controller)


def test_slurmds_port_is_slurm_confs(tmp_path: Path) -> None:
    """A node that names no port of its own has SlurmdPort, and scontrol does not print it: here the node's own port is
    SlurmdPort. Defect: 6818 was taken for it."""
    cluster = LocalCluster(tmp_path / "state", nodes=1, gpus_per_node=0)
    try:
        cluster.up()
        (port,) = (node.port for node in cluster.client().nodes())
        conf = Path(cluster.layout.slurm_conf)
        conf.write_text(conf.read_text() + f"SlurmdPort={port}\n")
        for process in cluster.processes():
            if process.kind == "slurmctld":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: "slurmctld" not in {process.kind for process in cluster.processes()}, "slurmctld ends")
        cluster.start_slurmctld()
        said = call("scontrol", "-o", "show", "node", "n1", environment=outside_slurm() | cluster.env()).stdout
        assert " Port=" not in said, said
        (node,) = cluster.client().nodes()
        assert (node.port, reach(f"{node.address}:{node.port}", 5.0)) == (port, Reach.REACHED)
    finally:
        cluster.down()
