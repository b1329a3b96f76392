"""One storm: a job on a cluster with real links, its figures, and the checks of the rows."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.links import LinksCluster, LinksJob
from tests.support.processes import wait_for
from unicron_detector.iterations.iteration_monitor import Limits

ELEMENTS = 3
LEARNED = Limits()
ITERATIONS_TO_LEARN = LEARNED.skip + LEARNED.learn + 4
START_LIMIT = 150.0  # seconds; the ranks of all nodes start on this machine's few cores
HEAL_LIMIT = 90.0  # of each wait
BUSY_PAUSE = 5.0  # between two steps of an undisturbed job, while other programs use the cores
NEVER = float("inf")
STALE = 1.0  # an older generation that steps so long after the first step of a newer one is a second half
OUT_OF_SERVICE = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL"}


@dataclass
class Storm:
    """The job and the checks of a row."""

    site: LinksCluster
    seen: dict[str, str] = field(default_factory=dict)
    """The figures."""
    wrong: list[str] = field(default_factory=list)
    """The checks that failed."""
    job: LinksJob = field(init=False)
    generation: int = field(init=False, default=0)
    _pids: dict[int, int] = field(init=False, default_factory=dict)

    # ------------------------------------------------------------ the job
    def train(self, elements: int = ELEMENTS, **settings: str) -> None:
        """Submit the job, and wait until all elements train and its iteration time is known. One node stays spare."""
        self.job = self.site.submit(elements, **settings)
        self.job.whole(elements, START_LIMIT)
        self.job.reached(ITERATIONS_TO_LEARN)
        self.generation = self.job.steps()[-1]["generation"]
        self.pid(0)

    def arm(self, slot: int, at: str, act: Callable[[], object] = lambda: None) -> None:
        """Stop the rank at the gate of `halted`, in its next iteration or after `act` has led it there."""
        before = set(self.job.folder.glob(f"fault.{slot}.*"))
        (self.job.folder / "armed").touch()
        act()
        found = lambda: set(self.job.folder.glob(f"fault.{slot}.*")) - before  # noqa: E731
        wait_for(found, f"slot {slot} stops at {at}", HEAL_LIMIT, self.job.told)

    def open_gate(self) -> None:
        """Let the halted rank go on."""
        (self.job.folder / "gate.1").touch()

    def pid(self, slot: int) -> int:
        """Return the process of a rank, by the last answer of a controller that may be gone. Raises LookupError."""
        if self.site.controller.alive:
            ranks = [rank for element in self.job.status().get("elements", []) for rank in element["ranks"]]
            self._pids |= {rank["slot"]: rank["pid"] for rank in ranks if rank["pid"]}
        tasks = [process.pid for process in self.site.cluster.processes() if process.kind == "task"]
        if self._pids.get(slot) not in tasks:
            raise LookupError(f"no rank of slot {slot} runs")
        return self._pids[slot]

    def kill_rank(self, slot: int) -> float:
        """Kill a rank. Return the time."""
        os.kill(self.pid(slot), signal.SIGKILL)
        return time.time()

    def kill_some_rank(self, chance: random.Random) -> bool:
        """Kill a random rank. Return whether it was running."""
        try:
            self.kill_rank(chance.randrange(ELEMENTS))
        except (LookupError, ProcessLookupError):
            return False
        return True

    def cut_log(self, count: int) -> None:
        """Take the last records off the log of a stopped unicrond, as a power cut may."""
        log = self.site.controller.state_folder / "events.sqlite"
        with contextlib.closing(sqlite3.connect(log)) as db, db:
            db.execute("DELETE FROM event WHERE id > (SELECT MAX(id) FROM event) - ?", (count,))
            db.execute("DELETE FROM state WHERE event > (SELECT MAX(id) FROM event)")

    def agents(self) -> list[int]:
        """Return the process ids of all agents."""
        return [p.pid for p in self.site.cluster.processes() if p.kind == "task" and is_agent(p.pid)]

    # ------------------------------------------------------------ figures
    def figure(self, name: str, value: object, unit: str = "") -> None:
        """Note a figure."""
        if value == NEVER:
            self.seen[name] = f"not within {HEAL_LIMIT:g} s"
            return
        text = f"{value:.1f}" if isinstance(value, float) else str(value)
        self.seen[name] = f"{text} {unit}".strip()

    def ask(self, fulfilled: bool, what: str) -> None:
        """Note a check that is not fulfilled."""
        if not fulfilled:
            self.wrong.append(what)

    def at_most(self, name: str, seconds: float, limit: float) -> None:
        """Note a time, and check that it is within the limit."""
        self.figure(name, seconds, "s")
        self.ask(seconds <= limit, f"{name} <= {limit:g} s")

    def next_step(self, since: float) -> float:
        """Return when the job took its first step in a new generation, or NEVER."""
        try:
            return self.job.next_step(since, HEAL_LIMIT)
        except AssertionError:
            return NEVER

    def goes_on(self) -> None:
        """Check that the job trains some more iterations."""
        try:
            self.job.reached(5, HEAL_LIMIT)
        except AssertionError:
            self.wrong.append("the job goes on")

    def whole_again(self, members: int = ELEMENTS) -> float:
        """Return when all of `members` ranks had stepped in one generation since the storm, or NEVER."""

        def found() -> float:
            first: dict[int, dict[int, float]] = {}
            for step in self.job.steps():
                if step["generation"] > self.generation:
                    first.setdefault(step["generation"], {}).setdefault(step["slot"], step["time"])
            return min((max(times.values()) for times in first.values() if len(times) == members), default=0.0)

        try:
            return wait_for(found, f"{members} ranks train together again", HEAL_LIMIT)
        except AssertionError:
            return NEVER

    def failures(self) -> list[dict[str, Any]]:
        """Return the failures of this job that the controller has on record."""
        return [failure for failure in self.site.controller.failures() if failure["job"] == self.job.id]

    def out_of_service(self) -> list[str]:
        """Return the nodes that are drained or down."""
        return sorted(node for node, states in self.site.nodes().items() if states & OUT_OF_SERVICE)

    def requeues(self) -> int:
        """Return how often Slurm has requeued elements of the job."""
        listed = self.site.slurm("squeue", "-h", "-r", "-j", self.job.id, "-O", "RestartCnt:10", check=False)
        return sum(int(word) for word in listed.split())

    # ------------------------------------------------------------ checks of several rows
    def whole_now(self) -> None:
        """Check that all elements train together again."""
        try:
            self.job.whole(ELEMENTS, HEAL_LIMIT)
        except AssertionError:
            self.wrong.append(f"the job is whole again within {HEAL_LIMIT:g} s")

    def nothing_held(self) -> None:
        """Check that no element of any job is held or waits."""
        listed = self.site.slurm("squeue", "-h", "-r", "-O", "ArrayTaskID:10,StateCompact:10,Reason:40").splitlines()
        waiting = [" ".join(line.split()) for line in listed if line.split()[1] != "R"]
        self.ask(not waiting, f"no element is held or waits ({'; '.join(waiting)})")

    def no_two_halves(self) -> None:
        """Check that no older generation went on beside a newer one, and that no two had the same number."""
        begun: dict[int, float] = {}
        ranks: dict[int, set[int]] = {}
        sizes: dict[int, set[int]] = {}
        stale = 0
        for step in self.job.steps():
            begun.setdefault(step["generation"], step["time"])
            ranks.setdefault(step["generation"], set()).add(step["slot"])
            sizes.setdefault(step["generation"], set()).add(step["world_size"])
            stale += any(g > step["generation"] and step["time"] > at + STALE for g, at in begun.items())
        twice = [g for g in begun if len(sizes[g]) > 1 or len(ranks[g]) > max(sizes[g])]
        self.ask(not twice, f"never two generations of one number ({twice})")
        self.ask(not stale, f"never two generations that both go on ({stale} steps of an older one)")

    def nothing_lost(self) -> None:
        """Check that no iteration was trained twice, and that none broke the ledger."""
        again = self.job.repeated()
        self.ask(not again, f"no iteration lost ({again} trained again)")
        violations = self.job.status().get("ledger_violations", 0)
        self.ask(not violations, f"no micro-batch lost or counted twice ({violations} iterations)")

    def unharmed(self, but: tuple[str, ...] = ()) -> None:
        """Check that no two generations go on, nothing was lost, and all nodes but these serve."""
        self.no_two_halves()
        self.nothing_lost()
        self.in_service(but)

    def untouched(self, since: float) -> None:
        """Check that the job has trained on undisturbed since then, and that every node serves."""
        self.at_most("longest pause", self.job.pause(since), BUSY_PAUSE)
        broken = sorted({step["generation"] for step in self.job.steps()} - set(range(self.generation + 1)))
        self.ask(not broken, f"no job broken (generations {broken} after {self.generation})")
        self.nothing_lost()
        self.in_service(but=())

    def in_service(self, but: tuple[str, ...]) -> None:
        """Check that no node but these is drained or down."""
        out = [node for node in self.out_of_service() if node not in but]
        self.figure("out of service", ",".join(self.out_of_service()) or "none")
        self.ask(not out, f"no node drained or down ({','.join(out)})")


class Clock:
    """A time of day for the Python programs that get its environment."""

    def __init__(self, file: Path):
        self._file = file
        self.step(0)
        paths = [str(Path(__file__).with_name("stepped")), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths), "UNICRON_STEPPED_CLOCK": str(file)}

    def step(self, seconds: int) -> None:
        """Set it to so many seconds after the machine's own time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes with SIGSTOP during a block."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def halted(slot: int, at: str, count: int) -> str:
    """Return a TINY_FAULT that stops a rank at the gate once the file `armed` is in the job's folder."""
    place = {"slot": slot, "iteration": "any", "at": at, "count": count, "file": "armed"}
    return json.dumps([place | {"kind": "wait", "gate": 1}])


def is_agent(pid: int) -> bool:
    """Return whether a living process is an agent."""
    try:
        return any(word.endswith("/unicron-agent") for word in psutil.Process(pid).cmdline()[:2])
    except psutil.Error:
        return False
