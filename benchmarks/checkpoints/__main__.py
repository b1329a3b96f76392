"""How long a checkpoint of another format takes to come in, beside `torch.load` of the same bytes, and out, beside
a plain copy that is on disk, too: `python -m benchmarks.checkpoints [GIGABYTES]`. Each of four runs does all four, one
after the other. The copy and the export take turns in coming first, and nothing of one stays for the other: who writes
second gets memory that is slower to get, in a virtual machine up to three times.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from unicron_transition.snapshot.formats import convert, opening

RUNS = 4
LAYERS = 16


def made(folder: Path, gigabytes: float) -> dict[str, torch.Tensor]:
    """A DCP checkpoint of that size in `folder`/dcp, and what torch.save makes of it in `folder`/torch.pt."""
    count = int(gigabytes * 1e9 / 4 / LAYERS)
    tensors = {f"layer.{number}": torch.randn(count) for number in range(LAYERS)}
    dcp.save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(tensors, folder / "torch.pt")
    return tensors


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def written(act: Callable[[], object], new: Path) -> float:
    """How long it takes to write `new`, which is removed then."""
    took = seconds(act)
    shutil.rmtree(new)
    return took


def copy(folder: Path, to: Path) -> None:
    """Copy the files as a program does that reads and writes them, and have them on disk."""
    to.mkdir()
    for path in folder.iterdir():
        with path.open("rb") as source, (to / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
            target.flush()
            os.fsync(target.fileno())


def taken(folder: Path, into: dict[str, torch.Tensor]) -> None:
    """Put every tensor of the checkpoint into this model's, as a training that begins from it does."""
    for name, tensor in opening.index_of(folder).tensors.items():
        into[name].copy_(torch.from_numpy(tensor.read()))


def main() -> None:
    """Print each run's times, and the medians of both ratios."""
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = made(folder, gigabytes)
        ratios: list[tuple[float, float]] = []
        for number in range(RUNS):
            loaded = seconds(lambda: torch.load(folder / "torch.pt", weights_only=True))
            imported = seconds(lambda: taken(folder / "dcp", model))
            index = opening.index_of(folder / "dcp")
            acts = {
                "copy": lambda: copy(folder / "dcp", folder / "new"),
                "out": lambda index=index: convert.export(index, folder / "new", "dcp"),
            }
            times = {name: written(acts[name], folder / "new") for name in sorted(acts, reverse=bool(number % 2))}
            copied, exported = times["copy"], times["out"]
            ratios.append((imported / loaded, copied / exported))
            print(
                f"torch.load {loaded:.2f} s, in {imported:.2f} s; copy {copied:.2f} s, out {exported:.2f} s", flush=True
            )
    most, least = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(
        f"{gigabytes:g} GB: in {most:.2f} x torch.load (at most 1.5), out {least:.2f} of a copy's speed (at least 0.5)"
    )


if __name__ == "__main__":
    main()
