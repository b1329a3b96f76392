"""``python -m benchmarks.fence.cuts``: random cuts, pauses, lost packets and clock jumps; never two worlds that write.

Jobs in restart mode on a real Slurm with a link for each host. Their processes append to a file that all worlds of a
job share. Once a world has written there, no earlier one may write any more. In each round every job is struck by a
fault of its own, and some rounds have one more that strikes all hosts. With ``--record FILE`` each round is added
to that file, and the sums are those of the whole file, so that many short runs make one long one. Needs root. Exit
status 1 if two worlds wrote.
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
NODES_EACH = 3
SHARE_OF_ALL = 0.35  # of the rounds that have a fault of all hosts, too
SETTINGS = """forming_settle_seconds = 1
join_after_seconds = 0.5
mtbf_node_hours = 100000
metrics_seconds = 0
[partition.default]
mode = "observe"
"""
SLURM_LINES = ["SlurmdTimeout=3600"]


@dataclass
class Writers:
    """A job, the file that its worlds write, and its nodes."""

    job: LinksJob
    path: Path
    nodes: list[str]

    @property
    def over(self) -> bool:
        """Whether the controller has ended it: worlds that break again and again do not go on for ever."""
        return bool(self.job.status().get("state") == "ended")


@dataclass
class Stage:
    """The cluster and its jobs."""

    site: LinksCluster
    folder: Path
    clock: Clock
    chance: random.Random
    writers: list[Writers] = field(default_factory=list)
    before: list[Path] = field(default_factory=list)
    """The files of jobs that have ended."""
    deeds: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """Seconds from the end of a round until all jobs write."""

    @property
    def files(self) -> list[Path]:
        return [*self.before, *(one.path for one in self.writers)]

    def submit(self, count: int) -> None:
        """Begin so many jobs, and wait until all of their nodes write."""
        new = []
        for number in range(len(self.files), len(self.files) + count):
            path = self.folder / f"written.{number}"
            given = {"FENCE_FILE": str(path), "UNICRON_MIN_NODES": "1", "UNICRON_WARM": "0", **self.clock.environment}
            new.append((self.site.submit(NODES_EACH, [sys.executable, str(WRITER)], **given), path))
        for job, path in new:
            whole = lambda job=job: len(job.status().get("members", ())) == NODES_EACH  # noqa: E731
            wait_for(whole, "a world of all nodes", START_LIMIT)
            self.writers.append(Writers(job, path, [job.node(element) for element in range(NODES_EACH)]))

    def replace_ended(self) -> None:
        """Begin a job for each that has ended."""
        ended = [one for one in self.writers if one.over]
        for one in ended:
            one.job.cancel()
            self.writers.remove(one)
            self.before.append(one.path)
        self.submit(len(ended))

    def tasks(self, node: str) -> list[int]:
        """Return the processes of jobs on the node: agents, watchdogs, zygotes, ranks."""
        return [one.pid for one in self.site.cluster.processes() if one.node == node and one.kind == "task"]

    def write_again(self, since: float) -> bool:
        """Whether each job has written since then, or has ended."""
        return all(last_written(one.path) > since or one.over for one in self.writers)


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
# Each yields now and then while it lasts. The caller mends all links after it.
def cut_node(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Cut a node off from all."""
    stage.site.cut(stage.chance.choice(nodes))
    yield


def cut_from_head(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Cut one or two nodes off from the head alone."""
    stage.site.cut(",".join(stage.chance.sample(nodes, stage.chance.randint(1, 2))), "head")
    yield


def cut_apart(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Cut the nodes into two groups, the head in one of them."""
    names = [*nodes, "head"]
    stage.chance.shuffle(names)
    at = stage.chance.randrange(1, len(names))
    stage.site.cut(",".join(names[:at]), ",".join(names[at:]))
    yield


def cut_head(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Cut the head off from all nodes."""
    stage.site.cut("head")
    yield


def flaps(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Cut a node off again and again."""
    node = stage.chance.choice(nodes)
    while True:
        stage.site.cut(node)
        yield
        stage.site.heal(node)
        yield


def packets_lost(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Lose 20 to 95 % of the packets of some nodes."""
    some = stage.chance.sample(nodes, stage.chance.randint(1, len(nodes)))
    stage.site.loss(",".join(some), stage.chance.uniform(0.2, 0.95))
    yield


def agent_paused(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Stop an agent alone: its processes may go on."""
    yield from stopped([pid for pid in stage.tasks(stage.chance.choice(nodes)) if is_agent(pid)])


def agent_paused_and_cut(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Stop an agent whose node is cut off."""
    node = stage.chance.choice(nodes)
    stage.site.cut(node)
    yield from stopped([pid for pid in stage.tasks(node) if is_agent(pid)])


def ranks_paused(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Stop all ranks of a node, and cut it off: they wake up later."""
    node = stage.chance.choice(nodes)
    stage.site.cut(node)
    yield from stopped([pid for pid in stage.tasks(node) if not is_agent(pid)])


def node_paused(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Stop all processes of jobs on a node, as `scontrol suspend` does; ranks wake up first."""
    yield from stopped(sorted(stage.tasks(stage.chance.choice(nodes)), key=is_agent))


def watchdog_killed(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Kill the watchdog of a node, and cut the node off."""
    node = stage.chance.choice(nodes)
    for pid in stage.tasks(node):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("watchdog.py") for word in psutil.Process(pid).cmdline()):
                os.kill(pid, signal.SIGKILL)
    stage.site.cut(node)
    yield


def controller_paused(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Stop unicrond, and cut a node off meanwhile."""
    stage.site.controller.freeze()
    try:
        time.sleep(stage.chance.uniform(0.0, 5.0))
        yield from cut_node(stage, nodes)
    finally:
        stage.site.controller.thaw()


def controller_restarted(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Kill unicrond around a cut, and start it again."""
    first = stage.chance.random() < 0.5
    if first:
        stage.site.cut(stage.chance.choice(nodes))
        time.sleep(stage.chance.uniform(0.0, 8.0))
    stage.site.controller.kill()
    if not first:
        stage.site.cut(stage.chance.choice(nodes))
    time.sleep(stage.chance.uniform(0.0, 6.0))
    stage.site.controller.start()
    yield


def clocks_jump(stage: Stage, nodes: list[str]) -> Iterator[None]:
    """Step the time of day on all nodes while one is cut off."""
    stage.site.cut(stage.chance.choice(nodes))
    stage.clock.step(stage.chance.choice((-3600, -60, -5, 5, 60, 3600)))
    yield


Deed = Callable[[Stage, list[str]], Iterator[None]]
OF_ONE_JOB: tuple[Deed, ...] = (
    cut_node,
    cut_from_head,
    cut_apart,
    flaps,
    packets_lost,
    agent_paused,
    agent_paused_and_cut,
    ranks_paused,
    node_paused,
    watchdog_killed,
)
OF_ALL: tuple[Deed, ...] = (cut_apart, cut_head, controller_paused, controller_restarted, clocks_jump)


def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes, and let them go on in this order."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def strike(stage: Stage) -> list[str]:
    """Strike each job for a random time, sometimes all of them at once as well, and wait until all write again. Return
    the names of the faults."""
    chance = stage.chance
    chosen = [(chance.choice(OF_ONE_JOB), one.nodes) for one in stage.writers]
    if chance.random() < SHARE_OF_ALL:
        chosen.append((chance.choice(OF_ALL), [node for one in stage.writers for node in one.nodes]))
    begun: list[Iterator[None]] = []
    try:
        for deed, nodes in chosen:
            begun.append(deed(stage, nodes))
            next(begun[-1])
        until = time.monotonic() + chance.uniform(0.3, chance.choice((1.0, 3.0, 6.0, 8.0, 12.0, 20.0)))
        while (left := until - time.monotonic()) > 0.0:
            time.sleep(min(left, chance.uniform(0.1, 3.0)))
            for one in begun:
                next(one, None)
    finally:
        for one in reversed(begun):
            one.close()  # type: ignore[attr-defined]  # they are generators
        stage.site.heal()
    over = time.monotonic()
    done = [deed.__name__ for deed, _ in chosen]
    wait_for(lambda: stage.write_again(over), f"all jobs write after {done}", SETTLE)
    stage.waits.append(time.monotonic() - over)
    time.sleep(chance.uniform(0.0, 4.0))
    return done


def play(
    folder: Path,
    count: int,
    seed: int,
    jobs: int,
    seconds: float = float("inf"),
    note: Callable[[list[str], int], object] = lambda done, worlds: None,
) -> Stage:
    """Strike until there were so many faults, or for so many seconds. note: called after each round with its faults and
    the number of worlds so far. Raises AssertionError if two worlds write, or none writes again."""
    with LinksCluster(folder / "site", nodes=NODES_EACH * jobs, settings=SETTINGS, config_lines=SLURM_LINES) as site:
        stage = Stage(site, folder, Clock(folder / "clock"), random.Random(seed))
        stage.submit(jobs)
        until = time.monotonic() + seconds
        while sum(stage.deeds.values()) < count and time.monotonic() < until:
            done = strike(stage)
            stage.deeds.update(done)
            if wrong := [line for path in stage.files for line in two_worlds(path)]:
                raise AssertionError(f"two worlds write after {done}: {wrong[:3]}")
            note(done, sum(map(worlds, stage.files)))
            stage.replace_ended()
        return stage


def sums(record: Path) -> dict[str, object]:
    """Return the sums of all runs in the file."""
    rounds = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    deeds = Counter(itertools.chain.from_iterable(one["deeds"] for one in rounds))
    last = {one["run"]: one["worlds"] for one in rounds}
    wrong = [one["wrong"] for one in rounds if one.get("wrong")]
    return {"faults": sum(deeds.values()), "worlds": sum(last.values()), "wrong": wrong, "deeds": dict(deeds)}


def main() -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(description="random faults; never two worlds that write")
    parser.add_argument("--count", type=int, default=1000, help="of faults, those in --record included")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--jobs", type=int, default=4, help="each with three nodes")
    parser.add_argument("--record", type=Path, help="a file of rounds; this run's are added")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cuts-"))
    record, run = given.record or folder / "rounds", f"{given.seed}-{time.time():.0f}"
    count = given.count - int(str(sums(record)["faults"]))
    print(f"seed {given.seed}, files in {folder}", flush=True)

    def note(done: list[str], worlds: int, wrong: str = "") -> None:
        with record.open("a") as file:
            file.write(json.dumps({"run": run, "deeds": done, "worlds": worlds, "wrong": wrong}) + "\n")

    try:
        stage = play(folder, count, given.seed, given.jobs, given.seconds, note)
        waits = {"median": statistics.median(stage.waits), "most": max(stage.waits)} if stage.waits else {}
        print(json.dumps({"this run": sum(stage.deeds.values()), "ended jobs": len(stage.before), **waits}))
    except AssertionError as error:
        note([], 0, str(error))
        print(error)
    found = sums(record)
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
