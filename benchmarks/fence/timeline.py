"""``python -m benchmarks.fence.timeline``: the stages from a node's silence to the next step of an unmodified script.

A real Slurm with a link for each host, one job (`sbatch --unicron -N 3 --no-kill --wrap "srun python train.py"`), one
node whose power is cut. With `--proof`, an admin says so at once. Needs root. The script also runs from the checkout of
an earlier release, by that release's Python and with that checkout as the working folder, so that both can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())

from tests.support.links import HEAD, LinksCluster
from tests.support.plugin_site import build_once
from tests.support.processes import wait_for

TRAIN = Path(__file__).with_name("train.py")
NODES = 3
LIMIT = 180.0
SLURM_LINES = ["SlurmdTimeout=300"]  # as on a site
STAGES = ("found", "stopped", "planned", "imported", "joined", "step")
"""Stages that end: the loss is on record, the others' processes have ended, a new world is planned, its last process
has imported torch and has met the others, and the first step is done."""


def measure(folder: Path, proof: bool, settings: str = "") -> dict[str, float]:
    """Return the seconds from the power cut to the end of each stage."""
    plugin = build_once(folder / "build")
    with LinksCluster(folder / "site", nodes=NODES, settings=settings, plugin=plugin, config_lines=SLURM_LINES) as site:
        out = folder / "out"
        out.mkdir()
        options = ["--parsable", "--unicron", f"-N{NODES}", "--no-kill", "--exclusive", "--gres=gpu:1"]
        options += [f"--output={out}/log", "--wrap", f"srun python {TRAIN}"]
        given = site.environment | {"FENCE_OUT": str(out), "UNICRON_CONTROLLER": site.controller.address}
        done = subprocess.run(
            [*site.cluster.command_prefix(HEAD), "sbatch", *options],
            env=given,
            cwd=out,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
        job = done.stdout.strip()

        def told() -> str:
            return "\n".join(
                [(out / "log").read_text() if (out / "log").exists() else "", str(site.controller.job(job))]
            )

        wait_for(lambda: _whole(out, NODES), "the world trains", LIMIT, told)
        time.sleep(3.0)
        victim = f"n{NODES}"
        last = max(line["generation"] for line in _lines(out))
        cut = time.time()
        _power_off(site, victim)
        if proof:
            site.slurm("scontrol", "update", f"nodename={victim}", "state=down", "reason=power")
        wait_for(lambda: _whole(out, NODES - 1, last), "a smaller world trains", LIMIT, told)
        events = site.controller.events()
        return _stages(out, cut, last, events)


def _power_off(site: LinksCluster, node: str) -> None:
    """Cut the node off, then kill all that runs there."""
    site.cluster.power_off(node)


def _lines(out: Path) -> list[dict[str, Any]]:
    found = []
    for path in out.glob("lines.*"):
        for text in path.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:  # a line that is being written
                continue
    return found


def _whole(out: Path, nodes: int, after: int = -1) -> bool:
    """Whether so many nodes have made three steps in a later world."""
    steps = [one for one in _lines(out) if one["what"] == "step" and one["generation"] > after and one["step"] >= 2]
    return len({one["node"] for one in steps}) >= nodes


def _stages(out: Path, cut: float, last: int, events: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}

    def event(kind: str) -> float:
        return min((one["time"] for one in events if one["kind"] == kind and one["time"] > cut), default=float("nan"))

    for stage, kind in (("found", "failure_detected"), ("stopped", "reform"), ("planned", "plan")):
        found[stage] = event(kind) - cut
    lines = [one for one in _lines(out) if one["generation"] > last]
    for stage in ("imported", "joined"):
        found[stage] = max(one["time"] for one in lines if one["what"] == stage) - cut
    found["step"] = min(one["time"] for one in lines if one["what"] == "step") - cut
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="from a node's silence to the next step")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--proof", action="store_true", help="an admin sets the node down at once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory(prefix="fence-") as folder:
            runs.append(measure(Path(folder), given.proof))
        print(f"load {os.getloadavg()[0]:.1f}  " + "  ".join(f"{k} {v:.1f}" for k, v in runs[-1].items()), flush=True)
    middle = {stage: statistics.median(run[stage] for run in runs) for stage in STAGES}
    print("median  " + "  ".join(f"{stage} {seconds:.1f}" for stage, seconds in middle.items()))
    if given.json:
        given.json.write_text(json.dumps({"runs": runs, "median": middle}))


if __name__ == "__main__":
    main()
