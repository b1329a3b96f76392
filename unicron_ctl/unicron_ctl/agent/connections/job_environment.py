"""The place of this agent: job, element, node, ranks and settings, read from the environment that Slurm and the plugin
give it."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from unicron_ctl.agent.connections.stated_layouts import read_layouts, read_model
from unicron_ctl.agent.connections.step_tasks import StepTask
from unicron_ctl.shared.protocol import ranges
from unicron_ctl.shared.protocol.reach import first_open
from unicron_ctl.shared.protocol.structs import Settings
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.system.addresses import canonical, endpoints, resolve_all
from unicron_ctl.shared.system.errors import WRONG_USE, UserError

LOGS = "UNICRON_LOG_DIR"
LAUNCH = "_UNICRON_LAUNCH"  # which launch of a shell script this agent is (agent/launchers/shells.py)
ADDRESS_SECONDS = 1.5  # for one of the controller's addresses to accept, where it has several
# From here on step numbers are Slurm's own (slurm.h); as signed ones they are -16 to -1. From 26.05 on it gives one to
# batch and interactive scripts, for which older releases set no SLURM_STEP_ID.
MOST_STEP = 0xFFFFFFF0
LEAST_MEMORY_RATE = 0.1  # megabytes a second: the other side gives up what is slower (image_stream.LEAST_RATE)


@dataclass(frozen=True)
class Place:
    """One agent's place in the cluster. A slot is element * ranks_per_node + local rank."""

    job: str
    element: int
    node: str
    address: str
    """The address by which other nodes reach this one"""
    settings: Settings
    step: int = 0
    """The number of the training among those of its batch script"""
    requeues: int = 0
    """How often Slurm has run the whole job's batch script again; 0 for an element among others of an array"""
    trains: bool = True
    """The command may train"""
    tasks: tuple[StepTask, ...] = ()
    """Slurm's tasks of this node in their order, where the step has several; the first is this process"""

    @property
    def slots(self) -> list[int]:
        """The slots of this element's ranks."""
        count = self.settings.ranks_per_node
        return [self.element * count + local for local in range(count)]

    def alone(self) -> Place:
        """Return this place in a job that is as large as its element. One allocation is one element."""
        if self.settings.allocation:
            return self
        return replace(self, settings=msgspec.structs.replace(self.settings, max_nodes=self.settings.block))

    def in_mode(self, mode: str, reason: str, trains: bool = True, command: str = "") -> Place:
        """Return this place in a job that is healed in this mode. trains: its command may train. command: its
        digest."""
        settings = msgspec.structs.replace(self.settings, mode=mode, mode_reason=reason[: ranges.TEXT], command=command)
        return replace(self, settings=settings, trains=trains)

    @property
    def warning(self) -> str:
        """The job's log line on a minimum or a number of spares that does not fit, from its element 0; else empty. The
        job runs all the same: with all of its nodes, or with as many spares as leave enough of them."""
        settings = self.settings
        if settings.min_nodes > settings.max_nodes and not self.element:
            least = f"UNICRON_MIN_NODES={settings.min_nodes} of {settings.max_nodes} nodes"
            return f"{least}: the job runs with all {settings.max_nodes}, and with no fewer"
        most = max(0, settings.max_nodes - settings.min_nodes)
        if self.element or settings.spares <= most:
            return ""
        asked = f"UNICRON_SPARES={settings.spares} of {settings.max_nodes} nodes"
        kept = f"it keeps {most or 'none'}; ask for {most}, or for more nodes"
        return f"{asked} leaves fewer than UNICRON_MIN_NODES={settings.min_nodes}: {kept}"

    @property
    def label(self) -> str:
        """JOB_ELEMENT, as Slurm writes it."""
        return f"{self.job}_{self.element // self.settings.block}"


def number(
    environment: Mapping[str, str],
    name: str,
    default: str,
    kind: Callable[[str], float] = int,
    least: float = 1,
    most: float = ranges.MOST_COUNT,
) -> float:
    """Return a variable's value, `default` when it is not set. Raises UserError, one line, when it makes no sense."""
    text = environment.get(name, default)
    try:
        value = kind(text)
    except ValueError:
        raise UserError(
            f"{name}={text!r} is no {'number' if kind is float else 'whole number'}: unset it or give a value "
            f"like {default}",
            WRONG_USE,
        ) from None
    if not least <= value <= most:
        limits = f"{least:g} to {most:g}" if most < ranges.MOST_COUNT else f"at least {least:g}"
        raise UserError(f"{name}={text} must be {limits}: unset it or give a value like {default}", WRONG_USE)
    return value


def memory_every(environment: Mapping[str, str]) -> int:
    """Iterations between two states that are kept in memory; 0: none is. Raises UserError."""
    return int(number(_set(environment), "UNICRON_MEMORY_EVERY", "1", least=0))


def memory_rate(environment: Mapping[str, str]) -> float:
    """Most bytes a second that go to copies in other nodes; 0: as many as can. Raises UserError."""
    rate = number(_set(environment), "UNICRON_MEMORY_RATE", "1000", float, least=0.0)
    if 0.0 < rate < LEAST_MEMORY_RATE:
        raise UserError(
            f"UNICRON_MEMORY_RATE={rate:g} must be at least {LEAST_MEMORY_RATE:g}, since slower copies are given up, "
            "or 0 for no limit: unset it or give a value like 1000",
            WRONG_USE,
        )
    return rate * 1e6


def log_folder(environment: Mapping[str, str], job: str) -> Path | None:
    """The folder with a file for each rank's output; None where nobody asked for them."""
    said = environment.get(LOGS, "")
    return Path(said).absolute() / job if said else None


def _set(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not empty."""
    return {name: value for name, value in environment.items() if value}


def read_place(
    environment: Mapping[str, str] = os.environ,
    controller: str = "",
    tasks: Sequence[StepTask] = (),
    by_gpus: bool = True,
) -> Place:
    """The agent's place; `controller` is the address of its controller. tasks: see :class:`Place`. by_gpus: one task
    stands for a rank for each GPU. Raises UserError for what makes no sense."""
    job = environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID")
    if not job:
        raise UserError(
            "no SLURM_JOB_ID: start unicron-agent inside a Slurm job, for example `srun unicron-agent run -- "
            "python train.py`",
            WRONG_USE,
        )
    if not job.isascii() or not job.isdecimal():
        raise UserError(f"SLURM_JOB_ID={job!r} is not a job id: start unicron-agent inside a Slurm job", WRONG_USE)
    array = "SLURM_ARRAY_TASK_ID" in environment
    gpus = environment.get("SLURM_GPUS_ON_NODE", "") if by_gpus else ""
    ranks = environment.get("UNICRON_RANKS_PER_NODE") or (gpus if gpus not in ("", "0") else "1")
    if tasks:
        ranks = str(len(tasks))
    node = environment.get("SLURMD_NODENAME") or socket.gethostname()
    per_node = int(number({"UNICRON_RANKS_PER_NODE": ranks}, "UNICRON_RANKS_PER_NODE", "1", most=ranges.MOST_RANKS))
    nodes = int(number(environment, "SLURM_NNODES", "1"))
    allocation, block = not array and nodes > 1, nodes if array else 1
    most = nodes * (int(number(environment, "SLURM_ARRAY_TASK_COUNT", "1")) if array else 1)
    given = _set(environment)
    least = int(number(given, "UNICRON_MIN_NODES", "1", most=ranges.MOST_ELEMENTS))
    least = -(-least // block) * block  # a block comes whole
    model = read_model(environment)
    memory_every(environment)  # a mistake is said before the job runs without
    memory_rate(environment)
    return Place(
        job=job,
        element=int(number(environment, "SLURM_ARRAY_TASK_ID", "0", least=0)) * block
        + (_place_in_allocation(environment, node) if nodes > 1 else 0),
        node=node,
        address=environment.get("UNICRON_NODE_ADDRESS") or _address(controller),
        step=_step(environment) * ranges.LAUNCHES
        + int(number(environment, LAUNCH, "0", least=0, most=ranges.LAUNCHES - 1)),
        requeues=0 if array and most > block else int(number(_set(environment), "SLURM_RESTART_COUNT", "0", least=0)),
        tasks=tuple(tasks),
        settings=Settings(
            name=environment.get("SLURM_JOB_NAME", job)[: ranges.NAME],
            user=environment.get("SLURM_JOB_USER") or _own_name(),
            weight=number(environment, "UNICRON_WEIGHT", "1.0", float, ranges.LEAST_WEIGHT, ranges.MOST_WEIGHT),
            min_nodes=least,
            min_stated="UNICRON_MIN_NODES" in given,
            max_nodes=most,
            ranks_per_node=per_node,
            layouts=read_layouts(environment, per_node, most, model),
            model=model,
            copies=int(number(_set(environment), "UNICRON_STATE_COPIES", "1", least=0, most=ranges.MOST_COPIES)),
            spares=int(number(environment, "UNICRON_SPARES", "0", least=0, most=ranges.MOST_ELEMENTS)),
            allocation=allocation,
            no_kill=allocation and bool(environment.get("SLURM_NO_KILL")),
            block=block,
            log_dir=str(log_folder(environment, job) or "")[: ranges.TEXT],
        ),
    )


def _place_in_allocation(environment: Mapping[str, str], node: str) -> int:
    """The place of the node in the allocation, as the controller counts (`model.allocation`). SLURM_NODEID may
    tell another one: srun's --distribution orders the nodes of a step."""
    names = hosts(environment.get("SLURM_JOB_NODELIST", ""))
    return names.index(node) if node in names else int(number(environment, "SLURM_NODEID", "0", least=0))


def _own_name() -> str:
    """This process's user; a container need not know its name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _step(environment: Mapping[str, str]) -> int:
    """The number of this training's Slurm step among those of its batch script; steps that the plugin only used up
    (slurm_plugin/spank/batch.c) are not counted. A script that is no step of its own counts as the first one."""
    first = int(number(environment, "UNICRON_FIRST_STEP", "0", least=0))
    step = int(number(environment, "SLURM_STEP_ID", "0", least=-16))
    return max(0, step - first) if step < MOST_STEP else 0


def _address(controller: str) -> str:
    """The address by which other nodes reach this one: that of the interface which leads to the controller, by the
    controller's address that accepts connections where it has several."""
    try:
        targets = resolve_all(endpoints(controller))
    except (OSError, UserError):
        return socket.gethostname()
    best = first_open(targets, ADDRESS_SECONDS)
    for target in ([best] if best is not None else []) + targets:
        with contextlib.suppress(OSError), socket.socket(target.family, socket.SOCK_DGRAM) as probe:
            probe.connect(target.address)  # a datagram socket's connect sends nothing
            return canonical(probe.getsockname()[0])
    return socket.gethostname()
