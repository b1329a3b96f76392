"""The process of a rank, and its start."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from unicron_detector.chaos.inject import injector
from unicron_detector.processes.counters import collectives
from unicron_detector.processes.rank_channel import QUIET_SECONDS, RankChannel
from unicron_detector.processes.rank_messages import CollectiveProgress
from unicron_transition.generations import groups
from unicron_transition.generations.layout import Layout, StatedLayout, parse_layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.generations.pulse import Pulse
from unicron_transition.generations.unblock import Unblocker
from unicron_transition.generations.watch import Watch
from unicron_transition.iteration import notice
from unicron_transition.iteration.rank_log import warn
from unicron_transition.seams import elastic_buckets, gloo, nccl, process_groups
from unicron_transition.seams.table import UnsupportedLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A rank that says nothing for this many seconds, and for this many usual iterations, looks how far its collectives are.
STALL_SECONDS, STALL_FACTOR = 0.5, 2.0
ASK_SECONDS = 1.0  # between two such looks


class Process:
    """The parts that a rank's process has once: channel to the agent (None without one), watch and unblocker."""

    def __init__(self, backend: str, layout: Layout):
        self.backend, self.layout = backend, layout
        self.meshes = Meshes(layout, "cuda" if backend == "nccl" else "cpu")
        self.slot = int(os.environ.get("UNICRON_SLOT", os.environ.get("RANK", "0")))
        self.aborter = nccl.Aborter()
        self.unblocker = Unblocker(self.aborter.abort)
        self.watch = Watch(self.slot, self.unblocker.unblock)
        self._pulse: Pulse | None = None
        self._quiet_since = self._asked = 0.0
        self.groups_since = 0
        """When this rank has entered its generation, in nanoseconds: groups before it had the same names."""
        self.iteration_takes: Callable[[], float] = lambda: math.inf
        """Returns the usual seconds of the iteration under way; infinite between two, when nothing may ask torch."""
        injector.break_connections = self.unblocker.unblock
        self.channel = RankChannel.from_environment(self.watch.on_message)
        if self.channel is not None:
            self.channel.install_excepthook()
            notice.outlive_notice()
            if backend == "gloo":  # NCCL talks to its store all the time
                gloo.abandon_lost_messages(lambda: self.watch.disturbed(True))
                self._pulse = Pulse(self.unblocker.own)
            self.channel.on_quiet = self._quiet

    def _quiet(self, fresh: bool) -> CollectiveProgress | None:
        now = time.monotonic()
        self._quiet_since = now - QUIET_SECONDS if fresh else self._quiet_since
        moved = self._pulse.measure(fresh) if self._pulse is not None else 0
        found = self._progress_of_groups(now)
        return CollectiveProgress(moved, found) if moved or found else None

    def _progress_of_groups(self, now: float) -> dict[str, tuple[int, int, str]]:
        """Return how far this rank is in each of its groups, if it stands still; empty otherwise. Reading the flight
        recorder takes milliseconds."""
        patience = max(STALL_SECONDS, STALL_FACTOR * self.iteration_takes())
        if now - self._quiet_since < patience or now - self._asked < ASK_SECONDS:
            return {}
        self._asked = now
        # Names of the generation's groups end with their members; a script's own may mean other groups elsewhere.
        found = collectives(self.groups_since)
        return {name: (begun, ended, words) for name, (begun, ended, words) in found.items() if "." in name}

    @property
    def device(self) -> torch.device:
        """The device on which this backend's collectives want their tensors."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")


# If one of these is more than 1 there are other processes, and torch reports which variable is missing.
OF_MANY = ("SLURM_NTASKS", "SLURM_ARRAY_TASK_COUNT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "WORLD_SIZE")
_process: Process | None = None


def current() -> Process:
    """Return this process. Raises RuntimeError before :func:`init_process_group`."""
    if _process is None:
        raise RuntimeError("call unicron.init_process_group(backend) before anything else of unicron")
    return _process


def shard_mesh() -> DeviceMesh:
    """Return the mesh of this rank's replica over which `fully_shard` shards a module: of shape (F,), with the F ranks
    of `Layout(shard=F)`; with context parallelism (F x C,).

    Raises
    ------
    RuntimeError
        Before :func:`init_process_group`.
    ValueError
        If the ranks of the job are not whole replicas.

    Examples
    --------
    >>> import torch, unicron
    >>> unicron.init_process_group("gloo", layout=unicron.Layout(shard=1))
    >>> from torch.distributed.fsdp import fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 1), mesh=unicron.shard_mesh())
    >>> torch.distributed.destroy_process_group()
    """
    return current().meshes.mesh("shard")


def tensor_mesh() -> DeviceMesh:
    """Return the mesh of `Layout(tensor=T)` for `parallelize_module`, of shape (T,). It is a direction of one mesh with
    that of :func:`shard_mesh`, so that a module can be sharded over both. Raises as :func:`shard_mesh`."""
    return current().meshes.mesh("tensor")


def context_mesh() -> DeviceMesh:
    """Return the mesh of `Layout(context=C)` for torch's `context_parallel`, of shape (C,). Raises as
    :func:`shard_mesh`."""
    return current().meshes.mesh("context")


def init_process_group(backend: str, layout: Layout | None = None) -> None:
    """Initialize torch.distributed, in place of torch's own function.

    Under an agent the rank starts in a world without peers, where it builds its part of the model; the session takes it
    into the job's generations. Without an agent it is torch's own call with the usual environment variables; a single
    process needs none.

    Parameters
    ----------
    backend
        "nccl" or "gloo".
    layout
        Layout of a replica; by default each rank is one.

    Raises
    ------
    UnsupportedLayout
        If the job has several layouts (UNICRON_LAYOUTS) and must run in another one now, and for a torch that this
        release does not know.
    """
    global _process
    layout, wanted = layout or Layout(), os.environ.get("UNICRON_LAYOUT", "")
    if wanted and parse_layout(wanted).layout != layout:
        raise UnsupportedLayout(
            f"the job runs as {wanted} now, and the script gives {StatedLayout(layout).text}: take the layout from "
            "UNICRON_LAYOUT, or submit without UNICRON_LAYOUTS"
        )
    process_groups.check_torch(peers="UNICRON_AGENT" not in os.environ)
    if backend == "nccl":
        for line in nccl.keep_torch_from_aborting():
            warn(line)
    _process = Process(backend, layout)
    elastic_buckets.prepare_when_imported()
    if _process.channel is None:
        limit = groups.collective_timeout()
        if "RANK" in os.environ or any(os.environ.get(name, "1") != "1" for name in OF_MANY):
            dist.init_process_group(backend, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit, store=dist.HashStore(), rank=0, world_size=1)
    else:
        groups.init_without_peers(_process.layout, _process.slot)
