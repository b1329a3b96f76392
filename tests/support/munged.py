"""A munged of the test's own, and credentials of other users."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.controller import Controller
from tests.support.processes import outside_slurm, wait_for

STRANGER = 65534  # nobody(7): another user than any that runs these tests
MUNGE = 'auth = "munge"\n'
AController = TypeVar("AController", bound=Controller)


class Munged:
    """A private munged in a folder that all users may enter. `environment` leads everybody to it. close() ends it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="unicron-munge-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.socket = self.folder / "socket"
        self.environment = {"MUNGE_SOCKET": str(self.socket)}
        key = self.folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self.start()

    def start(self) -> None:
        """Start it, with the key that it had before."""
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / file}" for option, file in files.items()]
        self._process = subprocess.Popen(
            ["/usr/sbin/munged", "--foreground", *options], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(self._answers, "munged answers")

    def enter(self, patch: pytest.MonkeyPatch) -> None:
        """The test's own process is in its realm, too, as long as the patch lasts."""
        for name, value in self.environment.items():
            patch.setenv(name, value)

    def stop(self) -> None:
        """munged is away."""
        self._process.terminate()
        self._process.wait(20)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def credential(self, payload: str, uid: int | None = None) -> str:
        """A credential that holds `payload`, of another user when a number is given (root only)."""
        command = ["munge", f"--socket={self.socket}", f"--string={payload}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, user=uid)
        return done.stdout.strip()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


@contextmanager
def own_realm(patch: pytest.MonkeyPatch) -> Iterator[Munged]:
    """A munged, in whose realm the test's own process is."""
    munged = Munged()
    try:
        munged.enter(patch)
        yield munged
    finally:
        munged.close()


@contextmanager
def controller_in(munged: Munged, folder: Path, kind: type[AController]) -> Iterator[AController]:
    """A unicrond that asks this munged who is who."""
    started = kind(folder, MUNGE, outside_slurm() | munged.environment)
    try:
        yield started
    finally:
        started.close()
