"""A session's position in its training, and its reports: status, steps, and the memory that healing takes."""

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
    """The present iteration; between two iterations the next one."""
    train_iterations: int
    moment: tuple[Ledger, str]
    """Ledger and phase of the present or the last iteration: computing, reducing, synced or stepped. They are set
    together because another thread reads them."""
    loss: float | None = None
    """Loss of the last reduced iteration."""
    seconds: float = 0.0
    """Duration of the last stepped iteration."""

    @property
    def ledger(self) -> Ledger:
        return self.moment[0]

    @property
    def phase(self) -> str:
        return self.moment[1]


class RankReporter:
    """Reports to the agent, if there is one."""

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
        self._parameters = parameters  # of this rank's part of the model
        self._flops = flops  # of a micro-batch
        self.micro_batches_of: Callable[[int], int] = lambda iteration: at.ledger.total
        self.share: Callable[[], int] = lambda: 0
        self._last_reported: tuple[Any, ...] = ()  # the position in the last status

    @property
    def memory(self) -> str:
        """The memory of this rank that healing takes, in words; empty without an agent."""
        if self._channel is None:
            return ""
        undo = f"{self._gradients.snapshot_bytes / self._parameters:.1f} to undo a reduce ({SETTING}={chosen_place()})"
        return f"healing takes, in bytes a parameter: {undo}{self._local.memory_text(self._parameters)}"

    @property
    def next_one(self) -> int:
        """The iteration that follows the state of this rank."""
        at = self._at
        return at.ledger.iteration + (at.phase == "stepped") if self._member.inside else at.iteration

    # ------------------------------------------------------------ to the agent
    def progress(self) -> Status | None:
        """Return the status if this rank has come further while it trains. Called in the channel's thread."""
        member, (ledger, phase) = self._member, self._at.moment
        if member.state != "running" or self._last_reported == (ledger.iteration, phase, len(ledger.done)):
            return None
        status = member.status("running")
        return status if member.state == "running" else None

    def status(self, state: str) -> Status:
        """Return what the session knows of the rank's status."""
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
            kept=self._reachable_states(state),
            sharded=self._local.sharded,
            remembers=self._local.reports,
            outlives=notice.outlives_notice(),
            saves_in=persistence.folder,
            went_back=self._local.went_back if rests else None,
            share=self.share() if member.inside else 0,
            verified=persistence.verified,
        )

    def _micro_batches(self, ledger: Ledger, phase: str) -> int:
        """Return how many micro-batches a plan would deal: of the next iteration if this one may be stepped."""
        if not self._member.inside:
            return self.micro_batches_of(self._at.iteration)
        after = phase in ("synced", "stepped")
        return self.micro_batches_of(ledger.iteration + 1) if after else ledger.total

    def _reachable_states(self, state: str) -> list[tuple[int, str]]:
        """Return (iteration, mark) of each state with which this rank could go on if no rank trains any more."""
        if not self._local.reports or state not in ("waiting", "stopped", "standby"):
            return []
        return self._local.reachable_states(self.next_one, self._persistence.writer())

    def report_step(self, phases: dict[str, float]) -> None:
        """Report the step of the present iteration, with the ledger, in one message with the next status: mostly that
        of the next iteration. phases: seconds of its parts beside those that the gradients measure."""
        if self._channel is None:
            return
        at, member = self._at, self._member
        first = member.slot % member.layout.size == 0  # one rank reports what all ranks of the replica have computed
        left_out = at.ledger.skipped if member.replica == 0 else ()  # they count, with the weight 0
        self._channel.send_with_status(
            Step(
                generation=member.generation,
                iteration=at.ledger.iteration,
                micro_batches=[*at.ledger.done, *sorted(left_out)] if first else [],
                computed=list(at.ledger.computed) if first else [],
                total=at.ledger.total,
                seconds=at.seconds,
                loss=at.loss or 0.0,
                at=time.time(),
                phases={**self._gradients.seconds, **phases},
            )
        )
        if member.moments:
            self._channel.send(Timing(member.generation, time.time(), self._recovery_parts()))

    def _recovery_parts(self) -> dict[str, float]:
        """Return when each part of the recovery ended, in seconds since it began. A newcomer was not broken, and took
        no plan in the middle of an iteration, so it lacks these parts."""
        moments, self._member.moments = {**self._member.moments, "stepped": time.monotonic()}, {}
        began = min(moments.values())
        return {what: moment - began for what, moment in moments.items()}
