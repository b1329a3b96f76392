"""An agent, and the zygote that waits beside it until the agent starts one.

    lent_agent.py ENVIRONMENT run -- COMMAND...

It runs in a fork of the tests' zygote, forks the zygote-to-be, and becomes the agent, with ENVIRONMENT (JSON). The
agent is the product's own; only the first zygote that it starts is the process that waits already, which runs the
product's zygote program from there on. Zygotes after that one are started as ever.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.become import become
from tests.support.processes import ROOT

MESSAGE_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1


def main() -> None:
    """The agent, with the zygote-to-be as its child, in which this returns once it is none any more."""
    environment, *words = sys.argv[1:]
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.chdir(ROOT)
        mine.close()
        wait(its, agent)
        return
    its.close()
    os.setpgid(pid, pid)
    os.dup2(1, 2)
    lend(mine, pid)
    become("unicron-agent", environment, words)


def wait(line: socket.socket, agent: int) -> None:
    """Until the agent starts its zygote: then this is what it has started."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    data, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 2)
    line.close()
    if not data or os.getppid() != agent:
        return
    task = json.loads(data)
    os.dup2(files[1], 2)
    os.close(files[1])
    spec = importlib.util.spec_from_file_location("_unicron_lent", task["program"])
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.start_environment = lambda: task["environment"]  # what /proc shows is the tests' zygote's
    program.restore(os.environ, task["environment"], {})
    tempfile.tempdir = None  # TMPDIR may be another
    sys.path.remove(str(Path(__file__).resolve().parent))  # it leads the path for this script
    sys.argv = [task["program"], str(files[0]), *task["words"]]
    sys.orig_argv = [sys.executable, *sys.argv]
    program.main()


def lend(line: socket.socket, pid: int) -> None:
    """The first zygote that this process starts is the one at the other end of `line`."""
    from unicron_ctl.agent.ranks import zygote_client
    from unicron_detector.processes.supervise import Child

    def start(command: Sequence[str], environment: Mapping[str, str], keep: Sequence[int]) -> Child:
        setattr(zygote_client, "Child", Child)  # noqa: B010
        program = zygote_client.program.__file__
        words = command[command.index(program) + 2 :]
        stderr, its_stderr = os.pipe()
        task = {"program": program, "environment": dict(environment), "words": words}
        socket.send_fds(line, [json.dumps(task).encode()], [*keep, its_stderr])
        os.close(its_stderr)
        line.close()
        return Child.of_fork(pid, stderr)

    setattr(zygote_client, "Child", start)  # noqa: B010


if __name__ == "__main__":
    main()
