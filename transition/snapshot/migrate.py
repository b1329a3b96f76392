"""State migration: a newcomer gets the training state from a data-parallel replica's memory, the nearest place
(docs/design/micro-batch-reuse.md).

One rank sends, the newcomers receive, and all members compare their checksums with the sender's. What arrived corrupted
is never trained with: it is sent again, by another member where there is one. A member that had silently diverged from
most others ends; the others go on. The header is MessagePack; nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from unicron.detector.chaos.inject import injector
from unicron.detector.processes.rank_messages import Fault
from unicron.transition.iteration.pending import scalers
from unicron.transition.snapshot.images import digest

TRIES = 4  # transfers, by different members as long as there are any, before a newcomer gives up
CHUNK = 1 << 18  # 64-bit words that are summed at a time: their weights stay in the cache
Settings = dict[str, Any]  # plain values by name: of a group of parameters, a schedule or a gradient scaler
PIECE = 1 << 26  # bytes that are sent at a time: a large tensor on a slow link shows that it gets on
TOGETHER = 1 << 22  # bytes of small tensors that are sent as one: each broadcast is a wait for all members


class StateMismatch(RuntimeError):
    """The members do not hold the same training state after a transfer."""


class CorruptTransfer(RuntimeError):
    """The training state did not reach this newcomer sound."""


class TrainingState:
    """What one rank must hold to go on: parameters, optimizer state, learning-rate schedule, loss scale, the seed of
    the random numbers, iteration. The state of a distributed optimizer is another one in each rank, and no part of it
    (:mod:`unicron.transition.sharded.sharded_state`)."""

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any, seed: int = 0):
        self.model, self.optimizer, self.scheduler, self.seed = list(model), optimizer, scheduler, seed
        self.loss: float | None = None  # of the last finished iteration
        self.sharded = any(
            chunk.ddp_config.use_distributed_optimizer for chunk in model if hasattr(chunk, "ddp_config")
        )

    def _inner_optimizers(self) -> list[Any]:
        outer = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [getattr(optimizer, "optimizer", optimizer) for optimizer in outer]

    def _groups(self) -> Iterator[tuple[Any, Settings]]:
        for inner in self._inner_optimizers():
            for group in inner.param_groups:
                yield inner, group

    def _plain_groups(self) -> list[Settings]:
        return plain(group for _, group in self._groups())

    def schedule(self) -> Settings | None:
        """The state of the learning-rate schedule."""
        return self.scheduler.state_dict() if self.scheduler is not None else None

    def adopt_schedule(self, saved: Settings | None) -> None:
        """Take up such a state."""
        if self.scheduler is not None:
            if hasattr(self.scheduler, "num_steps"):
                self.scheduler.num_steps = 0  # Megatron's load_state_dict adds to it
            self.scheduler.load_state_dict(saved)

    def scales(self) -> list[Settings]:
        """For fp16, each gradient scaler's scale, and how many steps went well or were skipped since it changed."""
        return [as_plain(scaler.state_dict()) for scaler in scalers(self.optimizer)]

    def adopt_scales(self, saved: Sequence[Settings]) -> None:
        """Take up such a state. Raises StateMismatch for one of other scalers."""
        mine = scalers(self.optimizer)
        if [set(scaler.state_dict()) for scaler in mine] != [set(each) for each in saved]:
            raise StateMismatch(
                "the peer's optimizer has another kind of loss scale: start the same script on all nodes"
            )
        for scaler, values in zip(mine, saved, strict=True):
            before = scaler.state_dict()
            scaler.load_state_dict({key: as_before(before[key], value) for key, value in values.items()})

    def header(self, iteration: int) -> bytes:
        """Everything that is not a big tensor, and the layout of the tensors that follow."""
        layout = [
            [] if self.sharded else [self._layout(inner.state.get(parameter, {})) for parameter in group["params"]]
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
        """Checksum of what is no tensor and must be the same everywhere: learning rates, schedule, loss scale. Shape
        (2,)."""
        groups = [sorted(group.items()) for group in self._plain_groups()]
        data = msgpack.packb([groups, self.schedule(), self.scales()])
        return torch.tensor([len(data), zlib.crc32(data)], dtype=torch.int64)

    @staticmethod
    def _layout(state: Settings) -> Settings:
        """Key -> [dtype, shape, device type] for tensors, or the plain value."""
        return {
            key: [str(value.dtype), list(value.shape), value.device.type] if isinstance(value, torch.Tensor) else value
            for key, value in sorted(state.items())
        }

    def adopt(self, header: bytes) -> int:
        """Apply a peer's header and make room for its tensors; returns the iteration to go on with. Raises
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

    def trained(self) -> Iterator[torch.Tensor]:
        """The model's parameters that the optimizer changes."""
        for chunk in self.model:
            yield from (each for each in chunk.module.parameters() if each.requires_grad and each.numel())

    def model_tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers."""
        for chunk in self.model:
            yield from (*chunk.module.parameters(), *chunk.module.buffers())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the state in a fixed order: model, main parameters where they differ, optimizer state."""
        seen = set()
        for tensor in self.model_tensors():
            seen.add(tensor.data_ptr())
            yield tensor.data
        for inner, group in () if self.sharded else self._groups():
            for parameter in group["params"]:
                if parameter.data_ptr() not in seen:
                    yield parameter.data
                state = inner.state.get(parameter, {})
                yield from (state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))


def plain(groups: Iterable[Settings]) -> list[Settings]:
    """An optimizer's parameter groups without the parameters."""
    return [as_plain({key: value for key, value in group.items() if key != "params"}) for group in groups]


def as_plain(value: Any) -> Any:
    """A setting without tensors, for MessagePack."""
    if isinstance(value, dict):
        return {key: as_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def as_before(before: Any, value: Any) -> Any:
    """A value of a header as it is held here: MessagePack knows neither tuples nor tensors, nor counters."""
    if isinstance(before, torch.Tensor):
        return torch.tensor(value, dtype=before.dtype, device=before.device)
    if isinstance(before, list) and len(before) == len(value):
        return [as_before(*pair) for pair in zip(before, value, strict=True)]
    if isinstance(before, tuple):
        return tuple(as_before(list(before), value))
    return Counter(value) if isinstance(before, Counter) else value


def can_be_told(value: Any) -> bool:
    """Whether the value could stand in a header."""
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _room(value: Any, parameter: torch.Tensor) -> Any:
    if not (isinstance(value, list) and len(value) == 3 and str(value[0]).startswith("torch.")):
        return value
    dtype, shape, device = value
    return torch.empty(
        shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=parameter.device if device != "cpu" else "cpu"
    )


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

    holders: the ranks that hold the state already. note(sender, parts, following): called in a newcomer that was
    sent so many wrong parts, before another member sends. moved(size): called after so many more bytes. lost(): the
    generation is over. made(tensor): newcomers should have it by now, so that it is compared, and sent only if it
    differs. Raises :class:`StateMismatch` in a member that differs from most, :class:`CorruptTransfer`
    in a newcomer that could not be given the state, RuntimeError when a peer is lost meanwhile.
    """
    me, order = dist.get_rank(group), [source, *(rank for rank in holders if rank != source)]
    for attempt in range(TRIES):
        sender = order[attempt % len(order)]
        receiving = me not in order
        there = made if attempt == 0 else _nothing
        found, wrong = _send_once(state, iteration, sender, receiving and newcomer, device, group, moved, there)
        differing = _gather(wrong, device, group)
        if lost():  # an aborted NCCL collective leaves garbage and raises nothing
            raise RuntimeError("the generation ended while the training state was transferred")
        bad = [rank for rank in order if differing[rank]]
        trusted = 2 * (len(order) - len(bad)) > len(order)  # most members hold what was sent
        if trusted and me in bad:
            raise StateMismatch(
                f"training state (checkpoint) corrupt here: checksum mismatch with most in {wrong} parts"
            )
        if trusted and not any(differing):
            return found if receiving else iteration
        following = order[(attempt + 1) % len(order)]
        if differing[me] and receiving and attempt + 1 < TRIES:
            note(sender, wrong, following)
        if trusted and all(rank in bad for rank, count in enumerate(differing) if count):
            return found if receiving else iteration  # those who differ end by themselves, which breaks the generation
    if not trusted:
        raise StateMismatch("the members differ in their training state, and no state is that of most")
    if differing[me]:
        raise CorruptTransfer(f"training state (checkpoint of rank {sender}) corrupt: checksum mismatch {TRIES} times")
    return found if receiving else iteration


def _nothing(tensor: torch.Tensor) -> bool:
    return False


def note(members: Sequence[int], sender: int, parts: int, following: int) -> Fault:
    """What :func:`transfer` notes, for the rank's status; `members` are the slots of its ranks."""
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
    """One transfer; returns the sender's iteration, and in how many parts this rank differs from what was sent."""
    am_source = dist.get_rank(group) == source
    spoil = am_source and injector.spoils_transfer()
    header, sound = broadcast_bytes(state.header(iteration) if am_source else None, source, device, group)
    if any(_gather(int(receiving and not sound), device, group)):  # nobody knows the tensors that would follow
        return iteration, int(receiving and not sound)
    if receiving:
        iteration = state.adopt(header)
    sums = [state.settings()]
    for part in _parts(state.tensors(), made):
        if not made(part[0]):
            for piece in _wire(part, receiving, am_source, spoil, device):
                dist.broadcast(piece, group=group, group_src=source)
                moved(piece.numel())
        sums.append(checksum(_flat(part, device)))
    mine = torch.stack(sums)
    sent, sound = broadcast_bytes(mine.numpy().tobytes() if am_source else None, source, device, group)
    if not sound or len(sent) != mine.numel() * mine.element_size():
        return iteration, int(receiving)
    theirs = torch.frombuffer(bytearray(sent), dtype=torch.int64).reshape(mine.shape)
    return iteration, int((mine != theirs).any(dim=1).sum())


def _parts(tensors: Iterable[torch.Tensor], made: Callable[[torch.Tensor], bool]) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, small ones together; the same in all members."""
    part, size = list[torch.Tensor](), 0
    for tensor in tensors:
        if part and (size + tensor.nbytes > TOGETHER or made(tensor) != made(part[0])):
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    if part:
        yield part


def _flat(part: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Their bytes on `device`: the tensor's own memory where it is one that lies there in one piece."""
    raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device) for tensor in part]
    return raw[0] if len(raw) == 1 else torch.cat(raw)


def _wire(
    part: Sequence[torch.Tensor], receiving: bool, am_source: bool, spoil: bool, device: torch.device
) -> Iterator[torch.Tensor]:
    """Piece by piece what is to be broadcast, or received, of these tensors; the pieces are the same in all members.
    A member that holds them already gets them into memory that nobody needs."""
    if receiving or am_source:
        flat = _flat(part, device)
    else:
        flat = torch.empty(sum(tensor.nbytes for tensor in part), dtype=torch.uint8, device=device)
    if spoil:
        flat = flat.clone()
        _spoil(flat)
    yield from flat.split(PIECE)
    if not receiving or flat.data_ptr() == part[0].data_ptr():
        return
    begin = 0
    for tensor in part:
        end = begin + tensor.nbytes
        if tensor.is_contiguous():  # bytes, since a copy of booleans makes each of them 0 or 1
            tensor.detach().view(-1).view(torch.uint8).copy_(flat[begin:end])
        else:
            tensor.copy_(flat[begin:end].clone().view(tensor.dtype).view(tensor.shape))
        begin = end


def broadcast_bytes(
    data: bytes | None, source: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[bytes, bool]:
    """The bytes of rank `source` of the group (or world), and whether they arrived as they were sent."""
    told = torch.tensor([len(data or b""), zlib.crc32(data or b"")], dtype=torch.int64, device=device)
    dist.broadcast(told, group=group, group_src=source)
    size, wanted = told.tolist()
    wire = torch.empty(size, dtype=torch.uint8, device=device)
    if data:
        wire.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(wire, group=group, group_src=source)
    received = wire.cpu().numpy().tobytes()
    return received, zlib.crc32(received) == wanted


def _gather(number: int, device: torch.device, group: Any) -> list[int]:
    """The number of every rank of the group."""
    numbers = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    numbers[dist.get_rank(group)] = number
    numbers = numbers.to(device)
    dist.all_reduce(numbers, group=group)
    return numbers.tolist()


def _spoil(tensor: torch.Tensor) -> None:
    """An injected fault: a few bits flip on the way."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.numel():
        raw[raw.numel() // 2] ^= 0x41


# ------------------------------------------------------------ the checksum
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor's raw bytes (:func:`images.digest`), to compare with other ranks'. Shape (2,), int64, on
    the CPU. What is on a card is summed there: to bring it to the host would take longer than to send it."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not raw.is_cpu:
        return sum_on_card(raw)
    return torch.frombuffer(bytearray(digest(raw.numpy().data)), dtype=torch.int64)


def sum_on_card(raw: torch.Tensor) -> torch.Tensor:
    """Two sums over bytes as 64-bit words, modulo 2^64, the second with odd weights by position, so that a permutation
    shows. The upper half of each word is mixed into its lower one before, else two flips of the top bit would cancel.
    No single wrong word goes unseen. Shape (2,), int64, on the CPU."""
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words, rest = raw[:whole].view(torch.int64), raw[whole:].to(torch.int64)
    weights = _odd_numbers(raw.device)
    plain, weighted = rest.sum(), (rest * weights[: rest.numel()]).sum()
    for begin in range(0, words.numel(), CHUNK):
        part = words[begin : begin + CHUNK]
        part = torch.bitwise_right_shift(part, 32).bitwise_xor_(part)
        total = part.sum()
        plain = plain + total
        weighted = weighted + (part * weights[: part.numel()]).sum() + 2 * begin * total
    return torch.stack([plain, weighted]).cpu()


@functools.cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return 2 * torch.arange(CHUNK, device=device, dtype=torch.int64) + 1
