"""The torture's pure parts: schedule, soundness, progress, comparison, leaks, and later work."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.torture import __main__ as command
from benchmarks.torture import curves, leaks, progress, proof, schedule
from benchmarks.torture.deeds import AGAIN, PATIENCE, REPAIR, Admin, Agenda
from benchmarks.torture.progress import Done, Leg, Progress
from benchmarks.torture.schedule import KINDS
from benchmarks.torture.sound import JobNow, Stepped, Wound, sound, strikable, whole
from benchmarks.torture.stage import TRAININGS, Tail
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.chaos.inject import FAULTS, parse

NAMES = list(KINDS)


# ------------------------------------------------------------ the schedule
def test_every_kind_of_inject_is_drawn_and_each_round_has_every_kind_once() -> None:
    injected = [kind for kind in KINDS if "-kill" not in kind or kind in ("rank-kill", "oom-kill")]
    silent = {"flip", "nan"}  # those of benchmarks.corruption
    assert {parse(kind)[0] for kind in injected} == set(FAULTS) - silent
    drawn = [schedule.fault(7, index, NAMES).kind for index in range(3 * len(NAMES))]
    for turn in range(3):
        assert sorted(drawn[turn * len(NAMES) : (turn + 1) * len(NAMES)]) == sorted(NAMES)
    assert drawn[: len(NAMES)] != drawn[len(NAMES) : 2 * len(NAMES)]


def test_a_resumed_run_draws_what_the_interrupted_one_would_have() -> None:
    assert [schedule.fault(3, i, NAMES) for i in range(60)][40:] == [schedule.fault(3, i, NAMES) for i in range(40, 60)]
    assert schedule.fault(3, 11, NAMES) != schedule.fault(4, 11, NAMES)
    assert {schedule.choose(schedule.fault(3, i, NAMES).job, ["a", "b"]) for i in range(60)} == {"a", "b"}


def test_a_fault_lasts_as_long_as_its_kind_says() -> None:
    for index in range(200):
        fault = schedule.fault(1, index, NAMES)
        shortest, longest = fault.how.seconds
        assert shortest <= fault.seconds <= longest


# ------------------------------------------------------------ soundness
def job(members: tuple[int, ...] = (0, 1, 2), state: str = "running", generation: int = 4, **more: Any) -> JobNow:
    place = {"nodes": {slot: f"n{slot + 1}" for slot in members}, "pids": {slot: 100 + slot for slot in members}}
    return JobNow("large", state, generation, members, **({"planned": len(members)} | place | more))


def stepped(time: float, *slots: int, generation: int = 4) -> dict[int, Stepped]:
    return {slot: Stepped(generation, 9, time) for slot in slots}


def test_a_job_is_sound_when_all_members_have_stepped_since_the_fault_in_a_later_generation() -> None:
    struck = Wound(time=10.0, generation=3, breaks=True)
    assert sound(job(), stepped(11.0, 0, 1, 2), struck)
    assert not sound(job(), stepped(11.0, 0, 1), struck)
    assert not sound(job(), stepped(9.0, 0, 1, 2), struck)
    assert not sound(job(), stepped(11.0, 0, 1, 2, generation=3), struck)
    assert not sound(job(generation=3), stepped(11.0, 0, 1, 2, generation=3), struck)
    assert sound(job(generation=3), stepped(11.0, 0, 1, 2, generation=3), Wound(10.0, 3, breaks=False))
    assert not sound(job(state="breaking"), stepped(11.0, 0, 1, 2), struck)
    assert not sound(job(ended=True), stepped(11.0, 0, 1, 2), None)


def test_no_fault_may_take_the_last_copy() -> None:
    rank, slow = KINDS["rank-kill"], KINDS["slow:1.5"]
    assert strikable(job(), stepped(1.0, 0, 1, 2), None, rank) == [0, 1, 2]
    assert strikable(job((1,)), stepped(1.0, 1), None, rank) == []
    assert strikable(job((1,)), stepped(1.0, 1), None, slow) == [1]
    assert strikable(job((0, 1), planned=1), stepped(1.0, 0, 1), None, rank) == []  # one is about to leave
    assert strikable(job(), stepped(1.0, 0, 1, 2), Wound(2.0, 3, True), slow) == []
    assert strikable(job(pids={0: 5}), stepped(1.0, 0, 1, 2), None, rank) == [0]


def test_missing_nodes_are_named(snapshot) -> None:
    wanted = {"large": 3, "small": 3}
    jobs = {"large": job(), "small": job((0, 2))}
    nodes = ["n1", "n2", "n3", "n4", "n5"]
    assert whole(jobs, wanted, nodes, {}) == ""
    assert whole(jobs, wanted, nodes[1:], {}).startswith("5 nodes train, of 4")
    assert whole({"large": job()}, wanted, nodes, {}) == "small is unknown"
    short = jobs | {"large": job((0, 1), planned=3)}
    assert whole(short, wanted, nodes, {"large": ["n3"]}) == snapshot
    assert whole(short, wanted, nodes, {"large": ["n3"], "small": ["n3", "n1"]}) == ""  # no job may use it


def test_a_job_is_read_from_the_controllers_answer() -> None:
    rank = {"slot": 1, "pid": 77}
    elements = [{"node": "n2", "gone": False, "ranks": [rank]}, {"node": "n9", "gone": True, "ranks": [{"slot": 0}]}]
    answer = {"name": "small", "state": "running", "generation": 2, "members": [1], "planned_nodes": 1, "ended": None}
    read = JobNow.of(answer | {"ledger_violations": 0, "elements": elements})
    assert (read.nodes, read.pids, read.members, read.ended) == ({1: "n2"}, {1: 77}, (1,), False)


def test_a_line_half_written_waits_for_its_rest(tmp_path: Path) -> None:
    file = tmp_path / "losses.0"
    tail = Tail(file)
    assert tail.more() == []
    file.write_text('{"a": 1}\n{"a"')
    assert tail.more() == [{"a": 1}]
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert tail.more() == [{"a": 2}] and tail.more() == []


# ------------------------------------------------------------ resuming
def done(index: int, job: str = "large", leg: int = 0) -> Done:
    return Done(index, "rank-kill", job, 1, "n2", 100.0 + index, 5 * index, leg)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    run = Progress(3, 60, 5.0, NAMES, position=2, done=[done(0), done(1)], legs=[Leg(1.0, {"large": 0}, ended="x")])
    run.save(tmp_path, now=9.0)
    assert progress.load(tmp_path) == run and run.legs[0].seconds == 8.0
    assert [path.name for path in tmp_path.iterdir()] == [progress.FILE]


@pytest.mark.parametrize("text", ["", "{", '{"seed": "x"}', '{"seed": 1, "failures": 2, "every": 1, "kinds": []'])
def test_a_damaged_state_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / progress.FILE).write_text(text)
    with pytest.raises(UserError, match="begin a new run"):
        progress.load(tmp_path)


def test_only_the_last_fault_of_a_job_is_healed_and_only_once() -> None:
    run = Progress(3, 60, 5.0, NAMES, done=[done(0), done(1), done(2, "small")], legs=[Leg(0.0)])
    assert run.settle("large", 104.0) == 3.0
    assert run.settle("large", 105.0) is None
    assert [one.sound_after for one in run.done] == [None, 3.0, None]
    run.legs.append(Leg(200.0))
    assert run.settle("small", 300.0) is None


def test_a_refused_fault_is_no_failure() -> None:
    run = Progress(3, 60, 5.0, NAMES, done=[done(0), done(1, "small"), done(2)], legs=[Leg(0.0)])
    assert not run.refuse("small", "hang-stop") and not run.refuse("other", "rank-kill")
    assert run.refuse("large", "rank-kill")  # its last one: it has no wound any more
    assert run.settle("large", 104.0) is None
    assert [one.index for one in run.inflicted] == [0, 1] and proof.healing(run)["rank-kill"]["count"] == 2
    assert not run.done[0].refused
    late = Progress(3, 60, 5.0, NAMES, done=[done(0), msgspec.structs.replace(done(1), kind="slow:1.5")])
    assert not late.refuse("large", "rank-kill") and late.done[0].refused


def test_only_the_kinds_of_the_run_are_counted() -> None:
    assert list(proof.healing(Progress(3, 60, 5.0, ["rank-kill", "oom"]))) == ["rank-kill", "oom"]


def test_leftovers_that_cannot_be_ended_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> None:
        raise UserError(f"the cluster in {folder} is not yours; run this as its user")

    monkeypatch.setattr(command, "end_leftovers", fails)
    assert command.main(["--folder", str(tmp_path), "--failures", "1"]) == 1
    assert "is not yours" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # nothing began


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--resume", "--folder", str(tmp_path)]) == 2
    Progress(1, 2, 5.0, []).save(tmp_path)
    assert command.main(["--folder", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "no run to" in lines[0] and "--resume" in lines[1]
    for words in (["--failures", "0"], ["--json", "/nowhere/x.json"]):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2


# ------------------------------------------------------------ comparing
def step(slot: int, iteration: int, counted: list[int], loss: float = 1.0, generation: int = 1) -> dict[str, Any]:
    return {"slot": slot, "iteration": iteration, "micro_batches": counted, "loss": loss, "generation": generation}


def test_every_micro_batch_is_in_one_gradient() -> None:
    good = [step(0, 0, [0, 2]), step(1, 0, [1, 3]), step(0, 1, [0, 1, 2, 3])]
    assert curves.not_once(good, [], 0, 1, 4) == []
    (twice,) = curves.not_once([*good, step(1, 1, [3])], [], 0, 1, 4)
    assert "iteration 1: micro-batches [3] in two" in twice
    (lost,) = curves.not_once(good[1:], [], 0, 1, 4)
    assert "micro-batches [0, 2] in no gradient" in lost
    (again,) = curves.not_once([*good, step(0, 1, [])], [], 0, 1, 4)
    assert "stepped twice" in again
    (absent,) = curves.not_once(good, [], 0, 2, 4)
    assert "iteration 2: no rank noted it" in absent


def note(slot: int, counted: list[int], generation: int = 1) -> dict[str, Any]:
    return {"slot": slot, "iteration": 0, "generation": generation, "micro_batches": counted}


def test_only_a_rank_that_died_after_it_began_to_reduce_has_its_part_in_the_sum() -> None:
    first = step(0, 0, [0, 2])
    assert curves.not_once([first], [note(0, [0, 2]), note(1, [1, 3])], 0, 0, 4) == []
    (lost,) = curves.not_once([first], [note(0, [0, 2])], 0, 0, 4)  # killed while it computed
    assert "[1, 3] in no gradient" in lost
    (lost,) = curves.not_once([first], [note(0, [0, 2]), note(1, [1])], 0, 0, 4)
    assert "[3] in no gradient" in lost
    (twice,) = curves.not_once([step(0, 0, [0, 1, 2, 3])], [note(0, [0, 1, 2, 3]), note(1, [1, 3])], 0, 0, 4)
    assert "[1, 3] in two" in twice


def test_a_part_in_a_sum_that_was_made_anew_counts_for_nothing() -> None:
    broken = [note(0, [0, 2]), note(1, [1, 3]), note(0, [0, 2], generation=2)]
    (lost,) = curves.not_once([step(0, 0, [0, 2], generation=2)], broken, 0, 0, 4)
    assert "[1, 3] in no gradient" in lost
    anew = [*broken[:2], note(0, [0, 1, 2, 3], generation=2)]
    assert curves.not_once([step(0, 0, [0, 1, 2, 3], generation=2)], anew, 0, 0, 4) == []
    kept = broken[:2]  # the sum of generation 1 was stepped by the plan of generation 2
    assert curves.not_once([step(0, 0, [0, 2], generation=2)], kept, 0, 0, 4) == []


def test_the_loss_of_the_later_generation_counts_and_members_must_agree() -> None:
    steps = [step(0, 0, [], 5.0), step(1, 0, [], 5.0), step(0, 1, [], 4.0), step(1, 1, [], 4.1, generation=2)]
    assert curves.curve(steps, 0, 5) == ({0: 5.0, 1: 4.1}, [])
    assert curves.curve([*steps, step(2, 0, [], 5.1)], 0, 5)[1] == [0]
    assert curves.curve(steps, 1, 5)[0] == {1: 4.1}


@pytest.mark.parametrize("no_number", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_as_far_away_as_can_be(no_number: float) -> None:
    for mine, other in ((no_number, 1.0), (1.0, no_number), (no_number, no_number)):
        found = curves.apart({0: 2.0, 1: mine, 2: 1.0}, {0: 2.0, 1: other, 2: 1.0}, 1e-3)
        assert (found.where, found.over, found.largest) == (1, 1, math.inf)


def test_what_a_leg_trains_again_counts_once() -> None:
    assert curves.spans([0], 9) == [(0, 9)]
    assert curves.spans([0, 50, 150], 200) == [(0, 49), (50, 149), (150, 200)]


def test_the_largest_difference_is_found_and_so_is_what_is_missing() -> None:
    found = curves.apart({0: 2.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 1.1, 2: 1.0}, 1e-3)
    assert (found.iterations, found.where, found.over, found.missing) == (3, 1, 1, ())
    assert found.largest == pytest.approx(1 / 11)
    assert curves.apart({0: 1.0, 3: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, 1e-3).missing == (1, 2)
    assert curves.named(range(9)) == "9: 0, 1, 2, 3, 4, ..."


# ------------------------------------------------------------ leaks
def life(values: list[int], what: str = "agent", pid: int = 7, born: float = 0.0) -> list[leaks.Sample]:
    ages = [2.0 * i for i in range(len(values))]
    return [
        leaks.Sample(born + age, what, pid, round(100 * born), age, value, 50.0)
        for age, value in zip(ages, values, strict=True)
    ]


def test_a_rising_trend_is_found_and_noise_is_none() -> None:
    (rise,) = leaks.growth(life([40 + 3 * i for i in range(30)])).found
    assert rise.startswith("agent 7: descriptors") and "of its life" in rise
    assert leaks.growth(life([40 + 30 * (i % 3) for i in range(30)])).found == ()
    assert leaks.growth(life([40] * 10 + [80] * 20)).found == ()  # a step, as at a start
    many = [one for pid in range(9) for one in life([40 + 20 * pid] * 4, pid=pid)]
    assert leaks.growth(many) == leaks.Growth({}, ())  # other processes, not one that grows


def test_lives_that_were_long_enough_are_counted() -> None:
    young = int(leaks.YOUNG / 2)
    short, enough = life([40] * (young + leaks.FEWEST - 1)), life([40] * (young + leaks.FEWEST), pid=8)
    assert leaks.growth(short).lives == {} and leaks.growth([*short, *enough]).lives == {"agent": 1}


def test_a_daemon_of_short_lives_is_compared_with_those_before_it_at_the_same_age(snapshot) -> None:
    def lives(held: list[int]) -> list[leaks.Sample]:  # the longer ones hold more in their later years
        born = enumerate(held)
        return [s for i, n in born for s in life([n] * 20 + [n + 90] * i, "unicrond", 7 + i, 60.0 * i)]

    growth = leaks.growth(lives([40 + 6 * i for i in range(9)]))
    assert growth.lives == {"unicrond": 9}
    (rise,) = growth.found
    assert rise == snapshot
    assert leaks.growth(lives([40] * 9)).found == ()
    assert leaks.growth(lives([40 + 6 * i for i in range(leaks.LIVES - 1)])).found == ()


def test_this_process_is_looked_at(tmp_path: Path) -> None:
    found = leaks.sample(3.0, "agent", os.getpid())
    assert found is not None and found.descriptors > 2 and found.megabytes > 5
    assert 0.0 < found.age < float(Path("/proc/uptime").read_text().split()[0])
    assert leaks.sample(3.0, "agent", 2**22 + 1) is None


def test_what_is_there_afterwards_and_was_not_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "kept").write_text("x")
    before = leaks.Inventory({"slurmd": 5}, leaks.files({"memory": tmp_path}), ("n1: DOWN",))
    assert leaks.leaked(before, before) == []
    (tmp_path / "inner" / "image").write_bytes(bytes(9000))
    files = leaks.files({"memory": tmp_path})
    after = leaks.Inventory({"slurmd": 5, "task": 2}, files, ("n1: DOWN", "n2: IDLE+DRAIN"), ("4_1 PENDING",))
    processes, node, element, image = leaks.leaked(before, after)
    assert processes == "2 task more than before" and node == "node n2: IDLE+DRAIN" and element == "element 4_1 PENDING"
    assert image.startswith("1 files in memory") and "memory/inner/image" in image


# ------------------------------------------------------------ later work
def test_failed_work_is_repeated_and_at_last_an_error() -> None:
    calls: list[float] = []

    def fails() -> None:
        calls.append(1.0)
        raise UserError("slurmctld is down")

    agenda = Agenda(away={"n1", "n2"})
    agenda.add(10.0, "n1", fails)
    agenda.add(10.0, "n2", lambda: None)
    agenda.work(9.0)
    assert calls == [] and agenda.away == {"n1", "n2"}
    agenda.work(10.0)
    assert calls == [1.0] and agenda.away == {"n1"}
    agenda.work(10.0 + AGAIN)
    assert len(calls) == 2
    with pytest.raises(UserError, match="n1: slurmctld is down"):
        agenda.work(11.0 + PATIENCE)


def test_an_admin_takes_back_what_others_took_out_of_service_and_not_what_has_no_power() -> None:
    resumed: list[str] = []
    client = SimpleNamespace(resume=resumed.append)
    out = {"n1": "DOWN", "n2": "IDLE+DRAIN"}
    site: Any = SimpleNamespace(out_of_service=lambda: out, cluster=SimpleNamespace(client=lambda: client))
    admin = Admin()
    for now in (0.0, REPAIR, REPAIR + 1.0):
        admin.look(site, {"n1"}, now)
    assert resumed == ["n2"]
    out.clear()
    admin.look(site, set(), 50.0)
    assert admin.seen == {}


@pytest.mark.parametrize("name, why", [("file", "File exists"), ("file/run", "Not a directory")])
def test_a_folder_that_cannot_be_made_is_one_line(name, why, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--folder", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torture: {tmp_path / name} ") and f"({why})" in line and line.endswith("--folder")


def test_the_proof_of_a_job_goes_over_all_legs(tmp_path: Path) -> None:
    """A leg that never trained, one that was interrupted at iteration 3, its last checkpoint of 2, and the last one."""
    training = TRAININGS[0]

    def write(folder: Path, first: int, last: int, far: float = 0.0) -> None:
        folder.mkdir(parents=True)
        lines = [step(0, i, list(range(8)), 5.0 - i + far) for i in range(first, last + 1)]
        (folder / "losses.0").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(tmp_path / "leg1" / training.name, 0, 3)
    write(tmp_path / "leg2" / training.name, 2, 4)
    write(tmp_path / f"undisturbed-{training.name}", 0, 4)
    run = Progress(1, 2, 5.0, NAMES, legs=[Leg(0.0), Leg(1.0), Leg(2.0)], done=[done(0, training.name)])
    figures, wrong = proof.of_job(tmp_path, run, training)
    assert wrong == [] and figures["iterations"] == 5 and figures["largest"] == 0.0 and figures["faults"] == 1
    write(tmp_path / "far" / "leg0" / training.name, 0, 4, far=1e-3)
    write(tmp_path / "far" / f"undisturbed-{training.name}", 0, 4)
    _, (wrong_one,) = proof.of_job(tmp_path / "far", Progress(1, 2, 5.0, NAMES, legs=[Leg(0.0)]), training)
    assert "large: 5 losses differ" in wrong_one


def test_checkpoints_read_in_a_leg_that_was_interrupted_are_found(tmp_path: Path, snapshot) -> None:
    """Whether its end was counted, or its machine went down and only the logs are there."""
    logs, checkpoints = tmp_path / "leg1" / "large", tmp_path / "checkpoints" / "large"
    logs.mkdir(parents=True)
    (logs / "0.log").write_text(f"goes on from {checkpoints}/iter_50\n" * 3)
    assert proof.read_again(Leg(0.0, reads={"large": 1}), logs, checkpoints) == 2
    assert proof.read_again(Leg(0.0, reads={"large": 1}, read={"large": 1}), logs, checkpoints) == 0
    assert proof.read_again(Leg(0.0), logs, checkpoints) == 0  # it never trained
    training = TRAININGS[0]
    lines = "".join(json.dumps(step(0, i, list(range(8)))) + "\n" for i in range(3))
    for folder in (logs, tmp_path / f"undisturbed-{training.name}"):
        folder.mkdir(exist_ok=True)
        (folder / "losses.0").write_text(lines)
    run = Progress(1, 2, 5.0, NAMES, legs=[Leg(0.0), Leg(1.0, reads={training.name: 1}, ended="interrupted")])
    _, wrong = proof.of_job(tmp_path, run, training)
    assert wrong == snapshot


def test_a_leg_is_judged_however_it_ended(tmp_path: Path) -> None:
    torture = command.Torture(command.arguments(["--folder", str(tmp_path), "--failures", "1"]))
    torture.progress.legs.append(Leg(0.0, reads={"large": 1}))
    rises = life([40 + 3 * i for i in range(30)], "unicrond")
    part: Any = SimpleNamespace(samples=rises, jobs={"small": job(violations=2)})
    site: Any = SimpleNamespace(reads={"large": 3, "small": 0}.__getitem__)
    torture._judge(site, part)
    assert torture.progress.legs[0].read == {"large": 3, "small": 0}
    assert torture.progress.lives == {"unicrond": 1, "agent": 0}
    grows, violations = torture.progress.wrong
    assert grows.startswith("grows: unicrond 7") and violations.startswith("small: 2 violations")
