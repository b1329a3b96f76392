"""The interface of a rank's training state that outlives the rank: whole in each rank (`whole_state.py`) or sharded
over the replicas (`sharded/sharded_state.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from unicron_detector.processes.rank_messages import Cut, Fetch, MemoryMessage, Plan, Save, SavedCheckpoint
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.checkpoint_file import Aside, Destination, note_destination
from unicron_transition.snapshot.cuts import Cuts
from unicron_transition.snapshot.image_format import agent_reads_images
from unicron_transition.snapshot.migrate import TrainingState


class LocalState:
    """The state of one rank. The base class, for ranks without an agent, keeps nothing but files."""

    sharded = False
    """Its parts are in different ranks, with copies in others."""
    reports = False
    """A rank at rest reports its :meth:`reachable_states`, and reads nothing before a plan asks it to."""

    def __init__(self, state: TrainingState):
        self._state = state
        self._folder: Path | None = None
        self._checkpoints: Checkpoints | None = None
        self._cuts: Cuts | None = None
        self._filing: Aside | None = None  # the image set aside for the agent
        self._asked = False
        self._came = False  # an image from another node came since the last look
        self.went_back: int | None = None
        """This rank has given its state up, which is unsound, and has not begun another one yet: the newest iteration
        that it knows to be verified, -1 for none."""
        self.verified = -1
        """The newest iteration that an audit has found sound, as far as this rank knows."""
        self._began = -1  # the first iteration that this process knows

    # ------------------------------------------------------------ before a generation
    def find_start(self, checkpoints: Checkpoints | None, start: int, writer: Callable[[], Writer]) -> int:
        """Return the iteration of the newest state there is, or `start`, with which the script begins. writer(): this
        rank's part of a checkpoint, as far as it is known before a generation.

        Raises :class:`checkpoint.CheckpointError` if there are checkpoints and none can be used.
        """
        saved = checkpoints.load(self._state) if checkpoints is not None else None
        return start if saved is None else saved

    def reachable_states(self, own: int, writer: Writer) -> list[tuple[int, str]]:
        """List (iteration, mark) of the states with which this rank, at rest, could go on, the newest first. own: the
        next iteration of the job's state that it has, if it has one."""
        return []

    def shards_to_give(self) -> list[tuple[int, int, int, list[int]]]:
        """List the shards that this rank, at rest, could give: (base, version, count of shards, their numbers)."""
        return []

    # ------------------------------------------------------------ into a generation
    def note_has_state(self) -> None:
        """Note that this rank has the state of the job."""

    def restore(self, plan: Plan, own: int) -> int | None:
        """Restore the state with which `plan` lets this rank begin, from its node's memory or from files, and return
        the iteration; None if the rank has its state, or gets it from others. The plan's groups must exist. own: as for
        :meth:`reachable_states`."""
        return None

    def enter_generation(self, plan: Plan, iteration: int) -> None:
        """Collective over the members of `plan`: take this rank's place among them. iteration: the present one."""

    def complete(self, plan: Plan, iteration: int) -> int:
        """Collective over the members of `plan`, after one rank gave its state to the others: complete the sharded
        part, and return this rank's iteration."""
        return iteration

    def goes_on(self, iteration: int, first: bool = False) -> None:
        """Note that the generation begins with the state after which `iteration` comes next. first: this rank is the
        first member."""
        self._began = iteration if self._began < 0 else self._began
        if self.went_back is not None:  # what was kept meanwhile, also by others, is unsound as well
            self._remove_images_after(iteration)
            self._set_aside_after(iteration, first)
            self.went_back, self.verified = None, min(self.verified, iteration)

    # ------------------------------------------------------------ what audits have found
    def note_verified(self, iteration: int, mark: str) -> None:
        """Note that an audit has found the state with which `iteration` began sound. mark: of its images."""
        self.verified = max(self.verified, iteration)

    def go_back(self, writer: Writer, first: bool) -> int:
        """Give up the state, which is unsound, with everything kept of it since the last verified one. If none is, only
        checkpoints are left that are no newer than the state with which this process began. Afterwards
        :meth:`reachable_states` lists sound states only. Waits for no other rank. first: this rank sets the checkpoints
        aside. Returns the newest iteration that is left.
        """
        saved = self._checkpoints.verified if self._checkpoints is not None else -1
        self.went_back = verified = max(self.verified, saved)
        left = verified if verified >= 0 else self._began
        self._remove_images_after(verified)
        self._set_aside_after(left, first or verified < 0)  # another rank may have begun later
        return left

    def _remove_images_after(self, iteration: int) -> None:
        """Remove the states after `iteration` from this node's memory."""

    def _set_aside_after(self, iteration: int, first: bool) -> None:
        if first and self._checkpoints is not None:
            self._checkpoints.set_aside_after(iteration)

    # ------------------------------------------------------------ in an iteration
    def wait_copied(self) -> None:
        """Wait until the state can change."""

    def wait_whole(self) -> None:
        """Wait until this rank's copy is whole. All ranks do so before one of them overwrites an older copy."""

    def keep_step(self, version: int) -> None:
        """Collective, after a step: keep the sharded part, and copies of it in other ranks."""

    def keep_boundary(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> None:
        """Keep the whole part at an iteration boundary, if this rank does so for its place in the node."""

    def close(self) -> None:
        """Release everything, because the training is over."""

    # ------------------------------------------------------------ checkpoints' files
    def set_aside(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> bool:
        """Set this rank's part of the checkpoint of `iteration` aside for the agent, or a slice of it that it shares
        with other nodes, and return True; False if the agent writes nothing of it."""
        return False

    def file_writer(self, writer: Writer) -> Writer:
        """Return the part of the checkpoint in this rank's own file."""
        return writer

    @property
    def is_filing(self) -> bool:
        """Whether the agent has yet to make the file of an image set aside."""
        return self._filing is not None and self._filing.is_open

    @property
    def is_awaited(self) -> bool:
        """Whether the next checkpoint has to wait for that file."""
        return self._filing is not None and self._filing.is_awaited

    @property
    def asked(self) -> bool:
        """Whether a checkpoint was requested, or the image for the last one could not be set aside."""
        return self._asked or (self._filing is not None and self._filing.error is not None)

    @property
    def requested(self) -> bool:
        """Whether a checkpoint was requested."""
        return self._asked

    def forget_asked(self) -> None:
        """Forget the request, because a checkpoint is written now."""
        self._asked = False
        if self._filing is not None and self._filing.error is not None:
            self._filing.forget()

    @property
    def agent_makes_files(self) -> bool:
        """Whether the agent makes files of what this rank sets aside. One of an earlier release would take its images
        for damaged and remove them."""
        return agent_reads_images() and self.note_destination()

    def note_destination(self) -> bool:
        """Leave the folder of checkpoints in a note for the agent; False if there is none, or that fails."""
        folder, checkpoints = self._folder, self._checkpoints
        if folder is None or checkpoints is None or checkpoints.destination is None:
            return False
        with contextlib.suppress(OSError):  # the first copy will report that the folder cannot be written to
            note_destination(folder, Destination(checkpoints.destination, checkpoints.keep))
            return True
        return False

    # ------------------------------------------------------------ messages and texts
    def on_message(self, message: MemoryMessage) -> None:
        """Take an agent's message about the node's memory, in the channel's thread."""
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
        """Describe this state's memory for people, in bytes for each of the rank's `parameters`."""
        return ""

    @property
    def trouble(self) -> str:
        """Why the state is not kept in memory; "" if it is, or should not be."""
        return ""
