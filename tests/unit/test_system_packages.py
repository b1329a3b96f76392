"""tools/system-packages.sh takes no lock of its own, and waits for those of apt; .ci/run ends what it began."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT, wait_for

SCRIPT = str(ROOT / "tools" / "system-packages.sh")
PACKAGES = ("python3.99", "python3.99-venv")
STEPS = ("venv", "system-test", "compiled", "lint", "test", "test-demo")


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path) -> None:
    """Defect: NFS locks no file that is open for reading only, and Lustre none without its option `flock`. In a folder
    there `make venv` ended with flock's own line, though no package was missing."""
    refuses = tmp_path / "flock"
    refuses.write_text("#!/bin/sh\necho 'flock: 9: Bad file descriptor' >&2\nexit 66\n")
    refuses.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([SCRIPT, "venv"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Debian:
    """A system of apt's in a folder, which has no list yet, and an archive with the packages that are missing. apt
    fetches them and unpacks none."""

    def __init__(self, at: Path):
        archive = at / "archive"
        for folder in ("etc/apt/preferences.d", "var/lib/apt/lists", "var/lib/dpkg", "var/cache/apt/archives", "bin"):
            (at / folder).mkdir(parents=True)
        lines = []
        for name in PACKAGES:
            control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.invalid>\nDescription: a\n"
            (tree := archive / name / "DEBIAN").mkdir(parents=True)
            (tree / "control").write_text(control)
            made = archive / f"{name}.deb"
            subprocess.run(["dpkg-deb", "-b", str(tree.parent), str(made)], check=True, capture_output=True)
            data = made.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            lines.append(f"{control}Filename: ./{made.name}\nSize: {len(data)}\nSHA256: {digest}\n")
        (archive / "Packages").write_text("\n".join(lines))
        (at / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{archive} ./\n")
        self.locks = at / "var/lib/dpkg/lock-frontend", at / "var/lib/apt/lists/lock"
        (status := at / "var/lib/dpkg/status").write_text("")
        (at / "apt.conf").write_text(
            f'Dir "{at}";\nDir::State::status "{status}";\nAPT::Get::Download-Only "true";\nAPT::Sandbox::User "";\n'
        )
        sudo = at / "bin/sudo"  # for those who are not root
        sudo.write_text('#!/bin/sh\n[ "$1" != -n ] || shift\nexec "$@"\n')
        sudo.chmod(0o755)
        path = f"{at / 'bin'}:{os.environ['PATH']}"
        self.environment = os.environ | {"APT_CONFIG": str(at / "apt.conf"), "PYTHON": PACKAGES[0], "PATH": path}

    def start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([SCRIPT, "venv"], env=self.environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("number", [0, 1], ids=["dpkg", "lists"])
def test_two_runs_at_once_wait_for_another_programs_lock_and_say_so_once(number: int, tmp_path: Path) -> None:
    debian = Debian(tmp_path)
    with debian.locks[number].open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        runs = []
        for _ in range(2):
            runs.append(run := debian.start())
            assert run.stderr is not None
            said = run.stderr.readline()
            assert f"waits up to 900 s for another program: Could not get lock {file.name}." in said
        assert [run.poll() for run in runs] == [None, None]
    assert [(*run.communicate(timeout=60), run.returncode) for run in runs] == [
        (f"unicron: installing Debian packages: {' '.join(PACKAGES)}\n", "", 0)
    ] * 2


def test_what_apt_says_of_a_failure_is_shown(tmp_path: Path) -> None:
    debian = Debian(tmp_path)
    shutil.rmtree(tmp_path / "archive")
    run = debian.start()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 1 and "archive" in said and f"apt-get could not install: {' '.join(PACKAGES)}" in said


# ------------------------------------------------------------ .ci/run
def ci(folder: Path, rules: str) -> subprocess.CompletedProcess[str]:
    """Run it in a folder with other rules."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / "Makefile").write_text(".RECIPEPREFIX = >\n.PHONY: " + " ".join(STEPS) + "\n" + rules)
    of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of a make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    run = [folder / ".ci" / "run"]
    return subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_failed_lint_ends_what_runs_beside_it(tmp_path: Path) -> None:
    """Defect: it ran on when the script had ended."""
    done = ci(
        tmp_path,
        "venv system-test test test-demo:\n>touch $@\n"
        "compiled:\n>echo $$$$ >number && exec sleep 300\n"
        "lint:\n>while [ ! -s number ]; do sleep 0.05; done; exit 1\n",
    )
    beside = int((tmp_path / "number").read_text())
    try:
        assert done.returncode != 0 and not (tmp_path / "test").exists()
        wait_for(lambda: not Path(f"/proc/{beside}").exists(), "the end of what ran beside", limit=10)
    finally:
        if Path(f"/proc/{beside}").exists():
            os.kill(beside, signal.SIGKILL)


@pytest.mark.parametrize("fails", STEPS)
def test_what_fails_fails_all_and_nothing_follows(fails: str, tmp_path: Path) -> None:
    done = ci(tmp_path, "".join(f"{each}:\n>touch $@{' && exit 3' * (each == fails)}\n" for each in STEPS))
    assert done.returncode == 2, done.stderr
    after = {"venv": 2, "system-test": 2, "compiled": 4, "lint": 4, "test": 5, "test-demo": 6}[fails]
    assert not any((tmp_path / each).exists() for each in STEPS[after:])


def test_what_succeeds_runs_through(tmp_path: Path) -> None:
    done = ci(tmp_path, f"{' '.join(STEPS)}:\n>touch $@\n")
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "test-demo").exists()
