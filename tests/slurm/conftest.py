"""A real Slurm for this tier: six virtual nodes with one pretended GPU each, up for the whole session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.controller import Controller, quick_on_slurm
from tests.support.nodes import all_idle
from tests.support.plugin_site import Site
from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.slurm import ElementInfo, SlurmClient


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The session's cluster. Tests that use it directly clean up after themselves; `cluster` does it for them."""
    cluster = LocalCluster(tmp_path_factory.mktemp("slurm") / "state", nodes=6, gpus_per_node=1, auth="munge")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(local_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The session's cluster with no job and every node in service, before and after the test."""
    yield local_cluster
    client = local_cluster.client()
    for element in client.elements():
        if element.state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"):
            client.cancel(element.job)
    for node in local_cluster.spec.node_names:
        local_cluster.power_on(node)
        client.resume(node)
    wait_for(lambda: all_idle(client), "all nodes are idle", now=client.nodes)


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A cluster of the test's own, with the plugin, agent and controller. A mark `site` says what it is made with."""
    mark = request.node.get_closest_marker("site")
    made = Site(tmp_path, **(mark.kwargs if mark is not None else {}))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def submit(cluster: LocalCluster, tmp_path) -> Callable[..., str]:
    """submit(*options) runs a job that notes "INDEX NODE RESTARTS" in tmp_path/notes from a job step, then waits."""
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "export PATH=$PATH:/usr/bin:/bin\n"
        'note="${SLURM_ARRAY_TASK_ID:-0} $SLURMD_NODENAME ${SLURM_RESTART_COUNT:-0}"\n'
        f'srun bash -c "echo $note >> {tmp_path}/notes"\n'
        "exec sleep 300\n"
    )

    def call(*options: str) -> str:
        command = [
            "sbatch",
            "--parsable",
            "-N1",
            "--exclusive",
            "--gres=gpu:1",
            "--requeue",
            "--open-mode=append",
            f"--output={tmp_path}/%A_%a.out",
            *options,
            str(script),
        ]
        done = subprocess.run(command, env=os.environ | cluster.env(), capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return call


@pytest.fixture
def wait_until(cluster: LocalCluster) -> Callable[..., ElementInfo]:
    """wait_until(client, job, element, state, node=None) returns the element once it is so."""

    def call(client: SlurmClient, job: str, element: int, state: str, node: str | None = None) -> ElementInfo:
        def look() -> ElementInfo:
            return next(info for info in client.elements() if (info.job, info.element) == (job, element))

        def ready() -> bool:
            info = look()
            return info.state == state and node in (None, info.node)

        wait_for(ready, f"element {job}_{element} {state} on {node or 'any node'}", now=look)
        return look()

    return call


@pytest.fixture
def controller(cluster: LocalCluster, tmp_path: Path) -> Iterator[Controller]:
    """One that acts on Slurm, for the cluster of the test."""
    started = Controller(tmp_path, quick_on_slurm("act"), outside_slurm() | cluster.env())
    yield started
    started.close()


@pytest.fixture(scope="session")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The agent's own folder, as `make agent-folder` makes it."""
    folder = tmp_path_factory.mktemp("made") / "unicron-agent"
    done = subprocess.run(
        [sys.executable, ROOT / "tools/agent_folder.py", folder], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)
