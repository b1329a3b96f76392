"""Folders of DeepSpeed's checkpoints. None is read: its own script makes safetensors of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from unicron_transition.snapshot.reading import names_in, open_plain

SCRIPT = "zero_to_fp32.py"
LATEST = "latest"  # the file that names the newest checkpoint
WEIGHTS, STATES = "_model_states.pt", "_optim_states.pt"  # end the names of its files
TAG = re.compile(r"global_step(\d{1,15})")  # the name of a checkpoint unless it is given another one
MOST_TAG = 200  # bytes of such a name
CUT = "zero_pp_rank_"  # begins the file of a rank that has a part only: of the weights from stage 3 on


def is_one(names: Sequence[str]) -> bool:
    """Whether a folder with these names has one of DeepSpeed's checkpoints, or is one."""
    return SCRIPT in names or any(name.endswith(WEIGHTS) for name in names)


def describe(folder: Path, names: Sequence[str]) -> str:
    """Say what such a folder has, and what makes safetensors of it."""
    if any(name.endswith(WEIGHTS) for name in names):
        return _describe_one(folder.parent, folder)
    tags = sorted((int(match[1]), match[0]) for name in names if (match := TAG.fullmatch(name)))
    newest = tags[-1][1] if tags else ""
    if not (tag := _latest(folder) or newest):
        return f"this is of DeepSpeed: `python {SCRIPT} FOLDER OUT --safe_serialization` makes model.safetensors of it"
    if not (folder / tag).is_dir():
        other = f": write {newest} into it" if newest else ""
        return f"{LATEST} of DeepSpeed names {tag}, which is not there{other}"
    return _describe_one(folder, folder / tag)


def _describe_one(root: Path, at: Path) -> str:
    """root: the folder with the script and the name of the newest; at: that of the checkpoint."""
    there = names_in(at)
    weights, states = ([name for name in there if name.endswith(end)] for end in (WEIGHTS, STATES))
    if not weights:
        return f"{at.name} of DeepSpeed has no file of weights (*{WEIGHTS}): its saving was not finished"
    stage = "3" if any(name.startswith(CUT) for name in weights) else "1 or 2" if any(CUT in s for s in states) else ""
    if not stage:
        return (
            f"{weights[0]} is of DeepSpeed, and no state of ZeRO is beside it, so {SCRIPT} makes nothing of it: "
            'save what it calls "module" as model.safetensors'
        )
    script = str(root / SCRIPT) if (root / SCRIPT).is_file() else "-m deepspeed.utils.zero_to_fp32"
    words = [*script.split(" ", script.startswith("-m")), str(root), "OUT", "-t", at.name, "--safe_serialization"]
    return f"this is of DeepSpeed, ZeRO stage {stage}: `python {shlex.join(words)}` makes model.safetensors of it"


def _latest(folder: Path) -> str:
    """The checkpoint that DeepSpeed's file names; "" for none."""
    try:
        with open_plain(folder / LATEST) as file:
            tag = file.read(MOST_TAG).decode(errors="replace").strip()
    except OSError:
        return ""
    return tag if tag.isprintable() and "/" not in tag and tag not in (".", "..") else ""
