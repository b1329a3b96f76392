"""Running jobs outlive a restore of an old backup: real agents and ranks go on under a controller that has forgotten
what came since."""

from __future__ import annotations

import os
import signal
import sqlite3
import tarfile

import pytest

from tests.support.jobs import FOREVER, SLEEPS, Job, World, scripted
from tests.support.processes import unicronctl

pytestmark = [pytest.mark.process, pytest.mark.wide, pytest.mark.timeout(600)]
HOUR = 3600.0


def older(copy, folder):
    """The same backup, made an hour ago."""
    place = folder / "older"
    with tarfile.open(copy) as bundle:
        bundle.extractall(place, filter="data")
    with sqlite3.connect(place / "events.sqlite") as log:
        log.execute("UPDATE event SET time = time - ?", (HOUR,))
    found = folder / "older.backup"
    with tarfile.open(found, "w") as bundle:
        for file in place.iterdir():
            bundle.add(file, file.name)
    return found


def heals(world: World, slot: int) -> None:
    """A rank that is killed trains again."""
    pid, generation = world.rank(slot)["pid"], world.job("7")["generation"]
    os.kill(pid, signal.SIGKILL)
    world.wait(
        lambda: world.trains([0, 1]) and world.job("7")["generation"] > generation and world.rank(slot)["pid"] != pid,
        f"slot {slot} trains again",
        240.0,
    )
    world.trains_on([0, 1], limit=240.0)


def test_jobs_that_run_survive_a_restore_of_an_old_backup(tmp_path):
    folder, copy = ["--state-dir", str(tmp_path / "state")], tmp_path / "copy"
    ranks = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.05"}
    with World(tmp_path, 2, **ranks) as world:
        world.trains_on([0, 1], limit=240.0)
        before = world.job("7")
        assert "read again: sound" in unicronctl("backup", str(copy), *folder).stdout
        heals(world, 1)  # what comes now is not in the backup
        later = Job(tmp_path, world.address, "8", 1, scripted(tmp_path, SLEEPS), UNICRON_MODE="session")
        try:
            world.wait(lambda: world.rank(0, "8").get("pid"), "a later job is taken in", 60.0)
            lost = world.job("7")
            assert lost["generation"] > before["generation"] and lost["iteration"] > before["iteration"]
            last = world.events()[-1]["id"]
            refused = unicronctl("restore", str(copy), *folder)
            assert refused.returncode == 1 and "stop it first" in refused.stderr
            world.process.terminate()
            assert world.process.wait(60.0) == 0
            done = unicronctl("restore", str(older(copy, tmp_path)), *folder)
            assert done.returncode == 0 and "what was there is in" in done.stdout, done.stderr
            world.start()
            world.trains_on([0, 1], limit=240.0)
            after = world.job("7")
            assert after["generation"] == lost["generation"], "nothing was broken: the controller took their word"
            assert after["iteration"] > lost["iteration"]
            world.wait(lambda: world.rank(0, "8").get("pid"), "the later job is taken in again", 60.0)
            heals(world, 0)
            assert world.job("7")["ledger_violations"] == 0
            (restored,) = world.events("restored")
            assert restored["id"] > last, "whoever follows the events sees what comes now"
            assert "paused" in unicronctl("status", "--controller", world.address).stdout
            assert all(agent.alive for agent in (*world.agents.values(), *later.agents.values()))
        finally:
            later.close()
        # A rank that was killed has not written the iteration that it died in; the other one has.
        logs = [[step["iteration"] for step in world.array.losses(element)] for element in (0, 1)]
        assert all(log == sorted(set(log)) for log in logs), "no iteration is taken twice"
        assert set().union(*logs) == set(range(max(map(max, logs)) + 1)), "no iteration is lost"
