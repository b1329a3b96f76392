"""What goes between the ranks that have a distributed optimizer's shards: who holds which, headers, and flat pieces
with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from unicron.detector.chaos.inject import injector
from unicron.transition.seams import modules
from unicron.transition.snapshot.migrate import broadcast_bytes, checksum

PIECE = 1 << 24  # elements between two ranks at a time, 64 MiB: what does not lie as it is sent is staged by pieces
SUM_WORDS = 4  # of 32 bits in a checksum
TRIES = 3  # to move what a change of size takes, before the generation is given up


class CopyFailed(RuntimeError):
    """A part of the state did not reach another rank."""


class ShardExchange:
    """The exchange of one rank. All methods but :meth:`check_alive` are collective over the group, and raise
    RuntimeError when a peer is lost.

    group(): over which the optimizer is sharded in the present generation. wire: where the backend wants its tensors.
    lost(): whether the generation is over.
    """

    def __init__(self, group: Callable[[], Any], wire: torch.device, lost: Callable[[], bool]):
        self._group, self._wire, self._lost = group, wire, lost

    def who_holds(self, count: int, step: float, shards: Sequence[int]) -> tuple[int, float, list[set[int]]]:
        """How many shards a set has, Adam's step, and which shards each rank of the group holds, from what this rank
        knows of it: 0, 0 and none where it has no part."""
        group = self._group()
        told = torch.tensor([count, step, len(shards)], dtype=torch.float64, device=self._wire)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        self.check_alive()
        most = max(int(told[2]), 1)
        mine = torch.tensor([*shards, *[-1] * (most - len(shards))], dtype=torch.int64)
        table = torch.empty(group.size() * mine.numel(), dtype=torch.int64, device=self._wire)
        dist.all_gather_into_tensor(table, mine.to(self._wire), group=group)
        self.check_alive()
        rows = table.view(group.size(), -1).tolist()
        return int(told[0]), float(told[1]), [{shard for shard in row if shard >= 0} for row in rows]

    def header(self, mine: bytes, source: int) -> bytes:
        """That of rank `source` of the group. Raises :class:`CopyFailed` where it was spoiled on its way."""
        group = self._group()
        header, sound = broadcast_bytes(mine if group.rank() == source else None, source, self._wire, group)
        if not sound:
            raise CopyFailed("the header of the optimizer's state was spoiled on its way")
        return header

    def send(
        self,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        incoming: Mapping[int, Sequence[torch.Tensor]],
        spoil: bool = False,
    ) -> None:
        """Send flat pieces to ranks of the group and receive others. Both sides of a pair cut the same stream into the
        same messages, so that everybody's rounds fit together."""
        group = self._group()
        streams = [_messages(rank, dist.isend, pieces) for rank, pieces in outgoing.items()]
        streams += [_messages(rank, dist.irecv, pieces) for rank, pieces in incoming.items()]
        for messages in zip_longest(*streams):
            staged = []
            operations = []
            for rank, kind, pieces in filter(None, messages):
                wire = pieces[0]
                if len(pieces) > 1 or wire.device.type != self._wire.type:
                    wire = torch.empty(sum(map(torch.numel, pieces)), dtype=torch.float32, device=self._wire)
                    parts = list(wire.split([piece.numel() for piece in pieces]))
                    if kind is dist.isend:
                        fill(parts, pieces)
                    else:
                        staged.append((pieces, parts))
                if spoil and kind is dist.isend:
                    wire, spoil = _spoiled(wire), False
                operations.append(dist.P2POp(kind, wire, group=group, group_peer=rank))
            self._run(operations)
            for pieces, parts in staged:
                fill(pieces, parts)

    def send_soundly(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Does what :meth:`send` does, and does it again where the bytes that came are not those that were sent. Raises
        :class:`CopyFailed` after the last try."""
        for _ in range(TRIES):
            spoil = bool(outgoing) and injector.spoils_transfer()
            self.send(outgoing, incoming, spoil)
            sums = {rank: [_checksum(pieces).view(torch.float32)] for rank, pieces in outgoing.items()}
            sent = {rank: [torch.zeros(SUM_WORDS)] for rank in incoming}
            self.send(sums, sent)
            wrong = [
                rank
                for rank, pieces in incoming.items()
                if not torch.equal(_checksum(pieces), sent[rank][0].view(torch.int64))
            ]
            told = torch.tensor([len(wrong)], device=self._wire)
            dist.all_reduce(told, group=self._group())
            if not told.item():
                return
        raise CopyFailed(f"parts of the optimizer's state were spoiled on their way {TRIES} times")

    def _run(self, operations: list[dist.P2POp]) -> None:
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()  # a connection that is shut down ends it, with an error
        self.check_alive()

    def check_alive(self) -> None:
        """What was received is believed only now: an aborted NCCL collective returns garbage and raises nothing. Raises
        :class:`CopyFailed` where the generation is over."""
        if self._wire.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._lost():
            raise CopyFailed("a member was lost while the state was sent")


def fill(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each of `values` into its place, all in one call."""
    modules.copy_all(into, values)


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


def _checksum(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksum of all pieces in this order (:func:`migrate.checksum`)."""
    total = torch.zeros(2, dtype=torch.int64)
    for number, piece in enumerate(pieces):
        total += (2 * number + 1) * checksum(piece)
    return total


def _spoiled(wire: torch.Tensor) -> torch.Tensor:
    """An injected fault: a few bits flip on the way."""
    damaged = wire.clone()
    damaged.view(torch.uint8)[damaged.numel() // 2] ^= 0x41
    return damaged
