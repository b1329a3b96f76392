"""Rows of the GPU check: their own fields count, whatever figures they have, and an error becomes a row."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.rows import row


def test_a_rows_figures_do_not_change_its_title_and_an_error_is_a_failed_row(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GPU_ROWS", str(tmp_path / "rows"))
    monkeypatch.setenv("GPU_CHECK", "4 snapshots")
    with row("memory of a rank") as saw:
        saw("18 bytes", **{"what": "memory", "at": 1.0, "bytes": 18})
    with row("a rank") as saw:
        raise OSError("no card")
    good, bad = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert (good["check"], good["name"], good["what"], good["saw"], good["ok"]) == (
        "4", "snapshots", "memory of a rank", "18 bytes", True,
    )  # fmt: skip
    assert good["bytes"] == 18 and good["at"] > 1.0
    assert (bad["what"], bad["saw"], bad["ok"]) == ("a rank", "OSError: no card", False)
