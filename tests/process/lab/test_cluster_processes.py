"""The local cluster knows its processes by their marks, and ends them and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import wait_for
from unicron_ctl.lab.cluster import cluster_processes
from unicron_ctl.lab.cluster.cluster_processes import Marks

pytestmark = pytest.mark.process
HERE = f"/x/{os.getpid()}"  # another run of these tests on this machine is left alone
MARKS = Marks(f"{HERE}/slurm.conf", f"{HERE}/socket", log_dir=f"{HERE}/log", database_dir=f"{HERE}/database")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        ["sleep", "60"], env={"SLURM_CONF": MARKS.slurm_conf, "SLURMD_NODENAME": "n2", "PATH": os.environ["PATH"]}
    )
    yield process
    process.kill()
    process.wait()


def test_a_task_is_known_by_both_variables_and_a_shell_is_left_alone(sleeper: subprocess.Popen) -> None:
    shell = subprocess.Popen(["sleep", "60"], env={"SLURM_CONF": MARKS.slurm_conf, "PATH": os.environ["PATH"]})
    try:
        found = {process.pid: process for process in cluster_processes.find(MARKS)}
        assert (found[sleeper.pid].kind, found[sleeper.pid].node) == ("task", "n2")
        assert shell.pid not in found and os.getpid() not in found
    finally:
        shell.kill()
        shell.wait()


def test_a_child_that_hides_its_environment_is_found_through_its_parent() -> None:
    script = "import subprocess; subprocess.run(['env', '-i', '/bin/sleep', '60'])"
    env = {"SLURM_CONF": MARKS.slurm_conf, "SLURMD_NODENAME": "n7", "PATH": os.environ["PATH"]}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:

        def victims() -> list[cluster_processes.Process]:
            return [process for process in cluster_processes.find(MARKS) if process.node == "n7"]

        wait_for(lambda: len(victims()) >= 2, "parent and child")
        assert len(cluster_processes.kill_all(victims, limit=60.0)) >= 2
        assert parent.wait(timeout=60) < 0
    finally:
        parent.kill()
        parent.wait()


def test_a_process_id_that_was_used_again_is_not_killed(sleeper: subprocess.Popen) -> None:
    found = next(process for process in cluster_processes.find(MARKS) if process.pid == sleeper.pid)
    earlier = cluster_processes.Process(found.pid, found.kind, found.node, found.started - 1)
    assert cluster_processes.kill(earlier) is False
    assert sleeper.poll() is None
    assert cluster_processes.kill(found) is True
    assert sleeper.wait(timeout=60) == -9
    assert cluster_processes.kill(found) is False


def test_what_cannot_be_ended_is_told_after_a_while(sleeper: subprocess.Popen) -> None:
    found = next(process for process in cluster_processes.find(MARKS) if process.pid == sleeper.pid)
    immortal = cluster_processes.Process(found.pid, found.kind, found.node, found.started - 1)
    with pytest.raises(TimeoutError, match=re.escape(f"[{found.pid}]")):
        cluster_processes.kill_all(lambda: [immortal], limit=0.1)
