"""Agents whose zygote is lent to them: a fork of the tests' own (`tests.support.warm`). One of their own would import
torch and Megatron for two seconds of CPU before anything can be seen. `lent_agent.py` says how. And controllers that
are such forks themselves (`lent_controller.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.warm import warm
from unicron_detector.processes.supervise import ForkedProcess, Surroundings
from unicron_detector.processes.zygote import READ_IN_C

AGENT, CONTROLLER = (str(Path(__file__).resolve().with_name(f"lent_{name}.py")) for name in ("agent", "controller"))


class Fork:
    """A program that runs in a fork of the tests' zygote: a `subprocess.Popen`, as far as tests use it.

    words: those after the interpreter. output: of its standard output; where there is none it is read from `stdout`.
    """

    stdout: IO[str] | None = None

    def __init__(self, words: list[str], output: int | None = None):
        if output is not None:
            self._begin(words, output)
            return
        reading, writing = os.pipe()
        self.stdout = open(reading)
        try:
            self._begin(words, writing)
        finally:
            os.close(writing)

    def _begin(self, words: list[str], output: int) -> None:
        coming = warm().request_fork(warm().environment, words, Surroundings(stdout=output))
        assert coming is not None and coming.pid is not None, coming.cold if coming is not None else warm().why
        self._name, self._stderr = words[0], coming.stderr  # until the program has another one
        os.set_blocking(self._stderr, False)
        self._process, self._pidfd = ForkedProcess(coming.pid), os.pidfd_open(coming.pid)
        os.write(coming.leave, b"g")
        os.close(coming.leave)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        if self.returncode is None and self._process.poll() is not None:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._stderr, 65536).decode(errors="replace")
                print(f"{Path(self._name).name} {self.pid} ended with {self.returncode}: {said}", file=sys.stderr)
            os.close(self._stderr)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            end.poll(None if timeout is None else timeout * 1000)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def agent(words: Sequence[str], environment: Mapping[str, str], log: int) -> Fork:
    """`unicron-agent WORDS` with such a zygote."""
    return Fork([AGENT, json.dumps(dict(environment)), *words], log)


def controller(options: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
    """`unicrond OPTIONS`; its standard error goes to `log`."""
    return Fork([CONTROLLER, json.dumps(dict(environment)), str(log), *options])


def fits(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork of the tests' zygote is what a zygote of this command's own would be: the same interpreter,
    and the same of all that is read before the first import."""
    early = ({n: v for n, v in each.items() if READ_IN_C.fullmatch(n)} for each in (environment, warm().environment))
    return command[0] == sys.executable and command[1].endswith(".py") and next(early) == next(early)
