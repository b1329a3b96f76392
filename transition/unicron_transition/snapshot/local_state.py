"""A rank's training state where it outlives the rank: what the session asks of it, whether it is whole in each rank
(`whole_state.py`) or sharded over the replicas (`sharded/sharded_state.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from unicron_detector.processes.rank_messages import Cut, Fetch, MemoryMessage, Plan, Save, SavedCheckpoint
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.checkpoint_file import Aside, Destination, note_destination
from unicron_transition.snapshot.cuts import Cuts
from unicron_transition.snapshot.migrate import TrainingState


class LocalState:
    """The state of one rank. The base class, for ranks without an agent, keeps nothing: the state is in files alone.

    sharded: its parts are in different ranks, with copies in others. reports: a rank at rest says what it could begin
    with (:meth:`reachable_states`) and reads nothing before a plan asks it to.
    """

    sharded = False
    reports = False

    def __init__(self, state: TrainingState):
        self._state = state
        self._folder: Path | None = None
        self._checkpoints: Checkpoints | None = None
        self._cuts: Cuts | None = None
        self._filing: Aside | None = None  # what the agent makes files of
        self._asked = False
        self._came = False  # another node's image, since the last look

    # ------------------------------------------------------------ before a generation
    def find_start(self, checkpoints: Checkpoints | None, start: int, writer: Callable[[], Writer]) -> int:
        """The iteration at which this rank stands before it is in a generation: that of the newest state there is, or
        `start`, at which the script begins. writer(): this rank's part of a checkpoint,
        where that is known before a generation.

        Raises :class:`checkpoint.CheckpointError` where there are checkpoints and none can be used.
        """
        saved = checkpoints.load(self._state) if checkpoints is not None else None
        return start if saved is None else saved

    def reachable_states(self, own: int, writer: Writer) -> list[tuple[int, str]]:
        """(iteration, mark) of the states with which this rank, at rest, could go on, the newest first. own: the
        iteration that comes next for the state of the job that it has, if it has one."""
        return []

    def shards_to_give(self) -> list[tuple[int, int, int, list[int]]]:
        """The shards that this rank, at rest, could give: (base, version, count of shards, which of them)."""
        return []

    # ------------------------------------------------------------ into a generation
    def note_has_state(self) -> None:
        """This rank has the state of the job."""

    def restore(self, plan: Plan, own: int) -> int | None:
        """The groups of `plan` are there. Where it has this rank begin with something, from its node's memory or from
        files, the state is that now: returns the iteration. None where the rank has what it needs, or gets it. own: as
        for :meth:`reachable_states`."""
        return None

    def enter_generation(self, plan: Plan, iteration: int) -> None:
        """Collective over the members of `plan`: take this rank's place among them. iteration: the one it is at."""

    def complete(self, plan: Plan, iteration: int) -> int:
        """Collective over the members of `plan`, once they have what one rank gives the others: take up what is
        sharded. Returns the iteration that this rank is at."""
        return iteration

    def goes_on(self, iteration: int) -> None:
        """The generation begins with the state with which `iteration` comes next."""

    # ------------------------------------------------------------ in an iteration
    def wait_copied(self) -> None:
        """Until the state may change."""

    def wait_whole(self) -> None:
        """Wait until what this rank keeps is whole. All do so before one of them writes over what is older."""

    def keep_step(self, version: int) -> None:
        """After a step, collective: keep what is sharded, and copies of it in other ranks."""

    def keep_boundary(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> None:
        """At an iteration boundary: keep what is whole, if this rank is the one that does so for its place in the
        node."""

    def close(self) -> None:
        """The training is over."""

    # ------------------------------------------------------------ checkpoints' files
    def set_aside(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> bool:
        """A checkpoint of `iteration` is due: whether the agent makes a file of this rank's part. Else the rank has to
        write it."""
        return False

    def file_writer(self, writer: Writer) -> Writer:
        """Returns whose part this rank's own file is."""
        return writer

    @property
    def is_filing(self) -> bool:
        """Whether the agent is still making a file of what this rank has set aside."""
        return self._filing is not None and self._filing.is_open

    @property
    def asked(self) -> bool:
        """Whether somebody wants a checkpoint, or what was to become the last one's file could not be set aside."""
        return self._asked or (self._filing is not None and self._filing.error is not None)

    @property
    def requested(self) -> bool:
        """Whether somebody wants a checkpoint."""
        return self._asked

    def forget_asked(self) -> None:
        """A checkpoint is written now."""
        self._asked = False
        if self._filing is not None and self._filing.error is not None:
            self._filing.forget()

    def note_destination(self) -> bool:
        """Tell the agent, beside the images, where checkpoints go; False where there are none, or it cannot be told."""
        folder, checkpoints = self._folder, self._checkpoints
        if folder is None or checkpoints is None or checkpoints.destination is None:
            return False
        with contextlib.suppress(OSError):  # the first copy says that the folder cannot be written to
            note_destination(folder, Destination(checkpoints.destination, checkpoints.keep))
            return True
        return False

    # ------------------------------------------------------------ words
    def on_message(self, message: MemoryMessage) -> None:
        """The agent's word of the node's memory, in the channel's thread."""
        match message:
            case Save():
                self._asked = True
            case Fetch():
                self._came = True
            case Cut() if self._cuts is not None:
                self._cuts.on_order(message)
            case SavedCheckpoint() if self._checkpoints is not None:
                self._checkpoints.newest = max(self._checkpoints.newest, message.iteration)

    def memory_text(self, parameters: int) -> str:
        """For people: what this takes of the rank's memory, in bytes for each of its `parameters`."""
        return ""

    @property
    def trouble(self) -> str:
        """Why the state is not kept in memory; empty where it is, or is not to be."""
        return ""
