"""Admission checks on a real Slurm, with a real controller that hears of them."""

from __future__ import annotations

import getpass
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import Controller
from tests.support.nodes import all_idle
from tests.support.processes import UNICRONCTL, call, line_in, outside_slurm, wait_for
from tests.support.scripted import ScriptedAgent
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.lab.cluster.cluster_layout import Layout
from unicron_ctl.lab.cluster.health_program import PROLOG, health_conf, health_lines, wrapper
from unicron_ctl.shared.slurm.slurm_client import NodeInfo

pytestmark = pytest.mark.slurm
SETTINGS = 'slurm = "command"\nslurm_poll_seconds = 0.5\nlease_periods = 1.8\nadmission_seconds = 600\n'
BAD = "[health]\ngpus = 99\n"


class Site:
    """Five nodes with prolog and HealthCheckProgram, and a unicrond."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        layout = Layout(folder / "cluster")
        environment = outside_slurm() | {"SLURM_CONF": str(layout.slurm_conf)}
        environment["PATH"] += ":/usr/sbin:/usr/bin"
        self.controller = Controller(folder, SETTINGS, environment)
        self.address = self.controller.address
        lines = health_lines(folder, layout, self.address, interval=4)
        prolog = wrapper(folder, PROLOG, "UNICRON_PROLOG_CONF")
        (folder / "prolog.conf").write_text(
            f"UNICRON_LOG={folder}/prolog.log\nUNICRON_HEALTH_CONF={folder}/health.conf\n"
            "UNICRON_CHECK_SHM=off\nUNICRON_HEALTH_SECONDS=45\n"
        )
        lines += [f"Prolog={prolog}", "SchedulerParameters=bf_interval=1,sched_interval=2,nohold_on_prolog_fail"]
        self.layout = layout
        self.cluster = LocalCluster(folder / "cluster", nodes=5, gpus_per_node=1, auth="none", config_lines=lines)
        self.cluster.up()
        self.client = self.cluster.client()

    def close(self) -> None:
        self.cluster.down()
        self.controller.close()

    def expect(self, node: str, text: str) -> None:
        """From now on this is the node's [health]; empty: nothing is expected of it, as at the start."""
        config = self.folder / f"{node}.toml"
        conf = self.folder / f"health-{node}.conf"
        config.write_text(text)
        draft = conf.with_suffix(".new")
        draft.write_text(health_conf(self.folder, self.layout, self.address, UNICRON_CONFIG=str(config)))
        draft.rename(conf)

    def node(self, name: str) -> NodeInfo:
        return next(node for node in self.client.nodes() if node.name == name)

    def shown(self, name: str) -> dict[str, Any]:
        """What `unicronctl nodes` says of it."""
        return self.controller.node(name)

    def verdict(self, name: str) -> str:
        return (self.shown(name).get("health") or {}).get("verdict", "")

    def call(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = outside_slurm() | self.cluster.env() | {"UNICRON_CONTROLLER": self.address} | variables
        return call(*command, cwd=self.folder, environment=environment, limit=100)


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("admission"))
    try:
        yield site
    finally:
        site.close()


@pytest.fixture
def site(whole_site: Site) -> Iterator[Site]:
    """With all nodes in service and nothing expected of them, before and after the test."""
    yield whole_site
    whole_site.call("scancel", f"--user={getpass.getuser()}")
    told = [conf.stem.removeprefix("health-") for conf in whole_site.folder.glob("health-n?.conf")]
    for conf in whole_site.folder.glob("*-n?.conf"):
        conf.unlink()
    for name in whole_site.cluster.spec.node_names:
        whole_site.cluster.power_on(name)
    for name in told:  # a check that began before may drain the node yet
        wait_for(lambda name=name: whole_site.verdict(name) in ("good", "warning"), f"{name} is checked anew")
    for name in whole_site.cluster.spec.node_names:
        whole_site.client.resume(name)
    client = whole_site.client
    wait_for(lambda: all_idle(client), "all nodes are idle", now=client.nodes)


def test_healthy_nodes_run_jobs_and_are_shown_as_such(site: Site) -> None:
    done = site.call("srun", "-N2", "hostname")
    assert done.returncode == 0, done.stderr
    wait_for(
        lambda: all(site.verdict(name) in ("good", "warning") for name in site.cluster.spec.node_names),
        "every node is checked",
    )
    assert all(node.reason == "" for node in site.client.nodes())
    table = site.call(*UNICRONCTL, "nodes")
    assert table.returncode == 0 and re.search(r"^n1 .* ok ", table.stdout, re.MULTILINE), table


def test_the_prolog_drains_a_bad_node_and_the_job_runs_elsewhere(site: Site) -> None:
    first = site.client.nodes()[0].name
    (site.folder / "bad.toml").write_text(BAD)
    # Only its prolog finds the node bad, or HealthCheckProgram would come first.
    (site.folder / "bad.conf").write_text(
        health_conf(site.folder, site.layout, UNICRON_CONFIG=str(site.folder / "bad.toml"))
    )
    (site.folder / f"prolog-{first}.conf").write_text(
        f"UNICRON_LOG={site.folder}/prolog.log\nUNICRON_HEALTH_CONF={site.folder}/bad.conf\nUNICRON_CHECK_SHM=off\n"
        "UNICRON_HEALTH_SECONDS=45\n"
    )
    done = site.call("sbatch", "--parsable", "--requeue", "--wrap", f"echo $SLURMD_NODENAME > {site.folder}/ran")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: "DRAIN" in site.node(first).states, f"{first} is drained", now=lambda: site.node(first))
    reason = site.node(first).reason
    assert reason == "unicron[health]: gpu: 99 GPUs expected, the driver shows none", "not Slurm's 'Prolog error'"
    ran = wait_for(lambda: line_in(site.folder / "ran"), "the job runs", now=site.client.elements)
    assert ran != first
    assert "proven bad" in (site.folder / "prolog.log").read_text()


def test_the_health_check_drains_a_bad_node_and_nobody_elses(site: Site) -> None:
    assert site.call("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=NHC: fan 2").returncode == 0
    site.expect("n2", BAD)
    site.expect("n3", BAD)
    site.expect("n4", BAD + 'skip = ["gpu"]\n')
    site.expect("n5", "[health]\ngpus = 'many'\n")
    wait_for(lambda: "DRAIN" in site.node("n2").states, "n2 is drained", now=lambda: site.node("n2"))
    assert site.node("n2").reason.startswith("unicron[health]: gpu: 99 GPUs expected")
    wait_for(lambda: site.verdict("n2") == site.verdict("n3") == "bad", "both are bad", now=lambda: site.shown("n3"))
    wait_for(
        lambda: "[health] gpus: Expected `int`, got `str`" in (site.folder / "health.log").read_text(), "the complaint"
    )
    assert site.node("n3").reason == "NHC: fan 2" and "99 GPUs" in site.shown("n3")["health"]["reason"]
    assert site.node("n4").states == site.node("n5").states == {"IDLE"}


@pytest.mark.long
def test_a_node_that_was_set_down_comes_back_when_its_checks_pass(site: Site) -> None:
    """Its agent falls silent, its slurmd is dead; it comes back bad, stays down, is mended, is resumed."""
    submitted = site.call(
        "sbatch", "--parsable", "--array=0", "--nodelist=n5", "--output=/dev/null", "--wrap", "sleep 99"
    )
    job = submitted.stdout.strip()
    wait_for(lambda: any(e.job == job and e.state == "RUNNING" for e in site.client.elements()), "it runs")
    agent = ScriptedAgent(site.address, 0, job=job, node="n5")
    try:
        agent.register(user=getpass.getuser())
        site.cluster.power_off("n5")
        wait_for(
            lambda: site.node("n5").reason.startswith("unicron[node_problem]"),
            "n5 is down",
            now=lambda: site.node("n5"),
        )
    finally:
        agent.close()
    told = site.controller.ask("explain", job=job)["failures"][-1]["actions"]
    assert any("unicronctl pair-test --nodes n5" in text for text in told)
    site.expect("n5", BAD)
    site.cluster.power_on("n5")
    wait_for(
        lambda: "99 GPUs" in site.shown("n5").get("admission", ""), "it is not let in", now=lambda: site.shown("n5")
    )
    assert "DOWN" in site.node("n5").states
    site.expect("n5", "")
    wait_for(lambda: site.node("n5").states == {"IDLE"}, "it is let in", now=lambda: site.shown("n5"))
    shown = site.shown("n5")
    assert not shown["unverified"] and shown["health"]["verdict"] in ("good", "warning")
    assert shown["suspect"], "it was set down"
    passed = {"node": "n5", "source": "pair-test", "verdict": "good", "reason": "passed", "at": time.time()}
    site.controller.ask("health", **passed)
    assert not site.shown("n5")["suspect"]
