"""From the detection of a lost node until the job is whole again, with a hot spare and without.

The unicrond, agents and ranks are real; the loss is a kill -9 of an agent and its ranks. Without a spare the lost
element's agent starts again at once, as if Slurm had a free node, and its ranks start, import and build. The job is
whole when all ranks have stepped an iteration together.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Report
from tests.support.jobs import FOREVER, World


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    repeats: int = 5
    """Losses of each kind."""


SMALLEST = Sizes(1)
MEMBERS = 3
LIMIT = 180.0
SETTINGS = "lease_periods = 3\nforming_settle_seconds = 20\n"
SHAPES = {"1 rank a node": ("1", "1 1 1"), "2 ranks a node, TP2": ("2", "2 1 1")}  # ranks a node, TP PP VPP


def measure(sizes: Sizes, report: Report) -> None:
    """Lose nodes in jobs of each kind."""
    report.row("seconds, medians", "runs", "again", "offered", "whole, min", "median", "max", label=34, width=12)
    for name, (ranks, layout) in SHAPES.items():
        for spare in (True, False):
            losses = lose_nodes(ranks, layout, spare, sizes.repeats)
            again, offered, whole = zip(*losses, strict=True)
            middle = statistics.median(whole)
            figures = [statistics.median(again), statistics.median(offered), min(whole), middle, max(whole)]
            label = f"{name}, {'hot spare' if spare else 'no spare'}"
            report.row(label, len(losses), *figures, label=34, width=12)
            if spare:
                report.figure(f"node lost, hot spare there: detection to whole, {name}", middle, "s", 2.0)


def lose_nodes(ranks: str, layout: str, spare: bool, repeats: int) -> list[tuple[float, float, float]]:
    """Lose a node of one job again and again, always with a spare ready if there is one."""
    environment = {"UNICRON_RANKS_PER_NODE": ranks, "TINY_LAYOUT": layout, "UNICRON_SPARES": str(int(spare))}
    found = []
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"} | environment
        with World(Path(folder), MEMBERS + spare, SETTINGS, **settings) as world:
            for _ in range(repeats):
                world.wait(lambda: len(world.job().get("members", ())) == MEMBERS * int(ranks), "all train", LIMIT)
                if spare:
                    world.wait(lambda: world.job()["spares_ready"] == 1, "a spare is ready", LIMIT)
                found.append(lose_node(world, int(ranks), spare))
                for element in [element for element, agent in world.agents.items() if not agent.alive]:
                    world.start_agent(element)
    return found


def lose_node(world: World, ranks: int, spare: bool) -> tuple[float, float, float]:
    """Return the seconds from the detection until the others step, the offer, and the step of all."""
    job = world.job()
    members = job["members"]
    world.trains_on(members)
    after = world.events()[-1]["id"]
    lost = job["elements"][0]["element"] if not spare else max(slot // ranks for slot in members)

    def events(kind: str = "") -> list[dict[str, Any]]:
        return [event for event in world.events() if event["id"] > after and kind in ("", event["kind"])]

    world.agents[lost].kill()
    if not spare:
        world.wait(lambda: events("failure_detected"), "the loss is seen")
        world.start_agent(lost)
    world.wait(lambda: whole_at(events(), len(members)), "the job is whole", LIMIT)
    began = events("failure_detected")[0]["time"]
    first = next(step["time"] for step in events("step") if step["time"] > began)
    return first - began, events("offer")[0]["time"] - began, whole_at(events(), len(members)) - began


def whole_at(events: list[dict[str, Any]], count: int) -> float:
    """Return when all members had stepped in a generation after the loss; 0 before."""
    broken, whole = False, 0
    for event in events:
        broken = broken or event["kind"] == "break"
        if broken and event["kind"] == "entered" and len(event["members"]) == count:
            whole = event["generation"]
        if whole and event["kind"] == "step" and event["generation"] == whole:
            found: float = event["time"]
            return found
    return 0.0
