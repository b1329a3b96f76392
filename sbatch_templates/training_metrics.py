"""The metrics of a training run that survives failures: JSON lines, one file per rank slot, merged by the reader.

Every rank writes the line of every iteration that it stepped to its own `PREFIX.slotN`. Only so is no iteration lost:
a rank that writes for all could die between the optimizer step and its line, and nobody else would know. An iteration
therefore has as many lines as it had ranks, in as many files; `read_metrics` makes one record of them and checks that
they agree.

Shell use: `python training_metrics.py PREFIX` prints the merged lines. Needs the standard library only.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # a line of JSON


class MetricsError(ValueError):
    """The files contradict each other, or there are none. The text is one line."""


class MetricsWriter:
    """Appends JSON lines to `PREFIX.slotN`, each in a single write, so that a kill tears at most the last one."""

    def __init__(self, prefix: str | os.PathLike[str], slot: int):
        path = Path(f"{os.fspath(prefix)}.slot{slot}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # the process before this one died in a write; keep its torn line apart

    def write(self, record: Record) -> None:
        """Append `record` (must hold `iteration`, `generation`, `loss`, `time`)."""
        os.write(self._descriptor, json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def read_metrics(prefix: str | os.PathLike[str], tolerance: float = 1e-5) -> list[Record]:
    """The run's records, one per iteration, in order.

    All ranks of one generation must report the same loss, bit for bit. An iteration that was stepped in two
    generations (some ranks before and some after a loss, or in a job that was started again) may differ by
    `tolerance`, relative; returned is the latest generation's record, the earliest written of it. Raises MetricsError
    (one line) for no files or unequal losses.
    """
    paths = sorted(glob.glob(glob.escape(os.fspath(prefix)) + ".slot*"), key=_slot_of)
    if not paths:
        raise MetricsError(
            f"no metrics at {os.fspath(prefix)}.slot*: give the prefix that the training was started with (--metrics)"
        )
    merged: dict[int, Record] = {}
    for path in paths:
        for record in _lines(path):
            iteration = record["iteration"]
            kept = merged.get(iteration)
            if kept is not None:
                _check_equal(kept, record, tolerance, path)
            if kept is None or _precedence(record) > _precedence(kept):
                merged[iteration] = record
    return [merged[iteration] for iteration in sorted(merged)]


def _precedence(record: Record) -> tuple[int, float]:
    return record["generation"], -record["time"]


def _check_equal(one: Record, other: Record, tolerance: float, path: str) -> None:
    allowed = 0.0 if one["generation"] == other["generation"] else tolerance
    both_nan = math.isnan(one["loss"]) and math.isnan(other["loss"])
    if not both_nan and not math.isclose(one["loss"], other["loss"], rel_tol=allowed, abs_tol=0.0):
        raise MetricsError(
            f"iteration {one['iteration']}: loss {one['loss']!r} in generation {one['generation']} and "
            f"{other['loss']!r} in generation {other['generation']} ({path}): models differ, or two runs share it"
        )


def _lines(path: str) -> list[Record]:
    """The whole lines of one file; a line that a kill has torn is not a record."""
    records = []
    for line in Path(path).read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"iteration", "generation", "loss", "time"} <= record.keys():
            records.append(record)
    return records


def _slot_of(path: str) -> int:
    found = re.search(r"\.slot(\d+)$", path)
    return int(found.group(1)) if found else -1


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python training_metrics.py PREFIX", file=sys.stderr)
        return 2
    try:
        for record in read_metrics(arguments[0]):
            print(json.dumps(record))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain again at exit when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MetricsError as error:
        print(f"training_metrics: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
