"""The state of a local cluster: the JSON of `unicronctl cluster status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from unicron_ctl.lab.cluster import accounting
from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec
from unicron_ctl.lab.cluster.cluster_processes import Process
from unicron_ctl.shared.slurm.slurm_client import NodeInfo


class LinksStatus(msgspec.Struct, kw_only=True):
    """A cluster's links: addresses by host, and what is wrong: hosts without power, hosts that are cut off, pairs that
    are cut apart, and the share of packets lost by host."""

    network: str
    addresses: dict[str, str]
    off: list[str]
    cut: list[str]
    apart: list[tuple[str, str]]
    loss: dict[str, float]


class ClusterNode(msgspec.Struct, kw_only=True):
    """A virtual node. slurmd: its process id; tasks: how many processes of jobs run there."""

    name: str
    slurmd: int | None
    states: list[str]
    reason: str
    gpus: int
    tasks: int


class ClusterStatus(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl cluster status`. state: up, partial (something is missing or does not answer) or down.
    slurmctld, munged: process ids."""

    state: str
    state_dir: str
    slurm_conf: str
    auth: str
    port: int | None
    links: LinksStatus | None
    slurmctld: int | None
    munged: int | None
    nodes: list[ClusterNode]


def slurmds_of(running: Sequence[Process]) -> dict[str, int]:
    """Node name -> process id of its slurmd (the first: a forking slurmd shows twice for a moment)."""
    found: dict[str, int] = {}
    for process in running:
        if process.kind == "slurmd" and process.node is not None:
            found.setdefault(process.node, process.pid)
    return found


def cluster_status(
    layout: Layout, spec: Spec, running: Sequence[Process], known: Mapping[str, NodeInfo], links: LinksStatus | None
) -> ClusterStatus:
    """The status of the cluster of which these processes run. known: the nodes that Slurm shows, by name."""
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
