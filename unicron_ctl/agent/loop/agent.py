"""The agent's loop: one poller over the controller, the ranks' channel, their pidfds and standard errors, and signals.

It decides nothing: it reports the state of its ranks, at every change and at every heartbeat, and does what the
controller says.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from unicron.ctl.agent.connections.containment import Containment
from unicron.ctl.agent.connections.controller_connection import Line
from unicron.ctl.agent.connections.identity import Place, memory_rate
from unicron.ctl.agent.connections.job_log import JobLog
from unicron.ctl.agent.connections.outbox import Outbox
from unicron.ctl.agent.connections.polling import Polling
from unicron.ctl.agent.connections.rank_socket import RankLine, from_rank, socket_folder
from unicron.ctl.agent.connections.signals import ENDING, ENDING_SECONDS, FORWARDED, SAVES, SignalPipe
from unicron.ctl.agent.loop.controller_registration import Registration
from unicron.ctl.agent.loop.dumps import Dumps
from unicron.ctl.agent.loop.plans import AT_WORK, Plans
from unicron.ctl.agent.loop.reports import Reports
from unicron.ctl.agent.loop.stand_in import StandIn
from unicron.ctl.agent.node import node_watch
from unicron.ctl.agent.node.rendezvous_store import Store, StoreProcess
from unicron.ctl.agent.node.sampling import Sampling
from unicron.ctl.agent.node.witness import Witness
from unicron.ctl.agent.ranks.injected_faults import Trials
from unicron.ctl.agent.ranks.rank_processes import Processes
from unicron.ctl.agent.ranks.ranks import STOP_SECONDS, Rank, package_path, rank_environment, stop_all
from unicron.ctl.agent.ranks.warm_start import Warmth
from unicron.ctl.agent.snapshots.checkpoint_files import Files
from unicron.ctl.agent.snapshots.last_checkpoint import LastCheckpoint
from unicron.ctl.agent.snapshots.node_memory import Memory, within
from unicron.ctl.agent.snapshots.peer_copies import Copies
from unicron.ctl.protocol import wire
from unicron.ctl.settings.limits import ORPHAN_SECONDS
from unicron.detector.processes.rank_messages import Save, Saved, Step, Timing, ToRank
from unicron.detector.processes.supervise import adopt_orphans, shell_status

FILES_SECONDS = 60.0  # at the end of a training, for files that are still being made
SAVE_SECONDS = 600.0  # at the end by an error, for what memory has


@dataclass
class Ending:
    """How the element ends. trained: the controller says that the job is trained to its end. final: nobody will go on
    with this job. save: writes the training state. stop_seconds: for ranks to act on SIGTERM."""

    exit_code: int | None = None
    trained: bool = False
    final: bool = False
    save: Callable[[], None] | None = None
    stop_seconds: float = STOP_SECONDS


class Agent:
    """Runs `command` once per rank under the controller at `address`; :meth:`run` returns the element's exit code.

    Raises zmq.ZMQError for an address that is none, UserError for a
    wrong configuration, and whatever else keeps it from beginning. From then on nothing that fails ends it.
    """

    AGREES = True  # its ranks go on by what the job's agents agree on while the controller is away

    def __init__(self, place: Place, command: Sequence[str], address: str):
        self.place, self.command = place, list(command)
        self.identity = uuid.uuid4().hex
        self._context = zmq.Context()
        self._folder = ""  # of the ranks' socket
        try:
            self._build(place, address)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _build(self, place: Place, address: str) -> None:
        """Make all parts. Where one cannot be made the caller runs the command without an agent."""
        self._line = Line(self._context, address)
        self.log = JobLog(place)
        self._containment = Containment(self.log.warn)
        self._outbox = Outbox(self._line, self.log)
        self._memory = Memory(place, os.environ, self.log.warn)
        self._copies = Copies(lambda: self._memory.folder, place, os.environ, self._to_all, self.log.warn)
        self._plans = Plans(place.slots)
        self._files = Files(self._memory, self._plans.writers_before_at_rest, memory_rate(os.environ), self.log.warn)
        self._folder = socket_folder(place.job, os.environ)
        self._rank_line = RankLine(self._context, self._folder)
        self._layout = ""  # in which the ranks are started, as the controller wants it
        environment = self._environment = rank_environment(
            place, self._rank_line.endpoint, dict(os.environ), self._told
        )
        self.ranks: dict[int, Rank] = {
            slot: Rank(slot, local, self.command, environment) for local, slot in enumerate(place.slots)
        }
        self._witness = Witness()
        self._stand_in = StandIn(
            self._context,
            place,
            self.identity,
            self._line.pair,
            self.AGREES,
            self._to_ranks,
            self._outbox,
            self.log,
        )
        self._trials = Trials(
            place.job, self._line, self._outbox, self._witness.door, self.ranks, self._send_to_rank, self.log
        )
        participant, sampling = self._stand_in.participant, Sampling(self._rank_line.folder)
        send = self._outbox.send
        self._reports = Reports(place, self.identity, self.ranks, participant, sampling, self._copies, send)
        self._dumps = Dumps(place.job, self.ranks, self._rank_line.endpoint, send)
        self._ending = Ending()
        self._last_heard = 0.0  # of the controller
        self._polling = Polling(self._containment)
        self.registration = Registration(
            place,
            self.identity,
            self._line,
            self._outbox,
            self._polling,
            self._witness.door,
            self._stand_in.address,
            self._copies,
        )
        self._signals = SignalPipe()
        self._watch_all()
        self._processes = Processes(
            self._polling, self._rank_line, self._from_ranks, self._explain, self._send_status, self.log
        )
        watch, unwatch = self._polling.watch, self._polling.unwatch
        self._warmth = Warmth(self.ranks, self.command, watch, unwatch, self._processes.attend, self.log)
        self._store: Store = StoreProcess(
            self.command,
            {**os.environ, "PYTHONPATH": package_path(os.environ)},
            self._warmth.fork,
            watch,
            unwatch,
            self._send_status,
            self.log.warn,
        )

    def _watch_all(self) -> None:
        """Watch the sockets and descriptors that there are from the beginning."""
        watch = self._polling.watch
        watch(self._line.socket, self._from_controller)
        watch(self._rank_line.socket, self._from_ranks)
        watch(self._line.events, self._line.notice)
        for socket in self._stand_in.sockets:
            watch(socket, lambda: self._stand_in.serve(time.monotonic()))
        watch(self._signals.fileno(), lambda: self._on_signal(self._signals.read()))
        watch(self._witness.answers.fileno(), lambda: self._reports.testimony(self._witness.answers.take_all()))
        watch(self._line.results.fileno(), lambda: [result() for result in self._line.results.take_all()])
        watch(self._copies.results.fileno(), self._copies_news)
        watch(self._files.results.fileno(), self._files_news)

    # ------------------------------------------------------------ life
    def connect(self, seconds: float) -> bool:
        """Register; False when no controller takes this agent within `seconds`, or when it is over (`exit_code`)."""
        deadline = time.monotonic() + seconds
        registration = self.registration
        while not (registration.welcomed or registration.alone or self._outbox.closed or self.exit_code is not None):
            if time.monotonic() >= deadline:
                break
            registration.on_timer()
            self._serve(0.1)
        return registration.welcomed and self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None until the element is over."""
        return self._ending.exit_code

    @property
    def released(self) -> bool:
        """Whether the command is to run without this agent: nothing protects it, and no rank has a world."""
        outside = all(rank.status.state in ("starting", "waiting") for rank in self.ranks.values())
        return self._outbox.closed and outside

    def run(self) -> int | None:
        """Start the ranks and serve until the element is over; None when it was released before it had a world."""
        attempt = self._containment.attempt
        try:
            attempt("watch the node", self._watch_node)
            attempt("adopt what its ranks leave behind", adopt_orphans)
            attempt("start the zygote", lambda: self._warmth.start_zygote(*self._environments(), os.environ))
            attempt("start the rendezvous store", self._store.start)
            for rank in self.ranks.values():
                if not rank.alive:
                    attempt(f"start slot {rank.slot}", partial(self._processes.start, rank, 0))
            while self.exit_code is None and not self.released:
                self._run_once()
        finally:
            self.close()
        return self.exit_code

    def _watch_node(self) -> None:
        self._reports.node = node_watch.start(self.log.warn, os.environ)
        self._polling.watch(self._reports.node.fileno(), self._reports.node_events)

    def close(self) -> None:
        """End the ranks, their zygote and the store, leave no socket behind. What fails there stops nothing else."""
        for what, step in (
            ("end the ranks", lambda: stop_all(list(self.ranks.values()), self._ending.stop_seconds)),
            ("end the files", lambda: self._files.close(FILES_SECONDS if self._ending.final else 0.0)),
            ("save the training state", self._ending.save or (lambda: None)),
            ("end the store", self._store.close),
            ("end the zygote", self._warmth.close),
            ("give up what ranks left behind", partial(adopt_orphans, False)),
            ("end the metrics", self._reports.sampling.close),
            ("close the line to the controller", self._line.close),
            ("close the line to the ranks", self._rank_line.socket.close),
            ("close the line to the other agents", self._stand_in.close),
            ("close the sockets", partial(self._context.destroy, 500)),
            ("remove the sockets", partial(shutil.rmtree, self._rank_line.folder, ignore_errors=True)),
            ("give the signals back", self._signals.close),
            ("close the door", self._witness.close),
            ("end the copies", self._copies.close),
            ("let go of the memory", lambda: self._memory.close(self._ending.final)),
            ("end the watch of the node", self._reports.node.close if self._reports.node is not None else lambda: None),
        ):
            self._containment.attempt(what, step)

    def _told(self) -> dict[str, str]:
        """What a process that starts now is told of the job."""
        return {**self._memory.environment, **({"UNICRON_LAYOUT": self._layout} if self._layout else {})}

    def _run_once(self) -> None:
        attempt = self._containment.attempt
        attempt("wait for what comes", self._wait_for_events)
        now = time.monotonic()
        for what, step in (
            ("send stack traces", self._dumps.send_finished),
            ("report", partial(self._reports.on_timer, now)),
            ("look after the memory", partial(self._memory.touch_folder, now)),
            ("look after the copies", partial(self._copies.give_cut, now)),
            ("look after the zygote", lambda: self._warmth.on_timer(now, self._child_pid)),
            ("look after the processes", lambda: self._processes.on_timer(self.ranks.values())),
            ("begin what was forked", self._complete_starts),
            ("answer at the door", self._witness.door.answer),
            ("send a status", partial(self._report, now)),
            ("call the controller", self.registration.on_timer),
            ("end", partial(self._end_if_over, now)),
        ):
            attempt(what, step)

    @property
    def _child_pid(self) -> int | None:
        """The process of a child beside the ranks and their zygote, for which somebody waits."""
        return self._store.pid

    def _wait_for_events(self) -> None:
        """Wait until something is to be done. Mere progress of ranks is taken in here: it only changes when to
        report."""
        now, sent = time.monotonic(), self._reports.sent_at
        waits = (
            self._stand_in.participant.seconds_to_tick(now),
            self._dumps.timeout,
            self._warmth.timeout(now),
            self._copies.seconds_to_cut(now),
        )
        until = now + min(*waits, self._processes.timeout(self.ranks.values(), now))
        while True:
            due = min(until, now + self._status_wait(now), now + self._reports.timeout(now))
            came = self._serve(due - now)
            now = time.monotonic()
            if came != [self._rank_line.socket] or self._reports.sent_at != sent or now >= due:
                return

    def _report(self, now: float) -> None:
        """Send a status when it is due."""
        urgent = self._stand_in.on_timer(now) or self._trials.restore_network()
        if urgent or self._status_wait(now) <= 0.0:
            self._send_status()

    def _status_wait(self, now: float) -> float:
        return self._reports.status_wait(now)

    def _serve(self, seconds: float) -> list[Any]:
        """Wait up to `seconds` for something to happen, and deal with all that has; returns where."""
        came = self._polling.serve(seconds)
        self._complete_starts()
        return came

    def _complete_starts(self) -> None:
        """Start the processes that were forked."""
        self._store.complete_start()
        self._warmth.start_forked_ranks()

    def _end_if_over(self, now: float) -> None:
        """End when all ranks have finished, or when some died and the controller has been silent for too long."""
        if self.exit_code is not None:
            return
        finished = [rank for rank in self.ranks.values() if rank.status.state == "finished"]
        if any(rank.alive for rank in finished):
            return  # trained to the end, but the script may save something yet
        if len(finished) == len(self.ranks) or self._ending.trained:
            codes = [shell_status(rank.status.exit.code) for rank in finished if rank.status.exit is not None]
            self._ending.final = True
            self._leave_job(max(codes, default=0), "finished")
        elif now - self._last_heard > ORPHAN_SECONDS:
            if any(rank.alive and rank.status.state == "stopped" for rank in self.ranks.values()):
                return  # it saves its state and ends by itself when no plan comes
            for rank in self.ranks.values():
                if rank.status.state == "exited" and rank.status.exit is not None:
                    silent = f"no controller for {ORPHAN_SECONDS:.0f} s and rank {rank.slot} is dead"
                    self.log.warn(f"{silent}; the element ends, requeue it with `scontrol requeue`")
                    self._leave_job(shell_status(rank.status.exit.code) or 1, "no controller")
                    return

    def _leave_job(self, code: int, reason: str) -> None:
        self._ending.exit_code = code
        self._send_status(leaving=reason)

    # ------------------------------------------------------------ processes
    def _environments(self) -> tuple[dict[str, str], dict[str, str]]:
        """The environments of two ranks that differ in all that may be different."""
        first = self.place.slots[0]
        return self._environment(first, 0, 0), self._environment(first + 1, 1, 1) | {"UNICRON_LAYOUT": "another"}

    def _copies_news(self) -> None:
        if self._copies.finish(time.monotonic()):
            self._send_status()

    def _files_news(self) -> None:
        for iteration in self._files.results.take_all():
            self._to_all(Saved(iteration=iteration))

    def _explain(self, rank: Rank) -> None:
        """What there is to know of the end of the rank's process."""
        if rank.status.exit is not None and self._reports.node is not None:
            self._reports.node.explain(rank.status.exit)
        self._trials.ended(rank)
        self._reports.node_events()  # what killed it comes before its end

    def _on_signal(self, numbers: bytes) -> None:
        for number in numbers:
            if number == SAVES and self.AGREES:
                self._files.request_checkpoint(self._states.isdisjoint(AT_WORK), self._copies.whole)
                self._to_all(Save())
            elif number in FORWARDED:
                for rank in self.ranks.values():
                    if rank.child is not None:
                        rank.child.signal(number)
            elif number in ENDING and self.exit_code is None:
                self._ending.stop_seconds = ENDING_SECONDS
                self._ending.save = self._saving()
                self._leave_job(128 + number, f"stopped by {signal.Signals(number).name}")

    @property
    def _states(self) -> set[str]:
        return {rank.status.state for rank in self.ranks.values()}

    def _saving(self, ended: bool = False) -> Callable[[], None] | None:
        """What writes the training state of a job that ends in the middle of its training. ended: by an error."""
        how = self._plans.saving(self._states, ended)
        if how is None:
            return None
        last = LastCheckpoint(self._memory.folder, how.before, self.log.warn, prunes=how.prunes)
        write = partial(last.write, self._copies.whole if how.rests else [])
        return partial(within, SAVE_SECONDS, write) if ended else write

    # ------------------------------------------------------------ messages
    def _from_ranks(self) -> None:
        for identity, data in self._rank_line.receive():
            self._from_rank(identity, data)
        self._reports.send_steps(time.monotonic())

    def _from_rank(self, identity: bytes, data: bytes) -> None:
        try:
            head, message = from_rank(data)
            rank = self.ranks[head.slot]
            match message:
                case Timing():
                    told = {**vars(message), "job": self.place.job, "slot": rank.slot}
                    self._outbox.send(msgspec.convert(told, wire.Timing))
                    return
                case Step():
                    self._reports.add_step(rank.slot, message)
                    if message.status is None:
                        return
                    message = message.status
            if head.incarnation != rank.status.incarnation:
                return  # of a process that has been replaced
            if rank.on_message(message):
                self._send_status()
            else:
                self._reports.dirty = True
            self._rank_line.set_identity(rank.slot, identity)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            self.log.drop("a rank", f"{type(error).__name__}: {error}")

    def _send_status(self, leaving: str = "") -> None:
        self._reports.status(self._store.port, leaving)
        self._stand_in.carry_out()

    def _from_controller(self) -> None:
        while self._line.socket.poll(0) and self.exit_code is None:
            self._on_controller(self._line.socket.recv())

    def _on_controller(self, data: bytes) -> None:
        if self._outbox.muted:
            return  # a lost network brings nothing either, however soon ZeroMQ has found a way around it
        try:
            message = wire.decode(data, wire.ToAgent)
            self._last_heard = time.monotonic()
            self._stand_in.participant.on_controller(self._last_heard)
            self._obey(message)
        except wire.BadMessage as error:
            self.log.drop("the controller", str(error))

    def _obey(self, message: Any) -> None:  # noqa: C901  (one branch a message)
        """Do what one of wire.ToAgent says. Raises BadMessage, before anything is done, when it makes no sense."""
        match message:
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Ping():
                self._reports.pinged = max(self._reports.pinged, message.number)
                self._stand_in.participant.cede_votes(message.over)
                self._send_status()
            case wire.Reach():
                self._witness.try_addresses(message.number, message.targets)
            case wire.Refused():
                self._on_refused(message)
            case wire.Break():
                self._stand_in.participant.on_break(message)
                self._to_ranks(message)
            case wire.Withdraw():
                self._to_ranks(message)
            case wire.PlanShare():
                self._on_plan(message)
            case wire.Recall():
                if (share := self._plans.share(message.generation)) is not None:
                    job, element = self.place.job, self.place.element
                    self._outbox.send(wire.Held(job=job, element=element, agent=self.identity, share=share))
            case wire.StartRank():
                rank = self.ranks.get(message.slot)
                if rank is not None and not rank.alive and rank.status.incarnation < message.incarnation:
                    self._layout = message.layout
                    self._processes.start(rank, message.incarnation)
            case wire.StopRank():
                rank = self.ranks.get(message.slot)
                if rank is None or rank.status.incarnation != message.incarnation:
                    return
                if message.save:
                    self._send_to_rank(message.slot, message)
                else:
                    rank.kill()
                    self._reports.dirty = True
            case wire.Cut():
                self._copies.obey(message)
            case wire.Fetch():
                self._copies.fetch(message, time.monotonic())
            case wire.Inject():
                self._trials.perform(message)
            case wire.Stacks():
                self._dumps.start_dump(message)
            case wire.End():
                self._on_end(message)

    def _on_plan(self, share: wire.PlanShare) -> None:
        """A plan for the ranks, or the controller's word that it takes over what the agents agreed on."""
        participant = self._stand_in.participant
        agreed = participant.agreed
        plan = participant.on_plan(share)
        if plan is not None:
            self._plans.add_plan(share, plan.generation)
            self._to_ranks(plan)
        elif agreed is not None and participant.agreed is None:
            self._plans.add_plan(share, agreed.generation)

    def _on_welcome(self, message: wire.Welcome) -> None:
        self._reports.configure(message.heartbeat_period, message.progress_seconds)
        self._reports.sampling.configure(message.metrics_seconds, message.metrics_directory, time.monotonic())
        self._layout = message.layout
        self._memory.open(message.run)
        again = self.registration.on_welcome()
        if self._memory.folder is None and self._copies.address:
            self._copies.refuse()
            self.registration.register()
        if again:
            self._send_status()
            self._reports.node_events(again=True)

    def _on_end(self, message: wire.End) -> None:
        """A job that trained to its end lets its scripts finish: they may save something after the last iteration."""
        if self._ending.trained and message.code == 0:
            return
        if message.code or message.reason:
            (self.log.warn if message.code else self.log.inform)(message.reason)
        if message.code:
            self._ending.final, self._ending.save = True, self._saving(ended=True)
            self._leave_job(message.code & 0xFF or 1, "ended by the controller")
            return
        self._ending.trained = True
        for rank in self.ranks.values():
            if rank.status.state != "finished":
                rank.kill()  # a spare
        self._end_if_over(time.monotonic())

    def _on_refused(self, message: wire.Refused) -> None:
        self.registration.on_refused(message)
        known = self.registration.was_welcomed
        if message.alone and not message.final and known:
            self._on_end(wire.End(code=0, reason=""))  # its step is over, and it has not heard so
        elif message.replaced or message.apart:
            self.log.warn(message.reason)
            self._leave_job(1, "refused by the controller")
        elif message.final:
            self._outbox.closed = True
            if known and not self.released:
                what = "this step goes on" if message.alone else "the job trains on"
                self.log.warn(f"{message.reason}; {what} unprotected")
        else:
            self.registration.register_again()

    def _to_ranks(self, message: wire.Break | wire.Withdraw | wire.Plan) -> None:
        self._to_all(message)

    def _to_all(self, message: wire.Message | ToRank) -> None:
        self._rank_line.send([slot for slot, rank in self.ranks.items() if rank.alive], message)

    def _send_to_rank(self, slot: int, message: wire.Message) -> None:
        if slot in self.ranks and self.ranks[slot].alive:
            self._rank_line.send([slot], message)
