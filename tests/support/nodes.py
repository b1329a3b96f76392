"""Nodes of a real Slurm between two tests."""

from __future__ import annotations

from unicron_ctl.shared.slurm import SlurmClient


def all_idle(client: SlurmClient) -> bool:
    """Every node is idle and in service. Slurm now and then takes one out after all were resumed: it is resumed again.

    Of a job that is cancelled, or ends, in the moment of its start Slurm cannot end a step, and drains the node 20 s
    later (UnkillableStepTimeout). Of a node that has just booted and registers twice it works out two times of boot,
    from whole seconds, and takes that for a second boot.
    """
    nodes = client.nodes()
    for node in nodes:
        if node.reason in ("Kill task failed", "Node unexpectedly rebooted"):
            client.resume(node.name)
    return all(node.states == {"IDLE"} for node in nodes)
