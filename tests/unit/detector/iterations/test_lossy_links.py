"""Whom lost packets point at."""

from __future__ import annotations

import random

import pytest

from tests.support.depth import cases
from unicron_detector.iterations.lossy_links import blame

NODES = [f"n{number}" for number in range(8)]
RING = [(NODES[i], NODES[(i + 1) % 8]) for i in range(8)]


def losses(lossy: dict[str, float], links=RING, sent: float = 1000.0) -> dict:
    """Each end of a link loses its share."""
    return {(a, b): (sent, sent * (lossy.get(a, 0.0) + lossy.get(b, 0.0))) for a, b in links}


def test_the_node_that_explains_most_lossy_connections_is_named_and_not_its_neighbours():
    found = blame(losses({"n3": 0.2}), NODES)
    assert found.nodes == {"n3": pytest.approx(0.2)} and not found.links
    assert blame(losses({"n1": 0.2, "n5": 0.1}), NODES).nodes.keys() == {"n1", "n5"}


def test_of_one_lossy_link_either_end_may_be_at_fault():
    found = blame({("n1", "n2"): (1000.0, 200.0), ("n2", "n1"): (10.0, 0.0)}, NODES)
    assert not found.nodes and found.links.keys() == {("n1", "n2")}


def test_a_few_packets_to_others_decide_between_the_ends_of_a_link():
    few = {("n2", "10.0.0.1"): (15.0, 3.0)}  # to the controller
    assert blame({("n1", "n2"): (1000.0, 200.0), **few}, NODES).nodes.keys() == {"n2"}


def test_no_node_is_named_for_a_host_that_all_lose_packets_to_or_for_the_network():
    assert not blame({(node, "10.0.0.1"): (1000.0, 200.0) for node in NODES}, NODES).nodes
    every = blame(losses(dict.fromkeys(NODES, 0.1)), NODES)
    assert not every.nodes and not every.links


def test_what_a_busy_network_drops_is_nobodys_fault():
    draw = random.Random(3)
    for _ in range(cases(2000)):
        few = {link: (5000.0, float(draw.choice([0, 0, 0, 1, 2, 10, 60]))) for link in RING}
        found = blame(few, NODES)
        assert not found.nodes and not found.links, few
