"""Files of safetensors: a header in JSON, and the tensors' bytes behind it. Hugging Face's folders have one or more."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unicron.transition.snapshot.formats import megatron_arguments
from unicron.transition.snapshot.formats.index import BadCheckpoint, Block, Index, Place, Raw, raw_type, some
from unicron.transition.snapshot.formats.written import Out
from unicron.transition.snapshot.reading import allowance, open_plain, read_small

FORMAT = "safetensors"
SUFFIX = ".safetensors"
NAME = "model.safetensors"
CONFIG = "config.json"
PAIRS = "float4_e2m1fn_x2"  # of torch, which counts two elements as one; files have them one by one
NAMED = "transformers_weights"  # in config.json: the file that has the weights
OFFSETS = "DCP_SHARDING_INFO"  # in the header of files that torch DCP writes by rank: where in the whole each piece is
ADAPTER = "adapter_"  # how the files of an adapter begin
NO_MODEL = "{} is an adapter, and no whole model: merge it into its base model first (peft: merge_and_unload)"
VARIANT = re.compile(r"model\.[^.]+?(?:-\d+-of-\d+)?\.safetensors")  # as of model.fp16.safetensors
SHARD = re.compile(r"((?!shard-).*)-(\d+)-of-(\d+)\.safetensors")
RANK = re.compile(r"shard-(\d+)-.*\.safetensors")  # torch DCP's files by rank, of which the first is 1
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
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": PAIRS,
    "C64": "complex64",
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def files(folder: Path) -> list[Path]:
    """The files with the weights of a folder, of which transformers' `from_pretrained` takes the same; or the file, or
    index of files, that is named itself. Raises BadCheckpoint."""
    if folder.is_file():
        if folder.suffix == SUFFIX:
            return _whole_models([folder])
        return _listed(folder) if ".safetensors.index." in folder.name and folder.suffix == ".json" else []
    if not folder.is_dir():
        return []
    if named := _named(folder / CONFIG):
        return [folder / named]
    if (folder / NAME).is_file():
        return [folder / NAME]
    if (folder / f"{NAME}.index.json").is_file():
        return _listed(folder / f"{NAME}.index.json")
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return _whole_models([path for path in found if not path.name.startswith(CONSOLIDATED)] or found)


def _whole_models(found: list[Path]) -> list[Path]:
    """Some files without those that are of no model. Raises BadCheckpoint where they are a part of one, or several."""
    models = [path for path in found if not path.name.startswith(ADAPTER)]
    if found and not models:
        raise BadCheckpoint(NO_MODEL.format(found[0]))
    if len(models) > 1 and (variants := [path.name for path in models if VARIANT.fullmatch(path.name)]):
        raise BadCheckpoint(
            f"{found[0].parent} has variants of a model ({some(variants)}) and no {NAME}: name the file that you mean, "
            f"or the index of its files ({NAME}.index.VARIANT.json)"
        )
    there = {path.name for path in models}
    for path in models if len(models) > 1 else ():
        if match := SHARD.fullmatch(path.name):
            count, digits = int(match[3]), len(match[2])
            every = [f"{match[1]}-{number:0{digits}}-of-{match[3]}{SUFFIX}" for number in range(1, count + 1)]
            if missing := next((name for name in every if name not in there), ""):
                raise BadCheckpoint(f"{path.parent / missing} is not there, and the others of the model are")
    return models


def _listed(index: Path) -> list[Path]:
    """The files that an index of Hugging Face's names. Raises BadCheckpoint."""
    return [index.parent / name for name in sorted(set(_weight_map(index).values()))]


def _weight_map(index: Path) -> dict[str, str]:
    """In which file an index of Hugging Face's says that each tensor is. Raises BadCheckpoint."""
    try:
        told = {name: str(file) for name, file in json.loads(read_small(index))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{index}: not as Hugging Face writes it ({str(error)[:100]})") from None
    if any("/" in name for name in told.values()):
        raise BadCheckpoint(f"{index}: names files outside of its folder")
    return told


def _missed(folder: Path, paths: Sequence[Path], there: Collection[str]) -> str:
    """A line on the tensors that the index of these files names and that are in none of them; "" for none. transformers
    gives these new random values, and says so. Raises BadCheckpoint."""
    index = folder if folder.suffix == ".json" else folder / f"{NAME}.index.json"
    told = _weight_map(index) if index.is_file() else {}
    if {index.parent / file for file in told.values()} != set(paths):  # the files are others, and it counts for nothing
        return ""
    names = [name for name in told if name not in there]
    return f"{index} names tensors that are in none of its files: {some(names)}" if names else ""


def _named(config: Path) -> str:
    """The file that a model's config.json names for its weights; "" for none. Raises BadCheckpoint."""
    try:
        told = json.loads(read_small(config)) if config.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{config}: not a model's configuration ({str(error)[:100]})") from None
    name = told.get(NAMED) if isinstance(told, dict) else None
    return name if isinstance(name, str) and name.endswith(SUFFIX) and "/" not in name else ""


def read(folder: Path) -> Index:
    """The index of the files in a folder, or of one file. Raises BadCheckpoint, OSError."""
    index = Index(FORMAT, 0, "", {})
    places: dict[str, list[tuple[Place, Raw]]] = {}
    ranks, paths = 0, files(folder)
    there: set[str] = set()
    for path in paths:
        told, begin = _header(path)
        about = told.pop("__metadata__", {})
        offsets = _offsets(path, about)
        ranks += offsets is not None
        _adopt(index, about)
        size = path.stat().st_size
        _check_offsets(path, told, size - begin)
        there.update(told)
        for name, tensor in told.items():
            if tensor["dtype"] not in _KINDS:
                index.common.left.append(f"{name} ({tensor['dtype']}, which is not supported)")
                continue
            kind, shape, (first, last) = _KINDS[tensor["dtype"]], tuple(tensor["shape"]), tensor["data_offsets"]
            if name in places and offsets is None:
                raise BadCheckpoint(f"{path}: {name} is in another file too")
            if not 0 <= first <= last <= size - begin:
                raise BadCheckpoint(f"{path} is cut off: {name} ends at byte {begin + last}")
            if kind == PAIRS:
                if not shape or shape[-1] % 2:
                    raise BadCheckpoint(f"{path}: {name} has half a byte at the end of a row")
                shape = (*shape[:-1], shape[-1] // 2)
            if math.prod(shape) * raw_type(kind).itemsize != last - first:
                raise BadCheckpoint(f"{path}: {name} has {last - first} bytes, which is not its shape")
            offset = (0,) * len(shape) if offsets is None else offsets.get(name, ())
            if len(offset) != len(shape):
                raise BadCheckpoint(f"{path}: it does not say where in {name} its piece is")
            places.setdefault(name, []).append((offset, Raw(path, begin + first, kind, shape)))
    if places and all(".lora_" in name for name in places):
        raise BadCheckpoint(NO_MODEL.format(folder))
    _add(index, places)
    index.common.doubt = _missed(folder, paths, there)
    if ranks:
        _check_ranks(folder, ranks, index)
    if folder.is_dir() and (folder / f"{ADAPTER}config.json").is_file():
        index.common.left.append(f"an adapter ({ADAPTER}*), which belongs on top of the model")
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


def _add(index: Index, places: dict[str, list[tuple[Place, Raw]]]) -> None:
    """A whole tensor ends where the last of its pieces does. Raises BadCheckpoint."""
    for name, pieces in places.items():
        ends = [[at + extent for at, extent in zip(offset, raw.shape, strict=True)] for offset, raw in pieces]
        if len({len(end) for end in ends}) != 1:
            raise BadCheckpoint(f"{pieces[0][1].path}: the pieces of {name} are of several shapes")
        shape = tuple(map(max, zip(*ends, strict=True)))
        for offset, raw in dict(pieces).items():
            index.add(name, shape, raw.dtype, Block.of(offset, raw.shape, partial(_same, raw)))


def _check_ranks(folder: Path, ranks: int, index: Index) -> None:
    """Raises BadCheckpoint for files of ranks that are not all there. Of the last ones nothing says that they were."""
    whole = "put the files of all ranks into one folder, or consolidate them (torch: consolidate_safetensors_files)"
    if ranks == 1:
        raise BadCheckpoint(f"{folder} has the file of one rank, and nothing says that there are no others: {whole}")
    numbers = {int(match[1]) for path in files(folder) if (match := RANK.fullmatch(path.name))}
    if missing := next((number for number in range(1, max(numbers, default=0)) if number not in numbers), 0):
        raise BadCheckpoint(f"{folder}: the file of rank {missing - 1} (shard-{missing:05}-*) is not there: {whole}")
    for tensor in index.tensors.values():
        if sum(math.prod(extent) for _, extent in {block.box for block in tensor.blocks}) != math.prod(tensor.shape):
            raise BadCheckpoint(f"{folder}: some ranks' pieces of {tensor.name} are not there: {whole}")
    index.layout = f"{ranks} ranks"
    index.common.doubt = f"these are the files of {ranks} ranks, and nothing in them says whether there were more"


def _offsets(path: Path, about: Any) -> dict[str, Place] | None:
    """Where in whole tensors those of a file are, None where they are whole. Raises BadCheckpoint."""
    told = about.get(OFFSETS) if isinstance(about, dict) else None
    if told is None:
        return None
    try:
        found = {name: tuple(each["saved_offsets"]) for name, each in json.loads(told).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: {OFFSETS} is not as torch writes it ({str(error)[:100]})") from None
    if not all(type(each) is int and each >= 0 for offset in found.values() for each in offset):
        raise BadCheckpoint(f"{path}: {OFFSETS} names places that are none")
    return found


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
            if not isinstance(tensor["dtype"], str):
                raise ValueError(f"{name[:60]}: {str(tensor)[:200]}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{path}: its header is damaged ({str(error)[:100]})") from None
    return told, 8 + length


def _adopt(index: Index, told: Any) -> None:
    iteration = str(told.get("iteration", "")) if isinstance(told, dict) else ""
    if iteration.isdecimal():
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
        shape = [*out.shape[:-1], 2 * out.shape[-1]] if out.dtype == PAIRS else list(out.shape)
        told[out.name] = {"dtype": _NAMES[out.dtype], "shape": shape, "data_offsets": [at, end]}
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
