"""A node's history over weeks: incidents add up, fade, and lead to a hint."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.questions import told
from tests.support.scenarios import trained
from unicron_ctl.controller.api.answers import Unanswerable
from unicron_ctl.controller.model.asker import EVERYBODY, NOBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import lemons, records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.log.thinning import DAY
from unicron_ctl.shared.protocol.answer_schema import NodeHistory

NOW = 30 * DAY
LOST = records.NodeLost(node="n3", element=0, reason="n3 is lost")
SLOW = records.JobDegraded(iteration=9, slot=2, node="n3", reason="slot 2 takes twice as long")
AVOIDED = records.NodeAvoided(element=2, node="n3", suspect=True, reason="job 7 leaves n3")
PASSED = records.NodeHealth(node="n3", source="pair-test", verdict="good", checked_at=1.0)


def of(*events: tuple[float, records.Record]) -> NodeHistory:
    """The history of n3, from events so many days ago."""
    log = [Event(number, NOW - days * DAY, "7", 1, record) for number, (days, record) in enumerate(events)]
    return lemons.history(log, "n3", NOW)


@pytest.mark.parametrize(
    ("events", "score", "hint"),
    [
        ((), 0.0, False),
        (((0, LOST),), 2.0, False),
        (((7, LOST),), 1.0, False),
        (((20, LOST),), 0.0, False),  # too long ago
        (((0.0, SLOW), (0.0, AVOIDED)), 1.5, False),  # one incident
        (((1, SLOW), (0, AVOIDED)), 2.41, False),
        (((7, LOST), (0, LOST)), 3.0, True),
        (((7, LOST), (6, PASSED), (0, LOST)), 2.5, False),
        (((3, LOST), (2, PASSED), (1, LOST), (0, AVOIDED)), 4.05, True),  # a lemon passes tests
    ],
)
def test_incidents_add_up_and_fade(events, score: float, hint: bool):
    found = of(*events)
    assert found.score == pytest.approx(score, abs=0.01) and bool(found.hint) is hint


def test_only_what_speaks_against_this_node_counts():
    others = (
        records.NodeLost(node="n4", element=1),
        records.NodeAvoided(element=2, node="n3"),
        records.NodeHealth(node="n3", source="interval", verdict="good", checked_at=1.0),
        records.JobDegraded(iteration=9),
    )
    assert of(*((1, record) for record in others)).marks == []


def test_it_is_told_to_admins_only(tmp_path):
    world, _ = trained(3, 1)
    store = Store(tmp_path / "events.sqlite")
    times = (world.now - 2 * lemons.MOMENT, world.now)
    store.append([Event(number, at, "1", 1, replace(LOST, node="n2")) for number, at in enumerate(times, 1)])
    found = told(world.core, "history", EVERYBODY, store=store, node="n2")
    assert [mark["weight"] for mark in found["marks"]] == [2.0, 2.0] and found["hint"] == "sbatch --exclude=n2"
    for asker, node in ((NOBODY, "n2"), (EVERYBODY, "n99")):
        with pytest.raises(Unanswerable):
            told(world.core, "history", asker, store=store, node=node)
    store.close()


def test_the_answer_in_words(snapshot):
    (table,) = status_tables.node_history(of((7, LOST), (0, AVOIDED), (0, LOST)))
    assert [str(note) for note in table.notes] == snapshot
