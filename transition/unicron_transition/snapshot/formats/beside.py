"""The files that training libraries put beside a model's weights: how far the training is, and states that nothing here
reads. What each of them writes is in docs/behaviour/checkpoint-layouts.md."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats import deepspeed
from unicron_transition.snapshot.formats.index import Index
from unicron_transition.snapshot.formats.pickles import Archive, archive, plain
from unicron_transition.snapshot.reading import MOST_ENTRIES, names_in, open_plain, parse_json

TRAINER = "trainer_state.json"  # of transformers' Trainer
LIGHTNING = "meta.pt"  # of Lightning, beside what torch DCP has of its model
STEP = "global_step"
COUNTS = ("iter_num", "iteration", STEP, "step")  # of iterations, in a file of a training script; the first one counts
OF_FSDP = "pytorch_model_fsdp_"  # begins the folder, in such a folder, in which Accelerate saves what FSDP has cut
MOST, MOST_STEP = 1 << 20, 10**15  # bytes of a state that are read: its history has a line for each step
FILES = re.compile(r".+\.(?:pt|pth|bin|pkl)|adapter_model\.safetensors")
FOLDERS = re.compile(r"global_step\d+|pytorch_model(?:_\d+|_fsdp_\d+)?|optimizer(?:_\d+)?|recipe_state")
# The same weights once more, settings of a run, and what a reader of the format itself takes.
OTHERS = re.compile(
    r"pytorch_model(?:\.\w+)?(?:-\d+-of-\d+)?\.bin|consolidated\.\d+\.pth|training_args\.bin|common\.pt"
)
OPTIMIZERS = re.compile(r"(?:optimizer|global_step|recipe_state).*|pytorch_model(?:_\d+)?")
LINE = re.compile(rb'"global_step"\s?:\s?(\d{1,16})\b')
# Files with weights that are not read, and why: what people meant, where a folder has no others.
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
    ("*.pth", "{} is a file of torch.save: name the file itself, or save its weights as model.safetensors"),
    ("*.pt", "{} is a file of torch.save: name the file itself, or save its weights as model.safetensors"),
)


def hint(folder: Path) -> str:
    """Why the files of a folder are not read, and what to do; "" where none is known."""
    names = names_in(folder)
    if deepspeed.is_one(names):
        return f"; {deepspeed.describe(folder, names)}"
    known = ((why, found[0]) for pattern, why in WHY_NOT if (found := fnmatch.filter(names, pattern)))
    return next((f"; {why.format(name)}" for why, name in known), "")


def is_unread(names: Sequence[str]) -> bool:
    """Whether a folder with these names has weights that nothing here reads. One of any file of torch.save does not
    count."""
    return deepspeed.is_one(names) or any(fnmatch.filter(names, pattern) for pattern, _ in WHY_NOT[:-2])


def adopt(index: Index, at: Path) -> None:
    """Say in `index`, which was read from the folder or file `at`, what is beside its weights, and take its iteration
    from there. Raises OSError."""
    folder = at.parent if at.is_file() or at.name.startswith(OF_FSDP) else at
    if at.is_file() and not (folder / TRAINER).is_file():
        return  # nothing says that other files there have to do with it
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
    """Say in `index` what its files do not say."""
    index.common.doubt = f"{index.common.doubt}; {text}" if index.common.doubt else text


def _states(folder: Path, but: str) -> list[str]:
    """Files and folders with states, those of many ranks as one. but: the name of what is read. Raises OSError."""
    found: dict[str, list[str]] = {}
    with os.scandir(folder) as entries:
        for each in itertools.islice(entries, MOST_ENTRIES):
            known = FOLDERS.fullmatch(each.name) if each.is_dir() else FILES.fullmatch(each.name)
            if known and each.name.isprintable() and each.name != but and not OTHERS.fullmatch(each.name):
                found.setdefault(re.sub(r"_\d+(?=\.|$)", "_*", each.name), []).append(each.name)
    kinds = {name: f"{name} ({len(names)} of them)" if len(names) > 1 else names[0] for name, names in found.items()}
    return sorted(kinds.values())


def lightnings_step(found: Archive) -> int:
    """Return how many iterations Lightning's trainer has done. Raises ValueError where its file does not say it."""
    return _check_step(plain(found.content.get(STEP), found) if isinstance(found.content, dict) else None)


def count_iterations(found: Archive) -> tuple[int, str]:
    """(how many iterations a training script has done by its file, what is not sure about that)."""
    told = {key: plain(found.content[key], found) for key in COUNTS if key in found.content}
    if not told:
        return 0, "nothing in it says after how many iterations it was saved: this counts as iteration 0"
    try:
        steps = {key: _check_step(step) for key, step in told.items()}
    except ValueError:
        said = ", ".join(f"{key} is {repr(step)[:40]}" for key, step in told.items())
        return 0, f"{said}: this counts as iteration 0"
    first = next(iter(steps.values()))
    if len(set(steps.values())) == 1:
        return first, ""
    return first, ", ".join(f"{key} is {step}" for key, step in steps.items()) + ": the first counts"


def trainers_step_in(folder: Path) -> int | None:
    """Return how many iterations a trainer had done by the files of a folder; None where it has none that tells it.
    Raises OSError, and as damaged files have it."""
    if (state := folder / TRAINER).is_file():
        return _trainers_step(state)
    return lightnings_step(archive(state)) if (state := folder / LIGHTNING).is_file() else None


def _trainers_step(path: Path) -> int:
    """Return how many iterations transformers' Trainer has done. Raises ValueError, KeyError, TypeError for a damaged
    file, OSError."""
    with open_plain(path) as file:
        data, size = file.read(MOST), os.fstat(file.fileno()).st_size
        end = os.pread(file.fileno(), 64, max(0, size - 64))
    if size <= MOST:
        return _check_step(parse_json(data, 10)[STEP])
    found = LINE.search(
        data.partition(b'"log_history"')[0]
    )  # its names are sorted, so the long history comes behind it
    if not found or data.count(b"{", 0, found.start(1)) != 1 or not end.rstrip().endswith(b"}"):
        raise ValueError(f"no {STEP} in its first {MOST} bytes, or cut off")
    return _check_step(int(found[1]))


def _check_step(step: Any) -> int:
    if type(step) is not int or not 0 <= step < MOST_STEP:
        raise ValueError(f"{STEP} is {repr(step)[:40]}")
    return step
