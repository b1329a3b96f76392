"""How fast this machine is at what the controller does: a fixed loop of plain Python and of msgspec, which none of the
controller's code is in. Figures in units of it can be compared between machines, and on a busy one.
"""

from __future__ import annotations

import time

import msgspec


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
