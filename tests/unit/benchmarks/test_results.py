"""The table of docs/results.md that the cases write."""

from __future__ import annotations

import pytest

from benchmarks import results
from benchmarks.cases import __main__ as command
from benchmarks.report import Figure, Report

EMPTY = f"before\n\n{results.BEGIN}\n\n{results.HEAD}\n\n{results.END}\nafter\n"


def seconds(case: str, *values: float, words: str = "") -> Report:
    figures = [Figure(f"part {number}", value, "s", most=2.0) for number, value in enumerate(values)]
    given = f"python -m benchmarks.cases {case}{words}"
    return Report(case, None, given, "abc", "a machine", 0.5, [*figures, Figure("no goal", 1.0)])


def rows(text: str) -> list[str]:
    table = text.partition(results.BEGIN)[2].partition(results.END)[0]
    return table.strip().splitlines()[2:]


def test_a_cases_rows_replace_its_own_and_no_others(snapshot) -> None:
    text = EMPTY
    for report in (seconds("warm", 1.0, 3.0), seconds("page", 1.0), seconds("warm", 1.5, words=" rounds=9")):
        text = results.with_rows(text, report, "2026-11-28")
    assert rows(text) == snapshot
    again = results.with_rows(text, seconds("warm", 0.25), "2026-11-29")
    assert rows(again) == snapshot
    assert again.startswith("before\n\n") and again.endswith("\nafter\n")
    assert results.with_rows(again, seconds("warm", 0.25), "2026-11-29") == again


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="no place"):
        results.with_rows("before", seconds("warm", 1.0), "2026-11-29")


def test_the_documents_rows_are_of_cases_that_there_are() -> None:
    for row in rows(results.PAGE.read_text()):
        name = row.rpartition("`python -m benchmarks.cases ")[2].partition("`")[0].split()[0]
        assert name in command.NAMES and row.count("|") == 6, row


def test_the_table_is_written_after_the_last_case_also_of_a_run_that_is_ended(tmp_path, monkeypatch) -> None:
    page = tmp_path / "results.md"
    page.write_text(EMPTY)

    def run(name: str, words: list[str], smallest: bool) -> command.Result:
        assert page.read_text() == EMPTY, "else the next case would stand at a changed commit"
        if name == "page":
            raise SystemExit(143)
        return command.Result(name, 0, 1.0, seconds(name, 1.0))

    monkeypatch.setattr(results, "PAGE", page)
    monkeypatch.setattr(command, "run_beside", run)
    with pytest.raises(SystemExit):
        command.main(["warm", "scale", "page", "--table"])
    assert len(rows(page.read_text())) == 2


def test_a_run_of_the_smallest_sizes_writes_no_table(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["warm", "--smallest", "--table"])
    assert "not allowed" in capsys.readouterr().err
