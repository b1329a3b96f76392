"""A checkpoint of another format: read beside `torch.load` of the same bytes, exported beside a copy to disk.

The copy and the export take turns in coming first, and each removes its files: the second one to write gets slower
memory, in a virtual machine up to three times.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.report import Report, turns
from unicron_transition.snapshot.formats import convert, opening


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    gigabytes: float = 1.0
    runs: int = 4


SMALLEST = Sizes(0.01, 2)
LAYERS = 16


def measure(sizes: Sizes, report: Report) -> None:
    """Read and export the checkpoint several times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new, source = folder / "new", folder / "dcp"
        model = write_checkpoint(folder, sizes.gigabytes)
        ratios = []
        for number in range(sizes.runs):
            loaded = seconds(lambda: torch.load(folder / "torch.pt", weights_only=True))
            read = seconds(lambda: read_into(source, model))
            index = opening.index_of(source)
            works = {
                "copy": lambda: copy(source, new),
                "export": lambda index=index: convert.export(index, new, "dcp"),
            }
            times = {}
            for kind in turns(number, "copy", "export"):
                times[kind] = seconds(works[kind])
                shutil.rmtree(new)
            ratios.append((read / loaded, times["copy"] / times["export"]))
            took = ", ".join(f"{kind} {value:.2f} s" for kind, value in sorted(times.items()))
            report.text(f"torch.load {loaded:.2f} s, read {read:.2f} s; {took}")
    over_load, of_copy = (statistics.median(each) for each in zip(*ratios, strict=True))
    report.figure("a checkpoint is read, over torch.load, median", over_load, "", most=1.5)
    report.figure("speed of the export over a copy's, median", of_copy, "", least=0.5)


def write_checkpoint(folder: Path, gigabytes: float) -> dict[str, torch.Tensor]:
    """Write a DCP checkpoint of that size, and the same by torch.save. Return its tensors."""
    count = int(gigabytes * 1e9 / 4 / LAYERS)
    tensors = {f"layer.{number}": torch.randn(count) for number in range(LAYERS)}
    dcp.save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(tensors, folder / "torch.pt")
    return tensors


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of some work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy(folder: Path, to: Path) -> None:
    """Copy the files by reading and writing, and sync them to disk."""
    to.mkdir()
    for path in folder.iterdir():
        with path.open("rb") as source, (to / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
            target.flush()
            os.fsync(target.fileno())


def read_into(folder: Path, model: dict[str, torch.Tensor]) -> None:
    """Copy every tensor of the checkpoint into the model's, as a training does that begins from it."""
    for name, tensor in opening.index_of(folder).tensors.items():
        model[name].copy_(torch.from_numpy(tensor.read()))
