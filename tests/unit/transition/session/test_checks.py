"""When a rank's work is audited, and when the replicas compare their states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unicron_detector.processes.rank_messages import LASTING_CORRUPTION
from unicron_transition.iteration import audits
from unicron_transition.iteration.audits import Digest, Weights
from unicron_transition.session.checks import MOST_RETURNS, NEVER, AuditAgain, Checks, LastingCorruption


def checks_of(audit: int, compare: int, total: int, replicas: int) -> Checks:
    """Checks of a rank whose generation begins."""
    member = SimpleNamespace(replicas=replicas, generation=1)
    checks = Checks(member, SimpleNamespace(weigh=None), None, lambda: True, (audit, compare))  # type: ignore[arg-type]
    checks.begin_iteration(total)
    return checks


def agree(*ranks: Checks) -> None:
    """Let all ranks hear what they tell at the start of a generation."""
    told = [max(row) for row in zip(*(each.statement(0) for each in ranks), strict=True)]
    for each in ranks:
        each.take_statements(0, told)


def begun(audit: int, compare: int, total: int, replicas: int) -> Checks:
    """Checks of a generation whose members have agreed, and whose gradients repeat bit by bit."""
    checks = checks_of(audit, compare, total, replicas)
    checks._tolerance = 0.0
    agree(checks)
    return checks


@pytest.mark.parametrize(("each_rank", "audited"), [(1, 4), (4, 16), (32, 128)])
def test_one_micro_batch_in_n_is_audited_however_often_states_are_compared(each_rank, audited):
    checks = begun(256, 64, 4 * each_rank, 4)
    iterations = range(1, 1025)
    assert sum(map(checks.audits, iterations)) == audited
    assert all(checks.compares(each) for each in iterations if checks.audits(each)), "which verifies the state"
    assert all(checks.compares(each) for each in iterations if each % 64 == 0)


def test_nothing_is_compared_or_audited_that_is_not_wanted_or_alone():
    assert not any(map(begun(0, 0, 8, 4).compares, range(100)))
    assert not any(map(begun(8, 0, 8, 4).compares, range(100)))
    assert not any(map(begun(8, 8, 8, 1).audits, range(100)))
    assert not any(map(begun(0, 8, 8, 4).audits, range(100)))


def test_a_sum_that_was_wrong_once_is_summed_again_and_told():
    checks, published = begun(1, 0, 2, 2), []
    own = Digest(7.0, 1.0, 0.5)
    member = checks.member
    vars(member).update(layout=SimpleNamespace(size=1), members=[0, 1], slot=0, note=None, publish=published.append)
    checks.gradients.own_sum, checks.state = lambda: [torch.ones(2)], SimpleNamespace(sharded=False)

    def hear(after: float) -> bool:
        checks._round.own, sums = own, Weights(0.5, 1.0, after)
        told = [audits.pack_findings(0, 1, replica, 2, own, (1 - replica, own), None, sums) for replica in (0, 1)]
        return checks.take_statements(3, [max(row) for row in zip(*told, strict=True)])

    with pytest.raises(AuditAgain):
        hear(after=2.0)
    assert not published
    hear(after=1.0)
    assert published == ["running"] and member.note.culprit is None
    assert member.note.text.startswith("slots 0-1 got another sum of gradients at iteration 3"), member.note.text
    assert member.note.text.endswith("and the right one when all summed again")


def test_who_starts_again_is_measured_by_what_the_others_know():
    """Otherwise its error would count as noise from then on."""
    first, second, restarted = (checks_of(1, 1, 3, 3) for _ in range(3))
    first._tolerance = second._tolerance = 1e-7
    agree(first, second, restarted)
    assert [each._tolerance for each in (first, second, restarted)] == [1e-7] * 3
    assert not restarted._calibrating and not first._calibrating


def test_what_nobody_knows_or_could_not_be_measured_is_measured_again_when_a_rank_comes():
    first, second = checks_of(1, 1, 2, 2), checks_of(1, 1, 2, 2)
    agree(first, second)
    assert first._calibrating and second._calibrating
    first._tolerance, first.wanted = NEVER, (0, 1)
    first.member.generation = second.member.generation = 2
    agree(first, second)
    assert first._calibrating and second._calibrating and first.audits(1)


def test_who_goes_back_and_comes_no_further_gives_up():
    checks = begun(8, 8, 8, 4)
    for iteration in [5, *range(10, 10 - MOST_RETURNS, -1)]:
        checks.count_return(iteration)
    with pytest.raises(LastingCorruption) as raised:
        checks.count_return(10)
    assert type(raised.value).__name__ == LASTING_CORRUPTION


def test_the_audit_that_calibrates_verifies_a_state_too():
    checks = begun(256, 64, 8, 2)
    checks._calibrating = True
    checks.member.layout, checks.state = SimpleNamespace(size=1), SimpleNamespace(sharded=False)
    checks.gradients.own_sum = list
    digest = Digest(1.0, 1.0, 1.0)
    checks._round.own = digest
    rows = [audits.pack_findings(0, 1, replica, 2, digest, (1 - replica, digest), 5.0) for replica in range(2)]
    assert checks.take_statements(1, [max(pair) for pair in zip(*rows, strict=True)])
