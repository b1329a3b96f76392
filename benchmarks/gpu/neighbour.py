"""A busy neighbour: another process that keeps the card at work, and so limits its clock and its time for the ranks.

    python -m benchmarks.gpu.neighbour gloo|nccl|apart

Two ranks with a real controller and agents share the card, so both become slow alike: the job trains on, and no rank
and no node is blamed for what all have.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks.gpu.heal import SCRIPT, environment
from benchmarks.gpu.rows import on_card, patience, row
from tests.support.jobs import World, json_lines

LIMIT, SECONDS = 60.0 * patience(), 12.0
QUERY = ("clocks.sm", "clocks_event_reasons.active", "power.draw")
BLAMES = ("degraded", "anomaly", "failure_detected")  # kinds of events
BUSY = """
import sys, torch
card = sys.argv[1] == "True"
size, kind = (8192, torch.bfloat16) if card else (256, torch.float32)
left, right = (torch.randn(size, size, device="cuda" if card else "cpu", dtype=kind) for _ in range(2))
print("busy", flush=True)
while True:
    for _ in range(20):
        torch.mm(left, right)
    if card:
        torch.cuda.synchronize()
"""


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep the card at work, or a core, until the block is over."""
    with subprocess.Popen([sys.executable, "-c", BUSY, str(on_card())], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the neighbour did not start"
            yield
        finally:
            process.kill()


def clock() -> str:
    """Return the clock of the card, what limits it, and its power; empty without a card."""
    if not on_card():
        return ""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


def main() -> int:
    backend = sys.argv[1]
    with (
        row(f"{backend}, controller and agents: a busy neighbour on the card") as saw,
        tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="unicron-gpu-") as shared,
    ):
        folder = Path(name)
        settings = {**environment(backend), "TINY_ITERATIONS": "1000000", "TINY_SAVE": "0", "GPU_PLAIN": "1"}
        with World(folder, 2, "", [sys.executable, str(SCRIPT)], **settings, UNICRON_MEMORY_DIR=shared) as job:
            try:
                job.wait(lambda: job.trains([0, 1], 20), "20 iterations", LIMIT)
                time.sleep(SECONDS)
                began, before = time.time(), clock()
                with busy():
                    time.sleep(SECONDS)
                    ended, during = time.time(), clock()
                job.trains_on([0, 1], 3, LIMIT)
            finally:
                sys.stderr.write(job.told()[-8000:])
            blamed = [f"{event['kind']}: {event.get('reason', '')}" for kind in BLAMES for event in job.events(kind)]
        steps = [step["time"] for step in json_lines(folder / "losses.0")]
        seconds = [
            statistics.median(b - a for a, b in pairwise(part))
            for part in ([at for at in steps if at < began], [at for at in steps if began < at < ended])
        ]
        text = f"an iteration took {1e3 * seconds[0]:.1f} ms alone, {1e3 * seconds[1]:.1f} ms beside it"
        text += f"; clock, its limits, power: {before}; {during}" if before else ""
        text += f"; blamed: {'; '.join(blamed)[:300]}" if blamed else "; nobody is blamed"
        saw(text, ok=not blamed or not on_card(), alone=seconds[0], beside=seconds[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
