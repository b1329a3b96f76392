"""The state of a sharded optimizer in the ranks' memory: snapshots by version, copies of other ranks', and resharding.

A rank's shard is one flat tensor of three rows, [main parameters, exp_avg, exp_avg_sq], laid out by
:class:`transition.sharding.Buckets`. A **set** is all shards of one state of the training: it is named by the
generation in which the state was made (`base`: another generation may repeat a step and differ in the last bit) and its
`version`, the number of finished steps. Each rank keeps its own shard of the last two versions and, as an heir, those
of other ranks: 24 bytes for each element of a shard, and as many for each copy; what is not needed any more is written
over. They lie in the memory of the node's agent where there is one (:mod:`transition.rooms`): the next process of the
slot has them again.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from detector.inject import injector
from transition import elastic_buckets, parts
from transition.memory import contents
from transition.memory.files import set_mark
from transition.memory.images import SHARD, Found, Key
from transition.migrate import StateMismatch, as_before, broadcast_bytes, checksum, plain
from transition.rooms import Claimed, Room, Rooms
from transition.sharding import MARK_BITS, Uncovered, named

PIECE = 1 << 24  # elements between two ranks at a time, 64 MiB: what does not lie as it is sent is staged by pieces
SUM_WORDS = 4  # of 32 bits in a checksum
TRIES = 3  # to move what a change of size takes, before the generation is given up
STATES = ("param", "exp_avg", "exp_avg_sq")
_KEYS = (parts.PARAMETER, *STATES[1:])  # as a checkpoint's file has them
MOST_GENERATIONS = 1 << (48 - MARK_BITS)  # what a message can hold (unicron_ctl.protocol.ranges)
_MARK = re.compile(rf"[0-9a-f]{{{MARK_BITS // 4}}}")


class CopyFailed(RuntimeError):
    """A part of the state did not reach another rank."""


@dataclass
class _Set:
    """The part of a set that this rank holds: its own shard and others'. header: the state that is no tensor."""

    count: int
    step: float  # Adam's; 0 in a rank whose shard is nothing but padding
    header: bytes
    shards: dict[int, Room] = field(default_factory=dict)


class Shards:
    """The sharded state of one rank's optimizer. All methods are for the training thread.

    Collective methods are so over the data-parallel group (context parallelism included), over which the optimizer is
    sharded, and raise RuntimeError when a peer is lost. lost(): whether the generation is over. rooms: where shards
    are kept, default: where the parameters are. wire: where the backend wants its tensors, default: the same. place: of
    this rank among the `size` of its replica.
    """

    def __init__(
        self,
        model: Sequence[Any],
        optimizer: Any,
        lost: Callable[[], bool] = lambda: False,
        rooms: Rooms | None = None,
        wire: torch.device | None = None,
        place: int = 0,
        size: int = 1,
    ):
        elastic_buckets.check(model, optimizer)
        here: torch.device = next(model[0].parameters()).device
        self.model, self.optimizer, self._lost = list(model), optimizer, lost
        self.rooms, self.wire = rooms or Rooms(None, 0, here), wire or here
        self._place, self._size = place, size
        self.buckets = elastic_buckets.bucket_sizes(optimizer)
        self.base = self.count = self.index = 0
        self._sets: dict[tuple[int, int], _Set] = {}  # (base, version), oldest first
        self._confirmed: tuple[int, int] | None = None
        self._before: tuple[int, int] | None = None  # what the next one is made from
        self._about = b""
        self._passed: set[tuple[int, int]] = set()  # sets that nobody can go on from
        self._told: tuple[int, int] | None = None  # of which this rank's image says what a checkpoint's file has to

    @property
    def group(self) -> Any:
        """The process group over which the optimizer is sharded."""
        return self.model[0].intra_dp_cp_group

    def enter(self, base: int) -> None:
        """Megatron's objects hold the groups of a generation by now, in which states are named by `base`: take this
        rank's place in it.

        The optimizer's state is lost where the place is another one (:func:`elastic_buckets.resize`).
        """
        self.rooms.settle()
        elastic_buckets.resize(self.model, self.optimizer)
        self.base, self.count, self.index, self._about = base, self.group.size(), self.group.rank(), b""

    def claim(self, here: Sequence[int], again: bool = False) -> None:
        """Have the shards again that earlier processes left in the memory of this node; `here` are its slots at this
        place. Before the first :meth:`enter`; again: at rest, those of cuts and copies that this rank lacks."""
        for claimed in self.rooms.claim(here, self._place, self._size, self._misfit, self._lacks if again else None):
            self._take_back(claimed)

    def _lacks(self, key: Key) -> bool:
        found = self._sets.get((named(key.base, int(key.mark, 16)), key.iteration))
        return found is None or key.shard not in found.shards

    def _misfit(self, found: Found) -> str:
        """Why an image is no shard of this model."""
        key = found.key
        if not (0 <= key.shard < key.count and 0 <= key.base < MOST_GENERATIONS and _MARK.fullmatch(key.mark)):
            return "not an image of this release"
        length = len(STATES) * self.buckets.length(key.count) * torch.float32.itemsize
        return "" if length == found.data_bytes else "of another model"

    def _take_back(self, claimed: Claimed) -> None:
        key = claimed.key
        name = named(key.base, int(key.mark, 16)), key.iteration
        try:
            model, step, header, _ = msgpack.unpackb(claimed.head)
        except ValueError:
            model, step, header = b"of another release", 0.0, b""
        found = self._sets.get(name) or _Set(key.count, 0.0, header)
        if model != self._model or found.count != key.count or key.shard in found.shards or name in self._passed:
            self.rooms.discard(claimed.room)
            return
        found.step = max(found.step, step)
        found.shards[key.shard] = claimed.room
        self._sets[name] = found

    # ------------------------------------------------------------ snapshots and copies
    @torch.no_grad()
    def export(
        self, version: int, extra: bytes = b"", file: Callable[[bytes, float], bytes] | None = None, cut: bool = False
    ) -> None:
        """Keep the optimizer's present state as `version`. extra: what else belongs to it; :meth:`adopt` returns it.
        file(about, step): what whoever reads this rank's shard as a checkpoint's file has to know (:meth:`about`); None
        where the model is not all in the shards. cut: in a file that stays, too."""
        self._keep_only({self._confirmed})
        self._drop((self.base, version))
        header, told = self._header(extra), file(self.about(), self._step()) if file is not None else b""
        with self._rooms(1, header, told) as (room,):
            into: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            step = 0.0
            for tensors, pieces in self._pieces(room.flat):
                into += pieces
                values += [tensors[name].detach().view(-1) for name in STATES]
                step = float(tensors.get("step", step))
            _copy(into, values)
        self._sets[self.base, version] = _Set(self.count, step, header)
        self._add(version, self.index, room, told, cut)
        self._told = (self.base, version) if told else None

    def set_aside(self, version: int) -> bool:
        """The agent is to make a checkpoint's file of this rank's shard of `version`; False where it cannot."""
        if self._told != (self.base, version):
            return False
        return self.rooms.set_aside(self._sets[self._told].shards[self.index], version)

    @property
    def mark(self) -> str:
        """Of the files that are made of the sets of this generation."""
        return set_mark(*self._parted_base)

    @property
    def _parted_base(self) -> tuple[int, str]:
        """The generation's number and its mark."""
        generation, mark = divmod(self.base, 1 << MARK_BITS)
        return generation, f"{mark:0{MARK_BITS // 4}x}"

    def send_copies(self, version: int, shifts: Sequence[int]) -> None:
        """Collective: give this rank's shard of `version` to its heirs, get those that it is the heir of.

        shifts: of :func:`transition.sharding.heirs`. The copies are safe when all members say that they have them.
        """
        mine = self._sets[self.base, version]
        with self._rooms(len(shifts), mine.header) as rooms:
            received = {(self.index - shift) % self.count: room for shift, room in zip(shifts, rooms, strict=True)}
            own = [mine.shards[self.index].flat]
            outgoing = {(self.index + shift) % self.count: own for shift in shifts}
            self._exchange(outgoing, {rank: [room.flat] for rank, room in received.items()})
        for shard, room in received.items():
            self._add(version, shard, room)

    def confirm(self, version: int) -> None:
        """All members have their copies of `version`: older sets are not needed any more. That from which it was made
        stays until the next one takes its room, for a rank that dies now may leave an image of `version` that is not
        whole yet."""
        now = self.base, version
        self._keep_only({now, self._before})
        self.rooms.trim(self._elements)
        self._confirmed = self._before = now

    def held(self) -> list[tuple[int, int, int, list[int]]]:
        """What this rank could give: (base, version, count of shards, which of them) of each set, the newest last.
        Where there are images, they are whole."""
        self.rooms.settle()
        return [(*key, found.count, sorted(found.shards)) for key, found in sorted(self._sets.items())]

    # ------------------------------------------------------------ adopting
    @torch.no_grad()
    def adopt(self, base: int, version: int, whole: Callable[[bytes], bool] = lambda extra: True) -> bytes:
        """Collective, after :meth:`enter`: take up state `version` of generation `base` from whoever holds it.

        Only what a rank does not hold itself moves. Afterwards this rank's shard is kept as `version` of the present
        generation (copies are to be sent), the optimizer has it, and all parameters of the model are made from it.
        What was held of the state before stays until a copy is confirmed, so that this may be done again, with other
        members. Returns `extra` of :meth:`export`. Raises :class:`Uncovered` when a part has no holder.

        whole(extra): the same in all members; where it is not, the set is let go of before anything has changed.
        """
        old = self._sets.get((base, version))
        self._drop_spoiled(old)
        count, step, held = self._who_holds(old)
        if not any(held):
            raise Uncovered(f"nobody holds state {version} of generation {base}")
        header = self._common_header(old, next(rank for rank, shards in enumerate(held) if shards))
        if not whole(bytes(msgpack.unpackb(header, strict_map_key=False)["extra"])):
            self._pass_over((base, version))
            raise CopyFailed(f"a part of state {version} of generation {base} is nowhere")
        self._keep_only({(base, version), self._confirmed})
        self._before = base, version
        with self._rooms(1, header) as (room,):
            outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
            incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
            for move in self.buckets.moves(held, count):
                if move.source == self.index and old is not None:
                    outgoing[move.target] += _pieces_of(old.shards[move.old].flat, move.read, move.size)
                if move.target == self.index:
                    incoming[move.source] += _pieces_of(room.flat, move.write, move.size)
            if self.index in incoming:
                _copy(incoming.pop(self.index), outgoing.pop(self.index))
            self._exchange_soundly(outgoing, incoming)
            extra = self._apply(room.flat, step, header)
            elastic_buckets.rebuild_parameters(self.model, self.optimizer)
            self._check_alive()
        if base == self.base:
            self._drop((base, version))
        self._sets[self.base, version] = _Set(self.count, step, header)
        self._add(version, self.index, room)
        return extra

    def _add(self, version: int, shard: int, room: Room, told: bytes = b"", cut: bool = False) -> None:
        """A room of the present generation has its content: from now on it is part of the set of `version`. told: for
        whoever reads its image as a checkpoint's file."""
        mine = self._sets[self.base, version]
        mine.shards[shard] = room
        key = Key(SHARD, self.rooms.slot, version, self._place, self._size, shard, mine.count, *self._parted_base)
        self.rooms.seal(room, key, self._head(mine.step, mine.header, told), cut)

    def _head(self, step: float, header: bytes, told: bytes = b"") -> bytes:
        """Of an image."""
        return msgpack.packb((self._model, step, header, told))

    @property
    def _model(self) -> bytes:
        """The same for models whose buckets are the same."""
        return hashlib.blake2b(repr(self.buckets).encode(), digest_size=8).digest()

    def _pass_over(self, key: tuple[int, int]) -> None:
        """Nobody can go on from this set, so it is not said of again."""
        self._passed.add(key)
        if (old := self._sets.pop(key, None)) is not None:
            for room in old.shards.values():
                self.rooms.discard(room)

    def _drop_spoiled(self, old: _Set | None) -> None:
        """What memory has spoiled since it was summed is not given to anybody."""
        if old is None:
            return
        for shard, room in list(old.shards.items()):
            if not self.rooms.sound(room):
                del old.shards[shard]
                self.rooms.spoiled(room)

    def _who_holds(self, old: _Set | None) -> tuple[int, float, list[set[int]]]:
        """How many shards the set has, Adam's step, and which shards each rank of the group holds."""
        shards = sorted(old.shards) if old else []
        about = [old.count, old.step, len(shards)] if old else [0, 0, 0]
        told = torch.tensor(about, dtype=torch.float64, device=self.wire)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        self._check_alive()
        count, step, most = int(told[0]), float(told[1]), max(int(told[2]), 1)
        mine = torch.tensor([*shards, *[-1] * (most - len(shards))], dtype=torch.int64)
        table = torch.empty(self.count * mine.numel(), dtype=torch.int64, device=self.wire)
        dist.all_gather_into_tensor(table, mine.to(self.wire), group=self.group)
        self._check_alive()
        rows = table.view(self.count, -1).tolist()
        return count, step, [{shard for shard in row if shard >= 0} for row in rows]

    def _common_header(self, old: _Set | None, source: int) -> bytes:
        mine = old.header if old is not None and self.index == source else None
        header, sound = broadcast_bytes(mine, source, self.wire, self.group)
        if not sound:
            raise CopyFailed("the header of the optimizer's state was spoiled on its way")
        return header

    # ------------------------------------------------------------ the optimizer
    def _pieces(self, flat: torch.Tensor) -> Iterator[tuple[dict[str, torch.Tensor], list[torch.Tensor]]]:
        """For each parameter of which this rank has a part: Megatron's tensors of the part, its places in `flat`."""
        base = 0
        buckets = elastic_buckets.optimizer_buckets(self.optimizer)
        for (optimizer, number, buffer, bucket), part in zip(buckets, self.buckets.parts(self.count), strict=True):
            ranges = optimizer.gbuf_ranges[number][buffer.param_dtype, buffer.grad_dtype][bucket.bucket_id]
            for parameter, where in ranges["param_map"].items():
                local = where["gbuf_local"]
                tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                yield tensors, _pieces_of(flat, base + local.start, local.size)
            base += part

    def _step(self) -> float:
        """Adam's; 0 where this rank has nothing but padding."""
        tensors = (tensors for tensors, _ in self._pieces(torch.empty(self._elements, device="meta")))
        return next((float(each["step"]) for each in tensors if "step" in each), 0.0)

    def about(self) -> bytes:
        """Where in this rank's shard the parts of the parameters are, as :mod:`transition.memory.contents` has it; the
        same for all states of a generation."""
        if not self._about:
            row, starts = self.buckets.length(self.count), self._starts()
            index: list[tuple[Any, ...]] = []
            tensors: list[tuple[Any, ...]] = []
            for part in parts.parts(self.model, self.optimizer):
                begin = starts[id(part.parameter)] + part.first
                keys = {key: len(tensors) + number for number, key in enumerate(_KEYS)}
                at = [torch.float32.itemsize * (number * row + begin) for number in range(len(STATES))]
                tensors += [("float32", part.end - part.begin, offset) for offset in at]
                steps = {key: [len(tensors), list(value.shape)] for key, value in part.others.items()}
                tensors += [(_name(value.dtype), 1, contents.STEP) for value in part.others.values()]
                index.append((*part.box, part.begin, part.end, keys, {}, steps))
            self._about = msgpack.packb({"index": index, "tensors": tensors})
        return self._about

    def _starts(self) -> dict[int, int]:
        """id of a parameter -> at which element of a row its first one would be, if this rank had all of it."""
        starts, base = {}, 0
        buckets = elastic_buckets.optimizer_buckets(self.optimizer)
        for (optimizer, number, buffer, bucket), part in zip(buckets, self.buckets.parts(self.count), strict=True):
            ranges = optimizer.gbuf_ranges[number][buffer.param_dtype, buffer.grad_dtype][bucket.bucket_id]
            for parameter, where in ranges["param_map"].items():
                starts[id(parameter)] = base + where["gbuf_local"].start - where["param"].start
            base += part
        return starts

    def _apply(self, flat: torch.Tensor, step: float, header: bytes) -> bytes:
        """Give the optimizer the state of `flat` and the header; returns `extra`."""
        data = msgpack.unpackb(header, strict_map_key=False)
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for tensors, pieces in self._pieces(flat):
            into += [tensors[name].detach().view(-1) for name in STATES]
            values += pieces
            if "step" in tensors:
                tensors["step"].fill_(step)
        _copy(into, values)
        optimizers = elastic_buckets.distributed(self.optimizer)
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
        """What is no big tensor: learning rates and the like, the loss scaler's state, and `extra`."""
        optimizers = [
            (
                plain(optimizer.optimizer.param_groups),
                {} if optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict(),
            )
            for optimizer in elastic_buckets.distributed(self.optimizer)
        ]
        return msgpack.packb({"optimizers": optimizers, "extra": extra}, default=torch.Tensor.tolist)

    # ------------------------------------------------------------ memory
    @property
    def _elements(self) -> int:
        return len(STATES) * self.buckets.length(self.count)

    @property
    def shard_bytes(self) -> int:
        """Of one shard of the present generation."""
        return self._elements * torch.float32.itemsize

    def _rooms(self, count: int, header: bytes, told: bytes = b"") -> AbstractContextManager[list[Room]]:
        """Memory for so many shards of the present generation."""
        return self.rooms.take(count, self._elements, len(self._head(0.0, header, told)))

    def _drop(self, key: tuple[int, int]) -> None:
        if (old := self._sets.pop(key, None)) is not None:
            for room in old.shards.values():
                self.rooms.give_back(room)

    def _keep_only(self, keys: set[Any]) -> None:
        for key in [key for key in self._sets if key not in keys]:
            self._drop(key)

    # ------------------------------------------------------------ sending
    def _exchange(
        self,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        incoming: Mapping[int, Sequence[torch.Tensor]],
        spoil: bool = False,
    ) -> None:
        """Send flat pieces to ranks of the group and receive others. Both sides of a pair cut the same stream into the
        same messages, so that everybody's rounds fit together."""
        streams = [_messages(rank, dist.isend, pieces) for rank, pieces in outgoing.items()]
        streams += [_messages(rank, dist.irecv, pieces) for rank, pieces in incoming.items()]
        for messages in zip_longest(*streams):
            staged = []
            operations = []
            for rank, kind, pieces in filter(None, messages):
                wire = pieces[0]
                if len(pieces) > 1 or wire.device.type != self.wire.type:
                    wire = torch.empty(sum(map(torch.numel, pieces)), dtype=torch.float32, device=self.wire)
                    parts = list(wire.split([piece.numel() for piece in pieces]))
                    if kind is dist.isend:
                        _copy(parts, pieces)
                    else:
                        staged.append((pieces, parts))
                if spoil and kind is dist.isend:
                    wire, spoil = _spoiled(wire), False
                operations.append(dist.P2POp(kind, wire, group=self.group, group_peer=rank))
            self._run(operations)
            for pieces, parts in staged:
                _copy(pieces, parts)

    def _exchange_soundly(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Collective: exchange, and once more where what came is not what was sent."""
        for _ in range(TRIES):
            spoil = bool(outgoing) and injector.spoils_transfer()
            self._exchange(outgoing, incoming, spoil)
            sums = {rank: [_checksum(pieces).view(torch.float32)] for rank, pieces in outgoing.items()}
            sent = {rank: [torch.zeros(SUM_WORDS)] for rank in incoming}
            self._exchange(sums, sent)
            wrong = [
                rank
                for rank, pieces in incoming.items()
                if not torch.equal(_checksum(pieces), sent[rank][0].view(torch.int64))
            ]
            told = torch.tensor([len(wrong)], device=self.wire)
            dist.all_reduce(told, group=self.group)
            if not told.item():
                return
        raise CopyFailed(f"parts of the optimizer's state were spoiled on their way {TRIES} times")

    def _run(self, operations: list[dist.P2POp]) -> None:
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()  # a connection that is shut down ends it, with an error
        self._check_alive()

    def _check_alive(self) -> None:
        """What was received is believed only now: an aborted NCCL collective returns garbage and raises nothing."""
        if self.wire.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._lost():
            raise CopyFailed("a member was lost while the state was sent")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _messages(
    rank: int, kind: Callable[..., Any], pieces: Sequence[torch.Tensor]
) -> Iterator[tuple[int, Callable[..., Any], list[torch.Tensor]]]:
    """Messages of at most PIECE elements that are `pieces` in order."""
    message: list[torch.Tensor] = []
    left = PIECE
    for piece in pieces:
        while piece.numel():
            part, piece = piece[:left], piece[left:]
            message.append(part)
            left -= part.numel()
            if not left:
                yield rank, kind, message
                message, left = [], PIECE
    if message:
        yield rank, kind, message


def _pieces_of(flat: torch.Tensor, start: int, size: int) -> list[torch.Tensor]:
    """A run of elements in each row of a shard."""
    rows = flat.view(len(STATES), -1)
    return [row.narrow(0, start, size) for row in rows]


def _checksum(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all pieces in this order, as :func:`transition.migrate.checksum`."""
    total = torch.zeros(2, dtype=torch.int64)
    for number, piece in enumerate(pieces):
        total += (2 * number + 1) * checksum(piece)
    return total


def _spoiled(wire: torch.Tensor) -> torch.Tensor:
    """An injected fault: a few bits flip on the way."""
    damaged = wire.clone()
    damaged.view(torch.uint8)[damaged.numel() // 2] ^= 0x41
    return damaged


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
