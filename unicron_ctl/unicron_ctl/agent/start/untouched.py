"""Tells which commands run as if there were no agent: once for each of Slurm's tasks.

The plugin puts no agent before most of them (slurm_plugin/spank/step.c). The agent sees those before which a user put
it by hand, and those that only their script's text tells apart.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from unicron_ctl.agent.launchers.readers import USES_MPI
from unicron_ctl.agent.start import bare
from unicron_ctl.agent.start.command_mode import Mode
from unicron_ctl.shared.protocol.structs import SESSION
from unicron_detector.processes.job_input import standard_input

if TYPE_CHECKING:
    from unicron_ctl.agent.connections.job_environment import Place
    from unicron_ctl.agent.launchers.readers import Launch

BY_DEFAULT = "UNICRON_BY_DEFAULT"  # the administrator's default=on started the agent, not the user's --unicron
SWEEP = "UNICRON_SWEEP"  # 0: an array is one training all the same; else the name of what shows that it is none
_OPTIONS = ("WEIGHT", "MIN_NODES", "MODE", "SPARES", "PRELOAD")  # of the plugin (slurm_plugin/spank/args.c)
_OF_THE_PLUGIN = ("UNICRON", BY_DEFAULT, *(f"UNICRON_{name}" for name in _OPTIONS))
_MARK = "_UNICRON_OF_JOB_"  # before the name of what the plugin has set (slurm_plugin/spank/inherit.h)
_READS_THE_ELEMENT = re.compile(r"\bSLURM_ARRAY_TASK_ID\b")
# A script that finds its place in the world by srun's variables of its step, as submitit and Lightning do
_READS_THE_STEP = re.compile(r"\bSLURM_(?:PROCID|LOCALID|NODEID|NTASKS\w*|STEP\w*|TASKS_PER_NODE)\b|\bsubmitit\b")


def tasks_per_node(environment: Mapping[str, str]) -> int:
    """Return the most tasks of this step on one node, from Slurm's "2(x3),1"."""
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")
    return max((int(count) for text in counts if (count := text.partition("(")[0]).isdecimal()), default=1)


def why_by_shape(environment: Mapping[str, str], joined: int = 1) -> str:
    """Return why the agent leaves a step of this shape alone; empty if it does not. joined: this node's tasks that the
    plugin has joined under one agent."""
    if (tasks := tasks_per_node(environment)) != joined:
        return (
            f"it has {tasks} tasks on a node, and without the plugin each would have an agent: "
            "give it one (--ntasks-per-node=1)"
        )
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1")
    of_job = environment.get("SLURM_JOB_NUM_NODES") or nodes
    count = int(nodes) if nodes.isdecimal() else 1
    if of_job.isdecimal() and count < int(of_job):
        return f"it has {count} of the job's {of_job} nodes: a training has all of them"
    return ""


def why_sweep(environment: Mapping[str, str], script: str, text: str) -> str:
    """Return why the elements of this array are separate runs; empty if they are one training. script: the name of the
    script with this text. The plugin has read the batch script (slurm_plugin/spank/batch.c)."""
    named_by = environment.get(SWEEP, "")
    if "SLURM_ARRAY_TASK_ID" not in environment or named_by == "0":
        return ""
    if not named_by and not _READS_THE_ELEMENT.search(text):
        return ""
    return (
        f"{named_by or script} names SLURM_ARRAY_TASK_ID, as the runs of a sweep do: submit a sweep without --unicron, "
        f"or export {SWEEP}=0 in the batch script if its array is one training"
    )


def why_alone(environment: Mapping[str, str], launch: Launch) -> str:
    """Return why each element of an array has a launcher's world of its own; empty if they may form one world."""
    if "SLURM_ARRAY_TASK_ID" not in environment or environment.get(SWEEP) == "0":
        return ""
    if environment.get("SLURM_ARRAY_TASK_COUNT") == "1":
        return ""
    if "--standalone" in launch.replaced:
        told = "--standalone"
    elif launch.nodes == (1, 1) and environment.get("SLURM_NNODES", "1") == "1":
        told = "of one node"
    else:
        return ""
    return (
        f"{launch.launcher} is told {told}, so each element of its array is a training of its own: submit it without "
        f"--unicron, or, if they are one, leave that out or export {SWEEP}=0 in the batch script"
    )


def describe_array(environment: Mapping[str, str], elements: int) -> str:
    """Return the log's line that an array is one training; empty for another job."""
    if "SLURM_ARRAY_TASK_ID" not in environment or elements < 2 or environment.get(SWEEP) == "0":
        return ""
    array = f"the {elements} elements of array {environment.get('SLURM_ARRAY_JOB_ID', '')}"
    return f"{array} are one training (if they are separate runs: submit without --unicron)"


def digest(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a digest that tells the commands of an array's elements apart; empty without an array.

    It is two digests joined by a full stop: of the command as it is, and of the command without the element's own
    names. Two commands are the same if one of the two digests is: a number in a path may be the element's job, or part
    of a folder that all share.
    """
    if "SLURM_ARRAY_TASK_ID" not in environment or environment.get(SWEEP) == "0":
        return ""
    return f"{_hash(command)}.{_hash(_without_own_names(word, environment) for word in command)}"


def _hash(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:16]


def _without_own_names(word: str, environment: Mapping[str, str]) -> str:
    """Return a word of an element's command without the names of the element's node and job: a folder on the node's
    disk does not make it another training."""
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        if value := environment.get(name):
            word = word.replace(value, f"${name}")
    if node := environment.get("SLURMD_NODENAME"):
        word = re.sub(_alone(re.escape(node)), "$SLURMD_NODENAME", word)
    jobs = "|".join(environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"))  # one has both alike
    return re.sub(_alone(jobs), "$SLURM_JOB_ID", word) if "/" in word else word


def _alone(pattern: str) -> str:
    """Return the pattern for a whole name or number."""
    return rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])"


def why_by_ranks(place: Place, mode: Mode, environment: Mapping[str, str]) -> str:
    """Return why the ranks of this node would differ from srun's tasks; empty if they would not."""
    if place.tasks and USES_MPI.search(mode.text):
        return "its script uses MPI, whose processes only srun can join: give it one task on a node if it need not"
    theirs = {device for task in place.tasks for device in task.devices}
    if any(not os.access(device, os.R_OK | os.W_OK) for device in theirs):
        gpus = environment.get("SLURM_GPUS_ON_NODE") or str(len(theirs))
        return (
            "each of its tasks may open its own GPUs only, and the node's agent those of the first: "
            f"write --gpus-per-node={gpus} in place of --gpus-per-task or --gpu-bind"
        )
    ranks = place.settings.ranks_per_node
    if ranks > 1 and not place.tasks and environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return (
            f"its {ranks} GPUs are MIG slices, of which a process can use one: set UNICRON_RANKS_PER_NODE=1, or give "
            f"each slice a task (--ntasks-per-node={ranks} --gpus-per-task=1)"
        )
    return ""


def meant(mode: Mode, ranks: int, environment: Mapping[str, str]) -> bool:
    """Say whether this training is to be protected. With default=on nobody has asked for it, so a job array is one
    training only if its script is written for Unicron (else it may be a sweep), and any other program must be the
    job's only rank and must not read the step's variables, which an agent would change."""
    if environment.get(BY_DEFAULT) != "1" or mode.name == SESSION:
        return True
    several_nodes = environment.get("SLURM_STEP_NUM_NODES", "1") != "1"
    if "SLURM_ARRAY_TASK_ID" in environment or ranks > 1 or several_nodes:
        return False
    return not _READS_THE_STEP.search(f"{mode.reason}\n{mode.text}")


def become(command: Sequence[str], environment: Mapping[str, str], why: str = "") -> NoReturn:
    """Become the command. why: printed by the step's first task, if somebody has asked for protection."""
    by_default = environment.get(BY_DEFAULT) == "1"
    if why and not by_default and environment.get("SLURM_PROCID", "0") == "0":
        print(f"unicron: this step runs unprotected: {why}", file=sys.stderr, flush=True)
    plugins = _OF_THE_PLUGIN if by_default else ()
    kept = {name: value for name, value in environment.items() if name.removeprefix(_MARK) not in plugins}
    try:
        standard_input.give_back()
        bare.become(command, kept)
    except OSError as error:
        sys.exit(bare.report_failure(command[0], error))
