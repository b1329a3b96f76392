"""One leg: on a running cluster two jobs train, and the schedule's faults strike them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.storms.stage import ITERATIONS_TO_LEARN
from benchmarks.torture import leaks, schedule
from benchmarks.torture.deeds import Admin, Agenda, inflict
from benchmarks.torture.progress import Done, Progress
from benchmarks.torture.schedule import NOTHING, Fault
from benchmarks.torture.sound import RUNNING, JobNow, Wound, sound, strikable, whole
from benchmarks.torture.stage import ELEMENTS, TRAININGS, Site
from unicron_ctl.controller.model.view import SUSPECT_SECONDS
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_detector.failures.fault_history import Policy

START_LIMIT = 240.0  # seconds; the ranks of all nodes start on this machine's few cores
HEAL_LIMIT = 240.0  # from a fault to a sound job, and to all nodes in use
END_LIMIT = 120.0
POLL = 0.25
LOOK_AT_NODES = 2.0  # seconds between two checks by the admin
SAMPLE = 2.0  # seconds between two samples of descriptors: a daemon lives for a minute
CALM_EVERY, CALM_EVERY_SHORT = 50, 20  # faults between two pauses, in a long and a short run
PAGE = 5000
QUIET = "step timing steady stacks"  # kinds of events that are not needed
TO_TELL = {"job_set_aside", "ledger_violation"}  # kinds that are failures of the run


class Stopped(Exception):
    """A signal ended the run; it can be resumed."""


class Defect(Exception):
    """A promise was not kept; the text is one line."""


@dataclass
class Run:
    """Plays the schedule on a cluster."""

    site: Site
    progress: Progress
    tell: Callable[[str], None]
    """Prints a line."""
    stop: Callable[[], bool]
    """Returns whether the run must end."""
    save: Callable[[], None]
    """Saves the progress."""
    jobs: dict[str, JobNow] = field(default_factory=dict)
    wounds: dict[str, Wound] = field(default_factory=dict)
    agenda: Agenda = field(default_factory=Agenda)
    admin: Admin = field(default_factory=Admin)
    samples: list[leaks.Sample] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)  # node -> the job that trained there last
    _event: int = 0
    _next: dict[str, float] = field(default_factory=dict)
    _unsound: dict[str, float] = field(default_factory=dict)  # job -> when that began
    _left: dict[str, dict[str, float]] = field(default_factory=dict)  # job -> node -> end of the time of avoiding it
    _fresh: float = 0.0
    _finishing: bool = False

    # ------------------------------------------------------------ a leg
    def play(self) -> None:
        """Play the schedule to its end. Raises Stopped and Defect."""
        for training in TRAININGS:
            self.site.submit(training)
        self.until(self.trains, "both jobs train on all nodes", START_LIMIT)
        self.until(self._learns, "their iteration times are known, by which hangs are found", START_LIMIT)
        leg = self.progress.legs[-1]
        leg.began, leg.reads = dict(self.site.first), {name: self.site.reads(name) for name in ELEMENTS}
        self.tell(f"both jobs train, from iterations {', '.join(f'{n} {i}' for n, i in leg.began.items())} on")
        self.save()
        due = time.time()
        while not self.progress.over:
            fault = schedule.fault(self.progress.seed, self.progress.position, self.progress.kinds)
            if time.time() >= due and self._strike(fault):
                due = max(time.time(), due + self.progress.every)
                long = self.progress.failures > CALM_EVERY + CALM_EVERY_SHORT
                if self.progress.position % (CALM_EVERY if long else CALM_EVERY_SHORT) == 0:
                    self.calm()
            self.turn()
        self.calm()

    def trains(self) -> str:
        """Return an empty text if all nodes are used and all ranks have stepped; else what is missing."""
        nodes = set(self.site.cluster.spec.node_names) - self.agenda.away - self.admin.seen.keys()
        lacks = whole(self.jobs, ELEMENTS, nodes, self._avoided(time.time()))
        unsound = [name for name, job in self.jobs.items() if not self._sound(job)]
        return lacks or (f"{' and '.join(unsound)} not sound" if unsound else "")

    def _learns(self) -> str:
        first, last = self.site.first, self.site.iteration
        new = [name for name in ELEMENTS if last(name) - first.get(name, last(name)) < ITERATIONS_TO_LEARN]
        return f"{' and '.join(new)} trained too few iterations" if new else ""

    def _avoided(self, now: float) -> dict[str, list[str]]:
        """Return the nodes that each job has left and avoids."""
        return {
            name: [node for node, until in self._left.get(name, {}).items() if until > now] for name in self.site.ids
        }

    def calm(self) -> None:
        """Wait until all nodes serve and are used as planned."""

        def lacks() -> str:
            if self.agenda.away or self.agenda.due:
                return f"{', '.join(sorted(self.agenda.away))} away"
            if self.admin.seen:
                return f"nodes {', '.join(sorted(self.admin.seen))} out of service"
            return self.trains()

        began = time.time()
        self.until(lacks, "all nodes are in use again", HEAL_LIMIT)
        self.tell(f"whole after {time.time() - began:.1f} s; {self._standing()}")
        self.save()

    def end(self) -> None:
        """Ask the jobs to end, and wait until nothing of them is left. Raises Defect."""
        self._finishing = True
        self.site.finish()
        self.until(self._ended, "both jobs end", END_LIMIT)
        self.progress.legs[-1].ended = "finished"

    def _ended(self) -> str:
        going = [name for name, job in self.jobs.items() if not job.ended]
        return f"{', '.join(going)} not ended" if going else "; ".join(self.site.inventory().held)

    def until(self, lacks: Callable[[], str], what: str, limit: float) -> None:
        """Take turns until nothing is missing. Raises Defect."""
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
        """Read all states, and do what is due. Raises Stopped and Defect."""
        if self.stop():
            raise Stopped
        now = time.time()
        try:
            self.agenda.work(now)
        except (UserError, AssertionError) as error:
            raise Defect(one_line(str(error))[:300]) from None
        self._hear(now)
        if self._due("nodes", LOOK_AT_NODES) and "slurmctld" not in self.agenda.away:
            with contextlib.suppress(UserError):  # slurmctld has just started
                self.admin.look(self.site, self.agenda.away, now)
        if self._due("sample", SAMPLE):
            self._sample(now)
        time.sleep(POLL)

    def _hear(self, now: float) -> None:
        """Read the states of the controller and the ranks."""
        self._fresh = 0.0
        if "unicrond" not in self.agenda.away:
            if not self.site.controller.alive:
                raise Defect(f"unicrond has ended by itself: {one_line(self.site.controller.log[-300:])}")
            with contextlib.suppress(UserError):
                self.jobs = self.site.jobs()
                self._events()
                self._fresh = now
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
        """Read the new events of the log."""
        events: list[dict[str, Any]] = self.site.controller.ask("events", after=self._event, limit=PAGE, without=QUIET)
        for event in events:
            self._event = max(self._event, event["id"])
            kind = event["kind"]
            if kind == "reform":
                self.progress.formed_anew += 1
            elif kind in TO_TELL:
                self._wrong(f"{kind} of job {event['job']}: {event['reason'] or event.get('problems')}")
            elif kind == "avoided":
                lasts = SUSPECT_SECONDS if event["suspect"] else Policy().window
                self._left.setdefault(self._name(event["job"]), {})[event["node"]] = event["time"] + lasts
            elif kind == "inject_refused":
                self._refused(event)

    def _refused(self, event: dict[str, Any]) -> None:
        """Note that an agent could not do a fault: it does not count, and the job has no wound."""
        self.tell(f"refused: {event['reason']}")
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
        self.tell(f"WRONG: {what}")
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
        """Inflict a fault unless it must wait. Return whether it was inflicted."""
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
            self.tell(f"not inflicted: {fault.kind}: {one_line(str(error))}")
            return False
        self._note(fault, job, slot, wound)
        return True

    def _victim(self, fault: Fault) -> tuple[JobNow | None, int]:
        """Return the job and the slot that the fault's draws choose among those that may be struck now."""
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
        if wound is not None and (fault.how.takes != NOTHING or name not in self.wounds):
            self.wounds[name] = wound
        leg, iteration = len(self.progress.legs) - 1, self.site.iteration(name) if name else -1
        self.progress.done.append(Done(fault.index, fault.kind, name, slot, node, time.time(), iteration, leg))
        self.progress.position += 1
        self.save()
        where = f" into {name}, slot {slot} on {node}" if name else ""
        lasts = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        self.tell(f"{self.progress.position:>4} {fault.kind}{where}{lasts}; {self._standing()}")
