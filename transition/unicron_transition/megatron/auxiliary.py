"""Auxiliary losses, of mixtures of experts and of multi-token prediction, and the biases of experts.

Megatron adds the gradients of auxiliary losses in the backward pass, times a scale that it sets in each forward pass:
one over the number of micro-batches of the schedule's call. Here every micro-batch has the same weight on every rank,
so the scale is set again when its backward pass begins. In an undisturbed run it is the same number.

The bias of an expert follows the number of tokens that the expert got in the whole iteration. These counts belong to
the gradient: they are dropped, kept and undone with it. The new biases take effect at the commit. The sums of
auxiliary losses that Megatron logs belong to the gradient as well: each micro-batch counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from unicron_transition.iteration.accumulation import DeferredChanges
from unicron_transition.seams import megatron_trackers

_SCALERS = (  # (module, class that adds an auxiliary loss's gradient, the setting that makes the model use it)
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "num_moe_experts"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler", "mtp_num_layers"),
)


class Auxiliary:
    """The auxiliary losses and biases of one rank's model chunks."""

    def __init__(self, model: Sequence[Any], config: Any, total: int, pending: DeferredChanges):
        self._config, self._pending = config, pending
        self.total = total  # micro-batches of the whole iteration
        self._scalers = [
            getattr(import_module(module), name) for module, name, setting in _SCALERS if getattr(config, setting, None)
        ]
        self._routers = [routers(chunk) for chunk in model]
        self._frozen: dict[int, list[torch.Tensor]] = {}  # chunk -> its counts without padding
        self._reduce_result: list[torch.Tensor] | None = None  # the counts before the reduce
        self._logged: dict[str, torch.Tensor] = {}  # what the log had when the iteration began
        self._muted: dict[str, torch.Tensor] | None = None  # what it had before a backward pass of padding
        self._settled = True  # no iteration has begun since the last commit
        for router in self._all:
            # In the model's precision, which Megatron uses, large counts are not exact.
            router.local_tokens_per_expert = router.local_tokens_per_expert.float()
            router.expert_bias.data = router.expert_bias.data.float()  # otherwise only in the first forward pass

    @property
    def _all(self) -> list[Any]:
        return [router for chunk in self._routers for router in chunk]

    def begin_iteration(self) -> None:
        """Begin an iteration: what the log has collected of those before stays in it."""
        if self._settled:
            self._logged = megatron_trackers.copies()
        self._settled = False

    # ------------------------------------------------------------ computing
    @contextlib.contextmanager
    def forward(self, chunk: int, real: bool) -> Iterator[None]:
        """Wrap the forward pass of a micro-batch; one that fails or is not real (padding) counts nothing."""
        self._unmute()
        before, logged = _counts(self._routers[chunk]), megatron_trackers.copies()
        try:
            yield
        except BaseException:
            real = False
            raise
        finally:
            if not real:
                _set_counts(self._routers[chunk], before)
                megatron_trackers.put_back(logged)

    def _unmute(self) -> None:
        if self._muted is not None:
            megatron_trackers.put_back(self._muted)
        self._muted = None

    def weigh(self, output: Any, chunk: int, real: bool) -> None:
        """Give the auxiliary losses of a forward pass with this output the weight of its loss."""
        if not self._scalers or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return

        def set_scale(_: torch.Tensor) -> None:
            scale = torch.ones(1, device=output.device)
            if self._config.grad_scale_func is not None:
                scale = self._config.grad_scale_func(scale)
            weight = 1.0 if self._config.calculate_per_token_loss else 1.0 / self.total
            for scaler in self._scalers:
                scaler.set_loss_scale(scale * (weight if real else 0.0))
            self._unmute()
            if not real:  # recomputed layers count in the backward pass
                self._muted = megatron_trackers.copies()
                self._frozen.setdefault(chunk, _counts(self._routers[chunk]))

        output.register_hook(set_scale)

    def end_schedule(self) -> None:
        """Restore the counts from before the padding: the schedule is over."""
        self._unmute()
        for chunk, counts in self._frozen.items():
            _set_counts(self._routers[chunk], counts)
        self._frozen.clear()

    def drop(self) -> None:
        self._frozen.clear()
        self._muted = None
        megatron_trackers.put_back(self._logged)
        self._reduce_result = None
        for router in self._all:
            router.local_tokens_per_expert.zero_()

    # ------------------------------------------------------------ reducing
    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Wrap Megatron's `finalize_model_grads`, which makes new biases from the counts."""
        all_routers = self._all
        self._reduce_result = _counts(all_routers)
        self._pending.add(self._settle_log)
        before = [router.expert_bias.clone() for router in all_routers]
        try:
            yield
        finally:
            after = [router.expert_bias.clone() for router in all_routers]
            _set_biases(all_routers, before)
        if all_routers:
            self._pending.add(lambda: _set_biases(all_routers, after))

    def _settle_log(self) -> None:
        self._settled = True

    def restore(self) -> None:
        """Restore this rank's own counts: the reduce is undone."""
        if self._reduce_result is not None:
            _set_counts(self._all, self._reduce_result)
        self._reduce_result = None


def routers(chunk: Any) -> list[Any]:
    """Return the routers of a model chunk whose experts have biases, in a fixed order."""
    modules = chunk.module.modules() if hasattr(chunk, "module") else ()
    return [module for module in modules if getattr(module, "expert_bias", None) is not None]


def biases(model: Sequence[Any]) -> list[list[float]]:
    """Return the biases of the experts, router by router; fp32 holds these numbers exactly."""
    return [router.expert_bias.tolist() for chunk in model for router in routers(chunk)]


def adopt_biases(model: Sequence[Any], saved: Sequence[Sequence[float]]) -> None:
    """Set the biases that :func:`biases` returned."""
    _set_biases([router for chunk in model for router in routers(chunk)], [torch.tensor(values) for values in saved])


def _counts(of: Sequence[Any]) -> list[torch.Tensor]:
    return [router.local_tokens_per_expert.clone() for router in of]


def _set_counts(of: Sequence[Any], counts: Sequence[torch.Tensor]) -> None:
    for router, count in zip(of, counts, strict=True):
        router.local_tokens_per_expert.copy_(count)


@torch.no_grad()
def _set_biases(of: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    for router, value in zip(of, values, strict=True):
        router.expert_bias.copy_(value)
