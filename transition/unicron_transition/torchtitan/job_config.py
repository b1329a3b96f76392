"""Refuses configurations of torchtitan that a session cannot heal, and takes its checkpoints from them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unicron_transition.seams import modules
from unicron_transition.seams.table import RESTART, UnsupportedLayout
from unicron_transition.snapshot.checkpoint import Checkpoints

RELEASES = ("0.2.2",)
"""The releases of torchtitan that were tested."""


def check(config: Any) -> None:
    """Raise :class:`UnsupportedLayout`, one line, for the first thing that this release cannot heal."""
    found = version("torchtitan")
    if found not in RELEASES:
        raise UnsupportedLayout(
            f"unicron knows torchtitan {', '.join(RELEASES)}, not {found}: install that, or {RESTART}"
        )
    for line in (*_gaps(config), *_refusals(config)):
        raise UnsupportedLayout(f"unicron can't heal {line}")


def _gaps(config: Any) -> Iterator[str]:
    training = config.training
    if training.global_batch_size < 1:
        yield "a batch that grows with the number of ranks: give --training.global_batch_size"
    elif training.global_batch_size % training.local_batch_size:
        yield (
            f"a batch of {training.global_batch_size} in parts of {training.local_batch_size}: make "
            "--training.global_batch_size a multiple of --training.local_batch_size"
        )
    if config.parallelism.data_parallel_shard_degree < 1:
        yield (
            "parameters that are sharded over however many ranks there are: give "
            "--parallelism.data_parallel_shard_degree, the ranks of one replica (1: each has all parameters)"
        )


def _refusals(config: Any) -> Iterator[str]:
    parallel = config.parallelism
    if parallel.data_parallel_replicate_degree != 1:
        yield "a fixed number of replicas: leave --parallelism.data_parallel_replicate_degree out, it is the job's"
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(parallel, f"{name}_parallel_degree") > 1:
            yield f"torchtitan's {name} parallelism: leave it out, or {RESTART}"
    if config.model.converters:
        yield f"model converters ({', '.join(config.model.converters)}): leave them out, or {RESTART}"
    if config.optimizer.early_step_in_backward:
        yield "--optimizer.early_step_in_backward: leave it out"
    if config.training.enable_cpu_offload:
        yield f"--training.enable_cpu_offload: leave it out, or {RESTART}"
    if config.fault_tolerance.enable:
        yield "--fault_tolerance.enable, whose replicas are others than the session's: leave it out"
    if config.validation.enable:
        yield f"torchtitan's validation, which waits for ranks that may be gone: leave it out, or {RESTART}"
    if config.checkpoint.create_seed_checkpoint or config.checkpoint.initial_load_in_hf:
        yield "a seed checkpoint, or the first one from Hugging Face: make and convert it with torchtitan itself"
    if config.checkpoint.enable and config.checkpoint.load_step >= 0:
        yield "--checkpoint.load_step, since a session goes on from its newest whole checkpoint: leave it out"
    if config.checkpoint.enable and config.checkpoint.exclude_from_loading:
        yield "--checkpoint.exclude_from_loading: leave it out"
    if config.checkpoint.enable and config.checkpoint.last_save_in_hf:
        yield "--checkpoint.last_save_in_hf: leave it out, and use `unicronctl checkpoint export`"


def check_optimizers(optimizers: Any) -> None:
    """Raise :class:`UnsupportedLayout` for torchtitan's container of optimizers if its step does more than theirs: the
    session steps the optimizer itself, and the biases of experts would stay as they are."""
    if modules.does_more_in_a_step(optimizers):
        raise UnsupportedLayout(
            "unicron can't heal torchtitan's balancing of experts, whose biases change before each step by what all "
            f"ranks have seen: give the model a load_balance_coeff of None, or {RESTART}"
        )


def checkpoints(config: Any) -> Checkpoints | None:
    """Return the session's checkpoints in torchtitan's folder for them. Raises :class:`UnsupportedLayout` if there are
    torchtitan's own."""
    wanted = config.checkpoint
    if not wanted.enable:
        return None
    folder = Path(config.job.dump_folder) / wanted.folder
    if own := sorted(folder.glob("step-*")):
        raise UnsupportedLayout(
            f"{folder} has torchtitan's own {own[-1].name}: to go on from one of them, give another "
            "--checkpoint.folder, --checkpoint.initial_load_path, and --checkpoint.no_initial_load_model_only"
        )
    return Checkpoints(
        folder,
        wanted.interval,
        keep=wanted.keep_latest_k or 1_000_000,
        begin_from=wanted.initial_load_path,
        begin_with="model" if wanted.initial_load_model_only else "all",
    )
