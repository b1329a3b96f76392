"""The folder of shared memory that an agent makes for its ranks, and who removes it when."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from unicron_ctl.agent.connections import held_folders
from unicron_ctl.agent.connections.held_folders import FORGOTTEN_SECONDS, try_hold
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.snapshots import last_checkpoint
from unicron_ctl.agent.snapshots.last_checkpoint import TURN_SECONDS, LastCheckpoint
from unicron_ctl.agent.snapshots.node_memory import Memory, sweep, within
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.formats import IMAGE
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.image_format import Image, ImagePage, Key

MARK = "0a1b2c3d"
PLACES = 8  # of a replica, where there are several


def place(job: str = "7", element: int = 0, node: str = "n1") -> Place:
    return Place(
        job=job, element=element, node=node, address="127.0.0.1", settings=structs.Settings(name="a", user="b")
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]):
    def memory(job: str = "7", element: int = 0, run: str = "a1", **settings: str) -> Memory:
        made = Memory(place(job, element), {"UNICRON_MEMORY_DIR": str(tmp_path), **settings}, said.append)
        made.open(run)
        return made

    return memory


def swept() -> None:
    """The agents' threads are through."""
    threads = [thread for thread in threading.enumerate() if thread.name == "unicron-sweep"]
    wait_for(lambda: not any(thread.is_alive() for thread in threads), "nothing is being removed")


def age(path: Path, seconds: float) -> None:
    """What was left so long ago, for the agents that come from now on."""
    swept()  # an earlier one's thread may be about to look
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_it_holds_outlives_the_agent_and_the_next_one_finds_it(make, tmp_path: Path) -> None:
    first = make()
    assert first.environment == {"UNICRON_MEMORY": str(first.folder), "UNICRON_IMAGE_FORMAT": str(IMAGE.number)}
    (first.folder / "slot-0.0.image").write_bytes(b"state")
    first.close(over=False)
    assert (make().folder / "slot-0.0.image").read_bytes() == b"state"
    assert [path.name for path in tmp_path.iterdir()] == [f"unicron.7.a1.n1.{os.getuid()}"]
    assert next(tmp_path.iterdir()).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["folder", "link", "file"])
def test_whoever_takes_the_name_first_costs_nobody_the_memory(make, tmp_path: Path, said: list[str], what: str) -> None:
    """The name shows on each node of the job, and anybody may write in shared memory."""
    taken = tmp_path / f"unicron.7.a1.n1.{os.getuid()}"
    match what:
        case "folder":
            taken.mkdir(mode=0o777)
            taken.chmod(0o777)  # as good as another user's
        case "link":
            taken.symlink_to(tmp_path)
        case "file":
            taken.touch()
    first = make()
    assert (
        first.folder != taken
        and first.folder.resolve() == first.folder
        and first.folder.parent == tmp_path
        and not said
    )
    own = first.folder
    (own / "slot-0.0.image").write_bytes(b"state")
    first.close(over=False)
    again = make()
    assert (again.folder / "slot-0.0.image").read_bytes() == b"state", "the next agent finds it"
    again.close(over=False)
    if what == "folder":
        taken.rmdir()
    age(own, 2 * FORGOTTEN_SECONDS)
    assert sweep(tmp_path, "n1", time.time()) == [own], "and it is removed like any other"


def test_the_end_of_the_job_removes_it_and_so_does_an_end_with_nothing_in_it(make, tmp_path: Path) -> None:
    memory = make()
    (memory.folder / "slot-0.0.image").write_bytes(b"state")
    memory.close(over=True)
    assert not list(tmp_path.iterdir())
    make().close(over=False)
    assert not list(tmp_path.iterdir())


def test_another_training_of_the_same_job_id_does_not_find_it(make) -> None:
    first = make(run="a1")
    (first.folder / "slot-0.0.image").write_bytes(b"state")
    first.close(over=False)
    assert not list(make(run="a2").folder.iterdir())
    assert make(run="").folder is None  # a controller that does not say which it is
    kept = make(run="a1")
    kept.open("a2")  # it has lost its log; the ranks go on with the state that they have
    assert (kept.folder / "slot-0.0.image").exists()


def test_while_another_agent_of_the_job_lives_on_the_node_nothing_is_removed(make) -> None:
    one, other = make(element=0), make(element=1)
    assert one.folder == other.folder
    (one.folder / "slot-0.0.image").write_bytes(b"state")
    one.close(over=True)
    assert (other.folder / "slot-0.0.image").exists()
    other.close(over=True)
    assert not other.folder


def test_an_agent_removes_what_others_left_long_ago_and_nothing_that_is_held(make, tmp_path: Path) -> None:
    names = ("1.a1.n1.{0}", "2.b2.n1.{0}", "3.c3.n1.{0}", "2.b2.n2.{0}", "2.b2.n1.4711")  # held, left, fresh, others'
    paths = [tmp_path / f"unicron.{name.format(os.getuid())}" for name in names]
    keeper = make(job="1")
    for path in paths:
        path.mkdir(mode=0o700, exist_ok=True)
        (path / "slot-0.0.image").touch()
        age(path, 0 if path == paths[2] else FORGOTTEN_SECONDS + 5)
    assert make(job="9").folder is not None
    wait_for(lambda: not paths[1].exists(), "what was left is gone")
    swept()
    assert [path.exists() for path in paths] == [True, False, True, True, True]
    keeper.close(over=False)
    age(paths[0], FORGOTTEN_SECONDS + 5)
    assert sweep(tmp_path, "n1", time.time()) == [paths[0]]


def test_folders_of_agents_that_were_killed_are_removed_too(make, tmp_path: Path) -> None:
    held, left, fresh, other = (
        tmp_path / name
        for name in ("unicron-1-abcd_fgh", "unicron-2-abcd_fgh-abcdefgh", "unicron-3-abcd_fgh", "unicron-agent")
    )
    for path in (held, left, fresh, other):
        path.mkdir(mode=0o700)
        (path / "ranks").touch()
        age(path, 0 if path == fresh else FORGOTTEN_SECONDS + 5)
    lock = try_hold(held)
    assert sweep(tmp_path / "none", "n1", time.time(), [tmp_path]) == [left]
    assert held.exists() and fresh.exists() and other.exists()
    os.close(lock)
    assert make(job="9", TMPDIR=str(tmp_path), UNICRON_MEMORY_EVERY="0").folder is None
    wait_for(lambda: not held.exists(), "the next agent removes it, whether it keeps any state or not")


def test_who_only_looks_whether_it_is_held_keeps_nobody_from_removing_it(tmp_path: Path, monkeypatch) -> None:
    left = tmp_path / f"unicron.2.b2.n1.{os.getuid()}"
    left.mkdir(mode=0o700)
    age(left, FORGOTTEN_SECONDS + 5)
    look = os.open(left, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN))
    assert sweep(tmp_path, "n1", time.time()) == [left] and not left.exists()
    os.close(look)


def kept(memory: Memory, *iterations: int, data: bytes = b"12345678", places: int = 1) -> None:
    """What ranks of this node have left."""
    for iteration, place in itertools.product(iterations, range(places)):
        made = Image(memory.folder / f"state-{place}-{iteration}.image", 100, len(data))
        made.mark_torn()
        made.data[: len(data)] = data
        key = Key("state", slot=place, iteration=iteration, place=place, size=places, base=1, mark=MARK)
        made.mark_whole(key, b"head", len(data))


def persist(
    memory: Memory,
    turn: Callable[[Key], tuple[int, ...] | None],
    ends: threading.Event | None = None,
    cuts: Sequence[int] = (),
    prunes: bool = True,
) -> None:
    """The job ends here."""
    LastCheckpoint(memory.folder, turn, memory._complain, ends, prunes).write(cuts)


@pytest.fixture
def left(make, tmp_path: Path, monkeypatch) -> Memory:
    """In a node that has the states of iterations 7 and 8, like others; where checkpoints of 5 and 6 are."""
    monkeypatch.setattr(last_checkpoint, "TURN_SECONDS", 0.2)
    made: Memory = make()
    checkpoint_file.note_destination(made.folder, checkpoint_file.Destination(tmp_path / "saves", 2))
    kept(made, 5, 6)
    persist(made, lambda key: ())
    kept(made, 7, 8)
    return made


def saved(folder: Path) -> list[int]:
    return [each.iteration for each in folders.whole(folder / "saves")]


def unfinished(folder: Path, iteration: int) -> Path:
    """Somebody's file of that checkpoint."""
    made = folder / "saves" / checkpoint_file.folder_name(iteration)
    made.mkdir(exist_ok=True)
    return made / f"{MARK}.place-0-of-1.shard-0-of-1.image.another.1.2.new"


@pytest.mark.parametrize("turn", [1, 2])
def test_what_the_nodes_before_do_not_begin_to_write_a_later_one_writes_in_its_turn(
    left: Memory, tmp_path: Path, turn: int
) -> None:
    """Defect: where the first node had no memory nobody wrote the place, and there was no whole checkpoint."""
    began = time.monotonic()
    persist(left, lambda key: tuple(range(turn)))
    assert saved(tmp_path) == [8, 7] and time.monotonic() - began >= 0.2 * turn, "older ones have gone"


@pytest.mark.parametrize("turn", [None, (0, 1, 2)])
def test_who_does_not_train_the_place_or_comes_late_writes_nothing(left: Memory, tmp_path: Path, turn) -> None:
    persist(left, lambda key: turn)
    assert saved(tmp_path) == [6, 5]


@pytest.mark.parametrize("iteration", [7, 8, 9])
def test_what_is_there_is_neither_waited_for_nor_written_again(
    left: Memory, tmp_path: Path, said: list[str], monkeypatch, iteration: int
) -> None:
    """Also by a node whose last copy was whole, or torn, and this one's not: both have the one in the middle."""
    monkeypatch.setattr(last_checkpoint, "TURN_SECONDS", 600.0)
    said.clear()
    unfinished(tmp_path, iteration).with_name(f"{MARK}.place-0-of-1.shard-0-of-1.image").touch()
    persist(left, lambda key: (0,))
    assert saved(tmp_path) == [iteration, 6, 5] and not said


def test_what_a_process_left_unfinished_that_is_no_more_is_nobodys_writing(left: Memory, tmp_path: Path) -> None:
    unfinished(tmp_path, 8).write_bytes(b"x")
    persist(left, lambda key: (0,))
    assert saved(tmp_path) == [8, 7]


def test_a_later_checkpoint_that_was_found_damaged_is_not_there(left: Memory, tmp_path: Path) -> None:
    file = unfinished(tmp_path, 20).with_name(f"{MARK}.place-0-of-1.shard-0-of-1.image")
    file.touch()
    file.with_name(f"{MARK}.{checkpoint_file.DAMAGE_SUFFIX}").touch()
    persist(left, lambda key: (0,))
    assert saved(tmp_path) == [8, 7]


@pytest.mark.parametrize("there", [None, 7, 8])
def test_where_a_node_was_lost_a_cut_is_written_whole_before_the_newest_states(
    left: Memory, tmp_path: Path, monkeypatch, there: int | None
) -> None:
    """Of the lost half there is a copy of 7. Where the other node is there after all it writes that itself; what it had
    written of a later one before it was lost is of no use. The cut of 9 is not known to be anywhere else."""
    order: list[tuple[int, int]] = []
    plain = checkpoint_file.persist

    def noted(found: ImagePage, folder: Path) -> Path:
        order.append((found.key.place, found.key.iteration))
        return plain(found, folder)

    monkeypatch.setattr(checkpoint_file, "persist", noted)
    for path in left.folder.glob("*.image"):
        path.unlink()
    kept(left, 7, 9, 10, 11, places=2)
    for iteration in (9, 10, 11):
        (left.folder / f"state-1-{iteration}.image").unlink()
    if there is not None:
        unfinished(tmp_path, there).with_name(f"{MARK}.place-1-of-2.shard-0-of-1.image").touch()
    persist(left, lambda key: (1,) if key.place else (), cuts=[7, 9])
    assert order == [(0, 7), *([] if there == 7 else [(1, 7)]), (0, 9), (0, 11), (0, 10)]
    assert saved(tmp_path) in ([7, 6], [7, 6, 5])


def test_a_save_that_hangs_is_left_behind() -> None:
    hangs = threading.Event()
    within(0.01, hangs.wait)
    hangs.set()


def test_a_job_that_is_ended_by_an_error_keeps_the_checkpoints_from_before_it(left: Memory, tmp_path: Path) -> None:
    persist(left, lambda key: (), prunes=False)
    assert saved(tmp_path) == [8, 7, 6, 5]


def test_who_is_to_end_waits_for_nobody(left: Memory, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(last_checkpoint, "TURN_SECONDS", 600.0)
    ends = threading.Event()
    threading.Timer(0.2, ends.set).start()
    persist(left, lambda key: (0,), ends)
    assert saved(tmp_path) == [6, 5]


class Ending:
    """The end of a job of PLACES places, whose nodes have iterations 7 and 8. Time passes only while this node waits or
    writes. written: when it began which file, iteration and place."""

    time, sleep = staticmethod(time.time), staticmethod(time.sleep)

    def __init__(self, memory: Memory, saves: Path):
        self.memory, self.now, self.file_seconds = memory, 0.0, 0.0
        self.written: list[tuple[float, int, int]] = []
        self._saves, self._persist = saves, checkpoint_file.persist
        self._others: list[tuple[float, int, int, int | None]] = []

    def monotonic(self) -> float:
        return self.now

    def other(self, when: float, place: int, size: int | None = None, iteration: int = 8) -> None:
        """Another node's file has this size at that time, and its own name without one."""
        self._others = sorted([*self._others, (when, iteration, place, size)], key=lambda each: each[0])

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        assert self.now < 1000.0, "it waits for ever"
        while self._others and self._others[0][0] <= self.now:
            _, iteration, place, size = self._others.pop(0)
            folder = self._saves / checkpoint_file.folder_name(iteration)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{MARK}.place-{place}-of-{PLACES}.shard-0-of-1.image"
            new = path.with_name(f"{path.name}.another.1.2.new")
            new.write_bytes(b"x" * (size or 0))
            if size is None:
                new.rename(path)
        return False

    def persist(self, found: ImagePage, folder: Path) -> Path:
        self.written.append((self.now, found.key.iteration, found.key.place))
        self.wait(self.file_seconds)
        return self._persist(found, folder)


@pytest.fixture
def ending(make, tmp_path: Path, monkeypatch) -> Ending:
    made = Ending(make(), tmp_path / "saves")
    checkpoint_file.note_destination(made.memory.folder, checkpoint_file.Destination(tmp_path / "saves", 2))
    kept(made.memory, 7, 8, places=PLACES)
    swept()
    monkeypatch.setattr(last_checkpoint, "time", made)
    monkeypatch.setattr(checkpoint_file, "persist", made.persist)
    return made


def test_while_the_first_node_writes_one_part_after_the_other_the_next_one_leaves_all_to_it(ending: Ending) -> None:
    """Defect: what the first one had not begun in 5 s both wrote."""
    for place in range(PLACES):
        ending.other(3.0 * (place + 1), place)
    persist(ending.memory, lambda key: (0,), ending)
    assert not ending.written and 24.0 <= ending.now <= 24.0 + TURN_SECONDS


def test_and_so_it_does_while_one_file_takes_long(ending: Ending) -> None:
    for second in range(1, 60):
        ending.other(second, 0, size=second)
    for place in range(PLACES):
        ending.other(60.0, place)
    persist(ending.memory, lambda key: (0,), ending)
    assert not ending.written and ending.now >= 60.0


@pytest.mark.parametrize("nodes", [(0,), (0, 1)])
def test_where_nothing_happens_it_writes_all_in_its_turn_the_last_part_first(ending: Ending, nodes) -> None:
    """In the opposite order: a first node that it cannot see at work it meets once."""
    persist(ending.memory, lambda key: nodes, ending)
    due = [(iteration, place) for iteration in (8, 7) for place in reversed(range(PLACES))]
    assert ending.written == [(len(nodes) * TURN_SECONDS, *each) for each in due]
    ending.written.clear()
    persist(ending.memory, lambda key: (), ending)
    assert [place for _, _, place in ending.written] == [*range(PLACES)] * 2


def test_what_a_node_has_not_written_that_dies_in_the_middle_the_next_one_writes(ending: Ending) -> None:
    ending.other(3.0, 0)
    ending.other(6.0, 1)
    ending.other(7.0, 2, size=1)
    persist(ending.memory, lambda key: (0,), ending)
    assert {place for *_, place in ending.written} == set(range(2, PLACES)) and len(ending.written) == 2 * 6
    assert 7.0 + TURN_SECONDS <= ending.written[0][0] <= 7.0 + 2 * TURN_SECONDS, "when it has seen nothing for so long"


def test_what_grows_while_it_writes_its_own_parts_is_not_written_again(ending: Ending) -> None:
    """Defect: it took the first look after its own parts, when its turn had come, so all looked left by the dead."""
    ending.file_seconds = 2.0
    for tenth in range(10, 260):
        ending.other(tenth / 10, 4, size=tenth)
    for place in range(4, PLACES):
        ending.other(26.0 + place, place)
    persist(ending.memory, lambda key: () if key.place < 4 else (0,), ending)
    assert sorted({place for *_, place in ending.written}) == [0, 1, 2, 3] and ending.now >= 33.0


def test_what_nobody_touched_while_it_wrote_its_own_parts_it_writes_at_once(ending: Ending) -> None:
    ending.other(0.0, 5, size=1)
    ending.wait(0.0)  # of a process that is no more
    ending.file_seconds = 2.0
    persist(ending.memory, lambda key: () if key.place < 4 else (0,), ending)
    assert [when for when, *_ in ending.written] == [2.0 * number for number in range(2 * PLACES)]


def test_a_node_at_work_keeps_nobody_from_what_another_one_does_not_write(ending: Ending) -> None:
    """Places 0 to 3 are the first node's, who writes; 4 to 7 those of one that has no memory."""
    for place in range(4):
        ending.other(3.0 * (place + 1), place)
    persist(ending.memory, lambda key: (0,) if key.place < 4 else (1,), ending)
    assert sorted({place for *_, place in ending.written}) == [4, 5, 6, 7] and ending.written[0][0] == TURN_SECONDS


def test_an_image_that_cannot_be_saved_for_whatever_reason_costs_no_other_one(
    make, tmp_path: Path, said: list[str], monkeypatch
) -> None:
    memory = make()
    checkpoint_file.note_destination(memory.folder, checkpoint_file.Destination(tmp_path / "saves", 2))
    kept(memory, 7, 8)
    plain = checkpoint_file.persist

    def stumbles(found: ImagePage, folder: Path) -> Path:
        if found.key.iteration == 8:
            raise RuntimeError("whatever")
        return plain(found, folder)

    monkeypatch.setattr(checkpoint_file, "persist", stumbles)
    persist(memory, lambda key: ())
    assert "iteration 8: whatever" in said[-2] and said[-1].endswith("/saves/iteration-00000007"), said


def test_the_agent_does_not_wait_while_much_is_removed(make, tmp_path: Path, monkeypatch) -> None:
    left = tmp_path / f"unicron.2.b2.n1.{os.getuid()}"
    left.mkdir(mode=0o700)
    age(left, FORGOTTEN_SECONDS + 5)
    began, go, remove, ended = threading.Event(), threading.Event(), shutil.rmtree, []

    def slowly(path: Path, ignore_errors: bool) -> None:
        began.set()
        ended.append(go.wait(20.0))
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    memory = make()
    assert began.wait(20.0) and not ended, "it is being removed"
    assert memory.folder is not None and left.exists()
    go.set()
    wait_for(lambda: not left.exists(), "it is gone")


def test_nor_while_what_is_unfinished_is_removed_and_what_others_make_meanwhile_stays(make, monkeypatch) -> None:
    """It may be as large as all that the ranks had."""
    first = make()
    (first.folder / "state-0-0.image.1.new").write_bytes(b"half")
    first.close(over=False)
    swept()
    go, unlink, gone = threading.Event(), os.unlink, []

    def slowly(path, **how):
        if str(path).endswith(".new"):
            assert threading.current_thread() is not threading.main_thread() and go.wait(20.0)
            gone.append(path)
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", slowly)
    memory = make()
    made = memory.folder / "state-0-0.image.1.new"  # pids come again
    assert not made.exists() and [path.name for path in memory.folder.iterdir()] == [f"away-{made.name}"]
    made.write_bytes(b"half of another one")
    go.set()
    swept()
    assert len(gone) == 1 and [path.name for path in memory.folder.iterdir()] == [made.name]


def test_an_element_that_comes_back_late_finds_what_it_has_left(make) -> None:
    memory = make()
    (memory.folder / "slot-0.0.image").write_bytes(b"state")
    folder = memory.folder
    memory.close(over=False)
    age(folder, FORGOTTEN_SECONDS + 5)
    memory = make()
    swept()
    assert (memory.folder / "slot-0.0.image").read_bytes() == b"state"


class Epilog:
    """Somebody who has found a folder forgotten, and gets its lock in the moment in which the agent's changes."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.came = folder, False
        self._flock = fcntl.flock
        monkeypatch.setattr(held_folders.fcntl, "flock", self)

    def __call__(self, descriptor: int, operation: int) -> None:
        assert operation != fcntl.LOCK_SH, "a wait without a limit"
        if operation & fcntl.LOCK_EX and not self.came and threading.current_thread() is threading.main_thread():
            self.came = True
            self._flock(descriptor, fcntl.LOCK_UN)
            self.visit()
        self._flock(descriptor, operation)

    def visit(self) -> None:
        """It removes what is forgotten, and nothing else."""
        sweep(self.folder.parent, "n1", time.time())


@pytest.fixture
def left_late(make) -> Path:
    """What an element has left that comes back so late that it looks forgotten."""
    memory = make()
    folder: Path = memory.folder
    (folder / "slot-0.0.image").write_bytes(b"state")
    memory.close(over=False)
    age(folder, FORGOTTEN_SECONDS + 5)
    return folder


def test_what_is_in_use_again_does_not_look_forgotten_while_its_lock_changes(
    make, left_late: Path, monkeypatch
) -> None:
    epilog = Epilog(left_late, monkeypatch)
    memory = make()
    assert epilog.came and memory.folder == left_late and (left_late / "slot-0.0.image").exists()


def test_what_was_removed_while_its_lock_changed_is_made_anew_and_held(make, left_late: Path, monkeypatch) -> None:
    epilog = Epilog(left_late, monkeypatch)
    epilog.visit = lambda: shutil.rmtree(left_late)  # it had looked before
    memory = make()
    assert epilog.came and memory.folder.is_dir() and not list(memory.folder.iterdir())
    age(memory.folder, FORGOTTEN_SECONDS + 5)
    assert not sweep(memory.folder.parent, "n1", time.time()), "it is held"


def test_who_has_the_lock_meanwhile_is_not_waited_for(make, left_late: Path, monkeypatch, said: list[str]) -> None:
    epilog, held = Epilog(left_late, monkeypatch), os.open(left_late, os.O_RDONLY)
    epilog.visit = lambda: epilog._flock(held, fcntl.LOCK_EX)
    memory = make()
    assert epilog.came and memory.folder is None and memory.environment["UNICRON_MEMORY"] == ""
    assert len(said) == 1 and "others keep removing it" in said[0]
    os.close(held)


def test_what_was_found_forgotten_and_is_in_use_by_now_stays(make, left_late: Path, monkeypatch) -> None:
    seen = held_folders._leftovers

    def late(*arguments):
        found = list(seen(*arguments))
        os.utime(left_late)  # its element is back
        return found

    monkeypatch.setattr(held_folders, "_leftovers", late)
    assert not sweep(left_late.parent, "n1", time.time()) and left_late.exists()


def test_it_shows_that_it_is_in_use(make) -> None:
    memory = make()
    age(memory.folder, 10_000.0)
    memory.touch_folder(100.0)
    assert time.time() - memory.folder.stat().st_mtime < 60.0
    age(memory.folder, 10_000.0)
    memory.touch_folder(105.0)  # not at every turn
    assert time.time() - memory.folder.stat().st_mtime > 9_000.0
    memory.touch_folder(111.0)
    assert time.time() - memory.folder.stat().st_mtime < 60.0


def test_a_folder_that_somebody_has_removed_is_made_again_and_held(make, said: list[str], tmp_path: Path) -> None:
    memory = make()
    memory.folder.rmdir()
    memory.touch_folder(100.0)
    assert memory.folder.is_dir() and len(said) == 1 and "somebody has removed" in said[0]
    age(memory.folder, FORGOTTEN_SECONDS + 5)
    assert not sweep(tmp_path, "n1", time.time()), "it is held"


def test_without_a_place_the_job_goes_on_and_it_is_said(make, said: list[str], tmp_path: Path) -> None:
    memory = make(UNICRON_MEMORY_DIR=str(tmp_path / "missing"))
    assert memory.folder is None and len(said) == 1 and "No such file" in said[0]
    memory.touch_folder(1.0)
    memory.close(over=True)


def test_an_epilog_waits_as_long_as_an_agent() -> None:
    epilog = (Path(__file__).parents[5] / "slurm_plugin" / "epilog.d" / "50-unicron").read_text()
    assert f"\nUNICRON_KEEP_MINUTES={FORGOTTEN_SECONDS / 60:.0f}\n" in epilog


def test_it_can_be_turned_off_and_a_setting_that_makes_no_sense_is_refused(make, said: list[str]) -> None:
    assert make(UNICRON_MEMORY_EVERY="0").folder is None and not said
    with pytest.raises(UserError, match="UNICRON_MEMORY_EVERY='often'"):
        make(UNICRON_MEMORY_EVERY="often")
