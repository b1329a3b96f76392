"""What follows from a launcher's options for the job: ranks on a node, fewest nodes, a line in the log. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from unicron_ctl.agent.launchers.commands import NotTaken
from unicron_ctl.agent.launchers.readers import Taken
from unicron_detector.words import counted


def count_ranks(taken: Taken, environment: Mapping[str, str], nodes: int, cpus: int, devices: int) -> int:
    """The ranks of a node. nodes: of the job; cpus, devices: of this node. Raises NotTaken."""
    text = taken.ranks
    if not text and taken.total:
        per_node, left = divmod(taken.total, max(1, nodes))
        if left:
            raise NotTaken(f"{taken.launcher} starts {taken.total} processes, which {nodes} nodes cannot share evenly")
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
        raise NotTaken(f"{taken.launcher} starts a process for each GPU, and this node has none: write their number")
    raise NotTaken(f"{taken.launcher} starts {text!r} processes a node: write a number, gpu, cpu or auto")


def fewest_nodes(taken: Taken, elements: int, block: int, spares: int, array: bool) -> int:
    """The nodes that the launcher's world needs at least, 0 where it does not say. The job has so many elements of
    `block` nodes each. array: they come one by one; in one allocation `--nnodes 8` only repeats what sbatch was told,
    and the job may go on without a lost node. Raises NotTaken."""
    (least, most), nodes = taken.nodes, elements * block
    if most <= 1 or (array and most <= block):
        return 0  # the launchers of each node, or element, were told of it alone
    if least == most and most not in (nodes, nodes - spares):
        raise NotTaken(
            f"{taken.launcher} was told of {counted(most, 'node')}, and the job has {nodes}: "
            f"write --nnodes {nodes}, or leave the option out"
        )
    if least > nodes:
        raise NotTaken(f"{taken.launcher} needs {least} nodes, and the job has {nodes}: ask Slurm for more")
    least += -least % block if array else 0
    return least if array or least < most else 0


def describe(taken: Taken, ranks: int) -> str:
    """The line in the job's log that says what was taken over."""
    told = f"{taken.launcher} is left out: the agent starts {counted(ranks, 'rank')} on each node"
    if taken.replaced:
        told += f"; Unicron has its own way of {', '.join(taken.replaced)}"
    if taken.lost:
        told += f"; nobody honours {', '.join(taken.lost)}"
    return told
