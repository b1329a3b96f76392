"""Tasks in a container, by a plugin that gives them another root as pyxis does: the agent's own folder is all that is mounted there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.plugin_site import Site
from tests.support.processes import ROOT, call, wait_for
from tests.support.small_root import add, make_root, plugin_line

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a task's root")

# The first world breaks by itself. What the agent needs for itself must not be left in a rank's environment.
TRAIN = """
echo "rank $RANK of $WORLD_SIZE, world $UNICRON_GENERATION"
[ -e /etc ] || echo "contained, library ${LD_LIBRARY_PATH:-none}, home ${PYTHONHOME:-none}"
[ "$UNICRON_GENERATION$RANK" != 10 ] || kill -9 $$
i=0
while [ $UNICRON_GENERATION = 1 ] && [ $i -lt 100000000 ]; do i=$((i+1)); done
"""


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("made") / "unicron-agent"
    done = subprocess.run(
        [sys.executable, ROOT / "tools/agent_folder.py", folder], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()


def contain(site: Site, agent: Path, *mounted: Path | str) -> None:
    """From now on the tasks of all steps are in a container with these folders of the host's."""
    root = make_root(site.folder / "root")
    if found := re.search(r"^TaskProlog=(.*)$", site.cluster.layout.slurm_conf.read_text(), re.MULTILINE):
        add(root, Path(found[1]))
    line = plugin_line(site.folder / "container.so", root, mounted)
    plugstack = site.cluster.layout.etc_dir / "plugstack.conf"
    ours = re.sub(r"agent=\S+", f"agent={agent}", plugstack.read_text())
    plugstack.write_text(f"{line}\n{ours}")


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
    shutil.copy(site.folder / "root/bin/sh", site.folder / "root/bin/python")
    done = run(site, "/bin/python", "--ntasks-per-node=2", "--label")
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
@pytest.mark.parametrize("there", ["nothing", "no /dev/shm", "no /proc", "no /tmp", "no /tmp, no /dev/shm"])
def test_what_a_container_lacks_costs_no_job(site: Site, agent_folder: Path, there: str) -> None:
    mounted = {"nothing": (), "no /dev/shm": (agent_folder, "/proc"), "no /proc": (agent_folder, "/dev"), "no /tmp": (agent_folder, "/dev", "/proc"),  "no /tmp, no /dev/shm": (agent_folder, "/proc")}[there]
    contain(site, agent_folder / "bin/unicron-agent", *mounted)
    if "tmp" in there: 
        (site.folder / "root/tmp").rename(site.folder / "root/tmp0")
        (site.folder / "root/tmp").symlink_to("tmp1")
    done = run(site)
    print(done.stdout, done.stderr)
    assert done.returncode == 9, done.stderr
