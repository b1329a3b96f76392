"""The meshes of a rank's replica, on which a script shards a plain module; and the groups of a job without an agent.

In the world without peers a mesh has groups of its own, so that :class:`~.groups.Groups` learns their places. In each
generation it gets that generation's ranks and groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unicron_transition.generations.layout import Layout
from unicron_transition.seams import device_meshes, process_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Meshes:
    """The meshes of one rank. All are made when a script asks for the first one."""

    def __init__(self, layout: Layout, device: str):
        self._layout, self._device = layout, device
        self._made: dict[str, Any] = {}
        """By what a mesh is for, "parameters" or "context"; with its directions over all replicas if there are
        peers."""
        self._groups: dict[str, dist.ProcessGroup] = {}  # by name in a mesh, in the world without peers
        self._settled = False

    def mesh(self, direction: str) -> DeviceMesh:
        """Return the one-dimensional mesh of this rank's replica in a direction: "shard", "tensor" or "context".

        Raises
        ------
        ValueError
            If the ranks of the job are not whole replicas, or the layout has no such ranks, or is of Megatron's models.
        RuntimeError
            If no mesh was asked for before the session.
        """
        layout = self._layout
        if {"tensor": layout.tensor, "context": layout.context}.get(direction) == 1:
            raise ValueError(f"the layout has no {direction} ranks: write unicron.Layout({direction}=...)")
        if not self._made and self._settled:
            raise RuntimeError("unicron.shard_mesh() is for the model: call it before unicron.Session(...)")
        if not self._made:
            self._make("parameters")
            if layout.context > 1:
                self._make("context")
        made = self._made["context" if direction == "context" else "parameters"]
        found: DeviceMesh = made if made.ndim == 1 else made[direction]
        return found

    def settle_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups of the meshes in the world without peers, by name. No mesh can be made afterwards."""
        self._settled = True
        return dict(self._groups)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a distributed tensor is on one of these."""
        return any(device_meshes.is_on(tensor, made) for made in self._made.values())

    def _make(self, kind: str) -> None:
        self._made[kind] = made = device_meshes.make(self._device, *self._ranks_and_names(kind))
        if process_groups.without_peers():
            self._groups |= device_meshes.groups_of(made)

    def _ranks_and_names(self, kind: str) -> tuple[torch.Tensor, list[str]]:
        world, layout = dist.get_world_size(), self._layout
        if layout.size != layout.shard * layout.context * layout.tensor:
            raise ValueError(f"{layout.text} is a layout of Megatron's models, which make their groups themselves")
        if world % layout.size:
            text = layout.text or "F1"
            raise ValueError(f"{world} ranks are no whole replicas of {text}: start a multiple of {layout.size} ranks")
        replicas = world // layout.size
        if not process_groups.without_peers():
            return self._arrange(kind, range(world))
        replica, _ = layout.from_megatron_rank(dist.get_rank(), replicas)
        return self._own(kind, [layout.megatron_rank(replica, place, replicas) for place in range(layout.size)])

    def _arrange(self, kind: str, ranks: Sequence[int]) -> tuple[torch.Tensor, list[str]]:
        """Return the ranks of whole replicas in the order of the directions, and the names of the directions."""
        layout = self._layout
        grid = torch.tensor(ranks, dtype=torch.int).view(-1, layout.shard, layout.context, layout.tensor)
        if kind == "context":
            return grid.transpose(2, 3).reshape(-1, layout.context), ["others", "context"]
        grid = grid.reshape(-1, layout.shard * layout.context, layout.tensor)
        return (grid, ["replicas", "shard", "tensor"]) if layout.tensor > 1 else (grid[:, :, 0], ["replicas", "shard"])

    def _own(self, kind: str, ranks: Sequence[int]) -> tuple[torch.Tensor, list[str]]:
        """Return the same for this replica's ranks, by place."""
        grid, names = self._arrange(kind, ranks)
        return (grid, names) if kind == "context" else (grid[0], names[1:])

    def renew(self, ranks: Sequence[int], groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Give the meshes the groups of a generation, by their names in the meshes. ranks: of this replica, by
        place."""
        for kind, made in self._made.items():
            own = {name: groups[name] for name in device_meshes.names_of(made)}
            device_meshes.renew(made, self._own(kind, ranks)[0], own)


class WorldGroups:
    """The groups of a rank in a job without an agent, which has one world."""

    def __init__(self, layout: Layout):
        world, size = dist.get_world_size(), layout.size
        replicas = world // size
        mine, place = layout.from_megatron_rank(dist.get_rank(), replicas)
        self.replica: dist.ProcessGroup | None = None
        """The ranks of this rank's replica."""
        self.alike: dist.ProcessGroup | None = None
        """The ranks at this rank's place in all replicas."""
        for replica in range(replicas):  # every rank makes every group, as torch wants it
            group = dist.new_group([layout.megatron_rank(replica, each, replicas) for each in range(size)])
            self.replica = group if replica == mine else self.replica
        for each in range(size):
            group = dist.new_group([layout.megatron_rank(replica, each, replicas) for replica in range(replicas)])
            self.alike = group if each == place else self.alike
