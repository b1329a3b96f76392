"""What a session has to do with the node's memory: its state is kept there, and it may begin with what is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from transition.beginnings import Beginnings
from transition.checkpoint import Checkpoints, Writer
from transition.memory import contents
from transition.memory.files import note_destination
from transition.memory.keeper import BUFFERS, Keeper, Settings
from transition.migrate import TrainingState
from transition.watch import Plan

MOST_TEXT = 200  # characters


class Remembered:
    """Of one rank. Until :meth:`look` is called, it does nothing: where nobody heals, and with a distributed optimizer,
    whose shards go their own way."""

    def __init__(self, slot: int, state: TrainingState):
        self._slot, self._state = slot, state
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._gatherer = contents.Gatherer(state)
        self._keeper: Keeper | None = None
        self._beginnings: Beginnings | None = None
        self.active = False

    def look(self, checkpoints: Checkpoints | None, start: int, writer: Writer) -> int:
        """What there is to begin with; returns the iteration to go on with where nobody has another. start: at which
        the script begins. writer: this rank's place.

        Raises :class:`transition.checkpoint.CheckpointError` where there are checkpoints and none can be used.
        """
        settings = Settings.chosen()
        folder, self.active = settings.folder, True
        self._beginnings = Beginnings(folder, checkpoints, start, writer)
        if folder is not None:
            self._keeper = Keeper(folder, self._slot, settings.every)
        if folder is not None and checkpoints is not None and checkpoints.destination is not None:
            with contextlib.suppress(OSError):  # a folder that cannot be written to is said of with the first copy
                note_destination(folder, checkpoints.destination)
        return self._beginnings.newest

    @property
    def told(self) -> list[tuple[int, str]]:
        """With what this rank could begin; nothing once it has a state of the job's."""
        return self._beginnings.told if self._beginnings is not None else []

    def begin(self, plan: Plan) -> int | None:
        """The groups of `plan` are there, which has this rank begin with what it has: returns the iteration, None for
        one that has a state already."""
        self.wait()
        if self._beginnings is None:
            return None
        if self._slot in plan.joiners:
            self._beginnings.touched()
            return None
        return self._beginnings.take(self._state, plan.iteration)

    def begun(self) -> None:
        """This rank has the state of the job, and will hand on no other."""
        self._beginnings = None

    def keep(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> None:
        """At an iteration boundary: copy the state, if this rank is the one that does so for its place in the node."""
        keeper = self._keeper
        if keeper is None:
            return
        here = [slot for slot in members if slot % writer.size == writer.place and self._is_here(slot)]
        if self._slot == min(here):
            keeper.copy(self._gatherer, iteration, generation, writer)
        elif keeper.holds:
            keeper.hand_over(min(here))

    def _is_here(self, slot: int) -> bool:
        return slot // self._per_node == self._slot // self._per_node

    def wait(self) -> None:
        """Until the state may change."""
        if self._keeper is not None:
            self._keeper.wait()

    def close(self) -> None:
        """The training is over."""
        if self._keeper is not None:
            self._keeper.close()

    @property
    def size(self) -> int:
        """Bytes of the node's memory that its images take, once there are any."""
        keeps = self._keeper is not None
        return BUFFERS * self._gatherer.contents().size if keeps else 0

    def status(self) -> dict[str, Any]:
        """Of the rank's status."""
        keeper = self._keeper
        return {} if keeper is None else {"forgets": keeper.trouble[:MOST_TEXT]}
