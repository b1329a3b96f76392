"""What a world of ranks without a session has in common of what lies in its nodes' memory, and how each rank gets its
part (docs/design/memory.md, "For scripts without a session").

One rank of each node tells all others what is there; from then on all compute the same. What comes from another node is
sent from rank to rank, the sources spread over those that have it, and compared with its checksums where it arrives. A
part that does not arrive as it was written comes from its next source; where there is none all take an older state.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
import torch.distributed as dist

from unicron.transition.iteration.rank_log import say
from unicron.transition.snapshot import contents
from unicron.transition.snapshot.images import FOLDER, SAME, USER, BadImage, folder, inventory, look
from unicron.transition.snapshot.migrate import PIECE

_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
_SUMS = struct.Struct("<qq")
_NOTHING = -1  # the length of what could not be read

Content = tuple[bytes, torch.Tensor]  # head and data of a sound image


class Choice(NamedTuple):
    """A state that could be taken, in the order in which it is: the newest first, replicated rather than not."""

    iteration: int
    replicated: bool
    base: int


class There(NamedTuple):
    """An image in a node's memory. node: the lowest rank there; size: of the world that saved it, place: the rank."""

    node: int
    name: str
    choice: Choice
    place: int
    size: int


class Way(NamedTuple):
    """How a rank gets its part: `sender` reads it in its node."""

    image: There
    sender: int


class World(NamedTuple):
    """Where this process is in the world that its agent has made. folder: None where its node has no memory."""

    folder: Path | None
    rank: int
    size: int
    local: int
    per_node: int

    @classmethod
    def here(cls) -> World | None:
        """None without an agent: then none of its world has one.

        An agent that has no memory for its ranks says so by an empty name. They are a part of their world all the same:
        other nodes may have some, and their ranks wait for all in what is collective.
        """
        if FOLDER not in os.environ:
            return None
        memory = folder()
        if memory is not None and "UNICRON_AGENT" in os.environ:
            raise RuntimeError("unicron.Session keeps the training state by itself: take unicron.memory out")
        numbers = [int(os.environ.get(name, default)) for name, default in _VARIABLES]
        return cls(memory, *numbers)

    @property
    def device(self) -> torch.device:
        """Where collectives want their tensors."""
        nccl = self.size > 1 and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @property
    def node(self) -> int:
        """The lowest rank of this node."""
        return self.rank - self.local

    # ------------------------------------------------------------ what there is
    def everything(self) -> list[There]:
        """Collective: all that lies in the memory of the world's nodes, the same list in all ranks."""
        mine = []
        for key, name in ((each.key, each.path.name) for each in self._lists()):
            same = key.mark == SAME
            mine.append([self.node, name, [key.iteration, same, key.base], key.place, key.size])
        told = [msgpack.unpackb(each) for each in self._all_tell(msgpack.packb(mine))]
        return [There(node, name, Choice(*choice), *rest) for its in told for node, name, choice, *rest in its]

    def _lists(self) -> Iterator[Any]:
        if self.local == 0 and self.folder is not None:
            yield from (each for each in inventory(self.folder) if each.key.kind == USER)

    def _all_tell(self, mine: bytes) -> list[bytes]:
        """What each rank has to say, in all ranks."""
        if self.size == 1:
            return [mine]
        lengths = [each[0] for each in self._all_say([len(mine)])]
        data = torch.zeros(max(lengths), dtype=torch.uint8)
        data[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        every = [torch.empty_like(data, device=self.device) for _ in lengths]
        dist.all_gather(every, data.to(self.device))
        return [bytes(each.cpu().numpy()[:length]) for each, length in zip(every, lengths, strict=True)]

    def _all_say(self, mine: Sequence[int]) -> list[list[int]]:
        """The numbers that each rank says, in all ranks."""
        if self.size == 1:
            return [list(mine)]
        said = torch.tensor(mine, dtype=torch.int64, device=self.device)
        every = [torch.empty_like(said) for _ in range(self.size)]
        dist.all_gather(every, said)
        return [each.tolist() for each in every]

    def _read(self, name: str) -> Content | None:
        """An image of this node that is as it was written; it is said of another."""
        if self.folder is None:
            return None
        try:
            return contents.read(look(self.folder / name))
        except (BadImage, OSError) as error:
            say(f"passed over in memory: {error}")
            return None

    # ------------------------------------------------------------ the same for all
    def shared(self, images: Collection[There]) -> Content | None:
        """Collective: a replicated state, from the first rank that has it sound; None where no rank has."""
        mine = next((one for each in images if each.node == self.node and (one := self._read(each.name))), None)
        if self.size == 1:
            return mine
        has = [bool(good) for (good,) in self._all_say([int(mine is not None)])]
        if all(has):
            return mine
        for first in (rank for rank, good in enumerate(has) if good):
            front = self._all_say(_front(mine if self.rank == first else None).tolist())[first]
            head, data = (self._from(first, mine, part, front[2 * part]) for part in range(2))
            got = mine if mine is not None else _sound(bytes(head.numpy()), data, front, first)
            if all(good for (good,) in self._all_say([int(got is not None)])):
                return got
        return None

    def _from(self, first: int, mine: Content | None, part: int, count: int) -> torch.Tensor:
        """Head or data of rank `first`, in the ranks that have nothing of their own."""
        data = torch.empty(count if mine is None else 0, dtype=torch.uint8)
        given = _flat(mine[part]) if mine is not None and self.rank == first else None
        for at in range(0, count, PIECE):
            length = min(PIECE, count - at)
            sent = torch.empty(length, dtype=torch.uint8) if given is None else given[at : at + length]
            sent = sent.to(self.device)
            dist.broadcast(sent, first)
            if mine is None:
                data[at : at + length].copy_(sent)
        return data

    # ------------------------------------------------------------ to each its own
    def own(self, images: Collection[There]) -> Content | None:
        """Collective: the part of each rank; None in all of them where one cannot be had sound."""
        left = set(images)
        while (ways := self.ways(left)) is not None:
            got = self._brought(ways)
            arrived = self._all_say([int(got is not None)])
            failed = [rank for rank, (good,) in enumerate(arrived) if not good]
            if not failed:
                return got
            left -= {ways[rank].image for rank in failed}
        return None

    def ways(self, images: Collection[There]) -> list[Way] | None:
        """By rank: from its own node if it is there, else from the node that gives least so far, whose ranks take
        turns; None where a rank's part is nowhere. The same in all ranks."""
        given: Counter[int] = Counter()
        by_place: dict[int, list[There]] = defaultdict(list)
        for each in images:
            if each.size == self.size:
                by_place[each.place].append(each)
        found = []
        for rank in range(self.size):
            able = by_place[rank]
            here = rank // self.per_node * self.per_node
            if not able:
                return None
            best = min(able, key=lambda each: (each.node != here, given[each.node], each))
            sender = rank
            if best.node != here:
                sender = best.node + given[best.node] % self.per_node
                given[best.node] += 1
            found.append(Way(best, sender))
        return found

    def _brought(self, ways: Sequence[Way]) -> Content | None:
        """This rank's part, sound, after giving others what they have from this one."""
        mine = ways[self.rank]
        to = {rank: self._read(way.image.name) for rank, way in enumerate(ways) if way.sender == self.rank != rank}
        if mine.sender == self.rank:
            self._exchange(to, None)
            return self._read(mine.image.name)
        return self._exchange(to, mine.sender)

    def _exchange(self, outgoing: dict[int, Content | None], source: int | None) -> Content | None:
        """Gives, and gets from `source`, if there is one, what arrives as it was written."""
        fronts = {rank: _front(content) for rank, content in outgoing.items()}
        front = torch.zeros(5, dtype=torch.int64)
        self._swap(fronts, {} if source is None else {source: front})
        parts = {rank: content for rank, content in outgoing.items() if content is not None}
        heads = {rank: _flat(head) for rank, (head, _) in parts.items()}
        length, _, size, *_ = told = front.tolist()
        if source is None or length == _NOTHING:
            source = None
        head, data = (torch.empty(0 if source is None else count, dtype=torch.uint8) for count in (length, size))
        self._swap(heads, {} if source is None else {source: head})
        self._swap({rank: data for rank, (_, data) in parts.items()}, {} if source is None else {source: data})
        return None if source is None else _sound(bytes(head.numpy()), data, told, source)

    def _swap(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Flat tensors to and from other ranks, a piece of each at a time: so both sides of a pair are in step."""
        longest = max((each.numel() for each in (*outgoing.values(), *incoming.values())), default=0)
        for at in range(0, longest, PIECE):
            operations, landing = [], []
            for rank, into in incoming.items():
                if (piece := into[at : at + PIECE]).numel():
                    landing.append((piece, piece.to(self.device)))  # itself, in the host's memory
                    operations.append(dist.P2POp(dist.irecv, landing[-1][1], rank))
            for rank, data in outgoing.items():
                if (piece := data[at : at + PIECE]).numel():
                    operations.append(dist.P2POp(dist.isend, piece.to(self.device), rank))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for piece, came in landing:
                if came is not piece:
                    piece.copy_(came)


def _flat(data: bytes | torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data


def _front(content: Content | None) -> torch.Tensor:
    """Lengths and checksums of what follows: head and its CRC, data and their two sums."""
    if content is None:
        return torch.tensor([_NOTHING, 0, 0, 0, 0])
    head, data = content
    return torch.tensor([len(head), zlib.crc32(head), data.numel(), *_SUMS.unpack(contents.sums(data))])


def _sound(head: bytes, data: torch.Tensor, front: Sequence[int], source: int) -> Content | None:
    """What has come from another rank, if it is what was sent."""
    _, crc, _, *sums = front
    if zlib.crc32(head) == crc and contents.sums(data) == _SUMS.pack(*sums):
        return head, data
    say(f"what rank {source} has sent of the state in its node's memory was spoiled on its way")
    return None


def choices(images: Collection[There], size: int) -> list[Choice]:
    """What a world of `size` ranks can take, in the order in which it is to."""
    parts: dict[Choice, set[int]] = {}
    for each in images:
        if each.choice.replicated or each.size == size:
            parts.setdefault(each.choice, set()).add(each.place)
    found = [choice for choice, places in parts.items() if choice.replicated or len(places) == size]
    return sorted(found, reverse=True)
