"""A real controller and two real agents, without Slurm: a rank on the card is killed, starts again and rejoins.

python -m benchmarks.gpu.agents gloo|nccl|apart
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.heal import LOSSES, SCRIPT, environment, notes
from benchmarks.gpu.rows import patience, row
from tests.support.jobs import World, json_lines

LIMIT = 60.0 * patience()


def kill_and_rejoin(job: World) -> tuple[float, float]:
    """Kill the second rank of two. Return the time, and the seconds until both train again."""
    survivor, generation = job.rank(0)["pid"], job.job()["generation"]
    os.kill(job.rank(1)["pid"], signal.SIGKILL)
    killed = time.time()
    job.wait(lambda: job.trains([0, 1]) and job.job()["generation"] > generation, "both train again", LIMIT)
    seconds = time.time() - killed
    job.trains_on([0, 1], 3, LIMIT)
    assert job.rank(0)["pid"] == survivor, f"the survivor has another process: {job.told()[:600]}"
    violations = job.job()["ledger_violations"]
    assert violations == 0, f"{violations} ledger violations"
    return killed, seconds


def main() -> int:
    backend = sys.argv[1]
    with (
        row(f"{backend}, controller and agents: a rank is killed and rejoins") as saw,
        tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="unicron-gpu-") as shared,
    ):
        folder = Path(name)
        settings = {**environment(backend), "TINY_ITERATIONS": "1000000", "TINY_SLOW": "0.02", "TINY_SAVE": "0"}
        settings |= {"UNICRON_MEMORY_DIR": shared}
        began = time.monotonic()
        with World(folder, 2, "", [sys.executable, str(SCRIPT)], **settings) as job:
            try:
                job.wait(lambda: job.trains([0, 1], 4), "5 iterations", LIMIT)
                formed = time.monotonic() - began
                generation = job.job()["generation"]
                killed, back = kill_and_rejoin(job)
            finally:
                sys.stderr.write(job.told()[-8000:])
            cold = re.findall(r".*cold.*", job.array.logs)
        first, second = (json_lines(folder / f"losses.{slot}") for slot in (0, 1))
        on = min(step["time"] for step in first if step["time"] > killed and step["generation"] > generation)
        other = {step["iteration"]: step["loss"] for step in second}
        both = [(step["loss"], other[step["iteration"]]) for step in first if step["iteration"] in other]
        assert both and all(abs(mine / its - 1) <= LOSSES for mine, its in both), "the members' losses differ"
        text = f"formed after {formed:.1f} s; the survivor's next step {on - killed:.2f} s after the kill; "
        text += f"both train again after {back:.1f} s; no ledger violation"
        text += f"; template: {cold[0][:200]}" if cold else "; warm"
        saw(text, cold=cold[:5], caught=notes(folder, "caught"), aborts=notes(folder, "abort"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
