"""Ranks in containers of Apptainer's, which the command itself starts: the agent stays outside."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, PLAIN
from tests.support.plugin_site import Site
from tests.support.processes import ROOT, wait_for
from tests.support.small_root import make_root

pytestmark = [pytest.mark.slurm, pytest.mark.wide, pytest.mark.apptainer]

OF_THE_HOST = tuple(dict.fromkeys(("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix)))


@pytest.fixture
def site(site: Site, agent_folder: Path) -> Site:
    site.use_agent(agent_folder / "bin/unicron-agent")
    return site


def container(site: Site, *hidden: Path) -> str:
    """The words in front of a container's command. There is nothing in it but this system's programs and this Python's
    packages: the project itself is not there. hidden: folders that are empty in it."""
    image = make_root(site.folder / "image")
    for name in (*OF_THE_HOST, "/etc", "/sys", "/var/tmp"):
        (image / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf"):
        (image / "etc" / name).touch()
    binds = ",".join(f"{path}:{path}:ro" for path in OF_THE_HOST)
    (empty := site.folder / "empty").mkdir(exist_ok=True)
    binds += "".join(f",{empty}:{folder}" for folder in hidden)
    as_root = "--no-privs " if os.geteuid() == 0 else ""
    return f"apptainer exec {as_root}--no-home --bind {binds} {image}"


def submit(site: Site, *words: str, **environment: str) -> str:
    site.environment.pop("PYTHONPATH", None)
    options = ("--unicron", "--unicron-min-nodes=2", "--array=0-1", "-N1", "--exclusive")
    return site.submit(*options, *words, **environment)


def test_a_killed_rank_in_a_container_is_healed_in_restart_mode(site: Site, agent_folder: Path) -> None:
    """Nothing of the project's is in the container."""
    script = Path(shutil.copy(PLAIN, site.folder))
    command = f"srun {container(site, agent_folder)} {sys.executable} {script}"
    number = submit(site, "--wrap", command, PLAIN_BACKEND="gloo")
    before = site.world(0)
    victim = site.steps(0)[-1]
    os.kill(victim["pid"], signal.SIGKILL)
    after = site.world(before["generation"])
    assert after["begun"] >= before["step"] and after["pid"] != before["pid"]
    wait_for(lambda: site.job(number)["iteration"], site.logs)  # counted in the container
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert site.job(number)["ended"]["code"] == 0, site.logs()


def test_a_killed_rank_in_a_container_is_healed_in_session_mode(site: Site) -> None:
    """The image has torch and the wheels; the project comes with the agent's folder, which is mounted with /tmp."""
    templates = shutil.copytree(ROOT / "sbatch_templates", site.folder / "templates")
    words = f"{templates}/train_plain.py --text {templates} --iterations {FOREVER} --save {site.folder}/saves"
    number = submit(site, "--wrap", f"srun {container(site)} {sys.executable} {words}", OMP_NUM_THREADS="1")

    def trains(least: int) -> bool:
        job = site.job(number)
        return job.get("members") == [0, 1] and job["state"] == "running" and job["iteration"] >= least

    wait_for(lambda: trains(3), site.logs)
    assert site.job(number)["mode"] == "session"
    before = site.job(number)
    os.kill(site.controller.rank(1, number)["pid"], signal.SIGKILL)
    wait_for(
        lambda: trains(before["iteration"] + 5) and site.job(number)["generation"] > before["generation"], site.logs
    )
    assert not site.controller.events("reform", job=number)  # the other one has kept its work
    site.run("scancel", number)
    wait_for(lambda: site.job(number)["ended"], site.logs)
