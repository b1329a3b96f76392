"""State migration: a newcomer gets the training state from a data-parallel replica's memory (paper section 5, nearest
principle).

One rank sends, the newcomers receive, and all members compare checksums, so that a replica that had silently diverged
is found too. The header is MessagePack; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import torch
import torch.distributed as dist


class StateMismatch(RuntimeError):
    """The members do not hold the same training state after a transfer."""


class TrainingState:
    """What one rank must hold to go on: parameters, optimizer state, learning-rate schedule, random-number state,
    iteration."""

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any):
        self.model, self.optimizer, self.scheduler = list(model), optimizer, scheduler

    def _inner_optimizers(self) -> list[Any]:
        outer = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [getattr(optimizer, "optimizer", optimizer) for optimizer in outer]

    def _groups(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for inner in self._inner_optimizers():
            for group in inner.param_groups:
                yield inner, group

    def header(self, iteration: int) -> bytes:
        """Everything that is not a big tensor, and the layout of the tensors that follow."""
        groups = [{key: value for key, value in group.items() if key != "params"} for _, group in self._groups()]
        layout = [
            [self._layout(inner.state.get(parameter, {})) for parameter in group["params"]]
            for inner, group in self._groups()
        ]
        return msgpack.packb(
            {
                "iteration": iteration,
                "groups": groups,
                "layout": layout,
                "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
                "rng": torch.get_rng_state().numpy().tobytes(),
                "trackers": {
                    name: state.cpu().numpy().tobytes() for name, state in _rng_tracker().get_states().items()
                },
            }
        )

    @staticmethod
    def _layout(state: dict[str, Any]) -> dict[str, Any]:
        """Key -> [dtype, shape, device type] for tensors, or the plain value."""
        return {
            key: [str(value.dtype), list(value.shape), value.device.type] if isinstance(value, torch.Tensor) else value
            for key, value in sorted(state.items())
        }

    def adopt(self, header: bytes) -> int:
        """Apply a peer's header and make room for its tensors; returns the iteration to go on with. Raises
        StateMismatch."""
        data = msgpack.unpackb(header, strict_map_key=False)
        mine = list(self._groups())
        if len(mine) != len(data["groups"]):
            raise StateMismatch(
                f"the peer's optimizer has {len(data['groups'])} parameter groups, this one {len(mine)}: start "
                "the same script on all nodes"
            )
        for (inner, group), values, layouts in zip(mine, data["groups"], data["layout"], strict=True):
            group.update(
                {key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in values.items()}
            )
            for parameter, layout in zip(group["params"], layouts, strict=True):
                inner.state[parameter] = {key: _room(value, parameter) for key, value in layout.items()}
        if self.scheduler is not None:
            self.scheduler.load_state_dict(data["scheduler"])
        torch.set_rng_state(torch.frombuffer(bytearray(data["rng"]), dtype=torch.uint8))
        states = {
            name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in data["trackers"].items()
        }
        if states:
            _rng_tracker().set_states(states)
        return int(data["iteration"])

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the state in a fixed order: model, main parameters where they differ, optimizer state."""
        seen = set()
        for chunk in self.model:
            for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]:
                seen.add(tensor.data_ptr())
                yield tensor.data
        for inner, group in self._groups():
            for parameter in group["params"]:
                if parameter.data_ptr() not in seen:
                    yield parameter.data
                state = inner.state.get(parameter, {})
                yield from (state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))


def _rng_tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _room(value: Any, parameter: torch.Tensor) -> Any:
    if not (isinstance(value, list) and len(value) == 3 and str(value[0]).startswith("torch.")):
        return value
    dtype, shape, device = value
    return torch.empty(
        shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=parameter.device if device != "cpu" else "cpu"
    )


def transfer(state: TrainingState, iteration: int, source: int, newcomer: bool, device: torch.device) -> int:
    """Collective over the world: rank `source` sends, newcomers receive; returns the iteration to go on with.

    Raises :class:`StateMismatch` when the members differ afterwards, RuntimeError when a peer is lost meanwhile.
    """
    am_source = dist.get_rank() == source
    header = _broadcast_bytes(state.header(iteration) if am_source else None, source, device)
    if newcomer and not am_source:
        iteration = state.adopt(header)
    keep = newcomer or am_source
    sums = []
    for tensor in state.tensors():
        wire = tensor if keep and tensor.device.type == device.type else tensor.to(device, copy=True)
        dist.broadcast(wire, source)
        if newcomer and wire is not tensor:
            tensor.copy_(wire)
        sums.append(_checksum(tensor))
    _compare(torch.stack(sums).to(device))
    return iteration


def _broadcast_bytes(data: bytes | None, source: int, device: torch.device) -> bytes:
    size = torch.tensor([len(data or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    wire = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if data is not None:
        wire.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(wire, source)
    return wire.cpu().numpy().tobytes()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Two 64-bit sums over the raw bytes, the second weighted by position so that a permutation shows. Shape (2,),
    int64."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32).to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
    return torch.stack([words.sum(), (words * weights).sum()]).cpu()


def _compare(sums: torch.Tensor) -> None:
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    differing = int((low != high).any(dim=1).sum())
    if differing:
        raise StateMismatch(f"{differing} of {len(sums)} tensors differ between the members after the state transfer")
