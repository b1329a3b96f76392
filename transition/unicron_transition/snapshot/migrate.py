"""State migration: a newcomer gets the training state from the memory of a data-parallel replica, the nearest place
(docs/design/micro-batch-reuse.md).

One rank sends, the newcomers receive, and all members compare their checksums with the sender's. A corrupted state is
sent again before anything is trained with it, by another member if there is one. A member that has silently diverged
from most others ends, and the others go on. The header is MessagePack; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from unicron_detector.chaos.inject import injector
from unicron_detector.processes.rank_messages import Fault
from unicron_transition.iteration.accumulation import scalers
from unicron_transition.seams import dtensors, modules
from unicron_transition.seams.dtensors import local
from unicron_transition.snapshot.model_facts import ModelFacts, model_facts
from unicron_transition.snapshot.reading import PlainValues, number_in
from unicron_transition.snapshot.tensor_transfer import (
    as_tensor,
    broadcast,
    broadcast_bytes,
    checksum,
    gather,
    raw_bytes,
)

TRIES = 4  # transfers, by different members if possible, before a newcomer gives up
HOW = {"foreach", "fused", "capturable", "differentiable"}  # settings of how a step is computed, which are not adopted
CUT = "cut"  # of a tensor that is cut as its parameter
TOGETHER = 1 << 22  # bytes of small tensors that are sent as one, since each broadcast waits for all members


class StateMismatch(RuntimeError):
    """The members do not hold the same training state after a transfer."""


class CorruptTransfer(RuntimeError):
    """The training state reached this newcomer damaged."""


class TrainingState:
    """The state that one rank needs to go on: parameters, optimizer state, learning-rate schedule, loss scale, the seed
    of the random numbers, iteration. A distributed optimizer's state differs between ranks, and is not part of it
    (:mod:`unicron_transition.sharded.sharded_state`). Of distributed tensors it has this rank's parts, and all ranks of
    one place have the same ones."""

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any, seed: int = 0):
        self.model, self.optimizer, self.scheduler, self.seed = list(model), optimizer, scheduler, seed
        self.loss: float | None = None  # of the last finished iteration
        self.sharded = any(
            chunk.ddp_config.use_distributed_optimizer for chunk in model if hasattr(chunk, "ddp_config")
        )
        if any(dtensors.is_distributed(parameter) for _, group in self._groups() for parameter in group["params"]):
            dtensors.check_torch()

    @functools.cached_property
    def facts(self) -> ModelFacts:
        """The facts about the model that an export needs."""
        self._reshard()
        return model_facts(self.model)

    @functools.cached_property
    def trees(self) -> list[modules.ModuleTree]:
        """The tensors of each chunk of the model."""
        return [modules.ModuleTree(chunk.module) for chunk in self.model]

    @functools.cached_property
    def _sharding(self) -> list[Any]:
        modules = (getattr(chunk, "module", chunk) for chunk in self.model)
        return [each for module in modules for each in dtensors.sharding_modules(module)]

    def _reshard(self) -> None:
        """Have the model's sharded parameters in their places, also after an evaluation."""
        for each in self._sharding:
            each.reshard()

    def _groups(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = getattr(optimizer, "optimizer", optimizer)
            for group in inner.param_groups:
                yield inner, group

    def _plain_groups(self) -> list[PlainValues]:
        return plain(group for _, group in self._groups())

    def schedule(self) -> PlainValues | None:
        """Return the state of the learning-rate schedule."""
        return self.scheduler.state_dict() if self.scheduler is not None else None

    def adopt_schedule(self, saved: PlainValues | None) -> None:
        """Load such a state."""
        if self.scheduler is not None:
            if hasattr(self.scheduler, "num_steps"):
                self.scheduler.num_steps = 0  # Megatron's load_state_dict adds to it
            self.scheduler.load_state_dict(saved)

    def scales(self) -> list[PlainValues]:
        """Return each fp16 gradient scaler's state: the scale, and the count of good or skipped steps since it
        changed."""
        return [as_plain(scaler.state_dict()) for scaler in scalers(self.optimizer)]

    def adopt_scales(self, saved: Sequence[PlainValues]) -> None:
        """Load such a state. Raises StateMismatch if it is of other scalers."""
        mine = scalers(self.optimizer)
        if [set(scaler.state_dict()) for scaler in mine] != [set(each) for each in saved]:
            raise StateMismatch(
                "the peer's optimizer has another kind of loss scale: start the same script on all nodes"
            )
        for scaler, values in zip(mine, saved, strict=True):
            before = scaler.state_dict()
            scaler.load_state_dict({key: as_before(before[key], value) for key, value in values.items()})

    def adopt_progress(
        self, groups: Sequence[PlainValues], schedule: PlainValues | None, scales: Sequence[PlainValues]
    ) -> None:
        """Load the settings of groups, the schedule and the gradient scalers from a file. With Megatron's schedule,
        which sets the others, only the step counts of groups are loaded."""
        own = hasattr(self.scheduler, "num_steps")
        for number, group in enumerate(self.optimizer.param_groups):
            saved = groups[min(number, len(groups) - 1)] if groups else {}
            taken = (saved.keys() & group.keys()) - HOW if not own else saved.keys() & group.keys() & {"step"}
            group.update({key: as_before(group[key], saved[key]) for key in taken})
        if self.scheduler is not None and schedule is not None:
            if own:  # of Megatron's schedule only the progress is taken: the script sets the rest
                self.scheduler.num_steps = 0
                self.scheduler.step(increment=number_in(schedule, "num_steps"))
            else:
                self.scheduler.load_state_dict(schedule)
        with contextlib.suppress(StateMismatch):  # written in another precision: the scale starts afresh
            self.adopt_scales(scales)

    def header(self, iteration: int) -> bytes:
        """Pack everything that is not a large tensor, and the layout of the tensors that follow."""
        layout = [
            []
            if self.sharded
            else [self._layout(inner.state.get(parameter, {}), parameter) for parameter in group["params"]]
            for inner, group in self._groups()
        ]
        packed: bytes = msgpack.packb(
            {
                "iteration": iteration,
                "groups": self._plain_groups(),
                "layout": layout,
                "scheduler": self.schedule(),
                "scales": self.scales(),
                "seed": self.seed,
                "loss": self.loss,
            }
        )
        return packed

    def settings(self) -> torch.Tensor:
        """Return a checksum of the values that must be the same in all ranks: learning rates, schedule, loss scale.
        Shape (2,)."""
        groups = [sorted(group.items()) for group in self._plain_groups()]
        return checksum(as_tensor(msgpack.packb([groups, self.schedule(), self.scales()])))

    @staticmethod
    def _layout(state: Mapping[str, object], parameter: torch.Tensor) -> PlainValues:
        """Return [dtype, shape, device type] for each tensor, and plain values as they are, by key. A part of a
        distributed tensor that is cut as the parameter has CUT as well."""
        return {
            key: _kind(key, value, parameter) if isinstance(value, torch.Tensor) else value
            for key, value in sorted(state.items())
        }

    def adopt(self, header: bytes) -> int:
        """Apply a peer's header, make room for its tensors and return the iteration to go on with. Raises
        StateMismatch."""
        data = msgpack.unpackb(header, strict_map_key=False)
        mine = list(self._groups())
        if len(mine) != len(data["groups"]):
            raise StateMismatch(
                f"the peer's optimizer has {len(data['groups'])} parameter groups, this one {len(mine)}: start "
                "the same script on all nodes"
            )
        for (inner, group), values, layouts in zip(mine, data["groups"], data["layout"], strict=True):
            group.update({key: as_before(group.get(key), value) for key, value in values.items()})
            for parameter, layout in zip([] if self.sharded else group["params"], layouts, strict=True):
                inner.state[parameter] = {key: _room(value, parameter) for key, value in layout.items()}
        self.adopt_schedule(data["scheduler"])
        self.adopt_scales(data.get("scales", self.scales()))
        self.seed, self.loss = int(data.get("seed", self.seed)), data.get("loss")
        return int(data["iteration"])

    def trained_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the model's parameters that the optimizer changes."""
        self._reshard()
        for chunk in self.model:
            found = (local(each) for each in chunk.module.parameters() if each.requires_grad)
            yield from (each for each in found if each.numel())

    def model_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the model's parameters and buffers."""
        self._reshard()
        for tree in self.trees:
            yield from map(local, (*tree.parameters, *tree.buffers))

    def addresses(self) -> list[int]:
        """Return the addresses of all tensors of the state. As long as they are the same, so are the tensors."""
        found = [tensor.data_ptr() for tensor in self.model_tensors()]
        inner: dict[int, Any] = {}
        for optimizer, group in () if self.sharded else self._groups():
            inner[id(optimizer)] = optimizer
            found += [local(parameter).data_ptr() for parameter in group["params"]]
        for optimizer in inner.values():
            kept = (value for state in optimizer.state.values() for value in state.values())
            found += [local(value).data_ptr() for value in kept if isinstance(value, torch.Tensor)]
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the state in a fixed order: model, main parameters if they differ, optimizer state."""
        seen = set()
        for tensor in self.model_tensors():
            seen.add(tensor.data_ptr())
            yield tensor.data
        for inner, group in () if self.sharded else self._groups():
            for parameter in group["params"]:
                if local(parameter).data_ptr() not in seen:
                    yield local(parameter).data
                state = inner.state.get(parameter, {})
                yield from (local(state[key]) for key in sorted(state) if isinstance(state[key], torch.Tensor))


def plain(groups: Iterable[Mapping[str, object]]) -> list[PlainValues]:
    """Return an optimizer's parameter groups without the parameters."""
    return [as_plain({key: value for key, value in group.items() if key != "params"}) for group in groups]


def as_plain(value: Any) -> Any:
    """Return a setting without tensors, for MessagePack."""
    if isinstance(value, dict):
        return {key: as_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def as_before(before: Any, value: Any) -> Any:
    """Return a header's value in the type of the value before: MessagePack has no tuples, tensors or counters."""
    if isinstance(before, torch.Tensor):
        return torch.tensor(value, dtype=before.dtype, device=before.device)
    if isinstance(before, list) and len(before) == len(value):
        return [as_before(*pair) for pair in zip(before, value, strict=True)]
    if isinstance(before, tuple):
        return tuple(as_before(list(before), value))
    if isinstance(before, int) and isinstance(value, float) and value.is_integer():
        return type(before)(value)
    return Counter(value) if isinstance(before, Counter) else value


def can_be_told(value: Any) -> bool:
    """Whether the value could be in a header."""
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _kind(key: str, value: torch.Tensor, parameter: torch.Tensor) -> list[Any]:
    part = local(value)
    kind = [str(part.dtype), list(part.shape), part.device.type]
    if not dtensors.is_distributed(value):
        return kind
    if value.shape != parameter.shape or not dtensors.cut_alike(value, parameter):
        raise StateMismatch(f"the optimizer's {key} is cut otherwise than its parameter: take an optimizer of torch's")
    return [*kind, CUT]


def _room(value: Any, parameter: torch.Tensor) -> Any:
    if not (isinstance(value, list) and len(value) in (3, 4) and str(value[0]).startswith("torch.")):
        return value
    dtype, shape, device, *cut = value
    if cut and (cut != [CUT] or list(local(parameter).shape) != shape):
        raise StateMismatch("the peer's model is sharded in another way: start the same script on all nodes")
    room = torch.empty(
        shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=parameter.device if device != "cpu" else "cpu"
    )
    return dtensors.wrap(room, parameter) if cut else room


def transfer(
    state: TrainingState,
    iteration: int,
    source: int,
    newcomer: bool,
    device: torch.device,
    holders: Sequence[int] = (),
    group: Any = None,
    note: Callable[[int, int, int], None] = lambda sender, parts, following: None,
    moved: Callable[[int], None] = lambda size: None,
    lost: Callable[[], bool] = lambda: False,
    made: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> int:
    """Collective over `group` (the world): its rank `source` sends, newcomers receive; returns the iteration to go on
    with.

    holders: the ranks that have the state already. note(sender, parts, following): called in a newcomer that got so
    many wrong parts, before another member sends. moved(size): called after so many more bytes. lost(): whether the
    generation is over. made(tensor): whether newcomers should have the tensor by now, so that it is only compared, and
    sent if it differs. Raises :class:`StateMismatch` in a member that differs from most, :class:`CorruptTransfer` in a
    newcomer that could not get the state, RuntimeError if a peer is lost meanwhile.
    """
    me, order = dist.get_rank(group), [source, *(rank for rank in holders if rank != source)]
    for attempt in range(TRIES):
        sender = order[attempt % len(order)]
        receiving = me not in order
        there = made if attempt == 0 else lambda tensor: False
        found, wrong = _send_once(state, iteration, sender, receiving and newcomer, device, group, moved, there)
        differing = gather(wrong, device, group)
        if lost():  # an aborted NCCL collective leaves garbage and raises nothing
            raise RuntimeError("the generation ended while the training state was transferred")
        trusted, settled = _compare(differing, order)
        if trusted and me in order and wrong:
            raise StateMismatch(
                f"training state (checkpoint) corrupt here: checksum mismatch with most in {wrong} parts"
            )
        if wrong and receiving and attempt + 1 < TRIES:
            note(sender, wrong, order[(attempt + 1) % len(order)])
        if settled:
            return found if receiving else iteration
    if not trusted:
        raise StateMismatch("the members differ in their training state, and no state is that of most")
    if wrong:
        raise CorruptTransfer(f"training state (checkpoint of rank {sender}) corrupt: checksum mismatch {TRIES} times")
    return found if receiving else iteration


def _compare(differing: Sequence[int], order: Sequence[int]) -> tuple[bool, bool]:
    """Return whether most members have the same as the sender, and whether the transfer is over. differing: in how many
    parts each rank differs; order: the ranks of the members. Members that differ end, which breaks the generation."""
    trusted = 2 * sum(not differing[rank] for rank in order) > len(order)
    return trusted, trusted and all(rank in order for rank, count in enumerate(differing) if count)


def corrupt_transfer(members: Sequence[int], sender: int, parts: int, following: int) -> Fault:
    """Return the fault for a call of :func:`transfer`'s `note`, for the rank's status. members: the slots of its
    ranks."""
    text = f"training state (checkpoint of slot {members[sender]}) corrupt: checksum mismatch in {parts} parts"
    text += f"; taken again from slot {members[following]}"
    return Fault(CorruptTransfer.__name__, text, time.time())


def _send_once(
    state: TrainingState,
    iteration: int,
    source: int,
    receiving: bool,
    device: torch.device,
    group: Any,
    moved: Callable[[int], None],
    made: Callable[[torch.Tensor], bool],
) -> tuple[int, int]:
    """Transfer once; returns the sender's iteration, and in how many parts this rank differs from the sender."""
    am_source = dist.get_rank(group) == source
    spoil = am_source and injector.spoils_transfer()
    header, sound = broadcast_bytes(state.header(iteration) if am_source else None, source, device, group)
    if any(gather(int(receiving and not sound), device, group)):  # the tensors that would follow are unknown there
        return iteration, int(receiving and not sound)
    if receiving:
        iteration = state.adopt(header)
    sums = [state.settings()]
    for part in _parts(state.tensors(), made):
        if not made(part[0]):
            broadcast(part, source, device, group, receiving, moved, spoil)
        flat = [raw_bytes(tensor).to(device) for tensor in part]
        sums.append(checksum(flat[0] if len(flat) == 1 else torch.cat(flat)))
    mine = torch.stack(sums)
    sent, sound = broadcast_bytes(mine.numpy().tobytes() if am_source else None, source, device, group)
    if not sound or len(sent) != mine.numel() * mine.element_size():
        return iteration, int(receiving)
    theirs = torch.frombuffer(bytearray(sent), dtype=torch.int64).reshape(mine.shape)
    return iteration, int((mine != theirs).any(dim=1).sum())


def _parts(tensors: Iterable[torch.Tensor], made: Callable[[torch.Tensor], bool]) -> Iterator[list[torch.Tensor]]:
    """Group the tensors in order, small ones together; the same in all members."""
    part, size = list[torch.Tensor](), 0
    for tensor in tensors:
        if part and (size + tensor.nbytes > TOGETHER or made(tensor) != made(part[0])):
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    if part:
        yield part
