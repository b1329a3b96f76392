"""Reads safetensors: files with a JSON header and the bytes of the tensors. Hugging Face's folders have one or more."""

from __future__ import annotations

import itertools
import math
import re
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats import megatron_arguments
from unicron_transition.snapshot.formats.index import (
    MOST_AXES,
    MOST_ELEMENTS,
    BadCheckpoint,
    Block,
    Index,
    Place,
    Raw,
    Tensor,
    check_name,
    check_shape,
    raw_type,
    some,
)
from unicron_transition.snapshot.model_facts import ModelFacts
from unicron_transition.snapshot.reading import (
    MOST_FILES,
    MOST_NAMES,
    allowance,
    number_in,
    open_plain,
    parse_json,
    read_small,
    text_in,
)

FORMAT = "safetensors"
SUFFIX = ".safetensors"
NAME = "model.safetensors"
PICKLE = "pytorch_model.bin"  # transformers reads it if there are no safetensors
CONFIG = "config.json"
PAIRS = "float4_e2m1fn_x2"  # a dtype of torch that counts two elements as one; files count each of them
FILE_KEY = "transformers_weights"  # in config.json: the file with the weights
OFFSETS = "DCP_SHARDING_INFO"  # in the header of torch DCP's files by rank: the place of each piece in its tensor
ADAPTER = "adapter_"  # the start of the file names of an adapter
NO_MODEL = "{} is an adapter, and no whole model: merge it into its base model first (peft: merge_and_unload)"
VARIANT = re.compile(r"model\.[^.]+?(?:-\d+-of-\d+)?\.safetensors")  # such as model.fp16.safetensors
SHARD = re.compile(r"((?!shard-).*)-(\d+)-of-(\d+)\.safetensors")
RANK = re.compile(r"shard-(\d+)-.*\.safetensors")  # torch DCP's files by rank, numbered from 1
MISTRALS = "consolidated"  # the start of Mistral's own file names, with the same weights as Hugging Face's beside them
MOST = 100_000_000  # bytes of a header: the library's own limit
VALUES = 6  # keys of one tensor in a header, with the entry of torch's DCP
MOST_TEXTS = 10_000  # further keys in a header
Entry = tuple[str, Place, int, int]  # the library's dtype, the shape, the first byte and the end of a tensor
KINDS = {
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


def _choose(folder: Path) -> tuple[list[Path], Collection[str]]:
    """Return the weight files of a folder, a file or an index, as transformers' `from_pretrained` chooses them, and the
    tensors that the index lists. Raises BadCheckpoint."""
    if folder.is_file():
        if folder.suffix == SUFFIX:
            return _whole_models([folder]), ()
        return read_list(folder) if ".safetensors.index." in folder.name and folder.suffix == ".json" else ([], ())
    if not folder.is_dir():
        return [], ()
    if named := _file_of_config(folder / CONFIG):
        return [folder / named], ()
    if (folder / NAME).is_file():
        return [folder / NAME], ()
    if (folder / f"{NAME}.index.json").is_file():
        return read_list(folder / f"{NAME}.index.json")
    if any((folder / name).is_file() for name in (PICKLE, f"{PICKLE}.index.json")):
        return [], ()
    found = sorted(itertools.islice(folder.glob(f"*{SUFFIX}"), MOST_FILES + 1))
    _check_count(folder, len(found))
    return _whole_models([path for path in found if not path.name.startswith(MISTRALS)] or found), ()


def _check_count(where: Path, count: int) -> None:
    if count > MOST_FILES:
        raise BadCheckpoint(f"{where} has more than {MOST_FILES} files of weights, as no model has: it is damaged")


def _whole_models(found: list[Path]) -> list[Path]:
    """Return the files without those of adapters. Raises BadCheckpoint for a part of a model, or several variants."""
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
                raise BadCheckpoint(f"{path.parent / missing} is missing, but the model's other files are there")
    return models


def read_list(index: Path) -> tuple[list[Path], Collection[str]]:
    """Return the files and the tensors that an index of Hugging Face's lists. Raises BadCheckpoint."""
    try:
        listed = parse_json(read_small(index))["weight_map"]
        found = {str(name) for name in listed.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{index}: not as Hugging Face writes it ({str(error)[:100]})") from None
    if any("/" in name for name in found):
        raise BadCheckpoint(f"{index}: names files outside of its folder")
    _check_count(index, len(found))
    return [index.parent / name for name in sorted(found)], listed.keys()


def _file_of_config(config: Path) -> str:
    """Return the file of weights that a model's config.json names, "" for none. Raises BadCheckpoint."""
    try:
        settings = parse_json(read_small(config)) if config.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{config}: not a model's configuration ({str(error)[:100]})") from None
    name = settings.get(FILE_KEY) if isinstance(settings, dict) else None
    return name if isinstance(name, str) and name.endswith(SUFFIX) and "/" not in name else ""


def read(folder: Path) -> Index | None:
    """Return the index of the files in a folder, or of one file; None if there are none. Raises BadCheckpoint,
    OSError."""
    index = Index(FORMAT, 0, "", {})
    pieces: dict[str, list[tuple[Place, Raw]]] = {}
    paths, listed = _choose(folder)
    if not paths:
        return None
    ranks, names, there = 0, _Names(folder), set[str]()
    for path in paths:
        tensors, about, begin = _header(path, names)
        offsets = _offsets(path, about)
        ranks += offsets is not None
        iteration = str(about.get("iteration", ""))
        if iteration.isdecimal():
            index.iteration = int(iteration)
        _check_offsets(path, tensors, path.stat().st_size - begin)
        there.update(name for name in listed if name in tensors)
        for name, (kind, shape, first, last) in tensors.items():
            check_name(name)
            if kind not in KINDS:
                index.common.left.append(f"{name} ({kind}, which is not supported)")
                continue
            raw = _raw(path, name, KINDS[kind], shape, (begin + first, last - first))
            if offsets is not None:
                if len(offset := offsets.get(name, ())) != len(shape):
                    raise BadCheckpoint(f"{path}: it does not say where in {name} its piece is")
                pieces.setdefault(name, []).append((offset, raw))
            elif name in index.tensors:
                raise BadCheckpoint(f"{path}: {name} is in another file too")
            else:
                index.tensors[name] = Tensor(name, raw.shape, raw.dtype, [Block.of((0,) * len(shape), raw.shape, raw)])
    if both := pieces.keys() & index.tensors.keys():
        raise BadCheckpoint(f"{folder}: {min(both)} is in another file too")
    _add(index, pieces)
    if not index.tensors:
        raise BadCheckpoint(f"{folder} has no tensor that is read here: {some(index.common.left) or 'none at all'}")
    adopt_folder(index, folder, NAME, [name for name in listed if name not in there])
    if ranks:
        _check_ranks(folder, ranks, paths, index)
    return index


def adopt_folder(index: Index, folder: Path, name: str, missed: Sequence[str]) -> None:
    """Add the model's config.json from a folder of Hugging Face's, or the folder of a file. name: the file of weights.
    missed: tensors that are listed and in no file. Raises BadCheckpoint, OSError."""
    if all(".lora_" in each for each in index.tensors):
        raise BadCheckpoint(NO_MODEL.format(folder))
    if missed:  # transformers initialises these at random
        at = folder / f"{name}.index.json" if folder.is_dir() else folder
        index.common.doubt = f"{at} names tensors that are in none of its files: {some(missed)}"
    if folder.is_dir() and (folder / f"{ADAPTER}config.json").is_file():
        index.common.left.append(f"an adapter ({ADAPTER}*), which belongs on top of the model")
    config = (folder if folder.is_dir() else folder.parent) / CONFIG
    if config.is_file():
        index.common.facts = facts_of(config)


def _raw(path: Path, name: str, kind: str, shape: Place, place: tuple[int, int]) -> Raw:
    """Return the place of a tensor in a file. place: offset and length in bytes. Raises BadCheckpoint."""
    if kind == PAIRS:
        if not shape or shape[-1] % 2:
            raise BadCheckpoint(f"{path}: {name} has half a byte at the end of a row")
        shape = (*shape[:-1], shape[-1] // 2)
    if math.prod(shape) * raw_type(kind).itemsize != place[1]:
        raise BadCheckpoint(f"{path}: {name} has {place[1]} bytes, which does not fit its shape")
    return Raw(path, place[0], kind, shape)


def _check_offsets(path: Path, tensors: dict[str, Entry], length: int) -> None:
    """Raises BadCheckpoint unless the tensors follow one another up to the end of the file, as the library demands."""
    at = 0
    for first, last in sorted(each[2:] for each in tensors.values()):
        if first != at or last < first:
            raise BadCheckpoint(f"{path}: its tensors overlap, or have bytes between them: it is damaged")
        at = last
    if at > length:
        raise BadCheckpoint(f"{path} is cut off: its tensors end at byte {at} of {length}")
    if at < length:
        raise BadCheckpoint(f"{path}: has {length - at} bytes that are of no tensor: it is damaged")


def _add(index: Index, places: dict[str, list[tuple[Place, Raw]]]) -> None:
    """Add tensors that are in pieces. A tensor ends where its last piece ends. Raises BadCheckpoint."""
    for name, pieces in places.items():
        ends = [[at + extent for at, extent in zip(offset, raw.shape, strict=True)] for offset, raw in pieces]
        if len({len(end) for end in ends}) != 1:
            raise BadCheckpoint(f"{pieces[0][1].path}: the pieces of {name} are of several shapes")
        shape = tuple(map(max, zip(*ends, strict=True)))
        for offset, raw in dict(pieces).items():
            index.add(name, shape, raw.dtype, Block.of(offset, raw.shape, raw))


def _check_ranks(folder: Path, ranks: int, paths: Sequence[Path], index: Index) -> None:
    """Raises BadCheckpoint if files of some ranks are missing. Missing files of the last ranks cannot be noticed."""
    whole = "put the files of all ranks into one folder, or consolidate them (torch: consolidate_safetensors_files)"
    if ranks == 1:
        raise BadCheckpoint(f"{folder} has the file of one rank, and nothing says that there are no others: {whole}")
    numbers = {int(match[1]) for path in paths if (match := RANK.fullmatch(path.name))}
    if missing := next((number for number in range(1, max(numbers, default=0)) if number not in numbers), 0):
        raise BadCheckpoint(f"{folder}: the file of rank {missing - 1} (shard-{missing:05}-*) is not there: {whole}")
    for tensor in index.tensors.values():
        if sum(math.prod(extent) for _, extent in {block.box for block in tensor.blocks}) != math.prod(tensor.shape):
            raise BadCheckpoint(f"{folder}: some ranks' pieces of {tensor.name} are not there: {whole}")
    index.layout = f"{ranks} ranks"
    index.common.doubt = f"these are the files of {ranks} ranks, and nothing in them says whether there were more"


def _offsets(path: Path, about: Mapping[str, str]) -> dict[str, Place] | None:
    """Return the places of a file's pieces in their tensors, None if the file has whole tensors. Raises
    BadCheckpoint."""
    if (text := about.get(OFFSETS)) is None:
        return None
    try:
        found = {name: tuple(each["saved_offsets"]) for name, each in parse_json(text.encode(), 3).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: {OFFSETS} is not as torch writes it ({str(error)[:100]})") from None
    if not all(type(each) is int and each >= 0 for offset in found.values() for each in offset):
        raise BadCheckpoint(f"{path}: {OFFSETS} has offsets that are not whole numbers from 0")
    return found


class _Names:
    """Counts the tensors of a checkpoint while its headers are read. Raises BadCheckpoint if there are too many."""

    def __init__(self, folder: Path):
        self._folder, self._left = folder, MOST_NAMES
        self._shapes: dict[Place, Place] = {}  # each once: many tensors have the same shape

    def entry(self, pairs: list[tuple[str, Any]]) -> Any:
        """Convert the object of a tensor in a header to an Entry, and leave any other object as it is."""
        values = dict(pairs)
        if type(where := values.get("data_offsets")) is not list:  # the header itself can hold a tensor of that name
            return values
        self._left -= 1
        if self._left < 0:
            raise BadCheckpoint(f"{self._folder} has more than {MOST_NAMES} tensors, as no model has: it is damaged")
        kind, shape, (first, last) = values["dtype"], tuple(values["shape"]), where
        if len(shape) > MOST_AXES:
            check_shape(str(self._folder), shape)
        for each in (first, last, *shape):
            if type(each) is not int or not 0 <= each <= MOST_ELEMENTS:
                raise ValueError(str(values)[:200])
        if type(kind) is not str:
            raise ValueError(str(values)[:200])
        return sys.intern(kind), self._shapes.setdefault(shape, shape), first, last


def _header(path: Path, names: _Names) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Return the tensors of a header, its other texts, and the first byte of the data. Raises BadCheckpoint,
    OSError."""
    with open_plain(path) as file:
        front = file.read(8)
        length = struct.unpack("<Q", front)[0] if len(front) == 8 else 0
        if not 2 <= length <= min(MOST, allowance(file)):
            raise BadCheckpoint(f"{path}: not a file of safetensors{text_in(file)}")
        data = file.read(length)
    try:
        if data.count(b":") > VALUES * data.count(b'"data_offsets"') + MOST_TEXTS:
            raise ValueError(f"more than {MOST_TEXTS} texts beside its tensors")
        tensors = parse_json(data, VALUES, names.entry)
        about = tensors.pop("__metadata__", None) or {}
        if not isinstance(about, dict) or not all(type(each) is tuple for each in tensors.values()):
            raise ValueError("not as the library writes it")
    except BadCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: its header is damaged ({str(error)[:100]})") from None
    return tensors, about, 8 + length


def facts_of(config: Path) -> ModelFacts:
    """Return the facts about the model that its config.json gives. Raises BadCheckpoint, OSError."""
    arguments = megatron_arguments.of_config(config)
    try:
        settings = parse_json(read_small(config))
        heads = settings.get("num_attention_heads") or settings.get("n_head")
        if not isinstance(heads, int):
            return ModelFacts(arguments=arguments)
        return ModelFacts(
            arguments=arguments,
            heads=heads,
            groups=number_in(settings, "num_key_value_heads") or heads,
            channels=number_in(settings, "head_dim"),
            vocabulary=number_in(settings, "vocab_size"),
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{config}: not a model's configuration ({error})") from None
