"""Files of safetensors: a header in JSON, and the tensors' bytes behind it. Hugging Face's folders have one or more."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unicron.transition.snapshot.formats import megatron_arguments
from unicron.transition.snapshot.formats.index import BadCheckpoint, Block, Index, Raw, raw_type
from unicron.transition.snapshot.formats.written import Out
from unicron.transition.snapshot.reading import allowance, open_plain, read_small

FORMAT = "safetensors"
SUFFIX = ".safetensors"
NAME = "model.safetensors"
CONFIG = "config.json"
CONSOLIDATED = "consolidated"  # how files begin that Mistral has beside Hugging Face's, with the same weights
MOST = 100_000_000  # bytes of a header, as the library has it
_KINDS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def files(folder: Path) -> list[Path]:
    """The files of a folder, or the one that is named itself. Where the folder's index names them, only these."""
    if folder.is_file():
        return [folder] if folder.suffix == SUFFIX else []
    if not folder.is_dir():
        return []
    listed = folder / f"{NAME}.index.json"
    if listed.is_file():
        try:
            names = sorted({str(name) for name in json.loads(read_small(listed))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadCheckpoint(f"{listed}: not as Hugging Face writes it ({str(error)[:100]})") from None
        if any("/" in name for name in names):
            raise BadCheckpoint(f"{listed}: names files outside of its folder")
        return [folder / name for name in names]
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return [path for path in found if not path.name.startswith(CONSOLIDATED)] or found


def read(folder: Path) -> Index:
    """The index of the files in a folder, or of one file. Raises BadCheckpoint, OSError."""
    index = Index(FORMAT, 0, "", {})
    for path in files(folder):
        told, begin = _header(path)
        size = path.stat().st_size
        _check_offsets(path, told, size - begin)
        for name, tensor in told.items():
            if name == "__metadata__":
                _adopt(index, tensor)
                continue
            kind, shape, (first, last) = _KINDS[tensor["dtype"]], tuple(tensor["shape"]), tensor["data_offsets"]
            if name in index.tensors:
                raise BadCheckpoint(f"{path}: {name} is in another file too")
            if not 0 <= first <= last <= size - begin:
                raise BadCheckpoint(f"{path} is cut off: {name} ends at byte {begin + last}")
            found = Raw(path, begin + first, kind, shape)
            block = Block.of((0,) * len(shape), shape, partial(_same, found))
            index.add(name, shape, kind, block)
            if index.tensors[name].nbytes != last - first:
                raise BadCheckpoint(f"{path}: {name} has {last - first} bytes, which is not its shape")
    config = (folder if folder.is_dir() else folder.parent) / CONFIG
    if config.is_file():
        index.common.facts |= facts_of(config)
        index.common.args |= megatron_arguments.of_config(config)
    return index


def _check_offsets(path: Path, told: dict[str, Any], length: int) -> None:
    """Raises BadCheckpoint where tensors do not stand one behind the other up to the end, as the library wants them."""
    at = 0
    for first, last in sorted(tensor["data_offsets"] for name, tensor in told.items() if name != "__metadata__"):
        if first != at:
            raise BadCheckpoint(f"{path}: its tensors overlap, or have bytes between them: it is damaged")
        at = last
    if at < length:
        raise BadCheckpoint(f"{path}: has {length - at} bytes that are of no tensor: it is damaged")


def _same(raw: Raw) -> Raw:
    return raw


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """(what it says, where the tensors begin)."""
    with open_plain(path) as file:
        front = file.read(8)
        length = struct.unpack("<Q", front)[0] if len(front) == 8 else 0
        if not 2 <= length <= min(MOST, allowance(file)):
            raise BadCheckpoint(f"{path}: not a file of safetensors")
        data = file.read(length)
    try:
        told = json.loads(data)
        for name, tensor in told.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            shape = tensor["shape"]
            if not all(type(each) is int and each >= 0 for each in (begin, end, *shape)):
                raise ValueError(f"{name[:60]}: {str(tensor)[:200]}")
            if tensor["dtype"] not in _KINDS:
                raise BadCheckpoint(f"{path}: tensors of {tensor['dtype']} are not supported: convert them first")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{path}: its header is damaged ({str(error)[:100]})") from None
    return told, 8 + length


def _adopt(index: Index, told: Any) -> None:
    iteration = str(told.get("iteration", "")) if isinstance(told, dict) else ""
    if iteration.isdigit():
        index.iteration = int(iteration)


def facts_of(config: Path) -> dict[str, Any]:
    """What a model's config.json says of it, as `snapshot.contents.facts` does. Raises BadCheckpoint, OSError."""
    try:
        told = json.loads(read_small(config))
        heads = told.get("num_attention_heads") or told.get("n_head")
        if not isinstance(heads, int):
            return {}
        found = {"heads": heads, "groups": told.get("num_key_value_heads") or heads}
        found |= {"channels": told.get("head_dim") or 0, "vocabulary": told.get("vocab_size") or 0}
        return {name: int(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{config}: not a model's configuration ({error})") from None


def write(path: Path, outs: Sequence[Out], about: dict[str, str]) -> None:
    """One file of these tensors, in this order, one tensor in memory at a time. about: texts by name, for the header.
    Raises BadCheckpoint, OSError."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for out in outs:
        if out.dtype not in _NAMES:
            raise BadCheckpoint(f"{out.name}: safetensors has no {out.dtype}")
        end = at + out.nbytes
        told[out.name] = {"dtype": _NAMES[out.dtype], "shape": list(out.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(told, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for piece in _pieces(outs):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(outs: Iterable[Out]) -> Iterable[memoryview]:
    for out in outs:
        for array in out.whole():
            assert array.dtype == raw_type(out.dtype)
            yield memoryview(array.data).cast("B") if array.size else memoryview(b"")
