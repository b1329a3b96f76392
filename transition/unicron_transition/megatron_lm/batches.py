"""How many samples Megatron-LM has trained with before an iteration, and in it: with `--rampup-batch-size` the batch
grows with the samples."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from unicron_transition.seams.megatron_lm import growing_batches


class Batches:
    """The batches of a training, by iteration. Each is what Megatron-LM's own calculator says after as many samples."""

    def __init__(self, args: Any):
        self._micro = args.micro_batch_size
        self._steps: list[tuple[int, int, int]] = []  # (first iteration, samples before it, batch) of each size
        iteration = samples = 0
        ramp = getattr(args, "rampup_batch_size", None)
        if ramp:
            calculator = self._calculator(args, *map(int, ramp))
            while samples <= int(ramp[2]):
                calculator.update(samples, False)
                batch = calculator.get_current_running_global_batch_size()
                if not self._steps or self._steps[-1][2] != batch:
                    self._steps.append((iteration, samples, batch))
                iteration, samples = iteration + 1, samples + batch
        if not self._steps or self._steps[-1][2] != args.global_batch_size:
            self._steps.append((iteration, samples, args.global_batch_size))
        self._firsts = [first for first, _, _ in self._steps]

    @staticmethod
    def _calculator(args: Any, first: int, increment: int, samples: int) -> Any:
        made = growing_batches()
        assert made is not None, "arguments.check() refuses the option where there is none"
        return made(
            args.global_batch_size,
            args.micro_batch_size,
            1,  # all replicas count as one here
            bool(getattr(args, "decrease_batch_size_if_needed", False)),
            -1,  # of no rank: it logs nothing
            first,
            increment,
            samples,
        )

    def _step(self, iteration: int) -> tuple[int, int, int]:
        return self._steps[bisect_right(self._firsts, iteration) - 1]

    def before(self, iteration: int) -> int:
        """The samples of all iterations before this one."""
        first, samples, batch = self._step(iteration)
        return samples + (iteration - first) * batch

    def micro_batches(self, iteration: int) -> int:
        """The number of micro-batches of this iteration."""
        batch = self._step(iteration)[2]
        return int(batch // self._micro)
