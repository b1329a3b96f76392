"""GPT training with Megatron-core that survives the loss of ranks and nodes.

    python train_gpt.py --data-path PREFIX [options]            (one rank; `build_dataset.py` makes the dataset)
    torchrun --nproc-per-node 2 train_gpt.py --data-path PREFIX  (plain data-parallel training)
    unicron-agent run -- python train_gpt.py --data-path PREFIX  (healed; see gpt_elastic.sbatch)

An ordinary Megatron-core script but for three things: `transition.init_process_group`, `transition.Session`, and a
`fetch` that makes any micro-batch of any iteration again, so that a survivor can take over what a lost rank owed.
Without an agent the same lines train plainly.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Where virtual nodes share a machine's cores, a rank that is still starting goes before those that train already: the
# sooner it is there the sooner it takes its share. One with --micro-batch-seconds leaves it the cores anyway.
TRAINING_NICENESS = 15
INDEX_MAGIC = b"MMIDIDX\x00\x00"


# ------------------------------------------------------------ options, before anything slow is imported
class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """argparse without its page of usage in front of every error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"train_gpt: {message} (--help lists the options)\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; ends with exit status 2 and one line for a wrong one.

    Takes milliseconds: neither torch nor megatron is imported.
    """
    parser = OneLineParser(
        prog="train_gpt.py",
        description="Elastic GPT training with Megatron-core.",
        formatter_class=HelpWithDefaults,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data-path", required=True, metavar="PREFIX", help="indexed dataset: PREFIX.bin and PREFIX.idx")
    data.add_argument(
        "--data-cache-path", metavar="DIR", help="keep the sample index here; needed for large datasets only"
    )
    data.add_argument(
        "--vocab-size",
        type=_number(int, 1),
        default=257,
        help="tokens of the dataset; 257 for build_dataset.py's bytes",
    )
    data.add_argument("--eod-token", type=_number(int, 0), default=256, help="end-of-document token")
    data.add_argument("--seq-length", type=_number(int, 1), default=192, help="tokens per sample")
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", "--layers", type=_number(int, 1), default=4)
    model.add_argument("--hidden-size", "--hidden", type=_number(int, 1), default=128)
    model.add_argument("--num-attention-heads", "--heads", type=_number(int, 1), default=4)
    model.add_argument(
        "--bf16", action="store_true", help="bfloat16 parameters with fp32 main parameters and gradient sums"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=_number(int, 1), default=2, help="samples per micro-batch")
    training.add_argument(
        "--micro-batches", type=_number(int, 1), default=12, help="micro-batches per iteration, over all ranks"
    )
    training.add_argument("--train-iterations", "--train-iters", type=_number(int, 1), default=100)
    training.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    training.add_argument("--lr", type=_number(float, 0), default=1e-3)
    training.add_argument("--min-lr", type=_number(float, 0), default=1e-4)
    training.add_argument("--lr-decay-style", choices=("cosine", "linear", "constant"), default="cosine")
    training.add_argument("--lr-warmup-iterations", "--warmup", type=_number(int, 0), default=5)
    training.add_argument("--weight-decay", type=_number(float, 0), default=0.01)
    training.add_argument(
        "--clip-grad", type=_number(float, 0), default=1.0, help="largest gradient norm; 0 does not clip"
    )
    training.add_argument("--seed", type=_number(int, 0), default=1234)
    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--save", metavar="DIR", help="go on from the newest checkpoint in DIR, and save there; shared by all nodes"
    )
    checkpoints.add_argument(
        "--save-interval", type=_number(int, 0), default=100, help="iterations between two; 0 saves at the end only"
    )
    checkpoints.add_argument("--save-keep", type=_number(int, 1), default=2, help="how many stay in DIR")
    system = parser.add_argument_group("system")
    system.add_argument(
        "--backend", choices=("nccl", "gloo"), help="of torch.distributed (default: nccl with CUDA, gloo without)"
    )
    system.add_argument("--overlap-grad-reduce", action="store_true", help="reduce gradients during the backward pass")
    system.add_argument(
        "--metrics", metavar="PREFIX", help="JSON lines, one file per rank (PREFIX.slotN); see training_metrics.py"
    )
    system.add_argument(
        "--save-gradients",
        metavar="DIR",
        help=(
            "to verify recoveries: DIR/ITERATION.slotN.pt with parameters and gradient of each generation's first step"
        ),
    )
    system.add_argument(
        "--micro-batch-seconds",
        type=_number(float, 0),
        default=0.0,
        help="at least so long for each micro-batch: to rehearse several jobs on one machine's few cores",
    )
    system.add_argument("--log-interval", type=_number(int, 1), default=1, help="iterations per log line")
    options = parser.parse_args(arguments)
    try:
        check(options)
    except ValueError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return options


def check(options: argparse.Namespace) -> None:
    """Raises ValueError (one line) for options that do not fit together or a dataset that is not there."""
    if options.hidden_size % options.num_attention_heads:
        raise ValueError(
            f"--hidden-size {options.hidden_size} is not a multiple of "
            f"--num-attention-heads {options.num_attention_heads}"
        )
    if options.hidden_size // options.num_attention_heads % 2:
        raise ValueError("--hidden-size over --num-attention-heads must be even (rotary position embedding)")
    if options.min_lr > options.lr:
        raise ValueError(f"--min-lr {options.min_lr:g} is above --lr {options.lr:g}")
    if options.lr_warmup_iterations >= options.train_iterations:
        raise ValueError(
            f"--lr-warmup-iterations {options.lr_warmup_iterations} must be below "
            f"--train-iterations {options.train_iterations}"
        )
    if options.eod_token >= options.vocab_size:
        raise ValueError(f"--eod-token {options.eod_token} must be below --vocab-size {options.vocab_size}")
    for suffix in (".idx", ".bin"):
        if not Path(options.data_path + suffix).is_file():
            raise ValueError(
                f"no dataset at {options.data_path}{suffix}: "
                f"make one with build_dataset.py --output {options.data_path}"
            )
    with open(options.data_path + ".idx", "rb") as index:
        if index.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            raise ValueError(
                f"{options.data_path}.idx is not a Megatron index: make the dataset again with build_dataset.py"
            )


def _number(kind: type, least: float) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a {'whole ' * (kind is int)}number") from None
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is below {least}" if value < least else f"{text} is not finite")
        return value

    return convert


# ------------------------------------------------------------ data
class DatasetTokens:
    """What Megatron's dataset asks of a tokenizer, for a dataset that holds tokens already."""

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


class _locked:
    """Holds a lock file in `folder`, so that one process writes the cache and the others read it; nothing for None."""

    def __init__(self, folder: str | None):
        self._folder, self._file = folder, None

    def __enter__(self) -> None:
        if self._folder:
            import fcntl

            os.makedirs(self._folder, exist_ok=True)
            self._file = open(os.path.join(self._folder, "lock"), "w")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()


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


# ------------------------------------------------------------ model, optimizer, schedule
def build_model(options: argparse.Namespace, device: Any) -> Any:
    """A GPTModel in Megatron's DistributedDataParallel. Every rank gets the same parameters from the seed."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(options.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    # No dropout: a random mask would depend on which rank computes a micro-batch, and when.
    config = TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=options.bf16,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=-(-options.vocab_size // 128) * 128,
        max_sequence_length=options.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    model = model.to(device)
    if options.bf16:
        model = Float16Module(config, model)
    chunk = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=options.overlap_grad_reduce),
        model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        config.no_sync_func = chunk.no_sync
    return chunk


def build_optimizer(options: argparse.Namespace, chunk: Any) -> tuple[Any, Any]:
    """Megatron's optimizer and its learning-rate schedule, which counts samples as Megatron's own training does."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.utils import get_model_config

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=options.optimizer,
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            bf16=options.bf16,
        ),
        [chunk],
    )
    get_model_config(chunk).grad_scale_func = optimizer.scale_loss
    samples = options.micro_batches * options.micro_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iterations * samples,
        lr_decay_steps=options.train_iterations * samples,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.train_iterations * samples,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def make_forward_step(
    device: Any, seconds: float = 0.0
) -> Callable[[Iterator[dict[str, Any]], Any], tuple[Any, Callable]]:
    """Megatron's forward_step_func: (data_iterator, model) -> (losses [micro-batch, sequence], loss_func). It takes
    `seconds` at least."""

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable]:
        end = time.monotonic() + seconds
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(data_iterator).items()}
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        time.sleep(max(0.0, end - time.monotonic()))

        def loss_func(output: Any) -> tuple[Any, dict[str, Any]]:
            loss = (output.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
            return loss, {"lm loss": loss.detach()}

        return losses, loss_func

    return forward_step


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


def metrics_record(result: Any) -> dict[str, Any]:
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

    A file holds {"parameters": before the step, "gradient": reduced and clipped}, flat fp32 tensors. Whoever has just
    joined has no parameters from before the step and saves nothing.
    """

    def __init__(self, chunk: Any, folder: str, slot: int):
        self._chunk, self._folder, self._slot = chunk, Path(folder), slot
        self._generation: int | None = None
        self._parameters: Any = None

    def after_step(self, result: Any) -> None:
        """Call it after every step."""
        import torch

        if self._parameters is not None and result.generation != self._generation:
            gradient = _flat(parameter.main_grad for parameter in self._chunk.module.parameters())
            path = self._folder / f"{result.iteration}.slot{self._slot}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"parameters": self._parameters, "gradient": gradient}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # readers never see half a file
        self._generation = result.generation
        self._parameters = _flat(self._chunk.module.parameters())


def _flat(tensors: Iterator[Any]) -> Any:
    import torch

    return torch.cat([tensor.detach().float().reshape(-1).cpu() for tensor in tensors])


def train(options: argparse.Namespace, device: Any, backend: str) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from training_metrics import MetricsWriter

    import transition

    dataset = build_dataset(options)
    transition.init_process_group(backend)
    parallel_state.initialize_model_parallel()
    chunk = build_model(options, device)
    optimizer, scheduler = build_optimizer(options, chunk)
    slot = int(os.environ.get("UNICRON_SLOT", os.environ.get("RANK", "0")))
    metrics = MetricsWriter(options.metrics, slot) if options.metrics else None
    checkpoints = (
        transition.Checkpoints(options.save, options.save_interval, options.save_keep) if options.save else None
    )
    session = transition.Session(
        model=[chunk],
        optimizer=optimizer,
        scheduler=scheduler,
        micro_batches=options.micro_batches,
        forward_step=make_forward_step(device, options.micro_batch_seconds),
        fetch=make_fetch(dataset, options),
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        train_iterations=options.train_iterations,
        checkpoints=checkpoints,
    )
    # `sbatch --signal=USR1@120`, or `scancel --signal=USR1 JOB`: all ranks end after the same iteration.
    signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())
    saver = GradientSaver(chunk, options.save_gradients, slot) if options.save_gradients else None
    if device.type == "cpu" and not options.micro_batch_seconds:
        os.nice(TRAINING_NICENESS)
    for result in session:
        if metrics:
            metrics.write(metrics_record(result))
        if saver:
            saver.after_step(result)
        # The lowest-ranked member of the present generation, which may be another process than before.
        if dist.get_rank() == 0 and (result.iteration + 1) % options.log_interval == 0:
            print(log_line(options, result), flush=True)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
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
    from transition import CheckpointError

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
