"""Passes of a module that `fully_shard` has sharded, broken off at each moment: `python broken_passes.py RANK FOLDER`,
for two ranks at the same time.

A module whose passes are broken off and another one, alike, whose are not, are trained side by side. Each line on
stdout is [kind, moments, what was wrong].
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from unicron_transition.seams import dtensors, fully_shard

WIDTH = 8
RECOVERIES = {"": 50, "checkpoint mixed grouped": 50}  # of which nothing stays in memory; 12 of other kinds
KINDS = {
    "usual": "",
    "checkpoint": "checkpoint",
    "mixed": "mixed",
    "gathered until the backward pass": "keep",
    "gathered after it": "after",
    "grouped": "grouped",
    "prefetched without waiting": "prefetch async",
    "gathered by the script": "unshard",
    "several passes before a reduce": "unsynced",
    "checkpoint, mixed and grouped": "checkpoint mixed grouped",
}


class Broken(Exception):
    """Stands for a collective that failed."""


class Moments:
    """Counts the moments of a pass, and breaks it off at one of them."""

    def __init__(self) -> None:
        self.count, self.at = 0, -1

    def begin(self, at: int = -1) -> None:
        self.count, self.at = 0, at

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Broken


moment = Moments()


def around(name: str) -> None:
    """A moment before each of these collectives."""
    real = getattr(dist, name)

    def replaced(*given, **named):
        moment()
        return real(*given, **named)

    setattr(dist, name, replaced)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = self.up(states)
        if found.requires_grad:  # `down` has its gradient by then, and `up` has none
            found.register_hook(lambda _: moment())
        return states + self.down(torch.tanh(found))


class Model(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.first(states)
        for block in self.blocks:
            states = checkpoint(block, states, use_reentrant=False) if "checkpoint" in self.kind else block(states)
        return states


class Trained:
    """A sharded module with gradients as a session's: views of one tensor."""

    def __init__(self, kind: str, mesh):
        torch.manual_seed(1)
        self.kind, self.model = kind, Model(kind)
        more = {"reshard_after_forward": "keep" not in kind}
        if "mixed" in kind:
            more["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks = list(self.model.blocks)
        for block in [blocks] if "grouped" in kind else blocks:
            fsdp.fully_shard(block, mesh=mesh, **more)
        fsdp.fully_shard(self.model, mesh=mesh, **more)
        self.sharded = dtensors.sharding_modules(self.model)
        if "after" in kind:
            self.model.set_reshard_after_backward(False)
        if "prefetch" in kind:
            for now, later in pairwise(blocks):
                now.set_modules_to_forward_prefetch([later])
                later.set_modules_to_backward_prefetch([now])
        if "async" in kind:
            self.model._set_unshard_async_op(True)
        self.parameters = list(self.model.parameters())
        self.views = [torch.zeros_like(dtensors.local(each)) for each in self.parameters]
        self.gradients = [fully_shard.gradient(*pair) for pair in zip(self.parameters, self.views, strict=True)]

    def run(self, seed: int) -> None:
        """One forward and backward pass, as a session runs them."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
        if "unshard" in self.kind:
            for block in self.model.blocks:
                block.unshard(async_op=True)
        loss = self.model(states).float().square().mean()
        fully_shard.sum_gradients(self.sharded)
        if "unsynced" in self.kind and seed % 2:
            self.model.set_requires_gradient_sync(False)
        loss.backward()

    def iterate(self, seed: int) -> list[torch.Tensor]:
        """Some passes and a step; return the gradients."""
        for view in self.views:
            view.zero_()
        for each in (2 * seed + 1, 2 * seed + 2):
            self.run(each)
        fully_shard.gather_anew(self.sharded)
        found = [view.clone() for view in self.views]
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=True):
                dtensors.local(parameter).sub_(view, alpha=0.1)
        return found

    def break_off(self, at: int, seed: int) -> None:
        moment.begin(at)
        try:
            self.run(seed)
        except Broken:
            pass
        finally:
            moment.begin()
        fully_shard.reset(self.model)


def live() -> int:
    """The bytes of all tensors."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            its = dtensors.local(each).untyped_storage()
            storages[its.data_ptr()] = its.nbytes()
    return sum(storages.values())


def wrong(kind: str, mesh) -> tuple[int, list[str]]:
    """Break a pass off at each moment; return how many there are, and what was wrong."""
    broken, whole, found = Trained(kind, mesh), Trained(kind, mesh), list[str]()
    moment.begin()
    broken.iterate(0), whole.iterate(0)
    moment.begin()
    broken.run(99)
    moments = moment.count
    fully_shard.reset(broken.model)
    for at in range(1, moments + 1):
        broken.run(97)  # a pass before it that was complete
        broken.break_off(at, 98 + at % 2)
        if any(now is not before for now, before in zip(broken.model.parameters(), broken.parameters, strict=True)):
            found.append(f"{at}: a whole parameter")
        if any(each.grad is not kept for each, kept in zip(broken.parameters, broken.gradients, strict=True)):
            found.append(f"{at}: another gradient")
        if not all(map(torch.equal, broken.iterate(at), whole.iterate(at))):
            found.append(f"{at}: a wrong gradient")
    before, recoveries = 0, RECOVERIES.get(kind, 12)
    for number in range(moments + recoveries):
        broken.break_off(1 + number % moments, number)
        if number == moments:
            broken.iterate(1), whole.iterate(1)
            before = live()
    broken.iterate(2), whole.iterate(2)
    if (after := live()) != before:
        found.append(f"{after - before} bytes more after {recoveries} recoveries")
    return moments, found


def main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    new = hasattr(dist, "all_gather_single")  # since torch 2.13
    around("all_gather_single" if new else "all_gather_into_tensor")
    around("reduce_scatter_single" if new else "reduce_scatter_tensor")
    mesh = init_device_mesh("cpu", (2,))
    for name, kind in KINDS.items():
        print(json.dumps([name, *wrong(kind, mesh)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2])
