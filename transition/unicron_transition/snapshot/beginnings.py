"""What a rank that starts could begin with: the images in its node's memory, the whole checkpoints on disk, and what
the script has made; nothing of it is read before a plan says that others are to have it from this rank
(docs/design/memory.md)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.snapshot import contents, image_format
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer, load_image
from unicron_transition.snapshot.folders import Found
from unicron_transition.snapshot.migrate import TrainingState

MOST = 8  # iterations that are told of


class Unusable(RuntimeError):
    """What this rank was to begin with is damaged: it says what else it has, and waits for another plan."""


class Beginnings:
    """The choices of one rank. writer: says its place and layout. memory: the folder of the images, if there is one.
    start: the iteration with which the script begins.

    Raises :class:`checkpoint.CheckpointError` where there are checkpoints and none can be used.
    """

    def __init__(self, memory: Path | None, checkpoints: Checkpoints | None, start: int, writer: Writer):
        self._memory, self._checkpoints, self._start, self._writer = memory, checkpoints, start, writer
        self.untouched = True  # the state is what the script has made
        self._images: list[image_format.Found] = []
        self._files: list[Found] = []
        self._list_choices()

    @property
    def told(self) -> list[tuple[int, str]]:
        """(iteration, mark) of each, the newest first; of one iteration the one that would be taken."""
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
        """The iteration to begin with where nobody has another."""
        return max((iteration for iteration, _ in self.told), default=self._start)

    def take_up(self, state: TrainingState, iteration: int | None) -> int:
        """Put what there is of `iteration`, or the newest, into `state`; returns the iteration. From memory if it is
        there, else from the file.

        Raises Unusable where it is damaged, and CheckpointError where nothing else is left or it is of another model.
        """
        wanted = self.newest if iteration is None else iteration
        if wanted not in (each for each, _ in self.told):
            raise Unusable(f"this rank has nothing of iteration {wanted}")
        mark = dict(self.told)[wanted]
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
        """Another image may be there. has_state: this rank has the job's state, and needs no file any more."""
        self._writer = writer
        if has_state:
            self._checkpoints, self.untouched = None, False
        self._list_choices()

    def _list_choices(self) -> None:
        self._files = self._checkpoints.choices() if self._checkpoints is not None else []
        there = image_format.inventory(self._memory, self._passed_over) if self._memory is not None else ()
        found = [each for each in there if self._is_mine(each)]
        self._images = sorted(found, key=lambda each: (each.key.iteration, each.key.base), reverse=True)

    def _passed_over(self, error: image_format.BadImage) -> None:
        if self.untouched:  # once, at the start: later on others are writing theirs
            warn(f"training state in memory passed over: {error}")

    def _is_mine(self, found: image_format.Found) -> bool:
        """Whether the image is of this rank's place in this layout."""
        writer, key = self._writer, found.key
        if (key.kind, key.place, key.size) != (image_format.STATE, writer.place, writer.size):
            return False
        try:
            return bool(contents.opened(found).head.layout == writer.layout)
        except (image_format.BadImage, OSError) as error:
            warn(f"training state in memory passed over: {error}")
            return False

    def _take_image(self, state: TrainingState, found: image_format.Found) -> bool:
        try:
            load_image(state, found.path)
        except (image_format.BadImage, OSError) as error:
            warn(f"training state in memory passed over: {error}")
            with contextlib.suppress(OSError, image_format.BadImage):
                if image_format.read_page(found.path) == found:  # nobody has overwritten it meanwhile
                    found.path.unlink()
            return False
        return True
