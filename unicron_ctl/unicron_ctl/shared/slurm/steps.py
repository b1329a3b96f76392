"""Runs jobs of `unicronctl` in parallel, each by its own srun. None outlives an interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from unicron_ctl.shared.slurm.drains import OURS, is_from_pair_test
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.health.program_output import TooMuchOutput, run_program

CANCEL_SECONDS = 10.0  # for scancel
END_SECONDS = 5.0  # for an srun to exit after SIGTERM
Item = TypeVar("Item")
Result = TypeVar("Result")


class Steps:
    """Runs sruns in parallel.

    Parameters
    ----------
    name : str
        The prefix of their jobs' names, by which, with a token, scancel finds them.
    environment : mapping
        For srun, with SLURM_CONF for a private cluster.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        # Inside another job srun would use that job's nodes. UNICRON=0 makes the plugin ignore these jobs.
        hidden = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_")
        kept = {k: v for k, v in environment.items() if not k.startswith(hidden) or k == "SLURM_CONF"}
        self._name, self._environment = name, {**kept, "UNICRON": "0"}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def side_by_side(self, work: Callable[[Item], Result], items: Sequence[Item], most: int) -> list[Result]:
        """Do the work for all items, `most` at a time. An interrupt, or any other error, ends the sruns."""
        with ThreadPoolExecutor(max(1, min(most, len(items)))) as pool:
            try:
                return list(pool.map(work, items))
            except BaseException:
                self.stop()  # the pool waits for the sruns
                raise

    @contextlib.contextmanager
    def running(self, token: str, line: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start an srun with pipes for its output, and wait for its exit. Raises UserError if it cannot start."""
        with self._lock:
            if self._stopped:
                raise UserError("interrupted")
            try:
                process = self._running[token] = subprocess.Popen(
                    line,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                why = f"cannot start srun ({error.strerror}); install with: apt-get install slurm-client"
                raise UserError(why) from None
        with process:
            try:
                yield process
            except BaseException:
                self.end(token, process)
                raise
            finally:
                with self._lock:
                    self._running.pop(token, None)

    def stop(self) -> None:
        """End all running sruns, and start no others."""
        with self._lock:
            self._stopped, running = True, dict(self._running)
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            list(pool.map(lambda one: self.end(*one), running.items()))

    def end(self, token: str, process: subprocess.Popen[bytes]) -> None:
        """End one srun. srun itself would wait for an answer from the job's nodes; scancel does not need one."""
        try:
            run_program(["scancel", f"--name={self._name}{token}"], CANCEL_SECONDS, env=self._environment)
            process.send_signal(signal.SIGTERM)
            process.wait(END_SECONDS)
        except (OSError, subprocess.TimeoutExpired, TooMuchOutput):
            process.kill()


def why_not_idle(node: NodeInfo) -> str:
    """Explain why nothing can start on the node now, and what to do about it."""
    if node.asleep:
        return f"switched off by power saving: `scontrol update NodeName={node.name} State=POWER_UP`, and try again"
    if node.healthy:
        return f"in use ({'+'.join(sorted(node.states)).lower()}): try again when it is free"
    why = f"{'+'.join(sorted(node.states)).lower()}{f': {node.reason}' if node.reason else ''}"
    if node.reason.startswith(OURS) and not is_from_pair_test(node.reason):
        hint = f"`unicronctl nodes --node {node.name}` says what it waits for"
        return f"out of service by Unicron ({why}), which gives it back when it is sound: {hint}"
    return f"out of service ({why}): give it back with `scontrol update NodeName={node.name} State=RESUME` first"


def search_path() -> dict[str, str]:
    """Return this process's environment, with the folders of Slurm's programs in PATH: Debian keeps daemons in
    /usr/sbin, which ordinary users do not have there."""
    more = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin")
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), *more])}
