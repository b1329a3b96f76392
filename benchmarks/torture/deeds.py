"""Inflict faults, and do what follows later: power returns, a daemon starts again, an admin repairs."""

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

AGAIN = 1.0  # seconds between two attempts
PATIENCE = 120.0  # seconds of attempts; then it is a failure of the run
REPAIR = 6.0  # seconds until an admin takes back a node that was taken out of service
TOGETHER = 1.0  # the most seconds from a daemon's death to that of a rank


@dataclass
class Agenda:
    """Work that is due later."""

    due: list[tuple[float, float, str, Callable[[], object]]] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    """Nodes without power, and daemons that do not run."""

    def add(self, at: float, what: str, act: Callable[[], object]) -> None:
        """Do the work at that time, and again while it raises UserError."""
        self.due.append((at, at + PATIENCE, what, act))

    def work(self, now: float) -> None:
        """Do what is due. Raises UserError for work that failed for too long."""
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
    """Return the kinds that are impossible here, with the reason."""
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
    """Inflict a fault on a job, or on a daemon alone if `job` is None. Raises UserError if that is impossible."""
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
        wanted["slot"] = None  # the rank that sends the state next
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
    """Takes back nodes that Unicron or Slurm took out of service, as after a repair."""

    seen: dict[str, float] = field(default_factory=dict)
    """When each node was first seen out of service."""

    def look(self, site: Site, away: set[str], now: float) -> None:
        """Take back nodes that are due. Raises SlurmError."""
        out = {node for node in site.out_of_service() if node not in away}
        self.seen = {node: self.seen.get(node, now) for node in out}
        for node, since in self.seen.items():
            if now - since > REPAIR:
                site.cluster.client().resume(node)
                self.seen[node] = now
