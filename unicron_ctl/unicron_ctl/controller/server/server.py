"""Runs the controller's loop: sockets in, core, event log, sockets out. Decisions are stored before they are sent."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from unicron_ctl.controller.api import answers
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.core.state_snapshot import read_state
from unicron_ctl.controller.model.asker import EVERYBODY, NOBODY, Asker, Roles
from unicron_ctl.controller.model.quotas import Quotas, cost
from unicron_ctl.controller.server import event_lines
from unicron_ctl.controller.server.credentials import Introducer, Unproven, Verifier, Where
from unicron_ctl.controller.server.fair_queue import OF_ALL, AnswerCache, FairQueue, Question, add_question
from unicron_ctl.controller.server.log_upkeep import LogUpkeep
from unicron_ctl.controller.server.sockets import Ports
from unicron_ctl.controller.server.telling import DAY, Telling
from unicron_ctl.controller.server.worker import Result, Worker
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.store import Progress, Store, StoreError, nothing
from unicron_ctl.shared.log.term import Tenure
from unicron_ctl.shared.notices import notices
from unicron_ctl.shared.protocol import claims, datagrams, long_answers, wire
from unicron_ctl.shared.protocol.answer_schema import ASKED_TOO_MUCH
from unicron_ctl.shared.protocol.controller_discovery import HELLO_BYTES
from unicron_ctl.shared.protocol.encryption import server_keys
from unicron_ctl.shared.protocol.listener import Connection, Listener
from unicron_ctl.shared.protocol.reach import door_at
from unicron_ctl.shared.settings.config import UNTIL_RESTART, Config
from unicron_ctl.shared.slurm.slurm_client import SlurmClient
from unicron_ctl.shared.system.addresses import canonical, origin
from unicron_ctl.shared.system.mailbox import Mailbox
from unicron_ctl.shared.system.throttle import Throttle
from unicron_detector.failures.classify import Classifier
from unicron_detector.words import plural

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("unicron.controller")
TICK_SECONDS, PAUSE_SECONDS = 0.05, 0.2  # between two ticks: from start to start at least, from end to start at most
RECEIVE_SECONDS, RESULTS_SECONDS, ANSWERS_SECONDS = 0.03, 0.02, 0.02  # of one turn of the loop at most
GATHER_SECONDS = 0.002  # from one turn that heard something to the next
BUSY = wire.Answer(ok=False, error=ASKED_TOO_MUCH)
HINTS_PER_TURN = 1000
MAX_SOCKETS = 16384
HINT_BYTES = 2048
COMPLAINTS, COMPLAINTS_KEPT = (1 / 60, 100.0), 1000  # a second and at once, about all peers; peers remembered
COLLECT = 50_000, 50, 100  # thresholds of the garbage collector: state lives long, messages have no cycles
Route = tuple[bytes, ...]


class Server:
    """One controller at `ports`. Raises UserError if it cannot start."""

    def __init__(
        self,
        config: Config,
        store: Store,
        ports: Ports,
        client: SlurmClient | None,
        classifier: Classifier,
        connections: int = MAX_SOCKETS,  # at once
        progress: Progress = nothing,  # called now and then while the log is read
        tenure: Tenure | None = None,  # the right to act; by default for the process's life
    ) -> None:
        self.config, self.store = config, store
        self._tenure = tenure or Tenure()
        self.heard_agents = float("-inf")  # time of the last agent's message
        self._offset = store.time(time.time()) - time.monotonic()  # of a clock that never goes backwards
        saved = store.states()
        store.thin(saved[0][0] if saved else 0, progress)  # older events were thinned before the state was saved
        state = read_state(store, progress)
        self._upkeep = LogUpkeep(store, state, lambda: self.now())
        self.core = Core(config.controller, state, self.now(), classifier, has_slurm=client is not None)
        self._weekly = answers.WeeklySum(self.core, store)
        self.worker = Worker(client, config.controller.probe_timeout, self._tenure, self.now)
        self.watchdog: Callable[[float], object] = lambda now: None  # called in each turn; set by main
        self.turned: Callable[[float], object] = lambda now: None  # the same; raises StoreError to end the loop
        self.dropped: Counter[str] = Counter()
        self._complaints, self._complained = Throttle(*COMPLAINTS), set[str]()
        self._quotas = Quotas()
        self._asked, self._answered = FairQueue[Question](OF_ALL), AnswerCache()
        self._received_at, self._settled_in = float("-inf"), 0.0  # in the last turn
        self._answer_at = 0.0  # questions wait until then
        self._verifier = Verifier(self.worker, self._roles)
        self._began_with, self._munge = config.controller, config.controller.auth == "munge"
        self._verifying: set[tuple[str, str]] = set()
        keys, self.key = server_keys(config.controller, store.path.parent)  # the public key; empty without encryption
        self._hints, self.address, self.exporter = ports.hints, ports.address, ports.exporter
        self.listener = Listener(ports.connections, keys, connections, wire.MAX_BYTES, refused=self._on_refused)
        self.core.view.unread = lambda route: self.listener.unread(route[0])
        self._introducer = Introducer(self.worker, self.key, self._answer_hello)
        self.telling = Telling(self.worker.results, lambda record: self.core.append("", 0, record), self.address)
        for event in store.since(notices.KINDS, self.now() - DAY).events:
            self.telling.note(event)
        self.telling.configure(config.notify, state.told, state.last_event)
        self._stop_read, self._stop_write = os.pipe()
        os.set_blocking(self._stop_write, False)
        self.reload: Callable[[], None] | None = None  # called at SIGHUP; set by main
        self._poller = select.poll()
        ours = self.listener.fileno(), self.worker.results.fileno(), self.worker.verified.fileno(), self._stop_read
        if self.exporter is not None:
            self.worker.took = self.exporter.counts.slurm_took
            self.exporter.counts.expect(classifier.table.causes)
            self._poller.register(self.exporter.asked.fileno(), select.POLLIN)
        for descriptor in (*ours, *(hints.fileno() for hints in self._hints)):
            self._poller.register(descriptor, select.POLLIN)

    def now(self) -> float:
        return self._offset + time.monotonic()

    def run(self) -> None:
        """Serves until `stop`. Raises StoreError if the log can no longer be written, because every action must be in
        it."""
        gc.collect()
        gc.freeze()  # these objects stay: a collection during a recovery need not look at them
        gc.set_threshold(*COLLECT)
        next_tick = self.now()
        self.core.last_tick = next_tick
        running = True
        while running:
            self._wait_for_more()
            self._tenure.assure()
            due = min(next_tick, self._answer_at) if self._asked else next_tick
            wait = 0 if self.core.pending else max(0, int((due - self.now()) * 1000))
            ready = dict(self._poller.poll(wait))
            if self.listener.fileno() in ready:
                self._receive()
            for hints in self._hints:
                if hints.fileno() in ready:
                    self._receive_datagrams(hints)
            if self.worker.results.fileno() in ready:
                self._on_results(self.worker.results)
            if self.worker.verified.fileno() in ready:
                self._on_results(self.worker.verified)
            if self.exporter is not None and self.exporter.asked.fileno() in ready:
                self.exporter.answer(self._present)
            if self._stop_read in ready:
                running = self._on_signal(os.read(self._stop_read, 64))
            heard = self.now()
            self.core.advance_jobs()
            self._settled_in = self.now() - heard
            if self.core.pending:
                self.flush()  # a Break or a plan does not wait for anything else
            if (now := self.now()) >= next_tick:
                if self.exporter is not None:
                    self.exporter.counts.loop_late(now - next_tick)
                self.core.tick(now)
                if self._weekly.is_due(now):
                    self.flush()
                    self._weekly.record_sum(now)
                ended = self.now()  # after a long tick there is as much time for the messages that have come meanwhile
                next_tick = max(now + TICK_SECONDS, ended + min(ended - now, PAUSE_SECONDS))
            self.telling.work(now)
            self.watchdog(now)
            self.turned(now)
            self.flush()
            if self._asked and not self.core.pending and self.now() >= self._answer_at:
                self._answer_some()

    def _present(self) -> Iterable[Metric]:
        from unicron_ctl.controller.server.metrics import gauges  # loaded with the exporter

        assert self.exporter is not None
        self.core.now = self.now()
        return gauges(self.core, self.exporter.counts.failed, self.dropped, self.store.size)

    def record_start(self) -> None:
        """Records the start, once the controller can be reached."""
        jobs = sum(1 for job in self.core.state.jobs.values() if not job.ended)
        reason = f"controller started with {plural(jobs, 'job')} from its log"
        self.core.append(
            "", 0, records.ControllerStarted(pid=os.getpid(), address=self.address, jobs=jobs, reason=reason)
        )

    def stop(self) -> None:
        """Ends the loop. Any thread may call this."""
        os.write(self._stop_write, bytes([signal.SIGTERM]))

    def close(self) -> None:
        """Stores the last decisions, and ends sockets and threads."""
        with contextlib.suppress(StoreError):  # a controller whose term is over writes and sends nothing
            self.flush()
            self._upkeep.save_state(self.core.state)
        if self.exporter is not None:
            self.exporter.close()
        if self._tenure.lease:  # a standby may act at once: no call to Slurm outlives this controller
            self.worker.let_changes_end(self.config.controller.slurm_timeout)
        self.telling.close()
        self.worker.close()
        self.listener.close()
        for hints in self._hints:
            hints.close()
        self.store.close()

    def catch_signals(self) -> None:
        """Makes SIGTERM and SIGINT end the loop, and SIGHUP reload the configuration."""
        signal.set_wakeup_fd(self._stop_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def _on_signal(self, numbers: bytes) -> bool:
        if signal.SIGHUP in numbers and self.reload is not None:
            self.reload()
        return signal.SIGTERM not in numbers and signal.SIGINT not in numbers

    def apply_config(self, config: Config, classifier: Classifier) -> None:
        """Applies a new configuration, except for settings in UNTIL_RESTART, which the event names."""
        self.config = config
        self.core.configure(config.controller, classifier)
        if self.exporter is not None:
            self.exporter.counts.expect(classifier.table.causes)
        self.telling.configure(config.notify, self.core.state.told, self.core.state.last_event)
        reason = f"configuration read again from {config.path or 'the defaults'}"
        new, old = config.controller, self._began_with
        if late := [name for name in UNTIL_RESTART if getattr(new, name) != getattr(old, name)]:
            reason += f"; not applied until unicrond is restarted: {', '.join(late)}"
        self.core.append("", 0, records.ConfigReloaded(reason=reason))

    def keep_config(self, problem: str) -> None:
        """Records why a new configuration is not applied."""
        reason = f"the configuration was not read again, and the old one stays: {problem}"
        self.core.append("", 0, records.ConfigRefused(reason=reason))

    # ------------------------------------------------------------ in
    def _receive(self) -> None:
        """Receives messages for a short time, so that other work does not wait. If the work that follows takes long,
        the time is longer, because that work is done once for all messages."""
        seconds = max(RECEIVE_SECONDS, min(self._settled_in, PAUSE_SECONDS))
        self.listener.receive(self._on_connection_data, time.monotonic() + seconds)
        self._received_at = self.now()

    def _wait_for_more(self) -> None:
        """Waits a moment after messages: those of thousands of agents come one by one, and a turn for several costs
        little more than a turn for one."""
        early = self._received_at + GATHER_SECONDS - self.now()
        if early > 0.0 and not self.core.pending and not self.listener.behind:
            time.sleep(early)

    def _on_connection_data(self, connection: Connection, data: bytes) -> None:
        key = connection.session.key
        if key in self.core.view.live.keys:
            self.listener.is_known(connection)
            self.heard_agents = self.now()
        self._on_message((connection.route,), data, key, connection.address)

    def _on_refused(self, connection: Connection, reason: str) -> None:
        """Records that a connection was closed for what it sent."""
        self.dropped["message"] += 1
        peer = connection.session.key if connection.known else connection.origin  # strangers can make keys at will
        self._complain(records.BadMessage(peer=peer, reason=f"closed a connection of {peer}: {reason}"))

    def _on_message(self, route: Route, data: bytes, key: str, address: str) -> None:
        """Handles one message of the connection with this key."""
        address = canonical(address)  # a socket for both families shows IPv4 addresses as IPv6
        if not self._within_quota(key, address, len(data)):
            self.dropped["rate"] += 1
            reason = f"dropped messages of {origin(address)}: too many"
            return self._complain(records.BadMessage(peer=origin(address), reason=reason))
        try:
            message = wire.decode(data) if self._is_agent(key) else self._decode_stranger(data)
        except wire.BadMessage as error:
            self._refuse_message(route, data, key or (route[0].hex() if route else ""), str(error))
            return
        if message is None:
            self.dropped["stranger"] += 1
            return
        if isinstance(message, wire.Register):  # its door is at the connection's address, whatever the message claims
            message.door = door_at(address or "127.0.0.1", message.door)
        if isinstance(message, wire.Ask):
            self._on_ask(route, message, key, address)
        elif isinstance(message, wire.Register) and self._munge:
            self._verify_registration(route, message, key, address)
        else:
            self.core.receive(route, message, self.now(), key)

    def _within_quota(self, key: str, address: str, size: int) -> bool:
        # Without munge there is one user, who needs no quota.
        return not self._munge or self._quotas.allows(key, address, self._is_agent(key), self.now(), cost(size))

    def _is_agent(self, key: str) -> bool:
        """Whether a registered agent has this key; without munge every peer may be one."""
        return not self._munge or key in self.core.view.live.keys

    def _decode_stranger(self, data: bytes) -> wire.Message | None:
        """Decodes a registration, a question, or the head of a status, so that its agent can be told to register first.
        Returns None for other messages of agents, whose decoding would waste the loop's time. Raises BadMessage."""
        if len(data) > wire.STRANGER_BYTES:
            raise wire.BadMessage(f"register first: {len(data)} bytes are over the {wire.STRANGER_BYTES} before that")
        kind = wire.decode(data, wire.Envelope).kind
        if kind in ("status", "going"):
            head: wire.StatusHead = wire.decode(data, wire.StatusHead)
            return head.status()
        if kind in wire.OF_AGENTS:
            return None
        message: wire.Message = wire.decode(data)
        return message

    def _refuse_message(self, route: Route, data: bytes, peer: str, reason: str) -> None:
        self.dropped["message"] += 1
        self._complain(records.BadMessage(peer=peer, reason=f"dropped a bad message of peer {peer[:16]}: {reason}"))
        if not route:
            return
        # unicronctl waits for an Answer, everyone else understands a Refusal.
        answer: msgspec.Struct = (
            wire.Answer(ok=False, error=reason) if b"\xa3ask" in data[:200] else wire.Refusal(reason=reason)
        )
        self._send(route, answer)

    def _complain(self, record: records.BadMessage | records.RegistrationRefused) -> None:
        """Records a complaint, and so logs it: once for each peer and kind, and not too many in all, so that neither a
        broken peer nor one that invents peers fills the log."""
        name, now = f"{record.kind} {record.peer}", self.now()
        if name in self._complained or not self._complaints.allows("", now):
            return
        if len(self._complained) > COMPLAINTS_KEPT:
            self._complained.clear()
        self._complained.add(name)
        self.core.now = now
        self.core.append("", 0, msgspec.structs.replace(record, peer=record.peer[:100], reason=record.reason[:400]))

    def _roles(self) -> Roles:
        return Roles(self.config.controller.admins, self.config.controller.readers)

    def _verify_registration(self, route: Route, message: wire.Register, key: str, address: str) -> None:
        """Verifies the agent's user before the core gets the registration."""
        name = key, message.agent
        if name in self._verifying:
            return

        def then(asker: Asker | Unproven) -> None:
            self._verifying.discard(name)
            if isinstance(asker, Asker):
                self._quotas.proven(key, asker.uid or 0)
                if asker.user and not asker.admin:
                    message.settings.user = asker.user
                self.core.receive(route, message, self.now(), key, asker)
                return
            reason = f"job {message.job}: {asker.reason}"  # never final: munge may be away, on either side
            peer, node = f"{message.job} {message.element}", message.node
            self._complain(records.RegistrationRefused(peer=peer, node=node, reason=f"{node}: {reason}"))
            self._send(route, wire.Refusal(reason=reason))

        self._verifying.add(name)
        if not self._verifier.verify(message.credential, claims.of_agent(message, key), key, address, then):
            self._verifying.discard(name)

    def _receive_datagrams(self, hints: socket.socket) -> None:
        for _ in range(HINTS_PER_TURN):
            try:
                data, where = hints.recvfrom(HINT_BYTES)
            except (BlockingIOError, ConnectionError):
                return
            is_hello = len(data) >= HELLO_BYTES
            try:
                if is_hello:
                    wire.decode(data, datagrams.Hello)
                    self._introducer.on_hello((hints, where), self.now())
                else:
                    self.core.hint(datagrams.hint(data), self.now())
            except wire.BadMessage as error:
                self.dropped["hint"] += 1
                if isinstance(error, wire.OtherRelease):
                    who = "the agent or unicronctl" if is_hello else "the plugin"
                    reason = f"dropped a message of {who} at {where[0]}: {error}"
                    self._complain(records.BadMessage(peer=f"datagram {where[0]}", reason=reason))
                if is_hello:
                    self._answer_hello(wire.encode(datagrams.Introduction(error=str(error)[:200])), (hints, where))

    def _answer_hello(self, data: bytes, where: Where) -> None:
        with contextlib.suppress(OSError):
            if self._tenure.valid:
                where[0].sendto(data, where[1])

    def _on_results(self, mailbox: Mailbox[Result]) -> None:
        """Takes the results of threads, for a part of the time until the next tick; the rest waits for the next
        turn."""
        until = self.now() + RESULTS_SECONDS
        for result in mailbox.each(lambda: self.now() >= until):
            self.core.now = self.now()
            result()

    # ------------------------------------------------------------ out
    def _on_ask(self, route: Route, ask: wire.Ask, key: str, address: str) -> None:
        if not self._munge or not ask.credential:
            self._queue_question(Question(route, ask, NOBODY if self._munge else EVERYBODY, address))
            return

        def then(asker: Asker | Unproven) -> None:
            if isinstance(asker, Unproven):
                self._send(route, wire.Answer(ok=False, error=asker.reason))
            else:
                self._queue_question(Question(route, ask, asker, address))

        if not self._verifier.verify(ask.credential, claims.of_asker(key), key, address, then):
            self._send(route, BUSY)

    def _queue_question(self, question: Question) -> None:
        if not add_question(self._asked, question):
            self._send(question.route, BUSY)

    def _answer_some(self) -> None:
        """Answers askers in turn, for a part of the time until the next tick, because no question may delay a Break.
        The next questions wait as long as these take."""
        began = self.now()
        until = began + ANSWERS_SECONDS
        while self._asked and self.now() < until:
            question = self._asked.next()
            if self._munge and not self._quotas.may_ask(question.pays, question.address, self.now()):
                self._send(question.route, BUSY)
            else:
                self._answer(question)
        ended = self.now()
        self._answer_at = ended + (ended - began)

    def _answer(self, question: Question) -> None:
        """Sends the answer, and charges the asker for the memory and time that it took."""
        began = self.now()
        data = self._answered.get(question, began, self.core.state.last_event)
        if data is None:
            data = self._make_answer(question)
            self._answered.keep_answer(question, data, self.now() - began, self.now())
        if self._munge:
            now = self.now()
            self._quotas.charge_answer(question.pays, question.address, now, cost(len(data), now - began) - 1.0)
        self._send_bytes(question.route, data)

    def _make_answer(self, question: Question) -> bytes:
        self.core.now = self.now()
        self.core.advance_jobs()
        self.flush()  # the log must hold everything that the answer shows
        ask = question.ask
        try:
            data = answers.answer(self.core, self.store, ask.what, ask.args, question.asker)
            return long_answers.encode(data, ask.unpacks)
        except (answers.Unanswerable, StoreError) as error:
            reply = wire.Answer(ok=False, error=str(error))
        except Exception as error:  # a question must not end the controller
            log.exception("could not answer %s", ask.what[:50])
            kind = type(error).__name__
            reply = wire.Answer(ok=False, error=f"the controller could not answer ({kind}): see its log")
        return wire.encode(reply)

    def flush(self) -> None:
        """Stores the decisions, then sends them."""
        core = self.core
        events, core.events = core.events, []
        if events:
            self.store.append(events)
            self._upkeep.thin(events[-1].id)
        self._tenure.assure()  # the log may have been taken over since
        self._send_outbox()
        requests, core.requests = core.requests, []
        for request in requests:
            self.worker.submit(request, core)
        for event in events:  # after the messages: standard error may be slow, and no agent waits for it
            event_lines.log_event(event, core.state)
            self.telling.note(event)
            if self.exporter is not None:
                self.exporter.counts.note(event)
        if not core.busy:
            self._upkeep.work(core.state)

    def _send_outbox(self) -> None:
        outbox, self.core.outbox = self.core.outbox, []
        last: tuple[wire.Message | None, bytes] = None, b""
        for route, sends in groupby(outbox, attrgetter("route")):
            encoded: list[bytes] = []
            for send in sends:
                if send.message is not last[0]:  # a message to many agents is encoded once
                    last = send.message, self._encode(send.message)
                encoded.append(last[1])
            self._send_bytes(route, *encoded)

    def _send(self, route: Route, message: msgspec.Struct) -> None:
        self._send_bytes(route, self._encode(message))

    def _encode(self, message: msgspec.Struct) -> bytes:
        """Encodes the message with this controller's term, by which agents know messages of an older controller."""
        if isinstance(message, wire.Message):
            message.term = self.store.term
        return wire.encode(message)

    def _send_bytes(self, route: Route, *messages: bytes) -> None:
        if not self.listener.send(route[0], *messages):
            self.dropped["send"] += 1  # the peer is gone or does not read; important messages are repeated
