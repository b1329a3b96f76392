"""Megatron-LM's training samples, to be had again at any time: by iteration and micro-batch.

Its sampler deals the samples of a dataset in their order: micro-batch i of an iteration has the same ones whatever the
number of replicas (`megatron.training.datasets.data_samplers.MegatronPretrainingSampler`). So a survivor finds what a
lost rank owed by the index alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate

from unicron.transition.megatron_lm.world import lock
from unicron.transition.seams.megatron_lm import replace
from unicron.transition.seams.table import TRAINING


class Samples:
    """fetch(iteration, index) -> a micro-batch as Megatron-LM's loader gives it; None where the dataset is not built:
    in ranks that get their batches from tensor rank 0, and in the stages between first and last."""

    def __init__(self, dataset: Any, global_batch_size: int, micro_batch_size: int):
        self._dataset, self._global, self._micro = dataset, global_batch_size, micro_batch_size

    def __call__(self, iteration: int, index: int) -> Any:
        if self._dataset is None:
            return None
        first = iteration * self._global + index * self._micro
        return default_collate([self._dataset[sample] for sample in range(first, first + self._micro)])


def install() -> None:
    """Datasets are built without waiting for another rank, and no loader is made of them."""

    def build_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_iterators(provider: Any) -> tuple[Any, None, None]:
            from megatron.training import get_args, training

            args = get_args()
            with once(_folder(args), _what(args)), as_if_alone():
                dataset = training.build_train_valid_test_datasets(provider)[0]
            args.do_train, args.do_valid, args.do_test = True, False, False
            return Samples(dataset, args.global_batch_size, args.micro_batch_size), None, None

        return build_train_valid_test_data_iterators

    replace(TRAINING, "build_train_valid_test_data_iterators", build_iterators)


@contextlib.contextmanager
def once(folder: Path, what: str) -> Iterator[None]:
    """The first rank of all that come here to do the same does it while the others wait; they, and all who come later,
    find it done and wait for nobody."""
    done = folder / f".unicron-{os.getuid()}-{what}.built"
    if done.exists():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(folder))
        if done.exists():
            stack.close()
        yield
    with contextlib.suppress(OSError):  # nothing can be written there, so nothing was
        done.touch()


def _what(args: Any) -> str:
    """The samples of which training: a name that tells them from those of another."""
    names = ("data_path", "train_data_path", "data_args_path", "split", "seq_length", "seed", "train_iters")
    said = [getattr(args, name, None) for name in (*names, "global_batch_size", "tokenizer_type", "tokenizer_model")]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """What is done inside waits for nobody, and leaves nothing to rank 0."""
    before = dist.is_initialized, dist.get_rank
    dist.is_initialized, dist.get_rank = lambda: False, lambda group=None: 0 if group is None else before[1](group)
    try:
        yield
    finally:
        dist.is_initialized, dist.get_rank = before


def _folder(args: Any) -> Path:
    """The folder of the sample indices: one rank at a time writes them, and the others read them."""
    if getattr(args, "data_cache_path", None):
        folder = Path(args.data_cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    words = [*(getattr(args, "data_path", None) or ()), *(getattr(args, "train_data_path", None) or ())]
    return next((Path(word).parent for word in words if Path(f"{word}.idx").is_file()), Path("/nonexistent"))
