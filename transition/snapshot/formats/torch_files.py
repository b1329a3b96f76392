"""Single files of `torch.save` with the weights of a model: Meta's of llama, and Lightning's. Any other file of that
kind may hold anything, and is refused with a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from unicron.transition.snapshot.formats import beside
from unicron.transition.snapshot.formats.index import RAW, BadCheckpoint, Block, Index, Tensor, check_name, some
from unicron.transition.snapshot.formats.pickles import Archive, TensorReference, archive
from unicron.transition.snapshot.reading import MOST_NAMES

FORMAT = "torch"
FIRST = "consolidated.00.pth"  # of Meta's files
META = re.compile(r"consolidated\.(\d+)\.pth")
LIGHTNING = "pytorch-lightning_version"  # in its files
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
NEMO = ".nemo"
SAVE = "save its weights as model.safetensors (transformers' save_pretrained, or safetensors.torch.save_file)"


def read(path: Path) -> Index | None:
    """The index of a file, or of Meta's in a folder; None for another. Raises BadCheckpoint, OSError."""
    if path.is_dir():
        parts = sorted(each for each in path.glob("consolidated.*.pth") if META.fullmatch(each.name))
        return _of_meta(parts[0]) if parts else None
    if path.suffix == NEMO:
        raise BadCheckpoint(f"{path} is an archive of NeMo: unpack it (tar -xf), and name the folder of weights in it")
    if path.suffix == ".distcp":
        raise BadCheckpoint(f"{path} is one file of a checkpoint: name its folder, {path.parent}")
    if path.suffix not in SUFFIXES or not path.is_file():
        return None
    return _of_meta(path) if META.fullmatch(path.name) else _of_lightning(path)


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


def _of_lightning(path: Path) -> Index:
    found = archive(path)
    content = found.content
    if not isinstance(content, dict) or LIGHTNING not in content or "state_dict" not in content:
        raise BadCheckpoint(f"{path} is a file of torch.save, which may hold anything: {SAVE}")
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
    """Raises BadCheckpoint where there is no tensor."""
    if not isinstance(state, dict) or len(state) > MOST_NAMES:
        raise BadCheckpoint(f"{found.path} has no tensors by name, or more than {MOST_NAMES}")
    for name, each in state.items():
        if not isinstance(name, str) or not isinstance(each, TensorReference):
            index.common.left.append(f"{str(name)[:60]!r}, which is no tensor")
        elif each.storage.dtype not in RAW:
            index.common.left.append(f"{name} ({each.storage.dtype}, which is not supported)")
        else:
            check_name(name)
            raw = found.raw(each)
            index.tensors[name] = Tensor(name, raw.shape, raw.dtype, [Block.of((0,) * len(raw.shape), raw.shape, raw)])
    if not index.tensors:
        raise BadCheckpoint(f"{found.path} has no tensor of a model: {some(index.common.left)}")
