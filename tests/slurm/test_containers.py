"""Tasks in a container, by a plugin that gives them another root as pyxis does. The agent's own folder is all that is
mounted there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.plugin_site import Site
from tests.support.processes import call, wait_for
from tests.support.small_root import add, make_root, plugin_line

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a task's root"),
]

# The first world breaks by itself. What the agent needs for itself must not be left in a rank's environment.
TRAIN = """
echo "rank $RANK of $WORLD_SIZE, world $UNICRON_GENERATION"
[ -e /etc ] || echo "contained, library ${LD_LIBRARY_PATH:-none}, home ${PYTHONHOME:-none}"
[ "${UNICRON_GENERATION:-0}$RANK" != 10 ] || kill -9 $$
i=0
while [ "$UNICRON_GENERATION" = 1 ] && [ $i -lt 100000000 ]; do i=$((i+1)); done
"""


def contain(site: Site, agent: Path, *mounted: Path | str) -> None:
    """From now on the tasks of all steps are in a container with these folders of the host's."""
    root = make_root(site.folder / "root")
    if found := re.search(r"^TaskProlog=(.*)$", site.cluster.layout.slurm_conf.read_text(), re.MULTILINE):
        add(root, Path(found[1]))
    line = plugin_line(site.folder / "container.so", root, mounted)
    site.use_agent(agent)
    plugstack = site.cluster.layout.etc_dir / "plugstack.conf"
    plugstack.write_text(f"{line}\n{plugstack.read_text()}")


def run(
    site: Site, program: str = "/bin/program", *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["srun", "--unicron", "-N2", *options, program, "-c", TRAIN]
    return call(*command, cwd=site.folder, environment=site.environment | environment)


def test_a_rank_that_is_killed_in_a_container_is_healed(site: Site, agent_folder: Path) -> None:
    contain(site, agent_folder / "bin/unicron-agent", agent_folder, "/dev", "/proc")
    users = {"LD_LIBRARY_PATH": "/mine", "PYTHONHOME": "/my/python", "LD_PRELOAD": "/no/library.so"}
    done = run(site, **users)
    assert done.returncode == 0, done.stderr
    assert {"rank 0 of 2, world 1", "rank 0 of 2, world 2", "rank 1 of 2, world 2"} <= set(done.stdout.splitlines())
    assert done.stdout.count("contained, library /mine, home /my/python\n") >= 3, done.stdout
    assert "unprotected" not in done.stderr and "restart mode: program is no Python script" in done.stderr, done.stderr
    (job,) = site.controller.ask("jobs")
    wait_for(lambda: site.job(job["job"])["state"] == "ended", site.logs)


@pytest.mark.wide
def test_several_tasks_on_a_node_share_the_agent_in_their_container(site: Site, agent_folder: Path) -> None:
    contain(site, agent_folder / "bin/unicron-agent", agent_folder, "/dev", "/proc")
    shutil.copy(site.folder / "root/bin/sh", site.folder / "root/bin/python")  # of whose tasks ranks may be made
    done = run(site, "/bin/python", "--ntasks-per-node=2", "--label")
    assert done.returncode == 0 and "unprotected" not in done.stderr, done.stderr
    assert {f"{rank}: rank {rank} of 4, world 2" for rank in range(4)} <= set(done.stdout.splitlines()), done.stdout


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mounted", "told"),
    [
        ("", "the task's container has no such program; ask the administrator to mount the agent's folder there"),
        ("FOLDER /dev", "there is no /proc here, in which an agent sees its ranks: mount it into the container"),
        ("FOLDER /dev /proc", "UNICRON_CONFIG=/etc/unicron/unicron.toml: no such file; write it, mount it if this is"),
    ],
)
def test_without_what_the_agent_needs_the_job_runs_and_says_so(
    site: Site, agent_folder: Path, mounted: str, told: str
) -> None:
    contain(site, agent_folder / "bin/unicron-agent", *mounted.replace("FOLDER", str(agent_folder)).split())
    environment = {"UNICRON_CONFIG": "/etc/unicron/unicron.toml"} if "proc" in mounted else {}
    done = run(site, **environment)
    assert done.stdout.count("contained, library none") == 2 and " world 2" not in done.stdout, done.stdout
    lines = [line for line in done.stderr.splitlines() if "unprotected" in line]
    assert len(lines) == 2 and all(told in line for line in lines), done.stderr  # one on each node


@pytest.mark.wide
def test_without_shared_memory_a_job_is_healed_all_the_same(site: Site, agent_folder: Path) -> None:
    contain(site, agent_folder / "bin/unicron-agent", agent_folder, "/proc")
    done = run(site)
    assert done.returncode == 0 and "rank 0 of 2, world 2\n" in done.stdout, done.stderr
    assert done.stderr.count("no training state is kept in memory") == 2, done.stderr


@pytest.mark.wide
@pytest.mark.parametrize("there", [True, False])
def test_munge_s_socket_is_mounted_or_said_to_be_missing(tmp_path: Path, agent_folder: Path, there: bool) -> None:
    site = Site(tmp_path, auth="munge")
    try:
        munge = site.cluster.layout.munge_socket
        mounted = [agent_folder, "/dev", "/proc", *([munge.parent] if there else [])]
        contain(site, agent_folder / "bin/unicron-agent", *mounted)
        done = run(site, MUNGE_SOCKET=str(munge), UNICRON_REGISTER_TIMEOUT="80" if there else "3")
        if there:
            assert done.returncode == 0 and "rank 0 of 2, world 2\n" in done.stdout, done.stderr
        else:
            assert " world 2" not in done.stdout and done.stdout.count("contained") == 2, done.stdout
            lines = [line for line in done.stderr.splitlines() if "unprotected" in line]
            assert len(lines) == 2 and all(
                f"({munge}): does munged run, and is its socket in" in line for line in lines
            ), done.stderr
    finally:
        site.close()
