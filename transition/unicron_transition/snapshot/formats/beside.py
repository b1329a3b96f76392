"""Reads a training's progress from the files that libraries put beside a model's weights, and names files that nothing
here can read: states, and weights in other formats (docs/behaviour/checkpoint-layouts.md)."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats.index import Index
from unicron_transition.snapshot.formats.pickles import Archive, archive, plain
from unicron_transition.snapshot.reading import MOST_ENTRIES, names_in, open_plain, parse_json

TRAINER = "trainer_state.json"  # transformers' Trainer
LIGHTNING = "meta.pt"  # Lightning, beside a model in torch DCP
STEP = "global_step"
COUNTS = ("iter_num", "iteration", STEP, "step")  # counts of iterations in a script's file; the first one counts
OF_FSDP = "pytorch_model_fsdp_"  # the start of the name of the inner folder in which Accelerate saves FSDP's shards
MOST, MOST_STEP = 1 << 20, 10**15  # bytes of the trainer's state that are read: its history has a line for each step
FILES = re.compile(r".+\.(?:pt|pth|bin|pkl)|adapter_model\.safetensors")
TORCH_FILE = (
    "{} is a file of torch.save: name the file itself if it has the model's state under a key; otherwise save that as "
    "model.safetensors, or the states of model and optimizer with torch.distributed.checkpoint.save"
)
FOLDERS = re.compile(r"global_step\d+|pytorch_model(?:_\d+|_fsdp_\d+)?|optimizer(?:_\d+)?|recipe_state")
# Files that are not states: the same weights again, settings of a run, and files that a format's own reader takes.
OTHERS = re.compile(
    r"pytorch_model(?:\.\w+)?(?:-\d+-of-\d+)?\.bin|consolidated\.\d+\.pth|training_args\.bin|common\.pt"
)
OPTIMIZERS = re.compile(r"(?:optimizer|global_step|recipe_state).*|pytorch_model(?:_\d+)?")
SCRIPT = "zero_to_fp32.py"  # DeepSpeed puts it beside its checkpoints: it makes safetensors of them
LATEST = "latest"  # the file with the name of DeepSpeed's newest checkpoint
WEIGHTS, STATES = "_model_states.pt", "_optim_states.pt"  # the ends of DeepSpeed's file names
TAG = re.compile(r"global_step(\d{1,15})")  # the default name of DeepSpeed's checkpoints
MOST_TAG = 200  # bytes of such a name
CUT = "zero_pp_rank_"  # the start of the name of one rank's part: of the weights only from stage 3 on
LINE = re.compile(rb'"global_step"\s?:\s?(\d{1,16})\b')
# Files with weights that cannot be read, and the remedy. They explain a folder without other weights.
WHY_NOT = (
    ("adapter_model.bin", "{} is an adapter, and no whole model: merge it into its base model first (peft)"),
    ("pytorch_model_fsdp*.bin", "{} is a pickle of Accelerate: save it sharded, or as model.safetensors"),
    (
        "pytorch_model*.bin",
        "{} is a variant, or a part of a model whose index is not there: name the variant, or put "
        "pytorch_model.bin.index.json beside the parts",
    ),
    ("*.nemo", "{} is an archive of NeMo: unpack it (tar -xf), and name the folder of weights in it"),
    (
        "model_world_size_*_rank_*.pt",
        "{} is one rank's part, of verl: `python -m verl.model_merger merge` makes a folder of Hugging Face's of them",
    ),
    ("*_model_*.pt", "{} is a file of torch.save: save its weights as model.safetensors"),
    ("*.pth", TORCH_FILE),
    ("*.pt", TORCH_FILE),
)


def hint(folder: Path) -> str:
    """Explain why the files of a folder cannot be read, with the remedy; "" if there is no explanation."""
    names = names_in(folder)
    if _is_deepspeeds(names):
        return f"; {_describe_deepspeeds(folder, names)}"
    known = ((why, found[0]) for pattern, why in WHY_NOT if (found := fnmatch.filter(names, pattern)))
    return next((f"; {why.format(name)}" for why, name in known), "")


def is_unread(names: Sequence[str]) -> bool:
    """Whether a folder with these names has weights that cannot be read here. The last two patterns match any file of
    torch.save, so they prove nothing."""
    return _is_deepspeeds(names) or any(fnmatch.filter(names, pattern) for pattern, _ in WHY_NOT[:-2])


# ------------------------------------------------------------ DeepSpeed
def _is_deepspeeds(names: Sequence[str]) -> bool:
    """Whether a folder with these names is, or has, a checkpoint of DeepSpeed."""
    return SCRIPT in names or any(name.endswith(WEIGHTS) for name in names)


def _describe_deepspeeds(folder: Path, names: Sequence[str]) -> str:
    """Name the command that converts such a folder to safetensors, or the reason why none does."""
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
    """Do the same for one checkpoint. root: the folder of checkpoints, with the script. at: the checkpoint's folder."""
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
    """Return the name of the checkpoint in DeepSpeed's LATEST, "" for none."""
    try:
        with open_plain(folder / LATEST) as file:
            tag = file.read(MOST_TAG).decode(errors="replace").strip()
    except OSError:
        return ""
    return tag if tag.isprintable() and "/" not in tag and tag not in (".", "..") else ""


# ------------------------------------------------------------ progress and states
def adopt(index: Index, at: Path) -> None:
    """Note in `index`, which was read from the folder or file `at`, the states beside its weights, and read its
    iteration from them. Raises OSError."""
    folder = at.parent if at.is_file() or at.name.startswith(OF_FSDP) else at
    if at.is_file() and not (folder / TRAINER).is_file():
        return  # other files in its folder need not belong to it
    names = _states(folder, at.name)
    optimizers = [] if index.has_optimizer() else [name for name in names if OPTIMIZERS.fullmatch(name)]
    state = next((folder / name for name in (TRAINER, LIGHTNING) if (folder / name).is_file()), None)
    if state is not None:
        try:
            index.iteration = trainers_step_in(folder) or 0
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)[:100]
            doubt(index, f"{state} is damaged ({why}): this counts as iteration 0")
    elif optimizers and not index.iteration:
        doubt(index, f"no file in {folder} says after how many iterations it was saved: this counts as iteration 0")
    if names:
        index.common.left.append(f"states beside the weights ({', '.join(names)})")
    if optimizers and not index.common.unread:
        index.common.unread = _why_unread(folder / optimizers[0])


def _why_unread(optimizer: Path) -> str:
    if (optimizer / ".metadata").is_file():
        return f"{optimizer.name} is a checkpoint of torch DCP by itself, which nothing here joins to the weights"
    return f"{optimizer.name} is of a library whose format nothing here reads"


def doubt(index: Index, text: str) -> None:
    """Note a doubt about `index` for people."""
    index.common.doubt = f"{index.common.doubt}; {text}" if index.common.doubt else text


def _states(folder: Path, but: str) -> list[str]:
    """List files and folders with states, those of many ranks as one. but: the name of the weights. Raises OSError."""
    found: dict[str, list[str]] = {}
    with os.scandir(folder) as entries:
        for each in itertools.islice(entries, MOST_ENTRIES):
            known = FOLDERS.fullmatch(each.name) if each.is_dir() else FILES.fullmatch(each.name)
            if known and each.name.isprintable() and each.name != but and not OTHERS.fullmatch(each.name):
                found.setdefault(re.sub(r"_\d+(?=\.|$)", "_*", each.name), []).append(each.name)
    kinds = {name: f"{name} ({len(names)} of them)" if len(names) > 1 else names[0] for name, names in found.items()}
    return sorted(kinds.values())


def lightnings_step(found: Archive) -> int:
    """Return how many iterations Lightning's trainer has done. Raises ValueError if the file lacks the number."""
    return _check_step(plain(found.content.get(STEP), found) if isinstance(found.content, dict) else None)


def count_iterations(found: Archive) -> tuple[int, str]:
    """Return how many iterations a training script has done according to its file, and a doubt about it, or ""."""
    counts = {key: plain(found.content[key], found) for key in COUNTS if key in found.content}
    if not counts:
        return 0, "nothing in it says after how many iterations it was saved: this counts as iteration 0"
    try:
        steps = {key: _check_step(step) for key, step in counts.items()}
    except ValueError:
        text = ", ".join(f"{key} is {repr(step)[:40]}" for key, step in counts.items())
        return 0, f"{text}: this counts as iteration 0"
    first = next(iter(steps.values()))
    if len(set(steps.values())) == 1:
        return first, ""
    return first, ", ".join(f"{key} is {step}" for key, step in steps.items()) + ": the first counts"


def trainers_step_in(folder: Path) -> int | None:
    """Return how many iterations a trainer had done according to the files of a folder, None if it has none. Raises
    OSError, ValueError, KeyError, TypeError, RecursionError."""
    if (state := folder / TRAINER).is_file():
        return _trainers_step(state)
    return lightnings_step(archive(state)) if (state := folder / LIGHTNING).is_file() else None


def _trainers_step(path: Path) -> int:
    with open_plain(path) as file:
        data, size = file.read(MOST), os.fstat(file.fileno()).st_size
        end = os.pread(file.fileno(), 64, max(0, size - 64))
    if size <= MOST:
        return _check_step(parse_json(data, 10)[STEP])
    found = LINE.search(data.partition(b'"log_history"')[0])  # names are sorted, so the long history comes later
    if not found or data.count(b"{", 0, found.start(1)) != 1 or not end.rstrip().endswith(b"}"):
        raise ValueError(f"no {STEP} in its first {MOST} bytes, or cut off")
    return _check_step(int(found[1]))


def _check_step(step: Any) -> int:
    if type(step) is not int or not 0 <= step < MOST_STEP:
        raise ValueError(f"{STEP} is {repr(step)[:40]}")
    return step
