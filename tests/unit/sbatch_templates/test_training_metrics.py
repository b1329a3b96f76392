"""Metrics of a run with failures: merging, torn lines, disagreement."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sbatch_templates import training_metrics
from sbatch_templates.training_metrics import MetricsError, MetricsWriter, main, read_metrics
from tests.support.processes import LIMIT


def record(iteration: int, loss: float = 2.5, generation: int = 1, time: float = 0.0) -> dict:
    return {"iteration": iteration, "loss": loss, "generation": generation, "time": time}


def write(prefix, slot: int, *records: dict) -> None:
    writer = MetricsWriter(prefix, slot)
    for each in records:
        writer.write(each)
    writer.close()


def test_iterations_written_by_different_slots_are_merged_in_order(tmp_path):
    prefix = tmp_path / "sub" / "run"
    write(prefix, 0, record(0), record(1))
    write(prefix, 10, record(1), record(2), record(3))
    assert [each["iteration"] for each in read_metrics(prefix)] == [0, 1, 2, 3]


def test_a_torn_line_is_kept_apart_from_the_next_writers_lines(tmp_path):
    write(tmp_path / "run", 0, record(0))
    with open(tmp_path / "run.slot0", "a") as file:
        file.write('{"iteration": 1, "lo')
    write(tmp_path / "run", 0, record(1), record(2))
    assert [each["iteration"] for each in read_metrics(tmp_path / "run")] == [0, 1, 2]


def test_ranks_of_one_generation_must_agree_bit_for_bit(tmp_path):
    write(tmp_path / "run", 0, record(7, loss=1.0))
    write(tmp_path / "run", 1, record(7, loss=1.0 + 2**-52))
    with pytest.raises(MetricsError, match="iteration 7"):
        read_metrics(tmp_path / "run")


def test_the_latest_generation_counts_and_its_earliest_line(tmp_path):
    write(tmp_path / "run", 0, record(7, generation=1, time=1.0))
    write(tmp_path / "run", 1, record(7, 2.5 + 1e-7, generation=2, time=3.0))
    write(tmp_path / "run", 2, record(7, 2.5 + 1e-7, generation=2, time=2.0))
    (merged,) = read_metrics(tmp_path / "run")
    assert (merged["generation"], merged["time"]) == (2, 2.0)
    with pytest.raises(MetricsError, match="generation 2"):
        read_metrics(tmp_path / "run", tolerance=1e-9)


def test_a_loss_that_is_not_a_number_agrees_with_itself(tmp_path):
    for slot in (0, 1):
        write(tmp_path / "run", slot, record(0, loss=float("nan")))
    assert len(read_metrics(tmp_path / "run")) == 1


def test_shell_use(tmp_path, capsys):
    write(tmp_path / "run", 0, record(0))
    assert main([str(tmp_path / "run")]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 0
    assert main([str(tmp_path / "absent")]) == 1
    assert "no metrics at" in capsys.readouterr().err
    assert main([]) == 2


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    write(tmp_path / "run", 0, *(record(number) for number in range(3)))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        command = [sys.executable, training_metrics.__file__, str(tmp_path / "run")]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (1, "")
