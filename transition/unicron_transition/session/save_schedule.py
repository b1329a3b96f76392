"""When a checkpoint is written. All ranks have to write the same iteration, so they tell each other in the commit, a
collective of all, who wants one and who has not finished the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unicron_transition.iteration.exchange import Said
from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.save_interval import Risk


class SaveSchedule:
    """The schedule of one rank. checkpoints: None where the script makes none. local: the state in memory. risk(): what
    the job may lose."""

    def __init__(
        self, checkpoints: Checkpoints | None, local: LocalState, risk: Callable[[], Risk] = lambda: Risk(1, False)
    ):
        self._checkpoints, self._local, self._risk = checkpoints, local, risk
        self._filing_since: float | None = None  # the agent makes a file of what this rank has set aside
        self.writes = checkpoints is not None and checkpoints.destination is not None
        self._said = Said()
        self._warned = False  # that one was left out
        self.asked = False  # somebody asked this rank's agent for the last one that was due

    @property
    def by_clock(self) -> bool:
        """Whether ranks without an agent have to agree on an iteration, too."""
        return self.writes and self._checkpoints is not None and self._checkpoints.by_clock

    @property
    def wanted(self) -> bool:
        """Whether this rank wants one: somebody has asked its agent, or its minutes are over."""
        if self._checkpoints is None or not self.writes:
            return False
        return self._local.asked or self._checkpoints.is_overdue(self._risk)

    @property
    def busy(self) -> bool:
        """Whether the agent is still making a file of what this rank has set aside."""
        return self._local.is_filing

    def begin_iteration(self) -> None:
        """No rank has said anything of this iteration yet."""
        self._said = Said()
        if self._filing_since is not None and not self.busy:
            self._note(written=time.monotonic() - self._filing_since)
            self._filing_since = None

    def _note(self, blocked: float = 0.0, written: float = 0.0) -> None:
        """What this rank's part of a checkpoint has cost."""
        clock = self._checkpoints.clock if self._checkpoints is not None else None
        if clock is not None and blocked:
            clock.note_blocked(blocked)
        if clock is not None and written:
            clock.note_written(written)

    def on_commit(self, said: Said) -> None:
        """What the commit of this iteration came to. A rank that steps by a plan has not heard it, which costs at most
        the checkpoint of that iteration."""
        self._said = said

    def is_due(self, iteration: int) -> bool:
        """Whether one is to be written when `iteration` iterations are done; the same in all ranks."""
        checkpoints = self._checkpoints
        if checkpoints is None or not (self._said.save or checkpoints.is_due(iteration)):
            return False
        if self._said.busy:
            if self.busy and not self._warned:
                self._warned = True
                warn(
                    f"no checkpoint of iteration {iteration}: the one before is still being written; give a longer "
                    "interval or a faster file system"
                )
            return False
        checkpoints.restart_clock()
        self.asked = self._local.requested
        self._local.forget_asked()
        return True

    def store(
        self, iteration: int, state: TrainingState, members: Sequence[int], generation: int, writer: Writer
    ) -> None:
        """The one of `iteration` is due, and this rank writes a part of it: its agent does, or else a thread of this
        rank."""
        assert self._checkpoints is not None
        began = time.monotonic()
        if self._local.set_aside(iteration, members, generation, writer):
            self._filing_since = began
        else:
            self._checkpoints.save(state, iteration, self._local.file_writer(writer))
            if self.asked:
                inform(f"the checkpoint of iteration {iteration} goes to {self._checkpoints.folder}")
        self._note(blocked=time.monotonic() - began)
