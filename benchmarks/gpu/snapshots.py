"""Copies of the training state from the card to the node's memory, beside the training, and what the card's memory has
in it: one rank under a session."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.heal import SCRIPT, notes
from benchmarks.gpu.rows import on_card, row
from tests.support import rank_harness
from tests.support.rank_harness import Ranks

MEMORY = "/dev/shm"
RUN_SECONDS = 80.0
ITERATIONS = 14
LARGE = {  # 1.2 billion parameters in bf16
    "TINY_HIDDEN": "2048",
    "TINY_LAYERS": "24",
    "TINY_SEQUENCE": "512",
    "TINY_SIZE": "4",
    "TINY_BF16": "1",
    "TINY_RATE": "1e-4",
}
HALF = LARGE | {"TINY_LAYERS": "8"}  # 400 million
SMALL = {"TINY_HIDDEN": "128", "TINY_LAYERS": "4", "TINY_BF16": "1"}
BASE = 18  # bytes a parameter without Unicron: bf16 parameter 2, fp32 gradient 4, main parameter 4, Adam 8


def run(out: Path, model: dict[str, str], iterations: int, **settings: str) -> Ranks:
    out.mkdir()
    common = {"TINY_SCRIPT": str(SCRIPT), "TINY_SAVE": "0", "TINY_ITERATIONS": str(iterations), "GPU_PLAIN": "1"}
    common |= {"GPU_BACKEND": "nccl"}
    ranks = Ranks(out, 1, [], fork=True, **common, **model, **settings)
    ranks.drive()
    assert ranks.exits == {0: [0]}, f"exits {ranks.exits}"
    return ranks


def steps(out: Path) -> dict[int, float]:
    """iteration -> its seconds."""
    lines = (json.loads(line) for line in (out / "losses.0").read_text().splitlines())
    return {line["iteration"]: line["seconds"] for line in lines}


def seconds(out: Path, what: str) -> list[float]:
    return [each["seconds"] for each in notes(out, what)]


def to_memory(folder: Path) -> None:
    """Every other iteration is copied, so iterations with a copy under way stand beside those without."""
    with (
        row("state to pinned memory beside the training") as saw,
        tempfile.TemporaryDirectory(dir=MEMORY, prefix="unicron-gpu-") as shared,
    ):
        out = folder / "memory"
        run(out, LARGE if on_card() else SMALL, ITERATIONS, UNICRON_MEMORY=shared, UNICRON_MEMORY_EVERY="2")
        took = steps(out)
        told = notes(out, "memory")[0]
        size = sum(path.stat().st_size for path in Path(shared).rglob("*") if path.is_file()) / 2
        later = [each for each in took if each >= 6]  # the first two copies make their files
        beside = [took[each] for each in later if each % 2 == 0]
        without = [took[each] for each in later if each % 2]
        ratio = statistics.median(beside) / statistics.median(without)
        fetches, pins, sums = seconds(out, "keeper._fetch"), seconds(out, "keeper._pin"), seconds(out, "sums")
        waits = [round(each, 4) for each in seconds(out, "keeper.settle")]
        text = f"{told['parameters'] / 1e6:.0f} million parameters, {size / 1e9:.2f} GB an image; "
        if fetches:
            later_fetches = statistics.median(fetches[2:])
            text += f"card to memory {later_fetches:.2f} s ({size / later_fetches / 1e9:.1f} GB/s), "
            text += f"the first with its pinning {fetches[0]:.2f} s (of that {pins[0]:.2f} s), "
        text += f"checksum {statistics.median(sums[2:]):.2f} s ({size / statistics.median(sums[2:]) / 1e9:.1f} GB/s); "
        text += f"iteration beside a copy {1e3 * statistics.median(beside):.0f} ms, "
        text += f"without {1e3 * statistics.median(without):.0f} ms, ratio {ratio:.4f}"
        saw(text, fetches=fetches, pins=pins, sums=sums, waits=waits, steps=took, copies=seconds(out, "keeper.copy"))


def on_the_card(folder: Path) -> None:
    """Bytes for each parameter, by where the copies of gradients are."""
    found: dict[str, dict[str, Any]] = {}
    for where in ("none", "host", "card"):
        with row(f"memory of a rank, UNICRON_SNAPSHOT={where}") as saw:
            out = folder / where
            run(out, HALF if on_card() else SMALL, 5, UNICRON_SNAPSHOT=where, UNICRON_MEMORY_EVERY="0")
            found[where] = told = notes(out, "memory")[-1]
            took = statistics.median(list(steps(out).values())[2:])
            parameters = told["parameters"]
            text = f"{parameters / 1e6:.0f} million parameters; iteration {1e3 * took:.0f} ms; said: {told['said']}"
            if "allocated" in told:
                each = told["allocated"] / parameters
                text = f"{each:.2f} bytes a parameter on the card between steps ({BASE} without Unicron); " + text
            saw(text, **told)
    if "allocated" in found.get("card", {}) and "allocated" in found.get("none", {}):
        with row("copies of gradients on the card") as saw:
            more = (found["card"]["allocated"] - found["none"]["allocated"]) / found["card"]["parameters"]
            saw(f"{more:.2f} bytes a parameter; the user guide says 4", ok=abs(more - 4) < 0.1)


def main() -> int:
    rank_harness.LIMIT = RUN_SECONDS
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name:
        on_the_card(Path(name))
        to_memory(Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
