"""``python -m benchmarks.scale.small``: the scale benchmark's small form, which `make test` runs.

256 agents of 8 ranks drive the controller's core alone. Its CPU time is in units of a calibration loop that takes turns
with it and uses only Python and msgspec. So the machine's speed and load cancel out.
"""

from __future__ import annotations

import gc
import itertools
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
TIMES = 3  # runs of each part; the shortest counts
CALIBRATE_AFTER = 0.01  # seconds of the controller's CPU time between two runs of the calibration loop
LIMIT = 60.0  # seconds of each wait, by the simulated clock


class Row(msgspec.Struct, array_like=True, gc=False):
    """An object about as large as the status of a rank."""

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
    """A loop over the state of so many nodes, which takes as much memory as the controller's."""

    def __init__(self, nodes: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._messages = [msgspec.msgpack.encode(_message(node)) for node in range(nodes)]
        self._known: list[dict[int, Row]] = [{} for _ in range(nodes)]
        self._since: dict[int, float] = {}
        self._turn = 0
        self.seconds()  # writes the memory for the first time
        self.seconds()

    def seconds(self) -> float:
        """Return the CPU seconds of one message of each node."""
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
    """Lines to a core whose CPU time is counted in rounds of the calibration loop."""

    def __init__(self, folder: Path, calibration: Calibration) -> None:
        super().__init__(folder)
        self._calibration, self._at, self._rounds = calibration, 0.0, list[float]()
        self.used_before = 0.0
        """The seconds used when the agents' last turn ended: what they sent in it has cost nothing yet."""

    def rest(self, seconds: float) -> None:
        self.used_before = self.used
        super().rest(seconds)
        if self.used - self._at >= CALIBRATE_AFTER:
            self._at = self.used
            self._rounds.append(self._calibration.seconds())

    def cost(self, work: Callable[[], object]) -> float:
        """Return the controller's CPU time during `work`, in rounds of the loop at that time."""
        self._rounds = [self._calibration.seconds()]
        began = self.used
        work()
        self._rounds.append(self._calibration.seconds())
        return (self.used - began) / mean(self._rounds)


def measure(agents: int = AGENTS) -> dict[str, float]:
    """Return each part's cost in rounds of the calibration loop, which decodes a message of each agent."""
    gc.collect()
    gc.disable()  # pauses depend on what else is in this process
    try:
        with tempfile.TemporaryDirectory(prefix="unicron-small-") as folder:
            lines = Metered(Path(folder), Calibration(agents))
            simulation = Simulation(lines, agents, RANKS)
            try:
                return _costs(simulation, lines)
            finally:
                simulation.close()
    finally:
        gc.enable()


def _costs(simulation: Simulation, lines: Metered) -> dict[str, float]:
    def form() -> None:
        simulation.start()
        simulation.until(simulation.complete, LIMIT, "all train for the first time")

    def all_at_once() -> None:
        simulation.fail({agent.element: list(agent.ranks) for agent in simulation.agents})
        simulation.until(lambda: len(simulation.started) == simulation.total, LIMIT, "every rank starts again")

    agents = len(simulation.agents)
    found = {"form": lines.cost(form)}
    _calm(simulation)
    found["steady"] = min(lines.cost(lambda: simulation.run(STEADY_SECONDS)) for _ in range(TIMES)) / STEADY_SECONDS
    places = [(turn * 2 + 1) * agents // (2 * TIMES) for turn in range(TIMES)]
    alone = [_fail(simulation, lines, {element: [element * RANKS + turn]}) for turn, element in enumerate(places)]
    found["break"], found["plan"] = (min(each) for each in zip(*alone, strict=True))
    ranks = {agent.element: list(agent.ranks) for agent in simulation.agents}
    hit = [range(turn + 5, agents, 20) for turn in range(TIMES)]
    many = [_fail(simulation, lines, {element: ranks[element] for element in elements}) for elements in hit]
    found["mass_break"], found["mass_plan"] = (min(each) for each in zip(*many, strict=True))
    found["all_at_once"] = lines.cost(all_at_once)
    return found


def _calm(simulation: Simulation) -> None:
    """Wait until the controller knows that all train."""
    simulation.until(simulation.settled, LIMIT, "the controller knows that all train")
    simulation.run(1.0)


def _fail(simulation: Simulation, lines: Metered, victims: dict[int, list[int]]) -> tuple[float, float]:
    """Return the costs from the death to the last survivor's Break, and from there to the last plan.

    The agents answer in the turn in which the last of them gets it. So a part ends before the controller reads that.
    """
    began = simulation.training.began if simulation.training is not None else 0.0
    half = (began + 1.5 * ITERATION_SECONDS - lines.now()) % ITERATION_SECONDS
    simulation.run(half)  # half of the agents have yet to report the last iteration
    used = [lines.used]

    def heal() -> None:
        simulation.fail(victims)
        for wait in (simulation.await_break, simulation.await_plan):
            wait(LIMIT)
            used.append(lines.used_before)

    each = lines.cost(heal) / (lines.used - used[0])  # rounds a second
    stopped, planned = (each * (end - start) for start, end in itertools.pairwise(used))
    simulation.until(simulation.complete, LIMIT, "all train again")
    _calm(simulation)
    return stopped, planned


if __name__ == "__main__":
    print(json.dumps({name: round(value, 2) for name, value in measure(*map(int, sys.argv[1:])).items()}))
