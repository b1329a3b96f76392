"""Ends an element: with its training, by a signal, by the controller's order, or without a controller."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from unicron_ctl.agent.connections.connections import JobLog
from unicron_ctl.agent.connections.signals import ENDING_SECONDS
from unicron_ctl.agent.loop.plans import Plans
from unicron_ctl.agent.ranks.ranks import STOP_SECONDS, Rank
from unicron_ctl.agent.snapshots.node_memory import within
from unicron_ctl.agent.snapshots.snapshots import Snapshots
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.settings.limits import ORPHAN_SECONDS
from unicron_detector.processes.supervise import shell_status

SAVE_SECONDS = 600.0  # to save what memory has when an error ends the job


class Ending:
    """Decides when this element ends, and ends it."""

    def __init__(
        self, ranks: Mapping[int, Rank], plans: Plans, snapshots: Snapshots, report: Callable[[str], None], log: JobLog
    ) -> None:
        self._ranks, self._plans, self._snapshots, self._log = ranks, plans, snapshots, log
        self._report = report  # sends a status that says why the agent is about to end
        self.exit_code: int | None = None
        """None until the element is over."""
        self.trained = False
        """The job has trained to its end."""
        self.final = False
        """Nobody will continue this job."""
        self.summary = ""
        """A line about what was healed, if this agent writes the end of the job's log."""
        self._notice: tuple[int, float] | None = None  # the signal, and its time (monotonic)
        self.leaves = "its ranks leave at the next boundary"
        """The log's words for what its ranks do on a signal."""
        self.stays = False
        """Slurm preempts the element, and must end it itself."""
        self.notice_seconds = 0.0
        """The longest wait for the next boundary."""
        self.save: Callable[[], None] = lambda: None
        """Writes the training state at the end."""
        self.stop_seconds = STOP_SECONDS
        """For ranks to act on SIGTERM."""

    def end_element(self, code: int, reason: str) -> None:
        """End the element with this exit code."""
        self.exit_code = code
        self._report(reason)

    def end_if_over(self, silent: float) -> None:
        """End if all ranks have finished, or if one has died and the controller was silent (seconds) for too long."""
        if self.exit_code is not None:
            return
        finished = [rank for rank in self._ranks.values() if rank.status.state == "finished"]
        if any(rank.alive for rank in finished):
            return  # a script that has trained to the end may still save something
        if len(finished) == len(self._ranks) or self.trained:
            codes = [shell_status(rank.status.exit.code) for rank in finished if rank.status.exit is not None]
            self.final = True
            self.end_element(max(codes, default=0), "finished")
        elif silent > ORPHAN_SECONDS:
            if any(rank.alive and rank.status.state == "stopped" for rank in self._ranks.values()):
                return  # it saves its state and ends by itself if no plan comes
            for rank in self._ranks.values():
                if rank.status.state == "exited" and rank.status.exit is not None:
                    why = f"no controller for {ORPHAN_SECONDS:.0f} s and rank {rank.slot} is dead"
                    self._log.warn(f"{why}; the element ends, requeue it with `scontrol requeue`")
                    self.end_element(shell_status(rank.status.exit.code) or 1, "no controller")
                    return

    @property
    def noticed(self) -> bool:
        """A signal has asked the element to end, and it waits for the next boundary."""
        return self._notice is not None

    def on_signal(self, number: int, alone: bool) -> None:
        """End the element on somebody's signal. Its ranks leave at the next boundary, so that no work is repeated; at
        once if there is no controller or no other node (alone), or at a second signal."""
        through = all(rank.status.state == "finished" for rank in self._ranks.values())
        if alone or self._notice is not None or not self.notice_seconds or through:
            self._stop(number)
            return
        self._notice = number, time.monotonic()
        self._log.inform(f"{signal.Signals(number).name}: {self.leaves}")
        self._report("")

    def on_grace(self, message: wire.Grace) -> None:
        """Give the element more time to leave, as the controller orders."""
        self.notice_seconds = max(self.notice_seconds, message.seconds)

    def on_released(self, message: wire.Release) -> None:
        """End: nothing needs to be waited for any more."""
        if self._notice is None or self.exit_code is not None:
            return
        self.stays = message.stay
        if message.out:
            self.end_element(128 + self._notice[0], f"left by {signal.Signals(self._notice[0]).name}")
        else:
            self._stop(self._notice[0])

    def timeout(self, now: float) -> float:
        """Return the seconds until :meth:`end_if_late` must be called; infinity if nothing is waited for."""
        return self._notice[1] + self.notice_seconds - now if self._notice is not None else float("inf")

    def end_if_late(self, now: float) -> None:
        """End the element if the boundary has not come in time."""
        if self._notice is not None and self.exit_code is None and self.timeout(now) <= 0.0:
            self._stop(self._notice[0])

    def _stop(self, number: int) -> None:
        self._notice = self._notice or (number, time.monotonic())
        self.stop_seconds, self.save = ENDING_SECONDS, self._saving()
        self.end_element(128 + number, f"stopped by {signal.Signals(number).name}")

    def log_summary(self) -> None:
        """Write the last line of the job's log, if the job is over and this agent has to write it."""
        if self.summary and (self.final or self.trained):
            self._log.inform(self.summary)

    def on_order(self, order: wire.End) -> None:
        """End the element on the controller's order. If the job has trained to its end, its scripts finish first: they
        may save something after the last iteration."""
        if self.trained and order.code == 0:
            return
        if order.code or order.reason:
            (self._log.warn if order.code else self._log.inform)(order.reason)
        if order.code:
            self.final, self.save = True, partial(within, SAVE_SECONDS, self._saving(ended=True))
            self.end_element(order.code & 0xFF or 1, "ended by the controller")
            return
        self.trained = True
        for rank in self._ranks.values():
            if rank.status.state != "finished":
                rank.kill()  # a spare

    def _saving(self, ended: bool = False) -> Callable[[], None]:
        """Return the function that saves a job that ends during its training. ended: by an error."""
        how = self._plans.saving({rank.status.state for rank in self._ranks.values()}, ended)
        return self._snapshots.last_checkpoint(*how) if how is not None else lambda: None
