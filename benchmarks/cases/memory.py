"""The state in memory: the cost of copies, and the time until a job goes on from them.

It compares copies with memcpy and torch.save, and iterations with copies with those without, also with copies in
another node. Then it kills all ranks of a job.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from benchmarks.cases.cost import MEMORY
from benchmarks.report import Report
from tests.support.jobs import World, json_lines
from tests.support.rank_harness import Ranks
from unicron_transition.snapshot import contents, image_format
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer, load_image
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.image_format import Image
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.migrate import TrainingState


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run; 0 leaves a part out."""

    megabytes: int = 800
    """Size of the state."""
    pairs: int = 40
    """Pairs of iterations, with and without copies."""
    ring: int = 12
    """Pairs of blocks of iterations, with copies in another node and without."""
    deaths: int = 3
    """Times that all ranks are killed."""
    micro_batches: int = 32
    """Micro-batches of an iteration."""


SMALLEST = Sizes(20, 2, 2, 1, 2)
ROUNDS, WARM_UP = 5, 2
RANKS = 2
EACH = 4  # iterations of a block with a ring: about two cuts
LIMIT = 3600.0  # seconds of a run
RATES = {
    "memcpy": "memcpy into shared memory",
    "copy": "copy of the state into an image",
    "sum": "checksum of it",
}
TIMES = {
    "save": "back in the loop after torch.save to a file",
    "ours": "back in the loop after Checkpoints.save",
    "keep": "back in the loop after the beginning of a copy to memory",
    "load": "the state is loaded from its image",
    "read": "the state is loaded from the file by torch.load",
}
SHM = "/dev/shm"
SCRIPT = Path(__file__).with_name("ranks") / "memory.py"
MODEL = {
    "TINY_HIDDEN": "256",
    "TINY_LAYERS": "4",
    "TINY_SEQUENCE": "128",
    "TINY_SIZE": "4",
    "TINY_SAVE": "0",
    "TINY_ITERATIONS": "1000000",
}


def measure(sizes: Sizes, report: Report) -> None:
    """Measure the parts whose size is not 0."""
    torch.set_num_threads(1)
    if sizes.megabytes:
        report.details["copies"] = copies(sizes.megabytes, report)
    os.environ.update(MEMORY)
    if sizes.pairs:
        iterations_alone(sizes, report)
    if sizes.ring:
        iterations_with_ring(sizes, report)
    if sizes.deaths:
        deaths(sizes.deaths, report)


# ------------------------------------------------------------ copies
def state_of(megabytes: int) -> TrainingState:
    """Return Adam's state of a model of layers after a step: 12 bytes a parameter."""
    width = 1024
    layers = max(1, megabytes * 10**6 // (12 * width * width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainingState([SimpleNamespace(module=model)], optimizer, None)


def copies(megabytes: int, report: Report) -> dict[str, float]:
    """Measure copies of the state. Return the median seconds of each part, and the state's size in GB."""
    state = state_of(megabytes)
    gathered, _ = contents.gather(state)
    with tempfile.TemporaryDirectory(dir=SHM) as shared, tempfile.TemporaryDirectory() as disk:
        image = Image(Path(shared, "x.image"), 1 << 20, gathered.size)
        into, source = contents.raw(image.data[: gathered.size]), torch.ones(gathered.size, dtype=torch.uint8)
        keeper, gatherer, files = Keeper(Path(shared), 0, 1), Gatherer(state), Checkpoints(disk, interval=1)
        plain = Path(disk, "plain.pt")

        def save() -> None:
            torch.save({"model": state.model[0].module.state_dict(), "optimizer": state.optimizer.state_dict()}, plain)

        def read() -> None:
            held = torch.load(plain)
            state.model[0].module.load_state_dict(held["model"])
            state.optimizer.load_state_dict(held["optimizer"])

        took: dict[str, list[float]] = {}
        for number in range(WARM_UP + ROUNDS):
            clock(took, "copy", lambda: contents.fill(gathered.tensors, gathered.offsets, into))
            clock(took, "memcpy", lambda: ctypes.memmove(into.data_ptr(), source.data_ptr(), gathered.size))
            clock(took, "sum", lambda: image_format.digest(into.numpy().data))
            clock(took, "keep", lambda number=number: keeper.copy(gatherer, number, 1, Writer()))
            keeper.wait_whole()
            clock(took, "save", save)
            clock(took, "ours", lambda number=number: files.save(state, number))
            files.wait_written()
        newest = max(image_format.inventory(Path(shared)), key=lambda image: image.key.iteration)
        for _ in range(WARM_UP + ROUNDS):
            clock(took, "load", lambda: load_image(state, newest.path))
        for _ in range(WARM_UP + ROUNDS):  # at the end, since it gives the optimizer new tensors
            clock(took, "read", read)
        keeper.close()
    found = {name: statistics.median(values[WARM_UP:]) for name, values in took.items()}
    gigabytes = gathered.size / 1e9
    report.text(f"a state of {gigabytes:.2f} GB, medians of {ROUNDS}:")
    for name, what in RATES.items():
        report.row(f"  {what}", f"{gigabytes / found[name]:.1f} GB/s", label=54, width=14)
    for name, what in TIMES.items():
        report.row(f"  {what}", f"{1e3 * found[name]:.1f} ms", label=54, width=14)
    report.figure("copy speed over memcpy", found["memcpy"] / found["copy"], "", least=0.7)
    report.figure("back in the loop, torch.save to a file / copy begun", found["save"] / found["keep"], "", least=20)
    report.figure("a whole image is there, torch.save / it", found["save"] / (found["copy"] + found["sum"]))
    return found | {"gigabytes": gigabytes}


def clock(took: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    """Add the seconds of some work."""
    began = time.perf_counter()
    work()
    took.setdefault(name, []).append(time.perf_counter() - began)


# ------------------------------------------------------------ iterations
def iterations_alone(sizes: Sizes, report: Report) -> None:
    """Compare iterations of two replicas with a copy and without."""
    with tempfile.TemporaryDirectory(dir=SHM) as shared, tempfile.TemporaryDirectory() as name:
        settings = settings_of(Path(name, "times"), sizes.micro_batches, sizes.pairs, 1)
        settings |= {"UNICRON_MEMORY": shared, "TINY_SCRIPT": str(SCRIPT)}
        Ranks(Path(name), RANKS, [], fork=True, **settings).drive()
        times = json.loads(Path(name, "times").read_text())
    compare(times, f"{RANKS} replicas", "iteration with copies to memory / without", report)


def iterations_with_ring(sizes: Sizes, report: Report) -> None:
    """Compare blocks of iterations of two halves of a replica, in two nodes under agents.

    In every other block each rank copies its half, and its agent sends it to the other node when the controller asks.
    """
    with tempfile.TemporaryDirectory(dir=SHM) as shared, tempfile.TemporaryDirectory() as name:
        out = Path(name, "times")
        settings = settings_of(out, sizes.micro_batches, sizes.ring, EACH)
        settings |= {"TINY_LAYOUT": "2 1 1", "UNICRON_MEMORY_DIR": shared}
        with World(Path(name), RANKS, command=[sys.executable, str(SCRIPT)], **settings) as job:
            job.wait(out.exists, "the ranks have trained", LIMIT)
        times = json.loads(out.read_text())
    count = times["copied"]
    assert count >= 2 or sizes.ring < 4, f"copies were given to another node {count} times only"
    about = f"each half in two nodes, {count} times to the other node"
    compare(times, about, "iteration with copies to memory and ring / without", report)


def settings_of(out: Path, micro_batches: int, pairs: int, each: int) -> dict[str, str]:
    """Return the environment of `SCRIPT`."""
    blocks = {"MEMORY_OUT": str(out), "MEMORY_BLOCKS": str(2 * pairs), "MEMORY_EACH": str(each)}
    return MODEL | blocks | {"TINY_MICRO_BATCHES": str(micro_batches)}


def compare(times: dict[str, Any], about: str, what: str, report: Report) -> None:
    """Print the ratio of neighbouring blocks, with copies and without: seconds, and CPU seconds."""
    blocks = times["blocks"]
    pairs = [sorted(pair, reverse=True) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    (ours, our_cpu), (theirs, their_cpu) = (zip(*(pair[side][1:] for pair in pairs), strict=True) for side in (0, 1))
    assert all(kept[0] and not bare[0] for kept, bare in pairs)
    report.text(f"{about}, iterations of {statistics.median(theirs):.2f} s, {times['size'] / 1e6:.0f} MB a copy")
    report.ratio(what, ours, theirs, 1.01)
    report.figure("the same, CPU time", statistics.median(a / b for a, b in zip(our_cpu, their_cpu, strict=True)))


# ------------------------------------------------------------ deaths
def deaths(count: int, report: Report) -> None:
    """Kill all ranks of a job at once."""
    times, lost = [], 0
    for _ in range(count):
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=SHM) as shared:
            seconds, iterations = kill_all(Path(name), shared)
            times.append(seconds)
            lost = max(lost, iterations)
    report.text(f"all {RANKS} ranks killed at once, agents alive: " + ", ".join(f"{each:.2f} s" for each in times))
    report.figure("all ranks killed to the next step, from memory", statistics.median(times), "s", 3)
    report.figure("iterations lost by it", lost, "", 0)


def kill_all(folder: Path, shared: str) -> tuple[float, int]:
    """Return the seconds from the kill to the next step, and the iterations that were lost."""
    settings = {"TINY_ITERATIONS": "1000000", "TINY_SLOW": "0.02", "UNICRON_MEMORY_DIR": shared}
    with World(folder, nodes=RANKS, **settings) as job:
        slots = list(range(RANKS))
        job.wait(lambda: job.trains(slots, 5), "6 iterations")
        for slot in slots:
            os.kill(job.rank(slot)["pid"], signal.SIGKILL)
        killed, last = time.time(), json_lines(folder / "losses.0")[-1]

        def steps() -> list[dict[str, Any]]:
            return [step for step in json_lines(folder / "losses.0") if step["generation"] > last["generation"]]

        job.wait(steps, "the next step")
        return steps()[0]["time"] - killed, last["iteration"] + 1 - steps()[0]["iteration"]
