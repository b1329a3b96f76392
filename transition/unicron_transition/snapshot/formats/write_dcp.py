"""Writes checkpoints of `torch.distributed.checkpoint` and Megatron's `torch_dist`.

Their metadata are pickled classes of torch, so this is the only module of the package that needs torch.
"""

from __future__ import annotations

import argparse
import copyreg
import io
import json
import os
import pickle
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from unicron_transition.seams import table, torch_chunks
from unicron_transition.snapshot.formats import dcp, names
from unicron_transition.snapshot.formats.dcp import (
    COMMON,
    CONFIG,
    METADATA,
    OWN_GROUPS,
    OWN_KEY,
    RESHARDABLE,
    TORCH_DIST,
)
from unicron_transition.snapshot.formats.index import LAYERS, MAINS, STATE, Array, BadCheckpoint, Common, Index
from unicron_transition.snapshot.formats.megatron_arguments import arguments, unknown
from unicron_transition.snapshot.formats.tracker import RELEASE, TRACKER
from unicron_transition.snapshot.formats.written import Options, Out, of
from unicron_transition.snapshot.reading import ROOM, PlainValues

DATA = "__0_0.distcp"
FIELDS = 5  # the fields of TensorProperties that every release of torch reads
WITHOUT_TORCH = (
    "torch is needed to write {0}, and {1} has none: run unicronctl in the environment of the job, or "
    "`{1} -m pip install torch`, or write safetensors"
)


class _Pickler(pickle.Pickler):
    """Writes the first five fields of TensorProperties. torch 2.15 can read that too, and its sixth field would make
    the file unreadable for older releases."""

    def __init__(self, file: IO[bytes], properties: type):
        super().__init__(file)
        self._properties = properties

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not self._properties:
            return NotImplemented
        return copyreg.__newobj__, (type(value),), value.__getstate__()[:FIELDS]  # type: ignore[attr-defined, index]


class _Writer:
    """Writes one file of chunks and the metadata that describe it."""

    def __init__(self, folder: Path, what: str):
        try:
            import torch
            from torch.distributed.checkpoint import metadata

            storage = torch_chunks.storage_info()
        except ImportError:
            raise BadCheckpoint(WITHOUT_TORCH.format(what, sys.executable)) from None
        except table.UnsupportedLayout as error:
            raise BadCheckpoint(str(error)) from None
        self._torch, self._types, self._storage = torch, metadata, storage
        self._folder = folder
        self._state: dict[str, Any] = {}  # the metadata of each tensor and object, by name
        self._places: dict[Any, Any] = {}  # torch's MetadataIndex -> the place in the file

    def write(self, outs: Iterable[Out], aliases: Mapping[str, Sequence[str]], objects: Mapping[str, Any]) -> None:
        """Write tensors, one chunk in memory at a time, and objects. aliases: name -> other names for the same."""
        with (self._folder / DATA).open("wb") as file:
            for out in outs:
                self._add(file, out, aliases.get(out.name, ()))
            for name, value in objects.items():
                at = file.tell()
                self._torch.save(value, file)
                where = self._storage(DATA, at, file.tell() - at)
                for each in (name, *aliases.get(name, ())):
                    self._state[each] = self._types.BytesStorageMetadata()
                    self._places[self._types.MetadataIndex(each)] = where
            file.flush()
            os.fsync(file.fileno())
        paths = {name: (name,) for name in self._state}
        metadata = self._types.Metadata(self._state, paths, self._places, self._types.StorageMeta())
        metadata.version = "1.0.0"
        packed = io.BytesIO()
        _Pickler(packed, self._types.TensorProperties).dump(metadata)
        (self._folder / METADATA).write_bytes(packed.getvalue())

    def _add(self, file: IO[bytes], out: Out, aliases: Sequence[str]) -> None:
        types, kind = self._types, getattr(self._torch, out.dtype)
        properties = types.TensorProperties(dtype=kind)
        size = self._torch.Size(out.shape)
        chunks = []
        for offset, extent in out.boxes:
            at = file.tell()
            self._torch.save(self._tensor(out.read(offset, extent), kind), file)
            where = self._storage(DATA, at, file.tell() - at)
            chunks.append(types.ChunkStorageMetadata(self._torch.Size(offset), self._torch.Size(extent)))
            for name in (out.name, *aliases):
                self._places[types.MetadataIndex(name, offset)] = where
        for name in (out.name, *aliases):
            self._state[name] = types.TensorStorageMetadata(properties, size, chunks)

    def _tensor(self, array: Array, kind: Any) -> Any:
        # ascontiguousarray gives a scalar a dimension, and reshape removes it
        found = self._torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        return found if found.dtype == kind else found.view(kind)

    def save(self, value: Any, name: str) -> None:
        packed = io.BytesIO()
        self._torch.save(value, packed)
        (self._folder / name).write_bytes(packed.getvalue())

    def tensor(self, value: Any) -> Any:
        return self._torch.tensor(value)


def write_dcp(folder: Path, index: Index, options: Options) -> None:
    """Write all tensors under their names in the index, and of a plain module's also those under which a script's
    `get_state_dict` has them. Raises BadCheckpoint, OSError."""
    if options.names:
        raise BadCheckpoint("--format dcp renames nothing: leave --names out, or give it to `checkpoint import` first")
    objects, aliases = dict[str, Any](), dict[str, list[str]]()
    if not names.of_megatron(index):
        aliases = _other_names(index)
        objects, of_objects = _objects(index, options)
        aliases |= of_objects
    objects[OWN_KEY] = dcp.saved_part(index)
    _Writer(folder, "dcp").write(map(of, index.tensors.values()), aliases, objects)


def _other_names(index: Index) -> dict[str, list[str]]:
    """Return the other names of tensors in a script: of tied ones, and `optimizer.state.NAME.KEY`."""
    found: dict[str, list[str]] = {}
    for other, name in index.ties.items():
        found.setdefault(name, []).append(other)
    for tensor in index.parameters():
        for key in index.states(tensor.name):
            found[f"{STATE}{key}.{tensor.name}"] = [f"{STATE}{tensor.name}.{key}"]
    return found


def _objects(index: Index, options: Options) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the other state of a script's optimizer by its names, and their other names where the optimizer's state is
    flattened, with the settings of each parameter."""
    found: dict[str, Any] = {}
    for name, others in index.others.items():
        found |= {f"{STATE}{name}.{key}": value for key, value in others.items()}
    groups = [_settings(group) for group in index.common.groups]
    members = index.members if len(index.members) == len(groups) else []
    if len(groups) == 1 and not members:
        members = [[tensor.name for tensor in index.parameters()]]
    if groups and not members:
        options.say(
            "the optimizer's settings are under `unicron` alone: which parameters are in its groups is not known"
        )
    for number, names_of_it in enumerate(members):
        found |= {f"{OWN_GROUPS}{number}.{key}": value for key, value in groups[number].items()}
        found[f"{OWN_GROUPS}{number}.params"] = names_of_it
    count = sum(len(group) * len(its) for group, its in zip(groups, members, strict=False))
    if count * dcp.LEAST > max(ROOM // 2, sum(tensor.nbytes for tensor in index.tensors.values())):
        options.say(
            "the optimizer's settings are not there by parameter: readers take so many for so few bytes for a trap"
        )
        return found, {}
    return found, {
        f"{OWN_GROUPS}{number}.{key}": [f"{OWN_GROUPS}{name}.{key}" for name in its]
        for number, its in enumerate(members)
        for key in groups[number]
    }


def _settings(group: PlainValues) -> PlainValues:
    """Return a group's settings as torch has them, without its parameters."""
    settings = {key: value for key, value in group.items() if key != "params"}
    if isinstance(betas := settings.get("betas"), list):
        settings["betas"] = tuple(betas)
    return settings


# ------------------------------------------------------------ Megatron's
def write_megatrons(folder: Path, index: Index, options: Options) -> None:
    """Write a folder that Megatron-LM can load. Its tensors must have Megatron's names. Raises BadCheckpoint,
    OSError."""
    if not names.of_megatron(index):
        if not options.names and names.choose("", index, to_theirs=False) is None:
            raise BadCheckpoint(
                "torch_dist is for Megatron-LM, and these names are not a Megatron model's: write --format dcp or "
                "safetensors, or give a table of names with --names FILE"
            )
        index = names.rename(index, options.names, index.common.facts)
    elif options.names not in ("", names.MEGATRON):
        raise BadCheckpoint("the names are Megatron's already, as torch_dist has them: leave --names out")
    for line in unknown(index):
        options.say(line)
    # From a release Megatron-LM loads only the model, without any option.
    release = index.iteration == 0 and not index.has_optimizer()
    at = folder / (RELEASE if release else f"iter_{index.iteration:07d}")
    at.mkdir()
    write_torch_dist(at, index)
    (folder / TRACKER).write_text(RELEASE if release else str(index.iteration))


def write_torch_dist(folder: Path, index: Index) -> None:
    """Write the tensors for Megatron 0.16 and later, with or without a distributed optimizer. Raises BadCheckpoint,
    OSError."""
    writer = _Writer(folder, TORCH_DIST)
    outs, aliases = [], {}
    for tensor in index.parameters():
        states = index.states(tensor.name)
        main = next((states[key] for key in MAINS if key in states), None)
        dtype = (index.common.facts.dtype or tensor.dtype) if states else tensor.dtype
        same = main is None and dtype == tensor.dtype
        mains = [f"{STATE}{key}.{tensor.name}" for key in MAINS] if states else []
        outs.append(of(tensor, dtype=dtype))
        if same:
            aliases[tensor.name] = mains
        elif mains:
            outs.append(of(main or tensor, mains[0]))
            aliases[mains[0]] = mains[1:]
        kept = {key: state for key, state in states.items() if key not in (*MAINS, "step")}
        if other := next((key for key, state in kept.items() if state.shape != tensor.shape), ""):
            raise BadCheckpoint(f"no optimizer of Megatron's has {other} for {tensor.name}: write --format dcp")
        outs += [of(state) for state in kept.values()]
    writer.write(outs, aliases, {name: [None] for name in _extra_states(index)})
    writer.save(_common(index, writer), COMMON)
    (folder / CONFIG).write_text(json.dumps({"sharded_backend": TORCH_DIST, "sharded_backend_version": 1}))


def _extra_states(index: Index) -> list[str]:
    """Return the names of the extra states that Megatron's modules ask for. Without fp8 they are empty."""
    found: dict[str, None] = {}
    for tensor in index.parameters():
        module = tensor.name.rpartition(".")[0]
        stacked = tensor.name.startswith(LAYERS) and not re.match(r"decoder\.layers\.\d", tensor.name)
        count = tensor.shape[0] if stacked else 1
        modules = [module, f"{module.rpartition('.')[0]}.core_attention"] if "self_attention" in module else [module]
        for name in modules:
            found |= dict.fromkeys(f"{name}._extra_state/shard_{number}_{count}" for number in range(count))
    return list(found)


def _common(index: Index, writer: _Writer) -> PlainValues:
    common = index.common
    found: PlainValues = {
        "args": argparse.Namespace(**arguments(index)),
        "checkpoint_version": 3.0,
        "iteration": index.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "distrib_optim_sharding_type": RESHARDABLE,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
        OWN_KEY: dcp.saved_part(index),
    }
    if index.has_optimizer():
        found["optimizer"] = _optimizer(common, writer)
    if common.schedule is not None:
        found["opt_param_scheduler"] = common.schedule
    return found


def _optimizer(common: Common, writer: _Writer) -> PlainValues:
    """Return the optimizer's state, in each place where one of Megatron's optimizers looks for it."""
    groups = []
    for group in common.groups:
        groups.append(_settings(group) | ({"step": common.step} if common.step is not None else {}))
    state = {} if common.step is None else {"common_step": writer.tensor(float(common.step))}
    inner: PlainValues = {"state": dict(state), "param_groups": groups}
    found: PlainValues = {
        "optimizer": inner,
        "state": dict(state),
        "param_groups": [dict(group) for group in groups],
        "param_state_sharding_type": RESHARDABLE,
    }
    if common.scales:
        scale = {
            key: writer.tensor(value) if isinstance(value, list) else value for key, value in common.scales[0].items()
        }
        inner["grad_scaler"] = found["grad_scaler"] = scale
    return found
