"""A copy that is made again and again is the one that is made once."""

from __future__ import annotations

import torch

from unicron.transition.snapshot.contents import ALIGN, SMALL, Contents, Copier, fill


def test_a_repeated_copy_is_of_the_present_values_and_leaves_zeros_between_them() -> None:
    large = torch.rand(SMALL)
    odd = torch.arange(ALIGN + 5, dtype=torch.uint8)
    strided = torch.rand(6, 4).t()[1]
    moving = torch.rand(3)
    found = Contents([large, odd, torch.empty(0), strided, torch.tensor([True]), moving], [5], b"")
    into, once = (torch.full((found.size,), 255, dtype=torch.uint8) for _ in range(2))
    copier = Copier(found.tensors, found.offsets, into, found.moving)
    for turn in range(3):
        large += turn
        odd += 1
        strided -= turn
        moving *= 2.0
        still = found.still()
        moving.zero_()  # its copy counts
        copier.copy(still)
        fill(still, found.offsets, once)
        assert torch.equal(into, once)
        moving += still[5]
