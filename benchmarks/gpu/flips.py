"""Numbers on the card go wrong silently, in each place: who computes them is named, and nothing of them stays.

    python -m benchmarks.gpu.flips gloo|nccl|apart [PLACE]...

Three ranks with a real controller and agents, without Slurm. The audits are as frequent as the few iterations need.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.heal import LOSSES, environment
from benchmarks.gpu.rows import patience, row
from tests.support.jobs import World, json_lines

SCRIPT = Path(__file__).with_name("flip_ranks.py")
LIMIT = 60.0 * patience()
SLOT, AT, ITERATIONS, AUDIT, COMPARE = 1, 21, 36, 9, 6  # three micro-batches of a rank: audits every 3 iterations
# A defective unit strikes in each micro-batch until its rank is left out; memory forgets once.
FAULTS = {
    "weight": "flip:weight:22",
    "moment": "flip:moment:22",
    "forward": "flip:forward:22",
    "gradient": "flip:gradient:22",
    "NaN in a gradient": "nan:gradient",
    "NaN in what is sent": "nan:wire",
}


def train(folder: Path, backend: str, fault: str) -> tuple[list[dict[str, Any]], dict[int, float], str]:
    """Train to the end. Return the failures, iteration -> loss as it counted in the end, and what was told."""
    folder.mkdir()
    settings = {**environment(backend), "TINY_MICRO_BATCHES": "9", "TINY_SAVE": "0"}
    settings |= {"TINY_ITERATIONS": str(ITERATIONS), "UNICRON_AUDIT": str(AUDIT), "UNICRON_COMPARE": str(COMPARE)}
    settings |= {
        "GPU_STRIKES": f"{fault} {SLOT} {AT}" if fault else "none -1 -1",
        "GPU_PLAIN": "1",
        "UNICRON_MODE": "session",
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="unicron-gpu-") as shared:
        settings["UNICRON_MEMORY_DIR"] = shared
        with World(folder, 3, "", [sys.executable, str(SCRIPT)], **settings) as job:
            try:
                ended = job.wait(lambda: job.job().get("ended"), "trained to the end", LIMIT)
                failures = job.failures()
            finally:
                told = job.told()
                sys.stderr.write(told[-8000:])
    assert ended["code"] == 0, ended["reason"]
    steps = [step for path in folder.glob("losses.*") for step in json_lines(path)]
    return (
        failures,
        {step["iteration"]: step["loss"] for step in sorted(steps, key=lambda one: one["generation"])},
        told,
    )


def main() -> int:
    backend, names = sys.argv[1], sys.argv[2:] or list(FAULTS)
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name:
        folder, sound = Path(name), dict[int, float]()
        with row(f"{backend}, audits and comparisons of a sound job") as saw:
            failures, sound, told = train(folder / "sound", backend, "")
            quiet = "not audited" not in told and not failures
            noise = next((line.split(": ", 1)[-1] for line in told.splitlines() if "repeat bit by bit" in line), "")
            saw(f"no alarm in {ITERATIONS} iterations; {noise or 'gradients repeat bit by bit'}", ok=quiet)
        for place in names:
            with row(f"{backend}, {FAULTS[place]}") as saw:
                failures, losses, _ = train(folder / place.replace(" ", "-"), backend, FAULTS[place])
                differ = max(abs(losses[one] / sound[one] - 1) for one in sound)
                found = [one for one in failures if one["cause"] == "silent_corruption"]
                text = f"{found[0]['reason']}; losses within {differ:.0e}" if found else "not found"
                named = bool(found) and found[0]["slots"] == [SLOT]
                right = len(losses) == ITERATIONS and differ <= LOSSES
                saw(text, ok=right and (named or place == "NaN in what is sent"), failures=failures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
