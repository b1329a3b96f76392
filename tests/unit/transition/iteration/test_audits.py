"""Who has computed wrongly: digests of gradients, and states of replicas."""

from __future__ import annotations

import itertools
import math

import pytest

from unicron_transition.iteration.audits import (
    Digest,
    Findings,
    Verdict,
    Weights,
    agree,
    calibrate,
    differing_states,
    pack_findings,
    spoilt_by,
    unpack_findings,
    wrong_gradients,
    wrong_sum,
)


def right(of: int) -> Digest:
    """The gradient of a replica's first micro-batch."""
    return Digest(100.0 + of, 1.0, 0.5)


def round_of(replicas: int, shift: int, wrong=lambda who, of, number: None) -> list[Findings]:
    """What the only place tells. wrong(who, of, number): a digest in place of the right one, or None."""
    own = {of: wrong(of, of, 0) or right(of) for of in range(replicas)}
    audited = {of: wrong((of + shift) % replicas, of, 1) or right(of) for of in range(replicas)}
    return [Findings(own, audited, {}, shift=shift)]


def flipped(number: int) -> Digest:
    return Digest(7000.0 + number, 1.5, 0.1)


def test_all_members_hear_what_each_of_them_says():
    own, other = Digest(3.0, 1.0, -2.0), Digest(5.0, math.inf, 0.0)
    mine = pack_findings(1, 2, 0, 3, own, (2, other), 77.0, Weights(1.0, 2.0, 3.0))
    theirs = pack_findings(0, 2, 2, 3, None, None, 78.0)
    told = unpack_findings([max(pair) for pair in zip(mine, theirs, strict=True)], 2, 3, shift=1)
    assert told[1] == Findings({0: own}, {2: other}, {0: 77.0}, {0: Weights(1.0, 2.0, 3.0)}, 1)
    assert told[0] == Findings({}, {}, {2: 78.0}, {}, 1)


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ([{0: 1.0, 1: 1.0, 2: 1.0}], None),
        ([{0: 1.0, 1: 1.0, 2: 2.0}], Verdict("state", frozenset({2}), frozenset({2}))),
        ([{0: 1.0, 1: 2.0}], Verdict("state", frozenset(), frozenset({0, 1}))),
        ([{0: 1.0, 1: 1.0}, {0: 3.0, 1: 3.0}], None),
    ],
    ids=["alike", "one differs", "two differ", "places differ"],
)
def test_most_states_are_right(states, verdict):
    assert differing_states([Findings({}, {}, each) for each in states]) == verdict


@pytest.mark.parametrize(("replicas", "culprit"), list(itertools.product((2, 3, 5), (0, 1))))
def test_a_replica_that_always_computes_wrongly_is_found(replicas, culprit):
    count = itertools.count()
    rounds = [
        round_of(replicas, shift, lambda who, of, _: flipped(next(count)) if who == culprit else None)
        for shift in (1, 1 if replicas < 3 else 2)
    ]
    assert not agree(rounds[0][0], 0.0)
    verdict = wrong_gradients(rounds, replicas, 0.0)
    assert verdict is not None and verdict.culprits == {culprit}


@pytest.mark.parametrize(
    ("replicas", "which"),
    list(itertools.product((2, 3), [(who, of) for who in (0, 1) for of in (0, 1)])),
)
def test_a_replica_that_computes_wrongly_once_is_found(replicas, which):
    def wrong(who: int, of: int, number: int) -> Digest | None:
        return flipped(0) if (who, of) == which else None

    verdict = wrong_gradients([round_of(replicas, 1, wrong), round_of(replicas, 2 % replicas or 1)], replicas, 0.0)
    if which[0] != which[1] and replicas == 3 and (which[1] + 1) % 3 != which[0]:
        assert verdict is None  # not its auditor
    else:
        assert verdict is not None and verdict.culprits == {which[0]}


def test_two_replicas_of_which_one_is_wrong_in_the_same_way_prove_nothing():
    rounds = [round_of(2, 1, lambda who, of, _: flipped(of) if who == 1 else None)] * 2
    assert wrong_gradients(rounds, 2, 0.0) == Verdict("gradient", frozenset(), frozenset({0, 1}))


def test_gradients_within_the_tolerance_are_equal():
    near = Digest(1.0, 1.0 + 1e-6, 0.5)
    assert right(0).distance(near) == pytest.approx(1e-6, rel=1e-3)
    assert agree(round_of(2, 1, lambda who, of, number: near if number else None)[0], 1e-5)


@pytest.mark.parametrize(
    ("wrong", "tolerance", "trouble"),
    [
        (lambda who, of, number: None, 0.0, ""),
        (lambda who, of, number: Digest(who, 1.0 + 1e-7 * who, 0.5), 1e-6, ""),
        (lambda who, of, number: Digest(who, 1.0 + who, 0.5), 0.0, "each of them repeatably"),
    ],
    ids=["exact", "noise", "fetch depends on the rank"],
)
def test_the_start_measures_how_well_gradients_repeat(wrong, tolerance, trouble):
    found = calibrate([round_of(2, 1, wrong)] * 2, 2)
    assert found.tolerance == pytest.approx(tolerance, rel=0.1) and found.trouble.endswith(trouble)


def test_what_ranks_repeat_and_others_do_not_is_no_noise():
    apart = calibrate([round_of(2, 1, lambda who, of, number: Digest(who, 1.0 + 1e-4 * who, 0.5))] * 2, 2)
    assert apart.between and apart.tolerance == pytest.approx(1e-3, rel=0.1)
    each = itertools.count()
    noisy = [round_of(2, 1, lambda who, of, _: Digest(next(each), 1.0 + 1e-5 * (next(each) % 3), 0.5)) for _ in "12"]
    assert not calibrate(noisy, 2).between


def test_a_rank_that_computes_another_gradient_each_time_cannot_be_audited():
    count = itertools.count()
    rounds = [round_of(2, 1, lambda who, of, _: Digest(next(count), 1.0 + next(count), 0.5)) for _ in range(2)]
    assert "computes a micro-batch again" in calibrate(rounds, 2).trouble


@pytest.mark.parametrize(
    ("after", "parts", "wrong"),
    [
        ((3.0, 3.0), False, set()),
        ((3.0, 3.0 + 1e-6), False, set()),
        ((3.0, 3.1), False, {1}),
        ((1.0, 2.0), True, set()),
        ((1.0, 2.1), True, {0, 1}),
        ((3.0, math.inf), False, {1}),
    ],
)
def test_a_sum_is_what_all_have_sent(after, parts, wrong):
    told = Findings({}, {}, {}, {0: Weights(1.0, 5.0, after[0]), 1: Weights(2.0, 4.0, after[1])})
    assert wrong_sum(told, 2.0**-23, parts) == wrong
    assert wrong_sum(Findings({}, {}, {}), 2.0**-23, parts) == set()


@pytest.mark.parametrize(
    ("damaged", "culprits", "among"),
    [
        ([], set(), set()),
        ([(1, 2), (1, 0)], {1}, {0, 1, 2}),  # all that it sends
        ([(0, 1), (2, 1)], {1}, {0, 1, 2}),  # all that it receives
        ([(1, 2), (1, 0), (0, 1), (2, 1)], {1}, {0, 1, 2}),
        ([(1, 2)], set(), {1, 2}),  # it reaches another: the link, or either end
        ([(1, 2), (2, 1)], set(), {1, 2}),
        ([(0, 1), (2, 3)], set(), {0, 1, 2, 3}),
    ],
)
def test_who_spoils_all_that_it_sends_or_receives_is_told_from_a_link(damaged, culprits, among):
    assert spoilt_by(damaged) == Verdict("link", frozenset(culprits), frozenset(among))


@pytest.mark.parametrize(("nodes", "culprits"), [("ABB", set()), ("ABC", {0}), ("AAB", {0}), ("AAA", {0})])
def test_one_replica_is_not_told_from_the_only_other_node(nodes, culprits):
    assert spoilt_by([(1, 0), (2, 0)], lambda replica: ord(nodes[replica])).culprits == culprits


def test_a_sum_of_an_overflow_is_left_to_the_scaler():
    overflow = Weights(math.inf, math.inf, math.inf)
    assert wrong_sum(Findings({}, {}, {}, {0: overflow, 1: Weights(1.0, 1.0, math.inf)}), 2.0**-23, False) == set()
