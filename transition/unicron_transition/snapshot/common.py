"""Finds the states that all ranks of a world without a session have in their nodes' memory, and gives each rank its
part (docs/design/memory.md, "For scripts without a session").

One rank of each node lists its images for all others, and then all compute the same choice. Parts from other nodes are
sent from rank to rank, spread over the ranks that have them, and compared with their digests on arrival. A damaged part
is taken from the next source. Without one, all ranks take an older state.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgpack
import torch
import torch.distributed as dist

from unicron_transition.iteration.rank_log import warn
from unicron_transition.snapshot import contents, tensor_transfer
from unicron_transition.snapshot.image_format import FOLDER, SAME, USER, BadImage, inventory, memory_folder, read_page

_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
_NOTHING = [0, 0]  # the lengths of an image that could not be read
_ANY = -1  # in place of a rank: all ranks saved the same

Content = tuple[bytes, torch.Tensor]  # head and data of a sound image


class Choice(NamedTuple):
    """A state that could be taken. In order of preference: the newest, then a replicated one."""

    iteration: int
    replicated: bool
    base: int


class There(NamedTuple):
    """An image in a node's memory."""

    node: int
    """The lowest rank of the node."""
    name: str
    choice: Choice
    place: int
    """The rank that saved it."""
    size: int
    """The size of its world."""


class Way(NamedTuple):
    """The source of a rank's part."""

    image: There
    sender: int
    """The rank that reads the image in its node."""


class World(NamedTuple):
    """The place of this process in its agent's world."""

    folder: Path | None
    """None if its node has no memory."""
    rank: int
    size: int
    local: int
    per_node: int

    @classmethod
    def here(cls) -> World | None:
        """Return the world of this process, None without an agent.

        An agent without memory sets an empty name. Its ranks are part of the world all the same: other nodes can have
        memory, and their ranks wait for all ranks in collectives.
        """
        if FOLDER not in os.environ:
            return None
        memory = memory_folder()
        if memory is not None and "UNICRON_AGENT" in os.environ:
            raise RuntimeError("unicron.Session keeps the training state by itself: take unicron.memory out")
        numbers = [int(os.environ.get(name, default)) for name, default in _VARIABLES]
        return cls(memory, *numbers)

    @property
    def device(self) -> torch.device:
        """The device of the tensors of collectives."""
        nccl = self.size > 1 and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @property
    def node(self) -> int:
        """The lowest rank of this node."""
        return self.rank - self.local

    # ------------------------------------------------------------ what there is
    def everything(self) -> list[There]:
        """Collective: list all images in the memory of the world's nodes, the same in all ranks."""
        mine = []
        for found in inventory(self.folder) if self.local == 0 and self.folder is not None else ():
            if (key := found.key).kind == USER:
                choice = [key.iteration, key.mark == SAME, key.base]
                mine.append([self.node, found.path.name, choice, key.place, key.size])
        lists = [msgpack.unpackb(each) for each in self._gather_bytes(msgpack.packb(mine))]
        return [There(node, name, Choice(*choice), *rest) for its in lists for node, name, choice, *rest in its]

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Collective: return the bytes of each rank."""
        if self.size == 1:
            return [mine]
        lengths = tensor_transfer.gather(len(mine), self.device)
        data = torch.zeros(max(lengths), dtype=torch.uint8)
        data[: len(mine)] = tensor_transfer.as_tensor(mine)
        every = [torch.empty_like(data, device=self.device) for _ in lengths]
        dist.all_gather(every, data.to(self.device))
        return [bytes(each.cpu().numpy()[:length]) for each, length in zip(every, lengths, strict=True)]

    def _read(self, name: str) -> Content | None:
        """Read an image of this node; None, with a line, if it is damaged."""
        if self.folder is None:
            return None
        try:
            return contents.read(read_page(self.folder / name))
        except (BadImage, OSError) as error:
            warn(f"training state in memory passed over: {error}")
            return None

    # ------------------------------------------------------------ to each its own
    def fetch(self, images: Collection[There]) -> Content | None:
        """Collective: return this rank's part of a state, or the state itself if it is replicated; None in all ranks if
        one of them cannot get it undamaged."""
        left = set(images)
        while (ways := self.ways(left)) is not None:
            content = self._transfer(ways)
            arrived = tensor_transfer.gather(int(content is not None), self.device) if self.size > 1 else [content]
            failed = [rank for rank, good in enumerate(arrived) if not good]
            if not failed:
                return content
            left -= {ways[rank].image for rank in failed}
        return None

    def ways(self, images: Collection[There]) -> list[Way] | None:
        """Return the source of each rank: its own node if possible, otherwise the node that gives least so far, whose
        ranks take turns. None if a part is nowhere. The same in all ranks."""
        given: Counter[int] = Counter()
        by_place: dict[int, list[There]] = defaultdict(list)
        for each in images:
            if each.choice.replicated:
                by_place[_ANY].append(each)
            elif each.size == self.size:
                by_place[each.place].append(each)
        found = []
        for rank in range(self.size):
            able = by_place[_ANY] or by_place[rank]
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

    def _transfer(self, ways: Sequence[Way]) -> Content | None:
        """Give other ranks their parts from this node, and return this rank's part, None if it is damaged."""
        mine = ways[self.rank]
        to = {rank: way.image.name for rank, way in enumerate(ways) if way.sender == self.rank != rank}
        given = {name: self._read(name) for name in set(to.values())}
        outgoing = {rank: given[name] for rank, name in to.items()}
        if mine.sender == self.rank:
            self._exchange(outgoing, None)
            return self._read(mine.image.name)
        return self._exchange(outgoing, mine.sender)

    def _exchange(self, outgoing: dict[int, Content | None], source: int | None) -> Content | None:
        """Send parts, and receive one from `source`, if any; None if it is damaged."""
        lengths = torch.tensor(_NOTHING)
        sizes = {rank: [torch.tensor(_lengths(content))] for rank, content in outgoing.items()}
        tensor_transfer.send(sizes, {} if source is None else {source: [lengths]}, self.device)
        head, data = (torch.empty(length, dtype=torch.uint8) for length in lengths.tolist())
        incoming = {source: [head, data]} if source is not None and head.numel() else {}
        as_tensor = tensor_transfer.as_tensor
        given = {rank: [as_tensor(found[0]), found[1]] for rank, found in outgoing.items() if found is not None}
        if tensor_transfer.send_checked(given, incoming, self.device):
            warn(f"the state that rank {source} sent from its node's memory was damaged on its way")
            return None
        return (bytes(head.numpy()), data) if incoming else None


def _lengths(content: Content | None) -> list[int]:
    """Return the lengths of head and data in bytes."""
    return _NOTHING if content is None else [len(content[0]), content[1].numel()]


def choices(images: Collection[There], size: int) -> list[Choice]:
    """List the states that a world of `size` ranks can take, the best first."""
    parts: dict[Choice, set[int]] = {}
    for each in images:
        if each.choice.replicated or each.size == size:
            parts.setdefault(each.choice, set()).add(each.place)
    found = [choice for choice, places in parts.items() if choice.replicated or len(places) == size]
    return sorted(found, reverse=True)
