"""Formats of failure traces: which one a file has is found out, and bad ones are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate import Trace, load

DAY = 86400.0
UNIX = 1_767_225_600  # 2026-01-01


@pytest.fixture
def read(tmp_path) -> Callable[[Any], Trace]:
    """Reads a trace from a file of this text, or of this as JSON."""

    def read(content: Any) -> Trace:
        path = tmp_path / "t"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return load(path)

    return read


def rows(trace: Trace) -> list[tuple[float, str, str, str]]:
    """(seconds, event, node, cause) of each event."""
    return [
        (round(event.seconds, 3), event.event, event.node, event.cause.name if event.cause else "")
        for event in trace.events
    ]


def fault(node: str, days: float, what: str, level: str = "Hardware Failure", desc: str = "GPU DBE ECC") -> dict:
    kind = {"Level": level, "Class": "GPU", "Desc": desc}
    return {"node_id": node, "event_time": days, "event_type": what, "fault_type": kind}


FAULTS = [
    fault("a", 1.0, "fault_start"),
    fault("b", 1.5, "fault_start", "Other Failure", "Unknown Error"),
    fault("b", 1.6, "fault_start", desc="NIC Lost"),
    fault("a", 2.0, "fault_end"),
    fault("b", 1.7, "fault_end", desc="NIC Lost"),
    fault("b", 3.0, "fault_end", "Other Failure", "Unknown Error"),
    fault("c", 3.5, "fault_end"),
]
# One of no length, and one that begins when the one before it ends.
IN_ANY_ORDER = [
    fault("a", 1.0, "fault_start"),
    fault("a", 1.5, "fault_end"),
    fault("a", 1.5, "fault_start"),
    fault("b", 2.0, "fault_start"),
    fault("b", 2.0, "fault_end"),
    fault("a", 3.0, "fault_end"),
]
READ_IN_ANY_ORDER = [
    (1.0 * DAY, "fail", "a", "ecc_error"),
    (2.0 * DAY, "fail", "b", "ecc_error"),
    (2.0 * DAY, "join", "b", ""),
    (3.0 * DAY, "join", "a", ""),
]


@pytest.mark.parametrize(
    ("content", "events"),
    [
        pytest.param(
            FAULTS,
            [
                (1.0 * DAY, "fail", "a", "ecc_error"),
                (1.5 * DAY, "fail", "b", "gpu_lost"),
                (2.0 * DAY, "join", "a", ""),
                (3.0 * DAY, "join", "b", ""),
            ],
            id="faults that start and end are in days",
        ),
        pytest.param(IN_ANY_ORDER, READ_IN_ANY_ORDER, id="faults in order"),
        pytest.param(IN_ANY_ORDER[::-1], READ_IN_ANY_ORDER, id="faults backwards"),
        pytest.param(
            "Hostname,Reason,Start Time,End Time\n"
            "n1,NVLink down,2026-01-01T01:00:00Z,2026-01-01 02:00:00\nn2,,2026-01-01T00:00:00,Unknown\n",
            [(0, "fail", "n2", "node_failed"), (3600, "fail", "n1", "nvlink_error"), (7200, "join", "n1", "")],
            id="dates count from the earliest",
        ),
        pytest.param(
            "\ufeffnode,start,stop\na,5,10\na,8,12\n\na,20,30\n",
            [
                (5, "fail", "a", "node_failed"),
                (12, "join", "a", ""),
                (20, "fail", "a", "node_failed"),
                (30, "join", "a", ""),
            ],
            id="start and stop in seconds",
        ),
        pytest.param(
            "node,start,stop\na,5,10\na,1000000000,1000000010\n",
            [
                (5, "fail", "a", "node_failed"),
                (10, "join", "a", ""),
                (1000000000, "fail", "a", "node_failed"),
                (1000000010, "join", "a", ""),
            ],
            id="years in seconds stay as they are",
        ),
        pytest.param(
            "node,start,stop\na,20260101T000000,20260101T010000Z\n",
            [(0, "fail", "a", "node_failed"), (3600, "join", "a", "")],
            id="a date without dashes is one by its time",
        ),
        pytest.param(
            "node,cause,start,stop\r\na,ecc \u2028 error\x0b,5,10\r\nb,disk\x85,6,\r\n",
            [(5, "fail", "a", "ecc_error"), (6, "fail", "b", "local_disk_error"), (10, "join", "a", "")],
            id="only a line break ends a line",
        ),
        pytest.param(
            "0,add,i-1\n0,add,i-2\n60000,remove,i-1\n120000,add,i-3\n",
            [
                (0, "join", "i-1", ""),
                (0, "join", "i-2", ""),
                (60, "fail", "i-1", "lost_connection"),
                (120, "join", "i-3", ""),
            ],
            id="churn is in milliseconds",
        ),
    ],
)
def test_a_trace_is_read(read, content, events):
    assert rows(read(content)) == events


@pytest.mark.parametrize(
    "content",
    [
        [{"node_id": 0, "start": 10, "end": 20}, {"node_id": 1, "start": 12, "end": 18}],
        {"faults": [{"node_id": 0, "start": 10, "end": 20}, {"node_id": 1, "start": 12, "end": 18}]},
        {"0": [{"start": 10, "end": 20}], "1": [{"node_id": "", "start": 12, "end": 18}]},
    ],
    ids=["list", "named list", "by node"],
)
def test_a_node_may_be_0_and_a_fault_names_it_best_itself(read, content):
    events = [(seconds, node) for seconds, _, node, _ in rows(read(content))]
    assert events == [(10, "0"), (12, "1"), (18, "1"), (20, "0")]


@pytest.mark.parametrize(
    "content",
    [
        [{"node": "a", "start": 10, "end": 20}, {"node": "b", "start": 15, "end": None}],
        {"a": [[10, 20]], "b": [[15, None]]},
        {"a": [{"start": 10, "end": 20}], "b": [{"start": 15}]},
    ],
    ids=["list", "pairs", "objects"],
)
def test_times_between_which_nodes_are_away(read, content):
    events = [(10, "fail", "a", "node_failed"), (15, "fail", "b", "node_failed"), (20, "join", "a", "")]
    assert rows(read(content)) == events


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize(
    "start, stop", [("11011231", "11011240"), ("20150630", "20160101.25"), ("20150630.5", "20160101")]
)
def test_eight_digits_are_seconds_and_no_date(read, kind, start, stop):
    table = f"node,start,stop\na,{start},{stop}\nb,5,99999999\n"
    pairs = f'{{"a": [[{start}, {stop}]], "b": [[5, 99999999]]}}'
    assert [row[:3] for row in rows(read(table if kind == "csv" else pairs))] == [
        (5, "fail", "b"),
        (float(start), "fail", "a"),
        (float(stop), "join", "a"),
        (99999999, "join", "b"),
    ]


@pytest.mark.parametrize(
    "content",
    [
        f"node,start,stop\na,{UNIX + 3600},{UNIX + 7200}\nb,{UNIX},unknown\n",
        f'{{"a": [[{UNIX + 3600}, {UNIX + 7200.0}]], "b": [[{UNIX}, null]]}}',
        f"seconds,event,node,cause\n{UNIX + 3600},fail,a,\n{UNIX + 7200},join,a,\n{UNIX},fail,b,\n",
        f"{UNIX}000,remove,b\n{UNIX + 3600}000,remove,a\n{UNIX + 7200}000,add,a\n",
        [
            fault("b", UNIX / DAY, "fault_start"),
            fault("a", (UNIX + 3600) / DAY, "fault_start"),
            fault("a", (UNIX + 7200) / DAY, "fault_end"),
        ],
    ],
    ids=["csv", "json", "ours", "churn", "days"],
)
def test_unix_times_count_from_the_earliest(read, content):
    assert [row[:3] for row in rows(read(content))] == [(0, "fail", "b"), (3600, "fail", "a"), (7200, "join", "a")]


def test_a_name_that_the_table_lacks_is_judged_by_what_follows(read):
    trace = read(
        "seconds,event,node,cause\n10,fail,a,gremlins\n20,join,a,\n30,fail,a,gremlins\n"
        "40,fail,b,ECC errors\n50,fail,c,\n"
    )
    assert [event.cause and event.cause.severity for event in trace.events] == [1, None, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "why"),
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
        ('{"metadata": {"gap_seconds": 600}, "data": [1, 1, 0]}', "for each change write a line"),
        ('{"metadata": {"gap_seconds": 600}, "data": [1, 2.5]}', "numbers of nodes"),
        ('{"metadata": {"gap_seconds": 600}}', "expected a list"),
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 11:13:10\n", "line 2: expected `date, time, nodes`"),
        ("2021-12-11, 11:11:30, 5500000\n", "is this the number of nodes?"),
        ("NodeName|TimeStart|TimeEnd\nn1|2026-01-02T00:00:00|2026-01-02T06:00:00\n", "print State and Reason"),
        ("node,status,start,end\nn1,resolved,0,10\n", "without the column status"),
        ("hello\n", "first line must be the header"),
        ("this is no trace, nor any table\n", "first line must be the header"),
        ("seconds;event;node;cause\n1;fail;a;\n", "there are semicolons between its fields: write commas"),
        ("node\tstart\tstop\na\t1\t2\n", "there are tabs between its fields: write commas"),
        ("node;start;stop\na;1,5;2,5\n", "decimals with a point"),
        ("100;add;node1\n", "there are semicolons between its fields"),
        ("2026-01-31\t00:10:00\t16\n", "there are tabs between its fields"),
        ("node  start  stop\na  1  2\n", "there are spaces between its fields"),
        ("seconds,event,node,cause\nx,fail,a,ecc\n", "line 2"),
        ("seconds,event,node,cause\n-1,fail,a,ecc\n", "0 or more"),
        ("seconds,event,node,cause\nnan,fail,a,ecc\n", "line 2"),
        ("seconds,event,node,cause\n1,melt,a,ecc\n", "fail or join"),
        ("seconds,event,node,cause\n1,fail,,ecc\n", "name is missing"),
        ("seconds,event,node,cause\n1,fail\n", "found 2 fields"),
        ("0,add,a\n1,explode,a\n", "add|remove"),
        ("0,add,a\nx,remove,a\n", "line 2"),
        ("seconds,event,node,cause\ninf,join,a,\n", "0 or more"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line_with_the_place(read, tmp_path, text, why):
    with pytest.raises(PlanError) as caught:
        read(text)
    assert why in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("\n", "|\n"), ("|", ","), ("\n", "\r\n")], ids=["bars", "trailing", "commas", "windows"]
)
def test_events_of_sacctmgr(read, old, new):
    events = read(EVENTS.replace(old, new) if old else EVENTS).events
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


def test_events_of_sacctmgr_without_a_failure_make_an_empty_trace(read):
    kept = (line for line in EVENTS.splitlines() if "NHC" not in line and ("DOWN" not in line or "DOWN$" in line))
    trace = read("\n".join(kept))
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
def test_what_a_program_drained_has_failed_and_what_somebody_drained_has_not(read, reason, counts):
    row = f"n1|2026-01-02T00:00:00|2026-01-02T06:00:00|DRAIN|{reason}"
    trace = read(f"NodeName|TimeStart|TimeEnd|State|Reason\n{row}\n")
    assert bool(trace.events) == counts and len(trace.notes) == (not counts), "what is left out is said"


@pytest.mark.parametrize("column", ["state", "status", "Node State", "health"])
def test_times_of_health_are_no_outages(read, column):
    trace = read(
        f"node,{column},start,end\nn1,IDLE,0,10\nn1,DOWN,10,20\nn2,MAINT,0,5\nn3,ALLOCATED,0,30\nn4,DOWN$,1,2\n"
        "n5,Not Responding,7,8\n"
    )
    assert {event.node for event in trace.events} == {"n1", "n5"} and "4 of 6 rows" in trace.notes[0]
    times = {"start": 0, "end": 4}
    trace = read([{"node": "a", "state": "up", **times}, {"node": "b", "state": "failed", **times}])
    assert {event.node for event in trace.events} == {"b"}


@pytest.mark.parametrize(
    "content",
    [
        "2021-12-11, 11:11:30, 3\n2021-12-11, 11:12:30, 1\n2021-12-11, 11:13:00, 2\n2021-12-11, 11:14:30, 4\n",
        {"metadata": {"gap_seconds": 30}, "data": [3, 3, 1, 2, 2, 2, 4]},
    ],
    ids=["lines", "JSON"],
)
def test_numbers_of_nodes_over_time(read, content):
    trace = read(content)
    assert sorted(row[:3] for row in rows(trace)) == [
        (0.0, "fail", "node4"),
        (60.0, "fail", "node2"),
        (60.0, "fail", "node3"),
        (90.0, "join", "node2"),
        (180.0, "join", "node3"),
        (180.0, "join", "node4"),
    ]
    assert "not which" in trace.notes[0]
