"""TensorBoard's event files, read with TensorBoard's own reader."""

from __future__ import annotations

import pytest


def read(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, by tag."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
