"""The table of docs/results.md that the cases write: each goal with its latest result, its day, and the command."""

from __future__ import annotations

import time
from collections.abc import Iterable

from benchmarks.report import ROOT, Figure, Report

PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- goals: made by `make bench` -->", "<!-- end of goals -->"
HEAD = "| what | goal | result | recorded | command |\n|---|---|---|---|---|"


def write_table(reports: Iterable[Report]) -> None:
    """Put the cases' rows into the table in place of their old ones."""
    text, day = PAGE.read_text(), time.strftime("%Y-%m-%d", time.gmtime())
    for report in reports:
        text = with_rows(text, report, day)
    PAGE.write_text(text)


def with_rows(text: str, report: Report, day: str) -> str:
    """Return the page with the case's rows of this day in the table."""
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has no place for the goals"
    last = f" `{report.command}` |"
    kept = [line for line in table.strip().splitlines()[2:] if not line.endswith(f"|{last}")]
    recorded = f"{day}, {report.commit}, load {report.load:.1f}"
    kept += [f"{_cells(figure)} | {recorded} |{last}" for figure in report.figures if figure.goal]
    kept.sort(key=lambda line: line.rsplit("|", 2)[1])
    return "\n".join([f"{before}{BEGIN}\n", HEAD, *kept, f"\n{END}{after}"])


def _cells(figure: Figure) -> str:
    goal, missed = figure.goal.removeprefix("goal: ").strip(), "" if figure.met else ", **missed**"
    return f"| {figure.what.strip()} | {goal} | {f'{figure.value:.3g} {figure.unit}'.strip()}{missed}"
