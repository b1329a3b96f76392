"""Slices of checkpoints' files: this node has written its own, and waits for those of the others
(docs/design/checkpoints.md, "Slices").

When the other nodes have done nothing for a while, since they were lost or their disks are full, it writes what they
lack. So a file becomes complete as long as one of its nodes lives. The order of the slices decides who is first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from unicron_transition.snapshot import folders
from unicron_transition.snapshot.checkpoint_file import Slice
from unicron_transition.snapshot.folders import FileInProgress, Part, Turn
from unicron_transition.snapshot.image_format import ImagePage

TURN_SECONDS = 5.0  # without a sign of the other nodes; the first node waits once, the second twice, ...
LEAST_PAUSE, MOST_PAUSE = 0.5, 2.0  # seconds between two looks at the folder; it doubles
Look = Callable[[int], Iterable[FileInProgress]]  # returns the files of checkpoints from an iteration on


class _State(NamedTuple):
    """States of several places that the same nodes write, in the same order."""

    iteration: int
    mark: str
    cut: Slice
    parts: tuple[Part, ...]


class OpenSlices:
    """The images of which this node has written its slice, while their files are not complete."""

    def __init__(self) -> None:
        self._open: dict[ImagePage, Slice] = {}
        self._turns: dict[_State, Turn] = {}
        self._next_look = self._pause = 0.0

    def __contains__(self, image: ImagePage) -> bool:
        return image in self._open

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, image: ImagePage, cut: Slice) -> None:
        """Note that this node has written its slice of an image."""
        self._open[image] = cut
        self._next_look = self._pause = 0.0

    def forget_others(self, images: Iterable[ImagePage]) -> None:
        """Forget all but these images: the others were released or replaced."""
        self._open = {image: self._open[image] for image in images if image in self._open}

    def look_at_files(self, now: float, files: Look) -> tuple[list[ImagePage], list[tuple[ImagePage, Slice]]]:
        """Look at the folder, if it is time to, and return the images whose files are complete, and those of which this
        node must write the other slices."""
        complete: list[ImagePage] = []
        due: list[tuple[ImagePage, Slice]] = []
        if now < self._next_look:
            return complete, due
        self._pause = min(MOST_PAUSE, 2 * self._pause or LEAST_PAUSE)
        self._next_look = now + self._pause
        states = dict(self._states())
        self._turns = {state: self._turns.get(state) or _make_turn(state, now) for state in states}
        for state, turn in self._turns.items():
            found = [each for each in files(state.iteration) if each.path.name.startswith(state.mark)]
            turn.note_files(found, now)
            for part, image in states[state].items():
                if part not in turn.missing:
                    complete.append(image)
                elif now >= turn.until:
                    due.append((image, state.cut))
        return complete, due

    def _states(self) -> Iterator[tuple[_State, dict[Part, ImagePage]]]:
        together: dict[tuple[int, str, Slice], dict[Part, ImagePage]] = {}
        for image, cut in self._open.items():
            key = image.key
            together.setdefault((key.iteration, key.mark, cut), {})[folders.part_of(key)] = image
        for about, images in together.items():
            yield _State(*about, tuple(sorted(images))), images


def _make_turn(state: _State, now: float) -> Turn:
    patience = TURN_SECONDS * (1 + state.cut.number)
    return Turn(dict.fromkeys(state.parts, state.iteration), patience, now, exactly=True)
