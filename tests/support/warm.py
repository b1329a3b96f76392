"""Ranks that start in a blink: a test run starts dozens of them, whose imports take seconds each. They are forks of the
product's own zygote, of which each process of the tests has one."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.processes import outside_slurm
from unicron_ctl.agent.ranks.zygote_client import ANSWER_SECONDS, HUNG_SECONDS, Coming, ZygoteClient
from unicron_detector.processes.supervise import USUAL, Child, Surroundings, adopt_orphans
from unicron_detector.processes.zygote import READ_IN_C

SCRIPT = Path(__file__).resolve().with_name("tiny_gpt.py")
LIMIT = 90.0
LOAD_LIMIT = 600.0  # for the imports: six seconds of CPU, which took 85 s on two CPUs at a load of 33
PROGRAMS = ("unicron_ctl.agent.loop.plain_ranks", "unicron_ctl.controller.unicrond")  # which run in forks, too


class Warm:
    """A zygote for a command, and its processes at once: its methods wait for the answers.

    words: the command after the interpreter; told: what is imported beside its leading imports; settings: environment.
    """

    patience = (ANSWER_SECONDS, HUNG_SECONDS)

    def __init__(
        self,
        words: Sequence[str],
        *told: str,
        preload: Sequence[str] = (),
        python: str = sys.executable,
        **settings: str,
    ) -> None:
        known = {name: value for name, value in outside_slurm().items() if not name.startswith("PYTEST")}
        self.environment = known | {"OMP_NUM_THREADS": "1"} | settings
        self._watched: dict[int, Callable[[], object]] = {}
        self.zygote = ZygoteClient(
            [python, "-W", "ignore"],
            words,
            self.environment,
            preload,
            told,
            self._watched.__setitem__,
            lambda descriptor: self._watched.pop(descriptor, None),
            *self.patience,
        )
        self.zygote.start_process()

    @property
    def why(self) -> str:
        """As of :class:`ZygoteClient`."""
        return self.zygote.why

    def request_fork(
        self, environment: Mapping[str, str], words: list[str] | None = None, surroundings: Surroundings = USUAL
    ) -> Coming | None:
        """As :meth:`ZygoteClient.request_fork`; settled."""
        adopt_orphans()
        try:
            coming = self.zygote.request_fork(environment, words, surroundings)
            self.serve(lambda: coming is None or coming.settled)
        finally:
            adopt_orphans(False)
        return coming

    def serve(self, done: Callable[[], bool], limit: float = LIMIT) -> None:
        """Its part of an agent's loop, until then."""
        deadline = time.monotonic() + limit
        while not done():
            assert time.monotonic() < deadline, f"the zygote does not answer: {self.why}"
            for descriptor in select.select(list(self._watched), [], [], 0.02)[0]:
                if descriptor in self._watched:
                    self._watched[descriptor]()
            self.zygote.on_timer(time.monotonic())

    def close(self) -> None:
        """It ends."""
        self.zygote.close()


class OfAll(Warm):
    """Which any script of the tests may run from: what a process reads at its very start is the zygote's own.
    Nothing starts cold here, however busy the machine is."""

    patience = (LIMIT, LIMIT)

    def request_fork(
        self, environment: Mapping[str, str], words: list[str] | None = None, surroundings: Surroundings = USUAL
    ) -> Coming | None:
        self.serve(lambda: self.zygote.ready or bool(self.why), LOAD_LIMIT)  # or it has died
        own = {name: value for name, value in environment.items() if not READ_IN_C.fullmatch(name)}
        early = {name: value for name, value in self.environment.items() if READ_IN_C.fullmatch(name)}
        script = environment.get("TINY_SCRIPT", str(SCRIPT))
        return super().request_fork({**own, **early}, words or [script], surroundings)


_warm: Warm | None = None


def warm() -> Warm:
    """The one of this process."""
    global _warm
    if _warm is None:
        _warm = OfAll([str(SCRIPT)], "unicron_transition.session.session", *PROGRAMS)
        atexit.register(_warm.close)
    return _warm


class Script:
    """A script that runs in a fork, for :class:`subprocess.Popen` of an interpreter of its own."""

    def __init__(self, script: Path | str, *arguments: object, environment: Mapping[str, str]):
        self.command = [str(word) for word in (script, *arguments)]
        self._output = tempfile.TemporaryFile()
        coming = warm().request_fork(environment, self.command, Surroundings(stdout=self._output.fileno()))
        child = coming.child() if coming is not None else None
        assert child is not None, coming.cold if coming is not None else warm().why
        self._child: Child = child
        self._errors = b""

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
        """Its end. Raises subprocess.TimeoutExpired; then it is killed."""
        deadline = time.monotonic() + limit
        reading = [self._child.stderr]
        try:
            while reading or not self._child.ended():
                if time.monotonic() > deadline:
                    self._child.signal(9)
                    raise subprocess.TimeoutExpired(self.command, limit)
                for descriptor in select.select([*reading, self._child.pidfd], [], [], 0.5)[0]:
                    if descriptor == self._child.stderr:
                        with contextlib.suppress(BlockingIOError):
                            data = os.read(descriptor, 65536)
                            self._errors += data
                            reading = reading if data else []
                if self._child.ended() and not select.select(reading, [], [], 0)[0]:
                    break
            code = self._child.poll()
            assert code is not None
            self._output.seek(0)
            return subprocess.CompletedProcess(self.command, code, self._output.read().decode(), self._errors.decode())
        finally:
            self._child.reap(5.0)
            self._child.close()
            self._output.close()
