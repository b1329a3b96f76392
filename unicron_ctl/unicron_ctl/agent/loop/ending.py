"""The end of an element: with its training, by a signal, by the controller's word, or without a controller."""

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

SAVE_SECONDS = 600.0  # at the end by an error, for what memory has


class Ending:
    """Decides when this element ends, and does it.

    exit_code: None until the element is over. noticed: it is to end, and waits for the next boundary. notice_seconds:
    how long it does so at most. stays: Slurm preempts it, and is to end it itself. trained: the controller says that
    the job is trained to its end.
    leaves: what its ranks do when it is noticed, in words.
    final: nobody will go on with this job. summary: what was healed, for the end of the job's log, where this agent is
    to say it. save: writes the training state. stop_seconds: for ranks to act on SIGTERM.

    tell(leaving): sends a status that says why the agent is about to end.
    """

    def __init__(
        self, ranks: Mapping[int, Rank], plans: Plans, snapshots: Snapshots, tell: Callable[[str], None], log: JobLog
    ) -> None:
        self._ranks, self._plans, self._snapshots, self._tell, self._log = ranks, plans, snapshots, tell, log
        self.exit_code: int | None = None
        self.trained = self.final = False
        self.summary = ""
        self._notice: tuple[int, float] | None = None
        self.leaves = "its ranks leave at the next boundary"
        self.stays = False
        self.notice_seconds = 0.0
        self.save: Callable[[], None] = lambda: None
        self.stop_seconds = STOP_SECONDS

    def end_element(self, code: int, reason: str) -> None:
        """End the element with this exit code."""
        self.exit_code = code
        self._tell(reason)

    def end_if_over(self, silent: float) -> None:
        """End when all ranks have finished, or when some died and the controller has been silent for too long (seconds,
        so far)."""
        if self.exit_code is not None:
            return
        finished = [rank for rank in self._ranks.values() if rank.status.state == "finished"]
        if any(rank.alive for rank in finished):
            return  # trained to the end, but the script may save something yet
        if len(finished) == len(self._ranks) or self.trained:
            codes = [shell_status(rank.status.exit.code) for rank in finished if rank.status.exit is not None]
            self.final = True
            self.end_element(max(codes, default=0), "finished")
        elif silent > ORPHAN_SECONDS:
            if any(rank.alive and rank.status.state == "stopped" for rank in self._ranks.values()):
                return  # it saves its state and ends by itself when no plan comes
            for rank in self._ranks.values():
                if rank.status.state == "exited" and rank.status.exit is not None:
                    told = f"no controller for {ORPHAN_SECONDS:.0f} s and rank {rank.slot} is dead"
                    self._log.warn(f"{told}; the element ends, requeue it with `scontrol requeue`")
                    self.end_element(shell_status(rank.status.exit.code) or 1, "no controller")
                    return

    @property
    def noticed(self) -> bool:
        return self._notice is not None

    def on_signal(self, number: int, alone: bool) -> None:
        """Somebody wants the element to end. Its ranks leave at the next boundary, so that the others compute nothing
        again; alone: there is no controller, or nobody else. A second signal ends the element at once."""
        through = all(rank.status.state == "finished" for rank in self._ranks.values())
        if alone or self._notice is not None or not self.notice_seconds or through:
            self._stop(number)
            return
        self._notice = number, time.monotonic()
        self._log.inform(f"{signal.Signals(number).name}: {self.leaves}")
        self._tell("")

    def on_grace(self, message: wire.Grace) -> None:
        """The controller gives the element more time to leave."""
        self.notice_seconds = max(self.notice_seconds, message.seconds)

    def on_released(self, message: wire.Release) -> None:
        """Nothing is to be waited for any more."""
        if self._notice is None or self.exit_code is not None:
            return
        self.stays = message.stay
        if message.out:
            self.end_element(128 + self._notice[0], f"left by {signal.Signals(self._notice[0]).name}")
        else:
            self._stop(self._notice[0])

    def timeout(self, now: float) -> float:
        """Seconds until :meth:`end_if_late` has to be called; infinity while nothing is waited for."""
        return self._notice[1] + self.notice_seconds - now if self._notice is not None else float("inf")

    def end_if_late(self, now: float) -> None:
        """Ends the element if the boundary has not come in time."""
        if self._notice is not None and self.exit_code is None and self.timeout(now) <= 0.0:
            self._stop(self._notice[0])

    def _stop(self, number: int) -> None:
        self._notice = self._notice or (number, time.monotonic())
        self.stop_seconds, self.save = ENDING_SECONDS, self._saving()
        self.end_element(128 + number, f"stopped by {signal.Signals(number).name}")

    def tell_summary(self) -> None:
        """Writes the last line of the job's log, if the job is over and this agent is to say it."""
        if self.summary and (self.final or self.trained):
            self._log.inform(self.summary)

    def on_order(self, order: wire.End) -> None:
        """The controller ends the element; one that trained to its end lets its scripts finish: they may save something
        after the last iteration."""
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
        """Return the function that saves a job that ends in the middle of its training. ended: by an error."""
        how = self._plans.saving({rank.status.state for rank in self._ranks.values()}, ended)
        return self._snapshots.last_checkpoint(*how) if how is not None else lambda: None
