"""Copies of gradients from before their reduce, which overwrites them whether it succeeds or fails.

The setting UNICRON_SNAPSHOT chooses their place, because they take memory that the training could use:

====== ======================================== ========================================================
value  bytes for each parameter of a rank       cost of a loss after the reduce has begun
====== ======================================== ========================================================
card   4 (2 with gradients in bf16) on the card nothing: the copies are put back
host   as many, in pinned memory of the node    nothing; but each copy goes over the bus before its reduce
none   0                                        the replica computes its part of the iteration again
====== ======================================== ========================================================

With a distributed optimizer a reduce overwrites, and the copies have, one data-parallel size'th of the gradients.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping

import torch

SETTING = "UNICRON_SNAPSHOT"


class Where(enum.StrEnum):
    """The place of the copies."""

    CARD = "card"
    HOST = "host"
    NONE = "none"


def chosen_place(environment: Mapping[str, str] = os.environ) -> Where:
    """Read the setting. Raises ValueError for an unknown word."""
    text = environment.get(SETTING) or Where.CARD.value
    try:
        return Where(text)
    except ValueError:
        raise ValueError(f"{SETTING}={text!r}: write {', '.join(Where)}") from None


class Snapshots:
    """The copies of one rank; the memory is kept for the next iteration."""

    def __init__(self, where: Where):
        self.where = where
        self._copies: dict[object, torch.Tensor] = {}  # key -> copy
        self._places: dict[object, torch.Tensor] = {}  # key -> the place of a copy, for the present reduce

    def copy_before_reduce(self, key: object, place: torch.Tensor) -> None:
        """Copy what a reduce is about to overwrite; `key` is the same for a bucket in every iteration."""
        self._places[key] = place
        if self.where is Where.NONE:
            return
        copy = self._copies.get(key)
        if copy is None or copy.shape != place.shape:
            copy = self._copies[key] = self._room(place)
        copy.copy_(place, non_blocking=True)  # before the reduce, by the order of the stream

    def _room(self, place: torch.Tensor) -> torch.Tensor:
        if self.where is Where.HOST:
            return torch.empty(place.shape, dtype=place.dtype, pin_memory=place.device.type == "cuda")
        return torch.empty_like(place)

    @property
    def undoable(self) -> bool:
        """Whether all that was reduced since :meth:`forget` can be put back."""
        return self.where is not Where.NONE or not self._places

    def restore(self) -> None:
        """Undo every reduce since :meth:`forget`: the buffers have this rank's unreduced sums again, even if the
        data-parallel size has changed. Check :attr:`undoable` first."""
        assert self.undoable
        for key, place in self._places.items():
            place.copy_(self._copies[key], non_blocking=True)
        self._places.clear()

    def forget(self) -> None:
        """Forget the copies: the gradients are zeroed."""
        self._places.clear()

    def size(self, places: Iterable[torch.Tensor]) -> int:
        """Return the bytes that copies of these tensors take."""
        return 0 if self.where is Where.NONE else sum(place.numel() * place.element_size() for place in places)
