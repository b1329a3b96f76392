"""A training that begins from a checkpoint of another format: in any layout, without a conversion on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unicron.transition.iteration.rank_log import inform, warn
from unicron.transition.snapshot import parts
from unicron.transition.snapshot.formats import megatron_arguments, names, opening, own
from unicron.transition.snapshot.formats.index import LAYERS, MAINS, VOCABULARY, BadCheckpoint, Index, Tensor
from unicron.transition.snapshot.migrate import StateMismatch, TrainingState
from unicron.transition.snapshot.model_facts import other_arithmetic, other_heads

PREFIXES = ("", "model.", "module.", "state_dict.")  # what a script may have its module's names begin with
TIED = "share_embeddings_and_output_weights"


@dataclass(frozen=True)
class Wanted:
    """What is taken of it. optimizer: its state and the schedule's progress; iteration: go on with it, not from the
    start; names: the table of names for a checkpoint of Hugging Face's ("" finds it)."""

    optimizer: bool = True
    iteration: bool = True
    names: str = ""

    @property
    def renames(self) -> bool:
        """Whether a table is named, which then has to fit."""
        return self.names not in ("", names.AUTOMATIC, names.MEGATRON)

    @property
    def whole(self) -> bool:
        return self.optimizer and self.iteration


class Foreign:
    """A checkpoint of another format to begin from.

    Raises BadCheckpoint, OSError where it cannot be used.
    """

    def __init__(self, folder: Path, index: Index, wanted: Wanted):
        self.folder, self.index, self.wanted = folder, index, wanted

    @property
    def iteration(self) -> int:
        return self.index.iteration if self.wanted.iteration else 0

    @property
    def samples(self) -> int | None:
        """With how many samples it was trained, where Megatron-LM has written that."""
        found = self.index.common.args.get("consumed_train_samples")
        return found if isinstance(found, int) else None

    def load(self, state: TrainingState) -> None:
        """Put it into `state`. Raises BadCheckpoint, OSError, and parts.Missing for one of another model."""
        index, optimizer = self.index, self.wanted.optimizer
        if why := other_heads(index.common.facts, state.facts):
            raise parts.Missing(why)
        if (
            index.format == own.FORMAT
            and (found := own.newest(self.folder)) is not None
            and (wrong := own.check(found))
        ):
            raise BadCheckpoint(wrong[0])
        mine = {box.name: box.whole for _, boxes, _ in parts.places(state.model) for box in boxes}
        of_megatron, known = bool(state.facts.get("heads")), any(name in index.tensors for name in mine)
        if self.wanted.renames or (of_megatron and not known and index.format != own.FORMAT):
            index = names.renamed(index, self.wanted.names, state.facts)
        index = _unprefixed(index, mine)
        blocks = _Blocks(index, optimizer)
        blocks.check(mine)
        _say_rows(index, mine)
        if of_megatron:
            _say_unproven(self.folder, index, state.facts.get("arguments") or {})
        if any(getattr(getattr(c, "module", c), TIED, False) for c in state.model):
            _check_tied(index)
        parts.restore(state.model, state.optimizer, blocks)
        if not optimizer or not index.has_optimizer():
            why = "it has none" if optimizer else "that is what the options say"
            inform(f"the optimizer begins anew, the parameters are from {self.folder}: {why}")
            return
        _restore_progress(state, index)


def _say_rows(index: Index, mine: Mapping[str, Sequence[int]]) -> None:
    """Rows behind the vocabulary are padding, of which each layout has another number; only people know how many."""
    for name in VOCABULARY:
        there = index.tensors.get(name)
        if name in mine and there is not None and there.shape[:1] != tuple(mine[name][:1]):
            rows, here = there.shape[0], mine[name][0]
            rest = f"the last {rows - here} are left out" if rows > here else f"the last {here - rows} are zeros"
            warn(f"{name} has {rows} rows there and {here} here: {rest}; that is right for padding only")


def _say_unproven(folder: Path, index: Index, mine: Mapping[str, Any]) -> None:
    """What the checkpoint says of its model and no weight shows. mine: Megatron-LM's arguments of the model here."""
    args = index.common.args
    for difference in other_arithmetic(args, mine):
        warn(f"{folder} is of another model: {difference}")
    if args.get("use_rope_scaling") and not mine.get("use_rope_scaling"):
        warn(f"config.json of {folder} scales the rotary embedding: is it scaled here, too? Nothing here says so")
    if others := args.get(megatron_arguments.UNMATCHED):
        warn(f"config.json of {folder} says {others}: does the model here compute so? Nothing here says it")


def _check_tied(index: Index) -> None:
    """Raises parts.Missing where the output layer has weights of its own there, and here those of the embedding."""
    one, other = (index.tensors.get(name) for name in VOCABULARY)
    if one is None or other is None:
        return
    if one.shape != other.shape or one.dtype != other.dtype or not np.array_equal(one.read(), other.read()):
        raise parts.Missing("its output layer is not its embedding, as it is here")


def _restore_progress(state: TrainingState, index: Index) -> None:
    common = index.common
    own_schedule = hasattr(state.scheduler, "num_steps")
    for number, group in enumerate(state.optimizer.param_groups):
        saved = common.groups[min(number, len(common.groups) - 1)] if common.groups else {}
        if not own_schedule:
            group.update({key: value for key, value in saved.items() if key == "lr" and key in group})
        if "step" in group and common.step is not None:
            group["step"] = type(group["step"])(common.step)
    if state.scheduler is not None and common.schedule is not None:
        if own_schedule:
            state.scheduler.num_steps = 0
            state.scheduler.step(increment=int(common.schedule["num_steps"]))
        else:
            state.scheduler.load_state_dict(common.schedule)
    with contextlib.suppress(StateMismatch):  # of another precision: this one's scale begins anew
        state.adopt_scales(common.scales)


def _unprefixed(index: Index, mine: Mapping[str, Any]) -> Index:
    """With the names of this session's plain module, which begin with the number of its chunk."""
    there = {name for name in mine if name.startswith("0.")}
    if len(there) != len(mine):
        return index
    prefix = next(
        (each for each in PREFIXES if all(f"{each}{name.removeprefix('0.')}" in index.tensors for name in mine)), None
    )
    if prefix is None:
        return index
    return names.with_prefix(index, prefix, "0.")


class _Blocks:
    """The blocks of an index, for :func:`parts.restore`."""

    def __init__(self, index: Index, optimizer: bool):
        self._index, self._optimizer = index, optimizer

    def check(self, mine: Mapping[str, Sequence[int]]) -> None:
        """Raises parts.Missing where the checkpoint has tensors of layers that this rank's model does not have: they
        would be left out silently. mine: name -> shape."""
        plain = all(name.startswith("0.") for name in mine)
        for tensor in self._index.parameters():
            if tensor.name in mine:
                continue
            layers = tensor.name.startswith(LAYERS) and not tensor.name.removeprefix(LAYERS)[:1].isdigit()
            if plain or (layers and any(name.startswith(LAYERS) for name in mine)):
                raise parts.Missing(f"it has {tensor.name}, and the model here has not")

    def _tensor(self, name: str, key: str) -> Tensor:
        if name not in self._index.tensors:
            raise parts.Missing(f"{name} is not there")
        if key == parts.PARAMETER:
            return self._index.main(name) if self._optimizer else self._index.tensors[name]
        return self._index.states(name)[key]

    def read(self, box: parts.Box, key: str) -> torch.Tensor:
        tensor = self._tensor(box.name, key)
        rows = tensor.shape[:1] if box.name in VOCABULARY and tensor.shape[1:] == box.whole[1:] else box.whole[:1]
        if tensor.shape != rows + box.whole[1:]:
            raise parts.Missing(f"{box.name} is {list(tensor.shape)} there and {list(box.whole)} here")
        kind = getattr(torch, tensor.dtype)
        if rows == box.whole[:1]:
            return _as_torch(tensor, box.offset, box.extent, kind)
        found = torch.zeros(box.extent, dtype=kind)
        count = max(0, min(box.extent[0], rows[0] - box.offset[0]))
        if count:
            found[:count] = _as_torch(tensor, box.offset, (count, *box.extent[1:]), kind)
        return found

    def state(self, box: parts.Box, owner: Any) -> tuple[Sequence[str], Mapping[str, Any]]:
        if not self._optimizer or owner is None or box.name not in self._index.tensors:
            return (), {}
        keys = [key for key in self._index.states(box.name) if key not in MAINS]
        step = self._index.common.step
        of_torch = type(owner).__module__.startswith("torch.optim")
        counts = keys and of_torch and step is not None and "exp_avg" in keys
        return keys, {"step": torch.tensor(float(step or 0))} if counts else {}


def _as_torch(tensor: Tensor, offset: tuple[int, ...], extent: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    array = tensor.read(offset, extent)
    found = torch.from_numpy(array)
    return found if found.dtype == kind else found.contiguous().view(kind)


def found_in(folder: Path, wanted: Wanted) -> Foreign | None:
    """The checkpoint in `folder`; None where there is none. Raises BadCheckpoint, also for an optimizer's state that is
    there and cannot be read, and OSError."""
    if (index := opening.find(folder)) is None:
        return None
    if wanted.renames and index.format == own.FORMAT:
        raise BadCheckpoint(f"{folder} is Unicron's own, which has the model's names: leave begin_names out")
    if wanted.renames and index.has_optimizer():
        if wanted.optimizer:
            raise BadCheckpoint(f'{folder}: begin_names renames no optimizer\'s state: give begin_with="model" with it')
        index.tensors = {tensor.name: tensor for tensor in index.parameters()}
    if wanted.optimizer and index.common.unread:
        raise BadCheckpoint(
            f'{folder}: {index.common.unread}; or give --no-load-optim (begin_with="model"): the optimizer begins anew'
        )
    return Foreign(folder, index, wanted)
