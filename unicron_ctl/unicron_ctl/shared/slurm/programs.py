"""Runs Slurm's programs, each with a time limit.

A process in uninterruptible sleep (state D: a file system hangs) cannot be killed. So each program has a thread of its
own, which is left behind if the process does not end. If too many are left behind no other program is started, since it
would hang, too.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone

from unicron_ctl.shared.slurm.slurm_client import SlurmError, SlurmTimeout
from unicron_detector.health.program_output import TooMuchOutput, run_program

log = logging.getLogger("unicron.slurm")
KILL_SECONDS = 2.0  # for a process that was killed to end
MOST_STUCK = 4  # processes that do not end, at once
MOST_BYTES = 128 << 20  # of one program's output: a listing of 100,000 elements has 30 MB
Completion = subprocess.CompletedProcess[bytes]


class Programs:
    """Starts programs, and remembers those that never ended."""

    def __init__(self) -> None:
        self._stuck: dict[threading.Thread, str] = {}
        self._changed = threading.Lock()

    def run(self, command: Sequence[str], env: Mapping[str, str], timeout: float) -> Completion:
        """Return the program's output and exit status. Raises SlurmTimeout if it takes longer than `timeout`,
        SlurmError if it prints without end, and OSError."""
        what = " ".join(command[:3])
        if len(stuck := self.stuck()) >= MOST_STUCK:
            raise SlurmTimeout(
                f"{what}: not started, for {len(stuck)} of Slurm's programs hang and cannot be killed "
                f"({', '.join(sorted(set(stuck)))}): see `ps -eo pid,stat,wchan,args`, and which file system hangs"
            )
        result: Future[Completion] = Future()
        arguments = result, command, env, timeout
        thread = threading.Thread(target=_serve, args=arguments, name="unicron-program", daemon=True)
        thread.start()
        try:
            return result.result(timeout + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise SlurmTimeout(f"{what}: no answer from Slurm within {timeout:g} s") from None
        except TooMuchOutput as error:
            raise SlurmError(f"{what}: {error}, and was ended: is this Slurm's own program?") from None
        except NotDone:
            with self._changed:
                self._stuck[thread] = what
            text = f"{what}: no answer from Slurm within {timeout:g} s, and its process does not end when it is killed"
            log.warning("%s: it is left behind", text)
            raise SlurmTimeout(text) from None

    def stuck(self) -> list[str]:
        """Return the programs that were left behind and have not ended."""
        with self._changed:
            self._stuck = {thread: what for thread, what in self._stuck.items() if thread.is_alive()}
            return list(self._stuck.values())


def _serve(result: Future[Completion], command: Sequence[str], env: Mapping[str, str], timeout: float) -> None:
    try:
        result.set_result(run_program(command, timeout, MOST_BYTES, env))
    except BaseException as error:
        result.set_exception(error)
