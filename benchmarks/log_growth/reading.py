"""``python -m benchmarks.log_growth.reading [--events N]``: what `unicronctl events` costs on a long log, with filters.

A real `unicrond` has the log; the answers come over its socket. Time is the controller's, of a core, for one answer;
bytes are those of all answers to one command. The means of twenty commands.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.marks import print_figure
from unicron_ctl.cli.events import QUIET, Log
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol import client

TIMES, CHUNK, NODES = 20, 10_000, 64
LONGEST, LARGEST = 0.08, 0.1  # seconds of an answer; MB of a command's answers
TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc
STEP = records.Step(
    iteration=1, loss=2.5, seconds=1.0, ranks=8, nodes=8, flops=1e15, train_iterations=9, micro_batches=8, computed=8
)
CHOICES: dict[str, dict[str, Any]] = {
    "the last 100": {},
    "--since 2h": {"since": 7200.0},
    "--kind node_lost": {"kinds": "node_lost"},
    "--node n07": {"nodes": "n07"},
    "--node n[01-16] --since 2h": {"nodes": "n[01-16]", "since": 7200.0},
}


def happened(count: int, now: float) -> Iterator[Event]:
    """So many events, one a second: of ten one step, five actions on nodes, now and then a lost one."""
    for number in range(1, count + 1):
        node = f"n{number * 7 % NODES:02}"
        record: records.Record = STEP if number % 10 == 0 else records.SlurmDone(action="drain", node=node)
        if number % 2:
            record = records.ActionObserved(
                would=f"drain {node}", action="drain", node=node, reason=f"{node} is a suspect"
            )
        if number % 997 < 2:
            record = records.NodeLost(node=node, element=0, reason=f"{node} is lost")
        yield Event(number, now - count + number, "", 0, record)


class Counted:
    """Asks the controller and counts what comes back."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.bytes = self.answers = 0

    def ask(self, question: dict[str, Any]) -> Any:
        """Answers as `ask_controller` does."""
        found = client.ask_controller(question, self._address, 30.0)
        self.answers += 1
        self.bytes += len(msgspec.msgpack.encode(found))
        return found


def measure(address: str, chosen: dict[str, Any], now: float) -> tuple[int, Counted]:
    """The events that one command shows, and what it cost."""
    since = {"since": now - chosen["since"]} if "since" in chosen else {}
    counted = Counted(address)
    log = Log({"kind": "events", "without": QUIET, **chosen, **since}, counted.ask)
    found, _ = log.newest(100)
    return len(found), counted


def main() -> int:
    """Prints the figures and their marks; 1 where one was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    given = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        now = time.time()
        path = Path(folder) / "events.sqlite"
        store, all_events = Store(path), list(happened(given.events, now))
        for first in range(0, len(all_events), CHUNK):
            store.append(all_events[first : first + CHUNK])
        store.close()
        whole = sum(len(msgspec.msgpack.encode(event.as_dict())) for event in all_events)
        print(f"{given.events:,} events: {path.stat().st_size / 1e6:.1f} MB; whole they would be {whole / 1e6:.1f} MB")
        with running(Path(folder)) as (address, pid):
            for name, chosen in CHOICES.items():
                began, sum_ = cpu_seconds(pid), 0
                for _ in range(TIMES):
                    count, counted = measure(address, chosen, now)
                    sum_ += counted.answers
                seconds = (cpu_seconds(pid) - began) / sum_
                print(f"{name}: {count} events in {counted.answers} answer{'s' if counted.answers > 1 else ''}")
                missed += not print_figure(f"{name}, an answer", seconds, "s", LONGEST)
                missed += not print_figure(f"{name}, sent", counted.bytes / 1e6, "MB", LARGEST)
    return 1 if missed else 0


def cpu_seconds(pid: int) -> float:
    """The time of a core that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[str, int]]:
    """Runs a real controller on the state folder; yields its address and its number."""
    config = folder / "unicron.toml"
    config.write_text("[controller]\nslurm = 'none'\nauth = 'none'\n")
    command = [sys.executable, "-m", "unicron_ctl.controller.unicrond", "--config", str(config)]
    options = ["--listen", "tcp://127.0.0.1:0", "--state-dir", str(folder)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
