"""The world of an unprotected job: what torchrun's variables are when no controller deals the ranks.

A job array's elements cannot see each other except through Slurm, so every agent asks squeue which elements run, waits
until the answer has stood still, and derives the same world from it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from unicron_ctl.agent.place import Place
from unicron_ctl.errors import UserError

SETTLE_SECONDS = 3.0
LIMIT_SECONDS = 60.0
FIRST_PORT, PORTS = 20000, 12000  # below the ports that Linux gives to connecting sockets


@dataclass(frozen=True)
class World:
    """A node's part of the job. `node` of `nodes`, counted from 0; `master` is an address of the first node."""

    node: int
    nodes: int
    ranks_per_node: int
    master: str
    port: int

    def environment(self, local: int) -> dict[str, str]:
        """torchrun's variables for the node's rank `local`."""
        return {
            "RANK": str(self.node * self.ranks_per_node + local),
            "WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }


def static_world(place: Place, environment: Mapping[str, str] = os.environ) -> World:
    """The world of this job as Slurm shows it now. Raises UserError when the job has several nodes and Slurm does not
    tell which: each would train by itself, and all write the same files.
    """
    port = FIRST_PORT + int(place.job) % PORTS
    ranks = place.settings.ranks_per_node
    if place.settings.max_nodes == 1:
        return World(0, 1, ranks, place.address, port)
    if "SLURM_ARRAY_TASK_ID" in environment:
        running = _settled(place.job, place.element)
        elements = sorted(running)
    else:
        hosts = _answer(["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")])
        running = dict(enumerate(hosts)) if len(hosts) == place.settings.max_nodes else {}
        elements = list(running)
    if place.element not in running:
        raise UserError(
            f"Slurm does not tell which nodes job {place.job} has, so {place.label} cannot train together with the "
            "others: see why squeue and scontrol do not answer here"
        )
    return World(elements.index(place.element), len(elements), ranks, _address(running[elements[0]]), port)


def _settled(job: str, own: int) -> dict[int, str]:
    """element -> node of the elements that run, `own` among them, once the answer has stood still; else the last one
    in time.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    last: dict[int, str] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = _running(job)
        if now != last:
            last, since = now, time.monotonic()
        elif own in now and time.monotonic() - since >= SETTLE_SECONDS:
            break
        time.sleep(0.5)
    return last


def _running(job: str) -> dict[int, str]:
    lines = _answer(["squeue", "-h", "-r", "-j", job, "-t", "RUNNING", "-o", "%K %N"])
    words = [line.split() for line in lines]
    return {int(pair[0]): pair[1] for pair in words if len(pair) == 2 and pair[0].isdigit()}


def _address(node: str) -> str:
    for word in " ".join(_answer(["scontrol", "-o", "show", "node", node])).split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    return node


def _answer(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
