"""The memory that cgroups leave a process, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_detector.health.memory_limit import memory_left

V1 = "34 31 0:32 / {root} rw,relatime - cgroup cgroup rw,memory\n", "4:memory:{path}\n0::/\n"
V2 = "25 30 0:23 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n", "0::{path}\n"
JOB = "/slurm/job_7/step_0"
UNLIMITED = 9223372036854771712  # as version 1 writes that there is no limit


class Groups:
    """A mount of cgroups, and /proc of a process in one of them."""

    def __init__(self, folder: Path, version: int):
        self.proc, self.root, self.first = folder / "proc", folder / "cgroup", version == 1
        mounts, cgroup = V1 if self.first else V2
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "mountinfo").write_text(mounts.format(root=self.root))
        (self.proc / "self" / "cgroup").write_text(cgroup.format(path=JOB))

    def write(self, path: str, limit: int | None, taken: int, inactive: int = 0, active: int = 0) -> Path:
        """Write the files of the group at this path below the mount."""
        folder = self.root / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if self.first:
            files = {"memory.limit_in_bytes": limit or UNLIMITED, "memory.usage_in_bytes": taken}
            files["memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 0"
            own = "inactive_file 1\nactive_file 1\n"  # without the groups below
            files["memory.stat"] = f"{own}total_inactive_file {inactive}\ntotal_active_file {active}\ntotal_shmem 5"
        else:
            files = {"memory.max": limit or "max", "memory.current": taken, "memory.events": "oom 0\noom_kill 0"}
            slab = active // 2  # names and inodes of these files
            pages = f"inactive_file {inactive}\nactive_file {active - slab}"
            files["memory.stat"] = f"file 99\nshmem 5\n{pages}\nslab_reclaimable {slab}\nslab_unreclaimable 7"
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
        return folder


@pytest.fixture(params=[1, 2])
def groups(request, tmp_path: Path) -> Groups:
    return Groups(tmp_path, request.param)


def test_the_nearest_limit_of_all_above_the_process_counts(groups: Groups) -> None:
    groups.write("/slurm", None, 900)
    job = groups.write("/slurm/job_7", 1000, 700)
    step = groups.write(JOB, 2000, 600)
    assert memory_left(proc=groups.proc) == (300, job)
    groups.write("/slurm/job_7", 3000, 700)
    assert memory_left(proc=groups.proc) == (1400, step)
    groups.write("/slurm", 950, 900)
    assert memory_left(proc=groups.proc) == (50, job.parent)


def test_pages_of_files_can_be_given_back_and_shared_memory_cannot(groups: Groups) -> None:
    groups.write("/slurm", None, 900)
    groups.write("/slurm/job_7", 1000, 990, inactive=200, active=100)
    groups.write(JOB, None, 990)
    assert memory_left(proc=groups.proc).size == 310


def test_without_a_limit_nothing_is_in_the_way(tmp_path: Path) -> None:
    assert memory_left(proc=tmp_path) is None
    second = Groups(tmp_path / "second", 2)
    for path in ("/slurm", "/slurm/job_7", JOB):
        second.write(path, None, 900)
    assert memory_left(proc=second.proc) is None
    first = Groups(tmp_path / "first", 1)
    first.write(JOB, None, 900)
    assert memory_left(proc=first.proc).size > 1 << 60


def test_a_file_that_says_nothing_is_no_limit(groups: Groups) -> None:
    folder = groups.write(JOB, 1000, 700)
    (folder / "memory.stat").write_text("inactive_file many\n")
    assert memory_left(proc=groups.proc) == (300, folder)
    (folder / ("memory.usage_in_bytes" if groups.first else "memory.current")).write_text("\n")
    assert memory_left(proc=groups.proc) is None
