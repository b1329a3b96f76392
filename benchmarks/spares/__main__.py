"""A node is lost: how soon the job is whole again, with a hot spare there and without, side by side.

Real unicrond, agents and ranks on this machine; the loss is a kill -9 of an agent and its ranks. Without a spare the
lost element's agent is started again at once, as if Slurm had a free node in no time, and its ranks come back as they
do on any node: their processes start, import and build. Whole is when as many train again as before, and the first
iteration to which all of them have contributed has stepped. The figures begin with the detection: how long that
takes is `benchmarks.detection`'s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.marks import print_figure
from tests.support.jobs import FOREVER, World

MEMBERS = 3
ASKED = 2.0  # seconds
LIMIT = 180.0
QUICK = "lease_periods = 3\nforming_settle_seconds = 20\n"
SHAPES = {  # ranks a node, TP PP VPP
    "1 rank a node": ("1", "1 1 1"),
    "2 ranks a node, TP2": ("2", "2 1 1"),
}
HEADS = ("runs", "again", "offered", "whole, min", "median", "max")


@dataclass
class Loss:
    """Seconds from the detection to when the survivors step again, the newcomer is offered, and all have stepped."""

    again: float
    offered: float
    whole: float


def lose(world: World, spare: bool) -> Loss:
    """One node of a whole job is lost."""
    job = world.job()
    members = job["members"]
    world.trains_on(members)
    after = world.events()[-1]["id"]
    lost = job["elements"][0]["element"] if not spare else sorted({slot // _ranks(world) for slot in members})[-1]
    world.agents[lost].kill()
    if not spare:
        world.wait(lambda: [e for e in _since(world, after) if e["kind"] == "failure_detected"], "the loss is seen")
        world.start_agent(lost)
    world.wait(lambda: _whole(world, after, len(members)), "the job is whole", LIMIT)
    events = _since(world, after)
    began = next(event["time"] for event in events if event["kind"] == "failure_detected")
    offer = next(event for event in events if event["kind"] == "offer")
    first = next(e["time"] for e in events if e["kind"] == "step" and e["time"] > began)
    return Loss(first - began, offer["time"] - began, _whole(world, after, len(members)) - began)


def _ranks(world: World) -> int:
    return int(world.array.environment["UNICRON_RANKS_PER_NODE"])


def _since(world: World, after: int) -> list[dict]:
    return [event for event in world.events() if event["id"] > after]


def _whole(world: World, after: int, count: int) -> float:
    """When the first iteration of a generation that follows the loss and has so many members was over; 0 before."""
    broken, whole = False, 0
    for event in _since(world, after):
        broken = broken or event["kind"] == "break"
        if broken and event["kind"] == "entered" and len(event["members"]) == count:
            whole = event["generation"]
        if whole and event["kind"] == "step" and event["generation"] == whole:
            return event["time"]
    return 0.0


def runs(shape: tuple[str, str], spare: bool, repeats: int) -> list[Loss]:
    """One job, from which a node is lost again and again; the spare is there again before the next is."""
    ranks, layout = shape
    environment = {"UNICRON_RANKS_PER_NODE": ranks, "TINY_LAYOUT": layout, "UNICRON_SPARES": str(int(spare))}
    nodes = MEMBERS + spare
    found = []
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        with World(Path(folder), nodes, QUICK, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02", **environment) as world:
            for _ in range(repeats):
                world.wait(lambda: len(world.job().get("members", ())) == MEMBERS * int(ranks), "all train", LIMIT)
                if spare:
                    world.wait(lambda: world.job()["spares_ready"] == 1, "a spare is ready", LIMIT)
                found.append(lose(world, spare))
                gone = [element for element, agent in world.agents.items() if not agent.alive]
                for element in gone:
                    world.start_agent(element)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spares", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="losses of each kind")
    options = parser.parse_args()
    print(f"from the detection of a lost node, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds, medians")
    print(f"{'':<34}" + "".join(f"{head:>12}" for head in HEADS))
    figures: dict[tuple[str, bool], list[float]] = {}
    for name, shape in SHAPES.items():
        for spare in (True, False):
            losses = runs(shape, spare, options.repeats)
            whole = figures[name, spare] = sorted(loss.whole for loss in losses)
            parts = [statistics.median(getattr(loss, part) for loss in losses) for part in ("again", "offered")]
            values = [*parts, whole[0], statistics.median(whole), whole[-1]]
            label = f"{name}, {'hot spare' if spare else 'no spare'}"
            print(f"{label:<34}{len(losses):>12}" + "".join(f"{value:>12.2f}" for value in values), flush=True)
    for name in SHAPES:
        print_figure(
            f"node lost, hot spare there: detection to whole, {name}",
            statistics.median(figures[name, True]),
            "s",
            ASKED,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
