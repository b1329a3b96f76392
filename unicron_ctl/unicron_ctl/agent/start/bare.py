"""The user's command without an agent, by nothing but the kernel's own calls: what is left when all else fails."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from unicron_ctl.agent.connections.step_tasks import others

CANNOT_EXECUTE, NOT_FOUND = 126, 127  # as a shell has them
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and a program that is executed would, too


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command, as every other task of the node's does. Raises OSError."""
    others.run_themselves()
    for number in DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(environment))


def run_all(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> int:
    """Run each command with its environment, which takes no descriptor and no thread; returns the first exit status
    that is not 0, as a shell shows it. Signals that end this process go to all."""
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
            print(f"unicron: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
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
    """Run the command of an agent's command line, after `--`, where the agent cannot even begin."""
    command = list(words[words.index("--") + 1 :]) if "--" in words else []
    if not command:
        sys.exit(f"unicron-agent: {why}")
    print(f"unicron: the agent cannot begin ({why}); the command runs unprotected", file=sys.stderr, flush=True)
    try:
        become(command, os.environ)
    except OSError as error:
        print(f"unicron: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE)
