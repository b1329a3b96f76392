"""When a rank's work is audited, and when the replicas compare their states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unicron_detector.processes.rank_messages import LASTING_CORRUPTION
from unicron_transition.iteration.audits import Digest, tell
from unicron_transition.session.checks import MOST_RETURNS, Checks, LastingCorruption


def begun(audit: int, compare: int, total: int, replicas: int) -> Checks:
    """Checks of a generation whose members have agreed, and whose gradients repeat bit by bit."""
    member = SimpleNamespace(replicas=replicas, generation=1)
    checks = Checks(member, SimpleNamespace(weigh=None), None, lambda: True, (audit, compare))  # type: ignore[arg-type]
    checks.begin_iteration(total)
    checks.hear(0, [float(audit), float(compare), 0.0])
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
    rows = [tell(0, 1, replica, 2, digest, (1 - replica, digest), 5.0) for replica in range(2)]
    assert checks.hear(1, [max(pair) for pair in zip(*rows, strict=True)])
