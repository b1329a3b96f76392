"""Notices: what is told of a log, each thing once, in words that say nothing private."""

from __future__ import annotations

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.notices.notices import KINDS, MOST_LISTED, Notice, Notices, compose

HEALED = records.JobHealed(failures=[3, 4], cause="gpu_lost", node="n7", seconds=4.2, lost_seconds=9.6, nodes=8)


def told(*found: tuple[float, str, Record]) -> list[Notice]:
    notices = Notices()
    made = [notices.of(Event(number + 1, at, job, 1, record)) for number, (at, job, record) in enumerate(found)]
    return [notice for notice in made if notice is not None]


def test_each_kind_of_event_that_somebody_should_hear_of_has_its_words(snapshot) -> None:
    log: list[tuple[float, str, Record]] = [
        (1.0, "", records.NeedsAdmin(key="suspect n3", node="n3", reason="n3 is a suspect")),
        (2.0, "7", HEALED),
        (3.0, "7", records.NodeLost(node="n7", element=1)),
        (4.0, "8", records.NodeAvoided(node="n9", element=0, suspect=True)),
        (5.0, "", records.NeedsAdmin(key="suspect n3", over=True)),
        (6.0, "7", records.JobSetAside(input="x", reason="elements in two modes")),
        (7.0, "7", records.JobSetAside(input="x", where="core.py", reason="ZeroDivisionError")),
        (8.0, "", records.MostSilent(silent=5, nodes=8)),
        (9.0, "7", records.NodeIsolated(node="n8")),
    ]
    found = told(*log)
    assert {type(record) for _, _, record in log} == set(KINDS)
    assert [(n.kind, n.job, n.node, n.id) for n in found] == [
        ("admin", "", "n3", 1),
        ("healed", "7", "n7", 2),
        ("left", "7", "n7", 3),
        ("left", "8", "n9", 4),
        ("admin", "7", "", 7),
        ("admin", "", "", 8),
        ("left", "7", "n8", 9),
    ]
    assert found[1].text == snapshot


def test_the_same_is_told_once_within_its_time_and_again_after_it() -> None:
    one = records.NeedsAdmin(key="suspect n3", node="n3", reason="n3 is a suspect")
    assert [n.id for n in told((0.0, "", one), (3599.0, "", one), (3601.0, "", one))] == [1, 3]
    lost, out = records.NodeLost(node="n7", element=1), records.NodeIsolated(node="n7")
    assert [n.id for n in told((0.0, "7", lost), (1.0, "7", out), (2.0, "8", lost), (601.0, "7", lost))] == [1, 4]
    assert len(told((0.0, "7", HEALED), (0.0, "7", HEALED))) == 2, "each recovery counts"


def test_what_a_job_or_its_program_has_said_is_not_in_a_notice() -> None:
    secret = "RuntimeError: token hunter2 in /home/ann/secret.py"
    found = told(
        (1.0, "7", records.NodeLost(node="n7", element=1, reason=secret)),
        (2.0, "7", records.NodeIsolated(node="n8", reason=secret)),
        (3.0, "7", records.NodeAvoided(node="n9", element=1, reason=secret)),
        (3.5, "", records.NeedsAdmin(key="suspect n1", node="n1", reason=secret)),
        (3.6, "", records.NeedsAdmin(key="slurm", reason=secret)),
        (4.0, "7", records.JobSetAside(input=secret, where=secret, reason=secret)),
        (5.0, "7", records.JobHealed(failures=[1], cause="oom", seconds=1, lost_seconds=1, nodes=1, reason=secret)),
    )
    assert len(found) == 7
    assert "node n1 is a suspect" in found[3].text
    message = compose(found, 0, "tcp://head:7451")
    assert "hunter2" not in str((message.subject, message.text, message.data))


def test_a_digest_names_the_most_urgent_first_lists_some_and_counts_the_rest(snapshot) -> None:
    healed = told(*((float(at), "7", HEALED) for at in range(MOST_LISTED + 5)))
    admin = Notice(99, 1.0, "admin", "", "n3", "n3 is a suspect", "admin suspect n3")
    message = compose([*healed, admin], 2, "tcp://head:7451")
    assert message.subject == snapshot
    assert len(message.data["notices"]) == MOST_LISTED and message.data["left_out"] == 8
    assert message.text.endswith("and 8 more: `unicronctl events`\n")
    assert message.data["notices"][0]["time"] == "1970-01-01T00:00:00+00:00"
