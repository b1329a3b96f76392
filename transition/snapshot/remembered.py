"""What a session has to do with the node's memory: its state is kept there, and it may begin with what is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron.detector.processes.rank_messages import Cut, Fetch, MemoryMessage, Plan, Save, Saved
from unicron.transition.snapshot import contents
from unicron.transition.snapshot.beginnings import Beginnings
from unicron.transition.snapshot.checkpoint import Checkpoints, Writer
from unicron.transition.snapshot.double_buffer import BUFFERS
from unicron.transition.snapshot.files import Destination, note_destination
from unicron.transition.snapshot.keeper import Keeper, Settings, wanted_copies
from unicron.transition.snapshot.migrate import TrainingState

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
        self._cuts = False  # copies of its state may be asked for, in that generation
        self._asked = False
        self.active = False

    def look(self, checkpoints: Checkpoints | None, start: int, writer: Writer) -> int:
        """What there is to begin with; returns the iteration to go on with where nobody has another. start: at which
        the script begins. writer: this rank's place.

        Raises :class:`checkpoint.CheckpointError` where there are checkpoints and none can be used.
        """
        settings = Settings.chosen()
        self.active, self._start = True, start
        self.note(checkpoints, settings.folder)
        folder = self._folder
        self._beginnings = Beginnings(folder, checkpoints, start, writer)
        if folder is not None:
            self._keeper = Keeper(folder, self._slot, settings.every)
        return self._beginnings.newest

    def note(self, checkpoints: Checkpoints | None, folder: Path | None) -> None:
        """Tell the agent, beside the images in `folder`, where checkpoints go."""
        self._folder, self._checkpoints = folder, checkpoints
        with contextlib.suppress(OSError):  # a folder that cannot be written to is said of with the first copy
            self._note()

    def _note(self) -> bool:
        """Do so; False where there are none. Raises OSError."""
        folder, checkpoints = self._folder, self._checkpoints
        if folder is None or checkpoints is None or checkpoints.destination is None:
            return False
        note_destination(folder, Destination(checkpoints.destination, checkpoints.keep))
        return True

    def hear(self, message: MemoryMessage) -> None:
        """What the agent says of the node's memory: a cut that is to be kept, an image that has come, a checkpoint that
        is wanted or was made of what this rank has set aside."""
        match message:
            case Fetch():
                self._came = True
            case Save():
                self._asked = True
            case Saved() if self._checkpoints is not None:
                self._checkpoints.newest = max(self._checkpoints.newest, message.iteration)
            case Cut() if self._keeper is not None:
                self._keeper.none = message.none
                self._keeper.good = -1 if message.none else message.good
                self._keeper.cut = -1 if message.none else message.iteration

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

    def goes_on(self, iteration: int) -> None:
        """The generation begins with the state with which `iteration` comes next."""
        if self._keeper is not None:
            self._keeper.settle()
            self._keeper.keep = iteration

    def begun(self) -> None:
        """This rank has the state of the job."""
        self._has_state = True

    def files(self, members: Sequence[int], generation: int, writer: Writer) -> bool:
        """Of what this rank sets aside the agent makes a checkpoint's file; where this is False the rank has to."""
        if self._keeper is None or self._keeper.trouble:
            return False
        self._settle(members, generation, writer)
        return self._slot == self._writes and self.noted()

    def noted(self) -> bool:
        """The agent knows where checkpoints go."""
        try:
            return self._note()
        except OSError:
            return False

    @property
    def asked(self) -> bool:
        """Somebody wants a checkpoint, or what was to become the last one's file could not be set aside."""
        return self._asked or (self._keeper is not None and self._keeper.missed)

    @asked.setter
    def asked(self, asked: bool) -> None:
        self._asked = asked
        if self._keeper is not None:
            self._keeper.missed = False

    @property
    def filing(self) -> bool:
        """The agent is at that still."""
        return self._keeper is not None and self._keeper.filing

    def keep(
        self, iteration: int, members: Sequence[int], generation: int, writer: Writer, aside: bool = False
    ) -> None:
        """At an iteration boundary: copy the state, if this rank is the one that does so for its place in the node.
        aside: what is copied is to become a file (:meth:`files`)."""
        keeper = self._keeper
        if keeper is None:
            return
        self._settle(members, generation, writer)
        if self._slot == self._writes:
            keeper.copy(self._gatherer, iteration, generation, writer, aside)
        elif keeper.holds:
            keeper.hand_over(self._writes, iteration)
        keeper.drop_cuts()

    def _settle(self, members: Sequence[int], generation: int, writer: Writer) -> None:
        """Who keeps the state of this place in this node; once a generation, for it is a look at all members."""
        if generation == self._generation:
            return
        same = [slot for slot in members if slot % writer.size == writer.place]
        nodes, here = {self._node(slot) for slot in same}, self._node(self._slot)
        self._generation, self._writes = generation, min(slot for slot in same if self._node(slot) == here)
        wanted = min(1 + wanted_copies(), len({self._node(slot) for slot in members}))
        self._cuts = len(nodes) < wanted

    def _node(self, slot: int) -> int:
        return slot // self._per_node

    def wait(self) -> None:
        """Until the state may change."""
        if self._keeper is not None:
            self._keeper.wait()

    def settle(self) -> None:
        """What this rank keeps is whole. All do so before one of them writes over what is older."""
        if self._keeper is not None:
            self._keeper.settle()

    def close(self) -> None:
        """The training is over."""
        if self._keeper is not None:
            self._keeper.close()

    @property
    def size(self) -> int:
        """Bytes of the node's memory that its images take at the most, once there are any: two that take turns, two
        cuts where other nodes are given copies, and one while the agent makes a file of it."""
        if self._keeper is None:
            return 0
        filed = self._checkpoints is not None and self._checkpoints.destination is not None
        return (BUFFERS * (1 + self._cuts) + filed) * self._gatherer.contents().size

    def status(self) -> dict[str, Any]:
        """Of the rank's status."""
        keeper = self._keeper
        return {} if keeper is None else {"forgets": keeper.trouble[:MOST_TEXT]}
