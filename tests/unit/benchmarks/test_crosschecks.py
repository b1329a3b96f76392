"""The simulator beside published figures: what its command refuses."""

from __future__ import annotations

import sys

import pytest

from benchmarks.crosschecks import __main__ as command


@pytest.mark.parametrize("words", ["--runs 0", "--runs -1", "--days 0", "--days -1", "--days nan", "--days inf"])
def test_less_than_one_run_or_no_time_is_refused_in_one_line(words, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["crosschecks", *words.split()])
    monkeypatch.setattr(command, "airesim", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as refused:
        command.main()
    said = capsys.readouterr()
    assert refused.value.code == 2 and said.out == ""
    assert said.err.splitlines() == ["--runs is at least 1, and --days above 0"]
