"""What the nodes of a world have in common: which state is chosen, and who sends what to whom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron_transition.snapshot import tensor_transfer
from unicron_transition.snapshot.common import Choice, There, World, choices


def there(node: int, place: int, size: int = 4, iteration: int = 7, base: int = 1, name: str = "x") -> There:
    return There(node, name, Choice(iteration, False, base), place, size)


def world(size: int = 4, per_node: int = 2) -> World:
    return World(Path("/nowhere"), 0, size, 0, per_node)


def test_the_newest_of_which_every_part_is_somewhere_in_one_generation():
    whole = [there(0, place) for place in range(4)]
    torn = [there(0, place, iteration=9, base=1) for place in (0, 1)] + [
        there(2, place, iteration=9, base=2) for place in (2, 3)
    ]
    assert choices([*whole, *torn], 4) == [Choice(7, False, 1)]
    assert choices(whole, 3) == [], "the world is of another size"
    alike = There(2, "y", Choice(8, True, 1), 0, 17)
    assert choices([*whole, alike], 4) == [Choice(8, True, 1), Choice(7, False, 1)]


def test_own_nodes_first_then_the_node_that_gives_least_and_its_ranks_take_turns():
    ways = world().ways([there(0, 0), there(2, 0), there(0, 1), there(2, 2), there(0, 3)])
    assert [(way.image.node, way.sender) for way in ways] == [(0, 0), (0, 1), (2, 2), (0, 0)]
    ways = world().ways([there(2, 0), there(2, 1), there(0, 2), there(0, 3)])
    assert [way.sender for way in ways] == [2, 3, 0, 1]
    ways = world(6).ways([there(node, place, 6) for place in range(6) for node in (2, 4) if place < 2 or node == 2])
    assert {way.image.node for way in ways[:2]} == {2, 4}, "spread over those that have it"
    assert world().ways([there(0, 0), there(0, 1), there(0, 2)]) is None


def test_what_all_ranks_have_saved_alike_comes_from_any_image_whatever_the_world_was():
    ways = world(6).ways([There(node, "y", Choice(8, True, 1), 0, 17) for node in (0, 2)])
    assert [way.sender for way in ways] == [0, 1, 2, 3, 0, 2], "the new node's ranks ask different nodes"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=40))
def test_every_rank_gets_its_own_from_who_has_it_or_nobody_gets_anything(images):
    found = [there(2 * node, place, 8) for node, place in images]
    ways = world(8).ways(found)
    assert (ways is None) == ({place for _, place in images} != set(range(8)))
    for rank, way in enumerate(ways or []):
        assert way.image in found and way.image.place == rank
        assert way.sender // 2 * 2 == way.image.node, "a rank of the node that has it"
        if any(each.place == rank and each.node == rank // 2 * 2 for each in found):
            assert way.sender == rank


def test_the_images_are_gone_through_once_however_many_ranks_there_are():
    class Counted(list):
        times = 0

        def __iter__(self):
            self.times += 1
            return super().__iter__()

    images = Counted(there(2 * (place // 2), place, 64) for place in range(64))
    assert len(world(64).ways(images)) == 64 and images.times == 1


def sent_by_itself(monkeypatch, damaged: int | None = None):
    """What rank 3 gets from a rank that reads the same image; the byte of that number changes on its way."""
    content = b"head", torch.arange(40, dtype=torch.uint8)

    def send(outgoing, incoming, *rest) -> None:
        for rank, places in incoming.items():
            wire = torch.cat([tensor.view(torch.uint8) for tensor in outgoing[rank]])
            if damaged is not None and len(wire) == 44:
                wire[damaged] ^= 4
            for place, part in zip(places, wire.split([place.nbytes for place in places]), strict=True):
                place.copy_(part.view(place.dtype))

    monkeypatch.setattr(tensor_transfer, "send", send)
    monkeypatch.setattr(World, "device", torch.device("cpu"))
    return content, world()._exchange({3: content}, 3)


def test_what_a_rank_gets_is_what_another_has_read(monkeypatch):
    (head, data), (got_head, got_data) = sent_by_itself(monkeypatch)
    assert got_head == head and torch.equal(got_data, data) and got_data is not data
    assert world()._exchange({3: None}, 3) is None, "it could not be read"


@pytest.mark.parametrize("damaged", [0, 3, 4, 43])
def test_what_was_spoiled_on_its_way_is_seen_and_said(monkeypatch, capsys, damaged):
    _, got = sent_by_itself(monkeypatch, damaged)
    assert got is None
    assert re.search("rank 3 .* damaged", capsys.readouterr().err)
