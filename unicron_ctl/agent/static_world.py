"""The world of an unprotected job: what torchrun's variables are when no controller deals the ranks.

A job array's elements cannot see each other except through Slurm, so every agent asks squeue which elements run, waits
until two answers
agree, and derives the same world from them.
"""

from __future__ import annotations

import os
import subprocess
import time

from unicron_ctl.agent.place import Place

SETTLE_SECONDS = 3.0
LIMIT_SECONDS = 60.0
FIRST_PORT, PORTS = 20000, 20000


def static_environment(place: Place) -> dict[str, str]:
    """RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for a job with one rank on each node; empty when Slurm does not
    answer."""
    if "SLURM_ARRAY_TASK_ID" not in os.environ:
        elements, first = list(range(int(os.environ.get("SLURM_NNODES", "1")))), place.address
    else:
        running = _settled(place.job)
        if place.element not in running:
            return {}
        elements, first = sorted(running), _address(running[min(running)])
    local = int(os.environ.get("SLURM_LOCALID", "0"))
    ranks = place.settings.ranks_per_node
    return {
        "RANK": str(elements.index(place.element) * ranks + local),
        "WORLD_SIZE": str(len(elements) * ranks),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(FIRST_PORT + int(place.job) % PORTS),
    }


def _settled(job: str) -> dict[int, str]:
    """element -> node of the elements that run, once the answer has stood still and nothing is about to start."""
    deadline = time.monotonic() + LIMIT_SECONDS
    last: dict[int, str] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = _running(job)
        if now != last:
            last, since = now, time.monotonic()
        elif now and time.monotonic() - since >= SETTLE_SECONDS:
            break
        time.sleep(0.5)
    return last


def _running(job: str) -> dict[int, str]:
    lines = _answer(["squeue", "-h", "-r", "-j", job, "-t", "RUNNING", "-o", "%K %N"])
    return {int(element): node for element, node in (line.split() for line in lines if len(line.split()) == 2)}


def _address(node: str) -> str:
    for word in " ".join(_answer(["scontrol", "-o", "show", "node", node])).split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    return node


def _answer(command: list[str]) -> list[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
