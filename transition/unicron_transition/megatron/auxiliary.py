"""Auxiliary losses, of mixtures of experts and of multi-token prediction, and the biases of experts.

Megatron adds the gradients of auxiliary losses in the backward pass, times a scale that it sets in each forward pass:
one over the number of micro-batches of the schedule's call. Here every micro-batch weighs the same whoever computes it,
so the scale is set anew when its backward pass begins. It is the same number in an undisturbed run.

The bias of an expert follows how many tokens it was given in the whole iteration. These counts belong to the gradient:
they are dropped, kept and undone with it. The new biases are taken up at the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from unicron_transition.iteration.accumulation import DeferredChanges

_SCALERS = (  # (module, class) of what adds an auxiliary loss's gradient, and the setting that has the model use it
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "num_moe_experts"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler", "mtp_num_layers"),
)


class Auxiliary:
    """The auxiliary losses and biases of one rank's model chunks. total: micro-batches of an iteration, over all
    ranks."""

    def __init__(self, model: Sequence[Any], config: Any, total: int, pending: DeferredChanges):
        self._config, self.total, self._pending = config, total, pending
        self._scalers = [
            getattr(import_module(module), name) for module, name, setting in _SCALERS if getattr(config, setting, None)
        ]
        self._routers = [routers(chunk) for chunk in model]
        self._frozen: dict[int, list[torch.Tensor]] = {}  # chunk -> its counts without what is computed once more
        self._reduced: list[torch.Tensor] | None = None  # the counts before the reduce
        for router in self._all:
            # In the model's precision, as Megatron makes them, large counts are not exact.
            router.local_tokens_per_expert = router.local_tokens_per_expert.float()
            router.expert_bias.data = router.expert_bias.data.float()  # else not before the first forward pass

    @property
    def _all(self) -> list[Any]:
        return [router for chunk in self._routers for router in chunk]

    # ------------------------------------------------------------ computing
    @contextlib.contextmanager
    def forward(self, chunk: int, real: bool) -> Iterator[None]:
        """Wrap the forward pass of a micro-batch; one that is not real, or fails, counts nothing."""
        before = _counts(self._routers[chunk])
        try:
            yield
        except BaseException:
            real = False
            raise
        finally:
            if not real:
                _set_counts(self._routers[chunk], before)

    def weigh(self, output: Any, chunk: int, real: bool) -> None:
        """Let the auxiliary losses of a forward pass weigh as its loss does. output: its output."""
        if not self._scalers or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return

        def set_scale(_: torch.Tensor) -> None:
            scale = torch.ones(1, device=output.device)
            if self._config.grad_scale_func is not None:
                scale = self._config.grad_scale_func(scale)
            weight = 1.0 if self._config.calculate_per_token_loss else 1.0 / self.total
            for scaler in self._scalers:
                scaler.set_loss_scale(scale * (weight if real else 0.0))
            if not real and chunk not in self._frozen:  # recomputed layers count in the backward pass
                self._frozen[chunk] = _counts(self._routers[chunk])

        output.register_hook(set_scale)

    def end_schedule(self) -> None:
        """Put the counts of padding back: the schedule is over."""
        for chunk, counts in self._frozen.items():
            _set_counts(self._routers[chunk], counts)
        self._frozen.clear()

    def drop(self) -> None:
        """Drop all counts."""
        self._frozen.clear()
        self._reduced = None
        for router in self._all:
            router.local_tokens_per_expert.zero_()

    # ------------------------------------------------------------ reducing
    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Wrap Megatron's `finalize_model_grads`, which makes new biases of the counts."""
        found = self._all
        self._reduced = _counts(found)
        before = [router.expert_bias.clone() for router in found]
        try:
            yield
        finally:
            after = [router.expert_bias.clone() for router in found]
            for router, bias in zip(found, before, strict=True):
                router.expert_bias.copy_(bias)
        if found:
            self._pending.add(lambda: _set_biases(found, after))

    def restore(self) -> None:
        """Put this rank's own counts back: the reduce is undone."""
        if self._reduced is not None:
            _set_counts(self._all, self._reduced)
        self._reduced = None


def routers(chunk: Any) -> list[Any]:
    """Return the routers of a model chunk whose experts have biases, in a fixed order."""
    modules = chunk.module.modules() if hasattr(chunk, "module") else ()
    return [module for module in modules if getattr(module, "expert_bias", None) is not None]


def biases(model: Sequence[Any]) -> list[list[float]]:
    """Return the biases of the experts, router by router; in fp32, which these numbers keep exactly."""
    return [router.expert_bias.tolist() for chunk in model for router in routers(chunk)]


def adopt_biases(model: Sequence[Any], saved: Sequence[Sequence[float]]) -> None:
    """Take up such biases."""
    found = [router for chunk in model for router in routers(chunk)]
    _set_biases(found, [torch.tensor(values) for values in saved])


def _counts(found: Sequence[Any]) -> list[torch.Tensor]:
    return [router.local_tokens_per_expert.clone() for router in found]


def _set_counts(found: Sequence[Any], counts: Sequence[torch.Tensor]) -> None:
    for router, count in zip(found, counts, strict=True):
        router.local_tokens_per_expert.copy_(count)


@torch.no_grad()
def _set_biases(found: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    for router, value in zip(found, values, strict=True):
        router.expert_bias.copy_(value)
