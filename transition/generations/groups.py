"""Process groups of a generation: build, tear down, and re-point Megatron's cached handles to the new ones.

What Megatron's groups are is learned once, in the world in which the rank prepared itself, as coordinates: over all
replicas or inside one, and over which places. From then on only the rank's own groups are built, equal ones once, and
those inside a replica that stays as it is are kept.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unicron.transition.generations.abort import Aborter
from unicron.transition.generations.connecting import interruptible
from unicron.transition.generations.layout import Layout, replica_of
from unicron.transition.generations.time_limits import COLLECTIVE_TIMEOUT
from unicron.transition.generations.unblock import Unblocker

ENTER_TIMEOUT = 20.0  # seconds for one group to connect
BOUNDARY_TIMEOUT = 24 * 3600.0  # seconds that a newcomer waits for the others to reach an iteration boundary
CONNECT_SECONDS = 0.5
WORLD = "WORLD"
_world = distributed_c10d._world


class UnsupportedLayout(RuntimeError):
    """The job's parallel layout cannot be healed by this release."""


def refuse(findings: Iterable[str]) -> None:
    """Raises :class:`UnsupportedLayout` for the first one."""
    for found in findings:
        raise UnsupportedLayout(f"unicron can't heal {found}; or run the job with --no-unicron")


def collective_timeout() -> datetime.timedelta:
    """UNICRON_COLLECTIVE_TIMEOUT in seconds, default 30 minutes."""
    return datetime.timedelta(seconds=float(os.environ.get("UNICRON_COLLECTIVE_TIMEOUT", COLLECTIVE_TIMEOUT)))


def connect_store(address: str, prefix: str, lost: Callable[[], bool]) -> Any:
    """The rendezvous store of one generation: keys under `prefix`, at `address` (host:port).

    torch retries a refused connection deaf to everything, so the port is tried first; raises ConnectionError once
    `lost()`, or after ENTER_TIMEOUT.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + ENTER_TIMEOUT
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as tried:
                host = tried.getpeername()[0]  # of a name's addresses the one that answers
            break
        except OSError as error:
            if lost() or time.monotonic() > deadline:
                raise ConnectionError(f"the rendezvous store {address} is gone: {error}") from None
            time.sleep(0.05)
    store = dist.TCPStore(host, int(port), None, False, timeout=datetime.timedelta(seconds=ENTER_TIMEOUT))
    return dist.PrefixStore(prefix, store)


def wait_for_members(store: Any) -> None:
    """A newcomer waits here until a member has reached the boundary. Its socket can be shut down to end the wait."""
    store.wait(["open"], datetime.timedelta(seconds=BOUNDARY_TIMEOUT))


def open_to_newcomers(store: Any) -> None:
    """A member is at the boundary: from now on everybody connects, within ENTER_TIMEOUT."""
    store.set("open", "1")


def init_world(backend: str, store: Any, rank: int, size: int) -> None:
    """`init_process_group` on `store`, quick to give up while it connects, patient once it is there."""
    hook = sys.excepthook
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=ENTER_TIMEOUT)
    )
    sys.excepthook = hook  # torch wraps it once more each time: a traceback would get a prefix for every generation


@dataclass(frozen=True)
class Role:
    """The ranks of one of Megatron's groups: of these places, in this rank's replica or in all."""

    whole: bool
    places: tuple[int, ...]
    backend: str | None = None

    def ranks(self, layout: Layout, replica: int, replicas: int) -> list[int]:
        """In a world of so many replicas, seen from a rank of this one."""
        within = range(replicas) if self.whole else (replica,)
        return sorted(layout.megatron_rank(one, place, replicas) for one in within for place in self.places)


class Groups:
    """The groups of one rank, from generation to generation.

    To be made in the world in which the rank prepared itself (:mod:`generations.preparing`), when Megatron's groups are
    there. Raises :class:`UnsupportedLayout` for a group that is part of the replicas only.
    """

    def __init__(self, layout: Layout, unblocker: Unblocker, aborter: Aborter):
        self.layout, self._unblocker, self._aborter = layout, unblocker, aborter
        self._replicas = dist.get_world_size() // layout.size
        self._roles = {WORLD: Role(True, tuple(range(layout.size)))}
        self._lists: dict[str, Role] = {}
        for name, value in vars(megatron("parallel_state")).items():
            if name.startswith("_") and isinstance(value, dist.ProcessGroup):
                kind = "gloo" if name.endswith("_GLOO") else None
                self._roles[name] = self._role(name, dist.get_process_group_ranks(value), kind)
            elif name.endswith(("_RANKS", "_RANKS_WITH_CP")) and value:
                self._lists[name] = self._role(name, value)
        self._kept: dict[tuple[Any, ...], Any] = {}  # (backend, slots, own) -> group inside the present replica
        self._pointers: list[tuple[Any, Any, str]] = []  # (container, key, role)

    def _role(self, name: str, ranks: Sequence[int], backend: str | None = None) -> Role:
        found = [self.layout.from_megatron_rank(rank, self._replicas) for rank in ranks]
        within, places = {replica for replica, _ in found}, tuple(sorted({place for _, place in found}))
        if len(within) not in (1, self._replicas) or len(found) != len(within) * len(places):
            raise UnsupportedLayout(
                f"unicron can't heal a group of part of the replicas ({name}): no expert parallelism"
            )
        return Role(len(within) > 1, places, backend)

    # ------------------------------------------------------------ a generation
    def build(self, backend: str, store: Any, members: Sequence[int], slot: int, lost: Callable[[], bool]) -> None:
        """The world, and this rank's groups, of a generation whose members are these, replica by replica; the old ones
        are torn down. Raises ConnectionError or RuntimeError when a member does not connect, at once when `lost()`."""
        layout, count = self.layout, len(members) // self.layout.size
        replica = replica_of(members, layout.size, slot)
        me = layout.megatron_rank(replica, slot % layout.size, count)
        with interruptible(lost):
            init_world(backend, store, me, len(members))
            self._remember_kept(members, replica, count)
            self._connect_roles(backend, members, me, replica, count)
        be_patient()

    def _connect_roles(self, backend: str, members: Sequence[int], me: int, replica: int, count: int) -> None:
        parallel_state = megatron("parallel_state")
        made: dict[tuple[Any, ...], Any] = {}
        roles: dict[str, Any] = {}
        ranks_of = cache(
            lambda whole, places: Role(whole, places).ranks(self.layout, replica, count)
        )  # many have the same
        for name, role in sorted(self._roles.items()):
            ranks, kind = ranks_of(role.whole, role.places), role.backend or backend
            # With one replica both may have the same ranks: what a Break cuts is never what a schedule goes over.
            key = (role.whole, kind, *ranks)
            if role.whole and kind == backend and len(ranks) == len(members):
                made[key] = dist.group.WORLD
            elif key not in made:
                inside = not role.whole
                made[key] = self._inside(name, kind, ranks, me, members) if inside else connect(name, kind, ranks, me)
            roles[name] = made[key]
            if name != WORLD:
                setattr(parallel_state, name, made[key])
        for name, role in self._lists.items():
            setattr(parallel_state, name, list(ranks_of(role.whole, role.places)))
        pipeline = self._roles.get("_PIPELINE_MODEL_PARALLEL_GROUP")
        if pipeline is not None and len(pipeline.places) == 2:
            ranks = ranks_of(pipeline.whole, pipeline.places)
            send_back_over(self._inside("way back", backend, ranks, me, members, own="way back"))
        for container, key, name in self._pointers:
            container[key] = roles[name]

    def _inside(self, name: str, kind: str, ranks: list[int], me: int, members: Sequence[int], own: str = "") -> Any:
        """A group inside the replica, kept from the last generation or new; `own` where equal ones are not to share
        it."""
        size = self.layout.size
        found = (self.layout.from_megatron_rank(rank, len(members) // size) for rank in ranks)
        slots = tuple(members[replica * size + place] for replica, place in found)
        if (kind, slots, own) not in self._kept:
            with self._unblocker.inside():
                self._kept[kind, slots, own] = group = connect(name, kind, ranks, me)
            self._aborter.inside.add(group)
        return self._kept[kind, slots, own]

    def _remember_kept(self, members: Sequence[int], replica: int, count: int) -> None:
        """torch's registry forgot all groups with the world: those that live on have other ranks now."""
        size = self.layout.size
        by_slot = {
            slot: self.layout.megatron_rank(replica, place, count)
            for place, slot in enumerate(members[replica * size : (replica + 1) * size])
        }
        for (kind, slots, _), group in self._kept.items():
            _register(group, kind, {by_slot[slot]: number for number, slot in enumerate(slots)})

    def tear_down(self, keep: bool = False) -> None:
        """End all groups, but not those inside the replica if they are to be kept. Errors of connections that are
        already broken are expected."""
        kept = set(map(id, self._kept.values())) if keep else set()
        for group in [group for group in _world.pg_map if id(group) in kept]:
            for registry in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
                registry.pop(group, None)
        tear_down()
        self._aborter.forget()
        if not keep:
            self._kept = {}
            self._aborter.inside.clear()

    # ------------------------------------------------------------ who holds groups
    def note_holders(self, holders: Iterable[Any]) -> int:
        """Finds every attribute of the holders that has one of Megatron's groups, in the world in which the rank
        prepared itself, where each role has a group of its own; returns how many there are.

        Raises :class:`UnsupportedLayout` for a group that has no role, since a collective on it would hang.
        """
        parallel_state = megatron("parallel_state")
        collection = getattr(megatron("process_groups_config"), "ProcessGroupCollection", ())
        by_identity = {id(getattr(parallel_state, name)): name for name in self._roles if name != WORLD}
        by_identity[id(dist.group.WORLD)] = WORLD
        seen: set[int] = set()

        def note(owner: Any, container: Any, key: Any, group: Any) -> None:
            if id(group) not in by_identity:
                raise UnsupportedLayout(
                    f"{type(owner).__name__}.{key} holds a process group that unicron does not know how to rebuild"
                )
            self._pointers.append((container, key, by_identity[id(group)]))

        def visit(owner: Any) -> None:
            attributes = getattr(owner, "__dict__", None)
            if attributes is None or id(owner) in seen:
                return
            seen.add(id(owner))
            for name, value in list(attributes.items()):
                if isinstance(value, dist.ProcessGroup):
                    note(owner, attributes, name, value)
                elif isinstance(value, collection):
                    visit(value)
                elif isinstance(value, list) and value and all(isinstance(item, dist.ProcessGroup) for item in value):
                    for index, item in enumerate(value):
                        note(owner, value, index, item)

        for holder in holders:
            visit(holder)
        return len(self._pointers)


def megatron(module: str) -> Any:
    """A module of Megatron-core; an empty one where the script does not use it."""
    return sys.modules.get(f"megatron.core.{module}") or SimpleNamespace()


def connect(name: str, backend: str, ranks: list[int], me: int) -> Any:
    """A group of these ranks of the world, which they alone have to make. torch's own names for such groups go by how
    many each rank has made before, so they are given here."""
    store = _world.pg_map[_default()][1]
    limit = datetime.timedelta(seconds=ENTER_TIMEOUT)
    named = distributed_c10d.GroupName(f"{name}.{'.'.join(map(str, ranks[:8]))}")
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks), ranks.index(me), ranks, distributed_c10d.Backend(backend), store, named, timeout=limit
    )
    _world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def _default() -> dist.ProcessGroup:
    return distributed_c10d._get_default_group()


def _register(group: Any, backend: str, numbers: dict[int, int]) -> None:
    """Tell torch of a group that outlived its world. Its name tells it from all that are made later."""
    _world.pg_map[group] = (backend, _world.pg_map[_default()][1])
    _world.pg_names[group] = distributed_c10d.GroupName(f"kept.{id(group)}")
    _world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
    _world.pg_group_ranks[group] = dict(sorted(numbers.items(), key=lambda item: item[1]))


def send_back_over(way: Any) -> None:
    """With two stages Megatron sends one direction of the pipeline over the world (`p2p_communication._p2p_ops`), whose
    connections the loss of any member breaks. It is to take this group instead."""
    from megatron.core.pipeline_parallel import p2p_communication

    class Distributed:
        """`torch.distributed` with another world."""

        group = SimpleNamespace(WORLD=way)

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

    original = getattr(p2p_communication._p2p_ops, "unicron_original", p2p_communication._p2p_ops)
    scope = {**vars(p2p_communication), "torch": SimpleNamespace(distributed=Distributed(), Tensor=torch.Tensor)}
    patched = FunctionType(original.__code__, scope, original.__name__, original.__defaults__, original.__closure__)
    patched.__kwdefaults__ = original.__kwdefaults__
    patched.unicron_original = original  # type: ignore[attr-defined]
    p2p_communication._p2p_ops = patched


def be_patient() -> None:
    """Give every group of the generation the time-out of training."""
    for group in list(_world.pg_map):
        distributed_c10d._set_pg_timeout(collective_timeout(), group)


def tear_down() -> None:
    """End all groups that torch knows. Errors of connections that are already broken are expected."""
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
    # torch counts groups to name their keys in the store, and forgets to start over when the world failed to connect.
    _world.group_count = 0


def group_holders(model: Sequence[Any], optimizer: Any) -> list[Any]:
    """Every Megatron object that caches process groups: DDP, its modules and the token dispatchers of experts,
    buffers, bucket groups, and the optimizers."""
    holders: list[Any] = []
    for chunk in model:
        modules = list(chunk.module.modules())
        dispatchers = [module.token_dispatcher for module in modules if hasattr(module, "token_dispatcher")]
        holders += [chunk, *modules, *dispatchers, *buffers(chunk), *bucket_groups(chunk)]
    return [*holders, optimizer, *getattr(optimizer, "chained_optimizers", [])]


def buffers(chunk: Any) -> list[Any]:
    """The gradient buffers of one DDP model chunk."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def bucket_groups(chunk: Any) -> list[Any]:
    """The bucket groups (units of the gradient reduce) of one DDP model chunk."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
