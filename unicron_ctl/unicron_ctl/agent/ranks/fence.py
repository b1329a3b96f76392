"""Restart mode: the agent's part in stopping a world that was left behind before it works beside the next one
(docs/design/consensus.md, *A lease for plain programs*).

While the controller answers nothing else is asked. Without its answers, the agent tries the doors of the world's other
agents. Shortly before the lease runs out, this agent ends the node's processes; when it runs out, the kernel does.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from unicron_ctl.agent.connections.connections import Polling
from unicron_ctl.agent.ranks import watchdog
from unicron_ctl.agent.ranks.watchdog import NEVER
from unicron_ctl.shared.consensus.restart_lease import Lease
from unicron_ctl.shared.protocol.ranges import MOST_DOORS
from unicron_ctl.shared.protocol.reach import Reach, WorldDoor, reach
from unicron_detector.processes.step_signals import STEP_SIGNALS
from unicron_detector.processes.supervise import Child, Surroundings

REACH_SECONDS = 0.7  # for one door
PASS_SECONDS = 0.5  # between two tries of all doors
UNARMED_SECONDS = 2.0  # the same while a world trains without a lease
ASK_SECONDS = 0.5  # between two questions to the controller
BEAT_SHARE, LATE_SHARE = (
    0.2,
    0.3,
)  # of the lease, at most between two statuses; without an answer, until doors are tried
EARLY_SECONDS = 0.3  # before the end of the lease, for the agent to end the processes itself and say why
WATCHDOG_SECONDS = 1.0  # before a watchdog that has ended is started again
QUESTIONS = 256  # that may have no answer yet
CUT_OFF = (
    "neither the controller nor enough of the world's other nodes can be reached: the processes end, for a new world "
    "may begin without them"
)
NO_WATCHDOG = "the watchdog has ended, and the kernel with it the processes: nobody has renewed their lease"
F_SETSIG = 10  # fcntl.h


def clock() -> float:
    """Return seconds on a clock that goes on while the node is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Tether:
    """Ties a process group to the watchdog: when that ends, whatever the reason, the kernel kills the group.

    The kernel signals whoever waits for a pipe when its last writer is gone (F_SETOWN, F_SETSIG and O_ASYNC, fcntl(2)),
    also while all processes concerned are stopped. It knows the group itself, not by its number. Raises OSError.
    """

    def __init__(self, pipe: int, pid: int):
        self._end = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(self._end, F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self._end, fcntl.F_SETOWN, -pid)
            fcntl.fcntl(self._end, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        except OSError:
            os.close(self._end)
            raise

    @property
    def cut(self) -> bool:
        """Whether the watchdog has ended, perhaps before the kernel knew of the group."""
        return _hung_up(self._end)

    def close(self) -> None:
        """Let the process group go, which has ended."""
        os.close(self._end)


class Watchdog:
    """The program of `watchdog`, and the pipe to which processes are tied. Raises OSError."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:

            def pipe() -> tuple[int, int]:
                ends = os.pipe()
                for end in ends:
                    os.set_blocking(end, False)
                return ends

            (self._pipe, tied), (told, self._line), (self._said, says) = pipe(), pipe(), pipe()
            for end in (tied, told, says):
                theirs.callback(os.close, end)
            for end in (self._pipe, self._line, self._said):
                undo.callback(os.close, end)
            os.set_blocking(told, True)
            command = [sys.executable, "-I", "-S", str(Path(watchdog.__file__))]
            command += [str(int(number)) for number in STEP_SIGNALS]
            self.child = Child(command, os.environ, [tied], Surroundings(told, says))
            self._close = undo.pop_all().close
        self._orders = deque([NEVER])  # that it has not taken yet; it begins with the first
        self._until = self._taken = NEVER  # the last order, and the last that it has taken
        self._ready = False
        self._tethers: dict[int, Tether] = {}

    @property
    def ready(self) -> bool:
        """Its timer works, so that processes can be tied to it."""
        return self._ready

    @property
    def settled(self) -> bool:
        """Its timer is set as it was told."""
        return not self._orders

    @property
    def guards(self) -> bool:
        """Its timer ends the processes, even if it takes no other order."""
        return self._taken < NEVER

    def read_answers(self) -> None:
        """Read what it has done."""
        with contextlib.suppress(BlockingIOError):
            for _ in os.read(self._said, 4096)[: len(self._orders)]:
                self._ready, self._taken = True, self._orders.popleft()

    def tie(self, pids: Collection[int]) -> bool:
        """Tie these leaders of process groups to it, and let others go; False if it has ended before it knew them."""
        for pid in self._tethers.keys() - set(pids):
            self._tethers.pop(pid).close()
        for pid in pids:
            if pid not in self._tethers:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    self._tethers[pid] = Tether(self._pipe, pid)
        return not any(tether.cut for tether in self._tethers.values())

    def set_end(self, until: float) -> None:
        """Tell it until when the processes may live. Raises OSError if it has ended."""
        if until != self._until:
            with contextlib.suppress(BlockingIOError):  # it is stopped, too; the kernel keeps its last order
                os.write(self._line, f"until {until!r}\n".encode())
                self._until = until
                self._orders.append(until)

    def close(self) -> None:
        """End it, and the processes that are still tied to it."""
        self.child.signal(signal.SIGKILL)
        self.child.reap(1.0)
        self.child.close()
        for tether in self._tethers.values():
            tether.close()
        self._close()


class Fence:
    """Ends this node's processes when their lease is not renewed."""

    def __init__(self, polling: Polling) -> None:
        self._watch, self._unwatch = polling.watch, polling.unwatch
        self.lease = Lease()
        self.door = WorldDoor()
        """Open while this node is in its world."""
        self._doors: list[str] = []
        self._world = self._answered = 0  # the number of this world, and of the last one whose doors were tried
        self._lock = threading.RLock()  # the thread that tries doors renews the lease while the agent's loop is busy
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._pids: tuple[int, ...] = ()
        self._asked: dict[int, float] = {}  # the number of a status that asks for an answer -> when it was sent
        self.answered = 0
        """The number of the last status that the controller has answered."""
        self._asked_at = self._heard_at = self._started = float("-inf")
        self._dog: Watchdog | None = None
        self._deaf = False
        self._begins = False  # a world is about to begin
        self._ended = ""  # why this world's processes were ended

    @property
    def holds(self) -> bool:
        """The processes end in time even if this agent and its watchdog do nothing more, so that the controller may
        count on it."""
        return self.lease.armed and self._dog is not None and self._dog.guards

    @property
    def tried(self) -> bool:
        """This world's doors have been tried, so that a lease that can be held is held, and the kernel knows of it."""
        return not self._doors or (self._answered == self._world and self._dog is not None and self._dog.settled)

    @property
    def over(self) -> bool:
        """The lease is over, or nearly."""
        return clock() >= self.lease.expires_at - EARLY_SECONDS

    @property
    def stale(self) -> bool:
        """The controller's last answer is too old to begin a world: it may count this node's processes no more."""
        return clock() >= self.lease.renewed_until - EARLY_SECONDS

    @property
    def ended(self) -> str:
        """Why the lease has ended this world's processes; empty if it has not."""
        dog = self._dog
        return self._ended or (NO_WATCHDOG if dog is not None and dog.child.ended() else "")

    def begin_world(self, doors: Sequence[str]) -> None:
        """Begin a world. doors: of its other agents, as far as they are known."""
        with self._lock:
            self._doors, self._world, self._begins, self._ended = list(doors), self._world + 1, True, ""
            self.lease.start_world(len(self._doors))

    def end_world(self) -> None:
        """This node leaves its world: the others must not count it any more."""
        self.door.renew()
        self._deaf = self._begins = False

    def may_ask(self) -> bool:
        """Whether it is time to ask the controller for an answer again."""
        return clock() - self._asked_at >= ASK_SECONDS

    def set_seconds(self, seconds: float) -> None:
        """Set the lease's length. An answer to a status that named another one does not extend it."""
        if seconds != self.lease.seconds:
            self.lease.seconds = seconds
            self._asked.clear()

    def on_question(self, number: int) -> None:
        """Note that the status with this number, which asks for an answer, is about to be sent."""
        self._asked_at = self._asked[number] = clock()
        if len(self._asked) > QUESTIONS:
            del self._asked[next(iter(self._asked))]

    def on_answer(self, number: int) -> None:
        """Note the controller's answer to the status with this number."""
        if (sent_at := self._asked.get(number)) is not None:
            self.answered = max(self.answered, number)
            self._asked = {other: at for other, at in self._asked.items() if other > number}
            with self._lock:
                self._heard_at = max(self._heard_at, sent_at)
                self.lease.on_controller(sent_at)

    def check_lease(self, muted: bool, unwatched: bool, pids: Sequence[int]) -> str:
        """Renew the lease; return why the processes must end, or nothing. muted: this node has lost its network.
        unwatched: the controller does not take this agent, and forms no other world of its node. pids: the processes of
        the world, leaders of process groups."""
        with self._lock:
            self.door.answer()  # else its queue is full after a while, and the kernel answers nobody
            self._pids, self._begins = tuple(pids), self._begins and not pids
            self._mute(muted)
            if unwatched:
                self.lease.on_controller(clock())
            self._keep_thread()
            why = self._keep_watchdog(clock()) or (CUT_OFF if self.over else "")
            self._ended = why if pids and why else self._ended
            return why if pids else ""

    def _mute(self, muted: bool) -> None:
        """Close the door to others while an injected loss of the network lasts."""
        if muted != self._deaf:
            self._deaf = muted
            (self.door.stop_answering if muted else self.door.open)()

    def _keep_thread(self) -> None:
        if self._thread is None and self._doors:
            thread = threading.Thread(target=self._watch_doors, name="unicron-fence", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system grants no more threads now
                thread.start()
                self._thread = thread

    def _watch_doors(self) -> None:
        """Try the doors of the world whenever the controller is late with an answer, and renew the lease by them."""
        while not self._closed.wait(PASS_SECONDS if self.lease.armed or not self._pids else UNARMED_SECONDS):
            with self._lock:
                self.door.answer()  # also while the agent's loop is busy
                doors, world = self._doors, self._world
                late = clock() - self._heard_at >= self.lease.seconds * LATE_SHARE or not self.lease.armed
                if not doors or self._deaf or not late or not (self._pids or self._answered != world):
                    continue
            began, found = clock(), 0
            with contextlib.suppress(RuntimeError), ThreadPoolExecutor(MOST_DOORS) as pool:
                found = sum(word is Reach.REACHED for word in pool.map(partial(reach, seconds=REACH_SECONDS), doors))
            with self._lock:
                self._answered = world
                if world == self._world and not self._deaf:
                    self.lease.on_doors(found, began)
                    self._set_end()

    def _keep_watchdog(self, now: float) -> str:
        """Keep the watchdog running and tell it of the lease; return why the processes must end, or nothing."""
        dog = self._dog
        if dog is not None:
            dog.read_answers()
        if dog is not None and (dog.child.ended() or (dog.ready and not dog.tie(self._pids)) or not self._set_end()):
            self._drop_watchdog()
            return NO_WATCHDOG
        if dog is None and self._doors and now - self._started >= WATCHDOG_SECONDS:
            self._started = now
            with contextlib.suppress(OSError):
                self._dog = Watchdog()
                self._watch(self._dog.child.stderr, self._pass_stderr)
        return ""

    def _set_end(self) -> bool:
        """Tell the watchdog until when the processes may live; False if it has ended."""
        until = self.lease.expires_at
        try:
            if self._dog is not None:
                self._dog.set_end(until if (self._pids or self._begins) and not math.isinf(until) else NEVER)
        except OSError:
            return False
        return True

    def _pass_stderr(self) -> None:
        if self._dog is not None and not self._dog.child.pass_stderr():
            self._unwatch(self._dog.child.stderr)

    def _drop_watchdog(self) -> None:
        dog, self._dog = self._dog, None
        if dog is not None:
            self._unwatch(dog.child.stderr)
            dog.close()

    @property
    def pid(self) -> int | None:
        """The watchdog's process."""
        return self._dog.child.pid if self._dog is not None else None

    def close(self) -> None:
        """End the watchdog, and with it the processes that are left."""
        self._closed.set()
        with self._lock:
            self._drop_watchdog()
        self.door.close()


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
