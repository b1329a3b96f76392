"""The site's program switches a node off that a job of plain programs has lost: real program, unicrond and Slurm."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.fence.cuts import WRITER, last_written, two_worlds, worlds
from tests.support.links import NEEDS_ROOT, LinksCluster
from tests.support.processes import wait_for

pytestmark = [pytest.mark.slurm, NEEDS_ROOT, pytest.mark.wide, pytest.mark.timeout(600)]
FENCE_SECONDS = 60.0  # without proof a new world waits for 67 s
START_LIMIT = 180.0


@pytest.mark.parametrize("status", [0, 1])
def test_only_its_status_0_is_a_proof(status: int, tmp_path: Path) -> None:
    off, path = tmp_path / "node-off", tmp_path / "written"
    off.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "no BMC answers" >&2\nexit {status}\n')
    off.chmod(0o755)
    settings = f"""fence_seconds = {FENCE_SECONDS}
forming_settle_seconds = 1
power_off = "{off} --now %n"
[partition.default]
mode = "act"
actions = ["power_off"]
"""
    with LinksCluster(tmp_path / "site", nodes=3, settings=settings, config_lines=["SlurmdTimeout=3600"]) as site:
        given = {"FENCE_FILE": str(path), "UNICRON_MIN_NODES": "1", "UNICRON_WARM": "0"}
        job = site.submit(3, [sys.executable, str(WRITER)], **given)
        wait_for(lambda: len(job.status().get("members", ())) == 3, "a world of three", START_LIMIT, job.told)
        wait_for(lambda: worlds(path) == 1 if path.exists() else False, "it writes", START_LIMIT, job.told)
        victim = job.node(2)
        site.cluster.power_off(victim)
        cut = time.monotonic()
        if status:
            failed = wait_for(
                lambda: [one for one in site.controller.events("slurm_error") if one["action"] == "power_off"],
                "the log says that it failed",
                FENCE_SECONDS,
                job.told,
            )
            said = "ended with status 1: no BMC answers; the lease of its processes is waited for"
            assert said in failed[0]["reason"] and worlds(path) == 1
        wait_for(lambda: len(job.status().get("members", ())) == 2, "a world of two", 3 * FENCE_SECONDS, job.told)
        wait_for(lambda: worlds(path) == 2, "it writes", START_LIMIT, job.told)
        waited = time.monotonic() - cut
        assert (waited > FENCE_SECONDS) == bool(status), (waited, job.told())
        assert (tmp_path / "asked").read_text() == f"--now {victim}\n", "once"
        assert two_worlds(path) == [] and last_written(path) > cut
