"""The ranks of one node: their processes, and their status for the controller."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.ranks.placeholders import fill_variables, fill_words
from unicron_ctl.agent.ranks.rank_logs import RankLogs
from unicron_ctl.agent.ranks.static_world import LAUNCHER, slurm_world
from unicron_ctl.agent.ranks.zygote_client import AlwaysCold, Coming, Starter
from unicron_ctl.shared.protocol import ranges, structs
from unicron_ctl.shared.system.release import rank_roots
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.root_cause import one_line
from unicron_detector.processes.job_input import standard_input
from unicron_detector.processes.job_output import JobOutput
from unicron_detector.processes.rank_messages import CollectiveProgress, Fault, FromRank, Status
from unicron_detector.processes.supervise import USUAL, Child, Surroundings

QUIET_STATES = ("running",)  # changes within these may wait for the agent's next heartbeat
STOP_SECONDS = 1.0  # between SIGTERM and SIGKILL
CANNOT_START = 127  # as in a shell
PASSING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # of descriptors, processes, memory: it may get some
START_SECONDS = 60.0  # for a process that cannot be started because of those
START_AGAIN_SECONDS = 1.0
RANK_STATES = ("waiting", "entering", "running", "stopped", "standby", "left", "finished")  # that a rank may report
# Fields of a status that the agent fills in
AGENTS_OWN = frozenset("pid incarnation exit changed process idle waits collectives".split())
COLD = AlwaysCold("there is no zygote")

_rank_fields = structs.RankStatus.__struct_fields__  # in the order of its array
Environment = Callable[[int, int, int], dict[str, str]]  # (slot, local rank, incarnation) -> its process's


def _standing(status: Status | structs.RankStatus) -> tuple[Any, ...]:
    return status.generation, status.iteration, status.phase, len(status.done)


class Rank:
    """One slot: its present process, and its status."""

    def __init__(
        self,
        slot: int,
        local: int,
        command: Sequence[str],
        environment: Environment,
        starter: Starter = COLD,
        surroundings: Surroundings = USUAL,
    ):
        self.slot, self.local, self.surroundings = slot, local, surroundings
        self._command, self._environment, self.starter = command, environment, starter
        self.logs: RankLogs | None = None
        """The files for its output."""
        self._stdin: int | None = None  # of the next process
        self._stdout: tuple[int, int] | None = None  # the pipe for the next process's standard output
        self.child: Child | None = None
        self.coming: Coming | None = None
        """The process that is being forked."""
        self.cold = ""
        """Why its last process was started cold; empty for a warm one."""
        self.again: float | None = None
        """The time at which a process that could not be started is tried again (monotonic)."""
        self.short = ""
        """The resource of which the node was short then."""
        self._tries_until = 0.0
        self._next_environment: Mapping[str, str] = {}
        self.status = structs.RankStatus(state="exited", incarnation=-1)

    def start(self, incarnation: int) -> None:
        """Start a new process in this slot; the old one must be gone. If it cannot be started, it counts as exited."""
        self.status = structs.RankStatus(state="starting", incarnation=incarnation, changed=time.time())
        self._begin_process(self._environment(self.slot, self.local, incarnation))

    def _begin_process(self, environment: Mapping[str, str]) -> None:
        """Begin a process: warm if possible, and then :meth:`arrive` takes it over; else cold, at once."""
        self._tries_until = time.monotonic() + START_SECONDS
        self._try(environment)

    def retry(self) -> None:
        """Try again to start the process."""
        self._try(self._next_environment)

    def _try(self, environment: Mapping[str, str]) -> None:
        self.cold, self.again, self._next_environment = "", None, environment
        try:
            piped = self.logs is not None and self.logs.output(self.local, environment).piped
            self._stdout = os.pipe() if piped else None
            self._stdin = standard_input.open()
            self.coming = self.starter.request_fork(environment, surroundings=self._around())
        except OSError as error:
            self._on_failure(error)
            return
        if self.coming is None:
            self._begin_cold(environment, self.starter.why)

    def _around(self) -> Surroundings:
        """Return the surroundings of the next process."""
        around = replace(self.surroundings, stdin=self._stdin)
        return replace(around, stdout=self._stdout[1]) if self._stdout else around

    def arrive(self) -> None:
        """Take over the process that was being forked, or start it cold."""
        assert self.coming is not None
        coming, self.coming = self.coming, None
        child = coming.child()
        if child is None:
            self._begin_cold(coming.environment, coming.cold or "it ended before it began")
        else:
            self._has(child)

    def _begin_cold(self, environment: Mapping[str, str], why: str) -> None:
        self.cold = why
        try:
            self._has(Child(fill_words(self._command, environment), environment, surroundings=self._around()))
        except (OSError, MemoryError) as error:
            self._on_failure(error)

    def _on_failure(self, error: OSError | MemoryError) -> None:
        """Try again for a while if the node is short of something; then the rank counts as exited."""
        self._close_streams()
        why = getattr(error, "strerror", "") or str(error) or type(error).__name__
        passes = isinstance(error, MemoryError) or error.errno in PASSING
        if passes and (now := time.monotonic()) < self._tries_until:
            self.again, self.short = now + START_AGAIN_SECONDS, why
        else:
            self._ends(CANNOT_START, f"couldn't start {self._command[0]}: {why}")

    def _has(self, child: Child) -> None:
        self.child = child
        if self.logs is not None:
            child.output = self.logs.output(self.local, self._next_environment)
        if self._stdout is not None:
            child.stdout, theirs = self._stdout
            os.set_blocking(child.stdout, False)
            os.close(theirs)
            self._stdout = None
        self._close_streams()
        self.status.pid, self.status.changed = child.pid, time.time()

    def _ends(self, code: int, why: str) -> None:
        """Note that the rank has ended without a process of its own."""
        now = time.time()
        self.status.state, self.status.changed = "exited", now
        self.status.exit = structs.Exit(code=code, at=now, lived=0.0, last_line=why)

    @property
    def alive(self) -> bool:
        """Its process runs, or is starting."""
        return self.child is not None or self.starting

    @property
    def starting(self) -> bool:
        """Its process is being forked, or is tried again."""
        return self.coming is not None or self.again is not None

    @property
    def running(self) -> bool:
        """The rank trains in its generation, and nothing indicates that it is about to end."""
        return self.status.state == "running" and self.status.end is None

    def on_message(self, message: FromRank) -> bool:
        """Take in a message of the rank's process; True if the controller should know at once. Raises
        msgspec.ValidationError or ValueError for a message that does not fit."""
        before = self.status
        if before.state in ("exited", "finished"):
            return False  # of a process that has been replaced
        match message:
            case Fault():
                lived = time.monotonic() - self.child.started if self.child else 0.0
                before.fault = msgspec.convert({**vars(message), "fatal": True, "lived": lived}, structs.Fault)
                before.changed = time.time()
                return True
            case CollectiveProgress():
                if message.moved:
                    before.moved = msgspec.convert(message.moved, ranges.Count)
                if message.collectives:
                    before.collectives = msgspec.convert(message.collectives, structs.Collectives)
                before.changed = time.time()
                return False
            case Status():
                if message.state not in RANK_STATES:
                    raise ValueError(f"{message.state!r} is no state that a rank may have")
                if _standing(message) != _standing(before):
                    before.collectives = {}
                values = [getattr(before if name in AGENTS_OWN else message, name) for name in _rank_fields]
                self.status = msgspec.convert(msgspec.to_builtins(values), structs.RankStatus)
                if before.fault is not None and before.fault.fatal:
                    self.status.fault = before.fault  # no later message takes it back
                self.status.changed = time.time()
                quiet = self.status.state in QUIET_STATES or before.moved != self.status.moved
                return before.state != self.status.state or not quiet
        raise ValueError(f"{message.kind!r} says nothing of the rank")

    @property
    def trainer(self) -> int:
        """The process that trains: the rank's own, unless one of its children trains."""
        return self.status.pid

    def collect(self) -> None:
        """Record how the process has ended. A rank that trained to the end stays finished, whatever came after. A
        process that SIGTERM has ended is not finished, whatever its exit status."""
        assert self.child is not None
        code = self.child.reap(1.0)
        tail = self.child.tail()
        now = time.time()
        if code == 0 and not self.child.terminated:
            self.status.state = "finished"
        else:
            if self.status.state != "finished":
                self.status.state = "exited"
            self.status.exit = structs.Exit(
                code=-signal.SIGKILL if code is None else code,
                at=now,
                lived=time.monotonic() - self.child.started,
                last_line=last_words(tail),
            )
        self.status.changed = now
        self.child.close()
        self.child = None

    def kill(self) -> None:
        """End the process at once."""
        if self.child is not None:
            self.child.signal(signal.SIGKILL)
        elif self.starting:
            self.give_up()
            self._ends(-signal.SIGKILL, "")

    def give_up(self) -> None:
        """Give up the process that is being started."""
        self.again = None
        if self.coming is not None:
            self.coming.drop()
            self.coming = None
        self._close_streams()

    def _close_streams(self) -> None:
        for end in (*(self._stdout or ()), *([] if self._stdin is None else [self._stdin])):
            os.close(end)
        self._stdin = self._stdout = None


def last_words(tail: str) -> str:
    """Return the line that says why a process ended (failures.root_cause); the last line if none does."""
    words, _ = default_classifier().last_words(tail)
    return one_line(words or next(reversed(tail.splitlines()), ""))


def stop_all(ranks: Sequence[Rank], seconds: float = STOP_SECONDS) -> None:
    """End all processes, and wait for it: SIGTERM, `seconds` to act on it, SIGKILL. Processes that outlive SIGTERM get
    SIGKILL at once."""
    for rank in ranks:
        rank.give_up()
    running = [(rank, rank.child) for rank in ranks if rank.child is not None]
    for rank, child in running:
        if rank.status.outlives:
            child.signal(signal.SIGKILL)
    stop_children([child for _, child in running], seconds)
    for rank, _ in running:
        rank.collect()


def stop_children(children: Sequence[Child], seconds: float = STOP_SECONDS) -> None:
    """Send SIGTERM, and SIGKILL after `seconds`; nothing is reaped yet."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(not child.ended() for child in children):
        for child in children:
            child.pass_stderr()  # a full pipe would keep it from ending
            child.pass_stdout()
        time.sleep(0.01)
    for child in children:
        if not child.ended():
            child.signal(signal.SIGKILL)


def surroundings_of(place: Place) -> list[Surroundings]:
    """Return the surroundings of the node's ranks, by local rank: those of Slurm's tasks, if the step has several. The
    first is the agent's own task, whose output is the agent's."""
    if not place.tasks:
        return [USUAL] * place.settings.ranks_per_node
    made = [
        Surroundings(None, task.stdout, JobOutput(task.stdout), JobOutput(task.stderr), task.cpus)
        for task in place.tasks[1:]
    ]
    return [Surroundings(cpus=place.tasks[0].cpus), *made]


def task_environment(place: Place, local: int, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment that Slurm gave the task of this local rank. environment: the agent's, with the
    launcher."""
    if not 0 < local < len(place.tasks):
        return environment
    launcher = {LAUNCHER: environment[LAUNCHER]} if LAUNCHER in environment else {}
    return {**place.tasks[local].environment, **launcher}


def package_path(base: Mapping[str, str]) -> str:
    """Return a PYTHONPATH by which a script finds `unicron` even if that is not installed."""
    return os.pathsep.join(filter(None, [base.get("PYTHONPATH", ""), *rank_roots()]))


def rank_environment(
    place: Place, endpoint: str, base: dict[str, str], more: Callable[[], Mapping[str, str]] = dict
) -> Environment:
    """Return the function that makes a rank's environment. more: returns variables that are known only at its start.

    RANK and WORLD_SIZE describe the world in which a rank prepares itself, which is its own; the generation's plan
    gives the real one.
    """

    def environment(slot: int, local: int, incarnation: int) -> dict[str, str]:
        own = task_environment(place, local, base)
        made = {
            **own,
            **(slurm_world(0, 1, local, 1, 0) if place.tasks else {}),
            "PYTHONPATH": package_path(own),
            "UNICRON_AGENT": endpoint,
            "UNICRON_STACKS": stacks_file(endpoint, slot),
            "UNICRON_SLOT": str(slot),
            "UNICRON_MAX_RANKS": str(place.settings.max_nodes * place.settings.ranks_per_node),
            "UNICRON_BLOCK": str(place.settings.block),
            "UNICRON_INCARNATION": str(incarnation),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(place.settings.ranks_per_node),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": "0",
            "PYTHONUNBUFFERED": "1",
            **more(),
        }
        return fill_variables(made)

    return environment


def stacks_file(endpoint: str, slot: int) -> str:
    """Return the file for a rank's stacks, beside its channel's socket."""
    folder = endpoint.removeprefix("ipc://").rpartition("/")[0]
    return f"{folder}/stacks.{slot}" if folder else ""
