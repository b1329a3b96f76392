"""When a checkpoint is written. All ranks have to write the same iteration, so they tell each other in the commit, a
collective of all, who wants one and who has not finished the last one."""

from __future__ import annotations

from transition.checkpoint import Checkpoints
from transition.exchange import Said
from transition.remembered import Remembered
from transition.saying import say


class Saving:
    """Of one rank. checkpoints: None where the script makes none."""

    def __init__(self, checkpoints: Checkpoints | None, remembered: Remembered):
        self._checkpoints, self._remembered = checkpoints, remembered
        self._writes = checkpoints is not None and checkpoints.destination is not None
        self._said = Said()
        self._told = False  # that one was left out
        self.asked = False  # the last one that was due

    @property
    def by_clock(self) -> bool:
        """Ranks without an agent have to agree on an iteration, too."""
        return self._writes and self._checkpoints is not None and bool(self._checkpoints.minutes)

    @property
    def wanted(self) -> bool:
        """This rank wants one: somebody has asked its agent, or its minutes are over."""
        return (
            self._checkpoints is not None and self._writes and (self._remembered.asked or self._checkpoints.overdue())
        )

    @property
    def busy(self) -> bool:
        """The agent still makes a file of what this rank has set aside."""
        return self._remembered.filing

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
                say(
                    f"no checkpoint of iteration {iteration}: the one before is still being written; give a longer "
                    "interval or a faster file system"
                )
            return False
        checkpoints.begun()
        self.asked, self._remembered.asked = self._remembered.asked, False
        return True
