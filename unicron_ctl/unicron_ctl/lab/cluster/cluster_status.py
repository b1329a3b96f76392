"""The state of a local cluster: the JSON of `unicronctl cluster status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from unicron_ctl.lab.cluster import accounting
from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec
from unicron_ctl.lab.cluster.cluster_processes import Process
from unicron_ctl.lab.cluster.link_faults import Faults
from unicron_ctl.shared.slurm.slurm_client import NodeInfo


class LinksStatus(Faults, kw_only=True):
    """A cluster's links and their faults."""

    network: str
    addresses: dict[str, str]
    """By host."""


class ClusterNode(msgspec.Struct, kw_only=True):
    """A virtual node."""

    name: str
    slurmd: int | None
    """Its process id."""
    states: list[str]
    reason: str
    gpus: int
    tasks: int
    """The number of jobs' processes there."""


class ClusterStatus(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl cluster status`."""

    state: str
    """up, partial (something is missing or does not answer) or down."""
    state_dir: str
    slurm_conf: str
    auth: str
    port: int | None
    links: LinksStatus | None
    slurmctld: int | None
    """Its process id."""
    munged: int | None
    """Its process id."""
    nodes: list[ClusterNode]


def slurmds_of(running: Sequence[Process]) -> dict[str, int]:
    """Return the process id of each node's slurmd (the first: a forking slurmd shows twice for a moment)."""
    found: dict[str, int] = {}
    for process in running:
        if process.kind == "slurmd" and process.node is not None:
            found.setdefault(process.node, process.pid)
    return found


def cluster_status(
    layout: Layout, spec: Spec, running: Sequence[Process], known: Mapping[str, NodeInfo], links: LinksStatus | None
) -> ClusterStatus:
    """Return the status of the cluster with these processes. known: Slurm's nodes by name."""
    slurmds = slurmds_of(running)
    heads: dict[str, int] = {}
    for process in running:
        if process.kind in ("slurmctld", "munged", *accounting.DAEMONS):
            heads.setdefault(process.kind, process.pid)
    expected = 1 + (spec.auth == "munge") + len(accounting.DAEMONS) * spec.accounting
    whole = len(heads) == expected and len(slurmds) == spec.nodes and len(known) == spec.nodes
    return ClusterStatus(
        state="up" if whole else "partial" if running else "down",
        state_dir=str(layout.state_dir),
        slurm_conf=str(layout.slurm_conf),
        auth=spec.auth,
        port=spec.ports[0] if spec.ports else None,
        links=links,
        slurmctld=heads.get("slurmctld"),
        munged=heads.get("munged"),
        nodes=[
            ClusterNode(
                name=name,
                slurmd=slurmds.get(name),
                states=sorted(known[name].states) if name in known else [],
                reason=known[name].reason if name in known else "",
                gpus=spec.gpus_per_node,
                tasks=sum(1 for process in running if process.kind == "task" and process.node == name),
            )
            for name in spec.node_names
        ],
    )
