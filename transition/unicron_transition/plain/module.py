"""A plain `torch.nn.Module` and a `torch.optim.Optimizer` for a session; each rank is a whole replica, or `fully_shard`
has sharded the module over a replica's ranks. The optimizer and the schedule have the interfaces of Megatron's, so that
the session has one loop for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.generations.layout import Layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.iteration.accumulation import Work
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.iteration.rank_process import Process
from unicron_transition.plain.flat_gradients import PlainGradients
from unicron_transition.plain.supported_modules import check
from unicron_transition.plain.supported_sharding import check_sharding
from unicron_transition.seams import dtensors, fully_shard, modules
from unicron_transition.seams.table import UnsupportedLayout
from unicron_transition.snapshot.migrate import TrainingState, as_before, as_plain, can_be_told, transfer


class Plain:
    """A plain PyTorch module with its optimizer, as a session trains them."""

    varies = False  # the number of micro-batches is fixed: the buckets have room for their proof
    keeps_groups = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        clip_grad: float | None = None,
        scaler: Any = None,
    ):
        self._model, self._module = model, modules.original_module(model)
        self._scaler = scaler  # a torch.amp.GradScaler for fp16, or None
        self.chunks: Sequence[Any] = [SimpleNamespace(module=self._module)]
        self.optimizer = PlainOptimizer(optimizer, self._module, clip_grad, scaler)
        self.scheduler = PlainSchedule(scheduler, scaler) if scheduler is not None or scaler is not None else None

    def check(self, layout: Layout, meshes: Meshes) -> None:
        """Raise :class:`UnsupportedLayout` for the first thing that this release cannot heal. meshes: on which the
        module may be sharded."""
        check(self._module, self.optimizer.optimizer, self.scheduler)
        check_sharding(self._module, layout, meshes, self._scaler)

    def holders(self) -> list[Any]:
        """Return every object that may have a process group."""
        return [*self._module.modules(), self.optimizer.optimizer, *fully_shard.group_holders(self._module)]

    def state(self, seed: int) -> TrainingState:
        """Return the state that a newcomer needs."""
        return PlainState(self.chunks, self.optimizer, self.scheduler, seed)

    def gradients(self, forward_step: Any, work: Work) -> PlainGradients:
        """Return the gradients of this rank."""
        scale = self._scaler.scale if self._scaler is not None else lambda loss: loss
        return PlainGradients(self._model, self.optimizer.trained_parameters(), scale, forward_step, work)

    def adopt_exchange(self, exchange: Exchange, state: TrainingState, process: Process) -> None:
        """Use the groups of `exchange`. Without an agent give every rank the parameters of the first replica,
        like torch's DistributedDataParallel."""
        self.optimizer.note_replica(exchange.sum_inside, process.layout.size)
        group = exchange.data_parallel
        if process.channel is None and dist.get_world_size(group) > 1:
            transfer(state, 0, 0, dist.get_rank(group) > 0, process.device, group=group)


class PlainState(TrainingState):
    """The state of a plain model."""

    def model_tensors(self) -> Iterator[torch.Tensor]:
        for tree in self.trees:
            yield from map(dtensors.local, tree.parameters)
            yield from (dtensors.local(buffer) for _, buffer in tree.persistent_buffers)


class PlainOptimizer:
    """torch's optimizer with the interface of Megatron's. Its step comes after the commit, since it does not
    communicate; of a sharded module the norm of the gradients does, and comes before."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, clip_grad: float | None, scaler: Any):
        self.optimizer, self._module, self._scaler = optimizer, module, scaler
        self._tree = modules.ModuleTree(module)
        self._sharded = any(map(dtensors.is_distributed, self._tree.parameters))
        self._clip = clip_grad  # the largest norm of all gradients together, or None
        self._sum_inside: Callable[[float], float] = lambda number: number
        self._ranks = 1  # of the replica
        if scaler is not None:  # so that a rank without micro-batches has a scale, too
            device = next((each.device for group in optimizer.param_groups for each in group["params"]), None)
            scaler.scale(torch.zeros((), device=device))
        self._stepped = False
        self._trained_first: list[int] | None = None

    def note_replica(self, sum_inside: Callable[[float], float], ranks: int) -> None:
        """Note that a replica has so many ranks. sum_inside(number) returns its sum over the ranks of the replica."""
        self._sum_inside, self._ranks = sum_inside, ranks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return name -> parameter that it trains."""
        mine = {id(parameter) for parameters in self._groups() for parameter in parameters}
        named = self._module.named_parameters()
        return {name: each for name, each in named if id(each) in mine and each.requires_grad}

    def zero_grad(self) -> None:
        """Do nothing, because gradients are zeroed with their buckets. Raises :class:`UnsupportedLayout` if the trained
        parameters have changed, which a rank that joins later would not know."""
        now = [*(each.requires_grad for each in self._tree.parameters), *map(len, self._groups())]
        self._trained_first = self._trained_first or now
        if now != self._trained_first:
            raise UnsupportedLayout(
                "unicron can't heal a training whose trained parameters change (requires_grad, add_param_group): end "
                "it there, and go on from its checkpoint with a session of its own"
            )

    def _groups(self) -> list[list[torch.nn.Parameter]]:
        return [group["params"] for group in self.param_groups]

    def step(self) -> tuple[bool, float | None, None]:
        """Step, and return (whether the parameters have changed, the norm of all gradients, None)."""
        norm = self._clip_shards(self._clip) if self._clip is not None and self._sharded else None
        return self.step_with_ready_grads(norm)

    def step_with_ready_grads(self, norm: float | None = None) -> tuple[bool, float | None, None]:
        """Do the same without communication, after the commit. norm: of the gradients, if they are clipped already."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._clip is not None and norm is None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.trained_parameters().values(), self._clip))
        if self._sharded and not self._stepped:
            with fully_shard.no_communication(type(self.optimizer).__name__):
                succeeded = self._step()
        else:
            succeeded = self._step()
        if not self._stepped and succeeded:
            self._stepped = True
            self._check_state()
        return succeeded, norm, None

    def _clip_shards(self, most: float) -> float:
        """Clip the gradients as `clip_grad_norm_` does, and return their norm. The squares are summed over the ranks of
        the replica, of which several may have the same part."""
        found = [each for each in self.trained_parameters().values() if each.grad is not None]
        squares = 0.0
        for copies, alike in groupby(sorted(found, key=self._copies), self._copies):
            part = torch.nn.utils.get_total_norm([dtensors.local(each.grad) for each in alike])
            squares += float(part) ** 2 / copies
        norm = math.sqrt(self._sum_inside(squares))
        factor = most / (norm + 1e-6)
        if not factor >= 1:  # also for NaN, as torch does
            for each in found:
                dtensors.local(each.grad).mul_(factor)
        return norm

    def _copies(self, parameter: torch.Tensor) -> int:
        """Return how many ranks of the replica have the same part of it."""
        return self._ranks // dtensors.parts_of(parameter)

    def _step(self) -> bool:
        """Step, by the scaler if there is one. On an overflow, which all ranks see, it reduces its scale instead."""
        if self._scaler is None:
            self.optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= before)

    def _check_state(self) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) and not can_be_told(value):
                    raise UnsupportedLayout(
                        f"unicron can't heal {type(self.optimizer).__name__}: its state {key} is a "
                        f"{type(value).__name__}, and should be a tensor or a number"
                    )


class PlainSchedule:
    """torch's schedule of the learning rate and the gradient scaler, whose states are kept together."""

    def __init__(self, scheduler: Any, scaler: Any):
        self.scheduler = scheduler  # one of torch.optim.lr_scheduler, stepped after each iteration, or None
        self._parts = {"schedule": scheduler, "scaler": scaler}

    def step(self, increment: int) -> None:
        """Step the schedule after the optimizer."""
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, object]:
        return {name: as_plain(part.state_dict()) for name, part in self._parts.items() if part is not None}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, object]]) -> None:
        for name, part in self._parts.items():
            if part is not None and name in saved:
                mine = part.state_dict()
                part.load_state_dict({key: as_before(mine.get(key), value) for key, value in saved[name].items()})
