"""Runs the user's command without an agent, by system calls alone, when all else has failed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from unicron_ctl.agent.connections.step_tasks import others

CANNOT_EXECUTE, NOT_FOUND = 126, 127  # as in a shell
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and so would a program that it executes


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command, as the node's other tasks do. Raises OSError."""
    others.run_themselves()
    for number in DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(environment))


def run_all(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> int:
    """Run each command with its environment, without descriptors or threads. Return the first exit status that is not
    0, as a shell shows it. Signals that would end this process go to all commands."""
    running: set[int] = set()

    def forward(number: int, _: object) -> None:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):  # os.wait has just returned it
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    status = 0
    for command, environment in zip(commands, environments, strict=True):
        try:
            running.add(os.posix_spawnp(command[0], list(command), dict(environment), setsigdef=[*DEFAULT_SIGNALS]))
        except OSError as error:
            status = report_failure(command[0], error)
            forward(signal.SIGTERM, None)
            break
    while running:
        pid, code = os.wait()
        if pid not in running:
            continue
        running.discard(pid)
        code = os.waitstatus_to_exitcode(code)
        if code and not status:
            status = 128 - code if code < 0 else code
            forward(signal.SIGTERM, None)
    return status


def without_agent(words: Sequence[str], why: str) -> NoReturn:
    """Run the command after `--` in an agent's command line, if the agent cannot even begin."""
    command = list(words[words.index("--") + 1 :]) if "--" in words else []
    if not command:
        sys.exit(f"unicron-agent: {why}")
    print(f"unicron: the agent cannot begin ({why}); the command runs unprotected", file=sys.stderr, flush=True)
    try:
        become(command, os.environ)
    except OSError as error:
        sys.exit(report_failure(command[0], error))


def report_failure(program: str, error: OSError) -> int:
    """Print why the program cannot be started; return the exit status that a shell would have."""
    print(f"unicron: cannot start {program}: {error.strerror}", file=sys.stderr, flush=True)
    return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
