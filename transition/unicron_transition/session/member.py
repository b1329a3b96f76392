"""One rank as a member of the job's generations: it stops and reports, waits for a plan, enters it, and leaves
(docs/design/generations.md).

Invariants:

- A rank has left all collectives of its generation before it reports that it has stopped.
- A rank that has received half of a training state enters a generation only as a joiner, and rescues nothing.
- Groups inside the replica are kept only if all of its ranks built them in the same generation, and they are whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from unicron_detector.processes.rank_channel import fault_of
from unicron_detector.processes.rank_messages import Fault, Plan, Status
from unicron_transition.generations import groups
from unicron_transition.generations.layout import replica_of
from unicron_transition.generations.member_links import MemberLinks
from unicron_transition.generations.time_limits import PLAN_TIMEOUT
from unicron_transition.generations.watch import PlanTimeout, RankDismissed
from unicron_transition.iteration.accumulation import PeerLost
from unicron_transition.iteration.rank_process import Process
from unicron_transition.snapshot import migrate

RELAID = "the job goes on in another layout"
NEVER_KEPT = -1  # the groups inside the replica are broken, or were never built


class Member:
    """The generations' view of a session, whose owner sets `report`, `take` and `rescue`."""

    def __init__(self, process: Process, fatal: tuple[type[Exception], ...]):
        self.process, self.layout, self.slot = process, process.layout, process.slot
        self.watch, self.channel = process.watch, process.channel
        self._fatal = fatal  # errors of these types end the rank, because another try would not help
        self.groups: groups.Groups | None = None
        self.report: Callable[[str], Status] = Status
        """report(state) returns a status with what the session knows."""
        self.take: Callable[[Plan, bool], None] = lambda plan, newcomer: None
        """take(plan, newcomer) starts to use the connected groups of `plan`, and moves the training state if ranks
        join."""
        self.rescue: Callable[[str], None] = lambda why: None
        """rescue(why) saves the state when the rank ends early."""
        self.generation = 0
        self.members: list[int] = []
        self.losses = 0  # nodes that have lost a rank
        self._ranks_per_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        self.inside = False  # has a place in the job, and the training state
        self.came_new = False  # its last entry began an iteration from scratch
        self.half_received = False  # of the training state
        self.note: Fault | None = None
        self.moments: dict[str, float] = {}  # of the present recovery, on the monotonic clock
        self.state = "starting"  # as last reported to the agent
        self._resting: tuple[str, Fault | None] = ("waiting", None)
        self._built = NEVER_KEPT  # the generation for which the groups inside the replica were built

    # ------------------------------------------------------------ where it is
    @property
    def replicas(self) -> int:
        """The replicas of the generation."""
        return len(self.members) // self.layout.size

    @property
    def replica(self) -> int:
        """This rank's data-parallel rank."""
        return replica_of(self.members, self.layout.size, self.slot)

    def node_of(self, slot: int) -> int:
        """Return the number of the slot's node."""
        return slot // self._ranks_per_node

    @property
    def nodes(self) -> int:
        """The nodes of the generation."""
        return max(1, len({self.node_of(slot) for slot in self.members}))

    @property
    def slots(self) -> list[int]:
        """The slots of this rank's replica, by place."""
        return slots_of(self.members, self.layout.size, self.slot)

    def assignment_of(self, plan: Plan) -> list[int] | None:
        """Return the micro-batches that the plan gives this rank's replica; None if it does not say."""
        return plan.assignment.get(slots_of(plan.members, self.layout.size, self.slot)[0])

    def note_moment(self, what: str) -> None:
        """Note that the present recovery, if there is one, has reached `what`."""
        if self.moments:
            self.moments[what] = time.monotonic()

    # ------------------------------------------------------------ resting
    def stop(self, error: Exception, drain: Callable[[Callable[[], Any]], None], clean: bool) -> None:
        """Leave all collectives of the generation for good, and report where this rank stands. clean: the whole replica
        left them together, and no communication among its ranks is under way."""
        fault = self._fault(error)
        self.watch.give_up()
        if not clean:
            self._built = NEVER_KEPT
        self.process.unblocker.unblock(not clean)  # so that the neighbours notice at once
        drain(lambda: self.process.unblocker.unblock(not clean))
        self.rest("stopped", fault)

    def _fault(self, error: Exception) -> Fault | None:
        """Return the error as a fault for the controller. None if a peer is gone, and for an abort of a communicator
        that this process itself has caused because a peer is gone."""
        of_abort = self.process.aborter.begun and isinstance(error, dist.DistBackendError)
        return None if of_abort or isinstance(error, PeerLost) else fault_of(error)

    def rest(self, state: str, fault: Fault | None = None) -> None:
        """Report that this rank has stopped; each further Break before a plan repeats the report."""
        self._resting = (state, fault)
        self.publish(state, fault=fault)

    def wait_plan(self) -> Plan:
        """Wait for the next plan that has this rank as a member."""
        limit = float(os.environ.get("UNICRON_PLAN_TIMEOUT", PLAN_TIMEOUT))
        while True:
            left = self._resting[0] in ("left", "standby")
            try:
                plan = self.watch.wait_plan(None if left or self._spare() else limit)  # Slurm or the agent ends a spare
            except (PlanTimeout, RankDismissed) as error:
                if self.inside and not self.half_received:
                    self.rescue("no plan came" if isinstance(error, PlanTimeout) else RELAID)
                raise
            if plan is None:
                self.watch.give_up()
                self.publish(self._resting[0], fault=self._resting[1])
            elif self.slot in plan.members:
                return plan
            elif not left:
                self._leave_generation()

    def give_up_state(self, drain: Callable[[Callable[[], Any]], None]) -> None:
        """Leave the generation because its training state is unsound, and report that this rank waits without one. All
        members do so at the same point, and the job is formed anew of them, in the same processes."""
        self.watch.give_up()
        self._built = NEVER_KEPT
        self.process.unblocker.unblock(True)
        drain(lambda: self.process.unblocker.unblock(True))
        self.watch.put_back()
        self.inside = False
        self.rest("waiting")

    def _spare(self) -> bool:
        """Whether this rank, without training state, is a hot spare and may wait for ever."""
        return not self.inside and os.environ.get("UNICRON_SPARES", "0") not in ("", "0")

    def _leave_generation(self) -> None:
        """Let go of everything, so that the others do not wait: a plan goes on without this rank. It may come back as a
        newcomer; a rank of an incomplete replica keeps its training state for that."""
        self.watch.give_up()
        assert self.groups is not None
        self.groups.tear_down()
        self._built = NEVER_KEPT
        self.process.unblocker.disarm()
        self.watch.put_back()
        kept = self.layout.size > 1 and self.inside and not self.half_received
        self.inside = False
        self.rest("standby" if kept else "left")

    @property
    def links(self) -> MemberLinks | None:
        """The connections among all members for their exchanges, if they have any."""
        return None if self.groups is None else self.groups.links

    # ------------------------------------------------------------ entering
    def enter_until_in(self, plan: Plan) -> Plan:
        """Enter `plan`, or the next one if it breaks on the way; return the one that this rank is in."""
        while True:
            if self.slot not in plan.members:
                self._leave_generation()
                plan = self.wait_plan()
            try:
                self._enter_generation(plan)
                return plan
            except (PeerLost, RuntimeError, ConnectionError) as error:
                if isinstance(error, self._fatal):
                    raise
                self.watch.give_up()
                self._built = NEVER_KEPT
                self.process.unblocker.unblock()
                if not self.inside:
                    self.watch.put_back()
                self.rest("stopped" if self.inside else self._outside())
                plan = self.wait_plan()

    def _outside(self) -> str:
        """Return the state of a rank that could not enter: the same as before."""
        return "standby" if self._resting[0] == "standby" and not self.half_received else "waiting"

    def _enter_generation(self, plan: Plan) -> None:
        if self.half_received and self.slot not in plan.joiners:
            raise migrate.StateMismatch("the transfer of the training state to this rank was cut off: start it anew")
        assert self.groups is not None
        self.watch.enter_generation(plan, slots_of(plan.members, self.layout.size, self.slot))
        self.moments.setdefault("caught", time.monotonic())
        newcomer = not self.inside or self.slot in plan.joiners
        # from scratch: some of the other ranks start as well
        formed = plan.source is not None and not plan.boundary and plan.state is None
        self.came_new = newcomer or formed
        self.publish("entering", entering=plan.generation)
        with self.process.unblocker.building():
            store = groups.connect_store(plan.store, plan.prefix, self.watch.lost)
            if newcomer and plan.boundary:  # otherwise all have the plan already
                groups.wait_for_members(store)
            else:
                groups.open_to_newcomers(store)
            self._check_alive()
            keep = self._keeps_inner_groups(store, plan)
            self.groups.tear_down(keep)
            if not keep:
                self.process.unblocker.forget_inside()
            self.groups.build(self.process.backend, store, plan.members, self.slot, self.watch.lost)
            self._check_alive()
        self._built = self._built if keep else plan.generation
        self.moments["grouped"] = time.monotonic()
        if not plan.boundary:
            self.losses += len({slot // self._ranks_per_node for slot in set(self.members) - set(plan.members)})
        self.members = list(plan.members)
        self.take(plan, newcomer)
        self._check_alive()
        self.generation, self.inside = plan.generation, True
        self.watch.note_entered()
        self.watch.shelter(True)
        self.moments["entered"] = time.monotonic()

    def _keeps_inner_groups(self, store: Any, plan: Plan) -> bool:
        """Whether all ranks of the replica report that they built its inner groups together, and that these are
        whole."""
        slots = slots_of(plan.members, self.layout.size, self.slot)
        if len(slots) == 1:
            return self._built != NEVER_KEPT
        mine = self._built if self.members and slots == self.slots else NEVER_KEPT
        store.set(f"inside.{self.slot}", str(mine))
        built = {int(value) for value in store.multi_get([f"inside.{slot}" for slot in slots])}
        return built == {mine} and mine != NEVER_KEPT

    def _check_alive(self) -> None:
        if self.watch.lost():
            raise PeerLost("a member was lost while the generation was entered")

    # ------------------------------------------------------------ reports
    def publish(self, state: str, entering: int = 0, fault: Fault | None = None, moved: int = 0) -> None:
        """Send the rank's status at once."""
        if self.channel is not None:
            self.state = state
            self.channel.send(self.status(state, entering, fault, moved))

    def status(self, state: str, entering: int = 0, fault: Fault | None = None, moved: int = 0) -> Status:
        """Return the rank's status for its agent."""
        status = self.report(state)
        status.generation, status.entering, status.broken = self.generation, entering, self.watch.broken
        status.replica, status.layout = self.layout.size, self.layout.text
        status.fault, status.note, status.moved = fault, self.note, moved
        return status


def slots_of(members: Sequence[int], size: int, slot: int) -> list[int]:
    """Return the slots of a member's replica, by place."""
    first = replica_of(members, size, slot) * size
    return list(members[first : first + size])
