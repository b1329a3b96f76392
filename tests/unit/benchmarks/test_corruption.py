"""The campaign of silent faults: what it injects, and how it reads what was found."""

from __future__ import annotations

import pytest

from benchmarks.corruption.campaign import CLASSES, KINDS, Fault, Outcome, faults, verdict
from benchmarks.corruption.healthy import runs
from unicron_detector.chaos.inject import flip_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("slot 1 had another gradient of one micro-batch than the other replicas at iteration 4", ("audit", "slot 1")),
        ("slots 0-1 differ in the gradient of one micro-batch at iteration 4; no majority says", ("audit", "")),
        ("slot 1 had another parameters or optimizer state than the other replicas at", ("comparison", "slot 1")),
        ("slot 1 had another state than the other replicas at iteration 4", ("comparison", "slot 1")),
        ("slots 0-2 got another sum of gradients at iteration 4 than what all have sent", ("sum", "")),
        ("the sum of the gradients of iteration 4 was not sound, and it was when summed again: what", ("sum", "")),
        ("a sum was wrong at iteration 4: what comes from or goes to slot 1 is spoilt", ("sum", "slot 1")),
        ("a sum was wrong at iteration 4: what slots 0-1 send each other is spoilt", ("sum", "")),
        ("made a loss or a gradient that is not sound on slot 2, and a sound one when", ("no step", "slot 2")),
        ("parameters are not finite on slot 2 at iteration 4", ("no step", "slot 2")),
        ("process killed by SIGKILL -> ended by a signal from outside", ("", "")),
    ],
)
def test_who_has_found_a_fault_is_read_from_the_failure(text, found):
    assert verdict(text) == found


def test_faults_are_of_all_kinds_and_bits_repeat_by_their_seed_and_can_be_ordered():
    found = list(faults(240, 5, KINDS))
    assert found == list(faults(240, 5, KINDS)) != list(faults(240, 6, KINDS))
    assert {(each.kind, each.bits) for each in found} == {(kind, name) for kind in KINDS for name in CLASSES}
    for each in found:
        name, _, detail = each.order.partition(":")
        assert (flip_of(name, detail).where, flip_of(name, detail).bit) == (each.where, each.bit)


@pytest.mark.parametrize(
    ("before", "after", "matters"), [(1.0, 1.0000001, False), (1.0, 1.1, True), (1.0, "nan", True)]
)
def test_a_fault_matters_if_it_changes_a_number_by_more_than_rounding(before, after, matters):
    assert Outcome(Fault("weight", 3, 0), before, float(after)).matters == matters


def test_runs_without_faults_vary():
    found = runs(30, 2000, 1)
    assert found == runs(30, 2000, 1)
    assert {run.ranks for run in found} == {2, 3, 4} and sum(run.command is None for run in found) == 6
