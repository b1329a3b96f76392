"""Who this agent is: job, element, node, ranks and settings, read from the environment that Slurm and the plugin give
it."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from unicron_ctl.errors import UserError
from unicron_ctl.wire import Settings


@dataclass(frozen=True)
class Place:
    """One agent's place in the cluster. A slot is element * ranks_per_node + local rank."""

    job: str
    element: int
    node: str
    address: str
    settings: Settings

    @property
    def slots(self) -> list[int]:
        """The slots of this element's ranks."""
        count = self.settings.ranks_per_node
        return [self.element * count + local for local in range(count)]

    @property
    def label(self) -> str:
        """JOB_ELEMENT, as Slurm writes it."""
        return f"{self.job}_{self.element}"


def _number(environment: Mapping[str, str], name: str, default: str, kind: type = int, least: float = 1) -> float:
    text = environment.get(name, default)
    try:
        value = kind(text)
    except ValueError:
        raise UserError(
            f"{name}={text!r} is no {'number' if kind is float else 'whole number'}: unset it or give a value "
            f"like {default}",
            2,
        ) from None
    if not (least <= value < float("inf")):
        raise UserError(f"{name}={text} must be at least {least:g}: unset it or give a value like {default}", 2)
    return value


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The agent's place. Raises UserError for a value that makes no sense."""
    job = environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID")
    if not job:
        raise UserError(
            "no SLURM_JOB_ID: start unicron-agent inside a Slurm job, for example `srun unicron-agent run -- "
            "python train.py`",
            2,
        )
    array = "SLURM_ARRAY_TASK_ID" in environment
    element = environment["SLURM_ARRAY_TASK_ID"] if array else environment.get("SLURM_NODEID", "0")
    ranks = environment.get("UNICRON_RANKS_PER_NODE") or environment.get("SLURM_GPUS_ON_NODE") or "1"
    nodes = environment.get("SLURM_ARRAY_TASK_COUNT" if array else "SLURM_NNODES", "1")
    node = environment.get("SLURMD_NODENAME") or socket.gethostname()
    return Place(
        job=job,
        element=int(element),
        node=node,
        address=environment.get("UNICRON_NODE_ADDRESS") or _address(environment.get("UNICRON_CONTROLLER", "")),
        settings=Settings(
            name=environment.get("SLURM_JOB_NAME", job),
            user=environment.get("SLURM_JOB_USER") or getpass.getuser(),
            weight=_number(environment, "UNICRON_WEIGHT", "1.0", float, 1e-6),
            min_nodes=int(_number(environment, "UNICRON_MIN_NODES", "1")),
            max_nodes=int(nodes),
            ranks_per_node=int(_number({"UNICRON_RANKS_PER_NODE": ranks}, "UNICRON_RANKS_PER_NODE", "1")),
        ),
    )


def _address(controller: str) -> str:
    """The address by which other nodes reach this one: that of the interface which leads to the controller."""
    host, _, port = controller.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # a datagram socket's connect sends nothing
            return probe.getsockname()[0]
    except (OSError, ValueError):
        return socket.gethostname()
