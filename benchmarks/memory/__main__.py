"""What it costs to keep the training state in memory, and what it brings.

    python -m benchmarks.memory [--megabytes 800] [--pairs 40] [--ring 12] [--shards 4] [--deaths 3] [--losses 3]

Side by side in one run: copies against memcpy and against torch.save to a file; iterations with copies against those of
the same ranks without, one by one, and with copies in another node, block by block, and those of a distributed
optimizer; the death of all ranks, from the kill to the next step, and of a node of a job with a distributed optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.marks import print_figure
from benchmarks.memory import iterations, losses
from tests.support.jobs import World, json_lines
from unicron_transition.snapshot import contents, image_format
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer, load_image
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.image_format import Image
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.migrate import TrainingState

ROUNDS = 5


# ------------------------------------------------------------ copies
def state_of(megabytes: int) -> TrainingState:
    """Adam's state of a model of layers, after a step: 12 bytes a parameter."""
    width = 1024
    layers = max(1, megabytes * 10**6 // (12 * width * width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainingState([SimpleNamespace(module=model)], optimizer, None)


def copies(megabytes: int) -> dict[str, float]:
    """Median seconds of each part, and the state's size in GB."""
    state = state_of(megabytes)
    gathered, _ = contents.gather(state)
    gigabytes, seconds = gathered.size / 1e9, lambda began: time.perf_counter() - began
    with tempfile.TemporaryDirectory(dir=iterations.SHM) as shared, tempfile.TemporaryDirectory() as disk:
        image = Image(Path(shared, "x.image"), 1 << 20, gathered.size)
        into, source = contents.raw(image.data[: gathered.size]), torch.ones(gathered.size, dtype=torch.uint8)
        contents.fill(gathered.tensors, gathered.offsets, into)
        took: dict[str, list[float]] = {name: [] for name in ("copy", "memcpy", "sum", "keep", "save", "ours")}
        keeper, gatherer, files = Keeper(Path(shared), 0, 1), Gatherer(state), Checkpoints(disk, interval=1)
        for number in range(ROUNDS + 2):
            began = time.perf_counter()
            contents.fill(gathered.tensors, gathered.offsets, into)
            took["copy"].append(seconds(began))
            began = time.perf_counter()
            ctypes.memmove(into.data_ptr(), source.data_ptr(), gathered.size)
            took["memcpy"].append(seconds(began))
            began = time.perf_counter()
            image_format.digest(into.numpy().data)
            took["sum"].append(seconds(began))
            began = time.perf_counter()
            keeper.copy(gatherer, number, 1, Writer())
            took["keep"].append(seconds(began))
            keeper.wait_whole()
            began = time.perf_counter()
            held = {"model": state.model[0].module.state_dict(), "optimizer": state.optimizer.state_dict()}
            torch.save(held, Path(disk, "plain.pt"))
            took["save"].append(seconds(began))
            began = time.perf_counter()
            files.save(state, number)
            took["ours"].append(seconds(began))
            files.wait_written()
        took |= loads(state, Path(shared), Path(disk, "plain.pt"))
        keeper.close()
    found = {name: statistics.median(values[2:]) for name, values in took.items()}
    print(f"a state of {gigabytes:.2f} GB, medians of {ROUNDS}:")
    for name, what in (
        ("memcpy", "memcpy into shared memory"),
        ("copy", "copy of the state into an image"),
        ("sum", "checksum of it"),
    ):
        print(f"  {what:<60}{gigabytes / found[name]:>8.1f} GB/s")
    print(f"  {'back in the loop after torch.save to a file':<60}{1e3 * found['save']:>8.1f} ms")
    print(f"  {'back in the loop after Checkpoints.save':<60}{1e3 * found['ours']:>8.1f} ms")
    print(f"  {'back in the loop after a copy to memory was begun':<60}{1e3 * found['keep']:>8.1f} ms")
    print_figure("copy speed over memcpy", found["memcpy"] / found["copy"], "", least=0.7)
    sooner = found["save"] / found["keep"]
    print_figure("back in the loop, torch.save to a file / copy begun", sooner, "", least=20)
    behind = found["save"] / (found["copy"] + found["sum"])
    print(f"  a whole image is there {behind:.1f} times as soon as torch.save returns")
    for name, what in (("load", "the state is back from its image"), ("read", "from the file, with torch.load")):
        print(f"  {what:<60}{1e3 * found[name]:>8.1f} ms")
    return found | {"gigabytes": gigabytes}


def loads(state: TrainingState, folder: Path, file: Path) -> dict[str, list[float]]:
    """Seconds until the state is back: load, from its newest image in `folder`, checked; read, from what torch.save
    left in `file`."""
    newest = max(image_format.inventory(folder), key=lambda found: found.key.iteration)
    took: dict[str, list[float]] = {"load": [], "read": []}
    for _ in range(ROUNDS + 2):
        began = time.perf_counter()
        load_image(state, newest.path)
        took["load"].append(time.perf_counter() - began)
    for _ in range(ROUNDS + 2):  # after the others: the optimizer has new tensors each time
        began = time.perf_counter()
        held = torch.load(file)
        state.model[0].module.load_state_dict(held["model"])
        state.optimizer.load_state_dict(held["optimizer"])
        took["read"].append(time.perf_counter() - began)
    return took


# ------------------------------------------------------------ deaths
def deaths(count: int) -> dict[str, float]:
    """Seconds from the kill of all ranks to the next step, and the iterations lost by it."""
    times, lost = [], 0
    for _ in range(count):
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=iterations.SHM) as shared:
            folder = Path(name)
            settings = {"TINY_ITERATIONS": "1000000", "TINY_SLOW": "0.02", "UNICRON_MEMORY_DIR": shared}
            with World(folder, nodes=iterations.RANKS, **settings) as job:
                slots = list(range(iterations.RANKS))
                job.wait(lambda job=job, slots=slots: job.trains(slots, 5), "6 iterations")
                for slot in slots:
                    os.kill(job.rank(slot)["pid"], signal.SIGKILL)
                killed = time.time()
                before = json_lines(folder / "losses.0")[-1]["iteration"]
                generation = json_lines(folder / "losses.0")[-1]["generation"]

                def again(folder=folder, generation=generation):
                    return [one for one in json_lines(folder / "losses.0") if one["generation"] > generation]

                job.wait(again, "the next step")
                times.append(again()[0]["time"] - killed)
                lost = max(lost, before + 1 - again()[0]["iteration"])
    said = ", ".join(f"{each:.2f}" for each in times)
    print(
        f"all {iterations.RANKS} ranks killed at once, agents alive; to the end of the next step, from memory: {said} s"
    )
    middle = statistics.median(times)
    print_figure("all ranks killed to the next step", middle, "s", 3)
    print_figure("iterations lost by it", lost, "", 0)
    return {"seconds": middle, "iterations_lost": lost}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=800, help="of the state that is copied")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of iterations")
    parser.add_argument(
        "--ring", type=int, default=12, help="pairs of blocks of iterations, with copies in another node"
    )
    parser.add_argument("--shards", type=int, default=4, help="pairs of runs with a distributed optimizer")
    parser.add_argument("--deaths", type=int, default=3, help="times that all ranks are killed")
    parser.add_argument("--losses", type=int, default=3, help="runs in which nodes of DP2 x TP2 are lost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of copies and deaths there")
    options = parser.parse_args()
    for name in ("pairs", "ring", "shards"):
        if getattr(options, name) == 1:
            parser.error(f"--{name} 1: one pair says nothing of how much they vary; give 2 or more, 0 for none")
    found = {}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    torch.set_num_threads(1)
    if options.megabytes:
        found["copies"] = copies(options.megabytes)
    if options.pairs:
        iterations.kept(options.pairs)
    if options.ring:
        iterations.with_a_ring(options.ring)
    if options.shards:
        iterations.of_shards(options.shards)
    if options.deaths:
        found["all_killed"] = deaths(options.deaths)
    if options.losses:
        found["nodes_lost"] = losses.nodes(options.losses)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
