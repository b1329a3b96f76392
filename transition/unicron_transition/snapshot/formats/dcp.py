"""Checkpoints of `torch.distributed.checkpoint`, and Megatron's `torch_dist`, which is that with two more files: the
metadata, a pickle, says of which chunks each tensor is made, and in which file each chunk is, an archive of torch's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats import buckets
from unicron_transition.snapshot.formats.index import (
    RAW,
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
    some,
)
from unicron_transition.snapshot.formats.pickles import Archive, TensorReference, archive, plain, unpickle
from unicron_transition.snapshot.reading import ROOM, count_written, parse_json, read_small

DCP, TORCH_DIST = "dcp", "torch_dist"
SUFFIX = ".distcp"  # of the files with the tensors
METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
COMMON_OBJECT = "common_state/shard_0_1"  # in place of that file, from Megatron 0.19 on
# of a distributed optimizer in the order of its buckets: what Megatron has in its common part -> its name
FIRST_RANKS = {key: f"{buckets.PREFIX}dp_group_idx_0.{key}/shard_0_1" for key in ("optimizer", "grad_scaler")}
RESHARDABLE = "fully_reshardable"
FREE = 1 << 20  # bytes of metadata that are read whatever the other files have
LEAST, MOST_TIMES = 4096, 8  # bytes that an archive counts for; how often what is in a file may be named
OPTIMIZER_ROOTS = ("optim", "optimizer")  # under which scripts save their optimizer's state
ITERATIONS = ("iteration", "step")  # names under which scripts save how far they are
PROGRESS = "train_state"  # under which torchtitan does, with other counts
GROUPS = re.compile(r"(?:(.*?)\.)?param_groups\.(?:(.*)\.)?")  # of an optimizer: its root, and a parameter or number
SCHEDULES = ("lr_scheduler", "scheduler")  # and the state of their learning rate's schedule
OWN_KEY = "unicron"  # beside Megatron's: what Unicron's own checkpoint says and Megatron's does not


def is_one(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def read(folder: Path) -> Index:
    """The index of the checkpoint in a folder. Raises BadCheckpoint, OSError."""
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
    """Raises BadCheckpoint for metadata that are larger than all that they could describe: each part takes some hundred
    bytes there, and above a thousand in its file. It is seen before they are read, which takes a second for each MB."""
    left = (folder / METADATA).stat().st_size - FREE
    with os.scandir(folder) as entries:
        for each in entries:
            if left <= 0:
                return
            if each.name != METADATA and each.is_file():
                left -= min(each.stat().st_size, count_written(folder / each.name))
    if left > 0:
        raise BadCheckpoint(f"{folder / METADATA} is larger than all that it describes: it is damaged, or a trap")


def _add_tensors(index: Index, folder: Path, metadata: Any) -> dict[str, Any]:
    """The tensors go into the index; what is none is returned, by name: where it lies."""
    where: dict[tuple[str, Any], Any] = {}
    for key, value in metadata.storage_data.items():
        if getattr(value, "transform_descriptors", None):
            raise BadCheckpoint(f"{folder}: its files are compressed: save it without an extension")
        offset = getattr(key, "offset", None)
        where[_word(key.fqn), None if offset is None else _place(offset)] = value
    _check_lengths(folder, where.values())
    objects = {}
    for name, told in metadata.state_dict_metadata.items():
        _word(name)
        if not hasattr(told, "chunks"):
            objects[name] = where.get((name, None))
            continue
        kind, shape = _dtype(told.properties), _place(told.size)
        if kind not in RAW:
            index.common.left.append(f"{name} ({kind}, which is not supported)")
            continue
        if not told.chunks:
            raise BadCheckpoint(f"{folder}: its metadata know no part of {name}")
        for chunk in told.chunks:
            offset, extent = _place(chunk.offsets), _place(chunk.sizes)
            at = where.get((name, offset)) or where.get((name, None))
            if at is None:
                raise BadCheckpoint(f"{folder}: its metadata do not say where {name} is")
            index.add(name, shape, kind, Block.of(offset, extent, partial(_chunk, folder, at, name)))
    return {name: (folder, at) for name, at in objects.items() if at is not None}


def _word(value: Any) -> str:
    """A text of the metadata, where anything may stand. Raises BadCheckpoint for anything else."""
    if not isinstance(value, str):
        raise BadCheckpoint(f"its metadata have {type(value).__name__} for a name: it is damaged")
    check_name(value)
    return value


def _place(numbers: Any) -> Place:
    """A shape or place of the metadata. Raises BadCheckpoint for anything else."""
    found = tuple(numbers)
    check_shape("its metadata", found)
    return found


def _check_lengths(folder: Path, where: Iterable[Any]) -> None:
    """Raises BadCheckpoint for a file that ends before what is in it, or is named for far more, OSError for one that is
    not there."""
    ends: dict[Path, int] = {}
    sums: dict[Path, int] = {}
    for at in where:
        path = _file(folder, at)
        ends[path] = max(ends.get(path, 0), int(at.offset) + int(at.length))
        sums[path] = sums.get(path, 0) + max(int(at.length), LEAST)
    for path, end in ends.items():
        size = path.stat().st_size
        if size < end:
            raise BadCheckpoint(f"{path} is cut off: it ends before byte {end}")
        if sums[path] > ROOM + MOST_TIMES * size:
            raise BadCheckpoint(f"{path}: the metadata name the same bytes many times: it is damaged")


def _dtype(properties: Any) -> str:
    dtype = getattr(properties, "dtype", None) or (properties.state[0] if properties.state else None)
    return _word(dtype)


def _file(folder: Path, at: Any) -> Path:
    """The file of a chunk; nothing outside of the folder. Raises BadCheckpoint."""
    name = _word(at.relative_path)
    if not name or "/" in name or name.startswith(".."):
        raise BadCheckpoint(f"{folder}: its metadata name the file {name!r}, outside of the folder")
    return folder / name


def _chunk(folder: Path, at: Any, name: str) -> Raw:
    found = _archive(folder, at)
    if not isinstance(found.content, TensorReference):
        raise BadCheckpoint(f"{found.path}: {name} is no tensor there")
    return found.raw(found.content)


def _archive(folder: Path, at: Any) -> Archive:
    return archive(_file(folder, at), int(at.offset), int(at.length))


def _object(where: Any) -> Any:
    """An object that is no tensor, as plain values; None where it cannot be read."""
    folder, at = where
    found = _archive(folder, at)
    return plain(found.content, found)


def _add_objects(index: Index, objects: dict[str, Any]) -> None:
    """Add what a plain script's checkpoint may say of the iteration, and its optimizer's state, under this index's
    names."""
    _strip_root(index, objects)
    told = _object(objects.pop(OWN_KEY)) if OWN_KEY in objects else None
    _adopt_iteration(index, objects)
    several = _adopt_roots(index, objects)
    _adopt_torchs_optimizer(index, objects)
    if several:
        index.without_optimizer(f"there are several ({some(several)}), and a session has one")
    index.common.schedule = _schedule(objects)
    index.common.left += dict.fromkeys(name.partition(".")[0] for name in objects)
    if isinstance(told, dict):
        adopt_told(index, told)


def _adopt_iteration(index: Index, objects: dict[str, Any]) -> None:
    """Find how far the script was: a whole number, or a tensor of one beside the model's."""
    beside = {name.partition(".")[0] for name in index.tensors} <= {"model", PROGRESS, *OPTIMIZER_ROOTS, *ITERATIONS}
    for name in (f"{PROGRESS}.step", *ITERATIONS):
        tensor = index.tensors.get(name)
        if tensor is not None and (tensor.shape or "int" not in tensor.dtype or ("." not in name and not beside)):
            continue
        value = _value(tensor, objects.get(name)) if tensor is not None or name in objects else None
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


def _adopt_roots(index: Index, objects: dict[str, Any]) -> list[str]:
    """Give an optimizer's state that lies elsewhere, at the top for one, the root under which it is looked for. Where
    there are several, take all out of the index and return their roots."""
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
                    continue  # of a model's module of that name
                value: Any = values.pop(name)
                if fresh:
                    short = fresh + short
                    values[short] = replace(value, name=short) if isinstance(value, Tensor) else value
    return [root or "at the top" for root in roots] if len(roots) > 1 else []


def _optimizers(objects: dict[str, Any], names: Iterable[str]) -> dict[str, set[str]]:
    """Return the root of each optimizer's state, with the names or numbers of the parameters in its groups."""
    found: dict[str, set[str]] = {}
    for match in filter(None, map(GROUPS.match, names)):
        found.setdefault(match[1] or "", set()).add(match[2] or "")
    if "" in found:  # not flat: the parameters of a group are a list
        lists = [each for name, each in objects.items() if name.startswith("param_groups.") and ".params" in name]
        for value in (_object(each) for each in lists if each is not None):
            found[""].update(map(str, value if type(value) is list else [value]))
    return found


def _schedule(objects: dict[str, Any]) -> dict[str, Any] | None:
    """The state of a schedule of torch's, whose objects are taken; None where there is none that is plain."""
    for root in SCHEDULES:
        mine = {name.removeprefix(f"{root}."): each for name, each in objects.items() if name.startswith(f"{root}.")}
        if "last_epoch" in mine and not any("." in key for key in mine):
            for key in mine:
                del objects[f"{root}.{key}"]
            return {key: _object(each) for key, each in mine.items()}
    return None


def _strip_root(index: Index, objects: dict[str, Any]) -> None:
    """Without the one name over all, as a script has it that saves {"app": its state}."""
    roots = {name.partition(".")[0] for name in index.tensors}
    root = f"{next(iter(roots), '')}."
    parts = {name.removeprefix(root).partition(".")[0] for name in index.tensors}
    if len(roots) == 1 and "model" in parts and parts <= {"model", *OPTIMIZER_ROOTS}:
        short = {name.removeprefix(root): tensor for name, tensor in index.tensors.items()}
        index.tensors = {name: replace(tensor, name=name) for name, tensor in short.items()}
        for name in [name for name in objects if name.startswith(root)]:
            objects[name.removeprefix(root)] = objects.pop(name)


def _adopt_torchs_optimizer(index: Index, objects: dict[str, Any]) -> None:
    """Give the optimizer's state the names of this index. `torch.distributed.checkpoint.state_dict.get_state_dict` has
    ROOT.state.NAME.KEY and ROOT.param_groups.NUMBER.KEY; state with other names is left out, and this is said."""
    of_model = {name for name in index.tensors if name.partition(".")[0] not in OPTIMIZER_ROOTS}
    heads = dict.fromkeys(["model.", "", *(f"{name.partition('.')[0]}." for name in of_model)])
    groups: dict[str, dict[str, Any]] = {}
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


def _value(tensor: Tensor | None, where: Any) -> Any:
    if tensor is None:
        return _object(where)
    return None if tensor.shape else tensor.read().item()


def _join_groups(groups: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups. Flattened they have the names of parameters in place of numbers, and those
    of one group are equal."""
    found: list[dict[str, Any]] = []
    for name, group in groups.items():
        settings = {key: value for key, value in group.items() if key != "params"}
        if name.isdecimal() or settings not in found:
            found.append(settings)
    return found


def adopt_told(index: Index, told: dict[str, Any]) -> None:
    """Add what a checkpoint that Unicron has exported says besides its tensors."""
    common = index.common
    index.iteration, index.layout = int(told.get("iteration", index.iteration)), str(told.get("layout", ""))
    common.groups = [dict(group) for group in told.get("groups") or []]
    common.step, common.schedule = told.get("step"), told.get("schedule")
    common.scales = [dict(each) for each in told.get("scales") or []]
    common.seed, common.loss = int(told.get("seed", 0)), told.get("loss")
    common.facts = dict(told.get("facts") or {})
    common.args = common.args or dict(told.get("args") or {})
    index.others = {name: dict(each) for name, each in (told.get("others") or {}).items()}


def _add_megatrons(index: Index, folder: Path, objects: dict[str, Any]) -> None:
    """Add what Megatron keeps beside the tensors."""
    index.format = TORCH_DIST
    if (folder / CONFIG).is_file():
        try:
            backend = parse_json(read_small(folder / CONFIG))["sharded_backend"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadCheckpoint(f"{folder / CONFIG}: not as Megatron writes it ({error!r})") from None
        if backend != TORCH_DIST:
            raise BadCheckpoint(f"{folder}: its tensors are {backend!r}: convert it to torch_dist with Megatron-LM")
    told: dict[str, Any] = {}
    by_buckets = _take_buckets(index)
    if (folder / COMMON).is_file():
        found = archive(folder / COMMON)
        told = plain(found.content, found)
    elif COMMON_OBJECT in objects:
        told = _object(objects[COMMON_OBJECT])[0]
    else:
        raise BadCheckpoint(f"{folder / COMMON} is not there: the checkpoint is half-written, take one before it")
    if not isinstance(told, dict):
        raise BadCheckpoint(f"{folder}: what Megatron keeps beside the tensors is no dictionary")
    if by_buckets:  # then the rest of the optimizer is each rank's own, the same in all
        told["optimizer"] = {key: _object(objects[name])[0] for key, name in FIRST_RANKS.items() if name in objects}
    index.common = common_of(told)
    index.iteration = int(told.get("iteration") or told.get("global_step") or 0)  # the latter is NeMo's
    if index.iteration < 0:
        raise BadCheckpoint(f"{folder}: {index.iteration} is no iteration")
    index.layout = layout_of(index.common.args)
    if isinstance(told.get(OWN_KEY), dict):
        adopt_told(index, told[OWN_KEY])
    if by_buckets:
        try:
            buckets.unpack(index, by_buckets, int(index.common.args.get("tensor_model_parallel_size") or 0))
        except BadCheckpoint as error:
            index.without_optimizer(str(error))


def _take_buckets(index: Index) -> list[Tensor]:
    """The tensors of a distributed optimizer in the order of its buckets, which are in the index no longer."""
    return [index.tensors.pop(name) for name in list(index.tensors) if name.startswith(buckets.PREFIX)]


def layout_of(args: dict[str, Any]) -> str:
    """The layout in Megatron-LM's arguments, as people write it."""
    names = {"TP": "tensor_model_parallel_size", "CP": "context_parallel_size", "PP": "pipeline_model_parallel_size"}
    sizes = {word: args.get(name) for word, name in names.items()}
    told = [f"{word}{size}" for word, size in sizes.items() if isinstance(size, int) and size > 1]
    return " ".join(told) or ("TP1" if args else "")


def common_of(told: dict[str, Any]) -> Common:
    """From Megatron's own state dict. Its optimizer's part looks different for each of its optimizers."""
    optimizer = told.get("optimizer") or {}
    inner = optimizer.get("optimizer") or optimizer
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.get("param_groups") or []]
    steps = [group["step"] for group in groups if isinstance(group.get("step"), int | float)]
    state = inner.get("state")
    if isinstance(state, dict) and isinstance(state.get("common_step"), int | float):
        steps.append(state["common_step"])
    args = told.get("args") if isinstance(told.get("args"), dict) else {}
    scale = optimizer.get("grad_scaler")
    return Common(
        groups=groups,
        step=float(max(steps)) if steps else None,
        schedule=told.get("opt_param_scheduler") or told.get("lr_scheduler"),
        scales=[scale] if isinstance(scale, dict) else [],
        facts=facts_of(args or {}),
        args=args or {},
    )


def facts_of(args: dict[str, Any]) -> dict[str, Any]:
    """Return what Megatron-LM's arguments say of the model, as `model_facts` does."""
    heads = args.get("num_attention_heads")
    if not isinstance(heads, int):
        return {}
    groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
    return {
        "heads": heads,
        "groups": groups or heads,
        "channels": args.get("kv_channels") or 0,
        "gated": bool(args.get("swiglu")),
    }
