"""How many ranks one task of a node stands for, where neither its tasks nor a launcher say so: one for each GPU, if the
script shows that it is one of several processes, and else one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicron_ctl.agent.connections.job_environment import Place

SAID_TASKS = "_UNICRON_SAID_TASKS"  # who said how many tasks to start (slurm_plugin/spank/submit.c)
# A program that is one process of several: it reads its rank, or imports what does so
_SEVERAL = re.compile(
    r"\btorch\.distributed\b|^[ \t]*from[ \t]+torch[ \t]+import\b.*\bdistributed\b"
    r"|\binit_(?:process_group|distributed)\b|\b(?:LOCAL_RANK|RANK|WORLD_SIZE|SLURM_LOCALID)\b|\blocal[-_]rank\b"
    r"|^[ \t]*(?:from|import)[ \t]+(?:accelerate|deepspeed|lightning|megatron|nemo|pytorch_lightning|torchtitan|trl"
    r"|unicron)\b"
    r"|\b\w*Trainer\(",
    re.MULTILINE,
)
# A program that uses all GPUs of its node by itself
_ALONE = re.compile(
    r"\b(?:mp|multiprocessing)\.(?:spawn|Process)\b|\bspawn\(|\bstart_processes\b|\bDataParallel\(|\bdevice_map\b"
    r"|\b(?:notebook|debug)_launcher\b|\btensor_parallel_size\b|^[ \t]*(?:from|import)[ \t]+(?:jax|vllm)\b",
    re.MULTILINE,
)


def why_one_rank(environment: Mapping[str, str], python: bool, text: str) -> str:
    """Why one task is one rank; empty where it stands for a rank for each GPU. text: of its script."""
    if said := environment.get(SAID_TASKS):
        return f"{said} says so"
    if not python:
        return "its command names no Python program that trains"
    if found := _ALONE.search(text):
        return f"its script names {found[0].strip(' (')}, which uses a node's GPUs by itself"
    if _SEVERAL.search(text):
        return ""
    if not text:
        return "its command names no script that can be read here"
    return "its script names neither torch.distributed nor RANK, nor a library that does"


def describe_ranks(place: Place, why_one: str, environment: Mapping[str, str]) -> str:
    """The line that says what one task of a node with several GPUs has become; empty where somebody has said it."""
    gpus, ranks = environment.get("SLURM_GPUS_ON_NODE", ""), place.settings.ranks_per_node
    if not gpus.isdecimal() or int(gpus) < 2 or place.tasks or environment.get("UNICRON_RANKS_PER_NODE"):
        return ""
    if not why_one:
        return f"{ranks} ranks on each node, one for each GPU (`export UNICRON_RANKS_PER_NODE=1` starts one)"
    return (
        f"one rank on each node, for {why_one}; for one on each of its {gpus} GPUs write "
        f"`export UNICRON_RANKS_PER_NODE={gpus}`, or --ntasks-per-node={gpus}"
    )
