"""What a session has to do with the node's memory: its state is kept there, and it may begin with what is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        self._folder: Path | None = None
        self._checkpoints: Checkpoints | None = None
        self._start = 0
        self._keeper: Keeper | None = None
        self._beginnings = Beginnings(None, None, 0, None)
        self._has_state = False  # of the job's
        self._came = False  # an image, since the last look
        self._generation, self._writes = -1, slot  # of the node's ranks at this place, in that generation
        self.active = False

    def look(self, checkpoints: Checkpoints | None, start: int, writer: Writer) -> int:
        """What there is to begin with; returns the iteration to go on with where nobody has another. start: at which
        the script begins. writer: this rank's place.

        Raises :class:`transition.checkpoint.CheckpointError` where there are checkpoints and none can be used.
        """
        settings = Settings.chosen()
        folder, self.active = settings.folder, True
        self._folder, self._checkpoints, self._start = folder, checkpoints, start
        self._beginnings = Beginnings(folder, checkpoints, start, writer)
        if folder is not None:
            self._keeper = Keeper(folder, self._slot, settings.every)
        if folder is not None and checkpoints is not None and checkpoints.destination is not None:
            with contextlib.suppress(OSError):  # a folder that cannot be written to is said of with the first copy
                note_destination(folder, checkpoints.destination)
        return self._beginnings.newest

    def hear(self, message: Mapping[str, Any]) -> None:
        """What the agent says of the node's memory: a cut that is to be kept, or an image that has come."""
        if message["kind"] == "fetch":
            self._came = True
        elif self._keeper is not None:
            none = self._keeper.none = bool(message.get("none", False))
            self._keeper.good = -1 if none else int(message.get("good", -1))
            self._keeper.cut = -1 if none else int(message.get("iteration", -1))

    def told(self, own: int, writer: Writer) -> list[tuple[int, str]]:
        """With what this rank, at rest, could go on, the newest first. own: the iteration that comes next for the state
        of the job that it has, if it has one: that, and what is in memory."""
        if self._has_state or self._came:
            self._came = False
            files = None if self._has_state else self._checkpoints
            untouched = self._beginnings.untouched and not self._has_state
            self._beginnings = Beginnings(self._folder, files, self._start, writer, untouched)
        if not self._has_state:
            return self._beginnings.told
        others = [one for one in self._beginnings.told if one[0] != own]
        return sorted([(own, writer.mark), *others], reverse=True)

    def begin(self, plan: Plan, own: int) -> int | None:
        """The groups of `plan` are there. Where it has this rank begin with something, from its node's memory or from
        files, the state is that now: returns the iteration. None where the rank has what it needs, or gets it. own: as
        in :meth:`told`."""
        self.wait()
        if not self.active:
            return None
        if self._slot in plan.joiners:
            self._beginnings.touched()
            return None
        goes_on = plan.source is None or plan.boundary or plan.iteration in (None, own)
        if self._has_state and goes_on:
            return None
        return self._beginnings.take(self._state, plan.iteration)

    def begun(self) -> None:
        """This rank has the state of the job."""
        self._has_state = True

    def keep(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> None:
        """At an iteration boundary: copy the state, if this rank is the one that does so for its place in the node."""
        keeper = self._keeper
        if keeper is None:
            return
        if generation != self._generation:  # a look at all members, which are many
            here = [slot for slot in members if slot % writer.size == writer.place and self._is_here(slot)]
            self._generation, self._writes = generation, min(here)
        if self._slot == self._writes:
            keeper.copy(self._gatherer, iteration, generation, writer)
        elif keeper.holds:
            keeper.hand_over(self._writes)

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
