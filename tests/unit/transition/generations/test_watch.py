"""A rank's knowledge of its generation: old and repeated messages, Breaks that cross plans, and the two threads."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import wait_for
from unicron_detector.processes.rank_messages import Break, Plan, StopRank, Withdraw
from unicron_transition.generations.watch import PlanTimeout, RankDismissed, Watch


def plan(generation: int, boundary: bool = False, **more) -> Plan:
    return Plan(generation, [0, 2], "h:1", "p/3", boundary=boundary, **more)


def broken(generation: int) -> Break:
    return Break(generation, [1])


@pytest.fixture
def kicks() -> list[bool]:
    """One entry for each time that the main thread was freed: whether inside its replica as well."""
    return []


@pytest.fixture
def watch(kicks):
    return Watch(0, kicks.append)


def inside(watch: Watch, generation: int) -> None:
    """Make the main thread a member of `generation`."""
    watch.on_message(plan(generation))
    entered = watch.wait_plan(0.0)
    assert entered is not None and entered.generation == generation
    watch.enter_generation(entered)


# ---------------------------------------------------------------- old, repeated, crossing
def test_a_member_takes_a_boundary_plan_as_an_offer_and_a_newcomer_as_its_way_in(watch):
    watch.on_message(plan(1, boundary=True))
    first = watch.wait_plan(0.0)
    assert first.generation == 1 and watch.offer is None
    watch.enter_generation(first)
    watch.on_message(plan(2, boundary=True))
    assert watch.offer.generation == 2
    watch.enter_generation(watch.offer)
    assert watch.offer is None
    watch.put_back()
    watch.on_message(plan(3, boundary=True))
    assert watch.wait_plan(0.0).generation == 3


def test_messages_of_an_older_generation_are_ignored(watch):
    inside(watch, 5)
    for message in (broken(4), plan(5), plan(4), plan(5, boundary=True), plan(3, boundary=True)):
        watch.on_message(message)
    assert not watch.lost() and watch.offer is None and watch._plan is None
    watch.on_message(plan(7, boundary=True))
    watch.on_message(plan(6, boundary=True))
    assert watch.offer.generation == 7, "an offer that was overtaken does not replace the newer one"


def test_a_break_ends_everything_up_to_its_number(watch):
    inside(watch, 1)
    watch.on_message(plan(2, boundary=True))
    watch.on_message(broken(2))
    assert watch.lost() and watch.offer is None and watch.broken == 2
    at = watch.broken_at
    watch.on_message(broken(2))
    watch.on_message(broken(1))
    assert watch.broken == 2 and watch.broken_at == at
    assert watch.give_up() == 2
    watch.on_message(plan(2))
    with pytest.raises(PlanTimeout):
        watch.wait_plan(0.0)


def test_an_offer_above_the_break_is_kept(watch):
    inside(watch, 1)
    watch.on_message(plan(3, boundary=True))
    watch.on_message(broken(2))
    assert watch.offer.generation == 3


def test_a_waiting_rank_notices_a_break_that_overtakes_a_plan(watch):
    """Otherwise it would wait in silence for a plan that its silence holds up."""
    inside(watch, 1)
    watch.on_message(broken(1))
    watch.give_up()
    watch.on_message(plan(2))
    watch.on_message(broken(2))
    assert watch.wait_plan(1.0) is None
    assert watch.give_up() == 2
    watch.on_message(plan(3))
    assert watch.wait_plan(0.0).generation == 3


def test_entering_drops_only_what_is_not_newer(watch):
    watch.on_message(plan(1))
    first = watch.wait_plan(0.0)
    watch.on_message(plan(2))
    watch.enter_generation(first)
    assert watch.wait_plan(0.0).generation == 2


def test_a_rank_that_trains_forgets_an_offer_that_is_withdrawn(watch):
    inside(watch, 1)
    watch.on_message(plan(2, boundary=True))
    watch.on_message(Withdraw(2))
    assert watch.offer is None and not watch.lost() and watch.broken == 0
    watch.on_message(plan(2, boundary=True))
    assert watch.offer is None, "a copy that comes late"
    watch.on_message(plan(4, boundary=True))
    watch.on_message(Withdraw(3))
    assert watch.offer.generation == 4
    watch.on_message(plan(3))
    assert watch.wait_plan(0.0).generation == 3, "only offers are withdrawn"


def newcomer(watch: Watch, generation: int) -> None:
    """Let it wait for the others at their boundary."""
    watch.on_message(plan(generation, boundary=True, joiners=[0]))
    watch.enter_generation(watch.wait_plan(0.0))


def test_for_a_newcomer_that_waits_it_is_over_and_the_next_offer_is_its_way_in(watch):
    newcomer(watch, 2)
    watch.on_message(Withdraw(2))
    assert watch.lost()
    watch.give_up()
    watch.put_back()
    watch.on_message(plan(3, boundary=True))
    assert watch.wait_plan(0.0).generation == 3


def test_a_rank_that_is_in_with_all_others_stays_in(watch):
    newcomer(watch, 2)
    watch.note_entered()
    watch.on_message(Withdraw(2))
    assert not watch.lost()
    inside(watch, 3)
    watch.on_message(plan(4, boundary=True))
    offer = watch.offer
    watch.enter_generation(offer)  # all have agreed on it in their commit
    watch.on_message(Withdraw(4))
    assert not watch.lost(), "a member; the Break that follows ends it for all"


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["break", "plan", "offer", "withdraw", "enter", "give_up", "put_back"]), st.integers(1, 6)
        )
    )
)
def test_no_order_of_messages_leads_back(events):
    """No plan of a broken generation, or of one that was entered before, is ever handed out."""
    watch, entered = Watch(0, lambda inside: None), 0
    for what, generation in events:
        before = watch.broken
        if what == "break":
            watch.on_message(broken(generation))
        elif what in ("plan", "offer"):
            watch.on_message(plan(generation, boundary=what == "offer"))
        elif what == "withdraw":
            watch.on_message(Withdraw(generation))
        elif what == "give_up":
            assert watch.give_up() >= entered
        elif what == "put_back":
            watch.put_back()
        elif watch.offer is not None or watch._plan is not None:
            take_offer = watch.offer is not None and (generation % 2 or watch._plan is None)
            chosen = watch.offer if take_offer else watch.wait_plan(0.0)
            if chosen is not None:
                assert chosen.generation > max(entered, watch.broken)
                watch.enter_generation(chosen)
                entered = chosen.generation
        assert watch.broken >= before
        assert watch.lost() == (0 < entered <= watch.broken)
        assert watch.offer is None or watch.offer.generation > max(entered, watch.broken)
    watch.give_up()  # otherwise its thread would kick until the process ends


def test_a_rank_that_has_to_end_does_so_while_it_waits_for_a_plan(watch):
    watch.on_message(plan(3))
    watch.on_message(StopRank())
    with pytest.raises(RankDismissed) as ended:
        watch.wait_plan(5.0)
    assert ended.value.code == 75


# ---------------------------------------------------------------- the threads
def test_a_rank_that_stopped_by_itself_is_out_of_its_generation(watch, kicks):
    inside(watch, 4)
    assert watch.give_up() == 4 and watch.lost()
    watch.on_message(broken(4))
    time.sleep(0.06)
    assert not kicks, "it has left its collectives and needs no help"
    inside(watch, 5)
    assert not watch.lost()


def test_a_stuck_main_thread_is_freed_until_it_acknowledges(watch, kicks):
    inside(watch, 1)
    watch.on_message(broken(1))
    wait_for(lambda: len(kicks) >= 3, "it is freed again and again")
    watch.give_up()
    after = len(kicks)
    time.sleep(0.06)
    assert len(kicks) == after


def test_nobody_is_freed_while_the_next_generation_is_entered():
    """The unblocking thread works under the lock: once `give_up` has returned, it touches no socket any more."""
    acknowledged, touched = threading.Event(), []

    def unblock(inside):
        time.sleep(0.002)
        touched.append(acknowledged.is_set())

    watch = Watch(0, unblock)
    for generation in range(1, 30):
        acknowledged.clear()
        inside(watch, generation)
        watch.on_message(broken(generation))
        time.sleep(0.001 * (generation % 5))
        watch.give_up()
        acknowledged.set()
        time.sleep(0.001)
    assert touched and not any(touched)


def test_what_was_broken_inside_a_replica_is_no_shelter_any_more(watch, kicks):
    """The Break comes right before the next schedule, whose results must be neither believed nor waited for."""
    inside(watch, 1)
    watch.on_message(broken(1))  # of another replica's loss
    wait_for(lambda: kicks, "the connections inside are broken")
    watch.shelter(True)
    assert watch.hit() and watch.disturbed(inside=True)
    before = len(kicks)
    wait_for(lambda: len(kicks) >= before + 3, "it is freed again and again")
    assert all(kicks)
    watch.give_up()
    inside(watch, 2)
    watch.shelter(True)
    assert not watch.hit()
    watch.on_message(broken(2))
    wait_for(lambda: kicks[-1] is False, "only the others' connections are broken")
    assert not watch.hit() and not watch.disturbed(inside=True)


def test_messages_and_the_main_thread_at_the_same_time():
    """A storm of Breaks and plans while the main thread enters and gives up: it always ends in the newest plan."""
    watch, last = Watch(0, lambda inside: None), 300

    def controller():
        for generation in range(1, last):
            watch.on_message(plan(generation, boundary=generation % 3 == 0))
            watch.on_message(broken(generation))
        watch.on_message(plan(last))

    thread = threading.Thread(target=controller)
    thread.start()
    reached = 0
    while reached != last:
        got = watch.wait_plan(5.0)
        if got is None:
            watch.give_up()
            continue
        assert got.generation > reached
        reached = got.generation
        watch.enter_generation(got)
        if watch.lost():
            watch.give_up()
    thread.join()
    assert not watch.lost() and watch.broken == last - 1
