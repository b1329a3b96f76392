"""Room in shared memory: what is refused before the kernel ends a process for it, and what is waited for."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from tests.support.texts import raises_text
from unicron_detector.health.memory_limit import MemoryLeft
from unicron_transition.snapshot import shared_memory
from unicron_transition.snapshot.image_format import Image

MB = 1 << 20
NEEDED = shared_memory.BESIDE + MB  # for files of a few kilobytes


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(shared_memory, "_until", 0.0)
    monkeypatch.setattr(shared_memory, "LOOK_SECONDS", 0.01)


@pytest.fixture
def limit(monkeypatch):
    """What the job's memory limit leaves, as the test says; its files lie in memory, wherever tests have theirs."""
    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: True)

    def leaves(size: int) -> None:
        monkeypatch.setattr(shared_memory, "memory_left", lambda: MemoryLeft(size, Path("/sys/fs/cgroup/job_7")))

    return leaves


def test_what_the_jobs_memory_has_no_room_for_is_refused_as_where_shared_memory_is_full(tmp_path, limit, snapshot):
    limit(NEEDED + 4 * MB)
    Image(tmp_path / "a.image", 10, 4 * MB)
    limit(NEEDED)
    with raises_text(OSError, snapshot, tmp_path) as error:
        Image(tmp_path / "b.image", 10, 4 * MB)
    assert error.value.errno == errno.ENOSPC and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.image"]


def test_what_others_are_about_to_take_is_not_there_any_more(tmp_path, limit):
    other = tmp_path / "other.image.77.new"
    with other.open("wb") as file:
        os.ftruncate(file.fileno(), 8 * MB)
    limit(NEEDED + 4 * MB)
    with pytest.raises(OSError, match="13 MB are needed"):
        Image(tmp_path / "a.image", 10, 4 * MB)
    limit(NEEDED + 12 * MB)
    Image(tmp_path / "a.image", 10, 4 * MB)
    limit(NEEDED + 4 * MB)
    os.utime(other, (time.time() - shared_memory.MAKING_SECONDS - 5,) * 2)  # its writer has ended
    Image(tmp_path / "b.image", 10, 4 * MB)
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * MB)  # it has what it wanted, which counts already
    Image(tmp_path / "c.image", 10, 4 * MB)


def test_what_another_gets_during_the_look_counts_all_the_same(tmp_path, monkeypatch):
    other = (tmp_path / "other.image.77.new").open("wb")
    os.ftruncate(other.fileno(), 8 * MB)

    def left() -> MemoryLeft:
        os.posix_fallocate(other.fileno(), 0, 8 * MB)
        return MemoryLeft(NEEDED + 10 * MB, Path("/sys/fs/cgroup/job_7"))  # as it was before that

    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: True)
    monkeypatch.setattr(shared_memory, "memory_left", left)
    with pytest.raises(OSError, match="13 MB are needed"):
        Image(tmp_path / "a.image", 10, 4 * MB)
    other.close()


def test_no_limit_is_in_the_way_of_files_on_a_disk(tmp_path, limit, monkeypatch):
    limit(0)
    with pytest.raises(OSError, match="0 MB are left"):
        Image(tmp_path / "a.image", 10, 4 * MB)
    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: False)
    Image(tmp_path / "a.image", 10, 4 * MB)
    assert (tmp_path / "a.image").stat().st_size >= 4 * MB


def test_where_a_file_lies_is_asked_of_its_mount(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        device = os.fstat(file.fileno()).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for kind, expected in (("tmpfs", True), ("ext4", False)):
            line = f"30 1 {number} / /dev/shm rw,nosuid shared:4 - {kind} tmpfs rw,size=1k\n"
            (tmp_path / "mounts").write_text(f"29 1 999:7 / /run rw - tmpfs tmpfs rw\n{line}")
            assert shared_memory.is_in_memory(file.fileno(), tmp_path / "mounts") is expected
        assert not shared_memory.is_in_memory(file.fileno(), tmp_path / "missing")


class Full:
    """Memory that is full until it was asked `times` times; then somebody has freed what he held."""

    def __init__(self, monkeypatch, times: float, held: int | None):
        self.asked, self._times, self._held = 0, times, held
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, *_: int) -> None:
        self.asked += 1
        if self.asked > self._times:
            if self._held is not None:
                os.close(self._held)
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def memory(tmp_path) -> Path:
    """The folder of the process's own job."""
    made = tmp_path / "unicron.7.a1.n1.0"
    made.mkdir()
    return made


def removed(folder: Path) -> int:
    """Another job's folder, which somebody is about to remove."""
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@pytest.mark.parametrize("other_job", [True, False], ids=["of another job", "unfinished in the own folder"])
def test_room_that_somebody_is_freeing_is_waited_for(memory, monkeypatch, other_job):
    if not other_job:
        (memory / f"{shared_memory.AWAY}state-0-0.image.1.new").touch()
    full = Full(monkeypatch, 3, removed(memory.parent / "unicron.3.b2.n1.0") if other_job else None)
    Image(memory / "a.image", 10, 10)
    assert full.asked == 4


def test_nobody_waits_for_what_is_only_held(memory, monkeypatch):
    descriptor = removed(memory.parent / "unicron.3.b2.n1.0")
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    full = Full(monkeypatch, float("inf"), None)
    with pytest.raises(OSError, match="No space"):
        Image(memory / "a.image", 10, 10)
    assert full.asked == 1 and not list(memory.iterdir())
    os.close(descriptor)


def test_a_process_waits_only_when_it_first_wants_room(memory, monkeypatch):
    descriptor = removed(memory.parent / "unicron.3.b2.n1.0")
    monkeypatch.setattr(shared_memory, "FREED_SECONDS", 0.05)
    full = Full(monkeypatch, float("inf"), None)
    with pytest.raises(OSError, match="No space"):
        Image(memory / "a.image", 10, 10)
    asked = full.asked
    with pytest.raises(OSError, match="No space"):
        Image(memory / "a.image", 10, 10)
    assert full.asked == asked + 1
    os.close(descriptor)


def test_nor_does_it_wait_later_where_there_was_room_at_first(memory, monkeypatch):
    monkeypatch.setattr(shared_memory, "FREED_SECONDS", 0.05)
    Image(memory / "a.image", 10, 10)
    time.sleep(0.1)
    descriptor = removed(memory.parent / "unicron.3.b2.n1.0")
    full = Full(monkeypatch, float("inf"), None)
    with pytest.raises(OSError, match="No space"):
        Image(memory / "b.image", 10, 10)
    assert full.asked == 1
    os.close(descriptor)
