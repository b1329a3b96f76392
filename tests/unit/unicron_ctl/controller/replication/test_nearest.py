"""From which node an image is got: the one from which it is there first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.replication import nearest
from unicron_ctl.shared.protocol import structs

SIZE = 1_000_000_000


def job(*rates: dict[int, float], replica: int = 2) -> SimpleNamespace:
    """One agent of one rank a node, each with what it has measured: element -> bytes a second."""
    agents = [AgentView("1", e, f"a{e}", f"n{e}", (b"",), [e], 0.0) for e in range(len(rates))]
    for agent, seen in zip(agents, rates, strict=True):
        agent.status.rates = seen
    return SimpleNamespace(replica=replica, alive=lambda: agents, agent=lambda slot: agents[slot])


def image(place: int, slot: int = 0, size: int = SIZE) -> structs.Image:
    return structs.Image("state", slot, 40, place, 2, 0, 1, 1, "m", size)


def there(job: SimpleNamespace, *elements: int, place: int = 0) -> dict:
    agents = job.alive()
    return {agents[e].node: (agents[e], image(place)) for e in elements}


def reports(*slots: int) -> dict[int, structs.RankStatus]:
    return {slot: structs.RankStatus(state="waiting") for slot in slots}


def test_what_lies_in_the_own_node_is_nearest(snapshot):
    found = job({}, {}, {}, {})
    (way,) = nearest.ways(found, reports(0, 2), [0], {0: there(found, 1, 2)}, {})
    assert (way.receiver.element, way.source.element, way.seconds) == (2, 2, 0.0)
    assert way.words == snapshot


def test_the_fastest_by_what_was_measured_gives_it_and_either_may_have_measured_it(snapshot):
    found = job({1: 2e8}, {}, {0: 5e8}, {})
    (way,) = nearest.ways(found, reports(0), [0], {0: there(found, 1, 2, 3)}, {})
    assert way.source.element == 2 and way.seconds == pytest.approx(2.0)
    assert way.words == snapshot


def test_what_was_never_measured_is_taken_for_the_usual():
    found = job({1: 1e6}, {}, {3: 4e8}, {})
    (way,) = nearest.ways(found, reports(0), [0], {0: there(found, 1, 2)}, {})
    assert way.source.element == 2 and "MB/s supposed" in way.words
    assert nearest.usual(job({}).alive()) == nearest.USUAL_RATE


def test_sources_are_spread_by_what_each_gives_already():
    found = job({}, {}, {}, {}, replica=2)
    places = {0: there(found, 2, 3), 1: there(found, 2, 3, place=1)}
    ways = nearest.ways(found, reports(0, 1), [0, 1], places, {})
    assert [way.source.element for way in ways] == [2, 3]
    slow = job({2: 1e8, 3: 1e7}, {2: 1e8, 3: 1e7}, {}, {}, replica=2)
    ways = nearest.ways(slow, reports(0, 1), [0, 1], {0: there(slow, 2), 1: there(slow, 2, 3, place=1)}, {})
    assert [way.source.element for way in ways] == [2, 2], "twice from the fast one is sooner than once from the slow"
    assert ways[1].seconds == pytest.approx(2 * ways[0].seconds)


def test_of_equals_the_one_behind_the_same_switch_gives_it():
    found = job({}, {}, {})
    (way,) = nearest.ways(found, reports(0), [0], {0: there(found, 1, 2)}, {"n0": "s1", "n1": "s2", "n2": "s1"})
    assert way.source.element == 2


def test_what_one_place_lacks_nobody_is_asked_for():
    found = job({}, {}, {})
    assert nearest.ways(found, reports(0, 1), [0, 1], {0: there(found, 2)}, {}) == []
    assert nearest.ways(found, reports(0), [0, 1], {0: there(found, 2), 1: there(found, 2)}, {}) == []


def failing(**times: int) -> dict[str, structs.Failing]:
    """By the names of their nodes, as the agent tells it of their addresses."""
    return {f"{node}:70": structs.Failing(count, "timed out") for node, count in times.items()}


def reachable(found: SimpleNamespace) -> SimpleNamespace:
    for agent in found.alive():
        agent.images_at = f"{agent.node}:70"
    return found


def test_whoever_has_failed_the_receiver_is_asked_last_whatever_was_measured_before(snapshot):
    found = reachable(job({1: 5e8}, {}, {}, {}))
    found.alive()[0].status.failing = failing(n1=1)
    (way,) = nearest.ways(found, reports(0), [0], {0: there(found, 1, 2)}, {})
    assert way.source.element == 2
    (other,) = nearest.ways(found, reports(2), [0], {0: there(found, 1, 3)}, {})
    assert other.source.element == 1, "it has failed nobody else"
    (only,) = nearest.ways(found, reports(0), [0], {0: there(found, 1)}, {})
    assert only.source.element == 1, "where nobody else has it"
    assert [way.words, only.words] == snapshot


def test_those_who_have_all_failed_take_turns():
    found = reachable(job({1: 5e8}, {}, {}, {}))
    for times, source in (({"n1": 1, "n2": 1}, 1), ({"n1": 2, "n2": 1}, 2), ({"n1": 2, "n2": 2}, 1)):
        found.alive()[0].status.failing = failing(**times)
        (way,) = nearest.ways(found, reports(0), [0], {0: there(found, 1, 2)}, {})
        assert way.source.element == source


def test_another_rank_of_the_place_gets_it_where_one_cannot():
    found = reachable(job({}, {}, {}))
    found.alive()[0].status.failing = failing(n1=1)
    (way,) = nearest.ways(found, reports(0, 2), [0], {0: there(found, 1)}, {})
    assert (way.receiver.element, way.source.element) == (2, 1)
