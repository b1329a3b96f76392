"""Ranks that start in a blink: a process imports torch and Megatron once, and every rank is a fork of it.

A test run starts dozens of ranks, whose imports take seconds each. What a rank does after that is the same as in a
process of its own; some runs still use real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from detector.supervise import Child, _die_with_parent

SCRIPT = Path(__file__).resolve().with_name("tiny_gpt.py")
LIMIT = 90.0


class ForkedChild(Child):
    """A :class:`detector.supervise.Child` whose parent is the zygote."""

    def __init__(self, environment: Mapping[str, str]):  # the base class would start a process
        import time
        from collections import deque

        self.started = time.monotonic()
        read, write = os.pipe()
        script = environment.get("TINY_SCRIPT", str(SCRIPT))
        self.pid = zygote().fork(environment, [script], [write])
        os.close(write)
        os.set_blocking(read, False)
        self.stderr, self.pidfd = read, os.pidfd_open(self.pid)
        self._partial, self._tail = b"", deque(maxlen=60)

    def poll(self) -> int | None:
        if not select.select([self.pidfd], [], [], 0)[0]:
            return None
        return zygote().exit_code(self.pid)

    def reap(self, seconds: float) -> int | None:
        select.select([self.pidfd], [], [], seconds)
        while self._readable() and self.pass_stderr():
            pass
        return self.poll()

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.stderr)


class Zygote:
    """The parent of all forked ranks."""

    def __init__(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[2])  # nothing of this project is imported before it is there
        path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())], env=environment, pass_fds=[its.fileno()]
        )
        its.close()
        self._socket = mine
        mine.settimeout(LIMIT)
        self._codes: dict[int, int] = {}

    def fork(self, environment: Mapping[str, str], command: Sequence[str], streams: Sequence[int]) -> int:
        """Start a script with its arguments; returns its pid. streams: its standard error, or its output and that."""
        request = {"environment": dict(environment), "command": list(command)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        while True:
            message = self._receive()
            if "pid" in message:
                self._codes.pop(message["pid"], None)  # of an older process that had this number
                return message["pid"]

    def exit_code(self, pid: int) -> int:
        """Of a process that has ended."""
        while pid not in self._codes:
            self._receive()
        return self._codes[pid]

    def _receive(self) -> dict:
        message = json.loads(self._socket.recv(65536))
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message

    def close(self) -> None:
        """Its forks end with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Script:
    """A script that runs in a fork, for :class:`subprocess.Popen` of an interpreter of its own."""

    def __init__(self, script: Path, *arguments: object, environment: Mapping[str, str]):
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        streams = [self._output.fileno(), self._errors.fileno()]
        self.command = [str(word) for word in (script, *arguments)]
        self.pid = zygote().fork(environment, self.command, streams)
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
        """Its end. Raises subprocess.TimeoutExpired; then it is killed."""
        try:
            if not select.select([self._pidfd], [], [], limit)[0]:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.command, limit)
            code = zygote().exit_code(self.pid)
            texts = []
            for stream in (self._output, self._errors):
                stream.seek(0)
                texts.append(stream.read().decode())
            return subprocess.CompletedProcess(self.command, code, *texts)
        finally:
            os.close(self._pidfd)
            self._output.close()
            self._errors.close()


_zygote: Zygote | None = None


def zygote() -> Zygote:
    """The one of this process."""
    global _zygote
    if _zygote is None:
        _zygote = Zygote()
        atexit.register(_zygote.close)
    return _zygote


# ---------------------------------------------------------------- in the zygote
def _serve(line: socket.socket) -> None:
    """Fork on request and report ends; returns in each fork, which then runs the script. Ends with its parent."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    while True:
        ready, _, _ = select.select([line, read], [], [])
        if read in ready:
            os.read(read, 4096)
            _report_ends(line)
        if line in ready:
            data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
            if not data:
                sys.exit(0)
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(request, descriptors)
                line.close()
                os.close(read)
                os.close(write)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # in both: whoever comes first, a signal to the group finds it
            line.send(json.dumps({"pid": pid}).encode())


def _report_ends(line: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: dict, streams: list[int]) -> None:
    _die_with_parent()
    os.setpgid(0, 0)
    for number, stream in zip((2, 1), reversed(streams), strict=False):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as an interpreter does


def _preload() -> None:
    import torch

    torch.set_num_threads(1)
    from sbatch_templates import cpu_adapter

    cpu_adapter.install()
    for name in ("distributed", "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel"):
        importlib.import_module(f"megatron.core.{name}")
    importlib.import_module("transition.session")


if __name__ == "__main__":
    _die_with_parent()
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning)
    _preload()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # it is the channel's: the agent hears of the error
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to tear down an interpreter full of Megatron costs a second of each rank
