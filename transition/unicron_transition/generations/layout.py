"""The job's layout. A replica is the ranks that hold one copy of the model; a rank's place is its position in the
replica (docs/design/generations.md). Pure and without torch, because the controller uses it too.

A slot's place is fixed: `slot % size`, tensor fastest, then context, then lane, then pipeline. Ranks of one *lane*
compute the same micro-batches; a replica has several lanes if its parameters are sharded or its experts are shared, and
all of them compute at the same time. A slot's *home* replica is `slot // size`, but after losses a replica may be
composed of slots from different homes. Members of a generation are listed replica by replica: `members[d * size : (d +
1) * size]` is data-parallel replica d in the order of its places, and the member with place 0 is its *head*.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple


class Coordinate(NamedTuple):
    """A place by its parallel ranks."""

    tensor: int
    context: int
    pipeline: int


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a replica.

    Raises
    ------
    ValueError
        For a number below 1.

    Examples
    --------
    >>> layout = unicron.Layout(tensor=2, pipeline=4)
    >>> layout.size, layout.text
    (8, 'TP2 PP4')
    >>> unicron.Layout(shard=2).text
    'F2'
    """

    tensor: int = 1
    """Ranks that share a replica's tensors."""
    context: int = 1
    """Ranks that share its sequences."""
    pipeline: int = 1
    """Ranks that share its layers."""
    shard: int = 1
    """Ranks over which `fully_shard` shards a module's parameters, each with micro-batches of its own."""
    expert: int = 1
    """Data-parallel ranks that share Megatron's experts, each with micro-batches of its own."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.context, self.pipeline, self.shard, self.expert) < 1:
            raise ValueError(f"a layout has at least one rank in each direction, not {self}")

    @property
    def size(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.context * self.lanes * self.pipeline

    @property
    def lanes(self) -> int:
        """Micro-batches that a replica computes at the same time."""
        return self.shard * self.expert

    @property
    def text(self) -> str:
        """The layout in words, "TP2 PP2"; empty if each rank is a replica."""
        named = (
            ("TP", self.tensor),
            ("CP", self.context),
            ("F", self.shard),
            ("EP", self.expert),
            ("PP", self.pipeline),
        )
        return " ".join(f"{name}{count}" for name, count in named if count > 1)

    def place(self, tensor: int = 0, context: int = 0, pipeline: int = 0, lane: int = 0) -> int:
        """Return the place, 0 to size - 1, of the rank with these parallel ranks."""
        return tensor + self.tensor * (context + self.context * (lane + self.lanes * pipeline))

    def coordinate(self, place: int) -> Coordinate:
        """Return the parallel ranks of a place; with :meth:`lane` the inverse of :meth:`place`."""
        rest, tensor = divmod(place, self.tensor)
        rest, context = divmod(rest, self.context)
        return Coordinate(tensor, context, rest // self.lanes)

    def lane(self, place: int) -> int:
        """Return the lane of a place, 0 to lanes - 1."""
        return place // (self.tensor * self.context) % self.lanes

    def megatron_rank(self, replica: int, place: int, replicas: int) -> int:
        """Return the rank's number in Megatron-core's order "tp-cp-ep-dp-pp" (`parallel_state.RankGenerator`)."""
        tensor, context, pipeline = self.coordinate(place)
        data = self.lanes * replica + self.lane(place)
        return tensor + self.tensor * (context + self.context * (data + self.lanes * replicas * pipeline))

    def from_megatron_rank(self, rank: int, replicas: int) -> tuple[int, int]:
        """Return (replica, place): the inverse of :meth:`megatron_rank`."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, lane = divmod(rest, self.lanes)
        pipeline, replica = divmod(rest, replicas)
        return replica, self.place(tensor, context, pipeline, lane)


class StatedLayout(NamedTuple):
    """A layout in the form in which a user states it for a job."""

    layout: Layout
    virtual: int = 1
    """Pipeline stages of each rank."""

    @property
    def text(self) -> str:
        """The layout as :func:`parse_layout` reads it: "TP2 PP2 VPP2"; "TP1" if each rank is a replica."""
        virtual = f" VPP{self.virtual}" if self.virtual > 1 else ""
        return (self.layout.text or "TP1") + virtual


def parse_layout(text: str) -> StatedLayout:
    """Parse a layout such as "TP2 PP2", "PP4 VPP2" or "TP2 F4". Raises ValueError, one line."""
    sizes: dict[str, int] = {}
    for word in text.split():
        match = re.fullmatch(r"(TP|PP|VPP|F)([1-9]\d{0,4})", word)
        if match is None or match[1] in sizes:
            problem = "is no part of a layout" if match is None else "is one too many"
            raise ValueError(f'{word} {problem}: write it like "TP2 PP2 VPP2" or "TP2 F4"')
        sizes[match[1]] = int(match[2])
    if not sizes:
        raise ValueError('a layout is missing: write it like "TP2 PP2" or "F4"')
    stated = StatedLayout(Layout(sizes.get("TP", 1), 1, sizes.get("PP", 1), sizes.get("F", 1)), sizes.get("VPP", 1))
    if stated.virtual > 1 and stated.layout.pipeline == 1:
        raise ValueError(f"{text}: VPP needs PP2 or more")
    return stated


@lru_cache(maxsize=64)
def lanes_of(text: str) -> int:
    """Return the lanes of a layout that :attr:`Layout.text` has written. 1 for any other text."""
    words = (re.fullmatch(r"(F|EP)([1-9]\d{0,4})", word) for word in text.split())
    return math.prod(int(word[2]) for word in words if word is not None)


def replicas(members: Sequence[int], size: int) -> list[list[int]]:
    """Return the slots of each replica, in the order of their places. Raises ValueError for an incomplete replica."""
    if len(members) % size:
        raise ValueError(f"{len(members)} members are no multiple of a replica's {size} ranks")
    return [list(members[first : first + size]) for first in range(0, len(members), size)]


def heads(members: Sequence[int], size: int) -> list[int]:
    """Return the slot of each replica's head."""
    return list(members[::size])


def heads_of(members: Sequence[int], size: int) -> dict[int, int]:
    """Return member -> slot of its replica's head."""
    return {slot: members[index - index % size] for index, slot in enumerate(members)}


def replica_of(members: Sequence[int], size: int, slot: int) -> int:
    """Return the data-parallel rank of a member. Raises ValueError for a slot that is not a member."""
    return members.index(slot) // size


def compose(slots: Iterable[int], size: int) -> tuple[list[list[int]], list[int]]:
    """Compose (complete replicas, slots left over): complete home replicas first, then replicas of mixed slots.

    Mixed replicas take from the fullest homes first, so that as many ranks as possible stay beside each other.
    """
    homes: dict[int, list[int]] = {}
    for slot in sorted(slots):
        homes.setdefault(slot // size, []).append(slot)
    complete = [own for own in homes.values() if len(own) == size]
    partial = sorted((own for own in homes.values() if len(own) < size), key=lambda own: (-len(own), own[0]))
    places: list[list[int]] = [[] for _ in range(size)]
    for slot in chain.from_iterable(partial):
        places[slot % size].append(slot)
    count = min(len(place) for place in places)
    mixed = [[place[number] for place in places] for number in range(count)]
    return complete + mixed, sorted(chain.from_iterable(place[count:] for place in places))


def arrange(complete: Iterable[list[int]]) -> list[int]:
    """Return the members of a generation with these replicas, in the order of their heads."""
    return list(chain.from_iterable(sorted(complete)))


def deal(total: int, replicas: int, replica: int, lanes: int = 1, shares: Sequence[int] = ()) -> list[int]:
    """Return the undisturbed assignment, which needs no message: replicas take turns, `lanes` micro-batches each.
    shares: rounds of each replica, which leaves out its turns after that; empty if all have equally many. Raises
    ValueError for shares that are not all rounds."""
    if not shares:
        rounds: Sequence[int] = range(replica, -(-total // lanes), replicas)
    elif len(shares) != replicas or sum(shares) != -(-total // lanes):
        raise ValueError(f"{total} micro-batches in rounds of {lanes} are not {sum(shares)} of {len(shares)} replicas")
    else:
        rounds = _turns(tuple(shares))[replica]
    return [index for one in rounds for index in range(one * lanes, min((one + 1) * lanes, total))]


@lru_cache(maxsize=4)
def _turns(shares: tuple[int, ...]) -> list[list[int]]:
    """Return the rounds of each replica."""
    found: list[list[int]] = [[] for _ in shares]
    left, number = list(range(len(shares))), 0
    while left := [replica for replica in left if len(found[replica]) < shares[replica]]:
        for replica in left:
            found[replica].append(number)
            number += 1
    return found
