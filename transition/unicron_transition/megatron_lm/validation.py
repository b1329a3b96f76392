"""Megatron-LM's evaluation: the session computes its sums over micro-batches, so that a loss of ranks is healed.

The samples are those of Megatron-LM: the validations of the loop go through the validation set one after the other, the
one after the training continues there, and the test begins at the first sample of the test set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unicron_transition.megatron_lm import data
from unicron_transition.session.session import Session

IN_LOOP, VALIDATION, TEST = 0, 1, 2  # parts of the evaluations between the same two iterations


class GivenUp(Exception):
    """The job went back, or continued without this rank, so the iteration is another one now."""


class Evaluation:
    """The evaluations of one rank."""

    def __init__(self, session: Session, key: Callable[[], str], again: Callable[[], None]):
        self._session, self._key = session, key
        self._again = again  # trains to the end again, after the job had to go back behind it
        self.in_loop = True

    def evaluate(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        process_non_loss_data_func: Any,
        config: Any,
        verbose: bool = False,
        non_loss_data_func: Any = None,
        eval_iters: int | None = None,
        **_: Any,
    ) -> tuple[dict[str, torch.Tensor], None, bool]:
        """Evaluate in place of Megatron-LM: (mean losses, only in the last stage; None; whether the time is over).
        Raises :class:`GivenUp` within the loop."""
        from megatron.core import parallel_state
        from megatron.training import get_args, get_timers

        args, timers = get_args(), get_timers()
        samples = data.built_samples(data_iterator)
        number = args.eval_iters if eval_iters is None else eval_iters
        timers("evaluate", log_level=0).start(barrier=True)
        value = self._value(args, samples, number)
        timers("evaluate").stop()
        timers.log(["evaluate"])
        args.consumed_valid_samples += number * args.global_batch_size
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}, None, False
        device = next(model[0].parameters()).device
        return {self._key(): torch.tensor(value, dtype=torch.float, device=device)}, None, False

    def _value(self, args: Any, samples: data.Samples, number: int) -> float:
        while True:
            value = self._try_once(args, samples, number)
            if value is not None:
                return value
            if self.in_loop:
                raise GivenUp
            self.in_loop = True
            self._again()
            self.in_loop = False

    def _try_once(self, args: Any, samples: data.Samples, number: int) -> float | None:
        batch, iteration = args.global_batch_size, self._session.iteration
        part = IN_LOOP if self.in_loop else TEST if samples.what == "test" else VALIDATION
        # validations of the loop up to this iteration
        before = iteration // args.eval_interval if args.eval_interval else 0
        first = {IN_LOOP: before - 1, VALIDATION: before, TEST: 0}[part] * number * batch
        micro_batches = number * batch // args.micro_batch_size
        return self._session.evaluate(lambda _, index: samples(first, index), micro_batches, part)
