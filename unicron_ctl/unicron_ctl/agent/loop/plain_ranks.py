"""Restart mode: the ranks are plain programs that know nothing of Unicron.

The agent speaks the rank protocol for them. A slot is *waiting*, without a process, until a plan makes a world. Then
its process starts with torchrun's variables, and the slot is *running*; each generation has a new port on the first
member's node. At a Break the processes are ended and the slots wait again. To the controller this looks like session
mode, except that nobody keeps any training state.

A slot's incarnation rises when the controller has given it up as lost; a process is one incarnation in one generation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.loop.agent import SIGTERM_SECONDS, Agent
from unicron_ctl.agent.node.rendezvous_store import FreePort, Store
from unicron_ctl.agent.ranks.counted import Folder, Progress
from unicron_ctl.agent.ranks.fence import BEAT_SHARE, Fence
from unicron_ctl.agent.ranks.ranks import STOP_SECONDS, Rank, package_path, surroundings_of, task_environment
from unicron_ctl.agent.ranks.static_world import World, outside_the_step
from unicron_ctl.shared.consensus.restart_lease import FENCE_SECONDS
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.settings.limits import ORPHAN_SECONDS, PLANNED_SECONDS
from unicron_detector.failures.classify import default_classifier
from unicron_detector.processes.rank_messages import Step, ToRank
from unicron_detector.processes.supervise import USUAL, Surroundings
from unicron_transition.snapshot import cuts
from unicron_transition.snapshot.formats import tracker

AWAY_SECONDS = 2.0  # without a connection after a rank's end: a restarted controller is back by then
YOUNG_SECONDS = 20.0  # a world that breaks so early may have a script that fails everywhere:
OWN_END_SECONDS = 2.0  # its processes may end by themselves, so that each shows its own error
LOOK_SECONDS = 0.05
COUNT_SECONDS = 0.25  # between two looks at what the processes have counted
DOORS_SECONDS = 1.0
WITHOUT_CONTROLLER_SECONDS = 60.0  # of a finished node's wait for the others while no controller reports their end
NOT_FOR_PROGRAMS = ("UNICRON_AGENT", "UNICRON_SLOT", "UNICRON_INCARNATION", "UNICRON_STACKS")


class Absence:
    """Writes one line when a rank has ended while the controller is away, so that all ranks wait, and one when the
    controller is back."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks  # this node also writes it if its ranks ended only because others did
        self._since: float | None = None  # the time of the controller's last message before the first line

    def news(self, connected: bool, last_heard: float, ranks: Iterable[structs.RankStatus], now: float) -> str:
        """Return the next line for the log, or nothing. Both times are on the monotonic clock."""
        if self._since is not None:
            if last_heard <= self._since:
                return ""
            self._since = None
            return "the controller is back: the ranks start again as it says"
        if connected or not any(map(self._counts, ranks)):
            return ""
        self._since = last_heard
        left = max(0.0, ORPHAN_SECONDS - (now - last_heard))
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        return (
            "a rank has ended, and the controller does not answer: no rank trains until it is back. From "
            f"{until} on nodes with an ended rank end their part of the step with its exit status"
        )

    def _counts(self, status: structs.RankStatus) -> bool:
        """Say whether the rank has ended a while ago and this node writes a line about it."""
        end = status.exit
        if status.state != "exited" or end is None or time.time() - end.at < AWAY_SECONDS:
            return False
        return self._speaks or default_classifier().exit(end.code, end.last_line).scope != "network"


class PlainRank(Rank):
    """One slot, whose process exists only within a generation."""

    def __init__(
        self, slot: int, local: int, command: Sequence[str], counted: Progress, surroundings: Surroundings = USUAL
    ):
        super().__init__(slot, local, command, lambda *_: {}, surroundings=surroundings)
        self.counted = counted
        """The progress that its process counts."""
        self.step: Step | None = None  # a step of its process that has not been reported yet
        self.breaking: int | None = None  # the generation whose Break ends its process
        self.signalled = False  # ... and the process has got SIGTERM

    def start(self, incarnation: int) -> None:
        """Become a newcomer without a process."""
        self.status = structs.RankStatus(state="waiting", incarnation=incarnation, changed=time.time())

    def enter_generation(self, generation: int, iteration: int, environment: Mapping[str, str]) -> None:
        """Start the process of this generation, which begins with this iteration of the job. A process that cannot be
        started, or that would end at once as if it had finished, counts as exited."""
        self.breaking, self.signalled = None, False
        self.status.state, self.status.generation, self.status.changed = "running", generation, time.time()
        if why := tracker.problem_of(self._command):
            self._ends(1, why)
            return
        self._begin_process({**environment, **self.counted.start(generation, iteration)})

    @property
    def trainer(self) -> int:
        return self.counted.pid or self.status.pid

    def break_(self, generation: int) -> bool:
        """End the generations up to this one; True if a process must be ended for it."""
        if self.status.broken >= generation or self.status.generation > generation:
            return False
        if self.child is not None:
            fresh, self.breaking = self.breaking is None, generation
            return fresh
        if self.starting:
            self.give_up()
            self._rest(generation)
        if self.status.state in ("waiting", "finished"):
            self._rest(generation)
        return False

    def count(self, now: float) -> bool:
        """Read how far its process is; True if that has changed. now: on the monotonic clock."""
        news, self.step = self.counted.update(self.status, now)
        return news

    def collect(self) -> None:
        """Take in the end of the process: by a Break, or by itself."""
        self.count(time.monotonic())
        super().collect()
        self.counted.close()
        if self.breaking is not None and (self.signalled or self.status.state == "finished"):
            self._rest(self.breaking)
        self.breaking, self.signalled = None, False

    def kill(self) -> None:
        """End the process at once; a slot that waits without a process is exited, too."""
        if not self.alive and self.status.state == "waiting":
            self.status.state, self.status.changed = "exited", time.time()
        super().kill()

    def _rest(self, generation: int) -> None:
        incarnation = self.status.incarnation
        self.status = structs.RankStatus(
            state="waiting", incarnation=incarnation, broken=generation, changed=time.time()
        )


class RestartAgent(Agent):
    """Runs `command` once per rank of every world that the controller forms; otherwise like :class:`Agent`."""

    AGREES = False

    def _build(self) -> None:
        self._fence = Fence(self._net.polling)
        self._world = 0  # the generation of the world for which the fence's door is open; 0 before it begins
        self._left = 0  # the newest Break that has shut one: no world up to it counts this node any more
        super()._build()
        self._snapshots.copies.plain = True
        self._ending.leaves = "its processes end"
        self._counted_at = 0.0
        self._began = 0.0  # when the present world's processes were started
        self._term_at = self._kill_at = 0.0
        self._shares_doors: list[str] = []  # of the last plan, as its nodes' names
        self._node_names: list[str] = []
        self._absence = Absence(self.place.element == 0)
        self._next: tuple[wire.Plan, float] | None = None  # a world that waits for its doors to be tried; until when
        # ... and the status that tells the controller, and of the lease
        self._asked: tuple[int, bool] | None = None

    def _make_ranks(self) -> dict[int, Rank]:
        self._pages, around = Folder(self._net.ranks.folder), surroundings_of(self.place)
        self._plain = {
            slot: PlainRank(slot, local, self.command, Progress(self._pages, slot), surroundings=around[local])
            for local, slot in enumerate(self.place.slots)
        }
        return dict[int, Rank](self._plain)

    def _make_store(self) -> Store:
        return FreePort()

    def _base(self, local: int) -> dict[str, str]:
        """Return the variables of this local rank's process in every world."""
        given = task_environment(self.place, local, os.environ)
        return {
            **{name: value for name, value in outside_the_step(given).items() if name not in NOT_FOR_PROGRAMS},
            "PYTHONPATH": os.pathsep.join(filter(None, (package_path(given), self._pages.autoload))),
            "PYTHONUNBUFFERED": "1",
        }

    def _environments(self) -> list[dict[str, str]]:
        per_node, job = self.place.settings.ranks_per_node, self.place.job
        return [
            World(number, 2 * number + 1, per_node, f"{number}", number, job, number).environment(
                number, self._base(number)
            )
            for number in range(max(2, len(self.place.tasks)))
        ]

    @property
    def _child_pid(self) -> int | None:
        return self._fence.pid

    def close(self) -> None:
        super().close()
        self._net.containment.attempt("end the watchdog", self._fence.close)
        self._pages.close()

    def _on_welcome(self, message: wire.Welcome) -> None:
        self._reports.repeat_steps()  # in the status that follows
        self._fence.set_seconds(message.fence_seconds or FENCE_SECONDS)
        super()._on_welcome(message)
        period = min(message.heartbeat_period, self._fence.lease.seconds * BEAT_SHARE)
        self._reports.configure(period, message.progress_seconds, message.brief)

    def _order_handlers(self) -> dict[type[wire.Message], Callable[[Any], object]]:
        return {**super()._order_handlers(), wire.Pong: lambda message: self._fence.on_answer(message.number)}

    def _send_status(self, leaving: str = "") -> None:
        reports, fence = self._reports, self._fence
        reports.fenced, reports.lease, reports.world = fence.holds, fence.lease.seconds, fence.door.port
        reports.left = self._left
        reports.begins = self._next[0].generation if self._next is not None and self._asked is not None else 0
        reports.asks = fence.may_ask() or reports.begins > 0
        if reports.asks:
            fence.on_question(reports.number + 1)
        super()._send_status(leaving)

    def _on_plan(self, share: wire.PlanShare) -> None:
        self._shares_doors, self._node_names = share.doors, shared_plans.nodes(share)
        super()._on_plan(share)

    def _to_ranks(self, message: wire.Break | wire.Withdraw | wire.Plan) -> None:
        if isinstance(message, wire.Plan):
            self._enter_world(message)
        elif isinstance(message, wire.Break):
            self._break(message)

    def _to_all(self, message: wire.Message | ToRank) -> None:
        """Leave a note beside the images for a Cut; plain programs get no other message."""
        if isinstance(message, wire.Cut) and self._snapshots.memory.folder is not None:
            with contextlib.suppress(OSError):  # a missing folder is reported and made again elsewhere
                cuts.write_cut_note(self._snapshots.memory.folder, cuts.CutOrder(message.iteration, message.good))

    def _enter_world(self, plan: wire.Plan) -> None:
        if not self.ranks.keys() <= set(plan.members):
            self._break(wire.Break(generation=plan.generation - 1, lost=[], reason="a world without this node"))
            return
        ready = [
            rank
            for rank in self._plain.values()
            if rank.status.state == "waiting" and rank.status.broken < plan.generation
        ]
        if not ready:
            self._next = self._asked = None
            return
        world = world_of(plan, self.place, self._node_names)
        if not self._may_begin(plan):
            return
        self._next, self._asked = None, None
        self._began = time.monotonic()
        self._store.close()
        for rank in ready:
            rank.enter_generation(
                plan.generation,
                max(0, plan.iteration or 0),
                world.environment(rank.local, self._base(rank.local))
                | {"UNICRON_GENERATION": str(plan.generation), **self._snapshots.memory.environment},
            )
            self.processes.attend(rank)
        self._check_lease()
        self._store.start()
        self._send_status()

    def _may_begin(self, plan: wire.Plan) -> bool:
        """Whether the controller knows that this node begins the plan's world now, and of its lease.

        It may have given this world up while the plan was on its way. So it has to answer a status that says so; from
        then on it counts this node's processes, until they have ended or their lease is over.
        """
        if self._net.outbox.closed:  # the controller has given this agent up for good, and forms no other world
            return True
        now = time.monotonic()
        if self._next is None or self._next[0].generation != plan.generation:
            self._next, self._asked = (plan, now + DOORS_SECONDS), None
            self._fence.begin_world(self._shares_doors)
            self._world = plan.generation
        if not self._fence.tried and now < self._next[1]:
            return False
        if self._asked is None or self._asked[1] != self._fence.holds:
            self._asked = self._reports.number + 1, self._fence.holds
            self._send_status()
        return self._fence.answered >= self._asked[0] and not self._fence.stale

    def _break(self, message: wire.Break) -> None:
        self._next = self._asked = None
        if self._left < message.generation and self._world <= message.generation:
            self._fence.end_world()  # also if the plan of its world is lost: others may have the port
            self._world, self._left = 0, message.generation
        if any([rank.break_(message.generation) for rank in self._plain.values()]):
            now = time.monotonic()
            self._term_at = now + own_end_seconds(message, now - self._began)
            self._kill_at = self._term_at + (STOP_SECONDS if message.lost else PLANNED_SECONDS)
        self._press()
        self._send_status()

    def _breaking(self) -> list[PlainRank]:
        return [rank for rank in self._plain.values() if rank.breaking is not None]

    def _press(self) -> None:
        """End the processes of a broken world, without waiting for them."""
        now = time.monotonic()
        for rank in self._breaking():
            if rank.child is None:
                continue
            if not rank.signalled and now >= self._term_at:
                rank.signalled = True
                rank.child.terminate()
            elif rank.signalled and now >= self._kill_at:
                rank.kill()

    def _serve(self, seconds: float) -> list[Any]:
        if self._breaking() or self._next is not None:
            seconds = min(seconds, LOOK_SECONDS)
        elif any(rank.child is not None for rank in self._plain.values()):
            seconds = min(seconds, COUNT_SECONDS)
        came = super()._serve(seconds)
        self._press()
        self._net.containment.attempt("look at the counters", self._read_counters)
        self._net.containment.attempt("look after the lease", self._check_lease)
        if self._next is not None:
            self._enter_world(self._next[0])
        return came

    def _read_counters(self) -> None:
        """Read the progress of the processes, which send no messages."""
        now = time.monotonic()
        if now - self._counted_at < COUNT_SECONDS:
            return
        self._counted_at = now
        for rank in self._plain.values():
            if rank.child is None or rank.status.state != "running":
                continue
            self._reports.dirty = rank.count(now) or self._reports.dirty
            self._report_step(rank)
            if complaint := rank.counted.complaint():
                self.log.warn_once(f"its ranks' progress is not seen in full: {complaint}")

    def _report_step(self, rank: PlainRank) -> None:
        if rank.step is not None:
            self._reports.add_step(rank.slot, rank.step)
            rank.step = None

    def _explain(self, rank: Rank) -> None:
        end, why = rank.status.exit, self._fence.ended
        if end is not None and end.code == -signal.SIGKILL and why:
            end.last_line = why  # the network's doing, and no fault of the program
        super()._explain(rank)
        if isinstance(rank, PlainRank):
            self._report_step(rank)  # its last step

    def _check_lease(self) -> None:
        """End the processes of a world from which this node is cut off."""
        inside = [rank for rank in self._plain.values() if rank.child is not None]
        pids = [rank.child.pid for rank in inside if rank.child is not None]
        # A controller that has given this agent up for good forms no other world of its nodes.
        closed, muted = self._net.outbox.closed, self._net.outbox.muted
        if why := self._fence.check_lease(muted and not closed, closed, pids):
            self.log.warn(why)
            for rank in inside:
                rank.kill()
        if self._reports.fenced != self._fence.holds:
            self._send_status()

    def _tell_long_wait(self) -> None:
        super()._tell_long_wait()
        connected = self._net.line.up or self._net.outbox.closed
        statuses = [rank.status for rank in self.ranks.values()]
        if news := self._absence.news(connected, self._last_heard, statuses, time.monotonic()):
            self.log.warn(news)

    def _end_if_over(self, now: float) -> None:
        """End as other agents do, but once finished wait for the other nodes: if one fails, all start again."""
        silent = now - self._last_heard > WITHOUT_CONTROLLER_SECONDS
        through = all(rank.status.state == "finished" for rank in self.ranks.values())
        if self._ending.trained or not through or silent:
            super()._end_if_over(now)


def own_end_seconds(message: wire.Break, age: float) -> float:
    """Return how long the processes of a world of this age in seconds may go on, to end by themselves. If no rank was
    lost, another node may have noticed first that Slurm ends the whole job: its SIGTERM reaches this node, too, and
    must come only once."""
    if not message.lost:
        return SIGTERM_SECONDS
    return OWN_END_SECONDS if not message.killed and age < YOUNG_SECONDS else 0.0


def world_of(plan: wire.Plan, place: Place, names: Sequence[str] = ()) -> World:
    """Return this node's part of the plan's world, in which nodes are in the order of their slots. names: of these
    nodes, if known. Raises BadMessage for a plan whose store has no port."""
    per_node = place.settings.ranks_per_node
    host, _, port = plan.store.rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise wire.BadMessage(f"the plan's world meets at {plan.store!r}, which has no port")
    elements = sorted({slot // per_node for slot in plan.members})
    node, before = elements.index(place.element), max(0, plan.generation - 1)
    known = tuple(names) if len(names) == len(elements) else ()
    return World(node, len(elements), per_node, host.strip("[]"), int(port), place.job, before, known)
