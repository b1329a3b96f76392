"""What commands list fits 100 characters, is one line an item, and has no boxes unless it is watched."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from unicron.ctl.cli import status_tables
from unicron.ctl.protocol.answer_schema import Failure, Status
from unicron.ctl.system import columns
from unicron.ctl.system.columns import WIDTH, Listing, show

BOXES = re.compile("[\u2500-\u257f]")
FAILURE: dict[str, Any] = dict.fromkeys(Failure.__struct_fields__) | {
    "id": 1,
    "slots": [31],
    "element": 7,
    "reason": "its lease ended",
    "redistributed_micro_batches": 0,
    "kind": "node",
    "job": "104242",
    "slot": 31,
    "node": "gpu-a-0117",
    "severity": 1,
    "cause": "lost_connection",
    "action": "isolate",
    "detected_at": 1000.0,
    "detected_by": "lease",
    "stepped_at": 1001.23,
    "resumed_at": 1001.0,
    "reused_micro_batches": 480,
    "recomputed_micro_batches": 32,
    "actions": ["gpu-a-0117 is set down"],
}
JOB: dict[str, Any] = {
    "user": "ann",
    "since": 0.0,
    "min_nodes": 1,
    "members": [],
    "flops": 0.0,
    "layout": "",
    "layouts": [],
    "planned_layout": "",
    "replica": 1,
    "replicas": 1,
    "job": "104242",
    "name": "gpt-large",
    "state": "running",
    "mode": "restart",
    "nodes": 127,
    "max_nodes": 128,
    "planned_nodes": 128,
    "generation": 117,
    "iteration": 99998,
    "train_iterations": 100000,
    "iteration_seconds": 12.3456,
    "loss": 2.34567,
    "weight": 12.5,
    "waf": 1.234e18,
    "ended": None,
    "set_aside": "",
    "failures": 116,
    "last_failure": FAILURE,
    "degraded": {"slot": 3, "slowdown": 1.4, "phase": "backward", "node": "n1", "reason": "", "reported": True}
    | {"since": 0.0, "iteration": 5},
    "anomalies": [],
}
NODE: dict[str, Any] = {
    "downed_by_unicron": True,
    "lost_at": None,
    "last_heard": None,
    "asked_since": None,
    "spare_of": {},
    "node": "gpu-a-0117",
    "states": ["DOWN", "DRAIN"],
    "healthy": False,
    "reason": "unicron[lost_connection]: slurmd does not answer",
    "used_by": ["104242_117"],
    "health": {"verdict": "bad", "reason": "7 of 8 GPUs", "source": "boot", "at": 0.0},
    "suspect": "2 moments of hardware faults",
    "last_event": {
        "time": 1000.0,
        "source": "kernel",
        "text": "NVRM: Xid 79",
        "count": 1,
        "cause": "gpu_lost",
        "action": "isolate",
        "code": "79",
        "severity": 1,
        "reason": "",
    },
}
ENDED = {"code": 0, "reason": "", "time": 0.0, "disowned": False}
DATA: dict[str, Any] = {
    "observed": [],
    "plan": {},
    "jobs": [
        JOB,
        JOB
        | {
            "job": "7",
            "name": "b",
            "ended": ENDED,
            "mode": "session",
            "last_failure": None,
        },
    ],
    "nodes": [NODE, NODE | {"node": "n2", "health": None, "suspect": "", "last_event": None, "reason": ""}],
    "failures": [FAILURE],
    "attention": [{"reason": "gpu-a-0117 is to be set down by hand", "node": "", "since": 0.0, "job": ""}],
    "waf": 1.9e15,
    "controller": {
        "pid": 1,
        "events": 1,
        "time": 90.0,
        "since": 0.0,
        "alone_since": None,
        "most_silent_since": None,
        "modes": {"default": "act"},
        "paused": {"gpu": 0.0},
        "slurm": {"error": "", "used": False, "last_answer": None},
    },
}
STATUS = msgspec.convert(DATA, Status)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_status_of_a_large_cluster_fits_and_has_no_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    show(status_tables.status(STATUS))
    lines = printed(capsys)
    long = [line for line in lines if len(line) > WIDTH]
    assert all(line.startswith("gpu-a-0117: health bad: ") for line in long), "notes may be long, rows are not"
    assert not BOXES.search("".join(lines))
    assert "jobs that have ended: 1 (`unicronctl jobs`)" in lines and not any("ended(0)" in line for line in lines)


def test_a_line_has_its_words_where_the_heading_says(capsys: pytest.CaptureFixture[str]) -> None:
    show([status_tables.jobs(STATUS.jobs)])
    heading, large, small, *notes = printed(capsys)
    job = dict(zip(heading.split(), large.split(), strict=True))
    assert (job["JOBID"], job["NODES"], job["PLAN"], job["WAF"]) == ("104242", "127/128", "128", "1.23E")
    assert large.index("running") == heading.index("STATE") and large.index("127/128") == heading.index("NODES")
    assert dict(zip(heading.split(), small.split(), strict=True))["STATE"] == "ended(0)"
    assert notes[:2] == ["104242: restart mode", "104242: slow: slot 3 1.4x in backward"]
    assert notes[2].startswith("104242: last failure: ") and not any(note.startswith("7:") for note in notes)


def test_what_a_node_has_to_say_is_a_line_that_begins_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    show([status_tables.nodes(STATUS.nodes)])
    _, first, second, *notes = printed(capsys)
    assert first.split()[:4] == ["gpu-a-0117", "down+drain", "104242_117", "bad"] and second.split()[3] == "unknown"
    assert [note.partition(":")[0] for note in notes] == ["gpu-a-0117", "gpu-a-0117"]
    assert "7 of 8 GPUs" in notes[0] and "unicronctl pair-test --nodes gpu-a-0117" in notes[0] and "Xid 79" in notes[1]


def test_boxes_are_for_what_is_watched() -> None:
    out = io.StringIO()
    Console(file=out, width=130).print(status_tables.watched(STATUS))
    assert BOXES.search(out.getvalue()) and "gpt-large" in out.getvalue() and "needs an admin" in out.getvalue()


def test_a_long_last_cell_is_whole_on_a_pipe_and_cut_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Listing("node", "reason")
    long.add_row("n1", "x" * 300)
    show([long])
    assert printed(capsys)[1] == f"n1   {'x' * 300}"
    monkeypatch.setattr(columns.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    show([long])
    assert printed(capsys)[1] == f"n1   {'x' * 92}..."


def test_nothing_is_said_in_a_line() -> None:
    assert status_tables.jobs([]).notes == ["no job yet: submit one with `sbatch --unicron`"]
