"""Process supervision (detection method 2; docs/design/paper.md, section 3): the ranks' processes as children of their
agent.

A pidfd becomes readable the moment a child ends, so an exit is known in well under a millisecond without polling.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unicron_detector.processes.job_output import JobOutput, standard_error, standard_output
from unicron_detector.processes.rank_output import RankOutput

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TAIL_LINES = 200  # an abort writes the frames of every thread after its reason
LINE_BYTES = 8192  # of one line; a progress bar never ends its own
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent (prctl(2)). Called in the child before exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died between the fork and the call


def shell_status(code: int) -> int:
    """Return an exit code as a shell shows it: 128 + n for an end by signal n."""
    return 128 - code if code < 0 else code


def adopt_orphans(on: bool = True) -> None:
    """Set whether this process becomes the parent of descendants whose own parents have ended (prctl(2))."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def reap_orphans(known: Collection[int]) -> None:
    """Reap ended adopted children that are neither `known` nor in this process's own group, which others wait for."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in known or os.getpgid(ended.si_pid) == os.getpgrp():
                return  # it hides the others until it is reaped
            os.waitpid(ended.si_pid, os.WNOHANG)


def _visible_line(line: bytes) -> bytes:
    """Return the part after the last carriage return, as a terminal shows it. A long line keeps both ends."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    half = LINE_BYTES // 2
    return line if len(line) <= LINE_BYTES else line[:half] + line[-half:]


@dataclass(frozen=True)
class Surroundings:
    """Input, output and CPUs of a process: by default those of this process."""

    stdin: int | None = None  # a descriptor
    stdout: int | None = None
    out: JobOutput = standard_output
    """Gets the data of its standard output, if that is a pipe."""
    err: JobOutput = standard_error
    """Gets the data of its standard error."""
    cpus: frozenset[int] = frozenset()  # empty for those of this process

    def bind(self) -> None:
        """Run this process on these CPUs, if Slurm allows it."""
        if self.cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cpus)


USUAL = Surroundings()


class ForkedProcess:
    """A child of this process that another process has forked, with the part of Popen that :class:`Child` needs."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


class Child:
    """One supervised process in a process group of its own, which inherits the descriptors `keep`. Its standard error
    passes through, and its last lines are kept."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        keep: Sequence[int] = (),
        surroundings: Surroundings = USUAL,
    ):
        parent = os.getpid()

        def prepare() -> None:
            _die_with_parent(parent)
            surroundings.bind()

        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=surroundings.stdin,
            stdout=surroundings.stdout,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=prepare,
            pass_fds=keep,
        )
        assert process.stderr is not None
        stderr = -1
        try:
            stderr = os.dup(process.stderr.fileno())
            self._adopt_process(process, stderr, surroundings)
        except OSError:  # without a handle on it, it would never be ended
            process.kill()
            process.wait()
            if stderr >= 0:
                os.close(stderr)
            raise
        finally:
            process.stderr.close()

    @classmethod
    def of_fork(cls, pid: int, stderr: int, surroundings: Surroundings = USUAL) -> Child:
        """Make a child that another process has forked, in its own process group; `stderr` reads its standard error."""
        child = cls.__new__(cls)
        child._adopt_process(ForkedProcess(pid), stderr, surroundings)
        return child

    def _adopt_process(
        self, process: subprocess.Popen[bytes] | ForkedProcess, stderr: int, around: Surroundings
    ) -> None:
        self.surroundings = around
        self.started = time.monotonic()  # independent of the time of day
        self._process, self.stderr = process, stderr
        self.output = RankOutput()  # gets the data of both streams
        self.stdout: int | None = None  # the reading end of its standard output, if that is a pipe
        os.set_blocking(self.stderr, False)
        self.pid = process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.terminated = False  # SIGTERM has reached it
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def pass_stderr(self) -> bool:
        """Forward what the process wrote to standard error; False if it has closed it."""
        try:
            data = os.read(self.stderr, 65536)
        except BlockingIOError:
            return True
        self.output.write(data, self.surroundings.err)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = _visible_line(self._partial)
        self._tail.extend(_visible_line(line).decode(errors="replace") for line in lines if line.strip())
        return bool(data)

    def pass_stdout(self) -> bool:
        """Forward what the process wrote to standard output, if that is a pipe; False if it has closed it."""
        if self.stdout is None:
            return False
        try:
            data = os.read(self.stdout, 65536)
        except BlockingIOError:
            return True
        self.output.write(data, self.surroundings.out)
        return bool(data)

    def tail(self) -> str:
        """Return the last lines of standard error."""
        return "\n".join([*self._tail, *([self._partial.decode(errors="replace")] if self._partial.strip() else [])])

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether the process has ended or ends within `seconds`; it is not reaped."""
        return _readable(self.pidfd, seconds)

    def reap(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the exit, then drain the output and kill what the process has left behind."""
        if not self.ended(seconds):
            return None
        self.signal(signal.SIGKILL)
        while _readable(self.stderr, 0.0) and self.pass_stderr():
            pass
        while self.stdout is not None and _readable(self.stdout, 0.0) and self.pass_stdout():
            pass
        return self.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group, unless it is reaped and its number may belong to another."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def pass_on(self, number: int, trainer: int = 0) -> None:
        """Send a signal to the process itself, as Slurm does with proctrack/cgroup, and to the `trainer` if that is
        another process of the group. Workers that load data do not get it."""
        if self._process.returncode is not None:
            return
        for pid in {self.pid, trainer} - {0}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == self.pid:
                    os.kill(pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has reached the process already: its handler must run only once."""
        if not self.terminated:
            self.terminated = True
            self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM

    def close(self) -> None:
        """Release the descriptors of an ended process."""
        os.close(self.pidfd)
        os.close(self.stderr)
        if self.stdout is not None:
            os.close(self.stdout)


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()  # select.select fails for descriptors above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
