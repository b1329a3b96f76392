"""The papers' tables: what is computed follows from the parameters, what is measured comes from the files given."""

from __future__ import annotations

import json

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import tables
from unicron_planner.simulate.generate import UNICRON_MIX

NOTHING = tables.Measured.of([])
RATIOS = {("trace-a", "megatron"): (1.2, 1.1), ("trace-a", "varuna"): (1.4, 1.3), ("trace-b", "megatron"): (6.0, 2.0)}
COPIES = {"copies": {"copy": 0.1, "sum": 0.1, "keep": 0.001, "save": 1.0, "load": 0.4, "read": 0.2, "gigabytes": 1.0}}
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
    rows = [*tables.read(NOTHING, RATIOS), *tables.recalled(NOTHING, {}, True)]
    detection = [row for row in rows if row.claim.startswith("detection:")]
    assert len(detection) == 4 and {row.ours for row in detection} == {tables.NOMINAL_RATE}


def test_what_was_measured_is_in_its_row():
    rows = tables.recalled(tables.Measured.of([FAULTS]), {}, True)
    process = next(row for row in rows if row.claim == "detection: process")
    assert process.ours == "0.05 s (at most 0.07)"


def test_saves_and_loads_are_carried_over_to_a_nodes_part_of_175b():
    rows = {row.claim: row.ours for row in tables.read(tables.Measured.of([COPIES]), RATIOS)}
    assert rows["save to memory beside file storage"].startswith("1000x until the training goes on, 5.0x until")
    assert rows["load from memory beside file storage"] == "0.5x"
    assert rows["save of 175B on 128 GPUs"] == "26 s"  # 131 GB a node
    assert rows["load of 175B on 128 GPUs"] == "52 s"


def test_the_state_of_the_art_is_the_best_other_system_of_each_trace():
    row = next(row for row in tables.read(NOTHING, RATIOS) if "state of the art" in row.claim)
    assert row.tag == "[S]" and row.theirs == "1.9x"
    beside = "1.20x (megatron, trace-a), 6.00x (megatron, trace-b)"
    assert row.ours == f"over the best of the others {beside}; at most 6.00x (megatron, trace-b)"


def test_what_was_read_and_what_is_recalled_are_never_in_one_table():
    assert {row.tag for row in tables.read(NOTHING, RATIOS)} == {"[S]"}
    assert {row.tag for row in tables.recalled(NOTHING, RATIOS, False)} == {"[R]"}


def test_a_file_of_something_else_is_refused_with_one_line(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"rows": []}))
    with pytest.raises(SystemExit, match=r"other\.json: .*: give the --json of"):
        paper.main(["--tables", "--measured", str(file)])
    with pytest.raises(SystemExit, match="missing"):
        paper.main(["--tables", "--measured", str(tmp_path / "missing.json")])
