"""Faults are inflicted here, and what follows later: power comes back, a daemon is started again, an admin repairs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.torture.schedule import Fault
from benchmarks.torture.sound import JobNow
from benchmarks.torture.stage import Site
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.chaos.memory_cage import Cage, CageError

AGAIN = 1.0  # seconds until what could not be done is tried once more
PATIENCE = 120.0  # then it is a failure of the run
REPAIR = 6.0  # that an admin takes for a node that Unicron or Slurm took out of service
TOGETHER = 1.0  # from a daemon's death to that of a rank, at most


@dataclass
class Agenda:
    """Work that is due later. `away`: nodes without power, and daemons that do not run."""

    due: list[tuple[float, float, str, Callable[[], object]]] = field(default_factory=list)
    away: set[str] = field(default_factory=set)

    def add(self, at: float, what: str, act: Callable[[], object]) -> None:
        """Do it at that time; again while it raises UserError."""
        self.due.append((at, at + PATIENCE, what, act))

    def work(self, now: float) -> None:
        """Do what is due. Raises UserError for what could not be done in time."""
        for item in [item for item in self.due if item[0] <= now]:
            self.due.remove(item)
            _, until, what, act = item
            try:
                act()
            except UserError as error:
                if now > until:
                    raise UserError(f"{what}: {error}") from None
                self.due.append((now + AGAIN, until, what, act))
            else:
                self.away.discard(what)


def refused(kinds: tuple[str, ...]) -> dict[str, str]:
    """Kinds that cannot be had here -> why."""
    if "oom-kill" not in kinds:
        return {}
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            cage = Cage(child.pid)
        except CageError as error:
            return {"oom-kill": str(error)}
        finally:
            child.kill()
    cage.close()
    return {}


def inflict(site: Site, agenda: Agenda, fault: Fault, job: JobNow | None, slot: int) -> None:
    """The fault strikes now. job: the victim, None for a daemon alone. Raises UserError when it cannot be inflicted."""
    now = time.time()
    name, _, beside = fault.kind.partition("+")
    if name == "unicrond-kill":
        site.controller.kill()
        agenda.away.add("unicrond")
        agenda.add(now + fault.seconds, "unicrond", site.controller.start)
    elif name == "slurmctld-kill":
        site.kill_slurmctld()
        agenda.away.add("slurmctld")
        agenda.add(now + fault.seconds, "slurmctld", site.cluster.start_slurmctld)
    elif name == "agent-kill":
        assert job is not None
        for pid in site.agents(job.nodes[slot]):
            _kill(pid)
    else:
        assert job is not None
        _inject(site, agenda, fault, job, slot, now)
    if beside:
        assert job is not None
        time.sleep(TOGETHER * fault.victim)
        _kill(job.pids[slot])


def _inject(site: Site, agenda: Agenda, fault: Fault, job: JobNow, slot: int, now: float) -> None:
    wanted = {"fault": fault.kind, "job": site.ids[job.name], "slot": slot, "seconds": fault.seconds}
    if fault.kind == "corrupt-checkpoint":
        wanted["slot"] = None  # of whoever sends the state next
    site.controller.ask("inject", **{key: value for key, value in wanted.items() if value is not None})
    if fault.kind == "lost-node":
        node = job.nodes[slot]
        agenda.away.add(node)
        site.cluster.power_off(node)
        agenda.add(now + fault.seconds, node, lambda: site.cluster.power_on(node))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Admin:
    """Takes nodes back that Unicron or Slurm took out of service, as after a repair. seen: node -> since when."""

    seen: dict[str, float] = field(default_factory=dict)
    taken_back: int = 0

    def look(self, site: Site, away: set[str], now: float) -> None:
        """Raises SlurmError."""
        out = {node for node in site.out_of_service() if node not in away}
        self.seen = {node: self.seen.get(node, now) for node in out}
        for node, since in self.seen.items():
            if now - since > REPAIR:
                site.cluster.client().resume(node)
                self.seen[node] = now
                self.taken_back += 1
