"""The checksum that agents make is the ranks'."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron.ctl.agent.snapshots import sums
from unicron.transition.snapshot import contents


@given(st.binary(max_size=200), st.sampled_from([0, 1, 7, 8, 1000, (1 << 21) + 16]))
def test_it_is_the_same_without_torch(data: bytes, zeros: int) -> None:
    data = bytes(zeros) + data
    here = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    assert sums.sums(memoryview(data)) == contents.sums(here)
