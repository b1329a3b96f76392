"""Slurm behind one interface: `SlurmClient`, with a command-line backend for every release and a pyslurm backend."""

from unicron_ctl.slurm.client import ElementInfo, NodeInfo, Reserved, SlurmClient, SlurmError
from unicron_ctl.slurm.command_line import CommandLineClient
from unicron_ctl.slurm.pyslurm_backend import choose_client

__all__ = ["CommandLineClient", "ElementInfo", "NodeInfo", "Reserved", "SlurmClient", "SlurmError", "choose_client"]
