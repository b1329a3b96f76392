"""What of the training outlives this process: the state in the node's memory and in files, and what a rank begins with
of it."""

from __future__ import annotations

from unicron.detector.processes.rank_messages import MemoryMessage, Save, Saved
from unicron.transition.session.member import RELAID, Member
from unicron.transition.session.save_schedule import Saving
from unicron.transition.sharded.safekeeping import Safekeeping
from unicron.transition.snapshot.checkpoint import TURN_SECONDS, Checkpoints, Writer
from unicron.transition.snapshot.images import memory_folder
from unicron.transition.snapshot.migrate import TrainingState
from unicron.transition.snapshot.remembered import Remembered


class Persistence:
    """Of one rank. checkpoints: None where the script makes none. kept: the states of a distributed optimizer, which
    lie in memory from the beginning."""

    def __init__(self, member: Member, state: TrainingState, checkpoints: Checkpoints | None, kept: Safekeeping | None):
        self._member, self._state, self.checkpoints, self._kept = member, state, checkpoints, kept
        self.remembered = Remembered(member.slot, state)
        self.saving = Saving(checkpoints, self.remembered, kept)
        member.watch.on_memory = self._hear

    def _hear(self, message: MemoryMessage) -> None:
        """What the agent says of the node's memory, in the channel's thread: of files to one alone, whoever keeps this
        rank's state."""
        if self._kept is not None and not isinstance(message, Save | Saved):
            self._kept.hear(message)
        else:
            self.remembered.hear(message)

    # ------------------------------------------------------------ this rank's part
    @property
    def writes(self) -> bool:
        """This rank writes a part of each checkpoint: those of the first replica do, and with a distributed optimizer
        all."""
        return self._state.sharded or self._member.replica == 0

    def writer(self) -> Writer:
        """What this rank's part is to the whole."""
        member = self._member
        shard, shards = (member.replica, member.replicas) if self._state.sharded else (0, 1)
        layout = member.layout
        return Writer(member.slot % layout.size, layout.size, shard, shards, layout=layout.text, loss=self._state.loss)

    # ------------------------------------------------------------ from the beginning to the end
    def begin(self, start: int) -> tuple[int, bool]:
        """Where this rank stands before it is in a generation: at the newest there is, or at iteration `start`. Returns
        the iteration, and whether its checkpoint is not read yet, because memory holds a state that is as new.

        Raises :class:`checkpoint.CheckpointError` where there are checkpoints and none can be used.
        """
        kept, checkpoints = self._kept, self.checkpoints
        if self._member.channel is not None and kept is None:  # nothing is read before a plan asks for it
            return self.remembered.look(checkpoints, start, self.writer()), False
        saved, unread = None, False
        if checkpoints is not None:
            newest = next(iter(checkpoints.found()), None) if kept is not None else None
            unread = newest is not None and kept is not None and kept.remembered >= newest.iteration
            saved = newest.iteration if newest is not None and unread else checkpoints.load(self._state)
        if kept is not None:
            self.remembered.note(checkpoints, memory_folder())
        if kept is not None and (saved is None or unread):
            kept.check_untouched()
        return start if saved is None else saved, unread

    def boundary(self, iteration: int) -> None:
        """The state at this iteration boundary goes to memory, and, where that is due, to a file."""
        here = self._member.members, self._member.generation, self.writer()
        due = self.saving.due(iteration) and self.writes
        aside = due and self.saving.store(iteration, self._state, *here)
        self.remembered.keep(iteration, *here, aside)

    def rescue(self, iteration: int, why: str) -> None:
        """What this rank knows goes to disk, for it ends before its time."""
        if self.checkpoints is not None:
            turn = 0 if self._state.sharded else self._member.replica
            apart = TURN_SECONDS if why == RELAID else None
            self.checkpoints.rescue(self._state, iteration, turn, self.writer(), why, apart)

    def finish(self, iteration: int) -> None:
        """The training is over."""
        if self.checkpoints is not None and self.writes:
            self.checkpoints.save_last(self._state, iteration, self.writer())
        self.remembered.close()
