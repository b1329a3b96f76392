"""Silent faults: which number of which tensor, and which bit of it."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from unicron_detector.chaos.inject import Flip, injector
from unicron_transition.iteration import flips


@pytest.fixture(autouse=True)
def no_faults():
    yield
    injector._flips.clear()


def order(fault: str, seconds: float = 0.0) -> None:
    injector.on_order({"fault": fault, "seconds": seconds})


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_bit_of_every_dtype_flips_alone(dtype):
    for bit in range(8 * dtype.itemsize):
        tensor = torch.tensor([[0.5, 1.0], [1.5, 2.0]], dtype=torch.float32).to(dtype).t()  # not contiguous
        before = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        flips.flip_bit(tensor, (1, 0), bit)
        after = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        width = dtype.itemsize
        changed = [
            int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
            for a, b in zip(cut(before, width), cut(after, width), strict=True)
        ]
        assert changed == [0, 0, 1 << bit, 0]


def cut(data: bytes, width: int) -> list[bytes]:
    return [data[at : at + width] for at in range(0, len(data), width)]


def test_the_largest_number_is_hit_and_a_tensor_of_zeros_only_if_there_is_no_other():
    tensors = [
        ("zeros", torch.zeros(3)),
        ("counts", torch.ones(3, dtype=torch.int64)),
        ("it", torch.tensor([1.0, -4.0, 2.0])),
    ]
    for _ in range(20):
        assert flips.strike(Flip("weight", 31, once=True), tensors)
    assert [each.tolist() for _, each in tensors] == [[0, 0, 0], [1, 1, 1], [1, -4, 2]], "the sign, twenty times"
    assert (
        flips.strike(Flip("weight", 31, once=True), tensors[:2]) and struct.pack("f", tensors[0][1][0]) == b"\0\0\0\x80"
    )
    assert not flips.strike(Flip("weight", 31, once=True), tensors[1:2])


def test_a_bit_that_the_dtype_does_not_have_flips_nothing_and_says_so(capfd):
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert flips.strike(Flip("weight", 16, once=True), [("it", tensor)])
    assert tensor.tolist() == [1, 1] and "no bit 16 in torch.bfloat16" in capfd.readouterr().err


def test_a_defective_unit_strikes_in_each_forward_pass_and_a_transient_fault_in_one(capfd):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    data = torch.ones(2, 4)
    right = float(model(data).sum().detach())

    def loss() -> float:
        flips.before_forward(model)
        found = model(data).sum()
        found.backward()  # autograd does not notice
        return float(found)

    order("flip:forward:31")
    assert all(loss() != right for _ in range(3))
    assert capfd.readouterr().err.count("flipped bit 31 in the output of Linear") == 1
    order("flip:forward:31:once")
    assert loss() != right and loss() == right
    order("nan:forward")
    assert math.isnan(loss()) and loss() == right


def test_a_fault_waits_for_its_chance_and_none_strikes_without_an_order():
    gradient, sent = torch.ones(3), torch.ones(3)
    flips.after_backward(lambda: pytest.fail("nothing is looked at without an order"))
    order("flip:gradient:once")
    flips.after_backward(lambda: [])
    flips.after_backward(lambda: [("it", gradient)])
    flips.after_backward(lambda: pytest.fail("it was once"))
    assert gradient.tolist() != [1, 1, 1]
    order("flip:wire:30:once")
    flips.before_reduce(sent)
    flips.before_reduce(sent)
    assert math.isinf(sent[0]) and sent[1:].tolist() == [1, 1]


def test_memory_forgets_once():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    chunks = [torch.nn.ModuleDict({"module": model})]
    chunks[0].module = model
    moments = [each for values in optimizer.state.values() for key, each in values.items() if key != "step"]

    def changed(tensors, fault: str) -> int:
        before = [each.detach().clone() for each in tensors]
        order(fault)
        for _ in range(3):
            flips.at_boundary(chunks, optimizer)
        return sum(int((each != was).sum()) for each, was in zip(tensors, before, strict=True))

    assert changed([*model.parameters()], "flip:weight:3") == 1
    assert changed(moments, "flip:moment") == 1
    assert changed([*model.parameters(), *moments], "flip:forward") == 0
