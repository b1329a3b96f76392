"""Slurm behind one interface: `SlurmClient`, with a command-line backend for every release and a pyslurm backend."""

from unicron_ctl.shared.slurm.command_line import CommandLineClient
from unicron_ctl.shared.slurm.pyslurm_backend import choose_client
from unicron_ctl.shared.slurm.slurm_client import (
    ElementInfo,
    NodeInfo,
    PartitionInfo,
    Reservation,
    SlurmClient,
    SlurmError,
)

__all__ = [
    "CommandLineClient",
    "ElementInfo",
    "NodeInfo",
    "PartitionInfo",
    "Reservation",
    "SlurmClient",
    "SlurmError",
    "choose_client",
]
