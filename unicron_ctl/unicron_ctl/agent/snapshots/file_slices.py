"""Slices of checkpoints' files: this node has written its own, and waits for those of the others
(docs/design/checkpoints.md, "Slices").

When the other nodes have done nothing for a while, since they were lost or their disks are full, it writes what they
lack. So a file becomes complete as long as one of its nodes lives. The order of the slices decides who is first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from unicron_transition.snapshot import folders
from unicron_transition.snapshot.checkpoint_file import Slice, slice_in
from unicron_transition.snapshot.folders import FileInProgress, Part, Turn
from unicron_transition.snapshot.image_format import ImagePage

TURN_SECONDS = 5.0  # without a sign of the other nodes; the first node waits once, the second twice, ...
LEAST_PAUSE, MOST_PAUSE = 0.5, 2.0  # seconds between two looks at the folder; it doubles


class Findings(NamedTuple):
    """The results of one look at the folder."""

    complete: list[ImagePage]
    """The images whose files are complete."""
    due: list[ImagePage]
    """The images of which this node must write the other slices."""
    differing: list[tuple[Path, list[int]]]
    """Slices of this node, and the numbers of those with which they do not go together, once for each state."""


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
        self._open: dict[ImagePage, Path] = {}
        self._turns: dict[_State, Turn] = {}
        self._differing: set[tuple[int, str]] = set()  # iteration and mark of the states of which this has told
        self._next_look = self._pause = 0.0

    def __contains__(self, image: ImagePage) -> bool:
        return image in self._open

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, image: ImagePage, path: Path) -> None:
        """Note that this node has written its slice of an image, the file `path`."""
        self._open[image] = path
        self._next_look = self._pause = 0.0

    def forget_others(self, images: Iterable[ImagePage]) -> None:
        """Forget all but these images: the others were released or replaced."""
        self._open = {image: self._open[image] for image in images if image in self._open}
        self._differing &= {(image.key.iteration, image.key.mark) for image in self._open}

    def look_at_files(self, now: float, files: Look) -> Findings:
        """Look at the folder, if it is time to."""
        seen = Findings([], [], [])
        if now < self._next_look:
            return seen
        self._pause = min(MOST_PAUSE, 2 * self._pause or LEAST_PAUSE)
        self._next_look = now + self._pause
        states = dict(self._states())
        self._turns = {state: self._turns.get(state) or _make_turn(state, now) for state in states}
        for state, turn in self._turns.items():
            found = [each for each in files(state.iteration) if each.path.name.startswith(state.mark)]
            turn.note_files(found, now)
            self._compare(state, states[state], found, seen)
            for part, image in states[state].items():
                if part not in turn.missing:
                    seen.complete.append(image)
                elif now >= turn.until:
                    seen.due.append(image)
        return seen

    def _compare(
        self, state: _State, images: dict[Part, ImagePage], found: Iterable[FileInProgress], seen: Findings
    ) -> None:
        """Compare this node's slices with the others', which must be of the same state."""
        about = state.iteration, state.mark
        for image in images.values() if about not in self._differing else ():
            if others := folders.slices_of_other_states(self._open[image], found):
                self._differing.add(about)
                return seen.differing.append((self._open[image], others))

    def _states(self) -> Iterator[tuple[_State, dict[Part, ImagePage]]]:
        together: dict[tuple[int, str, Slice], dict[Part, ImagePage]] = {}
        for image, path in self._open.items():
            key = image.key
            together.setdefault((key.iteration, key.mark, slice_in(path)), {})[folders.part_of(key)] = image
        for about, images in together.items():
            yield _State(*about, tuple(sorted(images))), images


def _make_turn(state: _State, now: float) -> Turn:
    patience = TURN_SECONDS * (1 + state.cut.number)
    return Turn(dict.fromkeys(state.parts, state.iteration), patience, now, exactly=True)
