"""Cases: their names and sizes, as the command reads them."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
import pytest

from benchmarks.cases import __main__ as command
from benchmarks.cases import scrape
from benchmarks.report import Figure, Report
from unicron_ctl.shared.system.errors import UserError


@pytest.mark.parametrize("name", command.NAMES)
def test_every_case_has_sizes_the_smallest_ones_and_a_title(name: str):
    module = importlib.import_module(f"benchmarks.cases.{name}")
    assert isinstance(module.SMALLEST, module.Sizes) and module.SMALLEST != module.Sizes()
    assert callable(module.measure) and module.__doc__


def test_sizes_belong_to_the_case_before_them():
    words = ["recovery", "repeats=2", "only=layouts", "warm"]
    assert command.chosen_cases(words) == [("recovery", ["repeats=2", "only=layouts"]), ("warm", [])]


def test_sizes_are_read_by_their_types():
    assert command.parse_sizes(scrape, ["nodes=4"], smallest=False) == scrape.Sizes(nodes=4)
    assert command.parse_sizes(scrape, ["jobs=4"], smallest=True) == msgspec.structs.replace(scrape.SMALLEST, jobs=4)


@pytest.mark.parametrize("words", [["nodes=many"], ["node=4"]])
def test_a_size_that_cannot_be_is_refused(words: list[str]):
    with pytest.raises(UserError):
        command.parse_sizes(scrape, words, smallest=False)


@pytest.mark.parametrize("words", [["recovry"], ["nodes=4"]])
def test_an_unknown_case_and_a_size_of_none_are_refused_in_one_line(words: list[str], capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(words)
    output = capsys.readouterr()
    assert refused.value.code == 2 and output.out == "" and len(output.err.splitlines()) == 1


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
def test_a_case_prints_its_figures_and_writes_them(value, status, monkeypatch, tmp_path: Path, capsys):
    def measure(sizes: scrape.Sizes, report: Report) -> None:
        report.figure("seconds", value, "s", most=2.0)

    monkeypatch.setattr(scrape, "measure", measure)
    file = tmp_path / "figures.json"
    assert command.main(["scrape", "nodes=4", "--json", str(file)]) == status
    assert "seconds" in capsys.readouterr().out
    written = msgspec.json.decode(file.read_bytes(), type=Report)
    assert written.figures == [Figure("seconds", value, "s", most=2.0)] and written.sizes["nodes"] == 4


def test_the_table_at_the_end_has_goals_missed_goals_and_failures():
    figures = [Figure("a", 1.0, "s", most=2.0), Figure("b", 3.0, "s", most=2.0), Figure("c", 1.0)]
    warm = command.Result("warm", 0, 5.0, Report("warm", None, figures=figures))
    lines = list(command.summary([warm, command.Result("page", 1, 2.0, None)]))
    assert sum(line.endswith("MISSED") for line in lines) == 1
    assert lines[3:] == ["warm        2 goals, 1 missed, 5 s", "page        failed with 1, 2 s"]
