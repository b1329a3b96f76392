"""The leaderboard's pure parts: notes into figures, the stream's schedule, medians, the table; and its processes."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from benchmarks.leaderboard import failures, notes, play, processes, rows
from benchmarks.leaderboard.__main__ import QUICK, Board, main, one, streams
from benchmarks.leaderboard.notes import Note
from benchmarks.leaderboard.ranks import core
from benchmarks.leaderboard.rows import Row, Share
from benchmarks.leaderboard.systems import SYSTEMS, System
from tests.support.processes import ROOT, wait_for
from unicron_ctl.errors import UserError

RANKS, MICRO = 4, 8
STRUCK = 10.0


def trained(
    iterations: Iterable[int], begin: float, ranks: Iterable[int] = range(RANKS), more: str = "", each: float = 1.0
) -> list[Note]:
    """So many ranks step these iterations, one each `each` seconds from `begin` on, and share the micro-batches."""
    found, ranks = [], list(ranks)
    for number, iteration in enumerate(iterations):
        at = begin + (number + 1) * each
        for place, rank in enumerate(ranks):
            mine = tuple(range(place, MICRO, len(ranks)))
            who = {"process": f"{rank}{more}", "iteration": iteration}
            found += [Note("micro", at - each / 2, index=index, **who) for index in mine]
            found.append(Note("step", at, loss=100.0 - iteration, world=len(ranks), rank=place, micro=mine, **who))
    return found


def started(at: float, ranks: Iterable[int], more: str = "") -> list[Note]:
    return [Note("start", at, process=f"{rank}{more}", node=rank, rank=rank) for rank in ranks]


def figures(*parts: list[Note]) -> notes.Figures:
    return notes.figures([note for part in parts for note in part], STRUCK, RANKS, MICRO)


def test_lines_are_read_up_to_the_last_whole_one() -> None:
    lines = [{"what": "start", "time": 1.5, "node": 2, "pid": 7, "rank": 2}]
    lines.append({"what": "step", "time": 2.5, "iteration": 0, "loss": 4.0, "world": 4, "rank": 2, "micro": [2, 6]})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    found = notes.parse(text + '{"what": "micro", "ti', "notes.2.7")
    assert [note.what for note in found] == ["start", "step"]
    assert found[1] == Note("step", 2.5, "notes.2.7", 0, -1, 4.0, 4, 2, micro=(2, 6))


def test_survivors_that_go_on_in_the_same_iteration_lose_nothing() -> None:
    cut = [Note("micro", 9.6, "3", 10, 3), Note("micro", 9.7, "0", 10, 0)]  # iteration 10 has begun
    alone = trained([10], 10.5, [0, 1, 2])
    whole = trained([11, 12], 11.5) + started(11.0, [3], "new")
    found = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), cut, alone, whole)
    assert (found.next_step_seconds, found.full_strength_seconds) == (1.5, 2.5)
    assert (found.iterations_lost, found.micro_batches_again, found.micro_batches_dropped) == (0, 2, 0)


def test_a_restart_from_a_checkpoint_loses_what_came_after_it() -> None:
    back = trained([7, 8, 9, 10], 20.0, more="again")
    found = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), started(15.0, range(RANKS), "again"), back)
    assert (found.next_step_seconds, found.full_strength_seconds) == (11.0, 11.0)
    assert (found.iterations_lost, found.micro_batches_again) == (3, 3 * MICRO)


def test_a_peers_late_note_of_the_last_step_is_no_further_step() -> None:
    before = trained(range(10), 0.0)
    late = [Note("step", 10.01, "3late", iteration=9, loss=1.0, world=RANKS)]
    assert figures(started(-1.0, range(RANKS)), before, late).next_step_seconds is None
    same_process_again = [Note("step", 12.0, "0", iteration=9, loss=91.0, world=RANKS)]
    assert figures(started(-1.0, range(RANKS)), before, late, same_process_again).next_step_seconds == 2.0


def test_a_job_that_stays_smaller_is_never_whole() -> None:
    found = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), trained([10, 11], 12.0, [0, 1, 2]))
    assert (found.next_step_seconds, found.full_strength_seconds, found.ranks_at_end) == (3.0, None, 3)


def test_what_no_rank_had_in_its_step_was_dropped() -> None:
    thin = [note for note in trained([10, 11], 10.5) if not (note.what == "step" and note.process == "3")]
    assert figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), thin).micro_batches_dropped == MICRO // RANKS


def test_the_losses_that_count_are_those_after_the_last_rollback() -> None:
    wrong = [Note("step", note.time, note.process, note.iteration, loss=1.0) for note in trained([8, 9], 8.0)]
    found = notes.losses([*trained(range(8), 0.0), *wrong, *trained([8, 9, 10], 20.0, [0, 1], "again")])
    assert found[8] == [92.0, 92.0] and len(found[7]) == RANKS and found[10] == [90.0, 90.0]
    late_joiner = notes.losses([*trained(range(5), 0.0), *trained([5, 6], 5.0, [0, 1, 2, 9])])
    assert late_joiner[4] == [96.0] * 4 and late_joiner[5] == [95.0] * 4


def test_a_process_that_goes_back_by_itself_takes_its_losses_back() -> None:
    again = [Note("step", note.time, note.process, note.iteration, loss=note.loss + 1) for note in trained([3, 4], 9.0)]
    found = notes.losses([*trained(range(6), 0.0), *again])
    assert found[3] == [98.0] * 4 and found[4] == [97.0] * 4 and 5 not in found and found[2] == [98.0] * 4


def staggered(found: list[Note], apart: float = 0.01) -> list[Note]:
    """The ranks say so one after the other, as they do."""
    return [msgspec.structs.replace(note, time=note.time + apart * note.rank) for note in found]


def test_every_rollback_until_the_end_counts() -> None:
    """A node is lost, and three ranks go on from the same iteration; it returns, and four start from a checkpoint."""
    three = [*started(11.0, [0, 1, 3], "b"), *staggered(trained([10, 11, 12], 12.0, [0, 1, 3], "b"))]
    for first, lost in ((13, 0), (12, 1), (11, 2), (9, 4)):
        four = [*started(20.0, range(RANKS), "c"), *staggered(trained(range(first, 16), 21.0, more="c"))]
        found = figures(started(-1.0, range(RANKS)), staggered(trained(range(10), -0.5)), three, four)
        assert (found.iterations_lost, found.micro_batches_dropped) == (lost, 0)


def test_a_newcomer_that_takes_a_step_with_the_others_takes_none_again() -> None:
    joined = [*started(11.0, [2], "new"), *staggered(trained([12, 13], 13.0, [0, 1, 3]))]
    joined += [Note("step", 14.02, "2new", 12, loss=88.0, world=4), Note("step", 15.02, "2new", 13, loss=87.0, world=4)]
    late = [Note("step", 12.5, "2", 10, loss=90.0, world=4)]  # after others' step of 11: its own note alone is late
    alone = trained([10, 11], 10.2, [0, 1, 3])
    assert figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), alone, late, joined).iterations_lost == 0


def test_ranks_that_live_on_and_go_back_drop_nothing_whoever_says_so_first() -> None:
    run = [*started(-1.0, range(RANKS)), *staggered(trained(range(10), -0.5))]
    run += [*staggered(trained([8, 9, 10], 12.0)), *staggered(trained([9, 10, 11], 16.0))]
    found = figures(run)
    assert (found.iterations_lost, found.micro_batches_dropped) == (4, 0)
    assert {len(each) for each in notes.losses(run).values()} == {RANKS}


def test_the_longest_pause_counts_wherever_it_comes() -> None:
    """The iteration under way ends, and then they wait."""
    run = [*started(-1.0, range(RANKS)), *trained(range(10), 0.0), *trained([10], 9.2), *trained([11, 12], 14.0)]
    found = figures(run)
    assert (found.next_step_seconds, found.longest_pause_seconds) == pytest.approx((0.2, 4.8))
    assert figures(started(-1.0, range(RANKS)), trained(range(10), 0.0)).longest_pause_seconds is None
    once = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), trained([10, 11], 12.0))
    assert once.longest_pause_seconds == once.next_step_seconds == 3.0


def test_losses_are_compared_where_both_have_them() -> None:
    assert notes.compared({0: [2.0], 1: [3.0], 9: [7.0]}, {0: 2.0, 1: 3.0, 2: 4.0}) == 2
    assert notes.difference({0: [2.0], 1: [3.0, 3.3], 9: [7.0]}, {0: 2.0, 1: 3.0}) == pytest.approx(0.1)
    assert notes.difference({0: [2.0]}, {0: 2.0}) == 0.0
    assert notes.difference({5: [2.0]}, {0: 2.0}) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_infinitely_far(wrong, tmp_path, monkeypatch) -> None:
    assert notes.difference({0: [2.0], 1: [wrong]}, {0: 2.0, 1: 3.0}) == math.inf
    assert notes.difference({0: [2.0]}, {0: wrong}) == math.inf
    monkeypatch.setattr(core, "OUT", tmp_path)
    monkeypatch.setenv("LEADERBOARD_NODE", "2")
    usual = signal.getsignal(signal.SIGUSR2)
    try:
        core.Notes(0).step(7, wrong, 4, 0, [1])
    finally:
        signal.signal(signal.SIGUSR2, usual)
    (path,) = tmp_path.glob("notes.2.*")
    _, step = notes.parse(path.read_text(), path.name)
    assert step.loss == pytest.approx(wrong, nan_ok=True)
    assert notes.difference(notes.losses([step]), {7: 1.0}) == math.inf
    board = Board(tmp_path / "results.json", append=False)
    board.add(row("a", "hang", loss_difference=math.inf))
    assert "Infinity" not in (tmp_path / "results.json").read_text()
    assert Board(tmp_path / "results.json", append=True).rows == board.rows


def test_work_that_is_done_twice_or_undone_is_of_no_use() -> None:
    run = trained(range(10), 0.0)
    assert notes.useful(run, 2.0, 10.0, MICRO) == 8 * MICRO
    assert notes.useful([*run, *trained([5, 6], 12.0, more="again")], 2.0, 20.0, MICRO) == 5 * MICRO
    assert notes.useful(run, 30.0, 40.0, MICRO) == 0


def test_the_schedule_is_the_same_for_everybody_and_has_every_kind() -> None:
    plan = failures.schedule(1200.0, 1, RANKS)
    assert plan == failures.schedule(1200.0, 1, RANKS) != failures.schedule(1200.0, 2, RANKS)
    assert len(plan) == 40 and {name for _, name, _ in plan} == set(failures.FAILURES)
    assert [at for at, _, _ in plan[:2]] == [failures.FIRST, failures.FIRST + failures.EVERY]
    assert {node for _, _, node in plan} == {1, 2, 3}


def test_the_stream_comes_in_rounds_and_each_failure_in_one_of_them() -> None:
    plan = failures.schedule(1200.0, 1, RANKS)
    pieces = list(failures.rounds(1200.0, plan))
    assert [(begin, length) for begin, length, _ in pieces] == [(each, 300.0) for each in (0.0, 300.0, 600.0, 900.0)]
    assert [each for _, _, some in pieces for each in some] == plan and all(len(some) == 10 for _, _, some in pieces)
    short = list(failures.rounds(330.0, failures.schedule(330.0, 1, RANKS)))
    assert [(begin, length, len(some)) for begin, length, some in short] == [(0.0, 300.0, 10), (300.0, 30.0, 1)]


def test_a_spell_tells_the_usual_rate_only_where_all_ranks_trained_all_the_time() -> None:
    run = trained(range(10), 0.0)  # one a second
    short = [Note("step", 10.0 + n, "a", 10 + n, world=3) for n in range(3)]
    assert notes.steady(run, 2.0, 9.5, RANKS, 2.0) and not notes.steady([*run, *short], 2.0, 12.0, RANKS, 2.0)
    assert not notes.steady(run, 2.0, 20.0, RANKS, 2.0), "it stood still at the end"
    assert not notes.steady(run, -5.0, 9.5, RANKS, 2.0), "it stood still at the beginning"
    assert not notes.steady([], 2.0, 3.0, RANKS, 2.0)
    assert play.Stream(micro_batches=900, seconds=10.0, undisturbed=[100.0]).share(100.0) == pytest.approx(0.9)


class Struck:
    """A system that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def signal_rank(self, node: int, number: signal.Signals) -> None:
        self.done.append((node, number))

    def power_off(self, node: int) -> None:
        self.done.append(("off", node))

    def power_on(self, node: int) -> None:
        self.done.append(("on", node))

    def kill_coordinator(self) -> None:
        self.done.append("killed")

    def start_coordinator(self) -> None:
        self.done.append("started")

    def node_of_rank_0(self) -> int:
        return 3


@pytest.mark.parametrize(
    "name, done, after",
    [
        ("rank-kill", [(2, signal.SIGKILL)], None),
        ("exception", [(2, signal.SIGUSR2)], None),
        ("hang", [(2, signal.SIGSTOP)], None),
        ("two", [(2, signal.SIGKILL), (0, signal.SIGKILL)], None),
        ("node", [("off", 2), ("on", 2)], failures.NODE_BACK),
        ("rank0-node", [("off", 3), ("on", 3)], failures.NODE_BACK),
        ("coordinator", ["killed", "started"], failures.COORDINATOR_BACK),
    ],
)
def test_a_failure_strikes_and_says_what_is_to_be_repaired(name: str, done: list, after: float | None) -> None:
    target = Struck()
    repair = failures.FAILURES[name].strike(target, failures.NODE)
    if repair is not None:
        repair.action()
    assert target.done == done and (repair.after if repair else None) == after


def test_a_failure_of_two_strikes_whom_it_finds_and_says_when_it_finds_nobody() -> None:
    class Thin(Struck):
        def signal_rank(self, node: int, number: signal.Signals) -> None:
            if node in self.gone:
                raise failures.Missed(f"no rank lives on node {node}")
            super().signal_rank(node, number)

        gone = {2}

    target = Thin()
    failures.FAILURES["two"].strike(target, failures.NODE)
    assert target.done == [(0, signal.SIGKILL)]
    target.gone = {0, 2}
    with pytest.raises(failures.Missed, match="node 2"):
        failures.FAILURES["two"].strike(target, failures.NODE)


def row(system: str, failure: str, survived: bool | None = True, **more: Any) -> Row:
    return Row(system, "1", failure, survived, **more)


def test_the_table_has_medians_ranges_and_what_did_not_happen() -> None:
    some = [
        row("a", "hang", next_step_seconds=value, iterations_lost=lost, loss_difference=1e-7)
        for value, lost in ((1.0, 0), (3.0, 2), (2.0, 1))
    ]
    some[1].full_strength_seconds = 9.0
    lost = [row("b", "hang", False, why="no further step"), row("b", "hang", True, next_step_seconds=5.0)]
    first, second, third = rows.lines([*some, *lost, row("c", "hang", None, why="no wheel")])
    assert first[:7] == ["hang", "a", "yes", "2.00 (1.00..3.00)", "9.00, never 2x", "-", "1 (0..2)"]
    assert first[10] == "1.0e-07", "no range where all are alike"
    assert second[:5] == ["hang", "b", "1 of 2", "5.00, never 1x", "never"] and second[-1] == "no further step"
    assert third[:4] == ["hang", "c", "not tried", "-"]
    assert rows.markdown(["x", "y"], [["1", "2"]]) == "|x|y|\n|---|---|\n|1|2|"


def test_rows_of_before_a_figure_was_noted_are_read_and_do_not_say_that_it_never_came() -> None:
    old = json.loads((ROOT / "docs" / "leaderboard.json").read_text())
    assert len(rows.decode(old)) == len(old)
    new = {"longest_pause_seconds", "iterations_compared"}
    before = {key: value for key, value in rows.encode(row("a", "hang")).items() if key not in new}
    (line,) = rows.lines([row("a", "hang", longest_pause_seconds=0.5, iterations_compared=90), *rows.decode([before])])
    said = dict(zip(rows.heads(), line, strict=True))
    assert (said["longest pause, s"], said["of iterations"]) == ("0.50, not noted 1x", "90, not noted 1x")
    (line,) = rows.lines(rows.decode([before]))
    assert dict(zip(rows.heads(), line, strict=True))["longest pause, s"] == "-"


def test_results_are_the_contract_and_are_read_again(tmp_path) -> None:
    path = tmp_path / "results.json"
    board = Board(path, append=False)
    board.add(row("a", "hang", next_step_seconds=1.0))
    board.add(Share("a", 0.9, "1", 20.0))
    first, second = json.loads(path.read_text())
    asked = "system version failure survived next_step_seconds full_strength_seconds iterations_lost"
    assert set(asked.split()) | {"micro_batches_again", "loss_difference"} <= set(first)
    assert {"system", "useful_share"} <= set(second) and "failure" not in second
    assert Board(path, append=True).rows == board.rows


def test_each_row_says_at_which_commit_it_was_taken() -> None:
    some = [row("a", "hang", commit="abc", machine="m"), row("b", "hang", commit="def+", machine="m")]
    assert rows.taken(some) == "m; commits abc, def+"
    assert rows.taken([some[0], row("b", "hang", machine="m", commit="abc")]) == "m; commit abc"
    assert rows.taken([row("a", "hang")]) == "machine not noted; commit not noted"
    assert [line[5] for line in rows.shares([Share("a", 0.9), Share("a", 0.9, struck=3, missed=1)])] == ["-", "3 of 4"]


def test_all_systems_of_the_leaderboard_are_there() -> None:
    asked = "torchrun torchft nvrx-inprocess nvrx-launcher slurm-requeue unicron-restart unicron"
    assert set(SYSTEMS) == set(asked.split())
    assert all(kind.settings for kind in SYSTEMS.values())


def test_a_system_that_cannot_be_run_has_a_row_that_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.leaderboard.systems.base.PEERS", tmp_path)
    made = one(SYSTEMS["torchft"], "hang", tmp_path / "run", QUICK, {})
    assert made.survived is None and made.version == "" and made.next_step_seconds is None
    assert made.why == "no environment .peers/torchft: make leaderboard makes it" and not (tmp_path / "run").exists()


class Watched(System):
    name, settings = "watched", ""


def test_a_stranger_that_has_a_dead_ranks_pid_is_left_alone(tmp_path) -> None:
    system = Watched(tmp_path / "run")
    marks = [{}, {processes.RUN: "another"}, {processes.RUN: system.run}]
    made = [subprocess.Popen(["sleep", "60"], env=os.environ | mark) for mark in marks]
    try:
        wait_for(lambda: processes.belongs(made[2].pid, system.run), "it is the program that it is to be")
        for process in made[:2]:
            system.notes = [Note("start", 1.0, "a", node=2, pid=process.pid)]
            with pytest.raises(failures.Missed, match="no rank lives on node 2"):
                system.signal_rank(2, signal.SIGKILL)
        system.notes = [Note("start", 1.0, "a", node=2, pid=made[2].pid)]
        system.signal_rank(2, signal.SIGKILL)
        assert made[2].wait(30) == -signal.SIGKILL and [process.poll() for process in made[:2]] == [None, None]
        with pytest.raises(failures.Missed):
            system.signal_rank(2, signal.SIGKILL)
    finally:
        for process in made:
            process.kill()
            process.wait()


def test_a_failure_that_strikes_nobody_is_told_from_one_that_was_survived(tmp_path, monkeypatch) -> None:
    def nobody(*_: object) -> None:
        raise failures.Missed("no rank lives on node 2")

    monkeypatch.setattr("benchmarks.leaderboard.play.fail", nobody)
    monkeypatch.setattr(Watched, "version", classmethod(lambda cls: "1"))
    made = one(Watched, "hang", tmp_path / "run", QUICK, {})
    assert made.survived is None and made.why == "not struck: no rank lives on node 2"


BROKEN = [
    subprocess.CalledProcessError(1, ["sbatch"], stderr="sbatch: error: no such node\n"),
    subprocess.TimeoutExpired(["scontrol"], 60),
    TimeoutError("still there 30 s after SIGKILL: [7]"),
    UserError("slurmctld did not answer"),
]


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_what_breaks_off_one_row_says_so_there_and_the_others_come(tmp_path, monkeypatch, error) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(Watched, "version", classmethod(lambda cls: "1"))
    monkeypatch.setattr("benchmarks.leaderboard.play.fail", broken)
    made = one(Watched, "hang", tmp_path / "run", QUICK, {})
    assert (made.survived, made.version) == (None, "1") and made.why.startswith("did not train: ")
    assert str(error) in made.why and str(getattr(error, "stderr", None) or "").strip() in made.why

    found = play.Stream(micro_batches=950, seconds=10.0, undisturbed=[100.0])
    streamed = iter([broken, lambda *_: found])
    monkeypatch.setattr("benchmarks.leaderboard.play.stream", lambda *words: next(streamed)(*words))
    monkeypatch.setattr("benchmarks.leaderboard.__main__.SYSTEMS", {"first": Watched, "second": Watched})
    board = Board(tmp_path / "results.json", append=False)
    streams(board, argparse.Namespace(system=["first", "second"], stream_minutes=1.0, quick=True), tmp_path)
    first, second = board.shares
    assert first.useful_share is None and first.why == made.why and first.version == "1"
    assert (second.useful_share, second.why) == (pytest.approx(0.95), "")

    monkeypatch.setattr(Watched, "version", classmethod(broken))
    assert one(Watched, "hang", tmp_path / "run", QUICK, {}).why == made.why


class Unending(Watched):
    """It trains, and whatever ends it fails."""

    def start(self) -> None:
        self.notes = trained(range(play.WARM), 0.0)

    def close(self) -> None:
        raise UserError("slurmd of n2 does not end")

    @classmethod
    def version(cls) -> str:
        return "1"


def test_what_was_measured_is_kept_where_the_jobs_end_fails(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(play, "_in_an_iteration", lambda _: None)
    monkeypatch.setattr("benchmarks.leaderboard.systems.base.System.signal_rank", lambda *_: None)
    whole = iter([True, False])
    monkeypatch.setattr(play, "_recover", lambda *_: next(whole))
    good, bad = (one(Unending, "hang", tmp_path / name, QUICK, {3: 97.0}) for name in ("good", "bad"))
    assert (good.survived, good.micro_batches_again, good.iterations_compared) == (True, 0, 1)
    assert good.why == "its end failed: slurmd of n2 does not end"
    assert (bad.survived, bad.why) == (False, f"no further step within 60 s; {good.why}")

    found = play.Stream(micro_batches=950, seconds=10.0, undisturbed=[100.0], struck=2)
    monkeypatch.setattr(play, "_all_pieces", lambda *_: found)
    monkeypatch.setattr("benchmarks.leaderboard.__main__.SYSTEMS", {"unending": Unending})
    board = Board(tmp_path / "results.json", append=False)
    streams(board, argparse.Namespace(system=["unending"], stream_minutes=1.0, quick=True), tmp_path)
    (share,) = board.shares
    assert (share.useful_share, share.struck, share.why) == (pytest.approx(0.95), 2, good.why)


def test_a_job_that_did_not_train_says_so_before_it_says_that_its_end_failed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Unending, "start", lambda _: subprocess.run(["false"], check=True))
    made = one(Unending, "hang", tmp_path / "run", QUICK, {})
    assert made.survived is None and made.why.startswith("did not train: Command '['false']'")
    assert made.why.endswith("its end failed: slurmd of n2 does not end")


def test_a_cluster_that_does_not_go_down_leaves_no_process_to_the_next_row(tmp_path, monkeypatch) -> None:
    def stays(_: object) -> None:
        raise TimeoutError("slurmctld is still there")

    killed: list[str] = []
    monkeypatch.setattr("unicron_ctl.localslurm.local.LocalCluster.down", stays)
    monkeypatch.setattr(processes, "kill", killed.append)
    system = SYSTEMS["slurm-requeue"](tmp_path / "run")
    with pytest.raises(TimeoutError):
        system.close()
    assert killed == [system.run]


def test_results_that_are_there_are_not_written_over(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "results.json"
    words = ["leaderboard", "--json", str(path), *NO_RUN]
    Board(path, append=False).add(row("torchft", "hang"))
    before = path.read_text()
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2 and path.read_text() == before
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and "--append" in line and "--json" in line
    monkeypatch.setattr(sys, "argv", [*words, "--append"])
    assert main() == 0 and "torchft" in capsys.readouterr().out
    path.write_text("[]\n")
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0


NO_RUN = ["--repetitions", "0", "--stream-minutes", "0"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--json", "none/results.json"], "none/results.json cannot be written (No such file or directory)"),
        (["--json", "."], ". cannot be written (Is a directory)"),
        (["--json", "foreign.json/results.json"], "cannot be written (Not a directory)"),
        (["--append", "--json", "broken.json"], "broken.json has no results of this benchmark"),
        (["--append", "--json", "binary.json"], "binary.json has no results of this benchmark"),
        (["--append", "--json", "object.json"], "object.json has no results of this benchmark"),
        (["--append", "--json", "foreign.json"], "foreign.json has no results of this benchmark"),
        (["--json", "new.json", "--repetitions", "-1"], "--repetitions and --stream-minutes are at least 0"),
        (["--json", "new.json", "--stream-minutes", "-1"], "--repetitions and --stream-minutes are at least 0"),
        (["--json", "new.json", "--stream-minutes", "nan"], "--repetitions and --stream-minutes are at least 0"),
        (["--json", "new.json", "--keep", "foreign.json"], "foreign.json cannot be made (File exists)"),
        (["--json", "new.json", "--keep", "."], "has files: name another"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_runs(words, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "broken": b'{"a":',
        "binary": b"\xff\x00",
        "object": b'{"system": "a"}',
        "foreign": b'[{"system": "x"}]',
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["leaderboard", *NO_RUN, *words])
    with pytest.raises(SystemExit) as refused:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and said in line
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json" for name in contents}


def test_only_this_runs_rows_say_that_a_system_did_not_train(tmp_path, monkeypatch, capsys) -> None:
    """Those that the file had before are shown, of whatever system they are."""
    path = tmp_path / "results.json"
    Board(path, append=False).add(row("gone", "hang", None, why="did not train: it was another day"))
    monkeypatch.setattr(sys, "argv", ["leaderboard", "--json", str(path), "--append", *NO_RUN])
    assert main() == 0
    assert "gone: 1" in capsys.readouterr().out.splitlines()
    board = Board(path, append=True)
    assert not board.untrained
    board.add(Share("torchft", None, why="did not train: no port"))
    assert board.untrained and len(board.rows) == 2


def test_a_micro_batch_depends_on_its_numbers_alone() -> None:
    one = core.micro_batch(3, 5)
    assert one.equal(core.micro_batch(3, 5)) and one.shape == (core.SAMPLES, core.LENGTH + 1)
    assert not one.equal(core.micro_batch(3, 6)) and not one.equal(core.micro_batch(4, 5))
    assert 0 <= int(one.min()) and int(one.max()) < core.VOCABULARY


def test_processes_are_found_and_killed_by_their_node_whatever_session_they_make() -> None:
    code = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(60)"
    run = f"test-{os.getpid()}"
    made = []
    for node in ("0", "1"):
        environment = os.environ | {processes.RUN: run, processes.NODE: node}
        made.append(subprocess.Popen([sys.executable, "-c", code], env=environment))
    try:
        wait_for(lambda: len(processes.find(run)) == 4, "both have forked")
        processes.kill(run, "1")
        assert len(processes.find(run, "0")) == 2 and not processes.find(run, "1")
    finally:
        processes.kill(run)
        for process in made:
            process.wait()
