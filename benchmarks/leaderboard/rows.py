"""The results: one row a repetition as JSON, medians and ranges as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

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
MAY_NEVER_COME = ("next_step_seconds", "full_strength_seconds")


class Row(msgspec.Struct):
    """One failure of one system. survived: None where it could not be tried; `why` says the reason, or what is to be
    known of the figures. iterations_compared: whose losses loss_difference is of. commit: of Unicron's checkout."""

    system: str
    version: str
    failure: str
    survived: bool | None
    next_step_seconds: float | None = None
    full_strength_seconds: float | None = None
    iterations_lost: int | None = None
    micro_batches_again: int | None = None
    micro_batches_dropped: int | None = None
    ranks_at_end: int | None = None
    loss_difference: float | None = None
    repetition: int = 0
    why: str = ""
    machine: str = ""
    commit: str = ""
    longest_pause_seconds: float | None = None
    iterations_compared: int | None = None


class Share(msgspec.Struct):
    """The useful time of a system under a stream of failures, over its own undisturbed rate: the mean of the spells
    without failures before, between and after them, `undisturbed` in their order. share_of_first: over the first of
    them alone, in which no rank had been started again. struck: failures that found whom to strike; None where that
    was not counted. missed: those that did not. loss_difference and iterations_compared are as a Row's."""

    system: str
    useful_share: float | None
    version: str = ""
    minutes: float = 0.0
    undisturbed: list[float] = []
    """Micro-batches a second."""
    share_of_first: float | None = None
    operator: int = 0
    """Times that an operator had to start the whole job again."""
    struck: int | None = None
    missed: int = 0
    why: str = ""
    machine: str = ""
    commit: str = ""
    loss_difference: float | None = None
    iterations_compared: int | None = None


def encode(row: Row | Share) -> dict[str, Any]:
    """For JSON, which has no infinity: that is text."""
    objects = msgspec.to_builtins(row).items()
    return {key: str(it) if isinstance(it, float) and not math.isfinite(it) else it for key, it in objects}


def decode(objects: Any) -> list[Row | Share]:
    """Return what was written as JSON. Raises msgspec.ValidationError for anything else."""
    rows = msgspec.convert(objects, list[dict[str, Any]])
    return [msgspec.convert(each, Share if "useful_share" in each else Row, strict=False) for each in rows]


def spread(values: Sequence[float], digits: Callable[[float], str]) -> str:
    """Median and, where the values differ by what is shown of them, their range."""
    middle, least, most = (digits(of(values)) for of in (statistics.median, min, max))
    return middle if least == most else f"{middle} ({least}..{most})"


def cell(rows: Sequence[Row], column: str) -> str:
    """One figure of all repetitions; some may not have it, which did not happen there or was not noted."""
    values = [value for row in rows if (value := getattr(row, column)) is not None]
    if not values:
        return "never" if column in MAY_NEVER_COME and any(row.survived for row in rows) else "-"
    digits = "{:.1e}".format if column == "loss_difference" else "{:.2f}".format
    if all(isinstance(value, int) for value in values):
        digits = "{:.0f}".format
    missing = len(rows) - len(values)
    word = "never" if column in MAY_NEVER_COME else "not noted"
    return spread(values, digits) + (f", {word} {missing}x" if missing else "")


def survived(rows: Sequence[Row]) -> str:
    """yes, no, or how often."""
    if any(row.survived is None for row in rows):
        return "not tried"
    good = sum(bool(row.survived) for row in rows)
    return "yes" if good == len(rows) else "no" if not good else f"{good} of {len(rows)}"


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table of failures, a list of cells a line: by failure, then by system, as they came."""
    found = []
    for failure in dict.fromkeys(row.failure for row in rows):
        mine = [row for row in rows if row.failure == failure]
        for system in dict.fromkeys(row.system for row in rows):
            some = [row for row in mine if row.system == system]
            if some:
                why = "; ".join(dict.fromkeys(row.why for row in some if row.why))
                cells = [cell(some, column) for column in COLUMNS]
                found.append([failure, system, survived(some), *cells, why])
    return found


def taken(rows: Sequence[Row | Share]) -> str:
    """On which machines and at which commits, as the rows themselves say."""
    commits = list(dict.fromkeys(row.commit or "not noted" for row in rows))
    machines = dict.fromkeys(row.machine or "machine not noted" for row in rows)
    return f"{'; '.join(machines)}; commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"


def heads() -> list[str]:
    """Return the heads of those lines."""
    return ["failure", "system", "survived", *COLUMNS.values(), "remarks"]


def rate(row: Share) -> float | None:
    """Micro-batches a second by which the training came forward under the stream."""
    if row.useful_share is None or not row.undisturbed:
        return None
    return row.useful_share * statistics.mean(row.undisturbed)


def of_the_best(row: Share, rows: Sequence[Share]) -> float | None:
    """The share of that rate in the best rate that any system of the same run had undisturbed: a system that is slow
    undisturbed has a large share of its own rate, and trains no more for that."""
    run = [one for one in rows if (one.machine, one.commit) == (row.machine, row.commit) and one.undisturbed]
    useful = rate(row)
    return None if useful is None else useful / max(statistics.mean(one.undisturbed) for one in run)


def shares(rows: Sequence[Share]) -> list[list[str]]:
    """The table of the stream."""

    def shown(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return [
        [
            row.system,
            shown(rate(row), 1),
            shown(of_the_best(row, rows)),
            shown(row.useful_share),
            shown(row.share_of_first),
            f"{row.minutes:g}",
            ", ".join(f"{rate:.1f}" for rate in row.undisturbed) or "-",
            "-" if row.struck is None else f"{row.struck} of {row.struck + row.missed}",
            str(row.operator),
            "-" if row.loss_difference is None else f"{row.loss_difference:.1e}",
            "-" if row.iterations_compared is None else str(row.iterations_compared),
            row.why,
        ]
        for row in rows
    ]


SHARE_HEADS = ["system", "useful micro-batches/s", "of the best undisturbed rate", "of its own", "of its first minute"]
SHARE_HEADS += [
    "minutes",
    "micro-batches/s in the undisturbed minutes",
    "failures that hit a rank",
    "restarted by the benchmark",
]
SHARE_HEADS += [COLUMNS["loss_difference"], COLUMNS["iterations_compared"], "remarks"]


def table(title: str, heads: Sequence[str], body: Iterable[Sequence[str]]) -> Table:
    """For the terminal."""
    made = Table(title=title, title_justify="left")
    for head in heads:
        made.add_column(head, overflow="fold")
    for cells in body:
        made.add_row(*cells)
    return made


def markdown(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """For docs/leaderboard.md."""
    marks = ["|".join(["", *cells, ""]) for cells in (heads, ["---"] * len(heads), *body)]
    return "\n".join(marks)
