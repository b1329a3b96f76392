"""The leaderboard's stream, rows, command and processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from benchmarks.leaderboard import failures, notes, play, processes, rows
from benchmarks.leaderboard.__main__ import QUICK, Results, main, one, stream
from benchmarks.leaderboard.notes import Note
from benchmarks.leaderboard.ranks import core
from benchmarks.leaderboard.rows import Row, Share
from benchmarks.leaderboard.systems import MODELS, SYSTEMS, System
from tests.support.processes import wait_for
from unicron_ctl.shared.system.errors import UserError

RANKS = 4


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
    results = tmp_path / "results.json"
    Results(results).add(row("a", "hang", loss_difference=math.inf))
    assert json.loads(results.read_text())[0]["loss_difference"] == "inf"


def test_the_schedule_is_the_same_for_all_systems_and_has_every_kind() -> None:
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


def test_the_useful_share_is_over_what_an_undisturbed_job_does_in_that_time() -> None:
    assert play.Stream(micro_batches=900, seconds=10.0, undisturbed=[100.0]).share(100.0) == pytest.approx(0.9)


class Watched(System):
    name = "watched"

    @classmethod
    def version(cls) -> str:
        return "1"


class Clock:
    """A time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("restart, counted", [(50.0, 95.0), (0.0, 60.0)])
def test_an_operator_who_works_past_the_end_of_a_piece_counts_against_the_job(
    restart, counted, tmp_path, monkeypatch
) -> None:
    """The job stands still from the beginning, and is started again once nobody has seen a step for a while."""
    clock = Clock()
    monkeypatch.setattr(play, "time", clock)
    system = Watched(tmp_path / "run")
    monkeypatch.setattr(system, "begin_again", lambda: clock.sleep(restart))
    streamed = play._Streamed(system)
    streamed.disturbed(60.0, [])
    assert (streamed.found.operator, streamed.found.micro_batches) == (1, 0)
    assert streamed.found.seconds == pytest.approx(counted, abs=2 * play.LOOK)


def test_a_stream_has_the_losses_of_its_whole_run(tmp_path, monkeypatch) -> None:
    """One step a second, of all ranks: two seconds without failures, three of the stream before its first, two more."""
    clock = Clock()
    monkeypatch.setattr(play, "time", clock)
    system = Watched(tmp_path / "run")

    def read() -> list[Note]:
        steps = range(len(system.notes) // RANKS, round(clock.now - 1000.0))
        ranks = [(n, rank, tuple(range(rank, play.MICRO_BATCHES, RANKS))) for n in steps for rank in range(RANKS)]
        new = [Note("step", 1000.5 + n, f"{r}", n, loss=9.0 - n, world=RANKS, micro=some) for n, r, some in ranks]
        system.notes += new
        return new

    monkeypatch.setattr(system, "read", read)
    found = play._all_pieces(system, 3.0, 2.0, 1)
    assert found.losses == {n: [9.0 - n] * RANKS for n in range(7)}
    assert found.micro_batches == 3 * play.MICRO_BATCHES and len(found.undisturbed) == 2


@pytest.mark.parametrize(
    "name, done, after",
    [
        ("rank-kill", [call.place(2), call.signal_rank(4, signal.SIGKILL)], None),
        ("exception", [call.place(2), call.signal_rank(4, signal.SIGUSR2)], None),
        ("hang", [call.place(2), call.signal_rank(4, signal.SIGSTOP)], None),
        (
            "two",
            [call.place(2), call.signal_rank(4, signal.SIGKILL), call.place(0), call.signal_rank(0, signal.SIGKILL)],
            None,
        ),
        ("node", [call.place(2), call.power_off(4), call.power_on(4)], failures.NODE_BACK),
        ("rank0-node", [call.node_of_rank(0), call.power_off(3), call.power_on(3)], failures.NODE_BACK),
        ("coordinator", [call.kill_coordinator(), call.start_coordinator()], failures.COORDINATOR_BACK),
    ],
)
def test_a_failure_strikes_and_returns_its_repair(name: str, done: list, after: float | None) -> None:
    system = Mock(spec=System)
    system.node_of_rank.return_value = 3
    system.place.side_effect = lambda node: {2: 4}.get(node, node)  # a standby has taken node 2's place
    repair = failures.FAILURES[name](system, failures.NODE)
    if repair is not None:
        repair.action()
    assert system.mock_calls == done and (repair.after if repair else None) == after


def test_a_failure_of_two_strikes_any_of_them_and_is_missed_without_both() -> None:
    system, missed = Mock(spec=System), failures.Missed("no rank lives on node 2")
    system.place.side_effect = lambda node: node
    system.signal_rank.side_effect = [missed, None]
    failures.FAILURES["two"](system, failures.NODE)
    assert [each.args[0] for each in system.signal_rank.mock_calls] == [2, 0]
    system.signal_rank.side_effect = [missed, failures.Missed("no rank lives on node 0")]
    with pytest.raises(failures.Missed, match="node 2"):
        failures.FAILURES["two"](system, failures.NODE)


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


def test_results_are_the_contract_of_the_documents(tmp_path) -> None:
    path = tmp_path / "results.json"
    results = Results(path)
    results.add(row("a", "hang", next_step_seconds=1.0))
    results.add(Share("a", 0.9, "1", 20.0, undisturbed=[1.0], struck=3, missed=1))
    first, second = json.loads(path.read_text())
    asked = "system version failure survived next_step_seconds full_strength_seconds iterations_lost machine commit"
    assert set(asked.split()) | {"micro_batches_again", "loss_difference"} <= set(first)
    assert {"system", "useful_share"} <= set(second) and "failure" not in second
    tables = results.tables()
    assert "|hang|a|yes|1.00|" in tables and "|3 of 4|" in tables and "\na: 1" in tables


def test_the_stream_is_compared_in_what_was_trained_and_not_in_shares_of_each_systems_own_rate() -> None:
    """A system that is slow undisturbed keeps a larger share of its own rate, and is behind for all that."""
    slow = Share("slow", 0.95, undisturbed=[80.0, 80.0])
    quick = Share("quick", 0.80, undisturbed=[99.0, 101.0])
    lines = [dict(zip(rows.SHARE_HEADS, line, strict=True)) for line in rows.shares([slow, quick, Share("none", None)])]
    assert [line["useful micro-batches/s"] for line in lines] == ["76.0", "80.0", "-"]
    assert [line["of the best undisturbed rate"] for line in lines] == ["0.760", "0.800", "-"]
    assert [line["of its own"] for line in lines] == ["0.950", "0.800", "-"]


def test_all_systems_of_the_leaderboard_are_there() -> None:
    asked = "torchrun torchft torchft-nightly nvrx-inprocess nvrx-launcher lm-resiliency torchrun-debian"
    asked += " nvrx-0.7-inprocess nvrx-0.7-launcher slurm-requeue unicron-restart unicron"
    assert set(SYSTEMS) == set(asked.split()) and MODELS["dp"] is SYSTEMS
    assert {system.shard for system in SYSTEMS.values()} == {1}


def test_the_sharded_model_is_trained_by_systems_that_have_it_in_two_replicas(tmp_path) -> None:
    sharded = MODELS["hsdp"]
    assert set(sharded) == {"torchrun", "torchft", "unicron"} and {system.shard for system in sharded.values()} == {2}
    assert all(system.name == name and system.name in SYSTEMS for name, system in sharded.items())
    torchft = sharded["torchft"](tmp_path / "torchft")
    torchft.port = torchft.store_port = 1
    assert torchft.variables["LEADERBOARD_SHARD"] == "2"
    assert [torchft.more(node)["REPLICA_GROUP_ID"] for node in range(4)] == ["0", "0", "1", "1"]
    assert [torchft.node(node)[-3] for node in range(4)] == [f"--rdzv-id=replica{each}" for each in (0, 0, 1, 1)]


def test_a_row_says_which_model_was_trained(tmp_path, monkeypatch) -> None:
    nothing = notes.Figures(None, None, None, 0, 0)
    monkeypatch.setattr("benchmarks.leaderboard.__main__.MODELS", {"dp": {}, "hsdp": {"watched": Watched}})
    monkeypatch.setattr(play, "reference", lambda *_: {})
    monkeypatch.setattr(play, "fail", lambda *_: play.Outcome(True, nothing, {}))
    monkeypatch.setattr(play, "stream", lambda *_: play.Stream(950, 10.0, [100.0]))
    assert main(["--json", str(tmp_path / "rows.json"), "--quick", "--failure", "hang", "--model", "hsdp"]) == 0
    assert [made["model"] for made in json.loads((tmp_path / "rows.json").read_text())] == ["hsdp", "hsdp"]


def test_a_failure_of_a_node_hits_the_standby_that_has_taken_its_place(tmp_path) -> None:
    """Rank 2 began on node 2, and trains on node 4 now."""
    system = Watched(tmp_path / "run")
    system.notes = [Note("start", 1.0, process, node=node) for process, node in [("a", 2), ("b", 4), ("c", 0)]]
    system.notes += [
        Note("step", at, process, rank=rank) for at, process, rank in [(2.0, "a", 2), (4.0, "b", 2), (5.0, "c", 0)]
    ]
    assert system.place(2) == 2 and system.node_of_rank(2) == 4
    system.standbys = 1
    assert system.place(2) == 4 and system.place(0) == 0


def test_a_system_that_cannot_be_run_has_a_row_that_says_why(tmp_path, monkeypatch, snapshot) -> None:
    monkeypatch.setattr("benchmarks.leaderboard.systems.base.PEERS", tmp_path)
    made = one(SYSTEMS["torchft"], "hang", tmp_path / "run", QUICK, {})
    assert made.survived is None and made.version == "" and made.next_step_seconds is None
    assert made.why == snapshot and not (tmp_path / "run").exists()


def test_a_stranger_that_has_a_dead_ranks_pid_is_left_alone(tmp_path) -> None:
    system = Watched(tmp_path / "run")
    marks = [{}, {processes.RUN: "another"}, {processes.RUN: system.run}]
    made = [subprocess.Popen(["sleep", "60"], env=os.environ | mark) for mark in marks]
    try:
        wait_for(lambda: processes.belongs(made[2].pid, system.run), "its program runs")
        for process in made[:2]:
            system.notes = [Note("start", 1.0, "a", node=2, pid=process.pid)]
            with pytest.raises(failures.Missed, match="lives on node 2"):
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


def test_a_failure_that_strikes_no_rank_is_not_survived(tmp_path, monkeypatch, snapshot) -> None:
    monkeypatch.setattr(play, "fail", Mock(side_effect=failures.Missed("no rank lives on node 2")))
    made = one(Watched, "hang", tmp_path / "run", QUICK, {})
    assert made.survived is None and made.why == snapshot


BROKEN = [
    subprocess.CalledProcessError(1, ["sbatch"], stderr="sbatch: error: no such node\n"),
    subprocess.TimeoutExpired(["scontrol"], 60),
    TimeoutError("still there 30 s after SIGKILL: [7]"),
    UserError("slurmctld did not answer"),
]


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_an_error_ends_only_its_own_row_and_is_its_remark(tmp_path, monkeypatch, error) -> None:
    broken = Mock(side_effect=error)
    monkeypatch.setattr(play, "fail", broken)
    made = one(Watched, "hang", tmp_path / "run", QUICK, {})
    assert (made.survived, made.version) == (None, "1") and made.why.startswith("did not train: ")
    assert str(error) in made.why and str(getattr(error, "stderr", None) or "").strip() in made.why

    monkeypatch.setattr(play, "stream", broken)
    share = stream(Watched, tmp_path / "stream", 1.0, 20.0, {})
    assert (share.useful_share, share.why, share.version) == (None, made.why, "1")

    monkeypatch.setattr(Watched, "version", broken)
    assert one(Watched, "hang", tmp_path / "run", QUICK, {}).why == made.why


class Unending(Watched):
    """It trains, and whatever ends it fails."""

    def start(self) -> None:
        self.notes = [Note("step", float(n), "a", n, loss=100.0 - n, world=RANKS) for n in range(play.WARM)]

    def close(self) -> None:
        raise UserError("slurmd of n2 does not end")


def test_figures_are_kept_if_the_jobs_end_fails(tmp_path, monkeypatch, snapshot) -> None:
    monkeypatch.setattr(play, "_in_an_iteration", lambda _: None)
    monkeypatch.setattr("benchmarks.leaderboard.systems.base.System.signal_rank", lambda *_: None)
    whole = iter([True, False])
    monkeypatch.setattr(play, "_recover", lambda *_: next(whole))
    good, bad = (one(Unending, "hang", tmp_path / name, QUICK, {3: 97.0}) for name in ("good", "bad"))
    assert (good.survived, good.micro_batches_again, good.iterations_compared) == (True, 0, 1)
    assert good.why == snapshot
    assert bad.survived is False and bad.why.endswith(f" 60 s; {good.why}")

    losses = {3: [97.0, 97.97], 9: [91.0]}
    found = play.Stream(micro_batches=950, seconds=10.0, undisturbed=[100.0], struck=2, losses=losses)
    monkeypatch.setattr(play, "_all_pieces", lambda *_: found)
    share = stream(Unending, tmp_path / "stream", 1.0, 20.0, {3: 97.0})
    assert (share.useful_share, share.struck, share.why) == (pytest.approx(0.95), 2, good.why)
    assert (share.loss_difference, share.iterations_compared) == (pytest.approx(0.01), 1)
    (line,) = rows.shares([share])
    shown = dict(zip(rows.SHARE_HEADS, line, strict=True))
    assert (shown["loss difference"], shown["of iterations"]) == ("1.0e-02", "1")


def test_a_job_that_did_not_train_says_so_before_it_says_that_its_end_failed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Unending, "start", lambda _: subprocess.run(["false"], check=True))
    made = one(Unending, "hang", tmp_path / "run", QUICK, {})
    assert made.survived is None and made.why.startswith("did not train: ")
    assert made.why.endswith("slurmd of n2 does not end")


def test_a_cluster_that_does_not_go_down_leaves_no_process_to_the_next_row(tmp_path, monkeypatch) -> None:
    killed: list[str] = []
    stays = Mock(side_effect=TimeoutError("slurmctld is still there"))
    monkeypatch.setattr("unicron_ctl.lab.cluster.local_cluster.LocalCluster.down", stays)
    monkeypatch.setattr(processes, "kill", killed.append)
    system = SYSTEMS["slurm-requeue"](tmp_path / "run")
    with pytest.raises(TimeoutError):
        system.close()
    assert killed == [system.run]


NO_RUN = ["--repetitions", "0", "--stream-minutes", "0"]


@pytest.mark.parametrize(
    "words, why",
    [
        (["--json", "none/results.json"], "none/results.json cannot be written (No such file or directory)"),
        (["--json", "."], ". cannot be written (Is a directory)"),
        (["--json", "used.json/results.json"], "cannot be written (Not a directory)"),
        (["--json", "used.json"], "used.json has results: give another file with --json"),
        (["--json", "new.json", "--repetitions", "-1"], "--repetitions and --stream-minutes are at least 0"),
        (["--json", "new.json", "--stream-minutes", "-1"], "--repetitions and --stream-minutes are at least 0"),
        (["--json", "new.json", "--stream-minutes", "nan"], "--repetitions and --stream-minutes are at least 0"),
        (["--json", "new.json", "--model", "hsdp", "--system", "nvrx-launcher"], "torchrun, torchft, unicron do"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(words, why, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used.json").write_text('[{"system": "x"}]')
    try:
        status = main([*NO_RUN, *words])
    except SystemExit as refused:
        status = refused.code
    assert status == 2 and why in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "used.json").read_text() == '[{"system": "x"}]' and len(list(tmp_path.iterdir())) == 1


def test_a_system_that_did_not_train_makes_the_exit_status(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.leaderboard.__main__.MODELS", {"dp": {"watched": Watched}})
    monkeypatch.setattr(play, "reference", lambda *_: {})
    words = ["--failure", "hang", "--repetitions", "1", "--stream-minutes", "0"]
    assert main(["--json", str(tmp_path / "none.json"), *NO_RUN]) == 0
    monkeypatch.setattr(play, "fail", lambda *_: subprocess.run(["false"], check=True))
    assert main(["--json", str(tmp_path / "untrained.json"), *words]) == 1


def test_failures_and_streams_are_laid_over_one_undisturbed_run(tmp_path, monkeypatch) -> None:
    lengths: list[int] = []

    def reference(folder: Path, iterations: int) -> dict[int, float]:
        lengths.append(iterations)
        return {0: 2.0}

    nothing = notes.Figures(None, None, None, 0, 0)
    monkeypatch.setattr(play, "reference", reference)
    monkeypatch.setattr(play, "fail", lambda *_: play.Outcome(True, nothing, {0: [2.0]}))
    found = play.Stream(950, 10.0, [100.0], losses={0: [3.0]})
    monkeypatch.setattr(play, "stream", lambda *_: found)
    monkeypatch.setattr("benchmarks.leaderboard.__main__.MODELS", {"dp": {"watched": Watched}})
    path = tmp_path / "results.json"
    assert main(["--json", str(path), "--quick", "--failure", "hang"]) == 0 and lengths == [400]
    failed, streamed = json.loads(path.read_text())
    assert (failed["loss_difference"], failed["iterations_compared"]) == (0.0, 1)
    assert (streamed["loss_difference"], streamed["iterations_compared"]) == (0.5, 1)
    assert main(["--json", str(tmp_path / "full.json"), "--repetitions", "0"]) == 0 and lengths == [400, 1200]


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
