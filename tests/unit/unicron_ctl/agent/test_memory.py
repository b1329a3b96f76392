"""The folder of shared memory that an agent makes for its ranks, and who removes it when."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from unicron_ctl.agent.memory import FORGOTTEN_SECONDS, Memory, sweep
from unicron_ctl.agent.place import Place
from unicron_ctl.errors import UserError
from unicron_ctl.protocol import wire


def place(job: str = "7", element: int = 0, node: str = "n1") -> Place:
    return Place(job=job, element=element, node=node, address="127.0.0.1", settings=wire.Settings(name="a", user="b"))


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


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_it_holds_outlives_the_agent_and_the_next_one_finds_it(make, tmp_path: Path) -> None:
    first = make()
    assert first.environment == {"UNICRON_MEMORY": str(first.folder)}
    (first.folder / "slot-0.0.image").write_bytes(b"state")
    first.close(over=False)
    assert (make().folder / "slot-0.0.image").read_bytes() == b"state"
    assert [path.name for path in tmp_path.iterdir()] == [f"unicron.7.a1.n1.{os.getuid()}"]
    assert next(tmp_path.iterdir()).stat().st_mode & 0o777 == 0o700


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
    assert [path.exists() for path in paths] == [True, False, True, True, True]
    keeper.close(over=False)
    age(paths[0], FORGOTTEN_SECONDS + 5)
    assert sweep(tmp_path, "n1", time.time()) == [paths[0]]


def test_it_shows_that_it_is_in_use(make) -> None:
    memory = make()
    age(memory.folder, 10_000.0)
    memory.turn(100.0)
    assert time.time() - memory.folder.stat().st_mtime < 60.0
    age(memory.folder, 10_000.0)
    memory.turn(105.0)  # not at every turn
    assert time.time() - memory.folder.stat().st_mtime > 9_000.0
    memory.turn(111.0)
    assert time.time() - memory.folder.stat().st_mtime < 60.0


def test_a_folder_that_somebody_has_removed_is_made_again_and_held(make, said: list[str], tmp_path: Path) -> None:
    memory = make()
    memory.folder.rmdir()
    memory.turn(100.0)
    assert memory.folder.is_dir() and len(said) == 1 and "somebody has removed" in said[0]
    age(memory.folder, FORGOTTEN_SECONDS + 5)
    assert not sweep(tmp_path, "n1", time.time()), "it is held"


def test_a_folder_that_another_user_has_put_there_is_not_used(make, tmp_path: Path, said: list[str]) -> None:
    target = tmp_path / "theirs"
    target.mkdir()
    (tmp_path / f"unicron.7.a1.n1.{os.getuid()}").symlink_to(target)
    memory = make()
    assert memory.folder is None and memory.environment == {"UNICRON_MEMORY": ""}
    open_to_all = tmp_path / f"unicron.8.a1.n1.{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert make(job="8").folder is None
    assert len(said) == 2 and all("no training state is kept in memory" in line for line in said)
    memory.close(over=True)
    assert target.exists()


def test_without_a_place_the_job_goes_on_and_it_is_said(make, said: list[str], tmp_path: Path) -> None:
    memory = make(UNICRON_MEMORY_DIR=str(tmp_path / "missing"))
    assert memory.folder is None and len(said) == 1 and "No such file" in said[0]
    memory.turn(1.0)
    memory.close(over=True)


def test_an_epilog_waits_as_long_as_an_agent() -> None:
    epilog = (Path(__file__).parents[4] / "slurm_plugin" / "epilog.d" / "50-unicron").read_text()
    assert f"\nUNICRON_KEEP_MINUTES={FORGOTTEN_SECONDS / 60:.0f}\n" in epilog


def test_it_can_be_turned_off_and_a_setting_that_makes_no_sense_is_refused(make, said: list[str]) -> None:
    assert make(UNICRON_MEMORY_EVERY="0").folder is None and not said
    with pytest.raises(UserError, match="UNICRON_MEMORY_EVERY='often' is no whole number"):
        make(UNICRON_MEMORY_EVERY="often")
