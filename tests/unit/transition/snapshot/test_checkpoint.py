"""Files that ranks write each for itself: when they are a whole checkpoint, what is read from them, and the rescue of a
job that nobody leads any more."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.kept import everything, same, training
from tests.support.texts import raises_text
from unicron_transition.snapshot import checkpoint, checkpoint_file, folders, foreign, migrate, parts
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints, Writer
from unicron_transition.snapshot.formats import opening
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.model_facts import ModelFacts


@pytest.fixture
def state():
    return training()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(checkpoint, "RESCUE_SECONDS", 0.4)
    monkeypatch.setattr(checkpoint, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint, "OTHERS_SECONDS", 0.0)


def with_scale(state: TrainingState, scale: float) -> TrainingState:
    """As fp16 has one."""
    held = {"scale": torch.tensor([scale]), "growth_tracker": 3}
    state.optimizer.grad_scaler = SimpleNamespace(state_dict=lambda: held, load_state_dict=held.update)
    return state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def written(folder: Path, state: TrainingState, iteration: int, *writers: Writer, keep: int = 2) -> None:
    for writer in writers:
        Checkpoints(folder, keep=keep).save_last(state, iteration, writer)


# ------------------------------------------------------------ reading
def test_the_loss_scale_comes_back_too_where_there_is_one(tmp_path):
    written(tmp_path, with_scale(training(), 2.0**20), 7, Writer())
    other = with_scale(training(seed=3), 2.0**32)
    assert Checkpoints(tmp_path).load(other) == 7
    assert other.scales() == [{"scale": [2.0**20], "growth_tracker": 3}]
    assert Checkpoints(tmp_path).load(training(seed=3)) == 7, "in another precision"
    written(tmp_path, training(), 9, Writer())
    assert Checkpoints(tmp_path).load(other) == 9
    assert other.scales() == [{"scale": [2.0**20], "growth_tracker": 3}], "there was none"


def test_everything_comes_back_bit_for_bit(tmp_path, state):
    state.seed, other = 77, training(seed=3)
    other.scheduler.step()
    written(tmp_path, state, 7, Writer())
    assert not same(everything(other), everything(state))
    assert Checkpoints(tmp_path).load(other) == 7
    assert same(everything(other), everything(state)) and other.seed == 77
    assert other.scheduler.state_dict() == state.scheduler.state_dict()
    assert other.optimizer.param_groups[0]["lr"] == state.optimizer.param_groups[0]["lr"]


def test_the_parameters_alone_leave_optimizer_schedule_and_seed_as_they_are(tmp_path, state):
    state.seed, other, fresh = 77, training(seed=3), training(seed=3)
    state.scheduler.step()
    written(tmp_path, state, 7, Writer())
    assert Checkpoints(tmp_path / "own", begin_from=tmp_path, begin_with="model").load(other) == 0
    weights = len(state.model[0].module.state_dict())
    assert same(everything(other)[:weights], everything(state)[:weights])
    assert same(everything(other)[weights:], everything(fresh)[weights:])
    assert (other.seed, other.scheduler.state_dict()) == (fresh.seed, fresh.scheduler.state_dict())


def test_megatrons_schedule_is_as_far_as_it_was_and_else_what_the_script_says_today(tmp_path, state):
    class Schedule:
        """Megatron's counts samples, and refuses a state of other settings."""

        def __init__(self, rate: float, samples: int = 0):
            self.rate, self.num_steps = rate, samples

        def state_dict(self) -> dict:
            return {"max_lr": self.rate, "num_steps": self.num_steps}

        def step(self, increment: int) -> None:
            self.num_steps += increment

    state.scheduler = Schedule(0.1, 48)
    written(tmp_path, state, 7, Writer())
    other = training(seed=3)
    other.scheduler = Schedule(0.2)
    Checkpoints(tmp_path).load(other)
    assert (other.scheduler.rate, other.scheduler.num_steps) == (0.2, 48)


def test_without_all_its_files_it_is_no_checkpoint(tmp_path, state, snapshot):
    written(tmp_path, state, 5, Writer())
    written(tmp_path, state, 7, Writer(place=1, size=2), Writer(place=0, size=2, shard=0, count=2))
    assert [each.iteration for each in Checkpoints(tmp_path).whole_ones()] == [5]
    written(tmp_path, state, 7, Writer(place=0, size=2, shard=1, count=2))
    assert [each.iteration for each in Checkpoints(tmp_path).whole_ones()] == [7, 5]
    assert Checkpoints(tmp_path).load(state) == 7 and Checkpoints(tmp_path).load(state, 5) == 5
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path).load(state, 6)


def test_files_of_two_runs_or_layouts_are_no_whole(tmp_path, state):
    halves = Writer(place=0, size=2, layout="TP2", loss=1.0), Writer(place=1, size=2, layout="TP2", loss=1.0 + 2**-52)
    written(tmp_path, state, 7, *halves, Writer(place=1, size=2, layout="PP2", loss=1.0))
    assert Checkpoints(tmp_path).whole_ones() == [] and Checkpoints(tmp_path).load(state) is None


def test_a_damaged_one_is_passed_over_for_the_one_before_by_all(tmp_path, state, capsys):
    written(tmp_path, state, 5, Writer())
    later = training(seed=3)
    written(tmp_path, later, 7, Writer(loss=1.0))
    path = tmp_path / "iteration-00000007" / Writer(loss=1.0).name
    damaged = bytearray(path.read_bytes())
    place = damaged.find(next(later.tensors()).numpy().tobytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    assert Checkpoints(tmp_path).load(later) == 5 and same(everything(later), everything(state))
    assert "iteration 7 passed over" in capsys.readouterr().err
    assert [each.iteration for each in Checkpoints(tmp_path).whole_ones()] == [5], "others read other files of it"
    written(tmp_path, later, 7, Writer(loss=1.0))
    assert [each.iteration for each in Checkpoints(tmp_path).whole_ones()] == [7, 5], "written again it is sound"


def test_another_model_is_said_to_be_one(tmp_path, state, snapshot):
    written(tmp_path, state, 5, Writer())
    other = training()
    other.model[0].module[0] = torch.nn.Linear(5, 4)
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path).load(other)


def test_a_model_with_other_heads_is_another_one_though_all_shapes_fit(tmp_path, state, monkeypatch, capfd, snapshot):
    """Defect: a mistyped --num-attention-heads trained on without a word."""
    told = ModelFacts("float32", heads=8, groups=8, channels=4, arguments={"swiglu": True})
    monkeypatch.setattr(migrate, "model_facts", lambda model: told)
    written(tmp_path, state, 5, Writer())
    for other in ({"heads": 4}, {"groups": 2}, {"channels": 8}):
        monkeypatch.setattr(migrate, "model_facts", lambda model, other=other: replace(told, **other))
        with raises_text(CheckpointError, snapshot, tmp_path):
            Checkpoints(tmp_path).load(training())
        with pytest.raises(parts.Missing, match="and here it is"):
            index = opening.index_of(tmp_path)
            foreign.Foreign(tmp_path, index, foreign.Selection(optimizer=False)).load(training())
    monkeypatch.setattr(migrate, "model_facts", lambda model: replace(told, arguments={"swiglu": False}))
    assert Checkpoints(tmp_path).load(training()) == 5
    assert "another model: swiglu is True" in capfd.readouterr().err


def test_one_that_is_all_damaged_is_never_taken_for_none(tmp_path, state, snapshot):
    """Not even by a rank that starts after another one has found it so."""
    written(tmp_path, state, 5, Writer())
    path = tmp_path / "iteration-00000005" / Writer().name
    path.write_bytes(path.read_bytes()[:-200] + bytes(200))
    for _ in range(2):
        with raises_text(CheckpointError, snapshot, tmp_path):
            Checkpoints(tmp_path).load(state)
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path).choices()


# ------------------------------------------------------------ writing
def test_so_many_whole_ones_stay(tmp_path, state):
    one, two = Writer(place=0, size=2), Writer(place=1, size=2)
    for iteration in (1, 2, 3):
        written(tmp_path, state, iteration, two, one)
    assert names(tmp_path) == ["iteration-00000002", "iteration-00000003"]
    written(tmp_path, state, 4, one)
    assert names(tmp_path) == ["iteration-00000002", "iteration-00000003", "iteration-00000004"], "half of it is there"


@pytest.mark.parametrize("first", [Writer(size=2), Writer(count=2)], ids=["places", "shards"])
def test_of_all_who_write_one_looks_for_older_ones_and_at_the_end_it_waits_for_the_others(
    tmp_path, state, first, monkeypatch
):
    """16,384 ranks that look at 16,384 names each would keep the file system busy for hours."""
    others = [replace(first, place=int(first.size > 1), shard=int(first.count > 1))]
    looks, look = [], folders.prune
    monkeypatch.setattr(folders, "prune", lambda *about: looks.append(about) or look(*about))
    for iteration in (1, 2, 3):
        written(tmp_path, state, iteration, *others)
    assert not looks
    written(tmp_path, state, 1, first)
    written(tmp_path, state, 2, first)
    monkeypatch.setattr(checkpoint, "OTHERS_SECONDS", 20.0)
    late = threading.Timer(0.2, written, (tmp_path, state, 4, *others))
    late.start()
    written(tmp_path, state, 4, first)
    late.join()
    assert names(tmp_path) == ["iteration-00000002", "iteration-00000003", "iteration-00000004"]
    assert iterations(tmp_path) == [2, 4] and looks


def test_what_somebody_reads_stays_until_it_is_read(tmp_path, state, monkeypatch):
    """Defect: a training that saves often removed the checkpoint that it exported, seen on a GPU."""
    written(tmp_path, state, 1, Writer())
    with folders.holding(tmp_path / "iteration-00000001"):
        for iteration in (2, 3, 4):
            written(tmp_path, state, iteration, Writer())
        assert iterations(tmp_path) == [1, 3, 4]
    written(tmp_path, state, 5, Writer())
    assert iterations(tmp_path) == [4, 5], "nobody reads it any more"
    folders.hold(tmp_path / "iteration-00000004", "killed")
    monkeypatch.setattr(folders, "STALE_SECONDS", -1.0)
    written(tmp_path, state, 6, Writer())
    assert iterations(tmp_path) == [5, 6], "whoever read it was killed"
    with folders.holding(tmp_path / "iteration-00000004") as kept:
        assert not kept and names(tmp_path) == ["iteration-00000005", "iteration-00000006"], "it is gone, and stays so"


def test_what_one_left_because_others_wrote_after_it_goes_before_the_next_one_is_written(tmp_path, state, monkeypatch):
    one, two = Writer(place=0, size=2), Writer(place=1, size=2)
    for iteration in (1, 2, 3):
        written(tmp_path, state, iteration, one, two)
    assert iterations(tmp_path) == [1, 2, 3]
    seen, writing = [], checkpoint.writing
    monkeypatch.setattr(checkpoint, "writing", lambda *args: seen.append(iterations(tmp_path)) or writing(*args))
    written(tmp_path, state, 4, one)
    assert seen == [[2, 3]]


def test_what_all_who_write_remove_at_the_same_time_is_no_trouble(tmp_path, state, monkeypatch):
    """Defect: a rank had written its last file, and said that it had not, since a folder went while it looked there."""
    for iteration in (1, 2, 3):
        written(tmp_path, state, iteration, Writer(), keep=9)
    ask, looks = (os.scandir, os.listdir), itertools.count()

    def racing(which: int):
        def looked(path):
            if isinstance(path, int) or Path(path) != tmp_path:
                return ask[which](path)
            found = list(ask[which](path))
            if next(looks) == 5:  # for files that nobody finished, after it has written its own
                shutil.rmtree(tmp_path / "iteration-00000003")
            return found if which else contextlib.nullcontext(found)

        return looked

    monkeypatch.setattr(os, "scandir", racing(0))
    monkeypatch.setattr(os, "listdir", racing(1))
    job = Checkpoints(tmp_path, keep=2)
    job.save_last(state, 4)
    assert iterations(tmp_path) == [4] and next(looks) > 5


def test_what_goes_wrong_costs_that_checkpoint_alone(tmp_path, state, monkeypatch, capsys):
    """Whatever it is: it must not count as written."""

    def fail(*_):
        raise ValueError("no such thing")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint_file, "file_front", fail)
        checkpoints = Checkpoints(tmp_path, interval=1)
        checkpoints.save(state, 1)
        checkpoints.wait_written()
        assert "iteration 1 not written" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="make room"):
            checkpoints.save_last(state, 1)
    checkpoints.save_last(state, 1)
    assert [each.iteration for each in checkpoints.whole_ones()] == [1]
    assert names(tmp_path / "iteration-00000001") == [Writer().name]


# ------------------------------------------------------------ rescue
def iterations(folder: Path) -> list[int]:
    return sorted(each.iteration for each in Checkpoints(folder).whole_ones())


@pytest.mark.parametrize(
    ("calls", "saved"),
    [
        ([(7, 0, Writer())], [7]),
        ([(8, 0, Writer()), (7, 0, Writer()), (8, 5, Writer())], [8]),
        ([(7, 0, Writer()), (8, 1, Writer())], [7, 8]),
        ([(7, 0, Writer(place=1, size=2)), (7, 0, Writer(size=2))], [7]),
    ],
    ids=["the first at once", "nothing that is there", "one that has stepped", "each place its own part"],
)
def test_a_rescue_writes_what_is_not_there_yet(tmp_path, state, capsys, calls, saved):
    for iteration, turn, writer in calls:
        Checkpoints(tmp_path).rescue(state, iteration, turn, writer)
    assert iterations(tmp_path) == saved
    assert capsys.readouterr().err.count("was saved in") == (1 if saved == [8] else len(calls))


def test_the_others_write_what_those_before_them_did_not(tmp_path, state):
    began = time.monotonic()
    Checkpoints(tmp_path).rescue(state, 7, 2)
    assert iterations(tmp_path) == [7] and time.monotonic() - began >= 0.8


def test_who_wrote_a_shard_beside_those_of_agents_writes_it_again_where_the_agents_are_gone(tmp_path, state):
    """Its file has the mark of their set, which nobody completes any more."""
    writers = [Writer(shard=shard, count=2, loss=0.5) for shard in (0, 1)]
    jobs = [Checkpoints(tmp_path) for _ in writers]
    jobs[1].save(state, 5, replace(writers[1], shards="abcd1234"))
    for job, writer in zip(jobs, writers, strict=True):
        job.rescue(state, 5, writer=writer)
    assert iterations(tmp_path) == [5]


@pytest.mark.parametrize("ahead", [0.0, 60.0, -2.0])
def test_a_file_in_the_making_is_waited_for(tmp_path, state, ahead):
    """Whatever the file server's clock says: ahead of this node's, seconds."""
    path = tmp_path / "iteration-00000007" / Writer().name
    new = path.with_name(f"{path.name}.n1.99.new")
    done = threading.Event()

    def another() -> None:
        for _ in range(10):
            os.utime(new, (time.time() + ahead,) * 2)
            time.sleep(0.1)
        done.set()
        new.replace(path)

    thread = threading.Thread(target=another)
    path.parent.mkdir()
    new.touch()
    os.utime(new, (time.time() + ahead,) * 2)
    thread.start()
    Checkpoints(tmp_path).rescue(state, 7, 1)
    assert done.is_set()
    thread.join()
    assert names(path.parent) == [path.name]


@pytest.mark.parametrize("age", [0.0, 3600.0])
def test_a_writer_that_died_is_not_waited_for(tmp_path, state, age):
    folder = tmp_path / "iteration-00000007"
    left = folder / f"{Writer().name}.n1.99.new"
    folder.mkdir()
    left.touch()
    os.utime(left, (time.time() - age,) * 2)
    Checkpoints(tmp_path).rescue(state, 7, 1)
    assert iterations(tmp_path) == [7]


def test_what_cannot_be_written_is_said(tmp_path, state):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="make room"):
        Checkpoints(tmp_path / "file" / "folder").rescue(state, 7, 0)
