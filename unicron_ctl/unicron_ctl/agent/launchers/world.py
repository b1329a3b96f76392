"""Derives ranks per node, fewest nodes and a line of the log from a launcher's options. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from unicron_ctl.agent.launchers.commands import LauncherStays
from unicron_ctl.agent.launchers.readers import Launch
from unicron_detector.words import plural


def count_ranks(launch: Launch, environment: Mapping[str, str], nodes: int, cpus: int, devices: int) -> int:
    """Return the ranks of a node. nodes: of the job; cpus, devices: of this node. Raises LauncherStays."""
    text = launch.ranks
    if not text and launch.total:
        per_node, left = divmod(launch.total, max(1, nodes))
        if left:
            raise LauncherStays(
                f"{launch.launcher} starts {launch.total} processes, which {nodes} nodes cannot share evenly"
            )
        return per_node
    if not text:
        return 1
    if text.isdecimal() and int(text) > 0:
        return int(text)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len([device for device in visible.split(",") if device.strip()]) if visible else 0
    allocated = environment.get("SLURM_GPUS_ON_NODE", "")
    gpus = gpus or (int(allocated) if allocated.isdecimal() else 0) or devices
    if text in ("gpu", "auto") and gpus:
        return gpus
    if text in ("cpu", "auto"):
        return cpus
    if text == "gpu":
        raise LauncherStays(
            f"{launch.launcher} starts a process for each GPU, and this node has none: write their number"
        )
    raise LauncherStays(f"{launch.launcher} starts {text!r} processes a node: write a number, gpu, cpu or auto")


def fewest_nodes(launch: Launch, elements: int, block: int, spares: int, array: bool) -> int:
    """Return the nodes that the launcher's world needs at least; 0 if unknown. Raises LauncherStays.

    The job has so many elements of `block` nodes each. array: they come one by one; in one allocation `--nnodes 8` only
    repeats sbatch's option, and the job may go on without a lost node.
    """
    (least, most), nodes = launch.nodes, elements * block
    if most <= 1 or (array and most <= block):
        return 0  # each launcher was given the nodes of its own element
    if least == most and most not in (nodes, nodes - spares):
        raise LauncherStays(
            f"{launch.launcher} was told of {plural(most, 'node')}, and the job has {nodes}: "
            f"write --nnodes {nodes}, or leave the option out"
        )
    if least > nodes:
        raise LauncherStays(f"{launch.launcher} needs {least} nodes, and the job has {nodes}: ask Slurm for more")
    least += -least % block if array else 0
    return least if array or least < most else 0


def describe(launch: Launch, ranks: int) -> str:
    """Return the job's log line about a launcher that the agent replaces."""
    line = f"{launch.launcher} is left out: the agent starts {plural(ranks, 'rank')} on each node"
    if launch.replaced:
        line += f"; Unicron has its own way of {', '.join(launch.replaced)}"
    return line + (f"; nobody honours {', '.join(launch.ignored)}" if launch.ignored else "")
