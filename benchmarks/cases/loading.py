"""A state is loaded from its image in memory, checksum included, beside torch.load of a file of the same bytes.

All take turns, in an order that changes. Files and image are in shared memory, so no disk or network is in it. By the
clock several threads count, and the load of the machine; the processor's time counts the work. A new process, as after
a failure, has no memory yet for the optimizer's state: before each turn the memory of the one before goes back to the
kernel.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from benchmarks.cases.memory import SHM, state_of
from benchmarks.report import Report
from unicron_transition.snapshot import image_format
from unicron_transition.snapshot.checkpoint import Writer, load_image
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.migrate import TrainingState


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    megabytes: int = 800
    """Size of the state."""
    rounds: int = 7
    folder: str = SHM
    """Where image and files are: another one shows what its mount makes of them, such as huge pages."""


SMALLEST = Sizes(20, 2)
AGAIN, FRESH, LIMIT = "image to model and optimizer", "image to a new optimizer", "memcpy and checksum alone"
READ, MAPPED, WRITTEN = "torch.load", "torch.load(mmap=True), pages read", "torch.load(mmap=True), pages written"
READ_IN, MAPPED_IN = "torch.load to model and optimizer", "torch.load(mmap=True) to them, pages read"
WRITTEN_IN = "torch.load(mmap=True) to them, pages written"
Times = dict[str, list[tuple[float, float]]]


def measure(sizes: Sizes, report: Report) -> None:
    """Measure each way to load, and compare."""
    torch.set_num_threads(1)
    ours, theirs = state_of(sizes.megabytes), state_of(sizes.megabytes)
    with tempfile.TemporaryDirectory(dir=sizes.folder) as name:
        folder = Path(name)
        keeper, gatherer, plain = Keeper(folder, 0, 1), Gatherer(ours), folder / "plain.pt"
        keeper.copy(gatherer, 1, 1, Writer())
        keeper.close()
        (image,) = image_format.inventory(folder)
        torch.save(theirs.model[0].module.state_dict() | {"optimizer": theirs.optimizer.state_dict()}, plain)
        works = ways(ours, theirs, image.path, plain)
        times: Times = {what: [] for what in works}
        for number in range(sizes.rounds):
            order = list(works)[number % len(works) :] + list(works)[: number % len(works)]
            for what in order:
                state = ours if what == FRESH else theirs
                if what != AGAIN:
                    state.optimizer.state.clear()
                ctypes.CDLL(None).malloc_trim(0)
                times[what].append(clock(works[what]))
        compare(times, image.data_bytes / 1e9, report)


def ways(ours: TrainingState, theirs: TrainingState, image: Path, plain: Path) -> dict[str, Callable[[], object]]:
    """Return each way to load."""

    def load_in(mapped: bool) -> None:
        held = torch.load(plain, mmap=mapped)
        theirs.optimizer.load_state_dict(held.pop("optimizer"))
        theirs.model[0].module.load_state_dict(held)

    contents = torch.frombuffer(bytearray(image_format.read_page(image).data_bytes), dtype=torch.uint8)
    there = contents.clone()
    views = [each.numpy().data for each in there.split(image_format.LEAF)]

    def copy_alone(begin: int = 0) -> None:
        for view in views:
            ctypes.memmove(there.data_ptr() + begin, contents.data_ptr() + begin, len(view))
            image_format.digest(view)
            begin += len(view)

    return {
        LIMIT: copy_alone,
        AGAIN: lambda: load_image(ours, image),
        READ: lambda: torch.load(plain),
        MAPPED: lambda: [each.sum() for each in tensors_of(torch.load(plain, mmap=True))],
        FRESH: lambda: load_image(ours, image),
        READ_IN: lambda: load_in(False),
        WRITTEN: lambda: [each.add_(0.0) for each in tensors_of(torch.load(plain, mmap=True))],
        MAPPED_IN: lambda: (load_in(True), [each.sum() for each in tensors_of(theirs.optimizer.state_dict())]),
        WRITTEN_IN: lambda: (load_in(True), [each.add_(0.0) for each in tensors_of(theirs.optimizer.state_dict())]),
    }


def tensors_of(held: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dictionaries."""
    if isinstance(held, torch.Tensor):
        yield held.detach()
    elif isinstance(held, dict):
        for each in held.values():
            yield from tensors_of(each)


def clock(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of some work, and the processor's."""
    began, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - spent


def compare(times: Times, gigabytes: float, report: Report) -> None:
    """Print the medians, and the medians of the ratios of one round."""
    report.text(f"{gigabytes:.2f} GB, medians of {len(times[AGAIN])} rounds: by the clock, the processor's")
    for what, each in times.items():
        seconds, spent = (1e3 * statistics.median(column) for column in zip(*each, strict=True))
        report.row(f"  {what}", f"{seconds:7.0f} ms {spent:7.0f} ms", label=54, width=22)

    def ratio(theirs: str, ours: str, side: int) -> float:
        return statistics.median(a[side] / b[side] for a, b in zip(times[theirs], times[ours], strict=True))

    for theirs, ours, least in (
        (READ, AGAIN, 4.0),
        (MAPPED, AGAIN, 1.5),
        (WRITTEN, AGAIN, None),
        (READ_IN, FRESH, None),
        (MAPPED_IN, FRESH, None),
        (WRITTEN_IN, FRESH, None),
        (LIMIT, AGAIN, None),
    ):
        report.figure(f"{theirs} / {ours}", ratio(theirs, ours, 0), "", least=least)
        report.figure("the same, the processor's time", ratio(theirs, ours, 1))
