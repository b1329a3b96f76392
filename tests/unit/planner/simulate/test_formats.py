"""Public formats of failure traces: which one a file has is found out, and bad ones are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate import load

DAY = 86400.0


def rows(path: Path) -> list[tuple[float, str, str, str]]:
    return [
        (event.seconds, event.event, event.node, event.cause.name if event.cause else "") for event in load(path).events
    ]


def fault(node: str, days: float, what: str, level: str = "Hardware Failure", desc: str = "GPU DBE ECC") -> dict:
    return {
        "node_id": node,
        "event_time": days,
        "event_type": what,
        "fault_type": {"Level": level, "Class": "GPU", "Desc": desc},
    }


def test_faults_that_start_and_end_are_in_days(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps(
            [
                fault("a", 1.0, "fault_start"),
                fault("b", 1.5, "fault_start", "Other Failure", "Unknown Error"),
                fault("b", 1.6, "fault_start", desc="NIC Lost"),
                fault("a", 2.0, "fault_end"),
                fault("b", 1.7, "fault_end", desc="NIC Lost"),
                fault("b", 3.0, "fault_end", "Other Failure", "Unknown Error"),
                fault("c", 3.5, "fault_end"),
            ]
        )
    )
    assert rows(path) == [
        (1.0 * DAY, "fail", "a", "ecc_error"),
        (1.5 * DAY, "fail", "b", "gpu_lost"),
        (2.0 * DAY, "join", "a", ""),
        (3.0 * DAY, "join", "b", ""),
    ]


@pytest.mark.parametrize("backwards", [False, True])
def test_faults_may_be_told_in_any_order(tmp_path, backwards):
    """One of no length among them, and one that begins when the one before it ends."""
    told = [
        fault("a", 1.0, "fault_start"),
        fault("a", 1.5, "fault_end"),
        fault("a", 1.5, "fault_start"),
        fault("b", 2.0, "fault_start"),
        fault("b", 2.0, "fault_end"),
        fault("a", 3.0, "fault_end"),
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(told[::-1] if backwards else told))
    assert [(seconds / DAY, what, node) for seconds, what, node, _ in rows(path)] == [
        (1.0, "fail", "a"),
        (2.0, "fail", "b"),
        (2.0, "join", "b"),
        (3.0, "join", "a"),
    ]


@pytest.mark.parametrize(
    "told",
    [
        [{"node_id": 0, "start": 10, "end": 20}, {"node_id": 1, "start": 12, "end": 18}],
        {"faults": [{"node_id": 0, "start": 10, "end": 20}, {"node_id": 1, "start": 12, "end": 18}]},
        {"0": [{"start": 10, "end": 20}], "1": [{"node_id": "", "start": 12, "end": 18}]},
    ],
    ids=["list", "named list", "by node"],
)
def test_a_node_may_be_0_and_a_fault_names_it_best_itself(tmp_path, told):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(told))
    assert [(seconds, node) for seconds, _, node, _ in rows(path)] == [(10, "0"), (12, "1"), (18, "1"), (20, "0")]


@pytest.mark.parametrize(
    "told",
    [
        [{"node": "a", "start": 10, "end": 20}, {"node": "b", "start": 15, "end": None}],
        {"a": [[10, 20]], "b": [[15, None]]},
        {"a": [{"start": 10, "end": 20}], "b": [{"start": 15}]},
    ],
    ids=["list", "pairs", "objects"],
)
def test_times_between_which_nodes_are_away(tmp_path, told):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(told))
    assert rows(path) == [(10, "fail", "a", "node_failed"), (15, "fail", "b", "node_failed"), (20, "join", "a", "")]


def test_dates_count_from_the_earliest(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "Hostname,Reason,Start Time,End Time\n"
        "n1,NVLink down,2026-01-01T01:00:00Z,2026-01-01 02:00:00\n"
        "n2,,2026-01-01T00:00:00,Unknown\n"
    )
    assert rows(path) == [
        (0, "fail", "n2", "node_failed"),
        (3600, "fail", "n1", "nvlink_error"),
        (7200, "join", "n1", ""),
    ]


def test_start_and_stop_in_seconds(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufeffnode,start,stop\na,5,10\na,8,12\n\na,20,30\n", encoding="utf-8")
    assert rows(path) == [
        (5, "fail", "a", "node_failed"),
        (12, "join", "a", ""),
        (20, "fail", "a", "node_failed"),
        (30, "join", "a", ""),
    ]


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize(
    "start, stop", [("11011231", "11011240"), ("20150630", "20160101.25"), ("20150630.5", "20160101")]
)
def test_eight_digits_are_seconds_and_no_date(tmp_path, kind, start, stop):
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        path.write_text(f"node,start,stop\na,{start},{stop}\nb,5,99999999\n")
    else:
        path.write_text(f'{{"a": [[{start}, {stop}]], "b": [[5, 99999999]]}}')
    assert [(seconds, what, node) for seconds, what, node, _ in rows(path)] == [
        (5, "fail", "b"),
        (float(start), "fail", "a"),
        (float(stop), "join", "a"),
        (99999999, "join", "b"),
    ]


UNIX = 1_767_225_600  # 2026-01-01


@pytest.mark.parametrize(
    "text",
    [
        f"node,start,stop\na,{UNIX + 3600},{UNIX + 7200}\nb,{UNIX},unknown\n",
        f'{{"a": [[{UNIX + 3600}, {UNIX + 7200.0}]], "b": [[{UNIX}, null]]}}',
        f"seconds,event,node,cause\n{UNIX + 3600},fail,a,\n{UNIX + 7200},join,a,\n{UNIX},fail,b,\n",
        f"{UNIX}000,remove,b\n{UNIX + 3600}000,remove,a\n{UNIX + 7200}000,add,a\n",
        json.dumps(
            [
                fault("b", UNIX / DAY, "fault_start"),
                fault("a", (UNIX + 3600) / DAY, "fault_start"),
                fault("a", (UNIX + 7200) / DAY, "fault_end"),
            ]
        ),
    ],
    ids=["csv", "json", "ours", "churn", "days"],
)
def test_unix_times_count_from_the_earliest(tmp_path, text):
    path = tmp_path / "t"
    path.write_text(text)
    assert [(round(seconds, 3), what, node) for seconds, what, node, _ in rows(path)] == [
        (0, "fail", "b"),
        (3600, "fail", "a"),
        (7200, "join", "a"),
    ]


def test_years_in_seconds_stay_as_they_are(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("node,start,stop\na,5,10\na,1000000000,1000000010\n")
    assert [seconds for seconds, *_ in rows(path)] == [5, 10, 1000000000, 1000000010]


def test_a_date_without_dashes_is_one_by_its_time(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("node,start,stop\na,20260101T000000,20260101T010000Z\n")
    assert [seconds for seconds, *_ in rows(path)] == [0, 3600]


def test_only_a_line_break_ends_a_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("node,cause,start,stop\r\na,ecc \u2028 error\x0b,5,10\r\nb,disk\x85,6,\r\n", encoding="utf-8")
    assert rows(path) == [
        (5, "fail", "a", "ecc_error"),
        (6, "fail", "b", "local_disk_error"),
        (10, "join", "a", ""),
    ]


@pytest.mark.parametrize(
    "text,why",
    [
        ("{", "not valid JSON"),
        ("[1]", "expected objects"),
        ('{"a": 1}', "expected a list of faults"),
        ('[{"node": "a", "start": 5, "end": 4}]', "ends before it starts"),
        ('[{"node": "a", "start": "soon", "end": 4}]', "neither a number of 0 or more nor an ISO date"),
        ('[{"start": 1, "end": 4}]', "the node's name is missing"),
        ('[{"node": "a", "end": 4}]', "neither a number"),
        ('[{"node_id": "a", "event_time": 1, "event_type": "boom"}]', "fault_start or fault_end"),
        ("node,start,stop\na,1\n", "line 2: expected 3 fields, found 2"),
        ("node,start,stop\na,-1,2\n", "line 2: the time '-1'"),
        ("node,start,stop\na,20250101,20250102\nb,20250103,unknown\n", "write dates as 2025-01-31"),
        ('[{"node": "a", "start": 20250101, "end": 20250102}]', "write dates as 2025-01-31"),
        (f"node,start,stop\na,{UNIX}000,{UNIX + 60}000\n", "give seconds"),
        ("node_id,event_type,event_start_time,event_stop_time\n7,1,0,36\n7,0,36,40\n", "keep the rows of the outages"),
        (
            "JobID,hostname,start,end\n1,n1,0,100\n2,n1,200,300\n",
            "runs of jobs, for they have jobid: keep",
        ),
        ("Task Name,node,start_time,end_time\nt,n1,0,100\n", "runs of jobs"),
        ('[{"job_id": 1, "node": "n1", "start": 0, "end": 100}]', "runs of jobs, for they have job_id"),
        ('{"a": [[0, 100]], "b": [["2026-01-01", "2026-01-02"]]}', "write all in one way"),
        ("node,start,stop\na,2026-01-01,5\n", "write all in one way"),
        ("x,y,z\n1,2,3\n", "the first line must be"),
        ("", "is empty"),
    ],
)
def test_refusals_are_one_line_with_the_place(tmp_path, text, why):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        load(path)
    assert why in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


EVENTS = """Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User
c1||2025-03-01T00:00:00|Unknown||Cluster Registered TRES|
c1|n3|2025-03-04T08:00:00|2025-03-04T11:00:00|DOWN*|Not responding|slurm(64030)
c1|n7|2025-03-09T21:00:00|2025-03-10T09:00:00|DRAIN|NHC: a check, of ports | failed|root(0)
c1|n7|2025-03-11T00:00:00|2025-03-11T01:00:00|DOWN|gres/gpu count is lower (7 < 8), twice|slurm(64030)
c1|n8|2025-03-12T00:00:00|2025-03-12T01:00:00|DOWN$|maintenance|root(0)
c1|n8|2025-03-13T00:00:00|2025-03-13T01:00:00|IDLE~||slurm(64030)
c1|n9|2025-03-14T00:00:00|Unknown|DOWN*+DRAIN|Not responding|slurm(64030)
c1|n9|2025-03-02T00:00:00|2025-03-03T00:00:00|DRAINED^|reboot|root(0)
"""


@pytest.mark.parametrize("variant", ["bars", "trailing bars", "commas", "windows"])
def test_events_of_sacctmgr(tmp_path, variant):
    text = EVENTS
    if variant == "trailing bars":
        text = text.replace("\n", "|\n")
    elif variant == "commas":
        text = text.replace("|", ",")
    elif variant == "windows":
        text = text.replace("\n", "\r\n")
    path = tmp_path / "events.txt"
    path.write_text(text)
    events = load(path).events
    assert [(event.node, event.event, event.seconds / 3600) for event in events] == [
        ("n3", "fail", 0.0),
        ("n3", "join", 3.0),
        ("n7", "fail", 133.0),
        ("n7", "join", 145.0),
        ("n7", "fail", 160.0),
        ("n7", "join", 161.0),
        ("n9", "fail", 232.0),
    ]
    assert events[4].failure.name == "gpu_lost"


def test_events_of_sacctmgr_without_a_failure_make_an_empty_trace(tmp_path):
    path = tmp_path / "events.txt"
    kept = (line for line in EVENTS.splitlines() if "NHC" not in line and ("DOWN" not in line or "DOWN$" in line))
    path.write_text("\n".join(kept))
    trace = load(path)
    assert trace.events == ()
    assert trace.notes[0].startswith("3 of 3 rows") and "n8, DOWN$, 'maintenance'" in trace.notes[0]


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        ("unicron[health]: GPU 3: uncorrectable ECC error", True),
        ("NHC: check_nvsmi_healthmon: GPU 2 not found", True),
        ("Kill task failed", True),
        ("gres/gpu count reported lower than configured (7 < 8)", True),
        ("firmware update on Tuesday", False),
        ("", False),
        ("moved by unicron[health]", False),
    ],
)
def test_what_a_program_drained_has_failed_and_what_somebody_drained_has_not(tmp_path, reason, counts):
    path = tmp_path / "events.txt"
    path.write_text(
        f"NodeName|TimeStart|TimeEnd|State|Reason\nn1|2026-01-02T00:00:00|2026-01-02T06:00:00|DRAIN|{reason}\n"
    )
    trace = load(path)
    assert bool(trace.events) == counts
    assert len(trace.notes) == (not counts), "what is left out is said"


def test_events_of_sacctmgr_without_the_state_are_refused(tmp_path):
    path = tmp_path / "events.txt"
    path.write_text("NodeName|TimeStart|TimeEnd\nn1|2026-01-02T00:00:00|2026-01-02T06:00:00\n")
    with pytest.raises(PlanError, match="print State and Reason"):
        load(path)


@pytest.mark.parametrize("column", ["state", "status", "Node State", "health"])
def test_times_of_health_are_no_outages(tmp_path, column):
    path = tmp_path / "t.csv"
    path.write_text(
        f"node,{column},start,end\nn1,IDLE,0,10\nn1,DOWN,10,20\nn2,MAINT,0,5\nn3,ALLOCATED,0,30\nn4,DOWN$,1,2\n"
        "n5,Not Responding,7,8\n"
    )
    trace = load(path)
    assert {event.node for event in trace.events} == {"n1", "n5"} and "4 of 6 rows" in trace.notes[0]
    rows = [{"node": "a", "start": 0, "end": 4, "state": "up"}, {"node": "b", "start": 0, "end": 4, "state": "failed"}]
    path.write_text(json.dumps(rows))
    assert {event.node for event in load(path).events} == {"b"}


def test_a_state_that_nobody_knows_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("node,status,start,end\nn1,resolved,0,10\n")
    with pytest.raises(PlanError, match="without the column status"):
        load(path)


def test_numbers_of_nodes_over_time(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(
        "2021-12-11, 11:11:30, 3\n2021-12-11, 11:12:30, 1\n2021-12-11, 11:13:00, 2\n2021-12-11, 11:14:30, 4\n"
    )
    expected = [
        (0.0, "fail", "node4"),
        (60.0, "fail", "node2"),
        (60.0, "fail", "node3"),
        (90.0, "join", "node2"),
        (180.0, "join", "node3"),
        (180.0, "join", "node4"),
    ]
    trace = load(path)
    assert sorted((event.seconds, event.event, event.node) for event in trace.events) == expected
    assert "not which" in trace.notes[0]
    path.write_text(json.dumps({"metadata": {"gap_seconds": 30}, "data": [3, 3, 1, 2, 2, 2, 4]}))
    assert sorted((event.seconds, event.event, event.node) for event in load(path).events) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"metadata": {"gap_seconds": 600}, "data": [1, 1, 0]}', "for each change write a line"),
        ('{"metadata": {"gap_seconds": 600}, "data": [1, 2.5]}', "numbers of nodes"),
        ('{"metadata": {"gap_seconds": 600}}', "expected a list"),
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 11:13:10\n", "line 2: expected `date, time, nodes`"),
        ("2021-12-11, 11:11:30, 5500000\n", "is this the number of nodes?"),
    ],
)
def test_numbers_that_cannot_be_read_are_refused_with_what_to_do(tmp_path, text, why):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        load(path)
    assert why in str(caught.value) and "\n" not in str(caught.value)
