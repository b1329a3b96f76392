"""When and how an element ends: with its training, by a signal, by the controller's word, or without a controller."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import partial

from unicron.ctl.agent.connections.job_log import JobLog
from unicron.ctl.agent.connections.signals import ENDING_SECONDS
from unicron.ctl.agent.loop.plans import Plans
from unicron.ctl.agent.ranks.ranks import STOP_SECONDS, Rank
from unicron.ctl.agent.snapshots.node_memory import within
from unicron.ctl.agent.snapshots.snapshots import Snapshots
from unicron.ctl.protocol import wire
from unicron.ctl.settings.limits import ORPHAN_SECONDS
from unicron.detector.processes.supervise import shell_status

SAVE_SECONDS = 600.0  # at the end by an error, for what memory has


class Ending:
    """Decides when this element ends, and does it.

    exit_code: None until the element is over. trained: the controller says that the job is trained to its end.
    final: nobody will go on with this job. save: writes the training state. stop_seconds: for ranks to act on SIGTERM.

    tell(leaving): sends a status that says why the agent is about to end.
    """

    def __init__(
        self, ranks: Mapping[int, Rank], plans: Plans, snapshots: Snapshots, tell: Callable[[str], None], log: JobLog
    ) -> None:
        self._ranks, self._plans, self._snapshots, self._tell, self._log = ranks, plans, snapshots, tell, log
        self.exit_code: int | None = None
        self.trained = self.final = False
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

    def on_signal(self, number: int) -> None:
        """Somebody wants the element to end."""
        self.stop_seconds, self.save = ENDING_SECONDS, self._saving()
        self.end_element(128 + number, f"stopped by {signal.Signals(number).name}")

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
        """What writes the training state of a job that ends in the middle of its training. ended: by an error."""
        how = self._plans.saving({rank.status.state for rank in self._ranks.values()}, ended)
        return self._snapshots.last_checkpoint(*how) if how is not None else lambda: None
