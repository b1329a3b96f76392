"""``python -m benchmarks.storms.standby [--times N]``: a controller and its standby on two hosts of a cluster with real
links. Again and again the one that leads is killed, frozen, or cut off; the other takes over, a rank is killed, and the
job must heal.

Asked each time: the other leads within 5 s; no record is lost, and none is written by the old one; the old one ends by
itself when it wakes or its link is mended; the killed rank trains again. Needs root, Slurm, iproute2 and nftables.
Exit status 1 when something was asked and not seen.
"""

from __future__ import annotations

import argparse
import ctypes
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.storms.stage import START_LIMIT, Storm
from tests.support.controller import ACTS, COMMAND
from tests.support.links import CLONE_NEWNET, PORT, LinksCluster
from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_ctl.lab.cluster.network import HEAD, MOUNTS
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.errors import UserError

HOSTS = ("n4", "n5")  # of the two controllers; Slurm's own head has neither
NODES, ELEMENTS = 5, 3
LIMIT = 90.0  # seconds for what must come
TAKES_OVER_SECONDS = 5.0
SETTINGS = """auth = "munge"
slurm = "command"
slurm_poll_seconds = 0.5
hang_floor_seconds = 5.0
"""


class Head:
    """A unicrond on one of the hosts."""

    def __init__(self, site: LinksCluster, host: str, addresses: list[str]) -> None:
        self.site, self.host = site, host
        self.config = site.folder / f"{host}.toml"
        named = ", ".join(f'"{one}"' for one in addresses)
        self.config.write_text(f"[controller]\n{SETTINGS}address = [{named}]\n{ACTS}")
        self.out, self.log = site.folder / f"{host}.out", site.folder / f"{host}.log"

    def start(self) -> None:
        words = ["--config", str(self.config), "--state-dir", str(self.site.folder / "shared")]
        with self.out.open("wb") as out, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.site.cluster.command_prefix(self.host), *COMMAND, *words],
                cwd=ROOT,
                env=outside_slurm() | self.site.cluster.env(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )

    def leads(self) -> bool:
        return self.process.poll() is None and self.out.read_text().startswith("unicrond: listening")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Pair:
    """Both of them, as a job and the questions of a test see them."""

    alive = True  # one of them does

    def __init__(self, site: LinksCluster) -> None:
        self.site = site
        addresses = [f"tcp://{site.cluster.address(host)}:{PORT}" for host in HOSTS]
        self.address = ",".join(addresses)
        self.namespace = MOUNTS / site.cluster.layout.network.namespace(HEAD)
        self._asker = ThreadPoolExecutor(1, initializer=self._enter)
        os.environ["MUNGE_SOCKET"] = site.cluster.env()["MUNGE_SOCKET"]
        self.heads = [Head(site, host, addresses) for host in HOSTS]
        first, second = self.heads
        first.start()
        wait_for(first.leads, "one leads", LIMIT, self.told)
        second.start()
        self.await_standby(self.heads[1], 0)

    def _enter(self) -> None:
        with self.namespace.open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def await_standby(self, head: Head, said: int) -> None:
        """Wait until it waits; said: how often it has said so before."""
        wait_for(lambda: self.waits(head) > said, f"{head.host} waits", LIMIT, self.told)

    def waits(self, head: Head) -> int:
        return head.log.read_text(errors="replace").count("standby: waits for")

    # ---- as HeadController has it
    def ask(self, kind: str, **arguments: Any) -> Any:
        return self._asker.submit(ask_controller, {"kind": kind, **arguments}, self.address, timeout=10.0).result(LIMIT)

    def job(self, name: str = "") -> dict[str, Any]:
        try:
            return next((job for job in self.ask("jobs") if name in ("", job["job"])), {})
        except UserError:
            return {}

    def failures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("status")["failures"]
        return found

    def told(self) -> str:
        return "\n".join(f"--- {head.host}\n{head.log.read_text(errors='replace')[-1500:]}" for head in self.heads)

    def close(self) -> None:
        for head in self.heads:
            head.end()
        self._asker.shutdown()

    # ---- the log
    def records(self, after: int = 0) -> list[tuple[int, str, str]]:
        """(id, kind, payload) of the events above an id."""
        path = self.site.folder / "shared" / "events.sqlite"
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20.0) as log:
            found = log.execute("SELECT id, kind, payload FROM event WHERE id > ? ORDER BY id", (after,)).fetchall()
        return [
            (number, kind, payload if isinstance(payload, str) else bytes(payload).decode())
            for number, kind, payload in found
        ]


def kill(pair: Pair, head: Head) -> Callable[[], object]:
    """kill -9 of all of the controller's processes, as when the host loses its power and its locks are freed."""
    head.process.kill()
    head.process.wait()
    return lambda: None


def freeze(pair: Pair, head: Head) -> Callable[[], object]:
    """The host stands still and its locks stay; later it goes on."""
    head.process.send_signal(signal.SIGSTOP)
    return lambda: head.process.send_signal(signal.SIGCONT)


def freeze_and_cut(pair: Pair, head: Head) -> Callable[[], object]:
    """Freeze the host and cut it off; it wakes first, and then its link is mended."""
    pair.site.cut(head.host)
    head.process.send_signal(signal.SIGSTOP)

    def undo() -> None:
        head.process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        pair.site.heal(head.host)

    return undo


def cut(pair: Pair, head: Head) -> Callable[[], object]:
    """Its link fails, but not that to the folder: it has to step down by itself."""
    pair.site.cut(head.host)
    return lambda: pair.site.heal(head.host)


FAULTS = (kill, freeze, cut, freeze_and_cut)


class Round:
    """One fault and what came of it. `wrong`: what was asked and not seen."""

    def __init__(self, number: int, fault: Callable[[Pair, Head], Callable[[], object]]) -> None:
        self.number, self.fault = number, fault
        self.leads = self.agents = self.heals = 0.0  # seconds since the fault; of a killed rank since its end
        self.wrong: list[str] = []

    def ask(self, true: object, what: str) -> None:
        if not true:
            self.wrong.append(what)

    def play(self, pair: Pair, storm: Storm) -> None:
        old, new = sorted(pair.heads, key=lambda head: not head.leads())
        self.ask(old.leads() and not new.leads(), "one leads before")
        said = pair.waits(old)
        before, failures = pair.records(), len(storm.failures())
        generation = storm.job.status()["generation"]
        began = time.monotonic()
        undo = self.fault(pair, old)
        wait_for(new.leads, "the other leads", LIMIT, pair.told)
        self.leads = time.monotonic() - began
        self.ask(self.leads <= TAKES_OVER_SECONDS, f"leads within {TAKES_OVER_SECONDS:g} s")
        wait_for(lambda: self._heard(storm), "all agents are back", LIMIT, storm.job.told)
        self.agents = time.monotonic() - began
        self._look_at_log(pair, before)
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
        self.ask(new.leads(), "the new one still leads")
        kinds = [kind for _, kind, _ in pair.records(last)]
        self.ask("started" not in kinds, "nobody else began")
        old.end()
        old.start()
        pair.await_standby(old, said)

    def _kill_rank(self, storm: Storm, slot: int) -> float:
        """kill -9 of a rank whose process the controller knows; returns the time."""
        ranks = [rank for element in storm.job.status()["elements"] for rank in element["ranks"]]
        (pid,) = [rank["pid"] for rank in ranks if rank["slot"] == slot]
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def _heard(self, storm: Storm) -> bool:
        elements = [e for e in storm.job.status().get("elements", []) if not e["gone"]]
        return len(elements) == ELEMENTS and all(e["ranks"] and e["last_heard"] for e in elements)

    def _look_at_log(self, pair: Pair, before: list[tuple[int, str, str]]) -> None:
        """All that was there is there, and the new one goes on where the old one stopped."""
        after = pair.records()
        kept = {number for number, _, _ in after}
        lost = [(number, kind) for number, kind, _ in before if number not in kept and kind not in ("steps", "step")]
        self.ask(not lost, f"no record is lost ({lost[:3]})")
        fresh = [number for number, _, _ in after if number > before[-1][0]]
        self.ask(fresh == list(range(fresh[0], fresh[0] + len(fresh))), "the ids go on one by one")
        starts = [number for number, kind, _ in after if kind == "started"]
        self.ask(starts[-1] > before[-1][0], "the new one's start is there")
        # A start thins the steps before it, never the last ones.
        steps = [json.loads(payload)["iteration"] for _, kind, payload in before if kind == "step"][-1:]
        steps += [json.loads(text)["iteration"] for number, kind, text in after if kind == "step" and number in fresh]
        self.ask(steps == list(range(steps[0], steps[0] + len(steps))), f"no step is lost ({steps[:30]})")

    def line(self) -> str:
        """For the table."""
        name = self.fault.__name__.replace("_", " ")
        said = f"   MISSED: {'; '.join(self.wrong)}" if self.wrong else ""
        times = f"leads {self.leads:4.1f} s   agents {self.agents:4.1f} s   next step {self.heals:4.1f} s"
        return f"{self.number:>3}  {name:<15} {times}{said}"


def storm_of(folder: Path, times: int, only: str) -> list[Round]:
    """Plays the rounds; prints each when it is known."""
    rounds: list[Round] = []
    faults = [fault for fault in FAULTS if only in ("", fault.__name__)]
    with LinksCluster(folder, NODES, config_lines=["SlurmdTimeout=300"]) as site:
        own = site.controller
        own.close()
        pair = Pair(site)
        site.controller = pair
        try:
            storm = Storm(site)
            storm.job = site.submit(ELEMENTS, options=[f"--exclude={','.join(HOSTS)}"], UNICRON_CONTROLLER=pair.address)
            storm.job.whole(ELEMENTS, START_LIMIT)
            storm.job.reached(10)
            for number, fault in zip(range(1, times + 1), itertools.cycle(faults)):
                rounds.append(Round(number, fault))
                rounds[-1].play(pair, storm)
                print(rounds[-1].line(), flush=True)
        except Exception as problem:
            print(f"{problem}"[:6000], flush=True)
            if rounds:
                rounds[-1].wrong.append(f"{type(problem).__name__}")
            else:
                raise
        finally:
            pair.close()
            site.controller = own
    return rounds


def summary(rounds: list[Round]) -> str:
    """One line for each kind of fault."""
    lines = [f"{'':<16}{'rounds':>7}{'leads: median, max':>22}{'agents are back':>22}{'next step':>22}"]
    for fault in FAULTS:
        found = [one for one in rounds if one.fault is fault and one.heals]
        if not found:
            continue
        cells = [[getattr(one, name) for one in found] for name in ("leads", "agents", "heals")]
        told = "".join(f"{median(cell):.1f} s, {max(cell):.1f} s".rjust(22) for cell in cells)
        lines.append(f"{fault.__name__.replace('_', ' '):<16}{len(found):>7}{told}")
    passed = sum(not one.wrong for one in rounds)
    return "\n".join([*lines, f"{passed} of {len(rounds)} rounds passed"])


def main() -> int:
    """0 when all that was asked has been seen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storms.standby", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=12, help="how often (a release: 50)")
    parser.add_argument("--only", choices=[fault.__name__ for fault in FAULTS], default="", help="this fault only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--keep", action="store_true", help="keep all logs, and say where they are")
    options = parser.parse_args()
    if os.getuid():
        parser.error("links of their own need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="unicron-standby-"))
    try:
        rounds = storm_of(folder / "site", options.times, options.only)
    finally:
        if options.keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n" + summary(rounds))
    if options.json:
        found = [
            {"fault": r.fault.__name__, "leads": r.leads, "agents": r.agents, "heals": r.heals, "missed": r.wrong}
            for r in rounds
        ]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if len(rounds) == options.times and not any(one.wrong for one in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
