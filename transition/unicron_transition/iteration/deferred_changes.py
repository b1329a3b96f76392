"""Changes of an iteration beside the parameters, which are made only when it is committed.

Megatron updates the loss scale of fp16, and the biases of experts, before all that communicates is over. Should the
iteration be reduced once more after that, its micro-batches would be computed with other values than those that are in
the gradient. So these changes wait for the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DeferredChanges:
    """The changes of the iteration at hand."""

    def __init__(self) -> None:
        self._changes: list[Callable[[], None]] = []

    def add(self, change: Callable[[], None]) -> None:
        """Make this change at the commit."""
        self._changes.append(change)

    def apply(self) -> None:
        """Make the changes: the iteration is committed."""
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def forget(self) -> None:
        """Drop the changes: the iteration is reduced once more, or the state after it has come from elsewhere."""
        self._changes.clear()


# ------------------------------------------------------------ the loss scale of fp16
def scalers(optimizer: Any) -> list[Any]:
    """Megatron's gradient scalers in what the script calls its optimizer."""
    found = (getattr(each, "grad_scaler", None) for each in getattr(optimizer, "chained_optimizers", [optimizer]))
    return [scaler for scaler in found if scaler is not None]


def hold_scalers(optimizer: Any, pending: DeferredChanges) -> None:
    """Make every scaler's update wait in `pending`."""

    def later(update: Callable[[bool], None]) -> Callable[[bool], None]:
        return lambda found_inf: pending.add(lambda: update(found_inf))

    for scaler in scalers(optimizer):
        scaler.update = later(scaler.update)
