"""Figures beside their goals, ratios of neighbours, and the commit and machine of a run."""

from __future__ import annotations

import functools
import math
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


@functools.cache
def commit() -> str:
    """Return the checkout's commit, with a + if it has changes; "unknown" without a checkout or git."""
    try:
        words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Describe this machine in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Python {platform.python_version()}"


def relative_difference(loss: float, reference: float) -> float:
    """Return the relative difference of two losses; infinite if one is not finite, absolute if the reference is 0."""
    found = abs(loss - reference) / (abs(reference) or 1.0)
    return found if math.isfinite(found) else math.inf


def turns(number: int, first: T, second: T) -> tuple[T, T]:
    """Return the order of pair `number`: a b, then b a, so that a slow minute of the machine hits both."""
    return (first, second) if number % 2 == 0 else (second, first)


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios of neighbours."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return low, middle, high


def median_range(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by bootstrap."""
    draw = random.Random(0)
    found = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return found[draws // 40], found[-draws // 40]


class Figure(msgspec.Struct, frozen=True):
    """One figure and its goal."""

    what: str
    value: float
    unit: str = ""
    most: float | None = None
    """The goal is at most this."""
    least: float | None = None
    """The goal is at least this."""

    @property
    def met(self) -> bool:
        """Whether the goal is met, or there is none."""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def goal(self) -> str:
        """The goal as text."""
        if self.most is not None:
            return f"goal: <= {self.most:g} {self.unit}"
        return f"goal: >= {self.least:g} {self.unit}" if self.least is not None else ""

    def line(self) -> str:
        """Return the line to print."""
        line = f"{self.what:<66}{self.value:>10.5g} {self.unit:<8}   {self.goal}".rstrip()
        return line if self.met else f"{line}   MISSED"


class Report(msgspec.Struct):
    """Figures of one case, which are printed at once and written as JSON at the end."""

    case: str
    sizes: Any
    command: str = ""
    """Repeats it."""
    commit: str = msgspec.field(default_factory=commit)
    machine: str = msgspec.field(default_factory=machine)
    load: float = msgspec.field(default_factory=lambda: os.getloadavg()[0])
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    """More results for the JSON file, by name."""

    def head(self) -> None:
        """Print the case, its sizes, the machine and the commit."""
        sizes = " ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(self.sizes).items())
        print(f"{self.case} {sizes}\n{self.machine}, load {self.load:.1f}, commit {self.commit}", flush=True)

    def figure(
        self, what: str, value: float, unit: str = "", most: float | None = None, least: float | None = None
    ) -> None:
        """Print and keep a figure."""
        self.figures.append(Figure(what, value, unit, most, least))
        print(self.figures[-1].line(), flush=True)

    def ratio(self, what: str, ours: Sequence[float], theirs: Sequence[float], most: float | None) -> None:
        """Print and keep the median of the neighbours' ratios, and print its spread."""
        low, middle, high = quartiles(ours, theirs)
        least, largest = median_range([a / b for a, b in zip(ours, theirs, strict=True)])
        self.text(f"{len(ours)} ratios: quartiles {low:.4f}..{high:.4f}, 95 % of medians {least:.4f}..{largest:.4f}")
        self.figure(what, middle, "", most)

    def row(self, first: object, *cells: object, label: int = 38, width: int = 9, digits: int = 2) -> None:
        """Print a row of a table, with `digits` digits after the point."""
        texts = [f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell) for cell in cells]
        self.text(f"{first!s:<{label}}" + "".join(f"{text:>{width}}" for text in texts))

    def text(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


def median_seconds(work: Callable[[], object], runs: int, clock: Callable[[], float]) -> float:
    """Return the median seconds of several runs by `clock`, after one run to warm up."""
    work()
    found = []
    for _ in range(runs):
        began = clock()
        work()
        found.append(clock() - began)
    return statistics.median(found)
