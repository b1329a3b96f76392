"""One leg: the cluster is up, two jobs train, and what the schedule says is done to them until it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.storms.stage import ITERATIONS_TO_LEARN
from benchmarks.torture import leaks, schedule
from benchmarks.torture.deeds import Admin, Agenda, inflict
from benchmarks.torture.progress import Done, Leg, Progress
from benchmarks.torture.schedule import NOBODY, Fault
from benchmarks.torture.show import Show
from benchmarks.torture.sound import RUNNING, JobNow, Wound, sound, strikable, whole
from benchmarks.torture.stage import ELEMENTS, TRAININGS, Site
from unicron_ctl.controller.model.view import SUSPECT_SECONDS
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_detector.failures.fault_history import Policy

START_LIMIT = 240.0  # seconds; the ranks of all nodes start on this machine's few cores
HEAL_LIMIT = 240.0  # from a fault to a sound job, and to all nodes in use
END_LIMIT = 120.0
POLL = 0.25
LOOK_AT_NODES = 2.0  # seconds between two looks of the admin
SAMPLE = 2.0  # seconds between two looks at descriptors: a daemon lives for a minute
CALM_EVERY = 50  # faults after which all is to be whole
FEW = 20  # a run of so few is to be whole that often
PAGE = 5000
QUIET = "step timing steady stacks"  # kinds of events that nobody needs here
TO_TELL = {"job_set_aside", "ledger_violation"}  # kinds that are failures of the run


class Stopped(Exception):
    """Somebody wants the run to stop here; it can be resumed."""


class Defect(Exception):
    """A promise was not kept. One line."""


@dataclass
class Run:
    """Plays the schedule on `site`. stop: whether somebody wants it to end. save: keep the progress on disk."""

    site: Site
    progress: Progress
    show: Show
    stop: Callable[[], bool]
    save: Callable[[], None]
    jobs: dict[str, JobNow] = field(default_factory=dict)
    wounds: dict[str, Wound] = field(default_factory=dict)
    agenda: Agenda = field(default_factory=Agenda)
    admin: Admin = field(default_factory=Admin)
    samples: list[leaks.Sample] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)  # node -> the job that trained there last
    _event: int = 0
    _next: dict[str, float] = field(default_factory=dict)
    _unsound: dict[str, float] = field(default_factory=dict)  # job -> since when
    _left: dict[str, dict[str, float]] = field(default_factory=dict)  # job -> node -> until when it avoids it
    _fresh: float = 0.0
    _finishing: bool = False

    # ------------------------------------------------------------ a leg
    def play(self) -> None:
        """To the end of the schedule. Raises Stopped, and Defect for what did not come."""
        for training in TRAININGS:
            self.site.submit(training)
        self.until(self.trains, "both jobs train on all nodes", START_LIMIT)
        self.until(self._learns, "their iteration times are known, by which hangs are found", START_LIMIT)
        leg = self.progress.legs[-1]
        leg.began, leg.reads = dict(self.site.first), {name: self.site.reads(name) for name in ELEMENTS}
        self.show.tell(f"both jobs train, from iterations {', '.join(f'{n} {i}' for n, i in leg.began.items())} on")
        self.save()
        due = time.time()
        while not self.progress.over:
            fault = schedule.fault(self.progress.seed, self.progress.position, self.progress.kinds)
            if time.time() >= due and self._strike(fault):
                due = max(time.time(), due + self.progress.every)
                if self.progress.position % (CALM_EVERY if self.progress.failures > CALM_EVERY + FEW else FEW) == 0:
                    self.calm()
            self.turn()
        self.calm()

    def trains(self) -> str:
        """Empty when all nodes are used and everybody has stepped; else what lacks."""
        nodes = set(self.site.cluster.spec.node_names) - self.agenda.away - self.admin.seen.keys()
        lacks = whole(self.jobs, ELEMENTS, nodes, self._avoided(time.time()))
        unsound = [name for name, job in self.jobs.items() if not self._sound(job)]
        return lacks or (f"{' and '.join(unsound)} not sound" if unsound else "")

    def _learns(self) -> str:
        first, last = self.site.first, self.site.iteration
        new = [name for name in ELEMENTS if last(name) - first.get(name, last(name)) < ITERATIONS_TO_LEARN]
        return f"{' and '.join(new)} trained too few iterations" if new else ""

    def _avoided(self, now: float) -> dict[str, list[str]]:
        """By job the nodes that it has left and is not given."""
        return {
            name: [node for node, until in self._left.get(name, {}).items() if until > now] for name in self.site.ids
        }

    def calm(self) -> None:
        """Wait until nothing is broken any more: all nodes serve and are used as planned."""

        def lacks() -> str:
            if self.agenda.away or self.agenda.due:
                return f"{', '.join(sorted(self.agenda.away))} away"
            if self.admin.seen:
                return f"nodes {', '.join(sorted(self.admin.seen))} out of service"
            return self.trains()

        began = time.time()
        self.until(lacks, "all nodes are in use again", HEAL_LIMIT)
        self.show.tell(f"whole after {time.time() - began:.1f} s; {self._standing()}")
        self.save()

    def end(self) -> None:
        """Ask the jobs to end, and wait until nothing of them is left. Raises Defect."""
        self._finishing = True
        self.site.finish()
        self.until(lambda: self._ended(), "both jobs end", END_LIMIT)
        self.progress.legs[-1].ended = "finished"

    def _ended(self) -> str:
        going = [name for name, job in self.jobs.items() if not job.ended]
        return f"{', '.join(going)} not ended" if going else "; ".join(self.site.inventory().held)

    def until(self, lacks: Callable[[], str], what: str, limit: float) -> None:
        """Turn after turn until nothing lacks. Raises Defect."""
        deadline = time.monotonic() + limit
        while True:
            self.turn()
            missing = lacks() if self._fresh else "unicrond does not answer"
            if not missing:
                return
            if time.monotonic() > deadline:
                raise Defect(f"not within {limit:g} s: {what}: {missing} (fault {self.progress.position})")

    # ------------------------------------------------------------ a turn
    def turn(self) -> None:
        """Look at everything, and do what is due. Raises Stopped and Defect."""
        if self.stop():
            raise Stopped
        now = time.time()
        try:
            self.agenda.work(now)
        except (UserError, AssertionError) as error:
            raise Defect(one_line(str(error))[:300]) from None
        self._hear(now)
        if self._due("nodes", LOOK_AT_NODES) and "slurmctld" not in self.agenda.away:
            try:
                self.admin.look(self.site, self.agenda.away, now)
            except UserError as error:  # slurmctld has just started
                self.show.now(str(error))
        if self._due("sample", SAMPLE):
            self._sample(now)
        self.show.now(self._standing())
        time.sleep(POLL)

    def _hear(self, now: float) -> None:
        """Hear the controller and the ranks."""
        self._fresh = 0.0
        if "unicrond" not in self.agenda.away:
            if not self.site.controller.alive:
                raise Defect(f"unicrond has ended by itself: {one_line(self.site.controller.log[-300:])}")
            try:
                self.jobs = self.site.jobs()
                self._events()
                self._fresh = now
            except UserError as error:
                self.show.now(str(error))
        self.site.listen()
        for name, job in self.jobs.items():
            self._moved(job)
            if job.ended and not self._finishing:
                raise Defect(f"{name} has ended (fault {self.progress.position})")
            self._healed(name, job, now)

    def _healed(self, name: str, job: JobNow, now: float) -> None:
        if self._sound(job):
            self._unsound.pop(name, None)
            self.progress.settle(name, now)
        elif now - self._unsound.setdefault(name, now) > HEAL_LIMIT and not self._finishing:
            last = next((d for d in reversed(self.progress.done) if d.job == name), None)
            what = f"{last.kind} into slot {last.slot} on {last.node}" if last else "a fault"
            raise Defect(f"{name} not sound {HEAL_LIMIT:g} s after {what} (fault {self.progress.position})")

    def _sound(self, job: JobNow) -> bool:
        return sound(job, self.site.stepped[job.name], self.wounds.get(job.name))

    def _moved(self, job: JobNow) -> None:
        if job.state == RUNNING:
            for slot in job.members:
                if (node := job.nodes.get(slot)) is not None:
                    self.progress.moves += self.owners.setdefault(node, job.name) != job.name
                    self.owners[node] = job.name

    def _events(self) -> None:
        """Read what the log has got since the last look."""
        told: list[dict[str, Any]] = self.site.controller.ask("events", after=self._event, limit=PAGE, without=QUIET)
        for event in told:
            self._event = max(self._event, event["id"])
            kind = event["kind"]
            if kind == "failure_detected":
                self.progress.causes[event["cause"]] = self.progress.causes.get(event["cause"], 0) + 1
            elif kind == "reform":
                self.progress.formed_anew += 1
            elif kind in TO_TELL:
                self._wrong(f"{kind} of job {event['job']}: {event['reason'] or event.get('problems')}")
            elif kind == "avoided":
                lasts = SUSPECT_SECONDS if event["suspect"] else Policy().window
                self._left.setdefault(self._name(event["job"]), {})[event["node"]] = event["time"] + lasts
            elif kind == "inject_refused":
                self._refused(event)

    def _refused(self, event: dict[str, Any]) -> None:
        """The agent could not do it: that was no failure, and the job has no wound."""
        self.show.tell(f"refused: {event['reason']}")
        name = self._name(event["job"])
        if self.progress.refuse(name, event["fault"]):
            self.wounds.pop(name, None)

    def _name(self, number: str) -> str:
        return next((name for name, each in self.site.ids.items() if each == number), "")

    def _sample(self, now: float) -> None:
        pids = [("unicrond", self.site.controller.process.pid)] if "unicrond" not in self.agenda.away else []
        pids += [("agent", pid) for pid in self.site.agents()]
        self.samples += [found for what, pid in pids if (found := leaks.sample(now, what, pid))]

    def _due(self, what: str, seconds: float) -> bool:
        if time.monotonic() < self._next.get(what, 0.0):
            return False
        self._next[what] = time.monotonic() + seconds
        return True

    def _wrong(self, what: str) -> None:
        self.show.tell(f"WRONG: {what}")
        self.progress.wrong.append(what)

    def _standing(self) -> str:
        parts = []
        for name, job in self.jobs.items():
            state = job.state if not self._sound(job) else "sound"
            parts.append(f"{name} {state}, {len(job.members)} of {job.planned} nodes, {self.site.iteration(name)}")
        away = [f"away: {', '.join(sorted(self.agenda.away))}"] if self.agenda.away else []
        return "; ".join([*parts, *away])

    # ------------------------------------------------------------ faults
    def _strike(self, fault: Fault) -> bool:
        """Whether the fault was inflicted; False where it has to wait."""
        name, _, beside = fault.kind.partition("+")
        daemon = name.removesuffix("-kill") if name in ("unicrond-kill", "slurmctld-kill") else ""
        if daemon in self.agenda.away or "unicrond" in self.agenda.away or not self._fresh:
            return False
        if fault.kind == "lost-node" and "slurmctld" in self.agenda.away:
            return False
        job, slot = (None, -1) if daemon and not beside else self._victim(fault)
        if job is None and (beside or not daemon):
            return False
        wound = Wound(time.time(), job.generation, fault.how.breaks) if job is not None else None
        try:
            inflict(self.site, self.agenda, fault, job, slot)
        except UserError as error:  # the rank may have died meanwhile
            self.show.tell(f"not inflicted: {fault.kind}: {one_line(str(error))}")
            return False
        self._note(fault, job, slot, wound)
        return True

    def _victim(self, fault: Fault) -> tuple[JobNow | None, int]:
        """The job and the slot that the fault's draws choose among those that may be struck now."""
        found = {
            name: slots
            for name, job in sorted(self.jobs.items())
            if (slots := strikable(job, self.site.stepped[name], self.wounds.get(name), fault.how))
        }
        if not found:
            return None, -1
        job = self.jobs[schedule.choose(fault.job, list(found))]
        slots = found[job.name]
        return job, slots[min(int(fault.victim * len(slots)), len(slots) - 1)]

    def _note(self, fault: Fault, job: JobNow | None, slot: int, wound: Wound | None) -> None:
        name, node = (job.name, job.nodes.get(slot, "")) if job is not None else ("", "")
        if wound is not None and (fault.how.takes != NOBODY or name not in self.wounds):
            self.wounds[name] = wound
        leg, iteration = len(self.progress.legs) - 1, self.site.iteration(name) if name else -1
        self.progress.done.append(Done(fault.index, fault.kind, name, slot, node, time.time(), iteration, leg))
        self.progress.position += 1
        self.save()
        where = f" into {name}, slot {slot} on {node}" if name else ""
        lasts = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        self.show.advance(self.progress.position)
        self.show.tell(f"{self.progress.position:>4} {fault.kind}{where}{lasts}; {self._standing()}")


def begin(progress: Progress) -> None:
    """A new leg."""
    progress.legs.append(Leg(time.time()))
