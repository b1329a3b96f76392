"""What ranks send each other: messages of a limited size, and checksums in which any damage shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_transition.snapshot import tensor_transfer


def test_messages_are_full_and_in_order(monkeypatch):
    monkeypatch.setattr(tensor_transfer, "PIECE", 16)
    tensors = [torch.arange(5.0), torch.empty(0), torch.arange(5.0, 6.0), torch.arange(6.0, 15.0)]
    messages = [torch.cat(message).tolist() for message in tensor_transfer._messages(tensors)]
    assert messages == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14]]
    assert list(tensor_transfer._messages([])) == []


# ------------------------------------------------------------ checksums
def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a GPU, here on the CPU."""
    return tensor_transfer.sum_on_gpu(tensor.contiguous().reshape(-1).view(torch.uint8))


both = pytest.mark.parametrize("checksum", [tensor_transfer.checksum, on_gpu])


@both
@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_no_single_wrong_byte_goes_unseen(checksum, data, draw):
    good = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    place = draw.draw(st.integers(0, len(data) - 1))
    bad = good.clone()
    bad[place] ^= draw.draw(st.integers(1, 255))
    assert not torch.equal(checksum(good), checksum(bad))


@both
@given(
    st.integers(0, 2**32),
    st.just(63) | st.integers(0, 63),
    st.lists(st.integers(0, 999), min_size=2, max_size=40, unique=True),
)
def test_one_line_of_a_bus_that_is_wrong_now_and_then_shows(checksum, seed, bit, places):
    """Defect: two flips of the top bit cancelled each other, as the signs of any even number of values did."""
    good = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(seed))
    bad = good.clone()
    bad[places] ^= -(2**63) if bit == 63 else 1 << bit
    assert not torch.equal(checksum(good), checksum(bad))


@both
def test_the_checksum_sees_order_and_works_in_pieces(checksum, monkeypatch):
    tensor = torch.randn(1001)
    whole = checksum(tensor)
    monkeypatch.setattr(tensor_transfer, "CHUNK", 16)
    assert torch.equal(checksum(tensor), whole), "the pieces' size makes no difference"
    swapped = tensor.clone()
    swapped[[2, 500]] = tensor[[500, 2]]
    assert not torch.equal(checksum(swapped), whole)
    assert torch.equal(checksum(torch.cat([torch.zeros(1), tensor])[1:]), whole), "wherever it lies in memory"


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype_and_shape_has_a_checksum(checksum, dtype):
    for tensor in (torch.ones(3, 7), torch.ones(0), torch.tensor(1)):
        found = checksum(tensor.to(dtype))
        assert found.shape == (2,) and found.dtype == torch.int64


def test_the_checksum_of_several_tensors_sees_their_order_and_each_of_them():
    one, other = torch.arange(5.0), torch.arange(3)
    found = tensor_transfer.checksum(one, other)
    assert torch.equal(tensor_transfer.checksum(one.clone(), other.clone()), found)
    for wrong in ((other, one), (one,), (one, other + 1), (one + 1, other), (one, one)):
        assert not torch.equal(tensor_transfer.checksum(*wrong), found)
