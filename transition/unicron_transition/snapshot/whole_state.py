"""Keeps a training state that is whole in each rank in its node's memory, and begins with it if a plan says so."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from unicron_detector.processes.rank_messages import Plan
from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.snapshot import contents, image_format
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints, Writer, load_image, memory_for
from unicron_transition.snapshot.checkpoint_file import Slice, slices_of
from unicron_transition.snapshot.cuts import BUFFERS
from unicron_transition.snapshot.folders import WholeCheckpoint
from unicron_transition.snapshot.image_format import memory_folder
from unicron_transition.snapshot.keeper import Keeper, copy_interval, wanted_copies
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.reading import LOST_ERRORS

MOST_TEXT = 200  # characters
MOST = 8  # iterations that are reported


class Unusable(RuntimeError):
    """The state that this rank should begin with is damaged. It reports its others, and waits for another plan."""


class Beginnings:
    """The states with which one rank could begin.

    Raises :class:`checkpoint.CheckpointError` if there are checkpoints and none can be used.
    """

    def __init__(
        self,
        memory: Path | None,
        checkpoints: Checkpoints | None,
        start: int,
        writer: Writer,
        newest: int | None = None,
    ):
        self._newest = newest  # nothing later is a choice; None for no such limit
        self._memory, self._checkpoints = memory, checkpoints
        self._start = start  # the iteration with which the script begins
        self._writer = writer  # the rank's place and layout
        self.untouched = newest is None  # the state is still the script's own
        self._has_state = False  # the rank has the job's
        self._images: list[image_format.ImagePage] = []
        self._files: list[WholeCheckpoint] = []
        self._list_choices()

    @property
    def choices(self) -> list[tuple[int, str]]:
        """(iteration, mark) of each, the newest first. Of several of one iteration, the one that would be taken."""
        found = [(each.key.iteration, each.key.mark) for each in self._images]
        found += [(each.iteration, each.mark) for each in self._files]
        if self.untouched and not self._files:
            found.append((self._start, ""))
        first: dict[int, str] = {}
        for iteration, mark in found:
            first.setdefault(iteration, mark)
        return sorted(first.items(), reverse=True)[:MOST]

    @property
    def newest(self) -> int:
        """The iteration to begin with if no rank has another."""
        return max((iteration for iteration, _ in self.choices), default=self._start)

    @property
    def verified(self) -> int:
        """The newest iteration of which an image in memory is verified; -1 if there is none."""
        return max((each.key.iteration for each in self._images if each.verified), default=-1)

    def take_up(self, state: TrainingState, iteration: int | None) -> int:
        """Restore `iteration`, or the newest one, into `state`, from memory or else from files, and return the
        iteration.

        Raises Unusable if it is damaged, and CheckpointError if nothing else is left or it is of another model.
        """
        wanted = self.newest if iteration is None else iteration
        if wanted not in (each for each, _ in self.choices):
            raise Unusable(f"this rank has nothing of iteration {wanted}")
        mark = dict(self.choices)[wanted]
        for found in [each for each in self._images if (each.key.iteration, each.key.mark) == (wanted, mark)]:
            self.untouched = False
            if self._take_image(state, found):
                inform(f"goes on from the memory of its node, with iteration {wanted}")
                return wanted
        files = [each for each in self._files if (each.iteration, each.mark) == (wanted, mark)]
        for each in files:
            self.untouched = False
            assert self._checkpoints is not None
            if self._checkpoints.load_one(state, each):
                inform(f"goes on from {each.folder}, with iteration {wanted}")
                return wanted
        if wanted == self._start and self.untouched:
            return wanted
        self._list_choices()
        raise Unusable(f"what this rank has of iteration {wanted} is damaged")

    # ------------------------------------------------------------ what there is
    def list_again(self, writer: Writer, has_state: bool) -> None:
        """Look for new images. has_state: this rank has the job's state, and needs no file any more."""
        self._writer, self._has_state = writer, has_state
        if has_state:
            self._checkpoints, self.untouched = None, False
        self._list_choices()

    def _list_choices(self) -> None:
        self._files = self._checkpoints.choices() if self._checkpoints is not None else []
        there = image_format.inventory(self._memory, self._passed_over) if self._memory is not None else ()
        found = [each for each in there if self._is_mine(each)]
        if self._newest is not None:
            found = [each for each in found if each.key.iteration <= self._newest]
            self._files = [each for each in self._files if each.iteration <= self._newest]
        self._images = sorted(found, key=lambda each: (each.key.iteration, each.key.base), reverse=True)

    def _passed_over(self, error: image_format.BadImage) -> None:
        if self.untouched:  # only at the start, since later other ranks are writing theirs
            warn(f"training state in memory passed over: {error}")

    def _is_mine(self, found: image_format.ImagePage) -> bool:
        """Whether the image is of this rank's place in this layout."""
        writer, key = self._writer, found.key
        if (key.kind, key.place, key.size) != (image_format.STATE, writer.place, writer.size):
            return False
        try:
            return bool(contents.open_image(found).head.layout == writer.layout)
        except (image_format.BadImage, OSError) as error:
            warn(f"training state in memory passed over: {error}")
            return False

    def _take_image(self, state: TrainingState, found: image_format.ImagePage) -> bool:
        checked = False
        try:
            if self._has_state:  # which a damaged image must not replace
                with memory_for(found.path):
                    found.check_file(image_format.reading_threads())
                checked = True
            load_image(state, found.path)
        except (image_format.BadImage, OSError) as error:
            if checked:
                raise CheckpointError(f"{error}: it changed meanwhile, and this rank has lost its state") from None
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, *LOST_ERRORS):
                raise CheckpointError(
                    f"{error}: this rank cannot read the training state in memory, which stays as it is: mend this "
                    "error of the node, or take another node"
                ) from None
            warn(f"training state in memory passed over: {error}")
            with contextlib.suppress(OSError, image_format.BadImage):
                if image_format.read_page(found.path) == found:  # it was not overwritten meanwhile
                    found.path.unlink()
            return False
        return True


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
        self._has_state = False  # it has the job's state
        self._generation = -1
        self._writes = slot  # the slot that keeps the state for this place in the node, in this generation
        self._nodes: list[int] = []  # that train this place, in this generation
        self._gives = False  # other nodes might need copies of it, in this generation
        self._aside: Slice | None = None  # of a file for which the next copy is set aside
        self._start = 0

    # ------------------------------------------------------------ before a generation
    def find_start(self, checkpoints: Checkpoints | None, start: int, writer: Callable[[], Writer]) -> int:
        every, self._start = copy_interval(), start
        self._folder, self._checkpoints = memory_folder() if every else None, checkpoints
        self.note_destination()
        self._beginnings = Beginnings(self._folder, checkpoints, start, writer())
        self.verified = self._beginnings.verified
        if self._folder is not None:
            self._keeper = keeper = Keeper(self._folder, self._slot, every)
            self._cuts, self._filing = keeper.cuts, keeper.aside
        return self._beginnings.newest

    def reachable_states(self, own: int, writer: Writer) -> list[tuple[int, str]]:
        if self._has_state or self._came:
            self._came = False
            self._beginnings.list_again(writer, self._has_state)
        if not self._has_state:
            return self._beginnings.choices
        others = [one for one in self._beginnings.choices if one[0] != own]
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

    def goes_on(self, iteration: int, first: bool = False) -> None:
        super().goes_on(iteration, first)
        if self._keeper is not None:
            self._keeper.wait_whole()
            self._keeper.needed = iteration

    # ------------------------------------------------------------ what audits have found
    def note_verified(self, iteration: int, mark: str) -> None:
        super().note_verified(iteration, mark)
        if self._keeper is not None:
            self._keeper.note_verified(iteration, mark)

    def go_back(self, writer: Writer, first: bool) -> int:
        self._has_state, left = False, super().go_back(writer, first)
        try:
            self._beginnings = Beginnings(self._folder, self._checkpoints, self._start, writer, left)
        except CheckpointError as error:  # all files are damaged: others may have a state in memory
            warn(str(error))
            self._beginnings = Beginnings(self._folder, None, self._start, writer, left)
        return left

    def _remove_images_after(self, iteration: int) -> None:
        if self._keeper is not None:
            self._keeper.remove_after(iteration)

    # ------------------------------------------------------------ in an iteration
    def wait_copied(self) -> None:
        if self._keeper is not None:
            self._keeper.wait_copied()

    def wait_whole(self) -> None:
        if self._keeper is not None:
            self._keeper.wait_whole()

    def keep_boundary(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> None:
        keeper, (aside, self._aside) = self._keeper, (self._aside, None)
        if keeper is None:
            return
        self._note_members(members, generation, writer)
        if self._slot == self._writes:
            keeper.copy(self._gatherer, iteration, generation, writer, aside)
        elif keeper.has_files:
            keeper.hand_over(self._writes, iteration)
        keeper.remove_unwanted_cuts()

    def _note_members(self, members: Sequence[int], generation: int, writer: Writer) -> None:
        """Find the slot that keeps the state of this place in this node, the lowest one. Only once a generation, since
        it takes a look at all members."""
        if generation == self._generation:
            return
        same = [slot for slot in members if slot % writer.size == writer.place]
        here, self._nodes = self._node(self._slot), list(dict.fromkeys(map(self._node, same)))
        self._generation, self._writes = generation, min(slot for slot in same if self._node(slot) == here)
        wanted = min(1 + wanted_copies(), len({self._node(slot) for slot in members}))
        self._gives = len(self._nodes) < wanted

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
        number = self._nodes.index(self._node(self._slot))
        if number and self._keeper.aside.is_open:
            return False  # its agent is late: the first node writes this slice
        count = slices_of(self._gatherer.contents().size, len(self._nodes))
        if self._slot == self._writes and number < count and self.agent_makes_files:
            self._aside = Slice(number, count)
        return self._aside is not None

    # ------------------------------------------------------------ texts
    @property
    def bytes(self) -> int:
        """The most memory of the node that its images take: two that take turns, two cuts if other nodes get copies,
        and one while the agent makes a file of it."""
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
