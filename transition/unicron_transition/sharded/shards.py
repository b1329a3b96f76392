"""The state of a sharded optimizer in the ranks' memory: snapshots by version, copies for other ranks, and resharding.

A rank's shard is one flat tensor of three rows, [main parameters, exp_avg, exp_avg_sq], laid out by
:class:`shard_exchange.Buckets`. A **set** is all shards of one state of the training. Its name is the generation that
made the state (`base`: another generation may repeat a step and differ in the last bit) and its `version`, the number
of finished steps. Each rank keeps its own shard of the last two versions, and those of the ranks whose partner it is:
24 bytes for each element of a shard and of each copy. Older ones are overwritten. If the node has an agent they lie in
its memory (:mod:`sharded.buffer_pool`), where the next process of the slot finds them.

Invariants:

- The last confirmed set stays until the next one is confirmed; so does the set that it was made from, until that buffer
  is needed.
- A shard goes to another rank only if it still has the digest with which it was sealed.
- A set that was found to be incomplete everywhere is never reported again.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch

from unicron_transition.generations.sharding import MARK_BITS, state_base
from unicron_transition.seams import elastic_buckets
from unicron_transition.seams.modules import copy_all
from unicron_transition.sharded.buffer_pool import Buffer, BufferPool, ClaimedImage
from unicron_transition.sharded.shard_exchange import Buckets, CopyFailed, LaneBuckets, MissingShard, ShardExchange
from unicron_transition.snapshot import parts
from unicron_transition.snapshot.checkpoint_file import behind, set_mark
from unicron_transition.snapshot.image_format import SHARD, STEP, ImagePage, Key
from unicron_transition.snapshot.migrate import StateMismatch, as_before, plain

STATES = ("param", "exp_avg", "exp_avg_sq")
_KEYS = (parts.PARAMETER, *STATES[1:])  # as in a checkpoint's file
MOST_GENERATIONS = 1 << (48 - MARK_BITS)  # limit of a message (unicron_ctl.shared.protocol.ranges)
_MARK = re.compile(rf"[0-9a-f]{{{MARK_BITS // 4}}}")


@dataclass
class _Set:
    """This rank's part of a set: its own shard and copies of others."""

    count: int
    step: float  # Adam's; 0 in a rank whose shard is nothing but padding
    header: bytes  # the state that is not a tensor
    shards: dict[int, Buffer] = field(default_factory=dict)


class Shards:
    """The sharded state of one rank's optimizer, for the training thread.

    Collective methods are so over :attr:`group`, and raise RuntimeError if a peer is lost. :class:`ShardExchange`
    describes `lost` and `wire`.
    """

    def __init__(
        self,
        model: Sequence[Any],
        optimizer: Any,
        lost: Callable[[], bool] = lambda: False,
        pool: BufferPool | None = None,
        wire: torch.device | None = None,
        place: int = 0,
        size: int = 1,
    ):
        elastic_buckets.check(model, optimizer)
        here: torch.device = next(model[0].parameters()).device
        self.model, self.optimizer = list(model), optimizer
        self.pool = pool or BufferPool(None, 0, here)  # by default the shards are where the parameters are
        self._lanes = elastic_buckets.lanes(self.model)
        self._exchange = ShardExchange(lambda: self.group, wire or here, lost)
        self._exchange_of_lanes = ShardExchange(lambda: self._group_of_lanes, wire or here, lost)
        self._place, self._size = place, size  # this rank's place among the ranks of its replica
        self.buckets = self._buckets()
        self.base = self.count = self.index = 0
        self._sets: dict[tuple[int, int], _Set] = {}  # (base, version), oldest first
        self._confirmed: tuple[int, int] | None = None
        self._before: tuple[int, int] | None = None  # the set from which the next one is made
        self._about: bytes | None = None
        self._passed: set[tuple[int, int]] = set()  # incomplete sets
        self._with_file_head: tuple[int, int] | None = None  # the set whose image can become a file

    def _buckets(self) -> Buckets:
        sizes = elastic_buckets.bucket_sizes(self.optimizer)
        if self._lanes == 1:
            return Buckets(*sizes)
        dense = self._group_of_lanes.size()
        own = [buffer.data_parallel_group.size() != dense for *_, buffer, _ in self._all_buckets()]
        return LaneBuckets(*sizes, self._lanes, tuple(own))

    def _all_buckets(self) -> Iterator[tuple[Any, int, Any, Any]]:
        return elastic_buckets.optimizer_buckets(self.optimizer)

    @property
    def group(self) -> Any:
        """The ranks at this rank's place, one of each replica, which keep each other's copies. The optimizer is sharded
        over them; with lanes that share experts, over the same of all lanes."""
        return self.model[0].intra_expt_dp_group if self._lanes > 1 else self._group_of_lanes

    @property
    def _group_of_lanes(self) -> Any:
        return self.model[0].intra_dp_cp_group

    def enter_generation(self, base: int) -> None:
        """Take this rank's place in a generation whose groups Megatron's objects hold by now; `base` names its states.

        The optimizer's state is lost if the place is another one (:func:`elastic_buckets.resize`).
        """
        self.pool.wait_whole()
        elastic_buckets.resize(self.model, self.optimizer)
        self.base, self.count, self.index, self._about = base, self.group.size(), self.group.rank(), None

    def claim(self, here: Sequence[int], again: bool = False) -> None:
        """Recover the shards that earlier processes left in this node's memory; `here` are its slots at this place. To
        be called before the first :meth:`enter_generation`; again: at rest, only cuts and copies that this rank
        lacks."""
        for claimed in self.pool.claim(here, self._place, self._size, self._misfit, self._lacks if again else None):
            self._take_back(claimed)

    def _lacks(self, key: Key) -> bool:
        found = self._sets.get((state_base(key.base, int(key.mark, 16)), key.iteration))
        return found is None or key.shard not in found.shards

    def _misfit(self, found: ImagePage) -> str:
        """Return why an image is no shard of this model; empty if it is one."""
        key = found.key
        if not (0 <= key.shard < key.count and 0 <= key.base < MOST_GENERATIONS and _MARK.fullmatch(key.mark)):
            return "not an image of this release"
        length = len(STATES) * self.buckets.length(key.count) * torch.float32.itemsize
        return "" if length == found.data_bytes else "of another model"

    def _take_back(self, claimed: ClaimedImage) -> None:
        key = claimed.key
        name = state_base(key.base, int(key.mark, 16)), key.iteration
        try:
            model, step, header, _ = msgpack.unpackb(claimed.head)
        except ValueError:
            model, step, header = b"of another release", 0.0, b""
        part = self._sets.get(name) or _Set(key.count, 0.0, header)
        if model != self._model or part.count != key.count or key.shard in part.shards or name in self._passed:
            self.pool.discard(claimed.buffer)
            return
        part.step = max(part.step, step)
        part.shards[key.shard] = claimed.buffer
        self._sets[name] = part

    # ------------------------------------------------------------ snapshots and copies
    @torch.no_grad()
    def export(
        self,
        version: int,
        extra: bytes = b"",
        file: Callable[[bytes, float], bytes] | None = None,
        cut: bool = False,
        untrained: Mapping[int, int] | None = None,
    ) -> None:
        """Keep the optimizer's present state as `version`. extra: other state that :meth:`adopt` returns. file(about,
        step): returns the image's head for readers of a checkpoint's file (:meth:`about`, with `untrained`); None if no
        file can be made of it. cut: also keep it in a file that stays."""
        self._keep_only({self._confirmed})
        self._drop((self.base, version))
        header, about = self._header(extra), self.about(untrained) if file is not None else b""
        file_head = file(about, self._step()) if file is not None and about else b""
        with self._take_buffers(1, header, file_head) as (buffer,):
            into: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            step = 0.0
            for tensors, pieces in self._pieces(buffer.flat):
                into += pieces
                values += [tensors[name].detach().view(-1) for name in STATES]
                step = float(tensors.get("step", step))
            copy_all(into, values)
        self._sets[self.base, version] = _Set(self.count, step, header)
        self._add(version, self.index, buffer, file_head, cut)
        self._with_file_head = (self.base, version) if file_head else None

    def set_aside(self, version: int, untrained: Path | None = None) -> bool:
        """Let the agent make a checkpoint's file of this rank's shard of `version`; False if it cannot. untrained: the
        image that goes into the same file."""
        if self._with_file_head != (self.base, version):
            return False
        return self.pool.set_aside(self._sets[self._with_file_head].shards[self.index], version, untrained)

    @property
    def mark(self) -> str:
        """The mark of the files of this generation's sets."""
        return set_mark(*self._base_parts)

    @property
    def _base_parts(self) -> tuple[int, str]:
        """The generation's number and its mark."""
        generation, mark = divmod(self.base, 1 << MARK_BITS)
        return generation, f"{mark:0{MARK_BITS // 4}x}"

    def send_copies(self, version: int, shifts: Sequence[int]) -> None:
        """Give this rank's shard of `version` to its partners, and get the shards whose partner it is; collective.

        shifts: of :func:`sharding.partner_shifts`. The copies are safe when all members report that they have them.
        """
        mine = self._sets[self.base, version]
        with self._take_buffers(len(shifts), mine.header) as buffers:
            received = {
                (self.index - shift) % self.count: buffer for shift, buffer in zip(shifts, buffers, strict=True)
            }
            own = [mine.shards[self.index].flat]
            outgoing = {(self.index + shift) % self.count: own for shift in shifts}
            self._exchange.send(outgoing, {rank: [buffer.flat] for rank, buffer in received.items()})
        for shard, buffer in received.items():
            self._add(version, shard, buffer)

    def confirm(self, version: int) -> None:
        """Confirm `version`: all members have their copies, so older sets are not needed any more. The set that it was
        made from stays until the next one takes its buffer, because a rank that dies now may leave an unfinished image
        of `version`."""
        now = self.base, version
        self._keep_only({now, self._before})
        self.pool.trim(self._elements)
        self._confirmed = self._before = now

    def held_shards(self) -> list[tuple[int, int, int, list[int]]]:
        """Return (base, version, count of shards, shards of this rank) of each set with whole images, newest last."""
        self.pool.wait_whole()
        return [(*key, part.count, sorted(part.shards)) for key, part in sorted(self._sets.items())]

    # ------------------------------------------------------------ adopting
    @torch.no_grad()
    def adopt(self, base: int, version: int, whole: Callable[[bytes], bool] = lambda extra: True) -> bytes:
        """Take up state `version` of generation `base` from the ranks that hold it; collective over all lanes, after
        :meth:`enter_generation`.

        Only what a rank does not hold itself moves. Afterwards this rank's shard is kept as `version` of the present
        generation (its copies must be sent), the optimizer has it, and all parameters of the model are made from it.
        The previous state stays until a copy is confirmed, so that another try with other members is possible. Returns
        `extra` of :meth:`export`. Raises :class:`MissingShard` for a part without a holder.

        whole(extra): the same in all members; if it is False, the set is dropped before anything has changed.
        """
        old = self._sets.get((base, version))
        self._drop_spoiled(old)
        own = (old.count, old.step, sorted(old.shards)) if old is not None else (0, 0.0, [])
        exchange, index = self._exchange_of_lanes, self._group_of_lanes.rank()
        count, step, held = exchange.who_holds(*own)
        of_lanes = [held[lane :: self._lanes] for lane in range(self._lanes)]
        if not all(map(any, of_lanes)):
            raise MissingShard(f"no rank holds state {version} of generation {base}, or some lane of it")
        # Of this place: another lane has other experts, and so other untrained tensors.
        source = next(rank for rank, has in enumerate(of_lanes[index % self._lanes]) if has)
        header = self._exchange.header(old.header if old else b"", source)
        if not whole(bytes(msgpack.unpackb(header, strict_map_key=False)["extra"])):
            self._pass_over((base, version))
            raise CopyFailed(f"a part of state {version} of generation {base} is nowhere")
        self._keep_only({(base, version), self._confirmed})
        self._before = base, version
        with self._take_buffers(1, header) as (buffer,):
            outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
            incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
            for move in self.buckets.moves(held, count):
                if move.source == index and old is not None:
                    outgoing[move.target] += _pieces_of(old.shards[move.old // self._lanes].flat, move.read, move.size)
                if move.target == index:
                    incoming[move.source] += _pieces_of(buffer.flat, move.write, move.size)
            if index in incoming:
                copy_all(incoming.pop(index), outgoing.pop(index))
            exchange.send_soundly(outgoing, incoming)
            extra = self._apply(buffer.flat, step, header)
            elastic_buckets.rebuild_parameters(self.model, self.optimizer)
            exchange.check_alive()
        if base == self.base:
            self._drop((base, version))
        self._sets[self.base, version] = _Set(self.count, step, header)
        self._add(version, self.index, buffer)
        return extra

    def _add(self, version: int, shard: int, buffer: Buffer, file_head: bytes = b"", cut: bool = False) -> None:
        """Add a filled buffer to this generation's set of `version`. file_head: for readers of a checkpoint's file."""
        mine = self._sets[self.base, version]
        mine.shards[shard] = buffer
        key = Key(SHARD, self.pool.slot, version, self._place, self._size, shard, mine.count, *self._base_parts)
        self.pool.seal(buffer, key, self._head(mine.step, mine.header, file_head), cut)

    def _head(self, step: float, header: bytes, file_head: bytes = b"") -> bytes:
        packed: bytes = msgpack.packb((self._model, step, header, file_head))
        return packed

    @property
    def _model(self) -> bytes:
        """A mark that models with the same buckets share."""
        return hashlib.blake2b(repr(self.buckets).encode(), digest_size=8).digest()

    def _pass_over(self, key: tuple[int, int]) -> None:
        """Drop an incomplete set for good: this rank does not report it again."""
        self._passed.add(key)
        if (old := self._sets.pop(key, None)) is not None:
            for buffer in old.shards.values():
                self.pool.discard(buffer)

    def drop_after(self, version: int) -> None:
        """Drop all sets after `version` for good: they are unsound."""
        for key in [key for key in self._sets if key[1] > version]:
            self._pass_over(key)

    def _drop_spoiled(self, old: _Set | None) -> None:
        """Drop shards that have changed in memory since they were sealed."""
        if old is None:
            return
        for shard, buffer in list(old.shards.items()):
            if not self.pool.is_sound(buffer):
                del old.shards[shard]
                self.pool.discard_spoiled(buffer)

    # ------------------------------------------------------------ the optimizer
    def _pieces(self, flat: torch.Tensor) -> Iterator[tuple[dict[str, torch.Tensor], list[torch.Tensor]]]:
        """Yield, for each parameter with a part in this rank, Megatron's tensors of the part and its places in
        `flat`."""
        for optimizer, parameter, where, base in self._ranges():
            local = where["gbuf_local"]
            tensors = elastic_buckets.own_state(optimizer, parameter)
            yield tensors, _pieces_of(flat, base + local.start, local.size)

    def _ranges(self) -> Iterator[tuple[Any, torch.nn.Parameter, Mapping[str, Any], int]]:
        """Yield, for each parameter of which this rank has a part: its optimizer, Megatron's ranges of the part, and
        the element of a row at which their bucket begins."""
        base = 0
        buckets = self._all_buckets()
        for (optimizer, number, buffer, bucket), part in zip(buckets, self.buckets.parts(self.count), strict=True):
            ranges = optimizer.gbuf_ranges[number][buffer.param_dtype, buffer.grad_dtype][bucket.bucket_id]
            for parameter, where in ranges["param_map"].items():
                yield optimizer, parameter, where, base
            base += part

    def _step(self) -> float:
        """Return Adam's step; 0 if this rank has only padding."""
        tensors = (tensors for tensors, _ in self._pieces(torch.empty(self._elements, device="meta")))
        return next((float(each["step"]) for each in tensors if "step" in each), 0.0)

    def about(self, untrained: Mapping[int, int] | None = None) -> bytes:
        """Return the places of the parameters' parts in this rank's shard, in the format of :mod:`snapshot.contents`;
        it is the same for all states of a generation.

        untrained: address -> place of each untrained tensor in the image that follows the shard's data in a file; None
        for a shard whose file has none. Empty if one of them is missing.
        """
        if self._about is None:
            row, starts = self.buckets.length(self.count), self._starts()
            index: list[tuple[Any, ...]] = []
            tensors: list[tuple[Any, ...] | None] = []
            rest: list[parts.Part] = []
            for part in parts.parts(self.model, self.optimizer):
                if not part.stepped:
                    if untrained is not None:
                        rest.append(part)
                    continue
                begin = starts[id(part.parameter)] + part.first
                keys = {key: len(tensors) + number for number, key in enumerate(_KEYS)}
                at = [torch.float32.itemsize * (number * row + begin) for number in range(len(STATES))]
                tensors += [("float32", part.end - part.begin, offset) for offset in at]
                steps = {key: [len(tensors), list(value.shape)] for key, value in part.others.items()}
                tensors += [(_name(value.dtype), 1, STEP) for value in part.others.values()]
                index.append((*part.box, part.begin, part.end, keys, {}, steps))
            for part in rest:
                index.append((*part.box, part.begin, part.end, {parts.PARAMETER: len(tensors)}, {}, {}))
                tensors.append(self._behind(part, untrained or {}))
            self._about = msgpack.packb({"index": index, "tensors": tensors}) if None not in tensors else b""
        return self._about

    def _behind(self, part: parts.Part, untrained: Mapping[int, int]) -> tuple[Any, ...] | None:
        """Describe an untrained tensor for :meth:`about`."""
        whole, mine = part.parameter, part.tensors[parts.PARAMETER]
        if (begin := untrained.get(whole.data_ptr()) if whole.is_contiguous() else None) is None:
            return None
        at = behind(self.shard_bytes) + begin + part.first * whole.element_size()
        return _name(mine.dtype), mine.numel(), at

    def _starts(self) -> dict[int, int]:
        """Return id of a parameter -> the element of a row at which it would begin if this rank had all of it."""
        return {
            id(parameter): base + where["gbuf_local"].start - where["param"].start
            for _, parameter, where, base in self._ranges()
        }

    def _apply(self, flat: torch.Tensor, step: float, header: bytes) -> bytes:
        """Give the optimizer the state of `flat` and the header; return `extra`."""
        data = msgpack.unpackb(header, strict_map_key=False)
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for tensors, pieces in self._pieces(flat):
            into += [tensors[name].detach().view(-1) for name in STATES]
            values += pieces
            if "step" in tensors:
                tensors["step"].fill_(step)
        copy_all(into, values)
        optimizers = elastic_buckets.distributed_optimizers(self.optimizer)
        if len(optimizers) != len(data["optimizers"]):
            raise StateMismatch("the peers have another number of optimizers: start the same script on all nodes")
        for optimizer, (groups, scaler) in zip(optimizers, data["optimizers"], strict=True):
            for group, values_of in zip(optimizer.optimizer.param_groups, groups, strict=True):
                group.update({key: as_before(group.get(key), value) for key, value in values_of.items()})
            if optimizer.grad_scaler is not None:
                before = optimizer.grad_scaler.state_dict()
                optimizer.grad_scaler.load_state_dict(
                    {key: as_before(before.get(key), value) for key, value in scaler.items()}
                )
        return bytes(data["extra"])

    def _header(self, extra: bytes) -> bytes:
        """Return all state but big tensors: learning rates and the like, the loss scaler's state, and `extra`."""
        optimizers = [
            (
                plain(optimizer.optimizer.param_groups),
                {} if optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict(),
            )
            for optimizer in elastic_buckets.distributed_optimizers(self.optimizer)
        ]
        packed: bytes = msgpack.packb({"optimizers": optimizers, "extra": extra}, default=torch.Tensor.tolist)
        return packed

    # ------------------------------------------------------------ memory
    @property
    def _elements(self) -> int:
        return len(STATES) * self.buckets.length(self.count)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard of the present generation."""
        return self._elements * torch.float32.itemsize

    def _take_buffers(self, count: int, header: bytes, file_head: bytes = b"") -> AbstractContextManager[list[Buffer]]:
        return self.pool.take_buffers(count, self._elements, len(self._head(0.0, header, file_head)))

    def _drop(self, key: tuple[int, int]) -> None:
        if (old := self._sets.pop(key, None)) is not None:
            for buffer in old.shards.values():
                self.pool.give_back(buffer)

    def _keep_only(self, keys: set[Any]) -> None:
        for key in [key for key in self._sets if key not in keys]:
            self._drop(key)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces_of(flat: torch.Tensor, start: int, size: int) -> list[torch.Tensor]:
    """Return a run of elements in each row of a shard."""
    rows = flat.view(len(STATES), -1)
    return [row.narrow(0, start, size) for row in rows]
