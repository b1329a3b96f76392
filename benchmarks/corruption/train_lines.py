"""Reads what the ranks of :mod:`benchmarks.corruption.train` note."""

from __future__ import annotations

import json
from pathlib import Path


class Lines:
    """The lines of all ranks."""

    def __init__(self, folder: Path, ranks: int):
        self._files = {slot: folder / f"lines.{slot}" for slot in range(ranks)}
        self._places = dict.fromkeys(self._files, 0)
        self._last = dict.fromkeys(self._files, -1)
        self.steps: dict[int, dict[int, tuple[float, float]]] = {slot: {} for slot in self._files}
        """Slot -> iteration -> (loss, square of the parameters' norm) of the last time that it was trained."""
        self.strikes: dict[int, list[tuple[str, int]]] = {slot: [] for slot in self._files}
        """Slot -> faults that have struck: (text, iteration)."""
        self.last_strike = 0.0
        self.began = dict.fromkeys(self._files, 0.0)
        """Slot -> when its present process began to train."""

    def read(self) -> None:
        """Read the lines since the last call."""
        for slot, path in self._files.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._places[slot])
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._places[slot] += whole
            for line in data[:whole].splitlines():
                self._take(slot, json.loads(line))

    def _take(self, slot: int, line: dict) -> None:
        if "strike" in line:
            self.strikes[slot].append((line["strike"], line["during"]))
            self.last_strike = line["at"]
        elif "began" in line:
            self.began[slot] = line["at"]
        else:
            self.steps[slot][line["iteration"]] = line["loss"], line["norm"]
            self._last[slot] = line["iteration"]

    def now(self) -> int:
        """Return the iteration that all ranks have reached, since they last went back."""
        return min(self._last.values())

    def reached(self) -> int:
        """Return the last iteration that any rank has ever trained."""
        return max((max(steps, default=-1) for steps in self.steps.values()), default=-1)
