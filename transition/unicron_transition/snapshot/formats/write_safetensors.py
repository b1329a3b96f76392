"""Writes the tensors of a model to one file of safetensors, under Hugging Face's names.

The package `safetensors` needs all tensors of a file in memory at once. This module needs one at a time
(docs/behaviour/checkpoint-files.md).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from unicron_transition.snapshot.formats import names
from unicron_transition.snapshot.formats.index import LAYERS, BadCheckpoint, Index, raw_type
from unicron_transition.snapshot.formats.safetensors import CONFIG, KINDS, NAME, PAIRS
from unicron_transition.snapshot.formats.written import Options, Out, of
from unicron_transition.snapshot.reading import PlainValues

UNLIKE = ("apply_layernorm_1p", "rotary_interleaved")  # options of Megatron that change the meaning of weights
_NAMES = {kind: name for name, kind in KINDS.items()}


def write(folder: Path, index: Index, options: Options) -> None:
    """Write the tensors of the model, and a copy of its config.json. Raises BadCheckpoint, OSError."""
    write_file(folder / NAME, _tensors(index, options), {"iteration": str(index.iteration)})
    if options.config is not None:
        shutil.copyfile(options.config, folder / CONFIG)


def _tensors(index: Index, options: Options) -> list[Out]:
    table = options.names
    unlike = next((option for option in UNLIKE if index.common.facts.arguments.get(option)), "")
    if unlike and table != names.MEGATRON:
        option = f"--{unlike.replace('_', '-')}"
        raise BadCheckpoint(f"no table of names knows {option}: keep Megatron's names with --names {names.MEGATRON}")
    dtypes = {
        tensor.name: options.dtype or (index.common.facts.dtype if index.states(tensor.name) else "")
        for tensor in index.parameters()
    }
    try:
        found = names.outs(index, table, dtypes)
    except BadCheckpoint:
        if table:
            raise
        found = None
        options.say("the names are Megatron's: its heads are not known, give the model's config.json with --config")
    if found is None and any(name.startswith(LAYERS) for name in dtypes) and table != names.MEGATRON:
        options.say("the names are Megatron's: no table of names fits this model, give one with --names")
    return found if found is not None else [of(each, dtype=dtypes[each.name]) for each in index.parameters()]


def write_file(path: Path, outs: Sequence[Out], about: dict[str, str]) -> None:
    """Write these tensors to one file, in this order. about: texts by name, for the header. Raises BadCheckpoint,
    OSError."""
    header: PlainValues = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for out in outs:
        if out.dtype not in _NAMES:
            raise BadCheckpoint(f"{out.name}: safetensors has no {out.dtype}")
        end = at + out.nbytes
        shape = [*out.shape[:-1], 2 * out.shape[-1]] if out.dtype == PAIRS else list(out.shape)
        header[out.name] = {"dtype": _NAMES[out.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    front = json.dumps(header, separators=(",", ":")).encode()
    front += b" " * (-len(front) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(front)) + front)
        for piece in _pieces(outs):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(outs: Iterable[Out]) -> Iterable[memoryview]:
    for out in outs:
        for array in out.whole():
            assert array.dtype == raw_type(out.dtype)
            yield memoryview(array.data).cast("B") if array.size else memoryview(b"")
