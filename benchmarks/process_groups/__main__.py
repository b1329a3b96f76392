"""Three ranks with gloo; one is killed while the others wait for it, in each of four phases. Printed for each way to
break off and to join anew: how long a survivor's wait goes on, and how long joining takes.

`unicron`: sockets are shut down, the group is destroyed and made anew (unicron_transition/generations). `abort`:
torch's `ProcessGroup.abort`, then the same. `reconfigure`: `abort`, then torch's `_reconfigure` of the same group
(2.14 on).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.marks import print_figure
from benchmarks.process_groups.rank import LIMIT, VICTIM

PHASES = ("reduce", "send", "receive", "barrier")
IN_TIME = 1.0  # seconds: what a wait may go on for after the order to break off
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Seen:
    """Of one way in one phase, seconds of each turn: the longer of both survivors."""

    ended: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)


def once(way: str, phase: str) -> tuple[float, float]:
    """Seconds from the order to break off until both wait no more, and until the later one has joined."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    command = [sys.executable, "-m", "benchmarks.process_groups.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), way, phase, str(store.port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        time.sleep(0.15)  # they are in the middle of it
        ranks[VICTIM].kill()
        time.sleep(0.3)
        survivors = ranks[:VICTIM]
        for rank in survivors:
            assert rank.stdin is not None
            rank.stdin.write("break off\n")
            rank.stdin.flush()
        said = [json.loads(rank.communicate(timeout=6 * LIMIT.total_seconds())[0]) for rank in survivors]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    # Who is free first waits for the other: the last to come shows what joining takes.
    return max(one["ended"] for one in said), min(one["joined"] for one in said)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="of each way in each phase")
    turns = parser.parse_args().turns
    own = hasattr(dist, "_reconfigure")
    ways = ("unicron", "abort", "reconfigure") if own else ("unicron", "abort")
    seen = {(way, phase): Seen() for way in ways for phase in PHASES}
    for _ in range(turns):
        for (way, phase), figures in seen.items():  # by turns, so that the machine's load is in all of them
            ended, joined = once(way, phase)
            figures.ended.append(ended)
            figures.joined.append(joined)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, time-out {LIMIT.total_seconds():g} s, {turns} turns")
    for (way, phase), figures in seen.items():
        mark = IN_TIME if way == "unicron" else None
        print_figure(f"{way}, {phase}: the last wait ends after at most", max(figures.ended), "s", mark)
        print_figure(f"{way}, {phase}: joining takes, median", 1000 * statistics.median(figures.joined), "ms")


if __name__ == "__main__":
    main()
