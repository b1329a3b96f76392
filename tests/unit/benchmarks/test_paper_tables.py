"""The papers' tables: what is computed follows from the parameters, what is measured comes from the files given."""

from __future__ import annotations

import json

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import tables
from planner.simulate.generate import UNICRON_MIX

NOTHING = tables.Measured.of([])
FAULTS = {"faults": {"process exit": [{"seconds": 0.04}, {"seconds": 0.05}, {"seconds": 0.07}]}}


def test_a_restart_costs_its_parts_in_the_simulator():
    parts = {name: seconds / 60 for name, seconds in tables.cost_of_one("megatron").items()}
    assert parts["detection"] == pytest.approx(30) and parts["transition"] == pytest.approx(9 + 14)
    assert parts["recompute"] == pytest.approx(15) and sum(parts.values()) == pytest.approx(68)


def test_a_healed_failure_costs_less_than_a_fortieth_of_it():
    assert sum(tables.cost_of_one("unicron").values()) < sum(tables.cost_of_one("megatron").values()) / 40


def test_generated_failures_have_the_papers_shares():
    drawn = tables.shares()
    assert drawn.keys() == UNICRON_MIX.keys()
    assert sum(drawn.values()) == pytest.approx(sum(UNICRON_MIX.values()))
    for name, theirs in UNICRON_MIX.items():
        assert drawn[name] == pytest.approx(theirs, abs=0.5)
    assert sum(tables.by_severity(UNICRON_MIX).values()) == pytest.approx(100)


def test_the_closed_form_and_the_mean_time_to_failure():
    lost, exact = tables.effective(1.0, 24, 360.0)  # 24 failures a day of 6 minutes each
    assert lost == pytest.approx(0.9) and exact == pytest.approx(1 / 1.1)
    assert tables.mttf_hours(0.5, 32) == pytest.approx(12)


def test_nothing_is_made_up_where_nothing_was_measured():
    rows = [*tables.read(NOTHING), *tables.recalled(NOTHING, {}, True)]
    detection = [row for row in rows if row.claim.startswith("detection:")]
    assert len(detection) == 4 and {row.ours for row in detection} == {tables.UNMEASURED}


def test_what_was_measured_is_in_its_row():
    rows = tables.recalled(tables.Measured.of([FAULTS]), {}, True)
    process = next(row for row in rows if row.claim == "detection: process")
    assert process.ours == "0.05 s (at most 0.07)"


def test_what_was_read_and_what_is_recalled_are_never_in_one_table():
    assert {row.tag for row in tables.read(NOTHING)} == {"[S]"}
    assert {row.tag for row in tables.recalled(NOTHING, {("trace-a", "megatron"): (1.0, 1.0)}, False)} == {"[R]"}


def test_a_file_of_something_else_is_refused_with_one_line(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"rows": []}))
    with pytest.raises(SystemExit, match=r"other\.json: .*: give the --json of"):
        paper.main(["--tables", "--measured", str(file)])
    with pytest.raises(SystemExit, match="missing"):
        paper.main(["--tables", "--measured", str(tmp_path / "missing.json")])
