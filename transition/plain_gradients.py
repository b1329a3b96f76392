"""Gradients of any torch module: they add up in flat buckets, which are reduced over the generation's world.

Each parameter's `grad` is a view of its bucket, so backward passes add to it in place. Every micro-batch weighs 1/total
whoever computes it; with a loss per token the sum is divided by the tokens of all micro-batches after the reduce. A
bucket ends with a mark for each parameter that some micro-batch has given a gradient: one that has none in the whole
job keeps None, as in a loop of torch alone, and the optimizer leaves it alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from transition.accumulation import Accumulation, Work
from transition.groups import UnsupportedLayout
from transition.ledger import Ledger

BUCKET_BYTES = 1 << 26  # a larger parameter has a bucket of its own
LOSS = "forward_step returns the mean loss of its micro-batch, or (sum of losses, tokens)"


class Bucket:
    """The gradients of some parameters, of one dtype and device, in one flat tensor."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self.parameters = list(parameters)
        count = sum(parameter.numel() for parameter in parameters)
        like = parameters[0]
        self.flat = torch.zeros(count + len(parameters), dtype=like.dtype, device=like.device)
        self.gradients, self._marks = self.flat[:count], self.flat[count:]
        pieces = self.gradients.split([parameter.numel() for parameter in parameters])
        self.views = [piece.view(each.shape) for piece, each in zip(pieces, parameters, strict=True)]

    def attach(self) -> None:
        """Have the backward pass add to this bucket."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def detached(self) -> Iterator[int]:
        """The parameters whose gradients are elsewhere, by number."""
        pairs = zip(self.parameters, self.views, strict=True)
        return (number for number, (parameter, view) in enumerate(pairs) if parameter.grad is not view)

    def mark(self, used: set[int]) -> None:
        """Before the reduce: `used` are the identities of the parameters that got a gradient here."""
        marks = [float(id(parameter) in used) for parameter in self.parameters]
        self._marks.copy_(torch.tensor(marks, dtype=self.flat.dtype))

    def release_unused(self) -> None:
        """After the reduce: who got no gradient anywhere has none."""
        for parameter, mark in zip(self.parameters, self._marks.tolist(), strict=True):
            if not mark:
                parameter.grad = None


def buckets(parameters: Iterable[torch.nn.Parameter], size: int = BUCKET_BYTES) -> list[Bucket]:
    """All of them, in buckets of at most `size` bytes, the same in every rank."""
    found: list[list[torch.nn.Parameter]] = []
    kinds = {parameter: (str(parameter.dtype), str(parameter.device)) for parameter in parameters}
    for _, alike in groupby(sorted(kinds, key=kinds.__getitem__), kinds.__getitem__):
        room = 0
        for parameter in alike:
            needed = parameter.numel() * parameter.element_size()
            if needed > room:
                found.append([])
                room = size
            found[-1].append(parameter)
            room -= needed
    return [Bucket(each) for each in found]


class PlainGradients(Accumulation):
    """Of one module. parameters: those that the optimizer trains, by name. scale: what multiplies a loss before its
    backward pass (a GradScaler's). forward_step: `forward_step(micro_batch, model)` -> the mean loss of the
    micro-batch, or (sum of losses, tokens), 0-d tensors."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: dict[str, torch.nn.Parameter],
        scale: Callable[[torch.Tensor], torch.Tensor],
        forward_step: Callable[..., Any],
        work: Work,
    ):
        super().__init__(work)
        self._model, self._scale, self._forward_step = model, scale, forward_step
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._buckets = buckets(parameters.values())
        self._used: set[int] = set()  # identities of the parameters that have a gradient in this rank
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._note_used)

    def _note_used(self, parameter: torch.Tensor) -> None:
        self._used.add(id(parameter))

    # ------------------------------------------------------------ computing
    def drop(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.attach()
        self._used.clear()
        self._snapshots.forget()
        self._whole = True

    def compute(self, ledger: Ledger) -> None:
        before = _versions(self._model)
        for index in ledger.todo():
            self._next()
            self._begin_forward(ledger, index)
            loss = self._loss(ledger, index, self._fetched(ledger.iteration, index))
            self._begin_backward()
            self._scale(loss).backward()
            self._end_backward(time.perf_counter())
            self._finished(ledger, [index])
        self._check_untouched(before)

    def _loss(self, ledger: Ledger, index: int, micro_batch: Any) -> torch.Tensor:
        """The forward pass of a micro-batch: its loss as it weighs in the gradient. The ledger notes it."""
        told = self._forward_step(micro_batch, self._model)
        loss, tokens = told if isinstance(told, tuple) and len(told) == 2 else (told, None)
        if not isinstance(loss, torch.Tensor) or loss.dim() or (tokens is not None and not _is_number(tokens)):
            raise TypeError(f"{LOSS}, 0-d tensors: this one returned {_shown(told)}")
        if any((ledger.tokens[done] is None) != (tokens is None) for done in ledger.done):
            raise TypeError(f"{LOSS}: the same of them for every micro-batch")
        ledger.losses[index], ledger.tokens[index] = loss.detach().clone(), tokens
        return loss if tokens is not None else loss / self.total

    def _check_untouched(self, before: dict[str, tuple[int, int]]) -> None:
        """Raises :class:`UnsupportedLayout` for a model or a script that does what would be trained wrongly."""
        changed = [name for name, version in _versions(self._model).items() if before.get(name) != version]
        if changed:
            raise UnsupportedLayout(
                f"unicron can't heal {changed[0]}: a buffer that a forward pass changes depends on who computes what. "
                "Use a layer without running statistics, or register it with persistent=False if it is a mere cache"
            )
        for bucket in self._buckets:
            for number in bucket.detached():
                raise UnsupportedLayout(
                    f"the gradient of {self._names[id(bucket.parameters[number])]} was replaced while it was computed: "
                    "leave zero_grad(), step() and .grad to the session"
                )

    # ------------------------------------------------------------ reducing
    def reduce(self, ledger: Ledger) -> None:
        for number, bucket in enumerate(self._buckets):
            bucket.mark(self._used)
            if self._work.healed:
                self._snapshots.take(number, bucket.flat)
            if dist.get_world_size() > 1:
                dist.all_reduce(bucket.flat)

    def proven(self, tokens: float) -> float:
        for bucket in self._buckets:
            if tokens:
                bucket.gradients /= tokens
            bucket.release_unused()
        return tokens or float(self.total)

    def restore(self) -> bool:
        undone = super().restore()
        for bucket in self._buckets:
            bucket.attach()
        return undone

    def _reduced(self) -> Iterator[torch.Tensor]:
        return (bucket.flat for bucket in self._buckets)


def _is_number(value: Any) -> bool:
    return not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that belong to the model's state, by name: the others are caches."""
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, buffer


def _versions(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """What changes whenever a buffer does."""
    return {name: (id(buffer), buffer._version) for name, buffer in persistent_buffers(model)}
