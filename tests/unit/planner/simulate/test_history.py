"""A site's history of failures: which runs a failure has ended, what went on after it, and what that has cost."""

from __future__ import annotations

import time

import pytest

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate.figure import draw_history
from unicron_planner.simulate.history import COMMAND, Costs, Run, judge, load

HEADER = "JobID|User|JobName|State|ExitCode|Submit|Start|End|NNodes"
FREE = Costs(checkpoint=0.0, setup=0.0)


def moment(hours: float) -> str:
    days, rest = divmod(hours, 24)
    return f"2026-01-{1 + int(days):02d}T{int(rest):02d}:{round(rest % 1 * 60):02d}:00"


def row(
    job: str, state: str, start: float, end: float | None, nodes=8, code="0:0", name="gpt", submit: float | None = None
) -> str:
    ended = "Unknown" if end is None else moment(end)
    return (
        f"{job}|ann|{name}|{state}|{code}|{moment(start if submit is None else submit)}|{moment(start)}|{ended}|{nodes}"
    )


def history_of(tmp_path, *rows: str, costs: Costs = FREE):
    path = tmp_path / "history.txt"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return judge(load(path), costs)


def test_a_requeued_job_by_hand(tmp_path):
    """8 nodes; one fails after 10 h; an hour later all run again. 14 min to start, a checkpoint every 30 min."""
    found = history_of(tmp_path, row("7", "NODE_FAIL", 0, 10), row("7", "COMPLETED", 11, 20), costs=Costs())
    (failure,) = found.failures
    assert failure.cause.name == "node_failed" and failure.waited == 3600
    assert failure.lost == 8 * (3600 + 840 + 900)
    assert failure.with_unicron == pytest.approx(8 * (5.6 + 60 + 15) + 3600)
    assert found.worked == 8 * 19 * 3600
    told = found.to_dict()
    assert (told["waiting_node_hours"], told["waiting_node_hours_with_unicron"]) == (8, 1)
    assert told["saved_waiting_node_hours"] == 7 and told["lost_node_hours"] == found.lost / 3600


@pytest.mark.parametrize("minutes,lost", [(6, 6), (12, 12), (24, 24), (60, 29)])
def test_no_failure_costs_more_than_the_run_that_it_has_ended(tmp_path, minutes, lost):
    """14 min to start and half of 30 are 29 min, of which the shorter runs have not done so much."""
    found = history_of(
        tmp_path, row("7", "NODE_FAIL", 0, minutes / 60), row("7", "COMPLETED", minutes / 60, 20), costs=Costs()
    )
    assert found.lost == 8 * 60 * lost


@pytest.mark.parametrize(
    "state,code,cause",
    [
        ("FAILED", "0:9", "killed_from_outside"),
        ("FAILED", "137:0", "killed_from_outside"),
        ("FAILED", "1:0", "exited_abnormally"),
        ("OUT_OF_MEMORY", "0:125", "host_out_of_memory"),
        ("BOOT_FAIL", "0:0", "node_failed"),
    ],
)
def test_causes(tmp_path, state, code, cause):
    found = history_of(tmp_path, row("7", state, 0, 10, code=code), row("8", "RUNNING", 12, None, submit=11))
    assert [failure.cause.name for failure in found.failures] == [cause]
    assert found.failures[0].lost == 8 * 2 * 3600


@pytest.mark.parametrize("state", ["COMPLETED", "TIMEOUT", "CANCELLED by 1000", "PREEMPTED", "RUNNING", "DEADLINE"])
def test_what_is_no_failure(tmp_path, state):
    assert history_of(tmp_path, row("7", state, 0, 10), row("7", "COMPLETED", 11, 12)).failures == ()


def test_what_was_requeued_without_a_word_is_told_apart(tmp_path):
    found = history_of(tmp_path, row("7", "REQUEUED", 0, 10, code="1:0"), row("7", "COMPLETED", 11, 12))
    assert found.failures == ()
    told = found.to_dict()["not_counted"]
    assert told == {"script's own": 0, "nobody went on": 0, "requeued, why is not told": 1}


def test_what_nobody_goes_on_with_is_not_counted(tmp_path):
    others = [
        row("8", "COMPLETED", 11, 12, name="other"),
        row("9", "COMPLETED", 11, 12, nodes=4),
        row("10", "COMPLETED", 45, 46, submit=44),
        row("11", "COMPLETED", 5, 6, submit=4),
    ]
    found = history_of(tmp_path, row("7", "NODE_FAIL", 0, 10), *others)
    assert (found.failures, found.left) == ((), 1)


def test_no_run_goes_on_from_two_failures(tmp_path):
    failed = [row("7", "NODE_FAIL", 0, 10), row("8", "NODE_FAIL", 1, 9)]
    found = history_of(tmp_path, *failed, row("9", "COMPLETED", 12, 13, submit=11))
    assert [(failure.run.job, failure.waited) for failure in found.failures] == [("8", 3 * 3600)] and found.left == 1
    found = history_of(
        tmp_path, *failed, *(row(job, "COMPLETED", start, 20, submit=11) for job, start in (("9", 12), ("10", 14)))
    )
    assert [failure.waited for failure in found.failures] == [3 * 3600, 4 * 3600] and found.left == 0


def test_what_was_requeued_goes_on_with_itself_and_not_with_another(tmp_path):
    requeued = [row("7", "NODE_FAIL", 0, 10), row("7", "COMPLETED", 12, 20, submit=10.5)]
    found = history_of(tmp_path, *requeued, row("8", "NODE_FAIL", 1, 9))
    assert [(failure.run.job, failure.waited) for failure in found.failures] == [("7", 2 * 3600)] and found.left == 1


def test_a_requeued_run_goes_on_with_itself_though_another_began_before(tmp_path):
    requeued = [row("7", "NODE_FAIL", 0, 10), row("7", "COMPLETED", 13, 20, submit=10.5)]
    again = [row("8", "NODE_FAIL", 1, 10.5), row("9", "COMPLETED", 11, 20, submit=10.8)]
    found = history_of(tmp_path, *requeued, *again)
    assert [(failure.run.job, failure.waited) for failure in found.failures] == [("7", 3 * 3600), ("8", 1800)]
    assert found.left == 0


def test_an_element_of_the_same_array_does_not_go_on_from_another(tmp_path):
    for start in (1, 0):  # 0: it began in the second of its submission
        siblings = [row("7_0", "NODE_FAIL", start, 10, submit=0), row("7_1", "COMPLETED", 11, 12, submit=0)]
        assert history_of(tmp_path, *siblings).left == 1


def test_the_tasks_of_a_large_array_are_judged_at_once():
    """Defect: each was compared with all others, which took minutes."""
    runs = [
        Run(f"7_{task}", "ann", "sweep", "FAILED", "1:0", 0.0, 300.0 * task, 300.0 * task + 50_000, 8)
        for task in range(50_000)
    ]
    assert judge(runs).left == 50_000


def test_the_components_of_a_heterogeneous_job_fail_once(tmp_path):
    failed = [row("7+0", "FAILED", 0, 10, nodes=1, code="1:0"), row("7+1", "NODE_FAIL", 0, 10, nodes=3)]
    again = [row("8+0", "COMPLETED", 12, 20, nodes=1, submit=11), row("8+1", "COMPLETED", 12, 20, nodes=3, submit=11)]
    found = history_of(tmp_path, *failed, *again)
    (failure,) = found.failures
    assert (failure.run.job, failure.run.nodes, failure.cause.name) == ("7", 4, "node_failed")
    assert (found.runs, failure.lost) == (2, 4 * 2 * 3600)


def test_of_files_that_were_joined_each_run_counts_once(tmp_path):
    failed, again = row("7", "NODE_FAIL", 0, 10), row("7", "COMPLETED", 11, 20)
    once = history_of(tmp_path, failed, again)
    found = history_of(tmp_path, failed, row("7", "RUNNING", 11, None), HEADER, failed, again)
    assert found == once and found.runs == 2


def test_a_run_goes_on_with_itself_in_the_hour_that_is_there_twice(tmp_path, monkeypatch):
    """02:50 in summer time, 02:05 in winter time: a quarter of an hour."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = history_of(
            tmp_path,
            "7|ann|gpt|NODE_FAIL|0:0|2025-10-25T00:00:00|2025-10-25T00:00:00|2025-10-26T02:50:00|8",
            "7|ann|gpt|COMPLETED|0:0|2025-10-26T02:50:10|2025-10-26T02:05:00|2025-10-26T09:10:00|8",
        )
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [failure.waited for failure in found.failures] == [900]


@pytest.mark.parametrize(
    "state,code", [("FAILED", "1:0"), ("FAILED", "0:11"), ("FAILED", "139:0"), ("OUT_OF_MEMORY", "0:125")]
)
def test_what_fails_soon_after_its_start_is_the_scripts_own(tmp_path, state, code):
    found = history_of(tmp_path, row("7", state, 0, 0.1, code=code), row("8", "COMPLETED", 1, 2))
    assert (found.failures, found.early) == ((), 1)


def test_a_node_may_fail_soon_after_the_start(tmp_path):
    found = history_of(tmp_path, row("7", "NODE_FAIL", 0, 0.1), row("7", "COMPLETED", 1, 2))
    assert ([failure.cause.name for failure in found.failures], found.early) == (["node_failed"], 0)


def test_small_jobs_steps_and_what_never_started_are_left_out(tmp_path):
    found = history_of(
        tmp_path,
        row("7", "NODE_FAIL", 0, 10, nodes=1),
        row("7", "COMPLETED", 11, 12, nodes=1),
        row("8.batch", "FAILED", 0, 10),
        f"9|ann|gpt|PENDING|0:0|{moment(0)}|Unknown|Unknown|8",
    )
    assert (found.runs, found.failures) == (0, ())


@pytest.mark.parametrize(
    "name",
    [
        "gpt\n7b",
        "\n",
        "a|b\n\nc|d\n",
        "9|ann|x\n|y",
        "gpt|7b",
        "|gpt||7b|",
        "gpt\x0b7b",
        "gpt\x857b",
        "gpt\u20287b",
        "gpt\r7b",
        pytest.param("x" * 200_000, id="long"),
    ],
)
def test_a_jobs_name_may_hold_what_parts_fields_or_lines_elsewhere(tmp_path, name):
    path = tmp_path / "history.txt"
    rows = [HEADER, row("7", "NODE_FAIL", 0, 10, name=name), "", row("8", "COMPLETED", 11, 12, name=name, submit=10.5)]
    path.write_bytes("\ufeff".encode() + "\r\n".join(rows).encode())
    first, second = load(path)
    assert (first.name, first.state, first.nodes, second.name) == (name.strip(), "NODE_FAIL", 8, name.strip())
    assert [failure.waited for failure in judge([first, second], FREE).failures] == [3600]


@pytest.mark.parametrize(
    "text,why",
    [
        ("JobID|State\n1|FAILED\n", "no column user"),
        ("", "no column"),
        (f"{HEADER}\n{row('1', 'FAILED', 0, 1)}\n".replace("|", ";"), "has semicolons between its fields"),
        (f"{HEADER}\n{row('1', 'FAILED', 0, 1)}\n".replace("|", "\t"), "has tabs between its fields"),
        (f"{HEADER}\n{row('1', 'FAILED', 0, 1)}\n".replace("|", ","), "has commas between its fields"),
        (f"{HEADER}\n{row('1', 'FAILED', 0, 1)}\n".replace("|", "   "), "has spaces between its fields"),
        (f"{HEADER}\n1|ann\n", "line 2: expected 9 fields, found 2"),
        (f"{HEADER}\n1|ann|x|FAILED|0:0|a|b|c|2\n", "is no time as sacct prints it"),
        (f"{HEADER}|Comment\n\n{row('1', 'FAILED', 0, 1)}|a|b\n", "line 3: '8' is no time as sacct prints it"),
        (f"{HEADER}\n{row('1', 'FAILED', 0, 1)}x\n", "NNodes must be a number"),
    ],
)
def test_refusals_are_one_line(tmp_path, text, why):
    path = tmp_path / "history.txt"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        load(path)
    assert why in str(caught.value) and "\n" not in str(caught.value)
    assert not any(words in why for words in ("no column", "no time", "between")) or COMMAND in str(caught.value)


def test_the_figure_is_drawn_with_and_without_failures(tmp_path):
    for number, rows in enumerate(([], [row("7", "NODE_FAIL", 0, 10), row("7", "RUNNING", 11, None)])):
        path = tmp_path / f"{number}.svg"
        draw_history(history_of(tmp_path, *rows), path)
        assert path.read_text().rstrip().endswith("</svg>")


def test_a_record_that_cannot_be_read_is_left_out_and_said(tmp_path):
    """Defect: one name with a line feed ended the account of a whole site."""
    path, wrong = tmp_path / "history.txt", list[str]()
    fake = row("9", "FAILED", 0, 5, name="x")
    rows = [row("7", "NODE_FAIL", 0, 10), row("6", "FAILED", 0, 10, name=f"y\n{fake}\nz"), "1|ann|gp"]
    path.write_text("\n".join([HEADER, *rows, row("7", "COMPLETED", 11, 20)]))
    runs = {(run.job, run.state) for run in load(path, wrong)}
    assert runs == {("7", "NODE_FAIL"), ("9", "FAILED"), ("7", "COMPLETED")}
    assert len(wrong) == 2 and "line 3" in wrong[0] and not [line for line in wrong if "\n" in line]
    with pytest.raises(PlanError, match="line 3: expected 9 fields, found 3"):
        load(path)


def test_jobs_of_two_clusters_or_users_have_nothing_to_do_with_each_other(tmp_path):
    """Defect: the job of another cluster with the same number was what a job went on as."""
    path, header = tmp_path / "history.txt", f"Cluster|{HEADER}"
    rows = [f"a|{row('7', 'NODE_FAIL', 0, 10)}", f"b|{row('7', 'COMPLETED', 11, 20, submit=9)}"]
    path.write_text("\n".join([header, *rows]))
    found = judge(load(path), FREE)
    assert (found.runs, found.failures, found.left) == (2, (), 1)
    ours = history_of(tmp_path, row("7", "NODE_FAIL", 0, 10), row("7", "COMPLETED", 11, 20).replace("|ann|", "|bob|"))
    assert (ours.runs, ours.failures, ours.left) == (2, (), 1)
    path.write_text("\n".join([header, *(line.replace("b|", "a|", 1) for line in rows)]))
    assert [failure.waited for failure in judge(load(path), FREE).failures] == [3600]
