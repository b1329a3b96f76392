"""Reads files of `torch.save` with a model's weights: Hugging Face's, Meta's llama, Lightning's, and those of scripts
that give the model a usual name. Others are refused with a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats import beside, safetensors
from unicron_transition.snapshot.formats.index import BadCheckpoint, Block, Index, Tensor, check_name, some
from unicron_transition.snapshot.formats.pickles import Archive, TensorReference, archive
from unicron_transition.snapshot.image_format import RAW
from unicron_transition.snapshot.reading import MOST_NAMES

FORMAT = "torch"
FIRST = "consolidated.00.pth"  # the first of Meta's files
META = re.compile(r"consolidated\.(\d+)\.pth")
LIGHTNING = "pytorch-lightning_version"  # a key in Lightning's files
MODEL = safetensors.PICKLE
VARIANT = re.compile(r"pytorch_model(?:\.\w+)?\.bin")
PART = re.compile(r"pytorch_model(?:\.\w+)?-\d+-of-\d+\.bin")
INDEX = re.compile(r"pytorch_model\.bin\.index(?:\.\w+)?\.json")
RANK = re.compile(r"(?<![a-z])rank[-_]?\d", re.IGNORECASE)  # in the name of a file or its folder: one rank's part
MODELS = ("model", "state_dict", "model_state_dict")  # names under which scripts save the model's tensors
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
NEMO = ".nemo"
SAVE = (
    "save its weights as model.safetensors (transformers' save_pretrained, or safetensors.torch.save_file), or the "
    "states of model and optimizer with torch.distributed.checkpoint.save"
)


def read(path: Path) -> Index | None:
    """Return the index of a file, or of the files in a folder; None for other kinds. Raises BadCheckpoint, OSError."""
    if path.is_dir():
        found = next((each for each in (path / MODEL, path / f"{MODEL}.index.json") if each.is_file()), None)
        if found is not None:
            return _of_hugging_face(found, path)
        parts = sorted(each for each in path.glob("consolidated.*.pth") if META.fullmatch(each.name))
        return _of_meta(parts[0]) if parts else None
    if path.suffix == NEMO:
        raise BadCheckpoint(f"{path} is an archive of NeMo: unpack it (tar -xf), and name the folder of weights in it")
    if path.name.startswith(safetensors.ADAPTER) and path.suffix == ".bin":
        raise BadCheckpoint(safetensors.NO_MODEL.format(path))
    if path.suffix == ".distcp" or PART.fullmatch(path.name):
        raise BadCheckpoint(f"{path} is one file of a checkpoint: name its folder, {path.parent}")
    if INDEX.fullmatch(path.name) or VARIANT.fullmatch(path.name):
        return _of_hugging_face(path, path) if path.is_file() else None
    if path.suffix not in SUFFIXES or not path.is_file():
        return None
    return _of_meta(path) if META.fullmatch(path.name) else _of_training(path)


def _of_hugging_face(found: Path, folder: Path) -> Index | None:
    """Read a file of weights, or an index of several (`found`). folder: the file or folder that the user named."""
    paths, listed = safetensors.read_list(found) if found.suffix == ".json" else ([found], ())
    index, there = Index(FORMAT, 0, "", {}), set[str]()
    for path in paths:
        part = archive(path)
        _add(index, part, part.content)
        there.update(part.content)
    if not paths:
        return None
    safetensors.adopt_folder(index, folder, MODEL, [name for name in listed if name not in there])
    return index


def _of_meta(path: Path) -> Index:
    count = sum(1 for each in path.parent.glob("consolidated.*.pth") if META.fullmatch(each.name))
    if count > 1:
        raise BadCheckpoint(
            f"{path.parent} has {count} model-parallel parts of the same tensors (consolidated.*.pth): convert them "
            "first, with `python -m transformers.models.llama.convert_llama_weights_to_hf` of transformers 4.47.1, "
            "whose later packages have it no longer"
        )
    if path.name != FIRST:
        raise BadCheckpoint(
            f"{path} is one of several model-parallel parts of the same tensors, and the others are gone"
        )
    found = archive(path)
    index = Index(FORMAT, 0, "", {})
    _add(index, found, found.content)
    return index


def _of_training(path: Path) -> Index:
    """Read a file of Lightning's, or of a training script."""
    found = archive(path)
    content = found.content if isinstance(found.content, dict) else {}
    if LIGHTNING in content and "state_dict" in content:
        return _of_lightning(path, found)
    models = [key for key in MODELS if _has_tensors(content.get(key))]
    if len(models) != 1:
        raise BadCheckpoint(f"{path} is a file of torch.save, which may hold anything: {SAVE}")
    if "checkpoint_version" in content or RANK.search("/".join(path.parts[-2:])):  # the key is Megatron-LM's
        raise BadCheckpoint(
            f"{path} is the file of one rank, and may have a part of the model: name the folder of all of them, or "
            f"{SAVE}"
        )
    index = Index(FORMAT, 0, "", {})
    _add(index, found, content[models[0]])
    index.iteration, doubt = beside.count_iterations(found)
    if doubt:
        beside.doubt(index, f"{path}: {doubt}")
    known = (*models, *beside.COUNTS)
    others = [repr(str(key)[:60]) for key, each in content.items() if key not in known and each not in (None, {}, [])]
    optimizers = [key for key in others if "optim" in key.lower()]
    if optimizers:
        index.common.unread = f"{some(optimizers)} in {path.name}: numbers, not names, say whose state it is"
    if others := [key for key in others if key not in optimizers]:
        index.common.left.append(f"what is beside the model ({some(others)})")
    return index


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(each, TensorReference) for each in value.values())


def _of_lightning(path: Path, found: Archive) -> Index:
    content = found.content
    index = Index(FORMAT, 0, "", {})
    try:
        index.iteration = beside.lightnings_step(found)
    except ValueError as error:
        beside.doubt(index, f"{path}: {error}: this counts as iteration 0")
    _add(index, found, content["state_dict"])
    if content.get("optimizer_states"):
        index.common.unread = "optimizer_states of Lightning have numbers for parameters, and nothing here reads them"
    states = [key for key in ("lr_schedulers", "loops", "callbacks", "MixedPrecision") if content.get(key)]
    if states:
        index.common.left.append(f"what Lightning calls {', '.join(states)}")
    return index


def _add(index: Index, found: Archive, state: Any) -> None:
    """Add the tensors of a state dict to the index. Raises BadCheckpoint if there is none."""
    if not isinstance(state, dict) or len(state) + len(index.tensors) > MOST_NAMES:
        raise BadCheckpoint(f"{found.path} has no tensors by name, or more than {MOST_NAMES}")
    for name, each in state.items():
        if not isinstance(name, str) or not isinstance(each, TensorReference):
            index.common.left.append(f"{str(name)[:60]!r}, which is no tensor")
        elif name in index.tensors:
            raise BadCheckpoint(f"{found.path}: {name} is in another file too")
        elif each.storage.dtype not in RAW:
            index.common.left.append(f"{name} ({each.storage.dtype}, which is not supported)")
        else:
            check_name(name)
            raw = found.raw(each)
            index.tensors[name] = Tensor(name, raw.shape, raw.dtype, [Block.of((0,) * len(raw.shape), raw.shape, raw)])
    if not index.tensors:
        raise BadCheckpoint(f"{found.path} has no tensor of a model: {some(index.common.left) or 'none at all'}")
