"""The tables at the end of the demo fit 100 characters, and what is not as promised is said."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron_ctl.lab.demo import report
from unicron_ctl.shared.system.columns import WIDTH

FAILURE: dict[str, Any] = {
    "kind": "node",
    "job": "gpt-large",
    "what": "power-off of n4, none left: gpt-large weighs 8, gpt-small 1",
    "severity": 1,
    "cause": "killed_from_outside",
    "detected_by": "process exit",
    "injected_at": 1000.0,
    "detected_at": 1001.79,
    "resumed_at": None,
    "restored_at": 1123.4,
    "reused_micro_batches": 10,
    "recomputed_micro_batches": 2,
    "redistributed_micro_batches": 4,
    "iteration": 7,
    "actions": [],
    "reason": "",
    "neighbours_kept": 0,
}
JOB: dict[str, Any] = {
    "name": "gpt-large",
    "iterations": 276,
    "loss": 2.345678,
    "reference_loss": 2.345679,
    "max_loss_difference": 1.2e-5,
    "max_gradient_difference": 3.4e-8,
    "ledger_violations": 0,
    "gradient_differences": {},
}
DATA = {"failures": [FAILURE], "joins": [{"job": "gpt-small", "at": 1000.0, "used_at": 1035.1}], "jobs": [JOB]}
RESULT = msgspec.convert(DATA, report.DemoResult)


def test_a_failure_is_a_line_and_all_lines_fit() -> None:
    failures, losses = report.tables(RESULT)
    heading, line, joined, *_ = failures.lines()
    shown = dict(zip(heading.split(), line.split(), strict=True))
    assert (shown["JOB"], shown["WHAT"], shown["BY"], shown["FOUND"]) == ("gpt-large", "node", "process-exit", "1.79")
    assert (shown["AGAIN"], shown["KEPT"], shown["TAKEN"], shown["TWICE"]) == ("-", "10", "4", "2")
    assert joined.split()[:2] == ["gpt-small", "join"] and joined.split()[-1] == "35.10"
    assert losses.lines()[1].split() == ["gpt-large", "276", "2.345678", "2.345679", "1.2e-05", "3.4e-08"]
    assert all(len(row) <= WIDTH for listing in (failures, losses) for row in listing.lines(WIDTH))


def test_what_is_not_as_promised_is_said() -> None:
    assert report.problems(RESULT) == []
    bad = JOB | {"max_loss_difference": 0.5, "max_gradient_difference": 0.5, "ledger_violations": 2}
    assert len(report.problems(msgspec.convert(DATA | {"jobs": [bad]}, report.DemoResult))) == 3
