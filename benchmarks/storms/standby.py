"""``python -m benchmarks.storms.standby [--times N]``: a controller and its standby on two hosts with real links.

Again and again the one that leads is killed, frozen or cut off. Each time the other must lead within 5 s; no record may
be lost, and the old one may write none; it must end by itself when it wakes or its link is mended; a killed rank must
train again. Needs root, Slurm, iproute2 and nftables. Exit status 1 if a check failed; then the files stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.storms.stage import START_LIMIT, Storm
from tests.support.controller import COMMAND
from tests.support.heads import Head
from tests.support.links import PORT, HeadController, LinksCluster
from tests.support.processes import wait_for
from unicron_ctl.shared.system.errors import UserError

HOSTS = ("n4", "n5")  # of the two controllers; Slurm's own head has neither
NODES, ELEMENTS = 5, 3
LIMIT = 90.0  # seconds of each wait
TAKES_OVER_SECONDS = 5.0


class HostHead(Head):
    """A unicrond on one of the hosts."""

    usual = 'auth = "munge"\nslurm = "command"\nslurm_poll_seconds = 0.5\nhang_floor_seconds = 5.0\n'

    def __init__(self, site: LinksCluster, host: str, addresses: list[str]) -> None:
        self.command = [*site.cluster.command_prefix(host), *COMMAND]
        self._cluster_environment = site.cluster.env()
        super().__init__(site.folder, host, addresses[HOSTS.index(host)], addresses, "shared")

    def start(self) -> None:
        self.environment |= self._cluster_environment
        super().start()

    @property
    def leads(self) -> bool:
        return self.process.poll() is None and super().leads

    @property
    def waits(self) -> int:
        """How often it has begun to wait as a standby."""
        return self.log.count("standby: waits for")


class Pair(HeadController):
    """Both controllers, as a job and the questions of a storm see them."""

    def __init__(self, site: LinksCluster) -> None:
        site.controller.close()
        self._addresses = [f"tcp://{site.cluster.address(host)}:{PORT}" for host in HOSTS]
        self.heads: list[HostHead] = []
        self.site = site
        super().__init__(site.folder, site.cluster)
        self.address = self._reached = ",".join(self._addresses)

    def start(self) -> None:
        for host in HOSTS:
            self.heads.append(HostHead(self.site, host, self._addresses))
            if len(self.heads) == 1:
                self.heads[0].await_lead(LIMIT)
        self.await_standby(self.heads[1], 0)

    @property
    def alive(self) -> bool:
        return any(head.process.poll() is None for head in self.heads)

    def await_standby(self, head: HostHead, before: int) -> None:
        """Wait until a controller waits as a standby once more than `before`."""
        wait_for(lambda: head.waits > before, f"{head.name} waits", LIMIT, self.told)

    def job(self, name: str = "") -> dict[str, Any]:
        try:
            return super().job(name)
        except UserError:
            return {}

    def told(self) -> str:
        return "\n".join(f"--- {head.name}\n{head.log[-1500:]}" for head in self.heads)

    def close(self) -> None:
        self._gone()
        super().close()

    def _gone(self) -> None:
        for head in self.heads:
            head.close()

    def records(self, after: int = 0) -> list[tuple[int, str, str]]:
        """Return (id, kind, payload) of the events above an id."""
        path = self.site.folder / "shared" / "events.sqlite"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20.0)) as log:
            text = "SELECT id, kind, CAST(payload AS TEXT) FROM event WHERE id > ? ORDER BY id"
            return log.execute(text, (after,)).fetchall()


def kill(pair: Pair, head: HostHead) -> Callable[[], object]:
    """Kill the controller's processes, as when a host without power releases its locks."""
    head.close()
    return lambda: None


def freeze(pair: Pair, head: HostHead) -> Callable[[], object]:
    """Stop the host with its locks held; later it goes on."""
    head.process.send_signal(signal.SIGSTOP)
    return lambda: head.process.send_signal(signal.SIGCONT)


def freeze_and_cut(pair: Pair, head: HostHead) -> Callable[[], object]:
    """Stop the host and cut it off; it wakes before its link is mended."""
    pair.site.cut(head.name)
    head.process.send_signal(signal.SIGSTOP)

    def undo() -> None:
        head.process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        pair.site.heal(head.name)

    return undo


def cut(pair: Pair, head: HostHead) -> Callable[[], object]:
    """Cut the link of a host that still reaches the folder: it has to step down by itself."""
    pair.site.cut(head.name)
    return lambda: pair.site.heal(head.name)


FAULTS = (kill, freeze, cut, freeze_and_cut)


class Round:
    """One fault and its consequences."""

    def __init__(self, number: int, fault: Callable[[Pair, HostHead], Callable[[], object]]) -> None:
        self.number, self.fault = number, fault
        self.leads = self.agents = self.heals = 0.0
        """Seconds from the fault until the other leads and has all agents; from a killed rank to the next step."""
        self.wrong: list[str] = []

    def ask(self, true: object, what: str) -> None:
        if not true:
            self.wrong.append(what)

    def play(self, pair: Pair, storm: Storm) -> None:
        old, new = sorted(pair.heads, key=lambda head: not head.leads)
        self.ask(old.leads and not new.leads, "one leads before")
        waits = old.waits
        before, failures = pair.records(), len(storm.failures())
        generation = storm.job.status()["generation"]
        began = time.monotonic()
        undo = self.fault(pair, old)
        wait_for(lambda: new.leads, "the other leads", LIMIT, pair.told)
        self.leads = time.monotonic() - began
        self.ask(self.leads <= TAKES_OVER_SECONDS, f"leads within {TAKES_OVER_SECONDS:g} s")
        wait_for(lambda: self._has_all_agents(storm), "all agents are back", LIMIT, storm.job.told)
        self.agents = time.monotonic() - began
        self._check_log(pair, before)
        self.ask(storm.job.status()["generation"] == generation, "the job went on undisturbed")
        killed = self._kill_rank(storm, self.number % ELEMENTS)
        self.heals = storm.next_step(killed) - killed
        storm.job.whole(ELEMENTS, LIMIT)
        self.ask(len(storm.failures()) == failures + 1, "one failure more, the killed rank's")
        last = pair.records()[-1][0]
        undo()
        try:
            old.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.wrong.append("the old one ends")
        else:
            self.ask(self.fault is kill or old.process.returncode == 1, "the old one ends by itself")
        self.ask(new.leads, "the new one still leads")
        self.ask("started" not in [kind for _, kind, _ in pair.records(last)], "no other one began")
        old.close()
        old.start()
        pair.await_standby(old, waits)

    def _kill_rank(self, storm: Storm, slot: int) -> float:
        """Kill a rank whose process the controller knows. Return the time."""
        ranks = [rank for element in storm.job.status()["elements"] for rank in element["ranks"]]
        (pid,) = [rank["pid"] for rank in ranks if rank["slot"] == slot]
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def _has_all_agents(self, storm: Storm) -> bool:
        elements = [e for e in storm.job.status().get("elements", []) if not e["gone"]]
        return len(elements) == ELEMENTS and all(e["ranks"] and e["last_heard"] for e in elements)

    def _check_log(self, pair: Pair, before: list[tuple[int, str, str]]) -> None:
        """Check that the log has all earlier records, and that the new controller continues after them."""
        after = pair.records()
        kept = {number for number, _, _ in after}
        lost = [(number, kind) for number, kind, _ in before if number not in kept and kind not in ("steps", "step")]
        self.ask(not lost, f"no record is lost ({lost[:3]})")
        fresh = [number for number, _, _ in after if number > before[-1][0]]
        self.ask(fresh == list(range(fresh[0], fresh[0] + len(fresh))), "the ids go on one by one")
        starts = [number for number, kind, _ in after if kind == "started"]
        self.ask(starts[-1] > before[-1][0], "the new one's start is there")
        # A start thins the steps before it, but never the last ones.
        steps = [json.loads(payload)["iteration"] for _, kind, payload in before if kind == "step"][-1:]
        steps += [json.loads(text)["iteration"] for number, kind, text in after if kind == "step" and number in fresh]
        self.ask(steps == list(range(steps[0], steps[0] + len(steps))), f"no step is lost ({steps[:30]})")

    def line(self) -> str:
        """Return the line to print."""
        name = self.fault.__name__.replace("_", " ")
        missed = f"   MISSED: {'; '.join(self.wrong)}" if self.wrong else ""
        times = f"leads {self.leads:4.1f} s   agents {self.agents:4.1f} s   next step {self.heals:4.1f} s"
        return f"{self.number:>3}  {name:<15} {times}{missed}"


def play_rounds(folder: Path, times: int) -> list[Round]:
    """Play the rounds and print each."""
    rounds: list[Round] = []
    with LinksCluster(folder, NODES, config_lines=["SlurmdTimeout=300"]) as site:
        site.controller = pair = Pair(site)
        storm = Storm(site)
        storm.job = site.submit(ELEMENTS, options=[f"--exclude={','.join(HOSTS)}"], UNICRON_CONTROLLER=pair.address)
        storm.job.whole(ELEMENTS, START_LIMIT)
        storm.job.reached(10)
        for number, fault in zip(range(1, times + 1), itertools.cycle(FAULTS)):
            rounds.append(Round(number, fault))
            try:
                rounds[-1].play(pair, storm)
            except Exception as problem:  # the figures so far are worth hours
                rounds[-1].wrong.append(f"{type(problem).__name__}: {problem}"[:6000])
                break
            finally:
                print(rounds[-1].line(), flush=True)
    return rounds


def summary(rounds: list[Round]) -> str:
    """Return a line for each kind of fault."""
    lines = [f"{'':<16}{'rounds':>7}{'leads: median, max':>22}{'agents are back':>22}{'next step':>22}"]
    for fault in FAULTS:
        found = [one for one in rounds if one.fault is fault and one.heals]
        if found:
            cells = [[getattr(one, name) for one in found] for name in ("leads", "agents", "heals")]
            text = "".join(f"{median(cell):.1f} s, {max(cell):.1f} s".rjust(22) for cell in cells)
            lines.append(f"{fault.__name__.replace('_', ' '):<16}{len(found):>7}{text}")
    return "\n".join([*lines, f"{sum(not one.wrong for one in rounds)} of {len(rounds)} rounds passed"])


def main() -> int:
    """Return 0 if all checks have passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storms.standby", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=12, help="how often (a release: 50)")
    options = parser.parse_args()
    if os.getuid():
        parser.error("links of their own need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="unicron-standby-"))
    rounds = play_rounds(folder / "site", options.times)
    print("\n" + summary(rounds))
    if len(rounds) == options.times and not any(one.wrong for one in rounds):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(f"logs: {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
