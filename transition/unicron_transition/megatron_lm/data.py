"""Megatron-LM's training samples, by iteration and micro-batch, whenever they are needed.

Its sampler deals the samples of a dataset in their order: micro-batch i of an iteration has the same samples whatever
the number of replicas (`megatron.training.datasets.data_samplers.MegatronPretrainingSampler`). So a survivor finds the
samples of a lost rank by the index alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate

from unicron_transition.megatron_lm.world import lock
from unicron_transition.seams.megatron_lm import CannotHeal, growing_batches, replace
from unicron_transition.seams.table import TRAINING

SPLIT = "969, 30, 1"  # Megatron-LM's default


class Batches:
    """The sizes of a training's batches, by iteration: those of Megatron-LM's own calculator. With
    `--rampup-batch-size` they grow with the samples."""

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
        calculator = growing_batches()
        assert calculator is not None, "arguments.check() refuses the option in that case"
        return calculator(
            args.global_batch_size,
            args.micro_batch_size,
            1,  # all replicas count as one here
            bool(getattr(args, "decrease_batch_size_if_needed", False)),
            -1,  # no rank, so that it logs nothing
            first,
            increment,
            samples,
        )

    def _step(self, iteration: int) -> tuple[int, int, int]:
        return self._steps[bisect_right(self._firsts, iteration) - 1]

    def before(self, iteration: int) -> int:
        """Return the number of samples of all iterations before this one."""
        first, samples, batch = self._step(iteration)
        return samples + (iteration - first) * batch

    def micro_batches(self, iteration: int) -> int:
        return int(self._step(iteration)[2] // self._micro)


class Samples:
    """Micro-batches as Megatron-LM's loader makes them; None if this rank has not built the dataset, because it gets
    its batches from tensor rank 0 or is in a stage between the first and the last."""

    def __init__(self, dataset: Any, micro_batch_size: int, what: str = "train"):
        self.dataset, self.what, self._micro = dataset, what, micro_batch_size

    def __call__(self, begin: int, index: int) -> Any:
        """Return micro-batch `index` of those that begin with sample `begin`."""
        if self.dataset is None:
            return None
        first = begin + index * self._micro
        return default_collate([self.dataset[sample] for sample in range(first, first + self._micro)])


def built_samples(samples: Any) -> Samples:
    """Return the samples of this rank. Virtual stages have one each, of which not all are built."""
    each: list[Samples] = samples if isinstance(samples, list) else [samples]
    return next((found for found in each if found is not None and found.dataset is not None), each[0])


def install() -> None:
    """Make Megatron-LM build datasets without waiting for another rank, and no loaders."""
    replace(TRAINING, "build_train_valid_test_data_iterators", lambda _: _build_iterators)


def _build_iterators(provider: Any) -> tuple[Samples, ...]:
    from megatron.training import get_args, training

    args = get_args()
    with once(_folder(args), _what(args)), as_if_alone():
        datasets = training.build_train_valid_test_datasets(provider)
    has = _has_samples(args)
    parts = dict(zip(has, datasets, strict=True))
    for kind, dataset in parts.items():
        if has[kind] and dataset is None and parts["train"] is not None:
            raise CannotHeal(f"there are no samples for --eval-iters ({kind}): give --split such a part, too")
    args.do_train, args.do_valid, args.do_test = has.values()
    return tuple(Samples(dataset, args.micro_batch_size, kind) for kind, dataset in parts.items())


def _has_samples(args: Any) -> dict[str, bool]:
    """Whether there are samples to train, validate and test: the same in all ranks, most of which build no dataset."""
    parts = [float(part) for part in str(getattr(args, "split", None) or SPLIT).replace("/", ",").split(",")]
    evaluates = bool(args.eval_iters)
    valid, test = (len(parts) > number and parts[number] > 0 for number in (1, 2))
    paths = bool(getattr(args, "train_data_path", None))
    valid, test = (
        bool(getattr(args, f"{kind}_data_path", None)) if paths else there
        for kind, there in (("valid", valid), ("test", test))
    )
    return {"train": True, "valid": evaluates and valid, "test": evaluates and test}


@contextlib.contextmanager
def once(folder: Path, what: str) -> Iterator[None]:
    """Let the first rank do the work in the body while the others wait; later ranks find it done."""
    done = folder / f".unicron-{os.getuid()}-{what}.built"
    if done.exists():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(folder))
        if done.exists():
            stack.close()
        yield
    with contextlib.suppress(OSError):  # a folder without write access has nothing to build
        done.touch()


def _what(args: Any) -> str:
    """Return a name that distinguishes the samples of this training from those of another."""
    names = ("data_path", "train_data_path", "data_args_path", "split", "seq_length", "seed", "train_iters")
    more = ("global_batch_size", "tokenizer_type", "tokenizer_model", "eval_iters", "eval_interval")
    values = [getattr(args, name, None) for name in (*names, *more)]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Let nothing in the body wait for another rank, or leave work to rank 0."""
    before = dist.is_initialized, dist.get_rank
    dist.is_initialized, dist.get_rank = lambda: False, lambda group=None: 0 if group is None else before[1](group)
    try:
        yield
    finally:
        dist.is_initialized, dist.get_rank = before


def _folder(args: Any) -> Path:
    """Return the folder of the sample indices, which one rank at a time writes and the others read."""
    if getattr(args, "data_cache_path", None):
        folder = Path(args.data_cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    words = [*(getattr(args, "data_path", None) or ()), *(getattr(args, "train_data_path", None) or ())]
    return next((Path(word).parent for word in words if Path(f"{word}.idx").is_file()), Path("/nonexistent"))
