"""When a checkpoint is written. All ranks have to write the same iteration, so they tell each other in the commit, a
collective of all, who wants one and who has not finished the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unicron.transition.iteration.exchange import Said
from unicron.transition.iteration.rank_log import inform, warn
from unicron.transition.sharded.safekeeping import Safekeeping
from unicron.transition.snapshot.checkpoint import Checkpoints, Writer
from unicron.transition.snapshot.migrate import TrainingState
from unicron.transition.snapshot.remembered import Remembered


class Saving:
    """Of one rank. checkpoints: None where the script makes none. kept: the states of a distributed optimizer."""

    def __init__(self, checkpoints: Checkpoints | None, remembered: Remembered, kept: Safekeeping | None = None):
        self._checkpoints, self._remembered, self._kept = checkpoints, remembered, kept
        self.writes = checkpoints is not None and checkpoints.destination is not None
        self._said = Said()
        self._told = False  # that one was left out
        self._asked = False  # for the last one that was due

    @property
    def by_clock(self) -> bool:
        """Ranks without an agent have to agree on an iteration, too."""
        return self.writes and self._checkpoints is not None and bool(self._checkpoints.minutes)

    @property
    def wanted(self) -> bool:
        """This rank wants one: somebody has asked its agent, or its minutes are over."""
        if self._checkpoints is None or not self.writes:
            return False
        missed = self._kept is not None and self._kept.missed
        return missed or self._remembered.asked or self._checkpoints.overdue()

    @property
    def busy(self) -> bool:
        """The agent still makes a file of what this rank has set aside."""
        return self._remembered.filing or (self._kept is not None and self._kept.filing)

    def begin(self) -> None:
        """Of another iteration nothing has been said yet."""
        self._said = Said()

    def hear(self, said: Said) -> None:
        """What the commit of this iteration came to. A rank that steps by a plan has not heard it, which costs at most
        the checkpoint of that iteration."""
        self._said = said

    def due(self, iteration: int) -> bool:
        """Whether one is to be written when `iteration` iterations are done; the same in all ranks."""
        checkpoints = self._checkpoints
        if checkpoints is None or not (self._said.save or checkpoints.due(iteration)):
            return False
        if self._said.busy:
            if self.busy and not self._told:
                self._told = True
                warn(
                    f"no checkpoint of iteration {iteration}: the one before is still being written; give a longer "
                    "interval or a faster file system"
                )
            return False
        checkpoints.begun()
        self._asked, self._remembered.asked = self._remembered.asked, False
        if self._kept is not None:
            self._kept.shards.rooms.begin_anew()
        return True

    def store(
        self, iteration: int, state: TrainingState, members: Sequence[int], generation: int, writer: Writer
    ) -> bool:
        """One of `iteration` is due, and this rank writes a part of it. True where that is to be set aside with the
        copy to memory. Shards lie there already; what the agent cannot write a thread of this rank does."""
        if self._kept is None:
            if self._remembered.files(members, generation, writer):
                return True
        elif self._remembered.noted() and self._kept.set_aside(iteration):
            return False
        else:
            writer = replace(writer, shards=self._kept.shards.mark)
        assert self._checkpoints is not None
        self._checkpoints.save(state, iteration, writer)
        if self._asked:
            inform(f"the checkpoint of iteration {iteration} goes to {self._checkpoints.folder}")
        return False
