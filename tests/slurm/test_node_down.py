"""What Slurm does with a job that loses a node: docs/behaviour/slurm-node-down.toml, asked of the Slurm here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.links import HEAD, NEEDS_ROOT, LinksCluster
from tests.support.processes import LIMIT, ROOT, wait_for

pytestmark = [pytest.mark.slurm, NEEDS_ROOT, pytest.mark.wide, pytest.mark.timeout(600)]
SEEN = tomllib.loads((ROOT / "docs" / "behaviour" / "slurm-node-down.toml").read_text())["lost"]
LINES = ["SlurmdTimeout=10"]
LATE = 8.0  # seconds by which a busy machine may be later than the table
BEATS = """
import os, signal, time
name = os.path.join(os.environ["OUT"], os.environ["SLURMD_NODENAME"])
def note(what):
    with open(name, "a") as file:
        file.write(f"{time.time():.2f} {what}" + chr(10))
for number in (signal.SIGTERM, signal.SIGCONT):
    signal.signal(number, lambda number, frame: note(signal.Signals(number).name))
while True:
    note("beat")
    time.sleep(0.2)
"""


def _submit(site: LinksCluster, out: Path, no_kill: bool) -> str:
    (out / "beats.py").write_text(BEATS)
    more = ["--no-kill"] if no_kill else []
    options = ["--parsable", "-N3", "--exclusive", "--no-requeue", f"--output={out}/log", *more]
    step = f"srun {' '.join(more)} {sys.executable} {out}/beats.py"
    done = subprocess.run(
        [*site.cluster.command_prefix(HEAD), "sbatch", *options, "--wrap", step],
        env=site.environment | {"OUT": str(out)},
        cwd=out,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    return done.stdout.strip()


def _lines(out: Path, node: str) -> list[tuple[float, str]]:
    words = [line.split() for line in (out / node).read_text().splitlines()]
    return [(float(one[0]), one[1]) for one in words if len(one) == 2]


def _goes_on(out: Path, node: str) -> bool:
    return time.time() - _lines(out, node)[-1][0] < 2.0


@pytest.mark.parametrize("case", SEEN, ids=[f"{one['lost']}, no_kill={one['no_kill']}" for one in SEEN])
def test_a_job_that_loses_a_node(case: dict[str, Any], tmp_path: Path) -> None:
    with LinksCluster(tmp_path / "site", nodes=3, config_lines=LINES) as site:
        out = tmp_path / "out"
        out.mkdir()
        job = _submit(site, out, case["no_kill"])
        wait_for(lambda: all((out / node).exists() for node in ("n1", "n2", "n3")), "it runs", LIMIT)
        time.sleep(1.0)
        lost = time.time()
        if "power" in case["lost"]:
            site.cluster.power_off("n3")
        if "word" in case["lost"]:
            site.slurm("scontrol", "update", "nodename=n3", "state=down", "reason=power")

        def shown() -> tuple[str, str]:
            state, _, reason = site.slurm("sinfo", "-h", "-n", "n3", "-o", "%T %E").strip().partition(" ")
            return state, reason

        if "silent" in case:
            wait_for(lambda: shown()[0].endswith("*"), "it is silent", LIMIT)
            assert case["silent"][0] - LATE <= time.time() - lost <= case["silent"][1] + LATE
        wait_for(lambda: shown()[0].rstrip("*") == "down", "it is down", LIMIT)
        down = time.time()
        assert case["down"][0] - LATE <= down - lost <= case["down"][1] + LATE and shown()[1] == case["reason"]
        queue = site.slurm("squeue", "-h", "-j", job, "-o", "%T %N", check=False).split()
        assert queue in ([case["job"], case["nodes"]], [] if case["job"] == "COMPLETING" else None)
        wait_for(lambda: case["said"] in (out / "log").read_text(), "srun says so", LIMIT)
        time.sleep(6.0 + LATE if case["others_end"] < 0 else case["others_end"] + LATE)
        for node in ("n1", "n2"):
            lines = _lines(out, node)
            assert _goes_on(out, node) == (case["others_end"] < 0)
            told = {what for _, what in lines if what != "beat"}
            assert told == set(case["signals"])
            assert case["others_end"] < 0 or lines[-1][0] - down <= case["others_end"] + LATE
        if "its_end" in case:
            assert _lines(out, "n3")[-1][0] - down <= case["its_end"] + LATE and not _goes_on(out, "n3")
        assert signal.Signals.SIGTERM.name in case["signals"] or case["no_kill"]
