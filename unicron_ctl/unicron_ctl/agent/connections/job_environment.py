"""Reads the place of this agent (job, element, node, ranks, settings) from the variables of Slurm and the plugin."""

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
from unicron_ctl.shared.settings.config import AgentConfig
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.system.addresses import canonical, endpoints, resolve_all
from unicron_ctl.shared.system.errors import WRONG_USE, UserError

LOGS = "UNICRON_LOG_DIR"
LAUNCH = "_UNICRON_LAUNCH"  # which launch of a shell script this agent is (agent/launchers/shells.py)
ADDRESS_SECONDS = 1.5  # for one of the controller's addresses to accept, where it has several
# From here on step numbers are Slurm's own (slurm.h), signed -16 to -1. Since 26.05 batch and interactive scripts have
# one; older releases set no SLURM_STEP_ID for them.
MOST_STEP = 0xFFFFFFF0
LEAST_MEMORY_RATE = 0.1  # megabytes a second: the other side gives up what is slower (image_stream.LEAST_RATE)


@dataclass(frozen=True)
class Place:
    """One agent's place in the cluster. A slot is element * ranks_per_node + local rank."""

    job: str
    element: int
    node: str
    address: str
    """The address by which other nodes reach this one."""
    settings: Settings
    step: int = 0
    """The number of the training among those of its batch script."""
    requeues: int = 0
    """Times that Slurm has run the whole job's batch script again; 0 for an element among others of an array."""
    trains: bool = True
    """The command may train."""
    tasks: tuple[StepTask, ...] = ()
    """Slurm's tasks of this node in their order, if the step has several; the first is this process."""

    @property
    def slots(self) -> list[int]:
        """The slots of this element's ranks."""
        count = self.settings.ranks_per_node
        return [self.element * count + local for local in range(count)]

    def alone(self) -> Place:
        """Return this place in a job that has only this element; an allocation is one element."""
        if self.settings.allocation:
            return self
        return replace(self, settings=msgspec.structs.replace(self.settings, max_nodes=self.settings.block))

    def in_mode(self, mode: str, reason: str, trains: bool = True, command: str = "") -> Place:
        """Return this place in a job that is healed in this mode. command: its digest."""
        settings = msgspec.structs.replace(self.settings, mode=mode, mode_reason=reason[: ranges.TEXT], command=command)
        return replace(self, settings=settings, trains=trains)

    @property
    def warning(self) -> str:
        """The job's log line, from its element 0, about a minimum or a number of spares that does not fit; else empty.
        The job runs all the same: with all of its nodes, or with as many spares as leave enough of them."""
        settings = self.settings
        if self.element:
            return ""
        if settings.min_nodes > settings.max_nodes:
            least = f"UNICRON_MIN_NODES={settings.min_nodes} of {settings.max_nodes} nodes"
            return f"{least}: the job runs with all {settings.max_nodes}, and with no fewer"
        most = settings.max_nodes - settings.min_nodes
        if settings.spares <= most:
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
    """Return a variable's value, `default` if it is not set. Raises UserError, one line, for a wrong value."""
    text = environment.get(name, default)
    hint = f"unset it or give a value like {default}"
    try:
        value = kind(text)
    except ValueError:
        what = "number" if kind is float else "whole number"
        raise UserError(f"{name}={text!r} is no {what}: {hint}", WRONG_USE) from None
    if not least <= value <= most:
        limits = f"{least:g} to {most:g}" if most < ranges.MOST_COUNT else f"at least {least:g}"
        raise UserError(f"{name}={text} must be {limits}: {hint}", WRONG_USE)
    return value


def count(env: Mapping[str, str], name: str, default: int, least: int = 1, most: int = ranges.MOST_COUNT) -> int:
    """Return the whole number in a variable, as :func:`number` does."""
    return int(number(env, name, str(default), int, least, most))


def memory_every(environment: Mapping[str, str]) -> int:
    """Return the iterations between two states that are kept in memory; 0 for none. Raises UserError."""
    return count(_set(environment), "UNICRON_MEMORY_EVERY", 1, least=0)


def audits(environment: Mapping[str, str], options: AgentConfig) -> dict[str, str]:
    """Return the ranks' variables for audits: what the job says, else what the node's configuration does. Raises
    UserError."""
    given, defaults = _set(environment), {"UNICRON_AUDIT": options.audit, "UNICRON_COMPARE": options.compare}
    return {name: str(count(given, name, default, least=0)) for name, default in defaults.items()}


def memory_rate(environment: Mapping[str, str]) -> float:
    """Return the most bytes a second for copies to other nodes; 0 for no limit. Raises UserError."""
    rate = number(_set(environment), "UNICRON_MEMORY_RATE", "1000", float, least=0.0)
    if 0.0 < rate < LEAST_MEMORY_RATE:
        raise UserError(
            f"UNICRON_MEMORY_RATE={rate:g} must be at least {LEAST_MEMORY_RATE:g}, since slower copies are given up, "
            "or 0 for no limit: unset it or give a value like 1000",
            WRONG_USE,
        )
    return rate * 1e6


def log_folder(environment: Mapping[str, str], job: str) -> Path | None:
    """Return the folder with a file for each rank's output; None if nobody asked for them."""
    folder = environment.get(LOGS, "")
    return Path(folder).absolute() / job if folder else None


def _set(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty."""
    return {name: value for name, value in environment.items() if value}


def read_place(
    environment: Mapping[str, str] = os.environ,
    controller: str = "",
    tasks: Sequence[StepTask] = (),
    by_gpus: bool = True,
) -> Place:
    """Return the agent's place. controller: its controller's address. tasks: as in :class:`Place`. by_gpus: one task
    means a rank for each GPU. Raises UserError for wrong values."""
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
    per_node = count({"UNICRON_RANKS_PER_NODE": ranks}, "UNICRON_RANKS_PER_NODE", 1, most=ranges.MOST_RANKS)
    nodes = count(environment, "SLURM_NNODES", 1)
    allocation, block = not array and nodes > 1, nodes if array else 1
    most = nodes * (count(environment, "SLURM_ARRAY_TASK_COUNT", 1) if array else 1)
    given = _set(environment)
    least = count(given, "UNICRON_MIN_NODES", 1, most=ranges.MOST_ELEMENTS)
    least = -(-least // block) * block  # a block comes whole
    model = read_model(environment)
    memory_every(environment)  # a wrong value is reported before the job runs without it
    memory_rate(environment)
    audits(environment, AgentConfig())
    return Place(
        job=job,
        element=count(environment, "SLURM_ARRAY_TASK_ID", 0, least=0) * block
        + (_place_in_allocation(environment, node) if nodes > 1 else 0),
        node=node,
        address=environment.get("UNICRON_NODE_ADDRESS") or _address(controller),
        step=_step(environment) * ranges.LAUNCHES + count(environment, LAUNCH, 0, 0, ranges.LAUNCHES - 1),
        requeues=0 if array and most > block else count(given, "SLURM_RESTART_COUNT", 0, least=0),
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
            copies=count(given, "UNICRON_STATE_COPIES", 1, 0, ranges.MOST_COPIES),
            spares=count(environment, "UNICRON_SPARES", 0, 0, ranges.MOST_ELEMENTS),
            allocation=allocation,
            no_kill=allocation and bool(environment.get("SLURM_NO_KILL")),
            block=block,
            log_dir=str(log_folder(environment, job) or "")[: ranges.TEXT],
        ),
    )


def _place_in_allocation(environment: Mapping[str, str], node: str) -> int:
    """Return the node's number in the allocation, as the controller counts (`model.allocation`). SLURM_NODEID may
    differ: srun's --distribution orders the nodes of a step."""
    names = hosts(environment.get("SLURM_JOB_NODELIST", ""))
    return names.index(node) if node in names else count(environment, "SLURM_NODEID", 0, least=0)


def _own_name() -> str:
    """Return this process's user; a container need not know its name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _step(environment: Mapping[str, str]) -> int:
    """Return the number of this training's Slurm step among those of its batch script, without the steps that the
    plugin only used up (slurm_plugin/spank/batch.c). A script that is no step of its own counts as the first one."""
    first = count(environment, "UNICRON_FIRST_STEP", 0, least=0)
    step = count(environment, "SLURM_STEP_ID", 0, least=-16)
    return max(0, step - first) if step < MOST_STEP else 0


def _address(controller: str) -> str:
    """Return the address by which other nodes reach this one: that of the interface that leads to the controller. If
    the controller has several addresses, the one that accepts connections counts."""
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
