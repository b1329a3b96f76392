"""A real controller and two real agents, without Slurm: a rank on the card is killed, starts again and rejoins.

python -m benchmarks.gpu.agents gloo|nccl|apart
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.gpu.heal import LOSSES, SCRIPT, environment, notes
from benchmarks.gpu.rows import patience, row
from tests.support.jobs import World, json_lines

LIMIT = 45.0 * patience()


def tell(job: World) -> None:
    """Print the state every 8 seconds, for the log."""
    while True:
        time.sleep(8.0)
        logs = job.array.logs
        print(f"--- {time.strftime('%X')} {job.job()}\n{logs[-3000:]}", file=sys.stderr, flush=True)


def main() -> int:
    backend = sys.argv[1]
    with row(f"{backend}, controller and agents: a rank is killed and rejoins") as saw:
        with (
            tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name,
            tempfile.TemporaryDirectory(dir="/dev/shm", prefix="unicron-gpu-") as shared,
        ):
            folder = Path(name)
            settings = {**environment(backend), "TINY_ITERATIONS": "1000000", "TINY_SLOW": "0.02", "TINY_SAVE": "0"}
            settings |= {"UNICRON_MEMORY_DIR": shared}
            began = time.monotonic()
            command = [sys.executable, str(SCRIPT)]
            with World(folder, 2, "", command, **settings) as job:
                print(f"controller and agents after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
                threading.Thread(target=tell, args=(job,), daemon=True).start()
                try:
                    job.wait(lambda: job.trains([0, 1], 4), "5 iterations", LIMIT)
                    formed = time.monotonic() - began
                    survivor, generation = job.rank(0)["pid"], job.job()["generation"]
                    os.kill(job.rank(1)["pid"], signal.SIGKILL)
                    killed = time.time()
                    job.wait(
                        lambda: job.trains([0, 1]) and job.job()["generation"] > generation, "both train again", LIMIT
                    )
                    back = time.time() - killed
                    job.trains_on([0, 1], 3, LIMIT)
                    violations = job.job()["ledger_violations"]
                    assert job.rank(0)["pid"] == survivor, f"the survivor has another process: {job.told()[:600]}"
                finally:
                    sys.stderr.write(job.told()[-8000:])
                cold = re.findall(r".*cold.*", job.array.logs)
            first = json_lines(folder / "losses.0")
            on = [each["time"] for each in first if each["time"] > killed and each["generation"] > generation]
            assert violations == 0, f"{violations} ledger violations"
            other = {each["iteration"]: each["loss"] for each in json_lines(folder / "losses.1")}
            both = [(each["loss"], other[each["iteration"]]) for each in first if each["iteration"] in other]
            assert both and all(abs(mine / its - 1) <= LOSSES for mine, its in both), "the members' losses differ"
            text = f"formed after {formed:.1f} s; the survivor's next step {on[0] - killed:.2f} s after the kill; "
            text += f"both train again after {back:.1f} s; no ledger violation"
            text += f"; template: {cold[0][:200]}" if cold else "; warm"
            saw(text, cold=cold[:5], caught=notes(folder, "caught"), aborts=notes(folder, "abort"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
