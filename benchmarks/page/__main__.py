"""``python -m benchmarks.page``: what the page of `unicronctl web` costs the controller, and how soon it is there.

First Chromium visits a page (:mod:`benchmarks.page.paint`). Then a real unicrond has one core; a job of simulated
agents (:mod:`benchmarks.scale`), the page's server and ten watchers have the other. How often the page asks is what the
watchers are told. What a question costs is measured by asking more often: once in several seconds, it would be lost in
what else the controller does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from benchmarks.marks import print_figure
from benchmarks.scale.agents import JOB
from benchmarks.scale.lines import Failed, Sockets
from benchmarks.scale.process import REPOSITORY, Controller, allow_descriptors, cores
from benchmarks.scale.simulation import Simulation, names
from unicron_ctl.web.page_source import EXPLAIN_SECONDS, SCENARIO_SECONDS, STATUS, STATUS_SECONDS

WATCHERS = 10
FORM_SECONDS, SETTLE_SECONDS, PAINT_SECONDS, BESIDE_SECONDS = 120.0, 60.0, 240.0, 120.0  # limits
WEB = "import sys; sys.argv = ['unicronctl', 'web', *sys.argv[1:]]; from unicron_ctl.cli.unicronctl import main; main()"


class Beside:
    """A program on the other core, with its output. close() ends it."""

    def __init__(self, *words: str, cpus: set[int], config: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "UNICRON_CONFIG": str(config)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def close(self) -> str:
        """What it has printed since it was read last."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.communicate()[0]


def run_beside(simulation: Simulation, program: Beside) -> str:
    """What a program prints until its end, while the job trains on."""
    try:
        simulation.until(lambda: program.process.poll() is not None, BESIDE_SECONDS, "a program beside has ended")
    finally:
        output = program.close()
    if program.process.returncode:
        raise Failed(f"a program beside has ended with {program.process.returncode}")
    return output


class Rig:
    """A unicrond with a job of simulated agents, and a page beside it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        controller_cpus, self.cpus = cores()
        os.sched_setaffinity(0, self.cpus)
        self.seconds, self.turns = options.seconds, options.turns
        self.controller = Controller(folder, controller_cpus)
        self.controller.start()
        self.config = folder / "unicron.toml"
        listen = "--listen", "127.0.0.1:0", "--controller", self.controller.address
        self.web = Beside("-c", WEB, *listen, cpus=self.cpus, config=self.config)
        lines = Sockets(self.controller.endpoint, names(options.agents))
        self.simulation = Simulation(lines, options.agents, options.ranks)

    def close(self) -> None:
        self.simulation.close()
        self.web.close()
        self.controller.kill()

    def form(self) -> str:
        """All train; the page's address."""
        address = self.web.output.readline().split()[2]
        self.simulation.start()
        self.simulation.until(self.simulation.complete, FORM_SECONDS, "all ranks train for the first time")
        self.simulation.until(self.simulation.settled, SETTLE_SECONDS, "the controller has heard that all ranks train")
        self.simulation.run(3.0)
        return address

    def cost(self, question: dict[str, object]) -> float:
        """The controller's CPU time for one such question, in seconds. With questions and without, by turns, so that a
        slow phase of the machine meets both."""
        more, count = 0.0, 0
        for _ in range(self.turns):
            alone = self._used(lambda: self.simulation.run(self.seconds))
            words = "-m", "benchmarks.page.asker", self.controller.address, json.dumps(question), f"{self.seconds}"
            printed: list[str] = []
            began = time.monotonic()
            used = self._used(lambda: printed.append(run_beside(self.simulation, self._beside(*words))))  # noqa: B023
            more += used - alone * (time.monotonic() - began) / self.seconds
            count += int(printed[0])
        return more / count if more > 0 else math.nan  # lost in the noise: no figure, and no mark is met

    def _used(self, work: Callable[[], object]) -> float:
        before = self.controller.cpu_seconds()
        work()
        return self.controller.cpu_seconds() - before

    def _beside(self, *words: str) -> Beside:
        return Beside(*words, cpus=self.cpus, config=self.config)

    def watched(self, address: str) -> tuple[int, float]:
        """The answers that the watchers got, and the seconds between two questions to the controller meanwhile."""
        words = "-m", "benchmarks.page.watchers", address, str(WATCHERS), f"{2 * self.seconds}"
        found = json.loads(run_beside(self.simulation, self._beside(*words)))
        return found["answers"], mean(found["every"])


def beside(folder: Path, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """How often a page asks a real unicrond, in seconds, and the CPU time of a question of each kind."""
    rig = Rig(folder, options)
    try:
        answers, every = rig.watched(rig.form())
        questions = STATUS, {"kind": "explain", "job": JOB}, {"kind": "scenario"}
        cpu = {str(question["kind"]): rig.cost(question) for question in questions}
    finally:
        rig.close()
    print(f"{WATCHERS} watchers of a real unicrond got {answers} answers; it was asked once in {every:.1f} s")
    return every, cpu


def measure(options: argparse.Namespace) -> bool:
    """Prints all figures. Returns whether the marks are met."""
    with tempfile.TemporaryDirectory(prefix="unicron-page-") as folder:
        words = "-m", "benchmarks.page.paint", str(options.agents), str(options.ranks)
        paint = Beside(*words, cpus=os.sched_getaffinity(0), config=Path(folder, "none"))
        found = json.loads(paint.process.communicate(timeout=PAINT_SECONDS)[0])
        every, cpu = STATUS_SECONDS, found["cpu"]
        if not options.alone:
            every, cpu = beside(Path(folder), options)
    visits = found["visits"]
    print(f"{options.agents} nodes, {options.agents * options.ranks} ranks; the controller's CPU time for a question:")
    print(", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in cpu.items()))
    print("single visits, map drawn: " + ", ".join(f"{visit['shown']:.2f} s" for visit in visits))
    share = cpu["status"] / every
    job = cpu["explain"] / max(EXPLAIN_SECONDS, every) + cpu["scenario"] / SCENARIO_SECONDS
    good = [
        print_figure("controller's core for ten who watch", 100 * share, "%", most=2.0),
        print_figure("the same, one of them with a job open", 100 * (share + job), "%", most=2.0),
        print_figure("first paint", median(visit["first"] for visit in visits), "s", most=0.5),
        print_figure("the whole map is drawn", median(visit["shown"] for visit in visits), "s", most=0.5),
    ]
    return all(good)


def main(arguments: list[str] | None = None) -> int:
    """0 when every mark was reached, 1 when one was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=2048, help="nodes")
    parser.add_argument("--ranks", type=int, default=8, help="per node")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3, help="with questions and without")
    parser.add_argument(
        "--alone", action="store_true", help="no unicrond and agents: the controller's core in a process"
    )
    options = parser.parse_args(arguments)
    if problem := allow_descriptors(options.agents):
        parser.error(problem)
    return 0 if measure(options) else 1


if __name__ == "__main__":
    sys.exit(main())
