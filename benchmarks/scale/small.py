"""``python -m benchmarks.scale.small``: the scale benchmark's small form, which `make test` runs.

256 agents of 8 ranks drive the controller's core alone (:mod:`benchmarks.scale.alone`). What it takes is its CPU time,
in units of a calibration loop that runs by turns with it: plain Python and msgspec, in which none of the controller's
code is. So how fast or how busy the machine is cancels out.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.scale.alone import Alone
from benchmarks.scale.simulation import ITERATION_SECONDS, Simulation

AGENTS, RANKS = 256, 8
STEADY_SECONDS = 4.0
TIMES = 3  # that each thing is done; the least counts
CALIBRATE_AFTER = 0.01  # seconds of the controller's CPU time between two runs of the calibration loop
PATIENCE = 60.0  # seconds of the clock


class Row(msgspec.Struct, array_like=True, gc=False):
    """About as large as the status of a rank."""

    state: str
    changed: float
    incarnation: int
    generation: int
    iteration: int
    phase: str
    done: list[int]
    seconds: float
    pid: int
    loss: float | None = None


class Message(msgspec.Struct, tag="calibration"):
    job: str
    sent: float
    number: int
    rows: dict[int, Row]


class Calibration:
    """The loop over the state of so many nodes: its memory is as large as what the controller has of them."""

    def __init__(self, nodes: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._messages = [msgspec.msgpack.encode(_message(node)) for node in range(nodes)]
        self._known: list[dict[int, Row]] = [{} for _ in range(nodes)]
        self._since: dict[int, float] = {}
        self._turn = 0
        self.seconds(), self.seconds()  # the memory is there, and has been written once

    def seconds(self) -> float:
        """CPU seconds that one message of each node takes now."""
        began = time.process_time()
        self._turn += 1
        changed: set[int] = set()
        for data, known in zip(self._messages, self._known, strict=True):
            for slot, row in self._decoder.decode(data).rows.items():
                old = known.get(slot)
                if old is None or (old.state == "running" and old.phase == row.phase):
                    known[slot] = row
                    self._since[slot] = row.changed + self._turn
                    changed.add(slot)
        left = sum(1 for slot in sorted(changed) if self._since[slot] >= self._turn)
        assert left == len(self._since)
        return time.process_time() - began


def _message(node: int) -> Message:
    rows = {
        slot: Row("running", 1e9 + slot, 0, 3, 1000, "reducing", [slot], 1.0, 100_000 + slot, 1.5)
        for slot in range(8 * node, 8 * node + 8)
    }
    return Message("1", 1e9 + node, node, rows)


class Metered(Alone):
    """Counts in rounds of the calibration loop."""

    def __init__(self, folder: Path, calibration: Calibration) -> None:
        super().__init__(folder)
        self._calibration, self._at, self._rounds = calibration, 0.0, list[float]()

    def rest(self, seconds: float) -> None:
        super().rest(seconds)
        if self.used - self._at >= CALIBRATE_AFTER:
            self._at = self.used
            self._rounds.append(self._calibration.seconds())

    def cost(self, work: Callable[[], object]) -> float:
        """CPU time that the controller takes while `work` goes on, in rounds of the loop at that time."""
        self._rounds = [self._calibration.seconds()]
        began = self.used
        work()
        self._rounds.append(self._calibration.seconds())
        return (self.used - began) / mean(self._rounds)


class _Small:
    def __init__(self, folder: Path, agents: int) -> None:
        self.lines = Metered(folder, Calibration(agents))
        self.simulation = Simulation(self.lines, agents, RANKS)

    def form(self) -> None:
        self.simulation.start()
        self.simulation.until(self.simulation.complete, PATIENCE, "all train for the first time")

    def steady(self) -> None:
        self.simulation.run(STEADY_SECONDS)

    def calm(self) -> None:
        """All have said that they train."""
        self.simulation.until(self.simulation.settled, PATIENCE, "the controller has heard that all train")
        self.simulation.run(1.0)

    def fail(self, victims: dict[int, list[int]]) -> tuple[float, float]:
        """The costs from the death to the last survivor's Break, and from there to the last plan."""
        simulation = self.simulation
        began = simulation.training.began if simulation.training is not None else 0.0
        half = (began + 1.5 * ITERATION_SECONDS - self.lines.now()) % ITERATION_SECONDS
        simulation.run(half)  # half of the agents have yet to report the last iteration
        told = self.lines.cost(lambda: (simulation.fail(victims), self._until_stopped()))
        planned = self.lines.cost(self._until_planned)
        simulation.until(simulation.complete, PATIENCE, "all train again")
        self.calm()
        return told, planned

    def _until_stopped(self) -> None:
        simulation = self.simulation
        simulation.until(
            lambda: simulation.breaking is not None and simulation.breaking.sent_back[1] > 0,
            PATIENCE,
            "the Break is at all that train",
        )

    def _until_planned(self) -> None:
        simulation = self.simulation
        simulation.until(
            lambda: simulation.planning is not None and not simulation.planning.awaited,
            PATIENCE,
            "the plan is at all members",
        )

    def all_at_once(self) -> None:
        simulation = self.simulation
        simulation.fail({agent.element: list(agent.ranks) for agent in simulation.agents})
        simulation.until(lambda: len(simulation.started) == simulation.total, PATIENCE, "every rank is started again")


def measure(agents: int = AGENTS) -> dict[str, float]:
    """Return what each thing costs: in rounds of the calibration loop, one of which decodes a message of each agent."""
    gc.collect()
    gc.disable()  # pauses depend on what else is in this process
    try:
        with tempfile.TemporaryDirectory(prefix="unicron-small-") as folder:
            small = _Small(Path(folder), agents)
            try:
                return _measured(small, agents)
            finally:
                small.simulation.close()
    finally:
        gc.enable()


def _measured(small: _Small, agents: int) -> dict[str, float]:
    found = {"form": small.lines.cost(small.form)}
    small.calm()
    found["steady"] = min(small.lines.cost(small.steady) for _ in range(TIMES)) / STEADY_SECONDS
    places = [(turn * 2 + 1) * agents // (2 * TIMES) for turn in range(TIMES)]
    alone = [small.fail({element: [element * RANKS + turn]}) for turn, element in enumerate(places)]
    found["break"], found["plan"] = (min(each) for each in zip(*alone, strict=True))
    many = [
        small.fail({element: list(small.simulation.agents[element].ranks) for element in range(turn + 5, agents, 20)})
        for turn in range(TIMES)
    ]
    found["mass_break"], found["mass_plan"] = (min(each) for each in zip(*many, strict=True))
    found["all_at_once"] = small.lines.cost(small.all_at_once)
    return found


if __name__ == "__main__":
    print(json.dumps({name: round(value, 2) for name, value in measure(*map(int, sys.argv[1:])).items()}))
