"""Copies of gradients: what is put back, their size, and what cannot be put back."""

from __future__ import annotations

import pytest
import torch

from tests.support.texts import raises_text
from unicron_transition.iteration.gradient_copies import Snapshots, Where, chosen_place


@pytest.mark.parametrize("where", [Where.CARD, Where.HOST])
def test_what_a_reduce_overwrote_is_put_back(where):
    snapshots = Snapshots(where)
    buffer = torch.arange(8.0)
    snapshots.copy_before_reduce("bucket", buffer[2:6])
    buffer.fill_(-1)
    assert snapshots.undoable
    snapshots.restore()
    assert buffer.tolist() == [-1, -1, 2, 3, 4, 5, -1, -1]


def test_a_new_iteration_puts_nothing_of_the_last_one_back():
    snapshots = Snapshots(Where.CARD)
    buffer = torch.ones(4)
    snapshots.copy_before_reduce("bucket", buffer)
    snapshots.forget()
    buffer.zero_()
    snapshots.restore()
    assert not buffer.any()


def test_without_copies_a_reduce_that_has_begun_cannot_be_undone_until_the_gradients_are_zeroed():
    snapshots = Snapshots(Where.NONE)
    assert snapshots.undoable
    snapshots.copy_before_reduce("bucket", torch.ones(4))
    assert not snapshots.undoable
    snapshots.forget()
    assert snapshots.undoable


def test_a_part_of_another_size_gets_new_memory():
    snapshots = Snapshots(Where.CARD)
    buffer = torch.arange(6.0)
    snapshots.copy_before_reduce("bucket", buffer[:2])
    snapshots.forget()
    snapshots.copy_before_reduce("bucket", buffer[:3])
    buffer.zero_()
    snapshots.restore()
    assert buffer.tolist() == [0, 1, 2, 0, 0, 0]


@pytest.mark.parametrize(("where", "size"), [(Where.CARD, 24), (Where.HOST, 24), (Where.NONE, 0)])
def test_what_the_copies_take(where, size):
    places = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)]
    assert Snapshots(where).size(places) == size


def test_the_setting(snapshot):
    assert chosen_place({}) is Where.CARD
    assert chosen_place({"UNICRON_SNAPSHOT": ""}) is Where.CARD
    assert chosen_place({"UNICRON_SNAPSHOT": "host"}) is Where.HOST
    with raises_text(ValueError, snapshot):
        chosen_place({"UNICRON_SNAPSHOT": "disk"})
