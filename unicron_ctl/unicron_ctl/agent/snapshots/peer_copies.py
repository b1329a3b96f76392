"""The agent's part in keeping copies of the training state in other nodes (docs/design/memory.md).

The controller names an iteration, a *cut*. The ranks keep their images of it in files that are not overwritten, and the
agent gives these to the agents that the controller names, in a thread and at a limited rate. Another thread gets
images, since a job could be waiting for them. The controller hears of each agent that did not give or take an image,
and other transfers with that agent are dropped. A cut that enough nodes have is good, and the one before it is removed.
This module decides nothing, and waits for no rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from unicron_ctl.agent.connections.job_environment import Place, memory_every, memory_rate
from unicron_ctl.agent.snapshots import image_client, image_server, image_stream
from unicron_ctl.shared.protocol import ranges, structs, wire
from unicron_ctl.shared.system.mailbox import Mailbox
from unicron_transition.snapshot.cuts import COPY_PREFIX, CUT_PREFIX
from unicron_transition.snapshot.image_format import COPY_KINDS, STATE, UNTRAINED_KIND, USER, ImagePage, Key, inventory
from unicron_transition.snapshot.worker import Worker

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # with which a job names its interfaces
_OF_THE_LINK = "20"  # the scope in /proc/net/if_inet6
_SIOCGIFADDR = 0x8915  # netdevice(7)


def collectives_address(environment: Mapping[str, str]) -> str:
    """Return the address of the first interface that the collectives should use, if possible of IPv4; "" if none is set
    or it has no address. Names are read as NCCL does: prefixes, or whole names after a "=". Exclusions (^) are ignored.
    """
    for variable in VARIABLES:
        text = environment.get(variable, "")
        exact, names = text.startswith("="), text.removeprefix("=").split(",")
        if not text or text.startswith("^"):
            continue
        for wanted in filter(None, names):
            for _, name in socket.if_nameindex():
                if (name == wanted if exact else name.startswith(wanted)) and (found := _address(name)):
                    return found
    return ""


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return _address_of_ipv6(interface)
    return socket.inet_ntoa(answer[20:24])


def _address_of_ipv6(interface: str) -> str:
    """Return an interface's first IPv6 address that is not link-local."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for digits, _, _, scope, _, name in map(str.split, lines):
        if name == interface and scope != _OF_THE_LINK:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


CUT_LOOK_SECONDS = 0.2  # between two looks for a cut
AGAIN_SECONDS = 2.0  # before a failed transfer is tried again
FAILING_SECONDS = 300.0  # for which an agent that did not give or take an image is reported
LEAST_MEASURED = 1 << 20  # bytes: the rate of a smaller transfer means little
SLOWER = 10.0  # times slower than usual is too slow: the controller gives a cut that much time
USUAL_RATE = 1e8  # bytes a second if nothing is known, as the controller assumes
WHY = 120  # characters of the reason


@dataclass(frozen=True)
class _Task:
    """A transfer between this node and another."""

    key: Key
    holder: structs.Holder
    """The other node's agent."""
    found: ImagePage | None = None
    """The image to give; None to get one."""
    failures: int = 0
    """Failed transfers in this direction with that agent before this one."""


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a task."""

    task: _Task
    problem: str = ""
    """Why it failed, or how far it was when it was dropped."""
    dropped: bool = False
    """Whether it was not wanted any more."""
    blames: bool = False
    """The other side is to blame, so that it is asked last, or passed over as a receiver."""
    rate: float = 0.0
    """Bytes a second; 0 for too little to tell."""


class _FailedPeers:
    """Agents, by address, with which transfers have failed recently: how often in a row, and why the last time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, tuple[structs.Failing, float]] = {}  # with the time until which it is reported

    def add(self, address: str, why: str, now: float) -> None:
        before = self.current(now).get(address)
        self.drop(address)  # so that it is last in the order
        what = structs.Failing(times=1 + (before.times if before else 0), why=why[:WHY])
        self._known[address] = what, now + FAILING_SECONDS
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def drop(self, address: str) -> None:
        self._known.pop(address, None)

    def current(self, now: float) -> dict[str, structs.Failing]:
        self._known = {address: one for address, one in self._known.items() if now < one[1]}
        return {address: what for address, (what, _) in self._known.items()}


class Copies:
    """The copies of one agent."""

    def __init__(
        self,
        folder: Callable[[], Path | None],  # the node's memory; None while there is none
        place: Place,
        environment: Mapping[str, str],
        tell: Callable[[wire.Cut | wire.Fetch], None],  # sends a message to the ranks
        say: Callable[[str], None],  # writes one line into the job's log
    ):
        self._folder, self._tell, self._say = folder, tell, say
        self._rate = memory_rate(environment)
        self.results: Mailbox[_Outcome | image_server.News] = Mailbox()
        self._meter = image_stream.Meter()
        self._server: image_server.Server | None = None
        self.address = self.token = ""
        if memory_every(environment) > 0:
            host = collectives_address(environment) or place.address
            self._server = image_server.Server(folder, host, self.results.put, self._meter)
            self.address, self.token = self._server.address, self._server.token
        self.failed = 0  # transfers that failed
        self._failing = _FailedPeers(ranges.MOST_FAILING)  # agents that gave none
        self._refusing = _FailedPeers(ranges.MOST_PASSED_OVER)  # agents that took none
        self._failures: Counter[tuple[str, bool]] = Counter()  # by address and direction; counted by the threads
        self._rests: dict[str, float] = {}  # address -> the time until which it is given nothing
        self.rates: dict[int, float] = {}  # element -> bytes a second of the last image between it and this one
        self.cut = wire.Cut(iteration=-1)
        self._sent: set[tuple[Key, int]] = set()  # image, element of the receiver
        self._under_way: set[tuple[Key, int, bool]] = set()
        self._not_before: dict[tuple[Key, int, bool], float] = {}
        self._complained: set[str] = set()
        self.plain = False  # the ranks do not report their states
        self._look_at = 0.0
        self._giving, self._getting, self._freeing = (Worker("unicron-copies") for _ in range(3))
        self._freed = itertools.count()

    @property
    def moved(self) -> int:
        """Bytes of images sent and received, also of those on their way."""
        return self._meter.moved

    @property
    def whole(self) -> list[int]:
        """Iterations that the nodes' memories probably have in full, the surest first."""
        return [cut for cut in dict.fromkeys((self.cut.good, self.cut.iteration)) if cut >= 0]

    # ------------------------------------------------------------ orders
    def obey(self, order: wire.Cut) -> None:
        """Keep a cut, give it to others, and remove older ones."""
        if order.number < self.cut.number:
            return
        back = not order.none and order.iteration < self.cut.iteration
        self.cut, self._look_at = order, 0.0
        self._prune(order, back)
        # The ranks do not need to know the targets.
        self._tell(wire.Cut(iteration=order.iteration, good=order.good, none=order.none))

    def fetch(self, order: wire.Fetch, now: float) -> None:
        """Get an image, unless it is there or on its way."""
        folder, key = self._folder(), _key(order.image)
        if folder is None:
            return
        if image_stream.find(folder, key) is not None:
            self._tell(order)
            return
        if any(mark[0] == key and not mark[2] for mark in self._under_way):  # from an agent that was nearer before
            return
        self._submit(_Task(key, order.holder, failures=self._failures[order.holder.address, False]), now)

    # ------------------------------------------------------------ the agent's loop
    def seconds_to_cut(self, now: float) -> float:
        """Return the seconds until :meth:`give_cut` should be called; infinity while there is nothing to do."""
        return max(0.0, self._look_at - now) if self.cut.targets else float("inf")

    def give_cut(self, now: float) -> None:
        """Give this node's images of the cut to its targets, until all of them have gone."""
        if not self.cut.targets or now < self._look_at:
            return
        self._look_at = now + CUT_LOOK_SECONDS
        mine = [found for found in self._images(CUT_PREFIX) if found.key.iteration >= self.cut.iteration]
        todo = [(one, to) for one in mine for to in self.cut.targets if (one.key, to.element) not in self._sent]
        parts = {(one.key.place, one.key.shard) for one in mine if one.key.kind != UNTRAINED_KIND}
        if not todo and len(parts) >= self.cut.parts:
            self._look_at = float("inf")
        # Untrained tensors first: shards are useless without them.
        for found, holder in sorted(todo, key=lambda each: each[0].key.kind != UNTRAINED_KIND):
            if now >= self._rests.get(holder.address, 0.0):
                self._submit(_Task(found.key, holder, found, self._failures[holder.address, True]), now)

    def finish(self, now: float) -> bool:
        """Take in the threads' results; returns whether the controller must be informed."""
        news = False
        for done in self.results.take_all():
            if isinstance(done, image_server.News):
                news = True
                self._say_once(*done)
                continue
            mark = _mark(done.task)
            self._under_way.discard(mark)
            if done.rate:
                self.rates[done.task.holder.element] = done.rate
            if done.dropped and self._is_slow(done):
                done = replace(done, dropped=False, blames=True)
            if done.dropped:
                pass
            elif done.problem:
                self.failed += 1
                self._not_before[mark] = now + AGAIN_SECONDS
                self._complain(done)
                if done.blames:
                    news = True
                    self._blame(done, now)
            else:
                self._failing.drop(done.task.holder.address)
                if done.task.found is not None:
                    self._refusing.drop(done.task.holder.address)
                    self._sent.add((done.task.key, done.task.holder.element))
                else:
                    news = True
                    self._tell(wire.Fetch(image=structs.Image(**asdict(done.task.key)), holder=done.task.holder))
        return news

    def failing(self, now: float) -> dict[str, structs.Failing]:
        """Return the agents, by address, from which images could not be got recently."""
        return self._failing.current(now)

    def refusing(self, now: float) -> dict[str, structs.Failing]:
        """Return the agents, by address, to which images could not be given recently."""
        return self._refusing.current(now)

    def rows(self, trains: bool) -> list[structs.Image]:
        """Return this node's images that later ones do not overwrite; while no rank trains, those of all states."""
        folder = self._folder()
        if folder is None or (trains and (self.cut.iteration < 0 or self.cut.none)):
            return []
        stays = (CUT_PREFIX, COPY_PREFIX)
        found = (one for one in inventory(folder) if one.key.kind in COPY_KINDS)
        all_states = () if trains else (STATE,)
        return [row(one) for one in found if one.path.name.startswith(stays) or one.key.kind in all_states]

    def newest_saved(self) -> structs.Image | None:
        """Return the newest image of a script without a session in this node."""
        folder = self._folder() if self.plain else None
        kept = [one for one in inventory(folder) if one.key.kind == USER] if folder is not None else []
        return row(max(kept, key=lambda one: (one.key.base, one.key.iteration))) if kept else None

    def refuse(self) -> None:
        """Receive no images, because this node has no memory."""
        if self._server is not None:
            self._server.close()
        self.address = self.token = ""

    def close(self) -> None:
        """End all transfers."""
        self.refuse()
        for worker in (self._giving, self._getting, self._freeing):
            worker.close(wait=False)
        self.results.close()

    # ------------------------------------------------------------ inside
    def _images(self, prefix: str) -> Iterable[ImagePage]:
        folder = self._folder()
        found = inventory(folder) if folder is not None else ()
        return [each for each in found if each.path.name.startswith(prefix)]

    def _submit(self, task: _Task, now: float) -> None:
        mark = _mark(task)
        if mark not in self._under_way and now >= self._not_before.get(mark, 0.0):
            worker = self._getting if task.found is None else self._giving
            with contextlib.suppress(RuntimeError):  # no thread can be started: it is tried again
                worker.submit(functools.partial(self._do, task))
                self._under_way.add(mark)

    def _prune(self, order: wire.Cut, back: bool) -> None:
        """Remove copies of cuts that are not needed any more. The ranks overwrite their own images, but if no cut is
        needed these are removed too, also those of ended ranks. back: the job has gone back before the last cut, so
        images of later iterations are useless."""

        def needed(iteration: int) -> bool:
            return iteration == order.good if back else _needed(order, iteration)

        for prefix in (COPY_PREFIX, CUT_PREFIX) if order.none or back else (COPY_PREFIX,):
            for found in self._images(prefix):
                if found.key.kind in COPY_KINDS and not needed(found.key.iteration):
                    self._remove(found.path)
        self._sent = {(key, element) for key, element in self._sent if needed(key.iteration)}
        self._not_before.clear()

    def _remove(self, path: Path) -> None:
        """Rename an image, so that it is not found any more, and remove it in a thread, since freeing its memory takes
        seconds. If the thread is stopped, the next agent removes it."""
        away = path.with_name(f"{path.name}.{os.getpid()}-{next(self._freed)}.new")
        with contextlib.suppress(OSError, RuntimeError):  # no thread can be started: the next agent removes it
            path.rename(away)
            self._freeing.submit(lambda: away.unlink(missing_ok=True))

    def _blame(self, done: _Outcome, now: float) -> None:
        """Note that the other side did not give or take an image, for the controller."""
        address = done.task.holder.address
        (self._failing if done.task.found is None else self._refusing).add(address, done.problem, now)
        if done.task.found is not None:
            self._rests[address] = now + AGAIN_SECONDS  # time for the controller to name another agent

    def _is_slow(self, done: _Outcome) -> bool:
        """Whether transfers there are so much slower than elsewhere that a cut might not arrive before the next one is
        due."""
        rates = [rate for element, rate in self.rates.items() if element != done.task.holder.element]
        usual = statistics.median(rates) if rates else USUAL_RATE
        return 0.0 < done.rate * SLOWER < min(usual, self._rate or usual)

    def _complain(self, done: _Outcome) -> None:
        what = "give a copy of the training state to" if done.task.found is not None else "get a copy from"
        text = f"couldn't {what} element {done.task.holder.element} at {done.task.holder.address}"
        self._say_once(text, f": {done.problem}; it is tried again")

    def _say_once(self, text: str, more: str = "") -> None:
        if text and text not in self._complained:
            self._complained.add(text)
            self._say(text + more)

    # ------------------------------------------------------------ the threads
    def _do(self, task: _Task) -> None:
        if not self._wanted(task):
            self.results.put(_Outcome(task, dropped=True))
            return
        began = time.monotonic()
        try:
            size = self._transfer(task)
        except image_stream.NoLongerWanted as end:
            self.results.put(_Outcome(task, str(end), dropped=True, rate=end.rate))
            return
        except Exception as error:  # nothing that a peer sends must end the thread
            blames = _blames(task, error)
            self._failures[task.holder.address, task.found is not None] += blames
            self.results.put(_Outcome(task, str(error) or type(error).__name__, blames=blames))
            return
        rate = size / max(1e-6, time.monotonic() - began) if size >= LEAST_MEASURED else 0.0
        self.results.put(_Outcome(task, rate=rate))

    def _wanted(self, task: _Task) -> bool:
        """Whether the transfer is still wanted. After a failure with the same agent it is not, since the controller
        will name another agent, or the same one again."""
        order, giving = self.cut, task.found is not None
        if giving and not (_needed(order, task.key.iteration) and task.holder in order.targets):
            return False
        return task.failures == self._failures[task.holder.address, giving]

    def _transfer(self, task: _Task) -> int:
        """Give or get the image, and return its size."""
        if task.found is not None:
            to = task.holder
            image_client.put(task.found, to.address, to.token, self._meter, self._rate, lambda: self._wanted(task))
            return task.found.used
        if (folder := self._folder()) is None:
            return 0
        return image_client.get(task.key, folder, task.holder.address, task.holder.token, self._meter).used


def _needed(order: wire.Cut, iteration: int) -> bool:
    return not order.none and (iteration == order.good or 0 <= order.iteration <= iteration)


def _blames(task: _Task, error: Exception) -> bool:
    """Whether the other side or the network is to blame, and not this node."""
    if task.found is None:
        return not isinstance(error, (image_stream.NoRoom, image_stream.Busy))
    return isinstance(error, OSError) and not isinstance(error, image_stream.Busy) and error.filename is None


def row(found: ImagePage) -> structs.Image:
    """Return the controller's row about an image."""
    return structs.Image(**asdict(found.key), bytes=found.used)


def _key(image: structs.Image) -> Key:
    return Key(**{field.name: getattr(image, field.name) for field in fields(Key)})


def _mark(task: _Task) -> tuple[Key, int, bool]:
    return task.key, task.holder.element, task.found is not None
