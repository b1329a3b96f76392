"""The position of a session in its training, and its reports: the rank's status, its steps, the memory that healing
takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unicron_detector.processes.rank_messages import Status, Step, Timing
from unicron_transition.iteration import notice
from unicron_transition.iteration.accumulation import Accumulation
from unicron_transition.iteration.gradient_copies import SETTING, chosen_place
from unicron_transition.iteration.ledger import Ledger
from unicron_transition.session.member import Member
from unicron_transition.session.persistence import Persistence


@dataclass
class SessionPosition:
    """The position of a session in its training."""

    iteration: int
    """The iteration at hand; between two of them the next one."""
    train_iterations: int
    moment: tuple[Ledger, str]
    """Ledger and phase of the one at hand or the last one, set together, because another thread reads them. The phase
    is computing, reducing, synced or stepped."""
    loss: float | None = None
    """Of the last one that was reduced."""
    seconds: float = 0.0
    """Of the last one that was stepped."""

    @property
    def ledger(self) -> Ledger:
        return self.moment[0]

    @property
    def phase(self) -> str:
        return self.moment[1]


class RankReporter:
    """Reports to the agent, where there is one. parameters: of this rank's part of the model. flops: of a
    micro-batch."""

    def __init__(
        self,
        at: SessionPosition,
        member: Member,
        gradients: Accumulation,
        persistence: Persistence,
        parameters: int,
        flops: float,
    ):
        self._at, self._member, self._channel = at, member, member.channel
        self._gradients, self._persistence, self._local = gradients, persistence, persistence.local
        self._parameters, self._flops = parameters, flops
        self.micro_batches_of: Callable[[int], int] = lambda iteration: at.ledger.total
        self._last_reported: tuple[Any, ...] = ()  # how far the last status has said that this rank is

    @property
    def memory(self) -> str:
        """The memory that healing takes of this rank, in words; empty where nobody heals."""
        if self._channel is None:
            return ""
        undo = f"{self._gradients.snapshot_bytes / self._parameters:.1f} to undo a reduce ({SETTING}={chosen_place()})"
        return f"healing takes, in bytes a parameter: {undo}{self._local.memory_text(self._parameters)}"

    @property
    def next_one(self) -> int:
        """The iteration that comes next for the state that this rank has."""
        at = self._at
        return at.ledger.iteration + (at.phase == "stepped") if self._member.inside else at.iteration

    # ------------------------------------------------------------ to the agent
    def progress(self) -> Status | None:
        """Return the status of a rank that trains, if it has come further than the last one says. Called in the
        channel's thread."""
        member, (ledger, phase) = self._member, self._at.moment
        if member.state != "running" or self._last_reported == (ledger.iteration, phase, len(ledger.done)):
            return None
        status = member.status("running")
        return status if member.state == "running" else None

    def status(self, state: str) -> Status:
        """Return the rank's status, as far as the session knows it."""
        at, member, persistence = self._at, self._member, self._persistence
        (ledger, phase), rests = at.moment, state in ("stopped", "standby", "waiting")
        self._last_reported = ledger.iteration, phase, len(ledger.done)
        keeps = member.inside and (self._gradients.undoable or not rests)
        return Status(
            state,
            shards=self._local.shards_to_give() if rests else [],
            iteration=ledger.iteration if member.inside else at.iteration,
            phase=phase if member.inside else "computing",
            done=list(ledger.done) if keeps else [],
            micro_batches=self._micro_batches(ledger, phase),
            train_iterations=at.train_iterations,
            flops_per_iteration=self._flops * ledger.total,
            iteration_seconds=at.seconds,
            loss=at.loss,
            saved=-1 if persistence.checkpoints is None else persistence.checkpoints.newest,
            forgets=self._local.trouble,
            kept=self._has(state),
            sharded=self._local.sharded,
            remembers=self._local.reports,
            outlives=notice.outlives_notice(),
            saves_in=persistence.folder,
        )

    def _micro_batches(self, ledger: Ledger, phase: str) -> int:
        """Return the micro-batches that a plan would deal: of the next iteration, if this one may be stepped by
        then."""
        if not self._member.inside:
            return self.micro_batches_of(self._at.iteration)
        after = phase in ("synced", "stepped")
        return self.micro_batches_of(ledger.iteration + 1) if after else ledger.total

    def _has(self, state: str) -> list[tuple[int, str]]:
        """Return (iteration, mark) of the states with which this rank can go on where nobody trains any more."""
        if not self._local.reports or state not in ("waiting", "stopped", "standby"):
            return []
        return self._local.reachable_states(self.next_one, self._persistence.writer())

    def report_step(self, phases: dict[str, float]) -> None:
        """Report that the iteration at hand is stepped: one message has the proof and the rank's status. phases:
        seconds of its parts, beside those that the gradients know."""
        if self._channel is None:
            return
        at, member = self._at, self._member
        speaks = member.slot % member.layout.size == 0  # one of the replica's ranks says what all of them have computed
        self._channel.send(
            Step(
                generation=member.generation,
                iteration=at.ledger.iteration,
                micro_batches=at.ledger.done if speaks else [],
                computed=at.ledger.computed if speaks else [],
                total=at.ledger.total,
                seconds=at.seconds,
                loss=at.loss or 0.0,
                at=time.time(),
                phases={**self._gradients.seconds, **phases},
                status=member.status("running"),
            )
        )
        if member.moments:
            self._channel.send(Timing(member.generation, time.time(), self._recovery_parts()))

    def _recovery_parts(self) -> dict[str, float]:
        """Return when each part of the recovery ended, in seconds since it began: broken, caught, planned, grouped,
        entered, computed, stepped. A newcomer was not broken, and took no plan in the middle of an iteration."""
        moments, self._member.moments = {**self._member.moments, "stepped": time.monotonic()}, {}
        began = min(moments.values())
        return {what: moment - began for what, moment in moments.items()}
