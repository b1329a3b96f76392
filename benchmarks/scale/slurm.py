"""A Slurm for simulated nodes, inside the controller's process, which reports starts and ends to the simulator.

It runs no commands, so their cost is not measured. Otherwise it is used like the real one: the controller's threads
call it, and each poll lists all nodes and elements anew.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from benchmarks.scale.agents import JOB, address_of
from tests.support.world import FakeSlurm


def names(count: int) -> list[str]:
    """Return the names of all nodes, as `FakeSlurm` has them."""
    return [f"n{index}" for index in range(1, count + 1)]


def _serialized(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes one call at a time, and reports to the simulator what it has started and ended."""

    @wraps(call)
    def wrapped(self: LiveSlurm, *arguments: Any) -> Any:
        with self.lock:
            answer = call(self, *arguments)
            self.report()
            return answer

    return wrapped


class LiveSlurm(FakeSlurm):
    """`elements` elements on `nodes` nodes, whose slurmd answers at `port` of their address.

    The simulator listens at the socket with the path `simulator`. Raises OSError when it does not.
    """

    def __init__(self, nodes: int, elements: int, port: int, simulator: str) -> None:
        super().__init__(nodes)
        self.lock = threading.RLock()
        for index, name in enumerate(names(nodes)):
            self.node_facts[name] = {"address": address_of(index), "port": port}
        self._shown: dict[int, str | None] = {}
        self._simulator = socket.socket(socket.AF_UNIX)
        self._simulator.connect(simulator)
        with self.lock:
            self.submit(JOB, elements)
            self.report()
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self) -> None:
        """Send a line [element, node or null] for each element that has started or ended."""
        lines = []
        for (_, element), entry in self.queue.items():
            node = entry["node"] if entry["state"] == "RUNNING" else None
            if self._shown.get(element) != node:
                self._shown[element] = node
                lines.append(json.dumps([element, node]) + "\n")
        self._simulator.sendall("".join(lines).encode())

    def _listen(self) -> None:
        """Read the lines [node, seconds] by which the simulator reports that a slurmd has started again."""
        with self._simulator.makefile("r") as lines:
            for line in lines:
                node, at = json.loads(line)
                with self.lock:
                    self.starts[node] = at

    # ------------------------------------------------------------ what the controller asks for
    def private_data(self) -> frozenset[str]:
        return frozenset()

    def kill_wait(self) -> float:
        return 30.0

    def grace(self) -> dict[str, float]:
        return {}

    def shrinks(self) -> int:
        return 0

    def domains(self) -> dict[str, str]:
        return {}

    def start_now(self, job: str, element: int) -> None:
        super().start_now(job, element)
        self.schedule()


READS = ("nodes", "elements", "others")
ORDERS = ("down", "drain", "resume", "requeue", "requeue_hold", "release", "pin", "start_now")
for _name in (*READS, *ORDERS):
    setattr(LiveSlurm, _name, _serialized(getattr(LiveSlurm, _name)))
