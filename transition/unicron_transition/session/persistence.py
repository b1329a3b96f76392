"""The state that outlives this process, in the node's memory and in files, and the schedule of checkpoints.

All ranks have to write the same iteration. So they tell each other in the commit, a collective of all, who wants a
checkpoint and who has not finished the last one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from unicron_transition.iteration.exchange import CommitResult
from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.session.member import RELAID, Member
from unicron_transition.snapshot.checkpoint import TURN_SECONDS, Checkpoints, Writer
from unicron_transition.snapshot.keeper import COPIES
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.save_interval import Risk

MOST_TOLD = 255  # characters of a name, `unicron_ctl.shared.protocol.ranges.NAME`


class SaveSchedule:
    """The schedule of one rank. checkpoints: None where the script makes none. local: the state in memory. risk(): what
    the job may lose."""

    def __init__(
        self, checkpoints: Checkpoints | None, local: LocalState, risk: Callable[[], Risk] = lambda: Risk(1, False)
    ):
        self._checkpoints, self._local, self._risk = checkpoints, local, risk
        self._filing_since: float | None = None  # the agent makes a file of what this rank has set aside
        self.writes = checkpoints is not None and checkpoints.destination is not None
        self._said = CommitResult()
        self._warned = False  # that one was left out
        self.asked = False  # somebody asked this rank's agent for the last one that was due

    @property
    def by_clock(self) -> bool:
        """Whether ranks without an agent have to agree on an iteration, too."""
        return self.writes and self._checkpoints is not None and self._checkpoints.by_clock

    @property
    def wanted(self) -> bool:
        """Whether this rank wants one: somebody has asked its agent, or its minutes are over."""
        if self._checkpoints is None or not self.writes:
            return False
        return self._local.asked or self._checkpoints.is_overdue(self._risk)

    @property
    def busy(self) -> bool:
        """Whether the agent is still making a file of what this rank has set aside."""
        return self._local.is_filing

    def begin_iteration(self) -> None:
        """Begin an iteration, of which no rank has said anything yet."""
        self._said = CommitResult()
        if self._filing_since is not None and not self.busy:
            self._note(written=time.monotonic() - self._filing_since)
            self._filing_since = None

    def _note(self, blocked: float = 0.0, written: float = 0.0) -> None:
        """Note the cost of this rank's part of a checkpoint."""
        clock = self._checkpoints.clock if self._checkpoints is not None else None
        if clock is not None and blocked:
            clock.note_blocked(blocked)
        if clock is not None and written:
            clock.note_written(written)

    def on_commit(self, said: CommitResult) -> None:
        """Note the result of this iteration's commit. A rank that steps by a plan has not heard it, which costs at most
        the checkpoint of that iteration."""
        self._said = said

    def is_due(self, iteration: int) -> bool:
        """Whether one is to be written when `iteration` iterations are done; the same in all ranks."""
        checkpoints = self._checkpoints
        if checkpoints is None or not (self._said.save or checkpoints.is_due(iteration)):
            return False
        if self._said.busy:
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
        self, iteration: int, state: TrainingState, members: Sequence[int], generation: int, writer: Writer
    ) -> None:
        """Store this rank's part of the checkpoint of `iteration`: its agent writes it, or else a thread of this
        rank."""
        assert self._checkpoints is not None
        began = time.monotonic()
        if self._local.set_aside(iteration, members, generation, writer):
            self._filing_since = began
        else:
            self._checkpoints.save(state, iteration, self._local.file_writer(writer))
            if self.asked:
                inform(f"the checkpoint of iteration {iteration} goes to {self._checkpoints.folder}")
        self._note(blocked=time.monotonic() - began)


class Persistence:
    """The part of one rank. checkpoints: None where the script makes none. local: the state in memory."""

    def __init__(self, member: Member, state: TrainingState, checkpoints: Checkpoints | None, local: LocalState):
        self._member, self._state, self.checkpoints, self.local = member, state, checkpoints, local
        self.schedule = SaveSchedule(checkpoints, local, self._risk)
        # Before the script goes elsewhere
        named = os.path.abspath(checkpoints.folder) if checkpoints is not None else ""
        self._folder = named if len(named) <= MOST_TOLD else ""
        self._began = time.monotonic()
        member.watch.on_memory = local.on_message

    def _risk(self) -> Risk:
        """Return what the job may lose, as far as this rank knows. A loss of a node is covered by replicas on others,
        and by the copies that agents and the ranks of a distributed optimizer keep."""
        member, copied = self._member, int(os.environ.get(COPIES) or 1) > 0
        covers = copied if self._state.sharded else member.replicas > 1 or (copied and self.local.reports)
        copies = covers and member.channel is not None and member.nodes > 1
        return Risk(member.nodes, copies, time.monotonic() - self._began, member.losses)

    @property
    def writes(self) -> bool:
        """Whether this rank writes a part of each checkpoint: those of the first replica do, and with a distributed
        optimizer all."""
        return self._state.sharded or self._member.replica == 0

    @property
    def folder(self) -> str:
        """The folder of the job's checkpoints, said by its first rank alone; empty where its name is too long to tell
        the controller."""
        return self._folder if self._is_first else ""

    @property
    def _is_first(self) -> bool:
        return self._member.members[:1] == [self._member.slot]

    def writer(self) -> Writer:
        """Return the place of this rank's part in a checkpoint."""
        member = self._member
        shard, shards = (member.replica, member.replicas) if self._state.sharded else (0, 1)
        layout = member.layout
        return Writer(member.slot % layout.size, layout.size, shard, shards, layout=layout.text, loss=self._state.loss)

    def find_start(self, start: int) -> int:
        """Return the iteration at which this rank stands before it is in a generation. start: at which the script
        begins.

        Raises :class:`checkpoint.CheckpointError` where there are checkpoints and none can be used.
        """
        return self.local.find_start(self.checkpoints, start, self.writer)

    def keep_boundary(self, iteration: int) -> None:
        """Keep the state at this iteration boundary in memory, and, where that is due, in a file."""
        here = self._member.members, self._member.generation, self.writer()
        if self.schedule.is_due(iteration):
            if self.writes:
                self.schedule.store(iteration, self._state, *here)
            if self.schedule.asked and self._is_first and self.checkpoints is not None and self.checkpoints.exports:
                self.checkpoints.exports.start(iteration, self.local.file_writer(here[-1]).mark)
        self.local.keep_boundary(iteration, *here)

    def rescue(self, iteration: int, why: str) -> None:
        """Write this rank's state to disk, for it ends before its time."""
        if self.checkpoints is not None:
            turn = 0 if self._state.sharded else self._member.replica
            apart = TURN_SECONDS if why == RELAID else None
            self.checkpoints.rescue(self._state, iteration, turn, self.writer(), why, apart)

    def finish(self, iteration: int) -> None:
        """Write the last checkpoint: the training is over."""
        if self.checkpoints is not None and self.writes:
            self.checkpoints.save_last(self._state, iteration, self.writer())
        self.local.close()
