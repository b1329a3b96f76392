"""The state that outlives this process, in the node's memory and in files, and the schedule of checkpoints.

All ranks must write the same iteration. So the commit, a collective of all ranks, carries who wants a checkpoint and
who has not finished the last one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from unicron_transition.iteration import flips
from unicron_transition.iteration.exchange import CommitResult
from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.session import flipped_images
from unicron_transition.session.member import RELAID, Member
from unicron_transition.snapshot.checkpoint import TURN_SECONDS, Checkpoints, Writer
from unicron_transition.snapshot.image_format import memory_folder
from unicron_transition.snapshot.keeper import COPIES
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.save_interval import Risk, SaveClock

LONGEST_NAME = 255  # characters, `unicron_ctl.shared.protocol.ranges.NAME`


class SaveSchedule:
    """The schedule of one rank's checkpoints; `local` is the state in memory."""

    def __init__(
        self, checkpoints: Checkpoints | None, local: LocalState, risk: Callable[[], Risk] = lambda: Risk(1, False)
    ):
        self._checkpoints, self._local = checkpoints, local
        self._risk = risk  # returns what the job may lose
        self._filing_since: float | None = None  # the agent is making a file of what this rank has set aside
        self.writes = checkpoints is not None and checkpoints.destination is not None
        self._commit = CommitResult()
        self._warned = False  # of a checkpoint that was skipped
        self.asked = False  # a user asked for the last one that was due

    @property
    def by_clock(self) -> bool:
        """Whether even ranks without an agent have to agree on an iteration."""
        return self.writes and self._checkpoints is not None and self._checkpoints.by_clock

    @property
    def wanted(self) -> bool:
        """Whether this rank wants a checkpoint: its agent was asked for one, or its minutes are over."""
        if self._checkpoints is None or not self.writes:
            return False
        return self._local.asked or self._checkpoints.is_overdue(self._risk)

    @property
    def busy(self) -> bool:
        """Whether the next checkpoint has to wait for the file of what this rank has set aside."""
        return self._local.is_awaited

    def begin_iteration(self) -> None:
        """Forget the last commit, and note how long the file of the last checkpoint took."""
        self._commit = CommitResult()
        if self._filing_since is not None and not self._local.is_filing:
            if self._clock is not None:
                self._clock.note_written(time.monotonic() - self._filing_since)
            self._filing_since = None

    @property
    def _clock(self) -> SaveClock | None:
        return self._checkpoints.clock if self._checkpoints is not None else None

    def on_commit(self, result: CommitResult) -> None:
        """Note the commit's result. A rank that steps by a plan gets none, and may miss a checkpoint."""
        self._commit = result

    def is_due(self, iteration: int) -> bool:
        """Whether to write a checkpoint after `iteration` iterations; all ranks get the same answer."""
        checkpoints = self._checkpoints
        if checkpoints is None or not (self._commit.save or checkpoints.is_due(iteration)):
            return False
        if self._commit.busy:
            if self.busy and not self._warned:
                self._warned = True
                warn(
                    f"no checkpoint of iteration {iteration}: the one before is still being written; give a longer "
                    "interval or a faster file system"
                )
            return False
        checkpoints.restart_clock()
        self.asked = self._local.requested
        self._local.forget_asked()
        return True

    def store(
        self,
        iteration: int,
        state: TrainingState,
        members: Sequence[int],
        generation: int,
        writer: Writer,
        alone: bool = True,
    ) -> None:
        """Store this rank's part of the checkpoint of `iteration`, by the agent or, if alone, by a thread of this rank.
        alone: no other rank writes it if the agent does not."""
        assert self._checkpoints is not None
        began = time.monotonic()
        if self._local.set_aside(iteration, members, generation, writer):
            self._filing_since = began
        elif alone:
            self._checkpoints.save(state, iteration, self._local.file_writer(writer))
            if self.asked:
                inform(f"the checkpoint of iteration {iteration} goes to {self._checkpoints.folder}")
        else:
            return
        if self._clock is not None:
            self._clock.note_blocked(time.monotonic() - began)


class Persistence:
    """One rank's state beyond the end of its process, in memory and in checkpoints."""

    def __init__(self, member: Member, state: TrainingState, checkpoints: Checkpoints | None, local: LocalState):
        self._member, self._state = member, state
        self.checkpoints = checkpoints  # None if the script makes none
        self.local = local  # the state in memory
        self.schedule = SaveSchedule(checkpoints, local, self._risk)
        # Now, before the script changes its working directory
        named = os.path.abspath(checkpoints.folder) if checkpoints is not None else ""
        self._folder = named if len(named) <= LONGEST_NAME else ""
        self._began = time.monotonic()
        self._boundary = -1, ""  # iteration and mark of the state at the last boundary
        self._unverified: tuple[int, str] | None = None  # the same of the last checkpoint, until an audit has passed
        member.watch.on_memory = local.on_message

    def _risk(self) -> Risk:
        """Return what the job may lose, as far as this rank knows. Replicas on other nodes cover the loss of a node,
        and so do the copies that agents and the ranks of a distributed optimizer keep."""
        member, copied = self._member, int(os.environ.get(COPIES) or 1) > 0
        covers = copied if self._state.sharded else member.replicas > 1 or (copied and self.local.reports)
        copies = covers and member.channel is not None and member.nodes > 1
        return Risk(member.nodes, copies, time.monotonic() - self._began, member.losses)

    @property
    def writes(self) -> bool:
        """Whether this rank writes a part of each checkpoint, alone if need be: the first replica, and all ranks with
        shards. Other replicas write slices through their agents."""
        return self._state.sharded or self._member.replica == 0

    @property
    def folder(self) -> str:
        """The folder of the job's checkpoints, from the first rank only; empty if it is too long for a message."""
        return self._folder if self._is_first else ""

    @property
    def verified(self) -> int:
        """The newest verified iteration, from the first rank only; -1 for none."""
        return self.local.verified if self._is_first else -1

    @property
    def _is_first(self) -> bool:
        return self._member.members[:1] == [self._member.slot]

    def writer(self) -> Writer:
        """Return the place of this rank's part in a checkpoint."""
        member = self._member
        shard, shards = (member.replica, member.replicas) if self._state.sharded else (0, 1)
        layout = member.layout
        return Writer(member.slot % layout.size, layout.size, shard, shards, layout=layout.text, loss=self._state.loss)

    def keep_boundary(self, iteration: int) -> None:
        """Keep the state at this iteration boundary in memory and, if a checkpoint is due, in a file."""
        flips.at_boundary(self._state.model, self._state.optimizer)
        here = self._member.members, self._member.generation, self.writer()
        if iteration <= self._boundary[0]:
            self._unverified = None  # of a past that the job has left
        self._boundary = iteration, here[-1].mark
        if self.schedule.is_due(iteration):
            self._unverified = iteration, self.local.file_writer(here[-1]).mark
            self.schedule.store(iteration, self._state, *here, alone=self.writes)
            if self.schedule.asked and self._is_first and self.checkpoints is not None and self.checkpoints.exports:
                self.checkpoints.exports.start(iteration, self.local.file_writer(here[-1]).mark)
        self.local.keep_boundary(iteration, *here)
        flipped_images.strike(self.local, self._member.slot, memory_folder(), self.checkpoints)

    def note_verified(self, iteration: int) -> None:
        """Note that an audit has found the state with which `iteration` began sound. All ranks call it in that
        iteration, before the loss of the state changes. A wrong state stays wrong, so the last checkpoint before it is
        sound, too."""
        at, mark = self._boundary
        self.local.note_verified(iteration, mark if at == iteration else self.writer().mark)
        saved, self._unverified = self._unverified, None
        if saved is not None and saved[0] > iteration:
            self._unverified = saved
        elif saved is not None and self.checkpoints is not None and self._is_first:
            self.checkpoints.note_verified(*saved)

    def go_back(self) -> int:
        """Give up the state of this rank (:meth:`LocalState.go_back`)."""
        self._boundary, self._unverified = (-1, ""), None
        return self.local.go_back(self.writer(), self._is_first)

    def rescue(self, iteration: int, why: str) -> None:
        """Write this rank's state to disk because the rank ends early."""
        if self.checkpoints is not None:
            turn = 0 if self._state.sharded else self._member.replica
            apart = TURN_SECONDS if why == RELAID else None
            self.checkpoints.rescue(self._state, iteration, turn, self.writer(), why, apart)

    def finish(self, iteration: int) -> None:
        """Write the last checkpoint: the training is over."""
        if self.checkpoints is not None and self.writes:
            self.checkpoints.save_last(self._state, iteration, self.writer())
        self.local.close()
