"""Reads checkpoints of `torch.distributed.checkpoint`, and Megatron's `torch_dist`, which has two more files.

The metadata, a pickle, name the chunks of each tensor and the file of each chunk, which is an archive of torch.save.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from unicron_transition.snapshot.formats import buckets
from unicron_transition.snapshot.formats.index import (
    STATE,
    BadCheckpoint,
    Block,
    Common,
    Index,
    Place,
    Raw,
    Tensor,
    check_name,
    check_shape,
    group_steps,
    some,
)
from unicron_transition.snapshot.formats.pickles import TensorReference, archive, plain, unpickle
from unicron_transition.snapshot.image_format import RAW
from unicron_transition.snapshot.model_facts import ModelFacts
from unicron_transition.snapshot.reading import (
    ROOM,
    PlainValues,
    count_written,
    number_in,
    parse_json,
    read_small,
    values_in,
)

DCP, TORCH_DIST = "dcp", "torch_dist"
SUFFIX = ".distcp"  # of the files with the tensors
METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
COMMON_OBJECT = "common_state/shard_0_1"  # Megatron 0.19 and later have it in place of that file
# Part of the optimizer's common state -> the object that has it if the optimizer is saved in the order of its buckets.
FIRST_RANKS = {key: f"{buckets.PREFIX}dp_group_idx_0.{key}/shard_0_1" for key in ("optimizer", "grad_scaler")}
RESHARDABLE = "fully_reshardable"
FREE = 1 << 20  # bytes of metadata that are read regardless of the other files
LEAST, MOST_TIMES = 4096, 8  # the least bytes that an archive counts for; how often the bytes of a file can be named
OPTIMIZER_ROOTS = ("optim", "optimizer")  # names under which scripts save their optimizer's state
ITERATIONS = ("iteration", "step")  # names under which scripts save their progress
PROGRESS = "train_state"  # the name under which torchtitan does so, with other counts
GROUPS = re.compile(r"(?:(.*?)\.)?param_groups\.(?:(.*)\.)?")  # an optimizer's root, then a parameter or number
SCHEDULES = ("lr_scheduler", "scheduler")  # names under which scripts save their learning-rate schedule
OWN_GROUPS = "optimizer.param_groups."  # prefix of an optimizer's settings in an export of Unicron's
OWN_KEY = "unicron"  # the object with the part of Unicron's own checkpoint for which the format has no place
SAVED_FIELDS = ("groups", "step", "schedule", "scales", "seed", "loss", "facts")  # the fields of `Common` in it


class FilePart(NamedTuple):
    """The place of a chunk or an object in a file."""

    path: Path
    offset: int
    length: int


Objects = dict[str, FilePart]  # the objects of a checkpoint that are not tensors, by name


def is_one(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def read(folder: Path) -> Index | None:
    """Return the index of the checkpoint in a folder, None if there is none. Raises BadCheckpoint, OSError."""
    if not is_one(folder):
        return None
    _check_size(folder)
    metadata = unpickle(read_small(folder / METADATA), folder / METADATA)
    try:
        index = Index(DCP, 0, "", {})
        objects = _add_tensors(index, folder, metadata)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{folder / METADATA}: not of a release of torch that is known ({error})") from None
    if (folder / CONFIG).is_file() or (folder / COMMON).is_file() or COMMON_OBJECT in objects:
        _add_megatrons(index, folder, objects)
    else:
        _add_objects(index, objects)
        if not any(True for _ in index.parameters()):
            raise BadCheckpoint(f"{folder} has no tensor of a model: {some(list(objects)) or index.common.unread}")
    return index


def _check_size(folder: Path) -> None:
    """Raises BadCheckpoint for metadata that are larger than anything they could describe. A chunk takes some hundred
    bytes there, and over a thousand in its file. The check comes first because reading takes a second for each MB."""
    left = (folder / METADATA).stat().st_size - FREE
    with os.scandir(folder) as entries:
        for each in entries:
            if left <= 0:
                return
            if each.name != METADATA and each.is_file():
                left -= min(each.stat().st_size, count_written(folder / each.name))
    if left > 0:
        raise BadCheckpoint(f"{folder / METADATA} is larger than all that it describes: it is damaged, or a trap")


def _add_tensors(index: Index, folder: Path, metadata: Any) -> Objects:
    """Add the tensors to the index, and return the other objects."""
    stored: dict[tuple[str, Place | None], FilePart] = {}
    paths: dict[str, Path] = {}  # each once: there are many chunks
    for key, value in metadata.storage_data.items():
        if getattr(value, "transform_descriptors", None):
            raise BadCheckpoint(f"{folder}: its files are compressed: save it without an extension")
        offset, file = getattr(key, "offset", None), _file_name(folder, value.relative_path)
        place = None if offset is None else _place(offset)
        path = paths.setdefault(file, folder / file)
        stored[_text(key.fqn), place] = FilePart(path, int(value.offset), int(value.length))
    _check_lengths(stored.values())
    objects: Objects = {}
    for name, described in metadata.state_dict_metadata.items():
        _text(name)
        if not hasattr(described, "chunks"):
            if (name, None) in stored:
                objects[name] = stored[name, None]
            continue
        kind, shape = _dtype(described.properties), _place(described.size)
        if kind not in RAW:
            index.common.left.append(f"{name} ({kind}, which is not supported)")
            continue
        if not described.chunks:
            raise BadCheckpoint(f"{folder}: its metadata know no part of {name}")
        for chunk in described.chunks:
            offset, extent = _place(chunk.offsets), _place(chunk.sizes)
            at = stored.get((name, offset)) or stored.get((name, None))
            if at is None:
                raise BadCheckpoint(f"{folder}: its metadata do not say where {name} is")
            index.add(name, shape, kind, Block.of(offset, extent, partial(_chunk, at, name)))
    return objects


def _text(value: Any) -> str:
    """Return a text of the metadata. Raises BadCheckpoint for any other value."""
    if not isinstance(value, str):
        raise BadCheckpoint(f"its metadata have {type(value).__name__} for a name: it is damaged")
    check_name(value)
    return value


def _place(numbers: Any) -> Place:
    """Return a shape or place of the metadata. Raises BadCheckpoint for any other value."""
    found = tuple(numbers)
    check_shape("its metadata", found)
    return found


def _check_lengths(stored: Iterable[FilePart]) -> None:
    """Raises BadCheckpoint for a file that is shorter than its chunks, or has far more of them than bytes, OSError for
    a missing file."""
    ends: dict[Path, int] = {}
    sums: dict[Path, int] = {}
    for path, offset, length in stored:
        ends[path] = max(ends.get(path, 0), offset + length)
        sums[path] = sums.get(path, 0) + max(length, LEAST)
    for path, end in ends.items():
        size = path.stat().st_size
        if size < end:
            raise BadCheckpoint(f"{path} is cut off: it ends before byte {end}")
        if sums[path] > ROOM + MOST_TIMES * size:
            raise BadCheckpoint(f"{path}: the metadata name the same bytes many times: it is damaged")


def _dtype(properties: Any) -> str:
    dtype = getattr(properties, "dtype", None) or (properties.state[0] if properties.state else None)
    return _text(dtype)


def _file_name(folder: Path, value: Any) -> str:
    """Return the name of a chunk's file. Raises BadCheckpoint for one outside of the folder."""
    name = _text(value)
    if not name or "/" in name or name.startswith(".."):
        raise BadCheckpoint(f"{folder}: its metadata name the file {name!r}, outside of the folder")
    return name


def _chunk(at: FilePart, name: str) -> Raw:
    found = archive(*at)
    if not isinstance(found.content, TensorReference):
        raise BadCheckpoint(f"{found.path}: {name} is no tensor there")
    return found.raw(found.content)


def _object(at: FilePart) -> Any:
    """Read an object as plain values."""
    found = archive(*at)
    return plain(found.content, found)


def _add_objects(index: Index, objects: Objects) -> None:
    """Add the iteration and the optimizer's state of a plain script's checkpoint, under the names of the index."""
    _strip_root(index, objects)
    saved = _object(objects.pop(OWN_KEY)) if OWN_KEY in objects else None
    if isinstance(saved, dict):  # it has the optimizer's settings, which are there for each parameter too
        for name in [name for name in objects if name.startswith(OWN_GROUPS)]:
            del objects[name]
    _adopt_iteration(index, objects)
    several = _adopt_roots(index, objects)
    _adopt_torchs_optimizer(index, objects)
    if several:
        index.without_optimizer(f"there are several ({some(several)}), and a session has one")
    index.common.schedule = _schedule(objects)
    index.common.left += dict.fromkeys(name.partition(".")[0] for name in objects)
    if isinstance(saved, dict):
        adopt_saved(index, saved)


def _adopt_iteration(index: Index, objects: Objects) -> None:
    """Find the script's progress: a whole number, or a tensor with one beside the model's tensors."""
    beside = {name.partition(".")[0] for name in index.tensors} <= {"model", PROGRESS, *OPTIMIZER_ROOTS, *ITERATIONS}
    for name in (f"{PROGRESS}.step", *ITERATIONS):
        tensor = index.tensors.get(name)
        if tensor is not None and (tensor.shape or "int" not in tensor.dtype or ("." not in name and not beside)):
            continue
        value = _value(tensor, objects.get(name))
        if type(value) is not int or value < 0:
            continue
        index.iteration = value
        index.tensors.pop(name, None)
        objects.pop(name, None)
        if rest := [name for name in index.tensors if name.startswith(f"{PROGRESS}.")]:
            index.common.left.append(PROGRESS)
            for each in rest:
                del index.tensors[each]
        return


def _adopt_roots(index: Index, objects: Objects) -> list[str]:
    """Move the state of an optimizer under another root, or none, to one of OPTIMIZER_ROOTS. If there are several
    optimizers, take all of them out of the index and return their roots."""
    roots = _optimizers(objects, [*index.tensors, *objects])
    if len(roots) == 1 and set(roots) <= set(OPTIMIZER_ROOTS):
        return []
    fresh = f"{OPTIMIZER_ROOTS[1]}." if len(roots) == 1 else ""
    for root, parameters in roots.items():
        head = f"{root}." if root else ""
        for values in (index.tensors, objects):
            for name in [name for name in values if name.startswith((f"{head}state.", f"{head}param_groups."))]:
                short = name.removeprefix(head)
                owner = short.partition(".")[2].rpartition(".")[0]
                if not root and short.startswith("state.") and owner not in parameters and owner not in index.tensors:
                    continue  # the model has a module of that name
                value: Any = values.pop(name)
                if fresh:
                    renamed: Any = replace(value, name=fresh + short) if isinstance(value, Tensor) else value
                    values[fresh + short] = renamed
    return [root or "at the top" for root in roots] if len(roots) > 1 else []


def _optimizers(objects: Objects, names: Iterable[str]) -> dict[str, set[str]]:
    """Map the root of each optimizer's state to the names or numbers of the parameters in its groups."""
    found: dict[str, set[str]] = {}
    for match in filter(None, map(GROUPS.match, names)):
        found.setdefault(match[1] or "", set()).add(match[2] or "")
    if "" in found:  # not flat: the parameters of a group are a list
        lists = [each for name, each in objects.items() if name.startswith("param_groups.") and ".params" in name]
        for value in map(_object, lists):
            found[""].update(map(str, value if type(value) is list else [value]))
    return found


def _schedule(objects: Objects) -> PlainValues | None:
    """Take the state of a torch schedule out of the objects; None if there is none, or it is nested."""
    for root in SCHEDULES:
        mine = {name.removeprefix(f"{root}."): each for name, each in objects.items() if name.startswith(f"{root}.")}
        if "last_epoch" in mine and not any("." in key for key in mine):
            for key in mine:
                del objects[f"{root}.{key}"]
            return {key: _object(each) for key, each in mine.items()}
    return None


def _strip_root(index: Index, objects: Objects) -> None:
    """Remove a root that all names share, as of a script that saves {"app": its state}."""
    roots = {name.partition(".")[0] for name in index.tensors}
    root = f"{next(iter(roots), '')}."
    parts = {name.removeprefix(root).partition(".")[0] for name in index.tensors}
    if len(roots) == 1 and "model" in parts and parts <= {"model", *OPTIMIZER_ROOTS}:
        short = {name.removeprefix(root): tensor for name, tensor in index.tensors.items()}
        index.tensors = {name: replace(tensor, name=name) for name, tensor in short.items()}
        for name in [name for name in objects if name.startswith(root)]:
            objects[name.removeprefix(root)] = objects.pop(name)


def _adopt_torchs_optimizer(index: Index, objects: Objects) -> None:
    """Give the optimizer's state the names of this index. `torch.distributed.checkpoint.state_dict.get_state_dict` has
    ROOT.state.NAME.KEY and ROOT.param_groups.NUMBER.KEY. State with other names is left out, with a reason."""
    of_model = {name for name in index.tensors if name.partition(".")[0] not in OPTIMIZER_ROOTS}
    heads = dict.fromkeys(["model.", "", *(f"{name.partition('.')[0]}." for name in of_model)])
    groups: dict[str, PlainValues] = {}
    unknown = ""
    for name in [*index.tensors, *objects]:
        root, _, rest = name.partition(".")
        if root not in OPTIMIZER_ROOTS or (name.startswith(STATE) and name.split(".", 3)[-1] in of_model):
            continue
        kind, _, path = rest.partition(".")
        parameter, _, key = path.rpartition(".")
        tensor = index.tensors.pop(name, None)
        value = _value(tensor, objects.pop(name, None))
        owner = next((head + parameter for head in heads if head + parameter in of_model), None)
        if kind == "param_groups":
            groups.setdefault(parameter, {})[key] = value
        elif kind != "state" or owner is None or not (tensor or isinstance(value, int | float)):
            unknown = unknown or name
        else:
            _keep_state(index, owner, key, tensor, value)
    index.common.groups = _join_groups(groups)
    if unknown:
        number = unknown.split(".")[2:3]
        names = "numbers" if number and number[0].isdecimal() else "names that are not known"
        index.without_optimizer(
            f"an optimizer's state with {names} ({unknown}): "
            "save it as get_state_dict of torch.distributed.checkpoint.state_dict gives it"
        )


def _keep_state(index: Index, owner: str, key: str, tensor: Tensor | None, value: Any) -> None:
    if key == "step":
        index.common.step = max(index.common.step or 0.0, float(value or 0))
    if tensor is None:
        index.others.setdefault(owner, {})[key] = value
    else:
        name = f"{STATE}{key}.{owner}"
        index.tensors[name] = replace(tensor, name=name)


def _value(tensor: Tensor | None, at: FilePart | None) -> Any:
    if tensor is None:
        return _object(at) if at is not None else None
    return None if tensor.shape else tensor.read().item()


def _join_groups(groups: dict[str, PlainValues]) -> list[PlainValues]:
    """Return the settings of an optimizer's groups. Flattened state has them for each parameter, equal in a group."""
    found: list[PlainValues] = []
    for name, group in groups.items():
        settings = {key: value for key, value in group.items() if key != "params"}
        if name.isdecimal() or settings not in found:
            found.append(settings)
    return found


def saved_part(index: Index) -> PlainValues:
    """Return the part of a checkpoint that an export saves under OWN_KEY."""
    common = {name: getattr(index.common, name) for name in SAVED_FIELDS}
    whole = {"iteration": index.iteration, "layout": index.layout, "others": index.others}
    return whole | common | {"facts": vars(index.common.facts)}


def adopt_saved(index: Index, saved: Mapping[str, Any]) -> None:
    """Add this part of an exported checkpoint to the index."""
    common = index.common
    index.iteration, index.layout = int(saved.get("iteration", index.iteration)), str(saved.get("layout", ""))
    common.groups = [dict(group) for group in saved.get("groups") or []]
    common.step, common.schedule = saved.get("step"), saved.get("schedule")
    common.scales = [dict(each) for each in saved.get("scales") or []]
    common.seed, common.loss = int(saved.get("seed", 0)), saved.get("loss")
    facts = ModelFacts.of(saved.get("facts") or {})
    common.facts = replace(facts, arguments=common.facts.arguments or facts.arguments)
    index.others = {name: dict(each) for name, each in (saved.get("others") or {}).items()}


def _add_megatrons(index: Index, folder: Path, objects: Objects) -> None:
    """Add the state that Megatron keeps beside the tensors."""
    index.format = TORCH_DIST
    if (folder / CONFIG).is_file():
        try:
            backend = parse_json(read_small(folder / CONFIG))["sharded_backend"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadCheckpoint(f"{folder / CONFIG}: not as Megatron writes it ({error!r})") from None
        if backend != TORCH_DIST:
            raise BadCheckpoint(f"{folder}: its tensors are {backend!r}: convert it to torch_dist with Megatron-LM")
    # A distributed optimizer in the order of its buckets is not by parameter: it is unpacked at the end.
    by_buckets = [index.tensors.pop(name) for name in list(index.tensors) if name.startswith(buckets.PREFIX)]
    if (folder / COMMON).is_file():
        found = archive(folder / COMMON)
        state = plain(found.content, found)
    elif COMMON_OBJECT in objects:
        state = _object(objects[COMMON_OBJECT])[0]
    else:
        raise BadCheckpoint(f"{folder / COMMON} is not there: the checkpoint is half-written, take one before it")
    if not isinstance(state, dict):
        raise BadCheckpoint(f"{folder}: what Megatron keeps beside the tensors is no dictionary")
    if by_buckets:  # each rank has saved the rest of the optimizer's state, and it is the same in all
        state["optimizer"] = {key: _object(objects[name])[0] for key, name in FIRST_RANKS.items() if name in objects}
    index.common = common_of(state)
    index.iteration = int(state.get("iteration") or state.get("global_step") or 0)  # the latter is NeMo's
    if index.iteration < 0:
        raise BadCheckpoint(f"{folder}: {index.iteration} is no iteration")
    index.layout = layout_of(index.common.facts.arguments)
    if isinstance(state.get(OWN_KEY), dict):
        adopt_saved(index, state[OWN_KEY])
    if by_buckets:
        try:
            buckets.unpack(index, by_buckets, number_in(index.common.facts.arguments, "tensor_model_parallel_size"))
        except BadCheckpoint as error:
            index.without_optimizer(str(error))


def layout_of(args: PlainValues) -> str:
    """Return the layout in Megatron-LM's arguments, as people write it."""
    names = {"TP": "tensor_model_parallel_size", "CP": "context_parallel_size", "PP": "pipeline_model_parallel_size"}
    sizes = {word: args.get(name) for word, name in names.items()}
    words = [f"{word}{size}" for word, size in sizes.items() if isinstance(size, int) and size > 1]
    return " ".join(words) or ("TP1" if args else "")


def common_of(state: PlainValues) -> Common:
    """Read Megatron's state dict. Each of its optimizers has another form of state there."""
    optimizer = values_in(state, "optimizer")
    inner = values_in(optimizer, "optimizer") or optimizer
    groups = inner.get("param_groups") or []
    if not isinstance(groups, list):
        raise TypeError("the groups of its optimizer's parameters are no list")
    groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    steps = group_steps(groups)
    schedules = state.get("opt_param_scheduler"), state.get("lr_scheduler")
    moments, args, scale = inner.get("state"), state.get("args"), optimizer.get("grad_scaler")
    if isinstance(moments, dict) and isinstance(moments.get("common_step"), int | float):
        steps.append(moments["common_step"])
    args = args if isinstance(args, dict) else {}
    return Common(
        groups=groups,
        step=float(max(steps)) if steps else None,
        schedule=next((each for each in schedules if isinstance(each, dict) and each), None),
        scales=[scale] if isinstance(scale, dict) else [],
        facts=facts_of(args),
    )


def facts_of(args: PlainValues) -> ModelFacts:
    """Return the facts about the model that Megatron-LM's arguments give."""
    heads = args.get("num_attention_heads")
    if not isinstance(heads, int):
        return ModelFacts(arguments=args)
    return ModelFacts(
        arguments=args,
        heads=heads,
        groups=(number_in(args, "num_query_groups") if args.get("group_query_attention") else 0) or heads,
        channels=number_in(args, "kv_channels"),
        gated=bool(args.get("swiglu")),
    )
