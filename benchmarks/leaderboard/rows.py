"""The results: one row a repetition as JSON, medians and ranges as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

COLUMNS: dict[str, str] = {
    "next_step_seconds": "next step, s",
    "full_strength_seconds": "full strength, s",
    "longest_pause_seconds": "longest pause, s",
    "iterations_lost": "iterations lost",
    "micro_batches_again": "micro-batches again",
    "micro_batches_dropped": "dropped",
    "ranks_at_end": "ranks at the end",
    "loss_difference": "loss difference",
    "iterations_compared": "of iterations",
}
HEADS = ["failure", "system", "survived", *COLUMNS.values(), "remarks"]
SHARE_HEADS = [
    "system",
    "useful micro-batches/s",
    "of the best undisturbed rate",
    "of its own",
    "of its first minute",
    "minutes",
    "micro-batches/s in the undisturbed minutes",
    "failures that hit a rank",
    "restarted by the benchmark",
    COLUMNS["loss_difference"],
    COLUMNS["iterations_compared"],
    "remarks",
]


class Row(msgspec.Struct):
    """One failure of one system."""

    system: str
    version: str
    failure: str
    survived: bool | None
    """None if it could not be tried."""
    next_step_seconds: float | None = None
    full_strength_seconds: float | None = None
    iterations_lost: int | None = None
    micro_batches_again: int | None = None
    micro_batches_dropped: int | None = None
    ranks_at_end: int | None = None
    loss_difference: float | None = None
    repetition: int = 0
    why: str = ""
    """Why it could not be tried, or a remark."""
    machine: str = ""
    commit: str = ""
    """The commit of Unicron's checkout."""
    longest_pause_seconds: float | None = None
    iterations_compared: int | None = None
    """Iterations whose losses were compared."""
    model: str = "dp"


class Share(msgspec.Struct):
    """The useful time of a system under a stream of failures."""

    system: str
    useful_share: float | None
    """Of its own undisturbed rate, the mean of the minutes without failures."""
    version: str = ""
    minutes: float = 0.0
    undisturbed: list[float] = []
    """Micro-batches a second in each undisturbed minute."""
    share_of_first: float | None = None
    """Of the first minute's rate alone, in which no rank had been restarted."""
    operator: int = 0
    """Times that an operator had to start the whole job again."""
    struck: int = 0
    """Failures that hit a rank."""
    missed: int = 0
    """Failures that found no rank to hit."""
    why: str = ""
    machine: str = ""
    commit: str = ""
    loss_difference: float | None = None
    iterations_compared: int | None = None
    model: str = "dp"


def encode(row: Row | Share) -> dict[str, Any]:
    """Return a row for JSON, which has no infinity: that is text."""
    objects = msgspec.to_builtins(row).items()
    return {key: str(it) if isinstance(it, float) and not math.isfinite(it) else it for key, it in objects}


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table of failures, a list of cells a line: by failure, then by system, in their order."""
    found = []
    for failure in dict.fromkeys(row.failure for row in rows):
        for system in dict.fromkeys(row.system for row in rows):
            some = [row for row in rows if (row.failure, row.system) == (failure, system)]
            if some:
                why = "; ".join(dict.fromkeys(row.why for row in some if row.why))
                found.append([failure, system, survived(some), *(cell(some, column) for column in COLUMNS), why])
    return found


def survived(rows: Sequence[Row]) -> str:
    """Return yes, no, or how often."""
    if any(row.survived is None for row in rows):
        return "not tried"
    good = sum(bool(row.survived) for row in rows)
    return "yes" if good == len(rows) else "no" if not good else f"{good} of {len(rows)}"


def cell(rows: Sequence[Row], column: str) -> str:
    """Return one figure of all repetitions, some of which may lack it."""
    values = [value for row in rows if (value := getattr(row, column)) is not None]
    word = "never" if column in ("next_step_seconds", "full_strength_seconds") else "-"
    if not values:
        return word if any(row.survived for row in rows) else "-"
    digits = "{:.1e}".format if column == "loss_difference" else "{:.2f}".format
    if all(isinstance(value, int) for value in values):
        digits = "{:.0f}".format
    missing = len(rows) - len(values)
    return spread(values, digits) + (f", {word} {missing}x" if missing else "")


def spread(values: Sequence[float], digits: Callable[[float], str]) -> str:
    """Return the median, and the range if it shows with these digits."""
    middle, least, most = (digits(of(values)) for of in (statistics.median, min, max))
    return middle if least == most else f"{middle} ({least}..{most})"


def shares(rows: Sequence[Share]) -> list[list[str]]:
    """Return the table of the stream.

    The share of the best undisturbed rate compares the systems: a system that is slow undisturbed has a large share of
    its own rate without training more.
    """

    def shown(value: float | None, digits: str) -> str:
        return "-" if value is None else f"{value:{digits}}"

    best = max((statistics.mean(row.undisturbed) for row in rows if row.undisturbed), default=math.nan)
    found = []
    for row in rows:
        rate = row.useful_share and row.useful_share * statistics.mean(row.undisturbed)
        cells = [row.system, shown(rate, ".1f"), shown(None if rate is None else rate / best, ".3f")]
        cells += [shown(row.useful_share, ".3f"), shown(row.share_of_first, ".3f"), f"{row.minutes:g}"]
        cells += [", ".join(f"{each:.1f}" for each in row.undisturbed) or "-"]
        cells += [f"{row.struck} of {row.struck + row.missed}", str(row.operator)]
        found.append([*cells, shown(row.loss_difference, ".1e"), shown(row.iterations_compared, "d"), row.why])
    return found


def markdown(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table as docs/leaderboard.md has them."""
    return "\n".join("|".join(["", *cells, ""]) for cells in (heads, ["---"] * len(heads), *body))
