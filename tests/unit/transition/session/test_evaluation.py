"""The members of a new generation agree on who has the value of the last evaluation, and who still needs one."""

from __future__ import annotations

import contextlib
import math

import pytest

from tests.support.texts import raises_text
from unicron_transition.session.evaluation import MOST, NONE, Evaluations


class Members:
    """Evaluations of several ranks, whose exchange is the maximum over all of them."""

    def __init__(self, *ranks: Evaluations):
        self.ranks = ranks

    def agree(self, boundary: int, new: tuple[int, ...] = ()) -> None:
        """Play one plan: each rank's exchanges come in the same order, one after the other."""
        sent: list[list[list[float]]] = [[] for _ in self.ranks]
        answers: list[list[float]] = []
        while True:
            before = [dict(vars(rank)) for rank in self.ranks]
            for number, rank in enumerate(self.ranks):
                known = iter(answers)
                sent[number] = []

                def most(numbers, known=known, mine=sent[number]):
                    mine.append(list(numbers))
                    answer = next(known, None)
                    if answer is None:
                        raise _Waits
                    return answer

                rank._exchange = type("Exchange", (), {"most": staticmethod(most)})
                with contextlib.suppress(_Waits):
                    rank.agree(boundary, number in new)
            if all(len(each) == len(answers) for each in sent):
                return
            assert len(set(map(len, sent))) == 1, "ranks wait in different exchanges"
            answers.append([max(column) for column in zip(*(each[-1] for each in sent), strict=True)])
            for rank, values in zip(self.ranks, before, strict=True):
                vars(rank).update(values)


class _Waits(Exception):
    """A rank waits for an exchange without an answer yet."""


def rank(*, at: int = NONE, known: int = NONE, value: float = math.nan, calls: list | None = None) -> Evaluations:
    made = Evaluations(None, None, lambda: False, None)
    made._at_hand, made._known, made._value = at, known, value
    if calls is not None:
        made.make_up = calls.append
    return made


TICKET = 6 * MOST


@pytest.mark.parametrize("value", [2.5, math.nan, -math.inf])
def test_ranks_with_the_value_give_it_to_those_without(value):
    """One of them trains iteration 6 by now; no rank starts the evaluation again."""
    ahead, behind = rank(known=TICKET, value=value), rank(at=TICKET)
    Members(ahead, behind).agree(6)
    assert not behind.running
    result = behind.end()
    assert result == value or (not math.isfinite(value) and not math.isfinite(result))


def test_where_nobody_has_it_all_begin_anew_and_who_is_behind_comes_later():
    late = rank(known=5 * MOST, value=1.0)
    members = rank(at=TICKET, known=5 * MOST, value=1.0), rank(at=TICKET), late
    Members(*members).agree(6)
    assert [each.running for each in members] == [True, True, False]
    assert late._due is None


def test_a_rank_that_comes_in_takes_part():
    calls: list[int] = []
    inside, new = rank(at=TICKET + 2, known=TICKET + 1, value=3.0), rank(calls=calls)
    Members(inside, new).agree(6, new=(1,))
    new.catch_up()
    assert inside.running and calls == [2]
    new.begin_part(6, 1)
    assert new.end() == 3.0, "the one before has its value"


def test_where_one_cannot_take_part_it_is_given_up_by_all():
    members = rank(at=TICKET), rank(at=TICKET), rank()
    Members(*members).agree(6, new=(2,))
    assert [each.running for each in members] == [False] * 3
    assert members[0].end() is None


def test_a_job_that_goes_back_gives_it_up_and_evaluates_again_later():
    members = rank(at=TICKET, known=5 * MOST, value=1.0), rank(at=TICKET)
    members[0]._returned = 5 * MOST
    Members(*members).agree(4, new=(0, 1))
    assert [each.end() for each in members] == [None, None]
    members[0].begin_part(5, 0)
    assert members[0].running


def test_each_evaluation_between_two_iterations_has_a_part_of_its_own(snapshot):
    mine = rank(at=TICKET, known=TICKET, value=1.0)
    assert mine.end() == 1.0
    with raises_text(ValueError, snapshot):
        mine.begin_part(6, 0)
    mine.begin_part(6, 1)
    assert mine.running
