"""Begins a training from a checkpoint of another format, in any layout, without converting it on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.snapshot import parts
from unicron_transition.snapshot.formats import megatron_arguments, names, opening, own
from unicron_transition.snapshot.formats.index import LAYERS, MAINS, VOCABULARY, BadCheckpoint, Index, Tensor, some
from unicron_transition.snapshot.formats.written import pieces_of
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.model_facts import other_arithmetic, other_heads

TIED = "share_embeddings_and_output_weights"


@dataclass(frozen=True)
class Selection:
    """The parts of the checkpoint to begin with."""

    optimizer: bool = True
    """Its optimizer's state and the progress of its schedule."""
    iteration: bool = True
    """Its iteration, instead of 0."""
    names: str = ""
    """The table of names (`names.choose`)."""

    @property
    def renames(self) -> bool:
        """Whether a table is named. Then it must fit."""
        return self.names not in ("", names.AUTOMATIC, names.MEGATRON)

    @property
    def whole(self) -> bool:
        return self.optimizer and self.iteration


class Foreign:
    """A checkpoint of another format to begin from."""

    def __init__(self, folder: Path, index: Index, wanted: Selection):
        self.folder, self.index, self.wanted = folder, index, wanted

    @property
    def iteration(self) -> int:
        return self.index.iteration if self.wanted.iteration else 0

    @property
    def samples(self) -> int | None:
        """The number of samples it was trained with, if Megatron-LM wrote that."""
        found = self.index.common.facts.arguments.get("consumed_train_samples")
        return found if isinstance(found, int) else None

    def load(self, state: TrainingState) -> None:
        """Put it into `state`. Raises BadCheckpoint, OSError, and parts.Missing if it is of another model."""
        index, optimizer = self.index, self.wanted.optimizer
        if why := other_heads(index.common.facts, state.facts):
            raise parts.Missing(why)
        found = own.newest(self.folder) if index.format == own.FORMAT else None
        if found is not None and (wrong := own.check(found)):
            raise BadCheckpoint(wrong[0])
        mine = {box.name: box.whole for _, boxes, _ in parts.places(state.model) for box in boxes}
        of_megatron, known = bool(state.facts.heads), any(name in index.tensors for name in mine)
        if self.wanted.renames or (of_megatron and not known and index.format != own.FORMAT):
            index = names.rename(index, self.wanted.names, state.facts)
        index = _of_plain(index, state.model)
        blocks = _Blocks(index, optimizer)
        blocks.check(mine)
        _say_rows(index, mine)
        for line in index.common.losses():
            inform(line)
        if of_megatron:
            _say_unproven(self.folder, index, state.facts.arguments)
        if any(getattr(getattr(c, "module", c), TIED, False) for c in state.model):
            _check_tied(index)
        parts.restore(state.model, state.optimizer, blocks)
        if not optimizer or not index.has_optimizer():
            why = "it has none" if optimizer else "that is what the options say"
            inform(f"the optimizer begins anew, the parameters are from {self.folder}: {why}")
            return
        _restore_progress(state, index)


def _say_rows(index: Index, mine: Mapping[str, Sequence[int]]) -> None:
    """Warn of another number of rows than here. The rows after the vocabulary are padding, which depends on the layout,
    but the size of the vocabulary is not in the checkpoint."""
    for name in VOCABULARY:
        there = index.tensors.get(name)
        if name in mine and there is not None and there.shape[:1] != tuple(mine[name][:1]):
            rows, here = there.shape[0], mine[name][0]
            rest = f"the last {rows - here} are left out" if rows > here else f"the last {here - rows} are zeros"
            warn(f"{name} has {rows} rows there and {here} here: {rest}; that is right for padding only")


def _say_unproven(folder: Path, index: Index, mine: Mapping[str, object]) -> None:
    """Warn of differences between the models that no weight shows. mine: Megatron-LM's arguments for the model here."""
    args = index.common.facts.arguments
    for difference in other_arithmetic(args, mine):
        warn(f"{folder} is of another model: {difference}")
    if args.get("use_rope_scaling") and not mine.get("use_rope_scaling"):
        warn(f"config.json of {folder} scales the rotary embedding: is it scaled here, too? Nothing here says so")
    if others := args.get(megatron_arguments.NO_COUNTERPART):
        warn(f"config.json of {folder} says {others}: does the model here compute so? Nothing here says it")


def _check_tied(index: Index) -> None:
    """Raises parts.Missing if the output layer is tied to the embedding here, and has other weights there."""
    one, other = (index.tensors.get(name) for name in VOCABULARY)
    if one is not None and other is not None and not _equal(one, other):
        raise parts.Missing("its output layer is not its embedding, as it is here")


def _restore_progress(state: TrainingState, index: Index) -> None:
    common = index.common
    counted = {} if common.step is None else {"step": common.step}
    state.adopt_progress([group | counted for group in common.groups or [{}]], common.schedule, common.scales)


def _of_plain(index: Index, model: Sequence[Any]) -> Index:
    """Return the index under the names of this session's plain module. Raises parts.Missing for another model."""
    mine = parts.plain_names(model)
    if not mine:
        return index
    there = {tensor.name: bool(index.states(tensor.name)) for tensor in index.parameters()}
    found = names.match(there, mine)
    if found is None:
        lacks = next((name for name in mine.values() if name.partition(".")[2] not in there), "")
        raise parts.Missing(f"{lacks.partition('.')[2]} is not there")
    check_match(found, lambda one, other: _equal(index.tensors[one], index.tensors[other]))
    if found.beside:
        inform(f"left out, since the model here has not got it: {some(found.beside)}")
    return names.select(index, found.chosen)


def check_match(match: names.Match, is_same: Callable[[str, str], bool]) -> None:
    """Raises parts.Missing if the checkpoint has more than the model here, or two different tensors in place of a tied
    one. is_same: compares two of its tensors by their names."""
    if match.left:
        raise parts.Missing(f"it has {match.left[0]}, and the model here has not")
    for one, other in match.twins:
        if not is_same(one, other):
            raise parts.Missing(f"{one} and {other} are one tensor here and two there")


def _equal(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    every = pieces_of(((0,) * len(one.shape), one.shape))
    return all(one.read(*part).tobytes() == other.read(*part).tobytes() for part in every)


class _Blocks:
    """The blocks of an index (:class:`parts.Blocks`)."""

    def __init__(self, index: Index, optimizer: bool):
        self._index, self._optimizer = index, optimizer

    def check(self, mine: Mapping[str, Sequence[int]]) -> None:
        """Raises parts.Missing if the checkpoint has tensors of layers that this rank's model does not have, which
        would be left out silently. mine: name -> shape."""
        for tensor in self._index.parameters():
            if tensor.name in mine:
                continue
            layers = tensor.name.startswith(LAYERS) and not tensor.name.removeprefix(LAYERS)[:1].isdecimal()
            if layers and any(name.startswith(LAYERS) for name in mine):
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

    def lend(self, box: parts.Box, key: str, room: parts.Room) -> torch.Tensor | None:
        return None

    def fill(self) -> None:
        pass

    def state(self, box: parts.Box, owner: Any) -> tuple[Sequence[str], Mapping[str, object]]:
        if not self._optimizer or owner is None or box.name not in self._index.tensors:
            return (), {}
        found = {key: tensor for key, tensor in self._index.states(box.name).items() if key not in MAINS}
        whole = self._index.tensors[box.name].shape
        keys = [key for key, tensor in found.items() if tensor.shape == whole and whole]
        others = dict(self._index.others.get(box.name, {}))
        for key in found.keys() - set(keys):
            others[key] = _as_torch(found[key], (), found[key].shape, getattr(torch, found[key].dtype))
        step = self._index.common.step
        of_torch = type(owner).__module__.startswith("torch.optim")  # other optimizers count the steps of a group
        if of_torch and "step" not in others and step is not None and "exp_avg" in keys:
            others["step"] = torch.tensor(float(step))
        return keys, others


def _as_torch(tensor: Tensor, offset: tuple[int, ...], extent: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    array = tensor.read(offset, extent)
    found = torch.from_numpy(array)
    return found if found.dtype == kind else found.contiguous().view(kind)


def found_in(folder: Path, wanted: Selection) -> Foreign | None:
    """Return the checkpoint in `folder`, None if there is none. Raises BadCheckpoint, also if the optimizer's state is
    wanted and cannot be read, OSError."""
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
