"""Starts the processes of an agent's ranks, passes on their output, and collects them when they have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import zmq

from unicron_ctl.agent.connections.connections import Connections
from unicron_ctl.agent.connections.containment import reason
from unicron_ctl.agent.ranks.ranks import Rank
from unicron_detector.processes.job_output import JobOutput
from unicron_detector.processes.supervise import Child

HOLD_SECONDS = 0.02  # between two looks whether the job's log has taken the text that waits for it


class Processes:
    """The processes of an agent's ranks."""

    def __init__(
        self,
        net: Connections,
        read: Callable[[], None],  # reads the ranks' messages
        on_end: Callable[[Rank], None],  # called when the rank's process has ended
        report: Callable[[], None],  # sends the controller the state of all ranks
    ) -> None:
        self._polling, self._line, self._log = net.polling, net.ranks, net.log
        self._read, self._on_end, self._report = read, on_end, report
        # Descriptors with output that waits until the job's log has taken more, with what passes it on.
        self._held: dict[int, tuple[JobOutput, Callable[[], bool]]] = {}

    def start(self, rank: Rank, incarnation: int) -> None:
        """Start the rank's next process."""
        folder = self._line.folder
        try:
            if self._line.bind_again():
                self._log.warn(f"{folder} is gone, and is made again: a cleaner of old files must leave it alone")
        except (OSError, zmq.ZMQError) as error:
            self._log.warn(f"{folder} is gone, and could not be made again: {reason(error)}")
        rank.start(incarnation)
        self.attend(rank)

    def timeout(self, ranks: Iterable[Rank], now: float) -> float:
        """Return the seconds until :meth:`on_timer` must be called; infinity if nothing is due."""
        due = [rank.again - now for rank in ranks if rank.again is not None]
        return max(0.0, min([*due, HOLD_SECONDS if self._held else float("inf")], default=float("inf")))

    def on_timer(self, ranks: Iterable[Rank]) -> None:
        """Try again to start processes that could not be started, and to pass on output that had to wait."""
        for descriptor, (job, take) in list(self._held.items()):
            if not job.full:
                del self._held[descriptor]
                self._polling.watch(descriptor, partial(self._pass_output, descriptor, job, take))
        for rank in ranks:
            if rank.again is not None and time.monotonic() >= rank.again:
                rank.retry()
                self.attend(rank)

    def attend(self, rank: Rank) -> None:
        """Listen to the rank's new process, and report it."""
        if rank.child is not None:
            self._polling.watch(rank.child.pidfd, partial(self._collect, rank))
            for descriptor, job, take in self._streams(rank.child):
                self._polling.watch(descriptor, partial(self._pass_output, descriptor, job, take))
        elif rank.again is not None:
            self._log.warn_once(f"couldn't start the process of slot {rank.slot}: {rank.short}; it is tried again")
        elif rank.status.exit is not None:
            self._log.warn(rank.status.exit.last_line)
        self._report()

    @staticmethod
    def _streams(child: Child) -> list[tuple[int, JobOutput, Callable[[], bool]]]:
        around = child.surroundings
        streams: list[tuple[int, JobOutput, Callable[[], bool]]] = [(child.stderr, around.err, child.pass_stderr)]
        if child.stdout is not None:
            streams.append((child.stdout, around.out, child.pass_stdout))
        return streams

    def _pass_output(self, descriptor: int, job: JobOutput, take: Callable[[], bool]) -> None:
        if job.full:
            self._polling.unwatch(descriptor)
            self._held[descriptor] = job, take
        elif not take():
            self._polling.unwatch(descriptor)

    def _collect(self, rank: Rank) -> None:
        child = rank.child
        if child is None:
            return
        self._polling.unwatch(child.pidfd)
        for descriptor, _, _ in self._streams(child):
            self._polling.unwatch(descriptor)
            self._held.pop(descriptor, None)
        self._read()  # its last messages, above all its exception, come before its end
        rank.collect()
        if not child.output.shown and rank.status.exit is not None:
            child.surroundings.err.write(f"{child.tail()}\n".encode())  # the job's log shows why it has failed
        self._on_end(rank)
        self._report()
