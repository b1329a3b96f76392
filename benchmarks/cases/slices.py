"""Nodes that hold the same state write a slice of its checkpoint each, beside one node that writes all of it.

Each node's agent writes at a limited rate, as if it had a disk of that speed of its own. The files are in shared
memory, so no disk of this machine is in it. The time is from the start of the agents' threads, which look for work each
half second, to the complete checkpoint.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.cases.memory import SHM, state_of
from benchmarks.report import Report
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.snapshots.checkpoint_files import Files
from unicron_ctl.agent.snapshots.node_memory import Memory
from unicron_ctl.shared.protocol import structs
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.checkpoint import Writer
from unicron_transition.snapshot.checkpoint_file import Slice
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.formats import own
from unicron_transition.snapshot.image_format import inventory
from unicron_transition.snapshot.keeper import Keeper


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    megabytes: int = 400
    """Size of the state."""
    rate: int = 25
    """Megabytes a second that each node writes."""
    nodes: int = 8
    """The most nodes: 1, 2, 4, ... write."""
    rounds: int = 1


SMALLEST = Sizes(48, 40, 2)
LIMIT = 600.0  # seconds of a checkpoint
LOOK_SECONDS = 0.005
ITERATION = 1


def measure(sizes: Sizes, report: Report) -> None:
    """Measure each number of nodes."""
    torch.set_num_threads(1)
    counts = [1 << number for number in range(sizes.nodes.bit_length())]
    times: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        folder = Path(name)
        keeper = Keeper(folder, 0, 1)
        keeper.copy(Gatherer(state_of(sizes.megabytes)), ITERATION, 1, Writer())
        keeper.close()
        (image,) = inventory(folder)
        for _ in range(sizes.rounds):
            for count in counts:
                times[count].append(checkpoint(folder / "nodes", image.path, count, 1e6 * sizes.rate))
    gigabytes = image.data_bytes / 1e9
    report.text(f"{gigabytes:.2f} GB, medians of {sizes.rounds}: seconds to the checkpoint, GB/s")
    seconds = {count: statistics.median(each) for count, each in times.items()}
    for count, each in seconds.items():
        report.row(f"  {count} node(s) that write {sizes.rate} MB/s each", each, gigabytes / each, label=44)
    for count in counts[1:]:
        speed = seconds[1] / (count * seconds[count])
        report.figure(f"speed of {count} nodes over {count} times that of one", speed, "", least=0.7)


def checkpoint(folder: Path, image: Path, count: int, rate: float) -> float:
    """Return the seconds that so many nodes take to write a state that each of them holds."""
    saves = folder / "saves"
    memories = [memory(folder / str(number), saves, image, Slice(number, count)) for number in range(count)]
    began = time.perf_counter()
    writers = [Files(each, lambda key: (), rate, print) for each in memories]
    while not (found := folders.whole(saves)):
        assert time.perf_counter() - began < LIMIT
        time.sleep(LOOK_SECONDS)
    took = time.perf_counter() - began
    for writer in writers:
        writer.close(LIMIT)
    assert len(found[0].paths) == count and own.check(found[0]) == []
    shutil.rmtree(folder)
    return took


def memory(folder: Path, saves: Path, image: Path, cut: Slice) -> Memory:
    """Return the memory of a node whose rank has set the state aside."""
    folder.mkdir(parents=True)
    settings = structs.Settings(name="benchmark", user="nobody")
    place = Place(job="1", element=cut.number, node=f"n{cut.number}", address="127.0.0.1", settings=settings)
    made = Memory(place, {"UNICRON_MEMORY_DIR": str(folder)}, print)
    made.open("agent")
    assert made.folder is not None
    checkpoint_file.note_destination(made.folder, checkpoint_file.Destination(saves, 1))
    checkpoint_file.set_aside(image, checkpoint_file.aside_path(made.folder, 0, ITERATION, cut))
    return made
