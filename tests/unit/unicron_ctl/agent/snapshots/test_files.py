"""The agent's thread that makes files of what ranks have set aside."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.processes import wait_for
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.snapshots.checkpoint_files import Files
from unicron_ctl.agent.snapshots.node_memory import Memory
from unicron_ctl.shared.protocol import structs
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.image_format import STATE, SUFFIX, Image, Key, read_page

MARK = "0a1b2c3d"


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    place = Place(job="7", element=0, node="n1", address="127.0.0.1", settings=structs.Settings(name="a", user="b"))
    made = Memory(place, {"UNICRON_MEMORY_DIR": str(tmp_path)}, print)
    made.open("a1")
    assert made.folder is not None
    checkpoint_file.note_destination(made.folder, checkpoint_file.Destination(tmp_path / "saves", 2))
    return made


def aside(memory: Memory, iteration: int, size: int = 100, base: int = 0, place: int = 0, places: int = 1) -> Path:
    """An image that the rank of this place has set aside, of generation `base`."""
    path = memory.folder / f"state-{place}-{iteration % 2}{SUFFIX}"
    image = Image(path, 10, size)
    image.data[:size] = os.urandom(size)
    image.mark_whole(Key(STATE, place, iteration, place, places, base=base, mark=MARK), b"head", size)
    name = checkpoint_file.aside_path(memory.folder, place, iteration)
    checkpoint_file.set_aside(path, name)
    return name


def iterations(folder: Path) -> list[int]:
    return [each.iteration for each in folders.whole(folder)]


def test_what_is_set_aside_becomes_files_of_which_the_newest_stay(memory: Memory, tmp_path: Path) -> None:
    names = [aside(memory, iteration) for iteration in (2, 4, 6)]
    said: list[str] = []
    writer = Files(memory, lambda key: (), 0.0, said.append)
    wait_for(lambda: not any(name.exists() for name in names), "the files")
    wait_for(lambda: iterations(tmp_path / "saves") == [6, 4], "the oldest has gone")
    assert writer.results.take_all() == [2, 4, 6] and not said
    writer.request_checkpoint(rests=False)
    aside(memory, 7)
    writer.close(20.0)
    assert len(said) == 1 and said[0].endswith(f" {tmp_path / 'saves' / 'iteration-00000007'}")


def test_what_is_older_goes_when_the_others_files_are_there_and_only_the_agent_of_the_first_looks_for_it(
    memory: Memory, tmp_path: Path, monkeypatch
) -> None:
    """Not after each file, and not in each agent: with a distributed optimizer there are as many files as ranks."""
    looks, look = [], folders.prune
    monkeypatch.setattr(folders, "prune", lambda *about: looks.append(about) or look(*about))
    monkeypatch.setattr("unicron_ctl.agent.snapshots.checkpoint_files.FILE_LOOK_SECONDS", 0.01)
    for iteration in (2, 4, 6, 8):
        aside(memory, iteration, place=1, places=2)
    Files(memory, lambda key: (), 0.0, print).close(20.0)
    assert not looks
    for path in (tmp_path / "saves" / "iteration-00000008").iterdir():
        path.rename(tmp_path / path.name)  # another agent's, not written yet
    names = [aside(memory, iteration, places=2) for iteration in (2, 4, 6, 8)]
    writer = Files(memory, lambda key: (), 0.0, print)
    wait_for(lambda: not any(name.exists() for name in names), "the files")
    wait_for(lambda: iterations(tmp_path / "saves") == [6, 4], "the oldest has gone")
    before, began = len(looks), time.monotonic()
    time.sleep(0.5)
    assert len(looks) - before <= 2 + math.log2((time.monotonic() - began) / 0.01), "each after twice the time"
    (late,) = tmp_path.glob(f"*{SUFFIX}")
    late.rename(tmp_path / "saves" / "iteration-00000008" / late.name)
    wait_for(lambda: iterations(tmp_path / "saves") == [8, 6], "it is whole")
    writer.close()


def test_a_folder_that_takes_nothing_is_said_once_and_so_is_the_first_that_it_takes(
    memory: Memory, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "saves").write_text("no folder")
    said: list[str] = []
    writer = Files(memory, lambda key: (), 0.0, said.append)
    for iteration in (2, 4):
        name = aside(memory, iteration)
        wait_for(lambda: not name.exists(), "it is given up")  # noqa: B023
    assert len(said) == 1
    (tmp_path / "saves").unlink()
    aside(memory, 6)
    writer.close(20.0)
    assert iterations(tmp_path / "saves") == [6]
    assert [line.replace(str(tmp_path), "FOLDER") for line in said] == snapshot


def test_a_file_that_is_not_ready_when_the_agent_ends_is_made_by_the_next_one(memory: Memory, tmp_path: Path) -> None:
    name = aside(memory, 2, 3 * checkpoint_file.PIECE)
    writer = Files(memory, lambda key: (), checkpoint_file.PIECE / 60.0, print)  # a minute for each piece
    wait_for(lambda: list((tmp_path / "saves").glob("*/*.new")), "it is being written")
    writer.close()
    assert name.exists() and not list((tmp_path / "saves").glob("*/*"))
    Files(memory, lambda key: (), 0.0, print).close(20.0)
    assert not name.exists() and iterations(tmp_path / "saves") == [2]


def test_what_is_no_image_any_more_is_said_and_goes_so_that_the_next_one_can_be_set_aside(
    memory: Memory, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    name = aside(memory, 2)
    name.write_bytes(b"x" + name.read_bytes()[1:])
    said: list[str] = []
    writer = Files(memory, lambda key: (), 0.0, said.append)
    wait_for(lambda: not name.exists(), "it goes")
    aside(memory, 4)
    writer.close(20.0)
    assert iterations(tmp_path / "saves") == [4]
    masked = [line.replace(str(memory.folder), "MEMORY").replace(str(tmp_path), "FOLDER") for line in said]
    assert masked == snapshot


def test_what_a_rank_sets_aside_anew_while_the_agent_writes_the_one_before_becomes_the_file(
    memory: Memory, tmp_path: Path, monkeypatch
) -> None:
    """Of the same iteration, in another past: the name is the same."""
    name = aside(memory, 2)
    read, bases = checkpoint_file.persist, []

    def replaced(found, folder, pace, cut):
        if not bases:
            aside(memory, 2, base=7)
        bases.append(found.key.base)
        return read(found, folder, pace, cut)

    monkeypatch.setattr(checkpoint_file, "persist", replaced)
    writer = Files(memory, lambda key: (), 0.0, lambda line: None)
    wait_for(lambda: not name.exists(), "the file")
    writer.close()
    (path,) = (tmp_path / "saves").glob(f"*/*{SUFFIX}")
    assert bases == [0, 7] and read_page(path).key.base == 7 and not list(memory.folder.glob("*.new"))


def test_two_threads_of_one_process_write_no_file_of_the_same_name(tmp_path: Path) -> None:
    names = [checkpoint_file.unfinished_path(tmp_path / "a")]
    other = threading.Thread(target=lambda: names.append(checkpoint_file.unfinished_path(tmp_path / "a")))
    other.start()
    other.join()
    assert len(set(names)) == 2 and all(name.name.endswith(".new") for name in names)


def test_while_nobody_trains_what_there_is_is_written_at_once(memory: Memory, tmp_path: Path, capfd) -> None:
    aside(memory, 2).unlink()
    writer = Files(memory, lambda key: (), 0.0, print)
    writer.request_checkpoint(rests=True)
    wait_for(lambda: iterations(tmp_path / "saves") == [2], "the file")
    writer.close()
    assert str(tmp_path / "saves" / "iteration-00000002") in capfd.readouterr().out


def test_an_error_that_nobody_has_thought_of_is_said_once_and_does_not_end_the_thread(
    memory: Memory, tmp_path: Path, monkeypatch
) -> None:
    """Defect: a folder that vanished between two calls of `glob` ended it, and nothing was written any more."""
    gone, other = FileNotFoundError(2, "No such file or directory", str(memory.folder)), ValueError("what is this?")
    plain, looks, said = checkpoint_file.asides, iter([gone, gone, other, gone]), []

    def asides(folder, tell):
        if (error := next(looks, None)) is not None:
            raise error
        return plain(folder, tell)

    monkeypatch.setattr("unicron_ctl.agent.snapshots.checkpoint_files.FILE_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_file, "asides", asides)
    name = aside(memory, 2)
    writer = Files(memory, lambda key: (), 0.0, said.append)
    wait_for(lambda: not name.exists(), "the file")
    writer.close(20.0)
    assert iterations(tmp_path / "saves") == [2]
    assert [str(gone) in said[0], "ValueError: what is this?" in said[1]] == [True] * len(said), said


def test_an_image_over_which_the_agent_stumbles_is_let_go_so_that_the_next_one_can_be_set_aside(
    memory: Memory, tmp_path: Path, monkeypatch
) -> None:
    plain, said = checkpoint_file.persist, []

    def persist(found, folder, pace, cut):
        if found.key.iteration == 2:
            raise ValueError("what is this?")
        return plain(found, folder, pace, cut)

    monkeypatch.setattr(checkpoint_file, "persist", persist)
    name = aside(memory, 2)
    writer = Files(memory, lambda key: (), 0.0, said.append)
    wait_for(lambda: not name.exists(), "it is given up")
    aside(memory, 4)
    writer.close(20.0)
    assert iterations(tmp_path / "saves") == [4]
    assert len(said) == 2 and "iteration 2: ValueError: what is this?" in said[0]
