"""Builds and tears down the process groups of a generation, and re-points cached handles of Megatron and of
`fully_shard` to the new ones.

A rank learns the groups of its model once, in the world in which it prepared itself, as coordinates: over all replicas
or inside one, and over which places. From then on it builds only its own groups, one for each set of ranks. Groups
inside a replica that does not change are kept.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from unicron_detector.tcp_sockets import tcp_sockets
from unicron_transition.generations import member_links
from unicron_transition.generations.layout import Layout, replica_of
from unicron_transition.generations.member_links import MemberLinks
from unicron_transition.generations.meshes import Meshes
from unicron_transition.generations.time_limits import COLLECTIVE_TIMEOUT
from unicron_transition.generations.unblock import Unblocker
from unicron_transition.seams import megatron_core, process_groups
from unicron_transition.seams.gloo import abandonable_connections
from unicron_transition.seams.nccl import Aborter
from unicron_transition.seams.table import UnsupportedLayout

ENTER_TIMEOUT = 20.0  # seconds for one group to connect
BOUNDARY_TIMEOUT = 24 * 3600.0  # seconds that a newcomer waits for the others to reach an iteration boundary
ENTERING = datetime.timedelta(seconds=ENTER_TIMEOUT)
CONNECT_SECONDS = 0.5
WORLD = "WORLD"
# In the order of names after Megatron's, whose groups of the same ranks they share: a group has its first role's name.
ALIKE = "alike"
REPLICA = "replica"


def collective_timeout() -> datetime.timedelta:
    """Return UNICRON_COLLECTIVE_TIMEOUT, which is in seconds; by default 30 minutes."""
    return datetime.timedelta(seconds=float(os.environ.get("UNICRON_COLLECTIVE_TIMEOUT", COLLECTIVE_TIMEOUT)))


def connect_store(address: str, prefix: str, lost: Callable[[], bool]) -> Any:
    """Connect to the rendezvous store at `address` (host:port), for the generation whose keys are under `prefix`.

    The port is tried first, since torch's own retries cannot be interrupted. Raises ConnectionError once `lost()`, or
    after ENTER_TIMEOUT.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + ENTER_TIMEOUT
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as probe:
                host = probe.getpeername()[0]  # a name may have several addresses: the one that answers
            break
        except OSError as error:
            if lost() or time.monotonic() > deadline:
                raise ConnectionError(f"the rendezvous store {address} is gone: {error}") from None
            time.sleep(0.05)
    store = dist.TCPStore(host, int(port), None, False, timeout=ENTERING)
    return dist.PrefixStore(prefix, store)


def wait_for_members(store: Any) -> None:
    """Wait, as a newcomer, until a member has reached the boundary; shutting down the store's socket ends the wait."""
    store.wait(["open"], datetime.timedelta(seconds=BOUNDARY_TIMEOUT))


def open_to_newcomers(store: Any) -> None:
    """Tell newcomers that a member is at the boundary: all ranks connect now, within ENTER_TIMEOUT."""
    store.set("open", "1")


@dataclass(frozen=True)
class Role:
    """The ranks of one of the model's groups."""

    whole: bool  # of all replicas, otherwise of this one
    places: tuple[int, ...]  # their places in a replica
    backend: str | None = None

    def ranks(self, layout: Layout, replica: int, replicas: int) -> list[int]:
        """Return the ranks of this group, seen from a rank of `replica` in a world of `replicas`."""
        within = range(replicas) if self.whole else (replica,)
        return sorted(layout.megatron_rank(one, place, replicas) for one in within for place in self.places)


class Groups:
    """The groups of one rank, from generation to generation.

    It is made in the world in which the rank prepared itself (:func:`init_without_peers`), after Megatron has made its
    groups. Raises :class:`UnsupportedLayout` for a group that spans only some of the replicas.
    """

    def __init__(self, layout: Layout, unblocker: Unblocker, aborter: Aborter, meshes: Meshes, place: int = 0):
        self.layout, self._unblocker, self._aborter, self._meshes = layout, unblocker, aborter, meshes
        self._replicas = dist.get_world_size() // layout.size
        self._roles = {WORLD: Role(True, tuple(range(layout.size)))}
        if layout.size > 1:
            self._roles |= {ALIKE: Role(True, (place,)), REPLICA: Role(False, tuple(range(layout.size)))}
        self._of_meshes = {f"mesh.{name}": group for name, group in meshes.settle_groups().items()}
        for name, group in self._of_meshes.items():
            self._roles[name] = self._role(name, dist.get_process_group_ranks(group))
        self._lists: dict[str, Role] = {}
        for name, group in megatron_core.parallel_groups().items():
            kind = "gloo" if name.endswith("_GLOO") else None
            self._roles[name] = self._role(name, dist.get_process_group_ranks(group), kind)
        for name, ranks in megatron_core.rank_lists().items():
            self._lists[name] = self._role(name, ranks)
        self._kept: dict[tuple[Any, ...], Any] = {}  # (backend, slots, own) -> group inside the present replica
        self._pointers: list[tuple[Any, Any, str]] = []  # (container, key, role)
        self._asking: list[Any] = []  # optimizers that ask all ranks something in their first step
        self.links: MemberLinks | None = None  # among all members
        self.alike: dist.ProcessGroup | None = None
        """The ranks at this rank's place in all replicas; None if each rank is a replica."""
        self.replica: dist.ProcessGroup | None = None
        """The ranks of this rank's replica; likewise."""
        self._all_tell: Callable[[], bool] = lambda: False

    def all_tell(self) -> bool:
        """Whether all members are of a release that can refuse a commit: to be asked after a collective of all."""
        return self._all_tell()

    def _role(self, name: str, ranks: Sequence[int], backend: str | None = None) -> Role:
        pairs = [self.layout.from_megatron_rank(rank, self._replicas) for rank in ranks]
        within, places = {replica for replica, _ in pairs}, tuple(sorted({place for _, place in pairs}))
        if len(within) not in (1, self._replicas) or len(pairs) != len(within) * len(places):
            raise UnsupportedLayout(
                f"unicron can't heal a group of part of the replicas ({name}): no expert parallelism"
            )
        return Role(len(within) > 1, places, backend)

    # ------------------------------------------------------------ a generation
    def build(self, backend: str, store: Any, members: Sequence[int], slot: int, lost: Callable[[], bool]) -> None:
        """Build the world and this rank's groups for a generation with these members, replica by replica, after the old
        groups have been torn down. Raises ConnectionError or RuntimeError if a member does not connect, at once if
        `lost()`."""
        layout, count = self.layout, len(members) // self.layout.size
        replica = replica_of(members, layout.size, slot)
        me = layout.megatron_rank(replica, slot % layout.size, count)
        limit, before = collective_timeout(), set(tcp_sockets())
        member_links.announce(store, backend)
        self._all_tell = cache(lambda: member_links.all_tell(store, len(members)))
        with abandonable_connections(lost):
            process_groups.init_world(backend, store, me, len(members), ENTERING)
            if backend == "gloo":
                seconds = limit.total_seconds()
                self.links = member_links.connect(store, me, len(members), lost, before, seconds)
            self._register_kept(members, replica, count)
            self._connect_roles(backend, members, me, replica, count)
        process_groups.set_timeouts(limit)

    def _connect_roles(self, backend: str, members: Sequence[int], me: int, replica: int, count: int) -> None:
        made: dict[tuple[Any, ...], Any] = {}
        roles: dict[str, dist.ProcessGroup] = {}
        ranks_of = cache(lambda whole, places: Role(whole, places).ranks(self.layout, replica, count))  # many share
        for name, role in sorted(self._roles.items()):
            ranks, kind = ranks_of(role.whole, role.places), role.backend or backend
            # With one replica both may have the same ranks, but a Break must not cut the connections of a schedule.
            key = (role.whole, kind, *ranks)
            if role.whole and kind == backend and len(ranks) == len(members):
                made[key] = dist.group.WORLD
            elif key not in made:
                made[key] = (
                    process_groups.connect(name, kind, ranks, me, ENTERING)
                    if role.whole
                    else self._connect_inside(name, kind, ranks, me, members)
                )
            roles[name] = made[key]
        lists = {name: list(ranks_of(role.whole, role.places)) for name, role in self._lists.items()}
        self.alike, self.replica = roles.get(ALIKE), roles.get(REPLICA)
        own = {*self._of_meshes, WORLD, ALIKE, REPLICA}
        megatron_core.set_parallel_state({name: group for name, group in roles.items() if name not in own} | lists)
        within = [self.layout.megatron_rank(replica, place, count) for place in range(self.layout.size)]
        self._meshes.renew(within, {name.removeprefix("mesh."): roles[name] for name in self._of_meshes})
        pipeline = self._roles.get("_PIPELINE_MODEL_PARALLEL_GROUP")
        if pipeline is not None and len(pipeline.places) == 2:
            ranks = ranks_of(pipeline.whole, pipeline.places)
            megatron_core.send_back_over(self._connect_inside("way back", backend, ranks, me, members, own="way back"))
        for container, key, name in self._pointers:
            container[key] = roles[name]
        megatron_core.ask_anew(self._asking)

    def _connect_inside(
        self, name: str, kind: str, ranks: list[int], me: int, members: Sequence[int], own: str = ""
    ) -> Any:
        """Return a group inside the replica, kept from the last generation or new. own: a name for a group that must
        not be shared with others of the same ranks."""
        size = self.layout.size
        pairs = (self.layout.from_megatron_rank(rank, len(members) // size) for rank in ranks)
        slots = tuple(members[replica * size + place] for replica, place in pairs)
        if (kind, slots, own) not in self._kept:
            with self._unblocker.inside():
                self._kept[kind, slots, own] = group = process_groups.connect(name, kind, ranks, me, ENTERING)
            self._aborter.inside.add(group)
        return self._kept[kind, slots, own]

    def _register_kept(self, members: Sequence[int], replica: int, count: int) -> None:
        """Register the kept groups: torch forgot them with the world, and their ranks have new numbers."""
        size = self.layout.size
        by_slot = {
            slot: self.layout.megatron_rank(replica, place, count)
            for place, slot in enumerate(members[replica * size : (replica + 1) * size])
        }
        for (kind, slots, _), group in self._kept.items():
            process_groups.register(group, kind, {by_slot[slot]: number for number, slot in enumerate(slots)})

    def tear_down(self, keep: bool = False) -> None:
        """End all groups, except those inside the replica if `keep`. Errors of broken connections are expected."""
        if keep:
            process_groups.forget(self._kept.values())
        process_groups.tear_down()
        if self.links is not None:
            self.links.close()
            self.links = None
        self._aborter.forget_aborted()
        if not keep:
            self._kept = {}
            self._aborter.inside.clear()

    # ------------------------------------------------------------ who holds groups
    def note_holders(self, holders: Iterable[Any]) -> int:
        """Note every attribute of the holders that has one of the model's groups, and return their number.

        To be called in the world in which the rank prepared itself, where each role has a group of its own. Raises
        :class:`UnsupportedLayout` for a group without a role, since a collective on it would hang.
        """
        known = megatron_core.parallel_groups() | self._of_meshes | {WORLD: dist.group.WORLD}
        roles = {id(group): name for name, group in known.items()}
        holders = list(holders)
        self._asking += megatron_core.asking_once(holders)
        for owner, container, key, group in megatron_core.held_groups(holders):
            if id(group) not in roles:
                raise UnsupportedLayout(
                    f"{type(owner).__name__}.{key} holds a process group that unicron does not know how to rebuild"
                )
            self._pointers.append((container, key, roles[id(group)]))
        return len(self._pointers)


# ---------------------------------------------------------------- the world without peers
def init_without_peers(layout: Layout, slot: int) -> None:
    """Initialize torch.distributed as the rank of this slot, in a world with all the job's coordinates and no peers.

    The world is as large as the job can become: UNICRON_MAX_RANKS. The collectives of torch's `fake` backend return at
    once. So Megatron builds the part of the model that belongs to this rank's place, and the optimizer's smallest
    shard, before any peer is there.
    """
    ranks = int(os.environ.get("UNICRON_MAX_RANKS", "0"))
    most = max(ranks // layout.size, slot // layout.size + 1)  # replicas
    rank = layout.megatron_rank(slot // layout.size, slot % layout.size, most)
    process_groups.init_without_peers(rank, most * layout.size)
