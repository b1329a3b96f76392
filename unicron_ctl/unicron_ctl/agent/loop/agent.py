"""The agent's loop: one poller over the controller, the ranks' channel, their pidfds and standard errors, and signals.

It decides nothing: it reports the state of its ranks at every change and every heartbeat, and obeys the controller.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from unicron_ctl.agent.connections.connections import connect
from unicron_ctl.agent.connections.job_environment import Place, audits
from unicron_ctl.agent.connections.rank_socket import from_rank
from unicron_ctl.agent.connections.signals import ENDING, FOR_THE_SCRIPT, SAVES, SignalPipe, slurm_signals_all
from unicron_ctl.agent.connections.step_tasks import others
from unicron_ctl.agent.loop.controller_registration import Registration
from unicron_ctl.agent.loop.ending import Ending
from unicron_ctl.agent.loop.plans import AT_WORK, LONG_WAIT_SECONDS, Plans, wait_long
from unicron_ctl.agent.loop.reports import Dumps, Reports
from unicron_ctl.agent.loop.stand_in import StandIn
from unicron_ctl.agent.node import node_watch
from unicron_ctl.agent.node.rendezvous_store import Store, StoreProcess
from unicron_ctl.agent.node.sampling import Sampling
from unicron_ctl.agent.node.witness import Witness
from unicron_ctl.agent.ranks.injected_faults import Trials
from unicron_ctl.agent.ranks.rank_logs import RankLogs
from unicron_ctl.agent.ranks.rank_processes import Processes
from unicron_ctl.agent.ranks.ranks import Rank, package_path, rank_environment, stop_all, surroundings_of
from unicron_ctl.agent.ranks.warm_start import WarmStart
from unicron_ctl.agent.snapshots.snapshots import open_snapshots
from unicron_ctl.shared.protocol import wire
from unicron_detector.processes.rank_messages import Save, SavedCheckpoint, Step, Timing, ToRank
from unicron_detector.processes.supervise import adopt_orphans

LOGS_SECONDS = 2.0  # without progress, for the files with the ranks' output
STAY_SECONDS = 3600.0  # for Slurm to end a preempted element, which it would not requeue if that ended by itself
SIGTERM_SECONDS = 0.1  # in which a SIGTERM reaches all processes of a step
UNANSWERED_SECONDS = 3.0  # of waiting for the controller before the job's log says so
FILES_SECONDS = 60.0  # at the end of a training, for files that are still being written


class Agent:
    """Runs `command` once per rank under the controller at `address`; :meth:`run` returns the element's exit code.

    Raises zmq.ZMQError for an invalid address, UserError for a wrong configuration, and whatever else keeps it from
    beginning. After that, no failure ends it.
    """

    AGREES = True  # while the controller is away, its ranks go on with what the job's agents agree on

    def __init__(self, place: Place, command: Sequence[str], address: str):
        self.place, self.command = place, list(command)
        self.identity = uuid.uuid4().hex
        self._address = address
        self._net = connect(place, address, os.environ)
        self.log = self._net.log
        try:
            self._build()
        except BaseException:
            self._net.abandon()
            raise

    def _build(self) -> None:
        """Make all parts. If one cannot be made, the caller runs the command without an agent."""
        place, net = self.place, self._net
        self._layout = ""  # in which the ranks are started, as the controller wants it
        self._last_heard = 0.0  # the time of the controller's last message
        self._plans = Plans(place.slots)
        self._snapshots = open_snapshots(
            place, os.environ, self._to_all, self._plans.writers_before_at_rest, self.log.warn
        )
        self._configuration = node_watch.configuration(self.log.warn, os.environ)
        self._audits = audits(os.environ, self._configuration.agent)
        self.logs = RankLogs(os.environ, place.job)
        self._environment = rank_environment(place, net.ranks.endpoint, dict(os.environ), self._job_variables)
        self.ranks = self._make_ranks()
        for rank in self.ranks.values():
            rank.logs = self.logs
        self.processes = Processes(net, self._from_ranks, self._explain, self._send_status)
        self.warm_start = WarmStart(self.ranks, self.command, net, self.processes.attend)
        self._witness = Witness()
        self._stand_in = StandIn(net, place, self.identity, self.AGREES, self._to_ranks)
        self._trials = Trials(place.job, net, self._witness.door, self.ranks, self._send_to_rank)
        copies, participant = self._snapshots.copies, self._stand_in.participant
        self._reports = Reports(
            place, self.identity, self.ranks, participant, Sampling(net.ranks.folder), copies, net.outbox.send
        )
        self._dumps = Dumps(place.job, self.ranks, net.ranks.endpoint, net.outbox.send)
        self._ending = Ending(self.ranks, self._plans, self._snapshots, self._send_status, self.log)
        self.registration = Registration(place, self.identity, net, self._witness.door, self._stand_in.address, copies)
        self._store = self._make_store()
        self._signals = SignalPipe()
        self._orders = self._order_handlers()
        self._watch_all()

    def _make_store(self) -> Store:
        environment, polling = {**os.environ, "PYTHONPATH": package_path(os.environ)}, self._net.polling
        changed, warn = self._send_status, self.log.warn
        fork = self.warm_start.fork
        return StoreProcess(self.command, environment, fork, polling.watch, polling.unwatch, changed, warn)

    def _make_ranks(self) -> dict[int, Rank]:
        """Return the ranks by slot, without processes."""
        around, environment = surroundings_of(self.place), self._environment
        return {
            slot: Rank(slot, local, self.command, environment, surroundings=around[local])
            for local, slot in enumerate(self.place.slots)
        }

    def _watch_all(self) -> None:
        watch = self._net.polling.watch
        watch(self._net.line.socket, self._from_controller)
        watch(self._net.ranks.socket, self._from_ranks)
        watch(self._net.line.events, self._net.line.notice)
        for socket in self._stand_in.sockets:
            watch(socket, lambda: self._stand_in.serve(time.monotonic()))
        watch(self._signals.fileno(), lambda: self._on_signal(self._signals.read()))
        watch(self._witness.answers.fileno(), lambda: self._reports.testimony(self._witness.answers.take_all()))
        watch(self._net.line.results.fileno(), lambda: [result() for result in self._net.line.results.take_all()])
        watch(self._snapshots.copies.results.fileno(), self._on_copies)
        watch(self._snapshots.files.results.fileno(), self._on_files)

    def connect(self, seconds: float) -> bool:
        """Register; False if no controller takes this agent within `seconds`, or its element is over (`exit_code`)."""
        began = time.monotonic()
        registration, outbox, logged = self.registration, self._net.outbox, False
        while not (registration.welcomed or registration.alone or outbox.closed or self.exit_code is not None):
            waited = time.monotonic() - began
            if waited >= seconds:
                break
            if waited >= UNANSWERED_SECONDS and not logged:  # the job may be ended before the wait is over
                logged = True
                why = registration.why_not(self._address)
                self.log.inform(f"waits up to {seconds:.0f} s for its controller: {why}")
            registration.on_timer()
            self._serve(0.1)
        return registration.welcomed and self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The element's exit code; None until the element is over."""
        return self._ending.exit_code

    @property
    def released(self) -> bool:
        """The command should run without this agent: nothing protects it, and no rank has a world."""
        outside = all(rank.status.state in ("starting", "waiting") for rank in self.ranks.values())
        return self._net.outbox.closed and outside

    def run(self) -> int | None:
        """Start the ranks and serve until the element is over. Return its exit code, None if it was released."""
        attempt = self._net.containment.attempt
        try:
            attempt("watch the node", self._watch_node)
            attempt("adopt what its ranks leave behind", adopt_orphans)
            attempt("start the zygote", lambda: self.warm_start.start_zygote(self._environments(), os.environ))
            attempt("start the rendezvous store", self._store.start)
            for rank in self.ranks.values():
                if not rank.alive:
                    attempt(f"start slot {rank.slot}", partial(self.processes.start, rank, 0))
            while self.exit_code is None and not self.released:
                self._run_once()
        finally:
            self.close()
            codes = {rank.local: rank.status.exit.code for rank in self.ranks.values() if rank.status.exit is not None}
            others.tell_codes({local: code for local, code in codes.items() if code})
        if self._ending.stays:
            time.sleep(STAY_SECONDS)
        return self.exit_code

    def _watch_node(self) -> None:
        self._reports.node = node_watch.start(self.log.warn, os.environ, self._configuration)
        self._net.polling.watch(self._reports.node.fileno(), self._reports.node_events)

    def close(self) -> None:
        """End the ranks, their zygote and the store, and close all sockets. A failed step stops no other."""
        ranks, ending = list(self.ranks.values()), self._ending
        for what, step in (
            ("end the ranks", lambda: stop_all(ranks, ending.stop_seconds)),
            ("say what was healed", ending.log_summary),
            ("end the files", lambda: self._snapshots.files.close(FILES_SECONDS if ending.final else 0.0)),
            ("save the training state", lambda: ending.save()),
            ("end the store", self._store.close),
            ("end the zygote", self.warm_start.close),
            ("end the ranks' files", partial(self.logs.close, LOGS_SECONDS)),
            ("give up what ranks left behind", partial(adopt_orphans, False)),
            ("end the metrics", self._reports.sampling.close),
            ("close the line to the controller", self._net.line.close),
            ("close the line to the ranks", self._net.ranks.socket.close),
            ("close the line to the other agents", self._stand_in.close),
            ("close the sockets", partial(self._net.context.destroy, 500)),
            ("remove the sockets", self._net.ranks.remove),
            ("give the signals back", self._signals.close),
            ("close the door", self._witness.close),
            ("end the copies", self._snapshots.copies.close),
            ("let go of the memory", lambda: self._snapshots.memory.close(self._ending.final)),
            ("end the watch of the node", self._reports.node.close if self._reports.node is not None else lambda: None),
        ):
            self._net.containment.attempt(what, step)

    def _job_variables(self) -> dict[str, str]:
        """Return the variables about the job of a process that starts now."""
        layout = {"UNICRON_LAYOUT": self._layout} if self._layout else {}
        return {**self._snapshots.memory.environment, **self._audits, **layout}

    def _run_once(self) -> None:
        attempt = self._net.containment.attempt
        attempt("wait for what comes", self._wait_for_events)
        now = time.monotonic()
        for what, step in (
            ("send stack traces", self._dumps.send_finished),
            ("report", partial(self._reports.on_timer, now)),
            ("look after the memory", partial(self._snapshots.memory.touch_folder, now)),
            ("look after the copies", partial(self._snapshots.copies.give_cut, now)),
            ("look after the zygote", lambda: self.warm_start.on_timer(now, self._child_pid)),
            ("look after the processes", lambda: self.processes.on_timer(self.ranks.values())),
            ("begin what was forked", self._complete_starts),
            ("answer at the door", self._witness.door.answer),
            ("send a status", partial(self._report, now)),
            ("call the controller", self.registration.on_timer),
            ("say that it waits", self._tell_long_wait),
            ("end", partial(self._end_if_over, now)),
        ):
            attempt(what, step)

    def _tell_long_wait(self) -> None:
        """Log, by element 0 only, that the job waits for more nodes."""
        settings, states = self.place.settings, [rank.status for rank in self.ranks.values()]
        if not self.place.element and not settings.spares and wait_long(states, time.time()):
            waited = f"its ranks have waited {LONG_WAIT_SECONDS:.0f} s for others"
            self.log.warn_once(f"{waited}: `unicronctl explain {self.place.job}` says for which, and why")

    @property
    def _child_pid(self) -> int | None:
        """The process of a child beside the ranks and their zygote that must not be reaped as an orphan."""
        return self._store.pid

    def _wait_for_events(self) -> None:
        """Wait until something must be done. Mere progress of ranks only changes the time of the next report."""
        now, sent = time.monotonic(), self._reports.sent_at
        waits = (
            self._stand_in.participant.seconds_to_tick(now),
            self._dumps.timeout,
            self.warm_start.timeout(now),
            self._snapshots.copies.seconds_to_cut(now),
            self._ending.timeout(now),
        )
        until = now + min(*waits, self.processes.timeout(self.ranks.values(), now))
        while True:
            due = min(until, now + self._reports.status_wait(now), now + self._reports.timeout(now))
            came = self._serve(due - now)
            now = time.monotonic()
            if came != [self._net.ranks.socket] or self._reports.sent_at != sent or now >= due:
                return

    def _report(self, now: float) -> None:
        """Send a status if one is due."""
        urgent = self._stand_in.on_timer(now) or self._trials.restore_network()
        if urgent or self._reports.status_wait(now) <= 0.0:
            self._send_status()

    def _serve(self, seconds: float) -> list[Any]:
        """Wait up to `seconds` for something to read, and serve it; return the sources that were ready."""
        came = self._net.polling.serve(seconds)
        self._complete_starts()
        return came

    def _complete_starts(self) -> None:
        """Start the processes that were forked."""
        self._store.complete_start()
        self.warm_start.start_forked_ranks()

    def _end_if_over(self, now: float) -> None:
        self._ending.end_if_late(now)
        self._ending.end_if_over(now - self._last_heard)

    def _environments(self) -> list[dict[str, str]]:
        """Return environments that differ where ranks may differ: one for each of Slurm's tasks."""
        environment, first = self._environment, self.place.slots[0]
        return [
            environment(first + number, number, number) | ({"UNICRON_LAYOUT": "another"} if number else {})
            for number in range(max(2, len(self.place.tasks)))
        ]

    def _on_copies(self) -> None:
        if self._snapshots.copies.finish(time.monotonic()):
            self._send_status()

    def _on_files(self) -> None:
        for iteration in self._snapshots.files.results.take_all():
            self._to_all(SavedCheckpoint(iteration=iteration))

    def _explain(self, rank: Rank) -> None:
        """Find out why the rank's process has ended."""
        if rank.status.exit is not None and rank.status.exit.code == -signal.SIGTERM and not self._ending.noticed:
            # Slurm may have sent it to all processes of the step.
            self._on_signal(self._signals.read_within(SIGTERM_SECONDS))
        if rank.status.exit is not None and self._reports.node is not None:
            self._reports.node.explain(rank.status.exit)
        self._trials.on_end(rank)
        self._reports.node_events()  # the cause comes before the end

    def _on_signal(self, numbers: bytes) -> None:
        for number in numbers:
            if number == SAVES and self.AGREES:
                states = {rank.status.state for rank in self.ranks.values()}
                self._snapshots.files.request_checkpoint(states.isdisjoint(AT_WORK), self._snapshots.copies.whole)
                self._to_all(Save())
            elif number in FOR_THE_SCRIPT and not slurm_signals_all():
                for rank in self.ranks.values():
                    if rank.child is not None:
                        rank.child.pass_on(number, rank.trainer)
            elif number in ENDING and self.exit_code is None:
                for rank in self.ranks.values() if number == signal.SIGTERM and slurm_signals_all() else ():
                    if rank.child is not None:
                        rank.child.terminated = True
                self._ending.on_signal(number, not self.registration.welcomed or self.place.settings.max_nodes == 1)

    def _from_ranks(self) -> None:
        for identity, data in self._net.ranks.receive():
            self._from_rank(identity, data)
        self._reports.send_steps(time.monotonic())

    def _from_rank(self, identity: bytes, data: bytes) -> None:
        try:
            head, message = from_rank(data)
            rank = self.ranks[head.slot]
            match message:
                case Timing():
                    fields = {**vars(message), "job": self.place.job, "slot": rank.slot}
                    self._net.outbox.send(msgspec.convert(fields, wire.Timing))
                    return
                case Step():
                    self._reports.add_step(rank.slot, message)
                    if message.status is None:
                        return
                    message = message.status
            if head.incarnation != rank.status.incarnation:
                return  # a process that has been replaced
            if rank.on_message(message):
                self._send_status()
            else:
                self._reports.dirty = True
            self._net.ranks.set_identity(rank.slot, identity)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            self.log.drop("a rank", f"{type(error).__name__}: {error}")

    def _send_status(self, leaving: str = "") -> None:
        self._reports.status(self._store.port, leaving, self._ending.noticed)
        self._stand_in.carry_out()
        within = (rank.status.generation for rank in self.ranks.values() if rank.status.state == "running")
        if news := self._plans.on_entered(max(within, default=0)):
            self.log.warn(news)

    def _from_controller(self) -> None:
        while self._net.line.socket.poll(0) and self.exit_code is None:
            self._on_controller(self._net.line.socket.recv())

    def _on_controller(self, data: bytes) -> None:
        if self._net.outbox.muted:
            return  # ZeroMQ may have found a way around an injected loss of the network
        try:
            message = wire.decode(data, wire.ToAgent)
            if not self._net.line.is_current(message.term):
                self.log.drop("the controller", "another controller has taken over from it")
                return
            self._last_heard = time.monotonic()
            self._stand_in.participant.on_controller(self._last_heard)
            self._reports.on_controller(message)
            self._orders[type(message)](message)
        except wire.BadMessage as error:
            if isinstance(error, wire.OtherRelease):
                self.registration.refusal = str(error)
            self.log.drop("the controller", str(error))

    def _order_handlers(self) -> dict[type[wire.Message], Callable[[Any], object]]:
        """Return the handler of each message of wire.ToAgent. One that raises BadMessage has changed nothing."""
        return {
            wire.Welcome: self._on_welcome,
            wire.Ping: self._on_ping,
            wire.Pong: lambda _: None,
            wire.Reach: lambda message: self._witness.try_addresses(message.number, message.targets),
            wire.Refusal: self._on_refused,
            wire.Break: self._on_break,
            wire.Withdraw: self._to_ranks,
            wire.PlanShare: self._on_plan,
            wire.Recall: self._on_recall,
            wire.StartRank: self._on_start_rank,
            wire.StopRank: self._on_stop_rank,
            wire.Cut: self._snapshots.copies.obey,
            wire.Fetch: lambda message: self._snapshots.copies.fetch(message, time.monotonic()),
            wire.Inject: self._trials.perform,
            wire.Stacks: self._dumps.start_dump,
            wire.End: self._on_end,
            wire.Grace: self._ending.on_grace,
            wire.Note: self._on_note,
            wire.Release: self._ending.on_released,
        }

    def _on_ping(self, message: wire.Ping) -> None:
        self._reports.pinged = max(self._reports.pinged, message.number)
        self._stand_in.participant.cede_votes(message.over)
        self._send_status()

    def _on_break(self, message: wire.Break) -> None:
        self._plans.on_break(message.reason)
        self._stand_in.participant.on_break(message)
        self._to_ranks(message)

    def _on_recall(self, message: wire.Recall) -> None:
        if (share := self._plans.share(message.generation)) is not None:
            job, element = self.place.job, self.place.element
            self._net.outbox.send(wire.RecallAnswer(job=job, element=element, agent=self.identity, share=share))

    def _on_start_rank(self, message: wire.StartRank) -> None:
        rank = self.ranks.get(message.slot)
        if rank is not None and not rank.alive and rank.status.incarnation < message.incarnation:
            self._layout = message.layout
            self.processes.start(rank, message.incarnation)

    def _on_stop_rank(self, message: wire.StopRank) -> None:
        rank = self.ranks.get(message.slot)
        if rank is None or rank.status.incarnation != message.incarnation:
            return
        if message.save:
            self._send_to_rank(message.slot, message)
        else:
            rank.kill()
            self._reports.dirty = True

    def _on_note(self, message: wire.Note) -> None:
        if message.at_end:
            self._ending.summary = message.text
        else:
            self.log.warn_once(message.text)

    def _on_plan(self, share: wire.PlanShare) -> None:
        """Pass a plan on to the ranks, or note that the controller takes over what the agents agreed on."""
        participant = self._stand_in.participant
        agreed = participant.agreed
        plan = participant.on_plan(share)
        if plan is not None:
            self._plans.add_plan(share, plan.generation)
            self._to_ranks(plan)
        elif agreed is not None and participant.agreed is None:
            self._plans.add_plan(share, agreed.generation)

    def _on_welcome(self, message: wire.Welcome) -> None:
        self._reports.configure(message.heartbeat_period, message.progress_seconds, message.brief)
        sampling = message.metrics_seconds, message.metrics_directory, time.monotonic(), message.symptom_seconds
        self._reports.sampling.configure(*sampling)
        self._layout, self._ending.notice_seconds = message.layout, message.notice_seconds
        self._snapshots.memory.open(message.run)
        again = self.registration.on_welcome()
        if self._snapshots.memory.folder is None and self._snapshots.copies.address:
            self._snapshots.copies.refuse()
            self.registration.register()
        if again:
            self._reports.send_steps_again()
            self._send_status()
            self._reports.node_events(again=True)

    def _on_end(self, message: wire.End) -> None:
        self._ending.on_order(message)
        self._end_if_over(time.monotonic())

    def _on_refused(self, message: wire.Refusal) -> None:
        self.registration.on_refused(message)
        known = self.registration.was_welcomed
        if message.alone and not message.final and known:
            self._on_end(wire.End(code=0, reason=""))  # its step is over, and it has missed the message
        elif message.replaced or message.apart:
            self.log.warn(message.reason)
            self._ending.end_element(1, "refused by the controller")
        elif message.final:
            self._net.outbox.closed = True
            if known and not self.released:
                what = "this step goes on" if message.alone else "the job trains on"
                self.log.warn(f"{message.reason}; {what} unprotected")
        else:
            self.registration.register_again()

    def _to_ranks(self, message: wire.Break | wire.Withdraw | wire.Plan) -> None:
        self._to_all(message)

    def _to_all(self, message: wire.Message | ToRank) -> None:
        self._net.ranks.send([slot for slot, rank in self.ranks.items() if rank.alive], message)

    def _send_to_rank(self, slot: int, message: wire.Message) -> None:
        if slot in self.ranks and self.ranks[slot].alive:
            self._net.ranks.send([slot], message)
