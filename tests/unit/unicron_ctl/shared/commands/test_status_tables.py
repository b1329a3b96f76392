"""What commands list: one line an item on a pipe, 80 columns on a terminal, and nothing that matters is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.text import Text

from tests.support.listings import fits, on_a_terminal, printed
from unicron_ctl.cli import top
from unicron_ctl.shared.commands import status_tables, trouble
from unicron_ctl.shared.protocol.answer_schema import Attention, Explanation, Failure, Job, JobBase, Node, Status
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.system.columns import Listing, lines_of, show

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
    "jobs": [JOB, JOB | {"job": "7", "name": "b", "ended": ENDED, "mode": "session", "last_failure": None}],
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


def large() -> Status:
    """2,048 nodes, four out of service, two of them suspects; sixty jobs with long names."""
    names = [f"gpu-a-{n:04d}" for n in range(2048)]
    good = {"verdict": "good", "reason": "", "source": "boot", "at": 0.0}
    fine = {"states": ["ALLOCATED"], "healthy": True, "reason": "", "health": good, "suspect": "", "last_event": None}
    nodes = [NODE | fine | {"node": name, "used_by": [f"1042{n // 512}_{n % 512}"]} for n, name in enumerate(names)]
    for n in (3, 4, 5, 1800):
        nodes[n] |= NODE | {"node": names[n], "reason": f"unicron[lost_connection]: {names[n]} does not answer"}
    for n in (100, 101):
        nodes[n] |= {"suspect": "2 moments of hardware faults"}
    jobs = [
        JOB | {"job": f"10424{n:02d}", "name": f"llama-70b-pretraining-on-the-whole-of-the-web-{n}"} for n in range(60)
    ]
    jobs[33] |= {"state": "breaking"}
    jobs[44] |= {"set_aside": "the controller cannot handle this job"}
    attention = [
        {"reason": f"{names[n]} is a suspect (why): `unicronctl pair-test --nodes {names[n]}` clears it"}
        | {"node": names[n], "since": 0.0, "job": ""}
        for n in (100, 101)
    ]
    failures = [FAILURE, FAILURE | {"id": 2, "node": "gpu-a-1800", "actions": ["is set down in Slurm: " + "why " * 30]}]
    return msgspec.convert(DATA | {"jobs": jobs, "nodes": nodes, "attention": attention, "failures": failures}, Status)


LARGE = large()


def told() -> Explanation:
    reason = "lost gpu-a-0117 and gpu-a-0118 and gpu-a-0119, whose agents fell silent at 12:00 and were not heard again"
    decision = {"time": 1.0, "kind": "failure_detected", "generation": 117, "reason": reason}
    base = {key: value for key, value in JOB.items() if key in JobBase.__struct_fields__}
    more = {
        "mode_reason": "its script makes no session",
        "log_dir": "",
        "cold": {},
        "forgets": {},
        "plan_reason": reason,
    }
    rest = {"plan_trigger": "a node was lost", "bounds": "1 to 128", "waiting": [], "failures": [FAILURE] * 3}
    return msgspec.convert(base | more | rest | {"decisions": [decision] * 9}, Explanation)


TABLES: dict[str, Callable[[], list[Listing | Text]]] = {
    "status": lambda: list(status_tables.status(LARGE, folded=True)),
    "jobs": lambda: [status_tables.jobs(LARGE.jobs, folded=True)],
    "nodes": lambda: [status_tables.nodes(LARGE.nodes, folded=True)],
    "nodes, each": lambda: [status_tables.nodes(LARGE.nodes)],
    "failures": lambda: [status_tables.failures(LARGE.failures)],
    "explain": lambda: list(status_tables.explanation(told())),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_fits_80_columns_and_nothing_that_matters_is_cut(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    parts = TABLES[name]()
    show(parts)
    fits(parts, printed(capsys))


def test_what_needs_an_admin_is_first_and_always_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defect: below 40 rows `status --watch` did not show it."""
    show(status_tables.status(LARGE))
    assert [line.split()[3] for line in printed(capsys)[:2]] == ["gpu-a-0100", "gpu-a-0101"]
    on_a_terminal(monkeypatch)
    show(status_tables.status(LARGE, folded=True))
    for lines in (printed(capsys), *([line.plain for line in top.picture(LARGE, 80, n)] for n in (8, 60))):
        assert lines[0].split()[3] == "gpu-a-[0100-0101]"
        said = " ".join([lines[0], lines[1].strip()])
        assert "`unicronctl pair-test --nodes gpu-a-[0100-0101]`" in said


@pytest.mark.parametrize(("height", "attention"), [(6, 2), (10, 100), (24, 2), (40, 100), (200, 0)])
def test_the_live_view_never_scrolls_and_says_how_much_more_there_is(height: int, attention: int) -> None:
    items = [Attention(node="", since=0.0, job="", reason=f"limit {n} is reached") for n in range(attention)]
    data = msgspec.structs.replace(LARGE, attention=items)
    lines = [line.plain for line in top.picture(data, 80, height)]
    assert len(lines) < height and all(len(line) <= 80 for line in lines)
    shown = [line for line in lines if line.startswith("needs an admin")]
    if len(shown) < attention:
        (more,) = [line for line in lines if "more lines: `unicronctl status` shows all" in line]
        assert int(more.split()[1]) == attention - len(shown) and lines.index(more) == len(shown)
        assert len(shown) >= height - 1 - 3 * 5 or len(shown) >= 2
    if height == 24 and attention == 2:
        assert any(line.startswith("1042444 ") for line in lines), "the worst job is there"
        assert any(line.startswith("gpu-a-[0003-0005,1800]") for line in lines), "and the worst nodes"
        assert sum(line.startswith("... ") for line in lines) == 3, "jobs, nodes and failures have more"


def test_in_the_live_view_old_figures_are_said_to_be_old() -> None:
    said = "no controller answers"
    lines = [line.plain for line in top.picture(LARGE, 80, 24, said)]
    assert lines[0] == said and lines[1].startswith("needs an admin")


def test_for_people_the_worst_is_first_and_nodes_are_folded() -> None:
    order = [str(row[0]) for row in status_tables.jobs(LARGE.jobs, folded=True).rows]
    assert order[:3] == ["1042444", "1042433", "1042400"]
    rows = status_tables.nodes(LARGE.nodes, folded=True).rows
    assert [str(row[1]) for row in rows] == ["4", "509", "512", "512", "511"] and str(rows[0][2]) == "down+drain"
    assert sorted(name for row in rows for name in hosts(str(row[0]))) == [node.node for node in LARGE.nodes]


def test_on_a_pipe_lines_are_in_the_order_of_the_answer_and_each_item_has_one() -> None:
    assert [line.split()[0] for line in status_tables.nodes(LARGE.nodes).lines()[1:2049]] == [
        node.node for node in LARGE.nodes
    ]
    assert [line.split()[0] for line in status_tables.jobs(LARGE.jobs).lines()[1:61]] == [job.job for job in LARGE.jobs]
    assert LARGE.jobs[5].name in status_tables.jobs(LARGE.jobs).lines()[6]


@pytest.mark.parametrize(
    ("change", "trouble_of"),
    [
        ({}, trouble.ODD),
        ({"degraded": None}, trouble.FINE),
        ({"set_aside": "why"}, trouble.WRONG),
        ({"ledger_violations": 1}, trouble.WRONG),
        ({"nan_since": 0}, trouble.WRONG),
        ({"waits": "why"}, trouble.HURT),
        ({"silent": ["1 (n1)"]}, trouble.HURT),
        ({"left_out": ["1 (n1)"]}, trouble.HURT),
        ({"state": "entering"}, trouble.HURT),
        ({"ended": ENDED, "set_aside": "why"}, trouble.OVER),
    ],
)
def test_how_much_is_wrong_with_a_job(change: dict[str, Any], trouble_of: int) -> None:
    assert trouble.of_job(msgspec.convert(JOB | change, Job)) == trouble_of


@pytest.mark.parametrize(
    ("change", "trouble_of"),
    [
        ({}, trouble.FINE),
        ({"healthy": False}, trouble.WRONG),
        ({"health": NODE["health"]}, trouble.WRONG),
        ({"pair_test": NODE["health"]}, trouble.WRONG),
        ({"suspect": "why"}, trouble.HURT),
        ({"asked_since": 1.0}, trouble.HURT),
        ({"unverified": True}, trouble.ODD),
        ({"admission": "why"}, trouble.ODD),
    ],
)
def test_how_much_is_wrong_with_a_node(change: dict[str, Any], trouble_of: int) -> None:
    node = msgspec.to_builtins(LARGE.nodes[7]) | change
    assert trouble.of_node(msgspec.convert(node, Node)) == trouble_of


def test_a_name_is_not_taken_for_a_part_of_another() -> None:
    said = "n1 hears n12, x-n1, n1-ib and n1.site no more: test n1,n12 (n1)"
    assert trouble.with_names(trouble.nameless(said, "n1"), ["n1", "n2"]) == (
        "n[1-2] hears n12, x-n1, n1-ib and n[1-2].site no more: test n[1-2],n12 (n[1-2])"
    )


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


def test_a_long_last_cell_is_whole_on_a_pipe_and_goes_on_below_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Listing("node", "reason")
    long.add_row("n1", "x" * 300)
    show([long])
    assert printed(capsys)[1] == f"n1   {'x' * 300}"
    on_a_terminal(monkeypatch)
    show([long])
    assert printed(capsys) == ["NODE REASON", f"n1   {'x' * 75}", *[f"     {'x' * 75}"] * 3]


def test_a_wide_terminal_shows_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_a_terminal(monkeypatch, 200)
    show([status_tables.jobs(LARGE.jobs[:1], folded=True)])
    lines = printed(capsys)
    assert lines[0].split() == [heading.upper() for heading in status_tables.jobs([]).headings]
    assert LARGE.jobs[0].name in lines[1] and "wider terminal" not in "".join(lines)
    assert len(lines_of(["a" * 90, "b"], 60)) == 3


def test_nothing_is_said_in_a_line(snapshot) -> None:
    assert [status_tables.jobs([]).notes, status_tables.jobs([], chosen=True).notes] == snapshot


def test_a_failure_of_the_data_names_no_rank():
    data = {"kind": "data", "slots": [], "slot": None, "node": "", "severity": 3, "cause": "bad_micro_batch"}
    failure = msgspec.convert(FAILURE | data, Failure)
    assert status_tables.slots_of(failure) == "" and " data SEV3" in status_tables.failure_text(failure)
