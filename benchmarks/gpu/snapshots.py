"""Copies of the state from the card to memory beside the training, and bytes on the card, of one rank in a session."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.heal import SCRIPT, notes
from benchmarks.gpu.rows import on_card, patience, row
from tests.support import rank_harness
from tests.support.rank_harness import Ranks

MEMORY = "/dev/shm"
RUN_SECONDS = 80.0
ITERATIONS, EVERY = 26, 6
LARGE = {  # 1.2 billion parameters in bf16
    "TINY_HIDDEN": "2048",
    "TINY_LAYERS": "24",
    "TINY_SEQUENCE": "512",
    "TINY_SIZE": "4",
    "TINY_BF16": "1",
    "TINY_RATE": "1e-4",
}
FEWER = LARGE | {"TINY_LAYERS": "4"}  # 200 million
SMALL = {"TINY_HIDDEN": "128", "TINY_LAYERS": "4", "TINY_BF16": "1"}
BASE = 18  # bytes for each parameter without Unicron: bf16 parameter 2, fp32 gradient 4, main parameter 4, Adam 8


def run(out: Path, model: dict[str, str], iterations: int, **settings: str) -> Ranks:
    out.mkdir()
    common = {"TINY_SCRIPT": str(SCRIPT), "TINY_SAVE": "0", "TINY_ITERATIONS": str(iterations), "GPU_PLAIN": "1"}
    common |= {"GPU_BACKEND": "nccl"}
    ranks = Ranks(out, 1, [], fork=True, **common, **model, **settings)
    ranks.drive()
    assert ranks.exits == {0: [0]}, f"exits {ranks.exits}"
    return ranks


def steps(out: Path) -> list[tuple[float, float]]:
    """Return (end, seconds) of each iteration."""
    lines = (json.loads(line) for line in (out / "losses.0").read_text().splitlines())
    return [(line["time"], line["seconds"]) for line in lines]


def seconds(out: Path, what: str) -> list[float]:
    return [each["seconds"] for each in notes(out, what)]


def to_memory(folder: Path) -> None:
    """Compare iterations during a copy with the others."""
    with (
        row("state to pinned memory beside the training") as saw,
        tempfile.TemporaryDirectory(dir=MEMORY, prefix="unicron-gpu-") as shared,
    ):
        out = folder / "memory"
        run(out, LARGE if on_card() else SMALL, ITERATIONS, UNICRON_MEMORY=shared, UNICRON_MEMORY_EVERY=str(EVERY))
        noted = notes(out, "memory")[-1]
        size = max(path.stat().st_size for path in Path(shared).rglob("*") if path.is_file())
        copies = [(each["at"] - each["seconds"], each["at"]) for each in notes(out, "keeper._copy")]
        later = [each for each in steps(out) if each[0] - each[1] > copies[1][1]]  # the first two make their files
        beside = [took for end, took in later if any(end - took < over and end > began for began, over in copies)]
        without = [took for end, took in later if not any(end - took < over and end > began for began, over in copies)]
        fetches, pins, sums = seconds(out, "card.copy"), seconds(out, "card.pin"), seconds(out, "sums")
        text = f"{noted['parameters'] / 1e6:.0f} million parameters, {size / 1e9:.2f} GB an image"
        text += f" ({size / noted['parameters']:.1f} bytes a parameter); "
        if fetches:
            fetch = statistics.median(fetches[2:])
            text += f"card to memory {fetch:.2f} s ({size / fetch / 1e9:.1f} GB/s), "
            text += f"the first with its pinning {fetches[0]:.2f} s (of that {pins[0]:.2f} s), "
        text += f"checksum {statistics.median(sums[2:]):.2f} s ({size / statistics.median(sums[2:]) / 1e9:.1f} GB/s)"
        if beside and without:
            ratio = statistics.median(beside) / statistics.median(without)
            text += f"; iteration beside a copy {1e3 * statistics.median(beside):.0f} ms ({len(beside)} of them), "
            text += f"without {1e3 * statistics.median(without):.0f} ms, ratio {ratio:.4f}"
        waits = {name: seconds(out, f"keeper.{name}") for name in ("wait_whole", "wait_copied", "copy")}
        longest = max(max(waited[len(waited) // 2 :], default=0.0) for waited in waits.values())
        text += f"; the training waited {1e3 * longest:.1f} ms at most"
        saw(text, fetches=fetches, pins=pins, sums=sums, steps=steps(out), copies=copies, **waits)


def on_the_card(folder: Path) -> None:
    """Measure the bytes for each parameter, by the place of the copies of gradients."""
    found: dict[str, dict[str, Any]] = {}
    for where in ("none", "host", "card"):
        with row(f"memory of a rank, UNICRON_SNAPSHOT={where}") as saw:
            out = folder / where
            run(out, FEWER if on_card() else SMALL, 5, UNICRON_SNAPSHOT=where, UNICRON_MEMORY_EVERY="0")
            found[where] = noted = notes(out, "memory")[-1]
            took = statistics.median([each for _, each in steps(out)][2:])
            parameters = noted["parameters"]
            text = f"{parameters / 1e6:.0f} million parameters; iteration {1e3 * took:.0f} ms; {noted['report']}"
            if "allocated" in noted:
                each = noted["allocated"] / parameters
                text = f"{each:.2f} bytes a parameter on the card between steps ({BASE} without Unicron); " + text
            saw(text, **noted)
    if "allocated" in found.get("card", {}) and "allocated" in found.get("none", {}):
        with row("copies of gradients on the card") as saw:
            more = (found["card"]["allocated"] - found["none"]["allocated"]) / found["card"]["parameters"]
            saw(f"{more:.2f} bytes a parameter; the user guide says 4", ok=abs(more - 4) < 0.1)


def main() -> int:
    rank_harness.LIMIT = RUN_SECONDS * patience()
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name:
        on_the_card(Path(name))
        to_memory(Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
