"""The form of an agent's statuses: brief while its ranks do nothing but train, whole at everything else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.agent.loop.heartbeats import IDLE_SECONDS, WHOLE_EVERY, Heartbeats
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.shared.protocol import structs, wire

SLOTS = (4, 5, 6)
PERIOD = 1.0


def trained(number: int = 1, iteration: int = 7) -> wire.Status:
    ranks = {
        slot: structs.RankStatus(
            state="running", changed=float(number), generation=2, iteration=iteration, micro_batches=8, process="S"
        )
        for slot in SLOTS
    }
    return wire.Status(job="1", element=2, agent="a", sent=float(number), number=number, store="n2:1", ranks=ranks)


def chooser() -> Heartbeats:
    """It has said `trained(1)` whole at time 0."""
    heartbeats = Heartbeats()
    heartbeats.period = PERIOD
    assert isinstance(heartbeats.form(trained(), 0.0), wire.Status)
    return heartbeats


def sent(message: wire.Message) -> wire.Message:
    """The message as the controller reads it."""
    return wire.decode(wire.encode(message))


def test_mere_progress_is_said_briefly():
    status = trained(2, iteration=9)
    status.ranks[5].phase, status.moved = "reducing", 70
    message = sent(chooser().form(status, 1.0))
    assert isinstance(message, wire.Going) and (message.number, message.on, message.moved) == (2, 1, 70)
    rows = [(row.iteration, row.phase, row.slots) for row in message.progress]
    assert rows == [(9, "computing", []), (9, "reducing", [5])]


CHANGES: dict[str, Callable[[wire.Status], object]] = {
    "a rank has ended": lambda s: setattr(s.ranks[4], "state", "exited"),
    "a rank starts again": lambda s: setattr(s.ranks[4], "state", "starting"),
    "a rank has shards": lambda s: setattr(s.ranks[4], "shards", [structs.Shards(2, 7, 2, [0])]),
    "a rank has a fault": lambda s: setattr(s.ranks[4], "fault", structs.Fault(type="E", text="", at=1.0)),
    "a rank has corrected something": lambda s: setattr(s.ranks[4], "note", structs.Fault(type="E", text="", at=1.0)),
    "a rank is another process": lambda s: setattr(s.ranks[4], "incarnation", 1),
    "a rank has saved": lambda s: setattr(s.ranks[4], "saved", 8),
    "a rank's collective moves": lambda s: setattr(s.ranks[4], "moved", 8),
    "a rank does nothing": lambda s: setattr(s.ranks[4], "idle", IDLE_SECONDS + 0.1),
    "a rank is stopped by a signal": lambda s: setattr(s.ranks[4], "process", "T"),
    "a rank is gone": lambda s: s.ranks.pop(4),
    "the store is elsewhere": lambda s: setattr(s, "store", "n2:2"),
    "the agent leaves": lambda s: setattr(s, "leaving", "finished"),
    "its element is to end": lambda s: setattr(s, "noticed", True),
    "it wants an answer": lambda s: setattr(s, "answer", True),
    "it has heard a ping": lambda s: setattr(s, "pinged", 3),
    "a transfer failed": lambda s: setattr(s, "unmoved", 1),
    "a rank started cold": lambda s: setattr(s, "cold", {4: "no zygote"}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_other_change_is_said_whole(change):
    status = trained(2)
    change(status)
    assert chooser().form(status, 1.0) is status


def test_a_rank_that_works_again_is_said_whole_once():
    heartbeats = Heartbeats()
    heartbeats.period = PERIOD
    for number, idle in enumerate((60.0, 0.0), start=1):
        status = trained(number)
        status.ranks[4].idle = idle
        assert heartbeats.form(status, float(number)) is status
    assert isinstance(heartbeats.form(trained(3), 3.0), wire.Going)


def test_only_ranks_that_went_on_have_made_progress():
    known, heartbeats = view(), Heartbeats()
    heartbeats.period = PERIOD
    known.on_status(sent(heartbeats.form(trained(1), 0.0)), 0.0)
    status = trained(2)
    status.ranks[5].phase = "reducing"
    assert known.on_going(sent(heartbeats.form(status, 1.0)), 1.0) == [5]
    assert known.progress == {4: 0.0, 5: 1.0, 6: 0.0}


def stopped(number: int) -> wire.Status:
    """All have stopped for the Break of generation 2; 5 has finished its micro-batches, and 4 keeps a state."""
    status = trained(number)
    for slot, rank in status.ranks.items():
        rank.state, rank.broken, rank.changed = "stopped", 2, float(number)
        rank.phase, rank.done = ("reducing", [3, 4]) if slot == 5 else ("computing", [])
    status.ranks[4].kept = [(7, "mark")]
    return status


def test_where_ranks_stand_is_said_once_for_all_that_stand_alike():
    message = sent(chooser().form(stopped(2), 1.0))
    assert isinstance(message, wire.Going) and message.done == {5: [3, 4]}
    rows = sorted((row.slots, row.state, row.generation, row.broken, row.phase, row.kept) for row in message.progress)
    assert rows == [
        ([], "stopped", 2, 2, "computing", [(7, "mark")]),
        ([5], "stopped", 2, 2, "reducing", []),
        ([6], "stopped", 2, 2, "computing", []),
    ]


def test_the_controller_knows_where_ranks_stand_as_if_the_status_were_whole():
    brief, whole, heartbeats = view(), view(), Heartbeats()
    heartbeats.period = PERIOD
    for number, status in enumerate((trained(1), stopped(2), stopped(3)), start=1):
        status.number = number
        message = sent(heartbeats.form(status, float(number)))
        take = brief.on_going if isinstance(message, wire.Going) else brief.on_status
        news = take(message, float(number))
        said = whole.on_status(sent(status), float(number))
        assert news == (said if number < 3 else [])
        assert (brief.waits, brief.common, brief.broken, brief.newest) == (
            whole.waits,
            whole.common,
            whole.broken,
            whole.newest,
        )
        for slot in SLOTS:
            known = msgspec.structs.replace(whole.ranks[slot], changed=brief.ranks[slot].changed)
            assert brief.ranks[slot] == known
    assert brief.number == 3 and brief.whole == 1 and brief.common is not None and brief.common.state == "stopped"
    assert news == [], "the same again is no news"


def test_ranks_at_rest_say_where_they_stand_each_time_and_a_whole_status_is_then_no_news():
    """A phase counts a rank as at rest if it says the same again, and forming waits while ranks come."""
    known, heartbeats = view(), Heartbeats()
    heartbeats.period = PERIOD
    known.on_status(sent(heartbeats.form(trained(1), 0.0)), 0.0)
    for number in (2, 3):
        message = sent(heartbeats.form(stopped(number), float(number)))
        assert isinstance(message, wire.Going) and message.progress[0].states
        known.on_going(message, float(number))
    heartbeats.doubt()
    assert known.on_status(sent(heartbeats.form(stopped(4), 4.0)), 4.0) == [] and set(known.progress.values()) == {2.0}
    again = sent(heartbeats.form(stopped(5), 5.0))
    assert isinstance(again, wire.Going) and again.progress[0].states and known.on_going(again, 5.0) == []
    failed = stopped(6)
    failed.ranks[4].fault = structs.Fault(type="E", text="", at=1.0)
    assert known.on_status(sent(heartbeats.form(failed, 6.0)), 6.0) == [4]


def test_ranks_that_all_train_in_a_new_generation_say_so_briefly_and_then_whole():
    heartbeats = chooser()
    entered = [trained(number) for number in (2, 3, 4)]
    for status in entered:
        for rank in status.ranks.values():
            rank.generation = 3
    first, second, third = (heartbeats.form(status, 1.0) for status in entered)
    assert isinstance(first, wire.Going) and first.progress[0].generation == 3
    assert second is entered[1] and isinstance(third, wire.Going) and not third.progress[0].states


@pytest.mark.parametrize(
    "message",
    [wire.Break(generation=2, lost=[], reason=""), wire.Pong(), wire.PlanShare(common=msgspec.Raw(b""))],
    ids=["Break", "Pong", "plan"],
)
def test_a_break_and_a_plan_call_for_no_whole_status_but_other_messages_do(message):
    heartbeats = chooser()
    heartbeats.on_message(message)
    assert isinstance(heartbeats.form(stopped(2), 1.0), wire.Going)
    heartbeats.on_message(wire.Ping())
    assert isinstance(heartbeats.form(stopped(3), 1.0), wire.Status)


@pytest.mark.parametrize(
    "rows",
    [
        [structs.Progress(1, "computing"), structs.Progress(2, "computing")],
        [structs.Progress(1, "computing", [4, 4])] * 2,
        [structs.Progress(1, "computing"), structs.Progress(1, "computing", [4], "stopped", 2)],
    ],
    ids=["two for all others", "one slot twice", "only one says where it stands"],
)
def test_a_slot_that_is_in_two_places_is_refused(rows):
    message = wire.Going(
        job="1", element=2, agent="a", sent=1.0, number=2, on=1, progress=[structs.Progress(1, "synced")]
    )
    message.progress = rows
    with pytest.raises(wire.BadMessage):
        sent(message)


def test_after_a_few_heartbeats_in_doubt_and_to_an_earlier_release_it_is_whole():
    assert isinstance(chooser().form(trained(2), WHOLE_EVERY * PERIOD - 0.1), wire.Going)
    assert isinstance(chooser().form(trained(2), WHOLE_EVERY * PERIOD), wire.Status)
    heartbeats = chooser()
    heartbeats.doubt()
    assert isinstance(heartbeats.form(trained(2), 1.0), wire.Status)
    heartbeats.period = 0.0
    assert isinstance(heartbeats.form(trained(3), 1.0), wire.Status)


def test_who_wants_an_answer_each_time_says_all_each_time():
    """Restart mode: the answer to a status is the lease."""
    heartbeats = Heartbeats()
    heartbeats.period = PERIOD
    for number in (1, 2, 3):
        status = trained(number)
        status.answer = True
        assert heartbeats.form(status, float(number)) is status


def test_what_ranks_do_after_a_whole_status_does_not_change_what_it_said():
    heartbeats, status = Heartbeats(), trained()
    heartbeats.period = PERIOD
    heartbeats.form(status, 0.0)
    status.ranks[4].saved = 8
    again = copy.copy(status)
    again.number = 2
    assert heartbeats.form(again, 1.0) is again


def view() -> AgentView:
    return AgentView("1", 2, "a", "n2", (b"r",), list(SLOTS), 0.0)


steps = st.fixed_dictionaries(
    {
        "lost": st.booleans(),
        "slot": st.sampled_from(SLOTS),
        "change": st.sampled_from(["iteration", "phase", "stop", "run", "enter", "keep", "save", "nothing"]),
        "seconds": st.sampled_from([0.2, 1.0, 11.0]),
    }
)


@given(st.lists(steps, max_size=25))
def test_whatever_is_lost_the_controller_knows_what_the_last_message_told(course):
    """It knows it at once, or asks for a whole status."""
    heartbeats, known, now, status = Heartbeats(), view(), 0.0, trained()
    heartbeats.period = PERIOD
    for number, step in enumerate(course, start=1):
        now += step["seconds"]
        rank = status.ranks[step["slot"]]
        match step["change"]:
            case "iteration":
                rank.iteration += 1
            case "phase":
                rank.phase = "reducing" if rank.phase == "computing" else "computing"
            case "stop":
                rank.state = "stopped"
            case "run":
                rank.state = "running"
            case "enter":
                rank.state, rank.generation, rank.entering = "running", rank.generation + 1, 0
            case "keep":
                rank.broken, rank.done, rank.kept = rank.broken + 1, [number], [(number, "mark")]
            case "save":
                rank.saved += 1
        rank.changed, status.number = now, number
        message = sent(heartbeats.form(status, now))
        if step["lost"]:
            continue
        if isinstance(message, wire.Going):
            if known.on_going(message, now) is None:
                heartbeats.doubt()  # it is asked for
                continue
        else:
            known.on_status(message, now)
        for slot in SLOTS:
            mine, theirs = status.ranks[slot], known.ranks[slot]
            names = "state generation entering broken kept iteration phase saved".split()
            assert [getattr(theirs, name) for name in names] == [getattr(mine, name) for name in names]
            assert theirs.done == mine.done or mine.state == "running", "of a rank in training it may be older"
        assert known.number == number and known.last_heard == now


def test_a_late_heartbeat_changes_nothing():
    known, heartbeats = view(), Heartbeats()
    heartbeats.period = PERIOD
    known.on_status(sent(heartbeats.form(trained(1), 0.0)), 0.0)
    older, newer = (heartbeats.form(trained(number, iteration=number + 5), 0.5) for number in (2, 3))
    assert known.on_going(sent(newer), 1.0) == list(SLOTS) and known.on_going(sent(older), 1.1) == []
    assert {rank.iteration for rank in known.ranks.values()} == {8} and known.last_heard == 1.1
    assert known.on_going(sent(newer), 1.2) == [] and known.progress == dict.fromkeys(SLOTS, 1.0)


def test_whatever_a_rank_says_of_itself_ends_no_agent():
    """Defect: a rank that ran in no generation was taken for one of which no standing is said, beside another that
    waits: the message could not be made."""
    heartbeats, status = chooser(), trained(2)
    status.ranks[4].generation, status.ranks[5].state = 0, "waiting"
    message = sent(heartbeats.form(status, 1.0))
    view = AgentView("1", 2, "a", "n3", (b"a",), list(SLOTS), 0.0)
    view.on_status(trained(), 0.0)
    assert view.on_status(message, 1.0) if isinstance(message, wire.Status) else view.on_going(message, 1.0)
    assert (view.ranks[4].generation, view.ranks[5].state) == (0, "waiting")
