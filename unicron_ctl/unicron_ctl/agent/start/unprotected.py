"""Runs the ranks of a job that no controller protects, in the world that Slurm's own view of the job gives."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from unicron_ctl.agent.connections.connections import JobLog
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.connections.signals import ENDING, ENDING_SECONDS, SignalPipe, slurm_signals_all
from unicron_ctl.agent.connections.step_tasks import others
from unicron_ctl.agent.ranks.placeholders import fill_words
from unicron_ctl.agent.ranks.rank_logs import RankLogs
from unicron_ctl.agent.ranks.rank_processes import HOLD_SECONDS
from unicron_ctl.agent.ranks.ranks import CANNOT_START, STOP_SECONDS, package_path, stop_children, task_environment
from unicron_ctl.agent.ranks.static_world import outside_the_step, static_world
from unicron_ctl.agent.start import bare
from unicron_ctl.agent.start.resources import FOR_A_RANK, descriptors_short
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.processes.job_input import standard_input
from unicron_detector.processes.job_output import standard_error, standard_output
from unicron_detector.processes.supervise import Child, Surroundings, shell_status

FLUSH_SECONDS = 2.0  # without progress, for the log


def run_unprotected(place: Place, command: Sequence[str], why: str) -> int:
    """Run the user's command once per rank; return its exit status. With one rank this process becomes the command.

    Raises UserError if the job's ranks are not known, or the command cannot be started.
    """
    try:
        world = static_world(place)
    except UserError as error:
        raise UserError(f"{why}; {error}", error.exit_code) from None
    JobLog(place).warn(f"{why}; the job runs unprotected")
    standard_error.flush(FLUSH_SECONDS)  # a log that takes nothing keeps no command from running
    environments = [world.environment(local, _base(place, local)) for local in range(world.ranks_per_node)]
    logs = RankLogs(os.environ, place.job)
    if place.tasks or (len(environments) == 1 and not logs.output(0, environments[0]).piped):
        others.run_themselves(environments[1:])
        _become(command, environments[0])
    if descriptors_short(FOR_A_RANK * (len(environments) + 1)):
        return bare.run_all([fill_words(command, each) for each in environments], environments)
    return _Ranks(command, environments, JobLog(place), logs).run()


def _base(place: Place, local: int) -> dict[str, str]:
    """Return the variables of this local rank's process in any world. Without an array, what the step's variables say
    of the job's nodes is true."""
    given = task_environment(place, local, os.environ)
    mine = outside_the_step(given) if "SLURM_ARRAY_TASK_ID" in given else given
    return {**mine, "PYTHONPATH": package_path(given)}


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    try:
        standard_input.give_back()
        bare.become(fill_words(command, environment), environment)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from None


class _Ranks:
    """The node's ranks as children. The first that fails ends the others; signals are passed on."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], log: JobLog, logs: RankLogs):
        self._signals, self._logs = SignalPipe(), logs
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._running: list[Child] = []
        self._status = 0
        self._patience = STOP_SECONDS
        for local, environment in enumerate(environments):
            try:
                child = self._start(fill_words(command, environment), environment, local)
            except OSError as error:
                log.warn(f"cannot start {command[0]}: {error.strerror}")
                self._status = CANNOT_START
                break
            self._running.append(child)
            for descriptor in self._descriptors(child):
                self._poll.register(descriptor, select.POLLIN)

    @staticmethod
    def _descriptors(child: Child) -> list[int]:
        return [child.pidfd, child.stderr, *([] if child.stdout is None else [child.stdout])]

    def _start(self, command: Sequence[str], environment: Mapping[str, str], local: int) -> Child:
        """Raises OSError."""
        output = self._logs.output(local, environment)
        stdin = standard_input.open()
        stdout, theirs = os.pipe() if output.piped else (None, None)
        try:
            child = Child(command, environment, surroundings=Surroundings(stdin, theirs))
        except OSError:
            if stdout is not None:
                os.close(stdout)
            raise
        finally:
            for descriptor in (stdin, theirs):
                if descriptor is not None:
                    os.close(descriptor)
        if stdout is not None:
            os.set_blocking(stdout, False)
            child.stdout, child.output = stdout, output
        return child

    def run(self) -> int:
        """Wait until all have ended; return the exit status of the first that failed, as a shell shows it."""
        while self._running and not self._status:
            self._serve_events({descriptor for descriptor, _ in self._poll.poll()})
        stop_children(self._running, self._patience)
        while self._running:
            self._collect(self._running[0])
        self._signals.close()
        self._logs.close(FLUSH_SECONDS)
        standard_output.flush(FLUSH_SECONDS)
        standard_error.flush(FLUSH_SECONDS)
        return self._status

    def _serve_events(self, ready: set[int]) -> None:
        for number in self._signals.read():
            if number in ENDING:
                self._patience = ENDING_SECONDS
            reached = slurm_signals_all()
            for child in self._running:
                if not reached and number in ENDING:
                    child.signal(number)
                elif not reached:
                    child.pass_on(number)
                child.terminated |= number == signal.SIGTERM
        for child in list(self._running):
            if child.stderr in ready and standard_error.full:
                time.sleep(HOLD_SECONDS)
            elif child.stderr in ready and not child.pass_stderr():
                self._poll.unregister(child.stderr)
            if child.stdout in ready and not child.pass_stdout():
                self._poll.unregister(child.stdout)
            if child.pidfd in ready:
                self._collect(child)

    def _collect(self, child: Child) -> None:
        code = child.reap(5.0)
        for descriptor in self._descriptors(child):
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
        child.close()
        self._running.remove(child)
        self._status = self._status or shell_status(-9 if code is None else code)
