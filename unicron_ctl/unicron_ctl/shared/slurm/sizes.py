"""Reads the sizes of nodes and the limits of partitions from scontrol's fields. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unicron_ctl.shared.slurm import squeue
from unicron_ctl.shared.slurm.slurm_client import NONE_SET, PartitionInfo, Size


def parse_partitions(text: str) -> list[PartitionInfo]:
    """Read `scontrol -o show partition`."""
    lines = (dict(re.findall(r"(?:^|(?<= ))([A-Z][A-Za-z]*)=(\S*)", line)) for line in text.split("\n"))
    return [_partition(fields) for fields in lines if "PartitionName" in fields]


def _partition(fields: Mapping[str, str]) -> PartitionInfo:
    def number(name: str, unset: float) -> float:
        text = fields.get(name, "")
        return float(text) if text.isdecimal() else unset

    seconds = squeue.parse_limit(fields.get("MaxTime", ""))
    return PartitionInfo(
        name=fields["PartitionName"],
        nodes=int(number("TotalNodes", 0.0)),
        state=fields.get("State", ""),
        grace=number("GraceTime", 0.0),
        topology=fields.get("Topology", ""),
        max_seconds=NONE_SET if seconds is None else seconds,
        min_nodes=number("MinNodes", 0.0),
        max_nodes=number("MaxNodes", NONE_SET),
        max_memory=number("MaxMemPerNode", 0.0) or NONE_SET,
        max_cpus=number("MaxCPUsPerNode", NONE_SET),
    )


def node_size(fields: Mapping[str, str]) -> Size:
    """Return a node's size, as Slurm counts it: CPUEfctv (since 22.05) excludes CPUs kept for the system."""

    def number(name: str, least: int) -> int:
        return max(least, int(fields[name])) if fields.get(name, "").isdecimal() else least

    sockets, cores, total = number("Sockets", 1), number("CoresPerSocket", 1), number("CPUTot", 0)
    memory = number("RealMemory", 0)
    return Size(
        cpus=number("CPUEfctv", 0) or total,
        sockets=sockets,
        cores=cores,
        # Where slurm.conf counts cores as CPUs, a core's threads are one CPU.
        threads=min(number("ThreadsPerCore", 1), max(1, total // (sockets * cores))),
        memory=memory,
        to_give=max(0, memory - number("MemSpecLimit", 0)),
        tmp=number("TmpDisk", 0),
    )
