"""Every micro-batch counts exactly once: the ledger of what ranks report."""

from __future__ import annotations

from unicron_ctl.controller.job.ledger import JobLedger
from unicron_ctl.protocol.wire import RankStep, Steps


def step(slot: int, iteration: int, indices: list[int], computed: list[int] | None = None) -> Steps:
    rank = RankStep(slot, indices, 1.0, 2.0, computed)
    return Steps(
        job="1", element=slot, agent=f"a{slot}", generation=1, iteration=iteration, total=4, at=0.0, ranks=[rank]
    )


def test_an_iteration_is_closed_when_all_is_accounted_for():
    ledger = JobLedger()
    assert ledger.add(step(0, 0, [0, 2]), {0, 1}, lambda i: False) == []
    (account,) = ledger.add(step(1, 0, [1, 3]), {0, 1}, lambda i: False)
    assert account.problems == [] and account.computed == 4 and account.ranks == 2
    assert ledger.add(step(1, 0, [1, 3]), {0, 1}, lambda i: False) == [], "a repeated report counts once"


def test_a_dead_ranks_missing_report_is_named_and_no_violation():
    ledger = JobLedger()
    ledger.add(step(0, 0, [0, 2]), {0, 1}, lambda i: True)
    (account,) = ledger.add(step(1, 0, [1]), {0, 1}, lambda i: True)
    assert account.unreported == [3] and account.problems == []


def test_gaps_doubles_and_strangers_are_violations():
    ledger = JobLedger()
    reports = [
        step(0, 0, [0, 1, 9], [0, 0, 1]),
        step(1, 0, [1]),
        step(0, 1, [0]),
        step(1, 1, [1]),
        step(0, 2, [0, 2]),
        step(1, 2, [1, 3]),
    ]
    accounts = [account for report in reports for account in ledger.add(report, {0, 1}, lambda i: False)]
    assert [account.iteration for account in accounts] == [0, 1, 2] and accounts[2].problems == []
    text = "; ".join(problem for account in accounts for problem in account.problems)
    assert "micro-batch 1 is in 2 gradients" in text and "computed 2 times" in text and "9 does not exist" in text
    assert "micro-batches [2, 3] are in nobody's gradient" in text
