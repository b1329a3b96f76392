"""An agent's reports to the controller about its ranks and its node."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.loop.heartbeats import Heartbeats
from unicron_ctl.agent.loop.step_reports import StepReports
from unicron_ctl.agent.node.node_watch import NodeWatch
from unicron_ctl.agent.node.sampling import Sampling
from unicron_ctl.agent.ranks.ranks import Rank, stacks_file
from unicron_ctl.agent.ranks.vitals import Vitals
from unicron_ctl.agent.snapshots.peer_copies import Copies
from unicron_ctl.shared.consensus.participant import Participant
from unicron_ctl.shared.protocol import ranges, structs, wire
from unicron_ctl.shared.protocol.structs import MERGE_SECONDS
from unicron_ctl.shared.system.addresses import join
from unicron_detector.processes.rank_messages import Step
from unicron_detector.processes.stacks import Dump

DUMP_SECONDS = 0.02  # between two looks at unfinished stack traces
COLD_TEXT = 400  # characters of a reason
KEPT_SECONDS, MOST_KEPT = 15.0, 512  # how long step reports that were sent are kept, and how many


class Dumps:
    """Makes stack traces of ranks for the controller."""

    def __init__(
        self, job: str, ranks: Mapping[int, Rank], endpoint: str, send: Callable[[wire.Message], None]
    ) -> None:
        self._job, self._ranks, self._send = job, ranks, send
        self._endpoint = endpoint  # of the ranks' socket, beside which they write
        self._making: dict[int, tuple[int, Dump]] = {}  # slot -> (incarnation, its traces)

    @property
    def timeout(self) -> float:
        """Return the seconds until :meth:`send_finished` must be called; infinity if nothing is being made."""
        return DUMP_SECONDS if self._making else float("inf")

    def start_dump(self, order: wire.Stacks) -> None:
        """Start a stack trace, if the process is still there."""
        rank = self._ranks.get(order.slot)
        there = rank is not None and rank.child is not None and rank.status.incarnation == order.incarnation
        if rank is None or not there or order.slot in self._making:
            return
        self._making[order.slot] = order.incarnation, Dump(rank.trainer, stacks_file(self._endpoint, order.slot))

    def send_finished(self) -> None:
        """Send the finished stack traces."""
        for slot, (incarnation, dump) in list(self._making.items()):
            if dump.done():
                del self._making[slot]
                trace = wire.StackTrace(self._job, slot, incarnation, dump.how, dump.state, dump.text)
                self._send(trace)


class Reports:
    """Makes and sends the agent's statuses and other reports."""

    def __init__(
        self,
        place: Place,
        identity: str,  # the agent's id
        ranks: Mapping[int, Rank],
        participant: Participant,
        sampling: Sampling,
        copies: Copies,
        send: Callable[[wire.Message], None],
    ) -> None:
        self._place, self._ranks, self._participant, self._send = place, ranks, participant, send
        self._me = place.job, place.element, identity
        self._vitals, self.sampling, self._copies = Vitals(), sampling, copies
        self._steps = StepReports()
        self._kept: deque[tuple[float, structs.StepTable]] = deque(maxlen=MOST_KEPT)
        self._period, self._progress, self._brief = 1.0, 0.2, False  # as the controller wants them
        self._heartbeats = Heartbeats()
        self.sent_at = 0.0
        """The time of the last status."""
        self.dirty = False
        """There is progress that the last status did not include."""
        self.pinged = 0
        """The number of the last Ping."""
        self.fenced = False
        """The processes end by themselves if they are cut off."""
        self.lease, self.world, self.left = 0.0, 0, 0
        """Restart mode: the lease's seconds, the port of the world's door, and the newest Break that shut one."""
        self.begins = 0
        """Restart mode: the generation of the world that this node is about to begin."""
        self.asks = False
        """The next status asks for an answer."""
        self.number = 0
        """The number of the last status."""
        self.node: NodeWatch | None = None

    def configure(self, period: float, progress: float, brief: bool) -> None:
        """Set the seconds from one status to the next (period), and until one with nothing but progress. brief: the
        controller reads brief forms."""
        self._period, self._progress, self._brief = period, progress, brief
        self._heartbeats.period = period if brief else 0.0
        self._steps.configure(period, progress)

    def on_controller(self, message: wire.Message) -> None:
        """Take in that the controller has sent a message."""
        self._heartbeats.on_message(message)

    def timeout(self, now: float) -> float:
        """Return the seconds until :meth:`on_timer` must be called; infinity if nothing is due."""
        return self._steps.timeout(now)

    def status_wait(self, now: float) -> float:
        """Return the seconds until a status is due. Step reports contain progress, too, so while they flow none is."""
        due = self.sent_at + self._period
        if self.dirty and not self._steps.held:
            due = min(due, max(self.sent_at, self._steps.sent_at + MERGE_SECONDS) + self._progress)
        return due - now

    def on_timer(self, now: float) -> None:
        """Send what is due."""
        self.send_steps(now)
        self._metrics(now)

    def status(self, port: int | None, leaving: str = "", noticed: bool = False) -> None:
        """Send the whole state. port: of the node's rendezvous store. leaving: why the agent is about to end. noticed:
        a signal has asked its element to end."""
        now = time.monotonic()
        steps = self._due_steps(now, leaving=bool(leaving))  # what a rank has proved comes before its end
        most = ranges.MOST_STEP_REPORTS
        self._send_steps(steps[:-most])
        self.sent_at, self.dirty = now, False
        self._vitals.update(self._ranks.values(), now)
        self.number += 1
        store = join(self._place.address, port) if port else ""
        participant, statuses = self._participant, {slot: rank.status for slot, rank in self._ranks.items()}
        participant.on_ranks(statuses, store, now)
        participant.status_due = False
        due = steps[-most:]
        self._send(
            self._heartbeats.form(
                wire.Status(
                    *self._me,
                    sent=time.time(),
                    number=self.number,
                    store=store,
                    leaving=leaving,
                    noticed=noticed,
                    pinged=self.pinged,
                    answer=participant.on_status(now) or self.asks,
                    agreed=participant.agreed,
                    over=participant.over,
                    cut=self._copies.cut.number,
                    moved=self._copies.moved,
                    unmoved=self._copies.failed,
                    rates=dict(self._copies.rates),
                    failing=self._copies.failing(now),
                    refusing=self._copies.refusing(now),
                    images=self._copies.rows(any(rank.running for rank in self._ranks.values())),
                    saved=self._copies.newest_saved(),
                    fenced=self.fenced,
                    lease=self.lease,
                    begins=self.begins,
                    world=self.world,
                    left=self.left,
                    ranks=statuses,
                    cold={slot: rank.cold[:COLD_TEXT] for slot, rank in self._ranks.items() if rank.cold},
                    steps=[] if self._brief else [table.report() for table in due],
                    tables=due if self._brief else [],
                ),
                now,
            )
        )

    def add_step(self, slot: int, step: Step) -> None:
        """Note a step of this slot's rank."""
        self._steps.add(slot, step, time.monotonic())

    def repeat_steps(self) -> None:
        """Report the ranks' last steps once more."""
        self._steps.repeat(time.monotonic())

    def send_steps_again(self) -> None:
        """Send step reports of the last seconds once more: messages to a controller that was lost may not have arrived.
        Only those of the newest generation: others may have been undone since."""
        since = time.monotonic() - KEPT_SECONDS
        newest = max((report.generation for _, report in self._kept), default=0)
        self._send_steps([report for at, report in self._kept if at >= since and report.generation == newest])

    def send_steps(self, now: float) -> None:
        """Send step reports that cannot wait any longer."""
        self._send_steps(self._due_steps(now, hold=True))

    def _due_steps(self, now: float, leaving: bool = False, hold: bool = False) -> list[structs.StepTable]:
        """Return step reports that are due. hold: they may wait for later ones."""
        ranks = {} if leaving else self._ranks
        running = {slot: rank.status.generation for slot, rank in ranks.items() if rank.running}
        due = self._steps.due_reports(now, running, hold)
        self._kept.extend((now, report) for report in due)
        return due

    def _send_steps(self, tables: list[structs.StepTable]) -> None:
        """Send step reports outside a status."""
        most = ranges.MOST_STEP_REPORTS
        for first in range(0, len(tables), most):
            some = tables[first : first + most]
            brief = {"tables": some} if self._brief else {"reports": [table.report() for table in some]}
            self._send(wire.Steps(*self._me, **brief))

    def testimony(self, answers: Iterable[tuple[int, list[str]]]) -> None:
        """Send the answers of the witness: (number of the question, words)."""
        for number, words in answers:
            self._send(wire.ReachAnswer(*self._me, number=number, words=words))

    def node_events(self, again: bool = False) -> None:
        """Send the node's new events; again: all that are kept."""
        for event in self.node.new_events(*self._me, again=again) if self.node else ():
            self._send(event)

    def _metrics(self, now: float) -> None:
        sample = self.sampling.read_sample(now)
        if sample is not None:
            ranks = self._vitals.sample(self._ranks.values(), now) if sample.whole else {}
            message = wire.Metrics(*self._me, host=sample.host, node=sample.node, ranks=ranks, whole=sample.whole)
            message.symptoms, message.losses, message.addresses = sample.symptoms, {**sample.losses}, sample.addresses
            self._send(message)
