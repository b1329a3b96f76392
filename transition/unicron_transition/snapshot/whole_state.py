"""A training state that is whole in each rank, in its node's memory: kept there beside the training, and begun with
where a plan says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from unicron_detector.processes.rank_messages import Plan
from unicron_transition.snapshot import contents
from unicron_transition.snapshot.beginnings import Beginnings
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.image_ring import BUFFERS
from unicron_transition.snapshot.keeper import Keeper, Settings, wanted_copies
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.migrate import TrainingState

MOST_TEXT = 200  # characters


class WholeState(LocalState):
    """The state of one rank, of which the other replicas' ranks at its place hold the same."""

    reports = True

    def __init__(self, state: TrainingState, slot: int):
        super().__init__(state)
        self._slot = slot
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._gatherer = contents.Gatherer(state)
        self._keeper: Keeper | None = None
        self._beginnings: Beginnings  # from :meth:`find_start` on
        self._has_state = False  # of the job's
        self._generation, self._writes = -1, slot  # of the node's ranks at this place, in that generation
        self._gives = False  # copies of its state may be asked for, in that generation
        self._aside = False  # the next copy becomes a file

    # ------------------------------------------------------------ before a generation
    def find_start(self, checkpoints: Checkpoints | None, start: int, writer: Callable[[], Writer]) -> int:
        settings = Settings.chosen()
        self._folder, self._checkpoints = settings.folder, checkpoints
        self.note_destination()
        self._beginnings = Beginnings(self._folder, checkpoints, start, writer())
        if self._folder is not None:
            self._keeper = keeper = Keeper(self._folder, self._slot, settings.every)
            self._cuts, self._filing = keeper.cuts, keeper.aside
        return self._beginnings.newest

    def told(self, own: int, writer: Writer) -> list[tuple[int, str]]:
        if self._has_state or self._came:
            self._came = False
            self._beginnings.list_again(writer, self._has_state)
        if not self._has_state:
            return self._beginnings.told
        others = [one for one in self._beginnings.told if one[0] != own]
        return sorted([(own, writer.mark), *others], reverse=True)

    # ------------------------------------------------------------ into a generation
    def note_has_state(self) -> None:
        self._has_state = True

    def restore(self, plan: Plan, own: int) -> int | None:
        self.wait_copied()
        if self._slot in plan.joiners:
            self._beginnings.untouched = False
            return None
        goes_on = plan.source is None or plan.boundary or plan.iteration in (None, own)
        if self._has_state and goes_on:
            return None
        return self._beginnings.take_up(self._state, plan.iteration)

    def goes_on(self, iteration: int) -> None:
        if self._keeper is not None:
            self._keeper.wait_whole()
            self._keeper.needed = iteration

    # ------------------------------------------------------------ in an iteration
    def wait_copied(self) -> None:
        if self._keeper is not None:
            self._keeper.wait_copied()

    def wait_whole(self) -> None:
        if self._keeper is not None:
            self._keeper.wait_whole()

    def keep_boundary(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> None:
        keeper, (aside, self._aside) = self._keeper, (self._aside, False)
        if keeper is None:
            return
        self._note_members(members, generation, writer)
        if self._slot == self._writes:
            keeper.copy(self._gatherer, iteration, generation, writer, aside)
        elif keeper.has_files:
            keeper.hand_over(self._writes, iteration)
        keeper.remove_unwanted_cuts()

    def _note_members(self, members: Sequence[int], generation: int, writer: Writer) -> None:
        """Find who keeps the state of this place in this node: the lowest of its slots there. Once a generation, for
        it is a look at all members."""
        if generation == self._generation:
            return
        same = [slot for slot in members if slot % writer.size == writer.place]
        nodes, here = {self._node(slot) for slot in same}, self._node(self._slot)
        self._generation, self._writes = generation, min(slot for slot in same if self._node(slot) == here)
        wanted = min(1 + wanted_copies(), len({self._node(slot) for slot in members}))
        self._gives = len(nodes) < wanted

    def _node(self, slot: int) -> int:
        return slot // self._per_node

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    # ------------------------------------------------------------ checkpoints' files
    def set_aside(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> bool:
        if self._keeper is None or self._keeper.trouble:
            return False
        self._note_members(members, generation, writer)
        self._aside = self._slot == self._writes and self.note_destination()
        return self._aside

    # ------------------------------------------------------------ words
    @property
    def bytes(self) -> int:
        """Bytes of the node's memory that its images take at the most, once there are any: two that take turns, two
        cuts where other nodes are given copies, and one while the agent makes a file of it."""
        if self._keeper is None:
            return 0
        filed = self._checkpoints is not None and self._checkpoints.destination is not None
        return (BUFFERS * (1 + self._gives) + filed) * self._gatherer.contents().size

    def memory_text(self, parameters: int) -> str:
        size = self.bytes / parameters
        return f", {size:.1f} of shared memory for the state" if size else ""

    @property
    def trouble(self) -> str:
        return "" if self._keeper is None else self._keeper.trouble[:MOST_TEXT]
