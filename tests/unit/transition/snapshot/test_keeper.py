"""The state is copied beside the training: what is in the files, whose turn it is, and what goes wrong costs nothing
but the copy."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from tests.support.flips import flip
from tests.support.kept import (
    WRITER,
    beginnings,
    copy,
    everything,
    iterations,
    kept,
    no_room,
    same,
    step,
    training,
)
from unicron_detector.formats import IMAGE
from unicron_detector.processes.rank_messages import Cut, Save
from unicron_transition.iteration.exchange import CommitResult
from unicron_transition.session.persistence import SaveSchedule
from unicron_transition.snapshot import checkpoint_file, contents, image_format, whole_state
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.checkpoint_file import WHOLE, slice_in
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.cuts import ImageRing
from unicron_transition.snapshot.image_format import BadImage, inventory, read_page
from unicron_transition.snapshot.keeper import Keeper, copy_interval
from unicron_transition.snapshot.whole_state import WholeState


# ------------------------------------------------------------ what is copied
def test_everything_comes_back_bit_for_bit(tmp_path):
    state, other = training(), training(seed=3)
    kept(tmp_path, state, 7)
    assert beginnings(tmp_path).choices == [(7, WRITER.mark), (0, "")]
    assert beginnings(tmp_path).take_up(other, 7) == 7
    assert same(everything(other), everything(state)) and (other.seed, other.loss) == (0, 1.0)
    assert other.scheduler.state_dict() == state.scheduler.state_dict()


def test_the_copy_is_of_the_moment_it_was_begun_though_buffers_change_after_it(tmp_path, monkeypatch):
    state, other = training(), training(seed=3)
    before, go = everything(state), threading.Event()
    fill = contents.Copier.copy

    def late(*arguments, **keywords):
        assert go.wait(20)
        fill(*arguments, **keywords)

    monkeypatch.setattr(contents.Copier, "copy", late)
    keeper = Keeper(tmp_path, 0, 1)
    keeper.copy(Gatherer(state), 5, 1, WRITER)
    state.model[0].module(torch.rand(5, 3))  # a forward pass changes the running mean
    assert not same(everything(state), before)
    go.set()
    keeper.wait_copied()
    step(state)  # from here on parameters may change
    keeper.close()
    beginnings(tmp_path).take_up(other, 5)
    assert same(everything(other), before)


def test_what_is_gathered_again_is_the_present_state(tmp_path):
    """Though its tensors are other ones by now, or a step count is a number that is in no tensor."""
    state, other = training(), training(seed=3)
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(state)
    copy(keeper, gatherer, 1)
    for held in state.optimizer.state.values():
        held["exp_avg"], held["told"] = held["exp_avg"] + 1.0, 5
    copy(keeper, gatherer, 2)
    for held in state.optimizer.state.values():
        held["told"] = 6
    keeper.copy(gatherer, 3, 1, WRITER)
    keeper.close()
    beginnings(tmp_path).take_up(other, 3)
    assert same(everything(other), everything(state))
    assert [held["told"] for held in other.optimizer.state.values()] == [6] * 4


def test_two_files_take_turns_and_the_newest_of_the_process_before_is_overwritten_last(tmp_path):
    state = training()
    kept(tmp_path, state, 1, 2, 3)
    assert iterations(tmp_path) == [2, 3]
    kept(tmp_path, state, 4)
    assert iterations(tmp_path) == [3, 4]


def test_what_a_generation_goes_on_from_stays_until_another_one_is_whole(tmp_path):
    state = training()
    kept(tmp_path, state, 4, 5)
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(state)
    for begins in (4, 4, 5, 5):  # twice from each: of what comes after it another place has had none
        keeper.needed = begins
        keeper.copy(gatherer, begins + 1, 1, WRITER)
        keeper.wait_whole()
        assert iterations(tmp_path) == [begins, begins + 1]
    keeper.close()


def test_where_no_thread_is_to_be_had_the_training_goes_on_without_copies(tmp_path, monkeypatch, capsys):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(training())
    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", refuse)
        copy(keeper, gatherer, 1)
        keeper.wait_copied()
        keeper.cuts.on_order(Cut(-1, none=True))
        keeper.remove_unwanted_cuts()
        keeper.hand_over(1, 1)
    assert "can't start new thread" in keeper.trouble and "the training goes on" in capsys.readouterr().err
    copy(keeper, gatherer, 2, 3)
    keeper.close()
    assert iterations(tmp_path) == [3] and not keeper.trouble


def test_a_copy_that_is_not_due_is_not_made(tmp_path):
    keeper, gatherer = Keeper(tmp_path, 0, 4), Gatherer(training())
    copy(keeper, gatherer, *range(1, 10))
    keeper.close()
    assert iterations(tmp_path) == [4, 8]


def test_who_no_longer_keeps_the_state_drops_its_files_once_the_other_has_as_much(tmp_path):
    state = training()
    keeper = kept(tmp_path, state, 4, 5, slot=1)
    keeper.hand_over(0, 5)
    kept(tmp_path, state, 4)
    keeper.hand_over(0, 5)
    keeper.close()
    assert iterations(tmp_path) == [4, 4, 5] and keeper.has_files
    kept(tmp_path, state, 5)
    keeper.hand_over(0, 5)
    keeper.close()
    assert iterations(tmp_path) == [4, 4, 5, 5], "other nodes may not have as much yet"
    keeper.hand_over(0, 6)
    keeper.close()
    assert iterations(tmp_path) == [4, 5] and not keeper.has_files


def test_settings_are_read_and_what_is_no_number_is_one_line():
    memory = {"UNICRON_MEMORY": "/dev/shm/x"}
    assert [copy_interval(memory | {"UNICRON_MEMORY_EVERY": every}) for every in ("", "0", "7")] == [1, 0, 7]
    assert copy_interval({}) == 0
    with pytest.raises(ValueError, match="UNICRON_MEMORY_EVERY='often': write a number"):
        copy_interval({"UNICRON_MEMORY_EVERY": "often"})


# ------------------------------------------------------------ what goes wrong
def test_a_full_memory_is_said_once_and_tried_again_at_a_growing_distance(tmp_path, monkeypatch):
    said, tries = [], []

    def full(*_):
        tries.append(now)
        no_room()

    keeper, gatherer = Keeper(tmp_path, 0, 1, said.append), Gatherer(training())
    with monkeypatch.context() as broken:
        broken.setattr(image_format.os, "posix_fallocate", full)
        for now in range(1, 20):
            copy(keeper, gatherer, now)
    assert tries == [1, 3, 6, 11] and len(said) == 1 and "No space left" in said[0]
    assert "No space left" in keeper.trouble and iterations(tmp_path) == []
    copy(keeper, gatherer, *range(20, 40))
    keeper.close()
    assert iterations(tmp_path) == [38, 39] and keeper.trouble == "" and "again" in said[1]


def test_a_folder_that_vanishes_ends_nothing(tmp_path):
    said, folder = [], tmp_path / "memory"
    folder.mkdir()
    keeper, gatherer = Keeper(folder, 0, 1, said.append), Gatherer(training())
    copy(keeper, gatherer, 1)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    copy(keeper, gatherer, *range(2, 5))
    assert len(said) == 1
    folder.mkdir()
    copy(keeper, gatherer, *range(5, 9))
    keeper.close()
    assert iterations(folder)[-1] == 8


# ------------------------------------------------------------ files
def test_an_agent_makes_a_checkpoint_of_an_image(tmp_path):
    state, other, saves = training(), training(seed=3), tmp_path / "saves"
    memory = tmp_path / "memory"
    memory.mkdir()
    kept(memory, state, 4, 5)
    checkpoint_file.note_destination(memory, checkpoint_file.Destination(saves, 3))
    assert checkpoint_file.destination(memory) == (saves.resolve(), 3) and checkpoint_file.destination(tmp_path) is None
    for found in inventory(memory):
        path = checkpoint_file.persist(found, saves)
        assert path.name == WRITER.name and checkpoint_file.persist(found, saves) == path
    assert [each.iteration for each in Checkpoints(saves).whole_ones()] == [5, 4]
    assert Checkpoints(saves).load(other) == 5
    assert same(everything(other), everything(state))
    flip(path)
    assert Checkpoints(saves).load(other) == 4, "the newest is damaged"
    checkpoint_file.persist(found, saves)
    assert Checkpoints(saves).load(other) == 5, "written again it is sound"


def test_an_image_that_is_overwritten_meanwhile_makes_no_file(tmp_path, monkeypatch):
    kept(tmp_path, training(), 4)
    (found,) = inventory(tmp_path)
    with pytest.raises(BadImage, match="overwritten"):
        checkpoint_file.persist(found, tmp_path / "saves", lambda size: kept(tmp_path, training(seed=2), 5, 6) and None)
    assert not list((tmp_path / "saves").glob("*/*"))


# ------------------------------------------------------------ set aside for a file
def test_what_is_set_aside_stays_as_it_is_while_the_copies_go_on_and_its_room_is_used_again(tmp_path):
    state, other = training(), training(seed=3)
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(state)
    wanted = everything(state)
    for iteration in (1, 2, 3, 4):
        keeper.copy(gatherer, iteration, 1, WRITER, aside=WHOLE if iteration == 1 else None)
        keeper.wait_copied()
        step(state)
    keeper.close()
    assert keeper.aside.is_open
    (found,) = checkpoint_file.asides(tmp_path)
    assert iterations(tmp_path) == [1, 3, 4]
    path = checkpoint_file.persist(found, tmp_path / "saves")
    found.path.unlink()
    assert not keeper.aside.is_open and not any(checkpoint_file.is_aside(path) for path in tmp_path.glob("state-*"))
    assert path.parent.name == "iteration-00000001"
    assert Checkpoints(tmp_path / "saves").load(other) == 1 and same(everything(other), wanted)


def test_it_is_set_aside_though_no_copy_is_due_and_before_it_is_whole_there_is_nothing(tmp_path, monkeypatch):
    keeper, mark_whole = Keeper(tmp_path, 0, 5), image_format.Image.mark_whole
    seen, noted = [], threading.Event()

    def looked(*about):
        assert noted.wait(20), "the thread may be here before `copy` is through"
        seen.append((list(checkpoint_file.asides(tmp_path)), keeper.aside.is_open))
        return mark_whole(*about)

    monkeypatch.setattr(image_format.Image, "mark_whole", looked)
    keeper.copy(Gatherer(training()), 3, 1, WRITER, aside=WHOLE)
    noted.set()
    keeper.close()
    assert seen == [([], True)] and [each.key.iteration for each in checkpoint_file.asides(tmp_path)] == [3]


def test_where_there_is_no_room_beside_what_is_set_aside_the_copies_wait_for_the_agent(tmp_path, monkeypatch):
    said: list[str] = []
    state = training()
    keeper, gatherer = Keeper(tmp_path, 0, 1, said.append), Gatherer(state)
    for iteration in (1, 2):
        keeper.copy(gatherer, iteration, 1, WRITER, aside=WHOLE if iteration == 2 else None)
    keeper.wait_whole()
    copy(keeper, gatherer, 3)
    with monkeypatch.context() as broken:
        broken.setattr(image_format.os, "posix_fallocate", no_room)
        copy(keeper, gatherer, 4)
    assert iterations(tmp_path) == [2, 3] and not keeper.trouble
    checkpoint_file.asides(tmp_path)[0].path.unlink()
    keeper.copy(gatherer, 5, 1, WRITER)
    keeper.close()
    assert iterations(tmp_path) == [3, 5] and not said
    assert not [path for path in (tmp_path / "saves").rglob("*") if path.is_file()]


def test_cuts_go_when_none_are_wanted_any_more_and_what_takes_turns_stays(tmp_path: Path) -> None:
    state = training()
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(state)
    keeper.cuts.on_order(Cut(1))
    copy(keeper, gatherer, 1, 2, 3)
    assert [path.name for path in sorted(tmp_path.glob("cut-*"))] == ["cut-state-0-0.image"]
    keeper.cuts.on_order(Cut(-1, none=True))
    keeper.remove_unwanted_cuts()
    keeper.copy(gatherer, 4, 1, WRITER)
    keeper.close()
    assert not list(tmp_path.glob("cut-*")) and iterations(tmp_path) == [3, 4]


def test_what_cannot_go_costs_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def driver() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    state = training()
    keeper = kept(tmp_path, state, 1)
    monkeypatch.setattr(ImageRing, "remove", driver)
    keeper.cuts.paths("state")
    keeper.cuts.on_order(Cut(-1, none=True))
    keeper.remove_unwanted_cuts()
    keeper.copy(Gatherer(state), 2, 0, WRITER)
    keeper.close()
    assert iterations(tmp_path) == [1, 2] and not keeper.trouble


@pytest.mark.parametrize("every", [1, 2])
def test_where_there_is_no_room_for_a_cut_what_takes_turns_goes_on_and_it_is_said_once(tmp_path, monkeypatch, every):
    """Defect: each cut cost the copies of two iterations and two lines, and the controller names one every 10 s."""
    said: list[str] = []
    allocate, full = image_format.allocate, True

    def beside_two(path: Path, descriptor: int, size: int) -> None:
        if full and path.name.startswith("cut-"):
            no_room()
        allocate(path, descriptor, size)

    monkeypatch.setattr(image_format, "allocate", beside_two)
    keeper, gatherer = Keeper(tmp_path, 0, every, said.append), Gatherer(training())
    for iteration in range(1, 10):
        if iteration in (3, 6, 8):
            keeper.cuts.on_order(Cut(iteration))
        keeper.copy(gatherer, iteration, 1, WRITER)
        keeper.wait_whole()
        due = [each for each in range(1, iteration + 1) if each % every == 0]
        assert iterations(tmp_path) == due[-2:] and not keeper.trouble
    assert len(said) == 1 and "no copies" in said[0]
    full = False
    keeper.cuts.on_order(Cut(11))
    copy(keeper, gatherer, 10, 11)
    keeper.close()
    (cut,) = tmp_path.glob("cut-*")
    assert read_page(cut).key.iteration == 11 and len(said) == 1


def test_the_training_does_not_wait_while_much_is_removed(tmp_path, remembered, monkeypatch):
    """The thread that copies does; the copy of that iteration is begun before."""
    go, unlink, gone = threading.Event(), os.unlink, []

    def slowly(path, **how):
        assert threading.current_thread() is not threading.main_thread() and go.wait(20.0)
        gone.append(path)
        unlink(path, **how)

    remembered.on_message(Cut(1))
    for iteration in (1, 2, 3):
        remembered.keep_boundary(iteration, [1], 1, WRITER)
        remembered.wait_copied()
    kept(tmp_path, training(), 4)
    remembered.wait_whole()
    monkeypatch.setattr(os, "unlink", slowly)
    remembered.on_message(Cut(-1, none=True))
    remembered.keep_boundary(4, [1], 1, WRITER)
    remembered.wait_whole()
    assert iterations(tmp_path) == [1, 3, 4, 4] and not gone
    remembered.keep_boundary(5, [0, 1], 2, WRITER)
    assert not gone
    go.set()
    remembered.close()
    assert iterations(tmp_path) == [4] and gone


# ------------------------------------------------------------ what a session has to do with it
@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WholeState:
    """Of slot 1, one of two ranks of a node."""
    variables = {"UNICRON_MEMORY": str(tmp_path), "UNICRON_IMAGE_FORMAT": str(IMAGE.number)}
    for name, value in (variables | {"LOCAL_WORLD_SIZE": "2", "UNICRON_MEMORY_EVERY": "1"}).items():
        monkeypatch.setenv(name, value)
    made = WholeState(training(), 1)
    made.find_start(Checkpoints(tmp_path / "saves"), 0, lambda: WRITER)
    return made


def test_cuts_go_though_another_rank_of_the_node_keeps_the_state_by_now(tmp_path, remembered):
    remembered.on_message(Cut(1))
    for iteration in (1, 2):
        remembered.keep_boundary(iteration, [1], 1, WRITER)
        remembered.wait_copied()
    kept(tmp_path, training(), 3)
    remembered.keep_boundary(4, [0, 1], 2, WRITER)
    remembered.close()
    assert [path.name for path in tmp_path.glob("*-1-*")] == ["cut-state-1-0.image"]
    remembered.on_message(Cut(-1, none=True))
    remembered.keep_boundary(4, [0, 1], 2, WRITER)
    remembered.close()
    assert not list(tmp_path.glob("*-1-*")) and "/cut-state-1-" not in Path("/proc/self/maps").read_text()


def test_an_agent_that_hangs_with_its_slice_keeps_its_node_out_of_the_next_checkpoints_and_no_other(
    tmp_path, remembered, monkeypatch
):
    """The first node writes this node's slices."""
    monkeypatch.setattr(whole_state, "slices_of", lambda size, nodes: nodes)
    monkeypatch.setattr(remembered, "_per_node", 1)
    here, saving = ([0, 1], 1, WRITER), SaveSchedule(Checkpoints(tmp_path / "saves"), remembered)
    assert remembered.set_aside(1, *here)
    remembered.keep_boundary(1, *here)
    remembered.wait_whole()
    (found,) = checkpoint_file.asides(tmp_path)
    assert slice_in(found.path) == (1, 2) and remembered.is_filing
    assert not saving.busy and not remembered.set_aside(2, *here)
    remembered.keep_boundary(2, *here)
    remembered.wait_whole()
    assert checkpoint_file.asides(tmp_path) == [found]
    checkpoint_file.release_aside(found.path)
    assert not remembered.is_filing and remembered.set_aside(3, *here)
    remembered.close()


@pytest.mark.parametrize("number", [None, "", str(IMAGE.number - 1)])
def test_nothing_is_set_aside_for_an_agent_that_does_not_read_it_and_the_rank_writes_the_file(
    tmp_path, remembered, monkeypatch, number
):
    """An upgrade leaves the agent of release 0.2 in place until the step's end. It removes such images unread."""
    if number is None:
        monkeypatch.delenv("UNICRON_IMAGE_FORMAT")
    else:
        monkeypatch.setenv("UNICRON_IMAGE_FORMAT", number)
    saves = Checkpoints(tmp_path / "saves", interval=1)
    saving = SaveSchedule(saves, remembered)
    assert saving.is_due(1)
    saving.store(1, training(), [1], 1, WRITER)
    remembered.keep_boundary(1, [1], 1, WRITER)
    remembered.close()
    saves.wait_written()
    assert not checkpoint_file.asides(tmp_path) and [each.iteration for each in saves.whole_ones()] == [1]


def test_a_checkpoint_that_could_not_be_set_aside_is_asked_for_again(tmp_path, remembered, monkeypatch, capsys):
    here = [1], 1, WRITER
    saving = SaveSchedule(Checkpoints(tmp_path / "saves"), remembered)
    remembered.on_message(Save())
    saving.on_commit(CommitResult(save=saving.wanted))
    assert saving.is_due(1) and not saving.wanted and remembered.set_aside(1, *here)

    with monkeypatch.context() as broken:
        broken.setattr(image_format.os, "posix_fallocate", no_room)
        remembered.keep_boundary(1, *here)
        remembered.wait_copied()
        remembered.close()
    assert not checkpoint_file.asides(tmp_path) and saving.wanted and not saving.busy
    saving.begin_iteration()
    saving.on_commit(CommitResult(save=saving.wanted))
    assert saving.is_due(2) and not saving.wanted, "it is asked for once"
    assert not remembered.set_aside(1, *here), "the rank writes it by itself"
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("least", "members", "wanted"),
    [
        (1, [1, 2, 3], ["slice-0-of-2"]),
        (1, [5, 2, 1], ["slice-2-of-3"]),
        (1, [0, 1, 2], []),
        (1, [*range(-20, 0, 2), 1], []),
        (1, [1], [""]),
        (1 << 20, [1, 2, 3], [""]),
    ],
    ids=["of two nodes", "of the third node", "a lower slot does", "not of more than eight", "alone", "too small"],
)
def test_a_node_writes_the_slice_of_its_number_among_those_that_hold_the_state(
    tmp_path, remembered, monkeypatch, least, members, wanted
):
    monkeypatch.setattr(checkpoint_file, "LEAST_SLICE", least)
    assert remembered.set_aside(1, members, 1, WRITER) == bool(wanted)
    remembered.keep_boundary(1, members, 1, WRITER)
    remembered.close()
    names = [path.name.removeprefix("due-1-1").removesuffix(".image") for path in tmp_path.glob("due-*")]
    assert [name.removeprefix(".") for name in names] == wanted


def test_a_slice_that_could_not_be_set_aside_is_the_others_to_write_unless_this_node_is_the_first(
    remembered, monkeypatch
):
    monkeypatch.setattr(checkpoint_file, "LEAST_SLICE", 1)
    for iteration, members, asked in ((1, [2, 1], False), (2, [1, 2], True)):
        remembered._keeper.trouble = ""
        assert remembered.set_aside(iteration, members, iteration, WRITER)
        with monkeypatch.context() as broken:
            broken.setattr(image_format.os, "posix_fallocate", no_room)
            remembered.keep_boundary(iteration, members, iteration, WRITER)
            remembered.wait_whole()
        assert remembered.asked == asked
    remembered.close()
