"""``python -m benchmarks.fence.cuts``: random cuts, pauses, lost packets and clock jumps; never two worlds that write.

Jobs in restart mode on a real Slurm with a link for each host. Their processes append to a file that all worlds of a
job share. Once a world has written there, no earlier one may write any more. Needs root. Exit status 1 if one did.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.storms.stage import Clock, is_agent
from tests.support.links import LinksCluster, LinksJob
from tests.support.processes import wait_for

WRITER = Path(__file__).with_name("writer.py")
START_LIMIT = 180.0
SETTLE = 90.0  # seconds in which a world has to write after a fault
SETTINGS = """forming_settle_seconds = 1
join_after_seconds = 0.5
mtbf_node_hours = 100000
metrics_seconds = 0
[partition.default]
mode = "observe"
"""
SLURM_LINES = ["SlurmdTimeout=3600"]


@dataclass
class Stage:
    """The cluster and its jobs."""

    site: LinksCluster
    jobs: list[LinksJob]
    files: list[Path]
    clock: Clock
    chance: random.Random
    deeds: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """Seconds from the end of a fault, or its 20th second, until all jobs write."""

    @property
    def nodes(self) -> list[str]:
        return list(self.site.cluster.spec.node_names)

    def tasks(self, node: str) -> list[int]:
        """Return the processes of jobs on the node: agents, watchdogs, zygotes, ranks."""
        return [one.pid for one in self.site.cluster.processes() if one.node == node and one.kind == "task"]

    def writes_again(self, since: float) -> bool:
        """Whether each job has written since then."""
        return all(last_written(path) > since for path in self.files)


def last_written(path: Path) -> float:
    """Return the time of the file's last whole line on the monotonic clock."""
    if not path.exists():
        return 0.0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode().rpartition("\n")[0].splitlines()
    return float(lines[-1].split()[2]) if lines else 0.0


def two_worlds(path: Path) -> list[str]:
    """Return lines that an earlier world wrote after a later one."""
    wrong, newest = [], 0
    for number, line in enumerate(path.read_text().splitlines()):
        words = line.split()
        if len(words) != 3:
            continue
        if int(words[0]) < newest:
            wrong.append(f"{path.name}:{number + 1}: {line} after generation {newest}")
        newest = max(newest, int(words[0]))
    return wrong


def worlds(path: Path) -> int:
    """Return how many worlds have written."""
    return len({line.split()[0] for line in path.read_text().splitlines() if line.count(" ") == 2})


# ---------------------------------------------------------------- faults
def cut_node(stage: Stage, seconds: float) -> Iterator[None]:
    """Cut a node off from all."""
    stage.site.cut(stage.chance.choice(stage.nodes))
    yield


def cut_from_head(stage: Stage, seconds: float) -> Iterator[None]:
    """Cut one or two nodes off from the head alone."""
    stage.site.cut(",".join(stage.chance.sample(stage.nodes, stage.chance.randint(1, 2))), "head")
    yield


def cut_apart(stage: Stage, seconds: float) -> Iterator[None]:
    """Cut the nodes into two groups, the head in one of them."""
    names = [*stage.nodes, "head"]
    stage.chance.shuffle(names)
    at = stage.chance.randrange(1, len(names))
    stage.site.cut(",".join(names[:at]), ",".join(names[at:]))
    yield


def cut_head(stage: Stage, seconds: float) -> Iterator[None]:
    """Cut the head off from all nodes."""
    stage.site.cut("head")
    yield


def flaps(stage: Stage, seconds: float) -> Iterator[None]:
    """Cut a node off again and again."""
    node, until = stage.chance.choice(stage.nodes), time.monotonic() + seconds
    while time.monotonic() < until:
        stage.site.cut(node)
        time.sleep(stage.chance.uniform(0.2, 4.0))
        stage.site.heal()
        time.sleep(stage.chance.uniform(0.1, 2.0))
    yield


def packets_lost(stage: Stage, seconds: float) -> Iterator[None]:
    """Lose 20 to 95 % of the packets of some nodes."""
    some = stage.chance.sample(stage.nodes, stage.chance.randint(1, len(stage.nodes)))
    stage.site.loss(",".join(some), stage.chance.uniform(0.2, 0.95))
    yield


def agent_paused(stage: Stage, seconds: float) -> Iterator[None]:
    """Stop an agent alone: its processes may go on."""
    agents = [pid for pid in stage.tasks(stage.chance.choice(stage.nodes)) if is_agent(pid)]
    with stopped(agents[:1]):
        yield


def agent_paused_and_cut(stage: Stage, seconds: float) -> Iterator[None]:
    """Stop an agent whose node is cut off."""
    node = stage.chance.choice(stage.nodes)
    stage.site.cut(node)
    with stopped([pid for pid in stage.tasks(node) if is_agent(pid)]):
        yield


def ranks_paused(stage: Stage, seconds: float) -> Iterator[None]:
    """Stop all ranks of a node, and cut it off: they wake up later."""
    node = stage.chance.choice(stage.nodes)
    stage.site.cut(node)
    with stopped([pid for pid in stage.tasks(node) if not is_agent(pid)]):
        yield


def node_paused(stage: Stage, seconds: float) -> Iterator[None]:
    """Stop all processes of jobs on a node, as `scontrol suspend` does; ranks wake up first."""
    pids = stage.tasks(stage.chance.choice(stage.nodes))
    with stopped(sorted(pids, key=is_agent)):
        yield


def watchdog_killed(stage: Stage, seconds: float) -> Iterator[None]:
    """Kill the watchdog of a node, and cut the node off."""
    node = stage.chance.choice(stage.nodes)
    for pid in stage.tasks(node):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("watchdog.py") for word in psutil.Process(pid).cmdline()):
                os.kill(pid, signal.SIGKILL)
    stage.site.cut(node)
    yield


def controller_paused(stage: Stage, seconds: float) -> Iterator[None]:
    """Stop unicrond, and cut a node off meanwhile."""
    stage.site.controller.freeze()
    try:
        time.sleep(stage.chance.uniform(0.0, 5.0))
        stage.site.cut(stage.chance.choice(stage.nodes))
        yield
    finally:
        stage.site.controller.thaw()


def controller_restarted(stage: Stage, seconds: float) -> Iterator[None]:
    """Kill unicrond around a cut, and start it again."""
    first = stage.chance.random() < 0.5
    if first:
        stage.site.cut(stage.chance.choice(stage.nodes))
        time.sleep(stage.chance.uniform(0.0, 8.0))
    stage.site.controller.kill()
    if not first:
        stage.site.cut(stage.chance.choice(stage.nodes))
    time.sleep(stage.chance.uniform(0.0, 6.0))
    stage.site.controller.start()
    yield


def clocks_jump(stage: Stage, seconds: float) -> Iterator[None]:
    """Step the time of day on all nodes while one is cut off."""
    stage.site.cut(stage.chance.choice(stage.nodes))
    stage.clock.step(stage.chance.choice((-3600, -60, -5, 5, 60, 3600)))
    yield


DEEDS: tuple[Callable[[Stage, float], Iterator[None]], ...] = (
    cut_node,
    cut_from_head,
    cut_apart,
    cut_head,
    flaps,
    packets_lost,
    agent_paused,
    agent_paused_and_cut,
    ranks_paused,
    node_paused,
    watchdog_killed,
    controller_paused,
    controller_restarted,
    clocks_jump,
)


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes, and let them go on in this order."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def strike(stage: Stage) -> None:
    """Do one of the deeds for a random time, and wait until all jobs write again."""
    deed, seconds = stage.chance.choice(DEEDS), stage.chance.choice((1.0, 3.0, 6.0, 8.0, 12.0, 20.0))
    with contextlib.contextmanager(deed)(stage, seconds):
        if deed is not flaps:
            time.sleep(stage.chance.uniform(0.3, seconds))
    stage.site.heal()
    stage.deeds[deed.__name__] += 1
    over = time.monotonic()
    wait_for(lambda: stage.writes_again(over), f"all jobs write after {deed.__name__}", SETTLE)
    stage.waits.append(time.monotonic() - over)
    time.sleep(stage.chance.uniform(0.0, 4.0))


def play(folder: Path, count: int, seed: int, jobs: int, seconds: float = float("inf")) -> Stage:
    """Strike so often, or for so many seconds. Raises AssertionError if no world writes again."""
    chance, clock = random.Random(seed), Clock(folder / "clock")
    nodes = 3 * jobs
    with LinksCluster(folder / "site", nodes=nodes, settings=SETTINGS, config_lines=SLURM_LINES) as site:
        files, made = [folder / f"written.{number}" for number in range(jobs)], []
        for path in files:
            given = {"FENCE_FILE": str(path), "UNICRON_MIN_NODES": "1", "UNICRON_WARM": "0", **clock.environment}
            made.append(site.submit(3, [sys.executable, str(WRITER)], **given))
        stage = Stage(site, made, files, clock, chance)
        for job in made:
            wait_for(lambda job=job: len(job.status().get("members", ())) == 3, "a world of three", START_LIMIT)
        until = time.monotonic() + seconds
        for _ in itertools.count() if count < 0 else range(count):
            if time.monotonic() >= until:
                break
            strike(stage)
            if wrong := [line for path in files for line in two_worlds(path)]:
                raise AssertionError(f"two worlds write after {stage.deeds}: {wrong[:3]}")
        return stage


def main() -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(description="random faults; never two worlds that write")
    parser.add_argument("--count", type=int, default=-1, help="of faults; by default only --seconds counts")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--jobs", type=int, default=2, help="each with three nodes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cuts-"))
    print(f"seed {given.seed}, files in {folder}", flush=True)
    stage = play(folder, given.count, given.seed, given.jobs, given.seconds)
    found = {
        "faults": sum(stage.deeds.values()),
        "worlds": sum(map(worlds, stage.files)),
        "median": statistics.median(stage.waits),
        "most": max(stage.waits),
        "deeds": dict(stage.deeds),
    }
    print(json.dumps(found))
    if given.json:
        given.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
