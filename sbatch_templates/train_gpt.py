"""GPT training with Megatron-core that survives the loss of ranks and nodes.

    python train_gpt.py --data-path PREFIX [options]            (one rank; `build_dataset.py` makes the dataset)
    torchrun --nproc-per-node 4 train_gpt.py --data-path PREFIX --tensor-model-parallel-size 2  (plain training)
    unicron-agent run -- python train_gpt.py --data-path PREFIX  (healed; see gpt_elastic.sbatch)

An ordinary Megatron-core script but for three things: `unicron.init_process_group`, `unicron.Session`, and a
`fetch` that makes any micro-batch of any iteration again, so that a survivor can take over what a lost rank owed.
Without an agent the same lines train plainly.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What the ranks' template imports beside the lines above (docs/user-guide.md): the options are read without torch.
UNICRON_PRELOAD = ("gpt_imports",)
# Where virtual nodes share a machine's cores, a rank that is still starting goes before those that train already: the
# sooner it is there the sooner it takes its share. One with --micro-batch-seconds leaves it the cores anyway.
TRAINING_NICENESS = 15


# ------------------------------------------------------------ data
class DatasetTokens:
    """A tokenizer for Megatron's dataset where that holds tokens already."""

    def __init__(self, vocab_size: int, eod: int):
        self.vocab_size, self.eod = vocab_size, eod
        self.unique_identifiers = {"class": "DatasetTokens", "vocab_size": vocab_size, "eod": eod}


def build_dataset(options: argparse.Namespace) -> Any:
    """Megatron's GPTDataset with a sample for each of the run's (iteration, micro-batch, row).

    To be called before the process group exists: a rank that joins a running job builds its dataset alone, so nothing
    here may wait for others. Without --data-cache-path each rank makes the sample index in memory (milliseconds for
    megabytes of text).
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=options.seq_length,
        blend=([options.data_path], None),
        split="1,0,0",
        path_to_cache=options.data_cache_path or "",  # "" and not None, which would write beside the dataset
        tokenizer=DatasetTokens(options.vocab_size, options.eod_token),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = options.train_iterations * options.micro_batches * options.micro_batch_size
    with _locked(options.data_cache_path):
        return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


@contextlib.contextmanager
def _locked(folder: str | None) -> Iterator[None]:
    """Hold a lock file in `folder`, so that one process writes the cache and the others read it; nothing for None."""
    if not folder:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_fetch(dataset: Any, options: argparse.Namespace) -> Callable[[int, int], dict[str, Any]]:
    """fetch(iteration, index) -> micro-batch `index` of `iteration`.

    A dict of tokens, labels, loss_mask and position_ids, each [micro-batch size, sequence length]. A function of its
    two arguments only, the same in every rank: that is what lets a survivor take over a lost rank's micro-batches.
    """
    from torch.utils.data import default_collate

    per_iteration = options.micro_batches * options.micro_batch_size

    def fetch(iteration: int, index: int) -> dict[str, Any]:
        first = iteration * per_iteration + index * options.micro_batch_size
        batch = default_collate([dataset[sample] for sample in range(first, first + options.micro_batch_size)])
        if (largest := int(max(batch["tokens"].max(), batch["labels"].max()))) >= options.vocab_size:
            raise SystemExit(
                f"train_gpt: the dataset holds token {largest}: set --vocab-size to more than {options.vocab_size}"
            )
        return batch

    return fetch


# ------------------------------------------------------------ training
def log_line(options: argparse.Namespace, result: Any) -> str:
    """One line of Megatron's training log, with the generation and the world size at its end."""
    samples = options.micro_batches * options.micro_batch_size
    norm = "" if result.grad_norm is None else f" grad norm: {result.grad_norm:.3f} |"
    return (
        f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {result.iteration + 1:8d}/{options.train_iterations:8d} |"
        f" consumed samples: {(result.iteration + 1) * samples:12d} |"
        f" elapsed time per iteration (ms): {result.seconds * 1000:.1f} |"
        f" learning rate: {result.learning_rate:.6E} | global batch size: {samples:5d} |"
        f" lm loss: {result.loss:.6E} |{norm}"
        f" generation: {result.generation} | world size: {result.world_size} |"
    )


def metrics_record(result: Any) -> dict[str, object]:
    """The line of the metrics file; `iteration` counts from 0, `time` is in seconds since the epoch."""
    return {
        "iteration": result.iteration,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "generation": result.generation,
        "learning_rate": result.learning_rate,
        "seconds": result.seconds,
        "world_size": result.world_size,
        "time": time.time(),
    }


class GradientSaver:
    """Saves what a step started from and what the optimizer got, in the first step of every generation.

    A file holds what this rank steps: {"index": its parts, "parameters": before the step, "gradient": reduced and
    clipped}; of each part (name of the whole tensor, its shape, offset and extent of a block in it, begin and end in
    that), and a flat fp32 tensor. Whoever has just joined, or got another shard, has no parameters from before the step
    and saves nothing. If the job has gone back to an older state, the second step is saved in place of the first.
    """

    def __init__(self, chunks: list[Any], optimizer: Any, folder: str, slot: int):
        self._chunks, self._optimizer, self._folder, self._slot = chunks, optimizer, Path(folder), slot
        self._generation: int | None = None
        self._before: tuple[list[Any], list[Any], int] = ([], [], -1)

    def after_step(self, result: Any) -> None:
        """Call it after every step."""
        import torch

        from unicron_transition.snapshot import parts

        held = [part for part in parts.parts(self._chunks, self._optimizer) if hasattr(part.parameter, "main_grad")]
        index = [(*part.box, part.begin, part.end) for part in held]
        known, parameters, iteration = self._before
        went_back = known == index and result.iteration != iteration
        if known == index and not went_back and result.generation != self._generation:
            spans = [(part.parameter, slice(part.first, part.first + part.end - part.begin)) for part in held]
            gradient = [_copy_to_cpu(parameter.main_grad.view(-1)[span]) for parameter, span in spans]
            path = self._folder / f"{result.iteration}.slot{self._slot}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = {"index": index, "parameters": parameters, "gradient": gradient}
            torch.save(data, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # readers never see half a file
        if not went_back:
            self._generation = result.generation
        self._before = index, [_copy_to_cpu(part.tensors[parts.PARAMETER]) for part in held], result.iteration + 1


def _copy_to_cpu(tensor: Any) -> Any:
    import torch

    return tensor.detach().to("cpu", torch.float32, copy=True)


def train(options: argparse.Namespace, device: Any, backend: str) -> None:
    import torch.distributed as dist
    from gpt_model import build_model, build_optimizer, make_forward_step
    from gpt_options import virtual_stages
    from megatron.core import parallel_state
    from training_metrics import MetricsWriter

    import unicron

    dataset = build_dataset(options)
    tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    unicron.init_process_group(backend, layout=unicron.Layout(tensor=tensor, pipeline=pipeline))
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual_stages(options))
    chunks = build_model(options, device)
    optimizer, scheduler = build_optimizer(options, chunks)
    slot = int(os.environ.get("UNICRON_SLOT", os.environ.get("RANK", "0")))
    metrics = MetricsWriter(options.metrics, slot) if options.metrics else None
    checkpoints = unicron.Checkpoints(options.save, options.save_interval, options.save_keep) if options.save else None
    session = unicron.Session(
        model=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        micro_batches=options.micro_batches,
        forward_step=make_forward_step(options, device, options.micro_batch_seconds),
        fetch=make_fetch(dataset, options),
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        train_iterations=options.train_iterations,
        checkpoints=checkpoints,
        seed=options.seed,
    )
    # `sbatch --signal=USR1@120`, `scancel --state=RUNNING --signal=USR1 JOB`: all ranks end after the same iteration.
    signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())
    saver = GradientSaver(chunks, optimizer, options.save_gradients, slot) if options.save_gradients else None
    if device.type == "cpu" and not options.micro_batch_seconds:
        os.nice(TRAINING_NICENESS)
    said = False
    for result in session:
        if dist.get_rank() == 0 and not said and session.memory:
            print(session.memory, file=sys.stderr, flush=True)
        said = True
        if metrics:
            metrics.write(metrics_record(result))
        if saver:
            saver.after_step(result)
        # The lowest-ranked member of the present generation, which may be another process than before.
        if dist.get_rank() == 0 and (result.iteration + 1) % options.log_interval == 0:
            print(log_line(options, result), flush=True)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    from gpt_options import parse

    options = parse(arguments)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a training that could end
    # Ranks share the cores of a CPU machine; on GPUs more threads than this do not help Megatron either.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A single plain process needs no launcher.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    try:
        device, backend = prepare(options)
    except (ModuleNotFoundError, RuntimeError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    from unicron import CheckpointError

    try:
        train(options, device, backend)
    except CheckpointError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(options: argparse.Namespace) -> tuple[Any, str]:
    """Import torch, adapt it; returns device and backend. Raises RuntimeError (one line) for what the machine lacks."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", module="megatron")  # optional packages that a small model does without
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of what Megatron calls
    try:
        import cpu_adapter
        import torch

        on_cpu = cpu_adapter.install()
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error.name} is not installed: pip install 'unicron-slurm[train]'") from None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if on_cpu:
        if options.backend == "nccl":
            raise RuntimeError(
                "--backend nccl needs CUDA, which torch does not find here: leave the option out, or use gloo"
            )
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device()), options.backend or "nccl"


if __name__ == "__main__":
    sys.exit(main())
