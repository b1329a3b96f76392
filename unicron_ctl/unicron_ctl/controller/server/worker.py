"""Does the controller's slow work in threads: Slurm's programs in two lanes, probes and credentials in other threads.
Results are calls of the core, made in the main thread.

One lane is for urgent requests, so that they never wait behind a slow listing or a long list of actions. Changes of the
same element or node keep their order across both lanes (`Order`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.requests import POWER_OFF, Action, Knock, Poll, Probe, Run, TestPairs
from unicron_ctl.controller.server.fair_queue import FairQueue
from unicron_ctl.controller.server.switching_off import switch_off
from unicron_ctl.shared.log.term import Tenure
from unicron_ctl.shared.protocol.reach import reach
from unicron_ctl.shared.slurm import drains
from unicron_ctl.shared.slurm.pairs import Findings, Runner, Wish
from unicron_ctl.shared.slurm.slurm_client import (
    MOST_CHARACTERS,
    SOMEBODY,
    UNSAID,
    ElementInfo,
    NodeInfo,
    Queue,
    Site,
    SlurmClient,
    SlurmError,
    SlurmTimeout,
)
from unicron_ctl.shared.slurm.squeue import nodes_of
from unicron_ctl.shared.slurm.states import IN_USE
from unicron_ctl.shared.slurm.steps import search_path
from unicron_ctl.shared.system.errors import shorten
from unicron_ctl.shared.system.mailbox import Mailbox

Result = Callable[[], None]
Target = tuple[str, int]
Lane = queue.SimpleQueue[Callable[[], None] | None]  # None ends its thread
log = logging.getLogger("unicron.controller")
WORKERS, VERIFIERS = 64, 4  # probes mostly wait, and a whole rack may fall silent at once
SWITCHES = 16  # programs that switch nodes off at a time
AT_ONCE, OF_ONE_MACHINE, OF_ONE_ADDRESS = 4096, 1024, 512  # credentials that may wait to be verified
OURSELVES = "controller", "", ""  # the queue path of the controller's own credential
SETTINGS_SECONDS = 60.0  # between two reads of Slurm's PrivateData and topology
LEFT_OUT = "left out: an action before it failed"
PUT_OFF = "put off: Slurm is slow, and what it shows by now comes first"
TAKEN_OVER = "put off: calls of the controller before this one may still be under way"
NOT_OURS = "put off: this controller could not renew its lease"
TOO_LATE = "put off: too late, since it was decided some time ago"
QUEUE_SHARE = 1 / 30  # of the time, for reading the whole queue if that is slow; six times that if need be
LONGEST_QUEUE = 120.0  # seconds between two reads of it, at most
RUN_SECONDS = 10.0  # for the actions of one request; then Slurm is listed again, and the rest is decided anew


class Order:
    """Makes both lanes change each element or node in the order of submission. Each lane itself works in that order, so
    the two never block each other."""

    def __init__(self) -> None:
        self._waiting: dict[Target, deque[int]] = {}
        self._next = 0
        self._changed = threading.Condition()

    def book(self, run: Run) -> list[int]:
        """Returns a ticket for each action."""
        with self._changed:
            tickets = list(range(self._next, self._next + len(run.actions)))
            self._next += len(tickets)
            for action, ticket in zip(run.actions, tickets, strict=True):
                self._waiting.setdefault(action.target, deque()).append(ticket)
            return tickets

    def wait_for_turn(self, target: Target, ticket: int) -> None:
        """Waits until the earlier actions are done. Each is one call of Slurm with a time limit of its own."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[target][0] == ticket)

    def note_done(self, target: Target) -> None:
        """Notes that the target's current action is done."""
        with self._changed:
            waiting = self._waiting[target]
            waiting.popleft()
            if not waiting:
                del self._waiting[target]
            self._changed.notify_all()


class Others:
    """Finds the elements of jobs that Unicron does not plan. The longer it takes to read the whole queue, the less
    often it is read; in between, the nodes show what runs on them."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._seen = Queue()
        self._read_at, self._took = -LONGEST_QUEUE, 0.0
        self._before: set[str] = set()  # nodes with an element of ours in the last listing
        self._shared: set[str] = set()  # nodes with elements of ours and of others when the queue was last read

    def read(self, nodes: Sequence[NodeInfo], own: Sequence[ElementInfo], poll: Poll) -> list[ElementInfo]:
        """Returns the elements of other jobs that occupy nodes or wait. own: the elements of `poll.jobs`."""
        age, least = time.monotonic() - self._read_at, self._took / QUEUE_SHARE
        here = {name for e in own for name in nodes_of(e)}
        fresh = age >= min(LONGEST_QUEUE, least / 6 if poll.all else least)
        # If one of ours has started on a node since, the others may have left it, and no plan may take it for them.
        fresh = fresh or not self._shared.issuperset(here & self._nodes_of_others(poll))
        if fresh:
            began = time.monotonic()
            self._seen = self._client.others(poll.jobs)
            self._read_at = time.monotonic()
            self._took = self._read_at - began
            self._shared = here & self._nodes_of_others(poll)
        others = [e for e in self._seen.elements if e.job not in poll.jobs]
        if not fresh or self._seen.cut:
            others = self._by_nodes(nodes, others, here | self._before, fresh)
        self._before = here
        return others

    def _nodes_of_others(self, poll: Poll) -> set[str]:
        """Returns the nodes that other jobs had when the queue was last read."""
        at_work = (e for e in self._seen.elements if e.job not in poll.jobs and e.state != "PENDING")
        return {name for e in at_work for name in nodes_of(e)}

    def _by_nodes(
        self, nodes: Sequence[NodeInfo], others: Sequence[ElementInfo], ours: Collection[str], fresh: bool
    ) -> list[ElementInfo]:
        """Corrects the queue by the nodes' states: an idle node is free; a busy node without a known job has an unknown
        one."""
        idle = {node.name for node in nodes if not node.states & IN_USE} if not fresh else set()
        kept = [e for e in others if e.state == "PENDING" or not idle.issuperset(nodes_of(e))]
        there = {name for e in kept if e.state != "PENDING" for name in nodes_of(e)}
        busy = (node.name for node in nodes if node.states & {"ALLOCATED", "MIXED"})
        return kept + [somebody(name) for name in busy if name not in there and name not in ours]


def somebody(node: str) -> ElementInfo:
    """Make a stand-in for the node's unknown job, until the queue is read again."""
    return ElementInfo(SOMEBODY, 0, "", "RUNNING", node, "", "", "", "", 0, brief=True)


class Worker:
    """Carries out requests."""

    def __init__(
        self,
        client: SlurmClient | None,
        probe_timeout: float,
        tenure: Tenure | None = None,
        now: Callable[[], float] = time.time,  # the controller's clock
    ) -> None:
        self._client, self._probe_timeout, self._now = client, probe_timeout, now
        self._tenure = tenure or Tenure()  # the right to change anything in Slurm
        self.not_before = float("-inf")
        """A time of `time.monotonic` before which nothing in Slurm is changed, because calls of the previous controller
        may still be under way."""
        self._lanes: tuple[Lane, Lane] = queue.SimpleQueue(), queue.SimpleQueue()
        self._order = Order()
        self.took: Callable[[str, float], object] = lambda call, seconds: None  # called after each call of Slurm
        self._others = Others(client) if client is not None else None
        self._site = UNSAID
        self._site_read_at = -SETTINGS_SECONDS
        self.results: Mailbox[Result] = Mailbox()  # calls for the main thread
        self.verified: Mailbox[Result] = Mailbox()  # the same for credentials, of which strangers can send many
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="unicron-probe")
        self._verifiers = ThreadPoolExecutor(VERIFIERS, thread_name_prefix="unicron-credential")
        self._switches = ThreadPoolExecutor(SWITCHES, thread_name_prefix="unicron-power-off")
        self._credentials: FairQueue[Callable[[], None]] = FairQueue(AT_ONCE, OF_ONE_MACHINE, OF_ONE_ADDRESS)
        self._turns = threading.Lock()
        self._changed, self._changing = threading.Condition(), 0  # number of changes of Slurm under way
        self._stops = threading.Event()  # programs of power_off are killed
        self._pairs: Runner | None = None
        for name, lane in zip(("unicron-slurm", "unicron-urgent"), self._lanes, strict=True):
            threading.Thread(target=_serve_lane, args=(lane,), name=name, daemon=True).start()

    def submit(self, request: Poll | Run | Probe | Knock | TestPairs, core: Core) -> None:
        """Starts a request; its result goes to `core`."""
        if isinstance(request, Probe):
            for place, target in enumerate(request.targets):
                if target:
                    self.call(partial(reach, target, self._probe_timeout), partial(core.on_probe, request, place))
        elif isinstance(request, Knock):
            self.call(partial(reach, request.address, self._probe_timeout), partial(core.on_knock, request))
        elif isinstance(request, TestPairs):
            threading.Thread(target=self._test_pairs, args=(request, core), name="unicron-pairs", daemon=True).start()
        elif isinstance(request, Poll):
            self._lanes[False].put(partial(self._poll, request, core))
        elif any(action.action == POWER_OFF for action in request.actions):  # neither lane waits for the site's program
            self._switches.submit(self._switch_off, request, core)
        else:
            self._lanes[request.urgent].put(partial(self._run, request, self._order.book(request), core))

    def call(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Runs `work` in a thread, then `then(result)` in the main thread. The result of work that fails is None."""
        self._pool.submit(_run_work, work, then, self.results)

    def verify(
        self, work: Callable[[], Any], then: Callable[[Any], None], whose: tuple[str, str, str] = OURSELVES
    ) -> bool:
        """Runs `work` in the threads for munge: if munge hangs, probes still run. Machines, the addresses of each and
        the connections of each address are served in turn. Returns False if there is no room for more."""
        with self._turns:
            if not self._credentials.add(whose, partial(_run_work, work, then, self.verified)):
                return False
        self._verifiers.submit(self._verify_next)
        return True

    def _verify_next(self) -> None:
        with self._turns:
            run = self._credentials.next()
        run()

    def close(self) -> None:
        """Lets running calls end, but not programs of power_off, and starts no more."""
        self._stops.set()
        self._stop_pairs()
        for lane in self._lanes:
            lane.put(None)
        for pool in (self._pool, self._verifiers, self._switches):
            pool.shutdown(wait=False, cancel_futures=True)
        self.results.close()
        self.verified.close()

    def let_changes_end(self, seconds: float) -> None:
        """Starts no more changes of Slurm, and waits for those under way. Programs of power_off are killed."""
        self.not_before = float("inf")
        self._stops.set()
        self._stop_pairs()
        with self._changed:
            self._changed.wait_for(lambda: not self._changing, seconds)

    def _test_pairs(self, request: TestPairs, core: Core) -> None:
        """Tests a node in pairs. Its sruns have time limits of their own."""
        found: Findings | str = NOT_OURS
        try:
            if self._client is not None and self._tenure.valid and not self._stops.is_set():
                known = {kind.rpartition(" ")[2]: limit for kind, limit in request.limits.items()}
                wish = Wish(known=known, partition=request.partition)
                runner = self._pairs = Runner(self._client.nodes(), wish, search_path(), log.info)
                found = runner.play([request.node], request.partners)
        except Exception as error:
            found = shorten(f"{type(error).__name__}: {error}", MOST_CHARACTERS)
        finally:
            self._pairs = None
        self.results.put(partial(core.on_pair_test, request, found))

    def _stop_pairs(self) -> None:
        if (runner := self._pairs) is not None:
            runner.stop()

    def _poll(self, poll: Poll, core: Core) -> None:
        assert self._client is not None and self._others is not None
        began = time.monotonic()
        try:
            nodes, own = self._client.nodes(), self._client.elements(poll.jobs)
            took = time.monotonic() - began
            elements = own + self._others.read(nodes, own, poll)
            if time.monotonic() - self._site_read_at >= SETTINGS_SECONDS:
                private, domains, self._site_read_at = self._client.private_data(), self._site.domains, time.monotonic()
                with contextlib.suppress(SlurmError):  # not essential: the last answer still holds
                    domains = self._client.domains()
                kill_wait, grace, shrinks = self._client.kill_wait(), self._client.grace(), self._client.shrinks()
                self._site = Site(private, domains, kill_wait, grace, shrinks)
            self.results.put(partial(core.on_listing, nodes, elements, self._site, took))
        except SlurmError as error:
            self.results.put(partial(core.on_slurm_error, str(error)))
        except Exception as error:  # it must not end the thread: Slurm would never be listed again
            text = shorten(f"could not read Slurm's answer: {type(error).__name__}: {error}", MOST_CHARACTERS)
            self.results.put(partial(core.on_slurm_error, text))
        finally:
            self.took("list", time.monotonic() - began)

    def _run(self, request: Run, tickets: list[int], core: Core) -> None:
        """Carries out actions, for RUN_SECONDS at most or until Slurm does not answer a call."""
        failed: set[Target] = set()
        until, over = time.monotonic() + RUN_SECONDS, False
        for action, ticket in zip(request.actions, tickets, strict=True):
            self._order.wait_for_turn(action.target, ticket)
            try:
                if over:
                    error = PUT_OFF
                elif action.target in failed:
                    error = LEFT_OUT
                else:
                    error, hangs = self._act(action)
                    over = hangs or time.monotonic() >= until
            finally:
                self._order.note_done(action.target)
            if error:
                failed.add(action.target)
            self.results.put(partial(core.on_action, action, error))
        self.results.put(partial(core.on_actions_done, request.urgent))

    def _switch_off(self, request: Run, core: Core) -> None:
        for action in request.actions:
            error, _ = self._act(action)
            self.results.put(partial(core.on_action, action, error))
        self.results.put(partial(core.on_actions_done, request.urgent))

    def _act(self, action: Action) -> tuple[str, bool]:
        """Carries out one action. Returns the reason of a failure, and whether Slurm gave no answer."""
        assert self._client is not None
        with self._changed:
            if time.monotonic() < self.not_before:
                return TAKEN_OVER, True
            if not self._tenure.valid:
                return NOT_OURS, True
            if self._now() > action.not_after:
                return TOO_LATE, False
            self._changing += 1
        began = time.monotonic()
        try:
            perform(self._client, action, self._stops.is_set)
        except SlurmError as error:
            return str(error), isinstance(error, SlurmTimeout)
        except Exception as error:
            return shorten(f"{type(error).__name__}: {error}", MOST_CHARACTERS), False
        finally:
            self.took(action.action, time.monotonic() - began)
            with self._changed:
                self._changing -= 1
                self._changed.notify_all()
        return "", False


def _serve_lane(lane: Lane) -> None:
    while (work := lane.get()) is not None:
        work()


def _run_work(work: Callable[[], Any], then: Callable[[Any], None], results: Mailbox[Result]) -> None:
    try:
        result = work()
    except Exception as error:  # `then` has to run after a failure, too
        log.warning("work in the background failed: %r", error)
        result = None
    results.put(lambda: then(result))


def perform(client: SlurmClient, action: Action, stops: Callable[[], bool] = lambda: False) -> None:
    """Carry out one action by a call of the client. Raises SlurmError. stops: unicrond is about to end."""
    match action.action:
        case "down":
            client.down(action.node, action.text)
        case "drain":
            log.info(drains.drain_node(client, action.node, action.text))
        case "power_off":
            switch_off(action.text, action.node, stops=stops)
        case "resume":
            client.resume(action.node)
        case "requeue":
            client.requeue(action.job, action.element)
        case "requeue_hold":
            client.requeue_hold(action.job, action.element, action.text)
        case "hold":
            client.hold(action.job, action.element, action.text)
        case "release":
            client.release(action.job, action.element, action.text)
        case "pin":
            client.pin(action.job, action.element, action.node or None)
        case "shrink":
            client.shrink(action.job, action.text)
        case "start_now":
            client.start_now(action.job, action.element)
        case "cancel":
            client.cancel(action.job, action.element, action.text)
        case "comment":
            client.comment(action.job, action.element, action.text)
        case other:
            raise ValueError(f"no such action: {other}")
