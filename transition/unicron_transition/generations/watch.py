"""A rank's knowledge of its generation, from the channel's thread for the main thread (docs/design/generations.md).

Invariants, in whatever order and however often messages come:

- The numbers of broken, withdrawn and acknowledged generations never fall. A message about an older generation is
  ignored, and a repeated one does no harm.
- A Break ends every generation up to its number, including those that are offered or being entered. No plan or offer
  of such a generation is held.
- A member holds a boundary plan as an offer and enters it at a boundary; it enters any other plan at once.
- The unblocking thread breaks connections only while the generation is over and the main thread neither has
  acknowledged that nor changes the parameters. In a replica that is in its schedule it breaks nothing inside, unless
  one of the replica's own ranks is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from unicron_detector.processes import rank_messages
from unicron_detector.processes.rank_messages import Plan

KICK_SECONDS = 0.02  # between two attempts: the main thread may enter a collective late


def _newer(plan: Plan, held: Plan | None) -> Plan:
    return held if held is not None and held.generation > plan.generation else plan


class PlanTimeout(RuntimeError):
    """Raised when no plan came in time: the job cannot be healed now."""


class RankDismissed(SystemExit):
    """Raised in a rank that ends so that the job can continue in another layout. The exit status is EX_TEMPFAIL of
    sysexits(3): its process is started again."""

    def __init__(self) -> None:
        super().__init__(75)


class Watch:
    """The knowledge of one rank. Thread-safe.

    A thread of its own calls `unblock(inside)` again and again while the main thread has not acknowledged a Break;
    `inside` includes the connections inside the replica.
    """

    def __init__(self, slot: int, unblock: Callable[[bool], Any]):
        self.slot = slot
        self._unblock = unblock
        self._changed = threading.Condition()
        self._active = 0  # the generation that the main thread is in or enters
        self._member = False  # the rank has a place in the job, so offers wait for a boundary
        self._joining = False  # as a newcomer, the rank waits for the others or enters with them
        self._withdrawn = 0
        self._broken = 0
        self._acknowledged = 0
        self._plan: Plan | None = None
        self._offer: Plan | None = None
        self._replica: frozenset[int] = frozenset()
        self._hit = False  # a rank of this replica is lost
        self._cut = False  # the connections inside the replica were broken
        self._sheltered = False  # the main thread is in a schedule that losses of other replicas do not end
        self._held_off = False  # the main thread changes the parameters
        self._dismissed = False
        self._came = False  # an image has come into the node's memory
        self.on_memory: Callable[[rank_messages.MemoryMessage], None] = lambda message: None  # in the channel's thread
        self.broken_at = 0.0  # on the monotonic clock, for the timing of a recovery
        threading.Thread(target=self._kick, name="unicron-unblock", daemon=True).start()

    # ------------------------------------------------------------ the channel's thread
    def on_message(self, message: rank_messages.ToRank) -> None:
        """Handle the agent's messages about generations and about the node's memory."""
        match message:
            case rank_messages.Break():
                self._on_break(message.generation, frozenset(message.lost))
            case rank_messages.Withdraw():
                self._on_withdraw(message.generation)
            case Plan():
                self._on_plan(message)
            case rank_messages.StopRank():
                with self._changed:
                    self._dismissed = True
                    self._changed.notify_all()
            case rank_messages.Cut() | rank_messages.Fetch() | rank_messages.Save() | rank_messages.SavedCheckpoint():
                self.on_memory(message)
                with self._changed:
                    self._came = self._came or isinstance(message, rank_messages.Fetch)
                    self._changed.notify_all()

    def _on_break(self, generation: int, lost: frozenset[int]) -> None:
        with self._changed:
            if generation >= self._active and lost & self._replica and not self._hit:
                self._hit = True  # also for a later message about a generation that is broken already
                self._changed.notify_all()
            if generation <= self._broken:
                return
            if not self.lost():
                self.broken_at = time.monotonic()
            self._broken = generation
            self._forget_plans(generation)
            self._changed.notify_all()

    def _forget_plans(self, generation: int) -> None:
        """Forget offers and plans up to this generation: it is over, or entered."""
        if self._offer is not None and self._offer.generation <= generation:
            self._offer = None
        if self._plan is not None and self._plan.generation <= generation:
            self._plan = None

    def _on_withdraw(self, generation: int) -> None:
        """Forget an offer that was withdrawn. A newcomer that waits to enter gives up. A member that is already
        entering goes on with all others, until the Break that follows."""
        with self._changed:
            self._withdrawn = max(self._withdrawn, generation)
            if self._offer is not None and self._offer.generation <= generation:
                self._offer = None
            if self._plan is not None and self._plan.boundary and self._plan.generation <= generation:
                self._plan = None
            if self._joining and self._broken < self._active <= generation:
                self._broken = self._active
                self._changed.notify_all()

    def _on_plan(self, plan: Plan) -> None:
        with self._changed:
            over = max(self._active, self._broken, self._withdrawn if plan.boundary else 0)
            if plan.generation <= over:
                return
            if plan.boundary and self._member:
                self._offer = _newer(plan, self._offer)
            else:
                self._plan = _newer(plan, self._plan)
            self._changed.notify_all()

    # ------------------------------------------------------------ the main thread
    @property
    def broken(self) -> int:
        """The number up to which all generations are over."""
        return self._broken

    @property
    def offer(self) -> Plan | None:
        """The boundary plan that this rank holds, if any."""
        return self._offer

    def lost(self) -> bool:
        """Whether the generation that this rank is in or enters is over."""
        return bool(self._active) and self._broken >= self._active

    def hit(self) -> bool:
        """Whether the generation is over, and a rank of this replica is lost or cut off from this rank."""
        return (self._hit or self._cut) and self.lost()

    def disturbed(self, inside: bool) -> bool:
        """Whether the result of a collective may be garbage, because its connections may have been broken before its
        end. inside: the collective was among the ranks of the replica."""
        return self.lost() and (not inside or self._ends_inside())

    def shelter(self, sheltered: bool) -> None:
        """Note that the main thread enters or leaves its replica's schedule, in which only the loss of a rank of its
        own replica breaks the connections inside."""
        with self._changed:
            self._sheltered = sheltered
            self._wake_kicker()

    def hold_off(self, hold: bool) -> None:
        """Break nothing while the main thread changes the parameters, because it does not wait for any rank then."""
        with self._changed:
            self._held_off = hold
            self._wake_kicker()

    def _wake_kicker(self) -> None:
        """Wake the unblocking thread after a loss; before a loss it may sleep on."""
        if self.lost():
            self._changed.notify_all()

    def enter_generation(self, plan: Plan, replica: Iterable[int] = ()) -> None:
        """Note that the main thread starts to enter `plan`; `replica` has the slots of its replica."""
        with self._changed:
            self._replica, self._hit, self._cut = frozenset(replica), False, False
            self._sheltered = self._held_off = False
            self._active, self._member = plan.generation, True
            self._joining = plan.boundary and self.slot in plan.joiners
            self._forget_plans(plan.generation)

    def note_entered(self) -> None:
        """Note that the main thread and all others are in the generation."""
        with self._changed:
            self._joining = False

    def give_up(self) -> int:
        """Note that the main thread has left all collectives of its generation, which is over for this rank. Returns
        the number of the last broken generation."""
        with self._changed:
            if not self.lost():
                self.broken_at = time.monotonic()
            self._broken = max(self._broken, self._active)
            self._acknowledged = self._broken
            if self._offer is not None and self._offer.generation <= self._broken:
                self._offer = None
            return self._broken

    def put_back(self) -> None:
        """Make this rank a newcomer, whose way in is the next offer: it did not get in, or has left."""
        with self._changed:
            self._member = False

    def wait_plan(self, timeout: float | None) -> Plan | None:
        """Wait for the next plan to enter. None if the rank has to report again, because another Break or an image has
        come.

        Raises :class:`PlanTimeout` after `timeout` seconds; None waits as long as the agent lives. Raises
        :class:`RankDismissed` if the rank has to end.
        """
        with self._changed:
            if not self._changed.wait_for(self._news, timeout):
                raise PlanTimeout(f"no plan within {timeout:.0f} s: is unicrond running?")
            if self._dismissed:
                raise RankDismissed
            plan, self._plan, self._came = self._plan, None, False
            return plan

    def _news(self) -> bool:
        return self._plan is not None or self._broken > self._acknowledged or self._dismissed or self._came

    # ------------------------------------------------------------ the unblocking thread
    def _kick(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._unacknowledged)
                # under the lock, so that the main thread cannot have opened the next generation's sockets
                self._cut = self._ends_inside()  # a shelter from now on is too late
                self._unblock(self._cut)
                if not self._cut:
                    self._changed.wait_for(lambda: self._ends_inside() or not self._unacknowledged())
            time.sleep(KICK_SECONDS)

    def _unacknowledged(self) -> bool:
        return self.lost() and self._acknowledged < self._broken and not self._held_off

    def _ends_inside(self) -> bool:
        return self._hit or self._cut or not self._sheltered
