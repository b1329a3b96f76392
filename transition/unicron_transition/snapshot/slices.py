"""Slices of a checkpoint's file: nodes that hold the same state write one each, at the same time
(docs/design/checkpoints.md, "Slices").

A slice is a file like any other, with some of the state's tensors, so every reader of checkpoints can read and check
it. Its name has a digest of the whole state: slices of states that differ never count as one file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from unicron_transition.snapshot.element_types import item_bytes
from unicron_transition.snapshot.image_format import ALIGN, digest
from unicron_transition.snapshot.reading import unpack

LEAST_BYTES = 64 << 20  # of a slice: smaller ones save little time
MOST = 8  # slices of a file: every rank that reads a checkpoint opens all of its files
_NAME = re.compile(r"\.slice-(\d+)-of-(\d+)\.")


class Slice(NamedTuple):
    """The part of a file that one node writes."""

    number: int = 0
    count: int = 1
    """The number of slices of the file."""

    @property
    def text(self) -> str:
        """The text in names, "" for a whole file."""
        return f".slice-{self.number}-of-{self.count}" if self.count > 1 else ""


WHOLE = Slice()


def slices_of(size: int, nodes: int) -> int:
    """Return how many of the nodes that hold a state write a slice of it. size: of the state, in bytes."""
    return max(1, min(nodes, MOST, size // LEAST_BYTES))


def slice_in(path: Path) -> Slice:
    """Return the slice that a file's name gives."""
    match = _NAME.search(path.name)
    return Slice(int(match[1]), int(match[2])) if match else WHOLE


def state_digest(data_digest: bytes, about: bytes) -> str:
    """Return the text in the names of a state's slices. data_digest, about: of the image, and of its head."""
    return digest(data_digest + about).hex()[:8]


def cut_out(about: bytes, size: int, cut: Slice) -> tuple[bytes, int, int]:
    """Return the description of the tensors in a slice, and the range of their bytes in the data. about: that of all
    tensors (`checkpoint_file.Head.about`); size: of the data.

    The state of one parameter is never divided, so slices differ by the largest at most. Raises ValueError, KeyError
    or TypeError for a description that no rank writes.
    """
    found = unpack(about)
    ends, number, at = [], 0, 0  # of the parameters
    for entry in found["index"]:
        numbers = _numbers(entry)
        if numbers != list(range(number, number + len(numbers))):
            raise ValueError("its tensors are not in the order of its parameters")
        number += len(numbers)
        for kind, count in found["tensors"][number - len(numbers) : number]:
            at += -(-count * item_bytes(kind) // ALIGN) * ALIGN
        ends.append((at, number))
    if (at, number) != (size, len(found["tensors"])):
        raise ValueError(f"its tensors have {at} bytes, and its data {size}")
    edges = [(0, 0), *ends]

    def edge(number: int) -> int:
        """Return the first parameter of a slice."""
        if number == cut.count:
            return len(ends)
        return min(range(len(edges)), key=lambda each: abs(edges[each][0] * cut.count - number * size))

    first, last = edge(cut.number), edge(cut.number + 1)
    (begin, before), (end, behind) = edges[first], edges[last]
    index = [_renumbered(entry, before) for entry in found["index"][first:last]]
    return msgpack.packb({"index": index, "tensors": found["tensors"][before:behind]}), begin, end


def _numbers(entry: Any) -> list[int]:
    """Return the numbers of a parameter's tensors, in order."""
    *_, keys, _, values = entry
    return sorted([*keys.values(), *(number for number, _ in values.values())])


def _renumbered(entry: Any, before: int) -> list[Any]:
    """Return the description of a parameter after the first `before` tensors were left out."""
    *place, keys, others, values = entry
    fewer = {key: [number - before, shape] for key, (number, shape) in values.items()}
    return [*place, {key: number - before for key, number in keys.items()}, others, fewer]
