"""The options of train_gpt.py, by Megatron's own names, and what is wrong with them: known in milliseconds, before
torch or megatron is imported."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

INDEX_MAGIC = b"MMIDIDX\x00\x00"
# Megatron's options that this script has no part for: option, words for it.
REFUSED_OPTIONS = (
    ("--expert-model-parallel-size", "every rank has all experts here; share their layers out by pipeline stages"),
    ("--expert-tensor-parallel-size", "experts need --tensor-model-parallel-size 1 here"),
    ("--fp8-format", "fp8 needs Transformer Engine's layers, and this script builds Megatron's own"),
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


COUNT, WHOLE, AMOUNT = _number(int, 1), _number(int, 0), _number(float, 0)


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """argparse without its page of usage in front of every error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"train_gpt: {message} (--help lists the options)\n")


class Refuse(argparse.Action):
    """An option that is known, and why it is not taken."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, name: str | None = None) -> None:
        parser.error(f"{name}: {self.const}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; ends with exit status 2 and one line for a wrong one."""
    parser = OneLineParser(
        prog="train_gpt.py",
        description="Elastic GPT training with Megatron-core.",
        formatter_class=HelpWithDefaults,
        allow_abbrev=False,  # --num-layers-per-virtual would be taken for the option that begins so
    )
    for add in (
        _add_data,
        _add_model,
        _add_experts,
        _add_training,
        _add_fp16,
        _add_parallelism,
        _add_recomputation,
        _add_checkpoints,
    ):
        add(parser)
    _add_system(parser)
    for name, reason in REFUSED_OPTIONS:
        parser.add_argument(name, nargs="?", action=Refuse, const=reason, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        take_layout(options)
        check(options)
    except ValueError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return options


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--data-path", required=True, metavar="PREFIX", help="indexed dataset: PREFIX.bin and PREFIX.idx")
    data.add_argument(
        "--data-cache-path", metavar="DIR", help="keep the sample index here; needed for large datasets only"
    )
    data.add_argument(
        "--vocab-size", type=COUNT, default=257, help="tokens of the dataset; 257 for build_dataset.py's bytes"
    )
    data.add_argument("--eod-token", type=WHOLE, default=256, help="end-of-document token")
    data.add_argument("--seq-length", type=COUNT, default=192, help="tokens per sample")


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", "--layers", type=COUNT, default=4)
    model.add_argument("--hidden-size", "--hidden", type=COUNT, default=128)
    model.add_argument("--num-attention-heads", "--heads", type=COUNT, default=4)
    model.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="an output layer of its own; without it the embedding serves as that too",
    )
    model.add_argument("--attention-dropout", type=AMOUNT, default=0.0)
    model.add_argument("--hidden-dropout", type=AMOUNT, default=0.0)
    model.add_argument(
        "--bf16", action="store_true", help="bfloat16 parameters with fp32 main parameters and gradient sums"
    )


def _add_experts(parser: argparse.ArgumentParser) -> None:
    experts = parser.add_argument_group("mixture of experts, multi-token prediction")
    experts.add_argument("--num-experts", type=_number(int, 2), metavar="N", help="in each layer; without it none")
    experts.add_argument("--moe-router-topk", type=COUNT, default=2, help="experts for each token")
    experts.add_argument(
        "--moe-router-load-balancing-type", choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none"), default="aux_loss"
    )
    experts.add_argument("--moe-aux-loss-coeff", type=AMOUNT, default=0.0)
    experts.add_argument("--moe-z-loss-coeff", type=AMOUNT)
    experts.add_argument("--moe-input-jitter-eps", type=AMOUNT)
    experts.add_argument("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    experts.add_argument(
        "--moe-router-enable-expert-bias", action="store_true", help="balance by biases, which need no loss"
    )
    experts.add_argument("--moe-router-bias-update-rate", type=AMOUNT, default=1e-3)
    experts.add_argument("--moe-ffn-hidden-size", type=COUNT, help="of one expert (default: a dense layer's)")
    experts.add_argument(
        "--moe-expert-capacity-factor", type=AMOUNT, help="tokens beyond it are dropped; without it none"
    )
    experts.add_argument("--mtp-num-layers", type=COUNT, metavar="N", help="tokens that are predicted further")
    experts.add_argument("--mtp-loss-scaling-factor", type=AMOUNT, default=0.1)


def _add_fp16(parser: argparse.ArgumentParser) -> None:
    fp16 = parser.add_argument_group("fp16")
    fp16.add_argument("--fp16", action="store_true", help="half precision with a loss scale; --bf16 needs none")
    fp16.add_argument("--loss-scale", type=AMOUNT, help="a constant one; without it it follows overflows")
    fp16.add_argument("--initial-loss-scale", type=_number(float, 1), default=2.0**32)
    fp16.add_argument("--min-loss-scale", type=_number(float, 1), default=1.0)
    fp16.add_argument("--loss-scale-window", type=COUNT, default=1000, help="iterations until it is doubled")
    fp16.add_argument("--hysteresis", type=COUNT, default=2, help="overflows before it is halved")


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=COUNT, default=2, help="samples per micro-batch")
    training.add_argument(
        "--micro-batches", type=COUNT, default=12, help="micro-batches per iteration, over all replicas"
    )
    training.add_argument("--train-iterations", "--train-iters", type=COUNT, default=100)
    training.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    training.add_argument("--lr", type=AMOUNT, default=1e-3)
    training.add_argument("--min-lr", type=AMOUNT, default=1e-4)
    training.add_argument("--lr-decay-style", choices=("cosine", "linear", "constant"), default="cosine")
    training.add_argument("--lr-warmup-iterations", "--warmup", type=WHOLE, default=5)
    training.add_argument("--weight-decay", type=AMOUNT, default=0.01)
    training.add_argument("--clip-grad", type=AMOUNT, default=1.0, help="largest gradient norm; 0 does not clip")
    training.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="the mean over all tokens of an iteration, not over its micro-batches",
    )
    training.add_argument("--seed", type=WHOLE, default=1234)


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("parallelism", "What is left of the ranks after these is data parallelism.")
    layout.add_argument("--tensor-model-parallel-size", type=COUNT, default=1, metavar="TP")
    layout.add_argument("--pipeline-model-parallel-size", type=COUNT, default=1, metavar="PP")
    layout.add_argument("--num-layers-per-virtual-pipeline-stage", type=COUNT, metavar="N", help="interleaved pipeline")
    layout.add_argument(
        "--num-virtual-stages-per-pipeline-rank", type=COUNT, metavar="N", help="the same, for uneven splits"
    )
    layout.add_argument("--decoder-first-pipeline-num-layers", type=COUNT, metavar="N", help="uneven split")
    layout.add_argument("--decoder-last-pipeline-num-layers", type=COUNT, metavar="N", help="uneven split")
    layout.add_argument("--context-parallel-size", type=COUNT, default=1, metavar="CP")
    layout.add_argument("--sequence-parallel", action="store_true")
    layout.add_argument(
        "--use-distributed-optimizer", action="store_true", help="shard its state over the data-parallel ranks"
    )
    layout.add_argument("--overlap-grad-reduce", action="store_true", help="reduce gradients during the backward pass")
    layout.add_argument("--overlap-param-gather", action="store_true", help="gather parameters during the forward pass")
    layout.add_argument("--ddp-bucket-size", type=COUNT, metavar="N", help="parameters that are reduced together")


def _add_recomputation(parser: argparse.ArgumentParser) -> None:
    recomputation = parser.add_argument_group("activation recomputation")
    recomputation.add_argument("--recompute-granularity", choices=("full", "selective"))
    recomputation.add_argument("--recompute-method", choices=("uniform", "block"))
    recomputation.add_argument("--recompute-num-layers", type=COUNT, metavar="N")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--save", metavar="DIR", help="go on from the newest checkpoint in DIR, and save there; shared by all nodes"
    )
    checkpoints.add_argument(
        "--save-interval", type=WHOLE, default=100, help="iterations between two; 0 saves at the end only"
    )
    checkpoints.add_argument("--save-keep", type=COUNT, default=2, help="how many stay in DIR")


def _add_system(parser: argparse.ArgumentParser) -> None:
    system = parser.add_argument_group("system")
    system.add_argument(
        "--backend", choices=("nccl", "gloo"), help="of torch.distributed (default: nccl with CUDA, gloo without)"
    )
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
        type=AMOUNT,
        default=0.0,
        help="at least so long for each micro-batch: to rehearse several jobs on one machine's few cores",
    )
    system.add_argument("--log-interval", type=COUNT, default=1, help="iterations per log line")


def take_layout(options: argparse.Namespace) -> None:
    """A job that has stated several layouts (UNICRON_LAYOUTS) is told in which it is to run now, and that wins over the
    command line. Raises ValueError (one line)."""
    if not (text := os.environ.get("UNICRON_LAYOUT")):
        return
    from unicron_transition.generations.layout import parse_layout

    layout, virtual = parse_layout(text)
    options.tensor_model_parallel_size, options.pipeline_model_parallel_size = layout.tensor, layout.pipeline
    options.num_layers_per_virtual_pipeline_stage = None
    options.num_virtual_stages_per_pipeline_rank = virtual if virtual > 1 else None
    options.sequence_parallel = options.sequence_parallel and layout.tensor > 1
    if layout.pipeline == 1:
        options.decoder_first_pipeline_num_layers = options.decoder_last_pipeline_num_layers = None


# ------------------------------------------------------------ what does not fit together
def check(options: argparse.Namespace) -> None:
    """Raises ValueError (one line) for options that do not fit together or a dataset that is not there."""
    _check_model(options)
    _check_experts(options)
    _check_layout(options)
    _check_pipeline(options)
    _check_recomputation(options)
    _check_dataset(options)


def _check_model(options: argparse.Namespace) -> None:
    heads = options.num_attention_heads
    if options.hidden_size % heads:
        raise ValueError(f"--hidden-size {options.hidden_size} is not a multiple of --num-attention-heads {heads}")
    if options.hidden_size // heads % 2:
        raise ValueError("--hidden-size over --num-attention-heads must be even (rotary position embedding)")
    for name in ("attention", "hidden"):
        if (dropout := getattr(options, f"{name}_dropout")) >= 1:
            raise ValueError(f"--{name}-dropout {dropout:g} must be below 1")
    if options.min_lr > options.lr:
        raise ValueError(f"--min-lr {options.min_lr:g} is above --lr {options.lr:g}")
    if options.lr_warmup_iterations >= options.train_iterations:
        raise ValueError(
            f"--lr-warmup-iterations {options.lr_warmup_iterations} must be below "
            f"--train-iterations {options.train_iterations}"
        )
    if options.eod_token >= options.vocab_size:
        raise ValueError(f"--eod-token {options.eod_token} must be below --vocab-size {options.vocab_size}")


def _check_experts(options: argparse.Namespace) -> None:
    if options.fp16 and options.bf16:
        raise ValueError("give one of --fp16 and --bf16")
    if options.loss_scale is not None and not options.fp16:
        raise ValueError("--loss-scale is for --fp16")
    if options.min_loss_scale > options.initial_loss_scale:
        raise ValueError("--min-loss-scale is above --initial-loss-scale")
    if options.mtp_num_layers and options.pipeline_model_parallel_size > 1:
        if not options.untie_embeddings_and_output_weights:
            raise ValueError(
                "--mtp-num-layers over pipeline stages needs --untie-embeddings-and-output-weights: Megatron makes no "
                "checkpoint of the tied ones"
            )
    balanced = {
        "--moe-aux-loss-coeff": options.moe_aux_loss_coeff,
        "--moe-z-loss-coeff": options.moe_z_loss_coeff,
        "--moe-router-enable-expert-bias": options.moe_router_enable_expert_bias,
        "--moe-expert-capacity-factor": options.moe_expert_capacity_factor,
        "--moe-ffn-hidden-size": options.moe_ffn_hidden_size,
    }
    if options.num_experts is None:
        if given := [name for name, value in balanced.items() if value]:
            raise ValueError(f"{given[0]} needs --num-experts")
        return
    if options.moe_router_topk > options.num_experts:
        raise ValueError(f"--moe-router-topk {options.moe_router_topk} is above --num-experts {options.num_experts}")
    if options.tensor_model_parallel_size > 1:
        raise ValueError(
            "--num-experts with --tensor-model-parallel-size needs sequence parallelism, for which this script has no "
            "layer norm: use --pipeline-model-parallel-size"
        )
    if options.moe_router_enable_expert_bias and options.moe_router_score_function != "sigmoid":
        raise ValueError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")
    if options.moe_aux_loss_coeff and options.moe_router_load_balancing_type in ("sinkhorn", "none"):
        raise ValueError(
            f"--moe-aux-loss-coeff is not for --moe-router-load-balancing-type {options.moe_router_load_balancing_type}"
        )


def _check_layout(options: argparse.Namespace) -> None:
    tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if options.num_attention_heads % tensor:
        raise ValueError(
            f"--num-attention-heads {options.num_attention_heads} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )
    if options.context_parallel_size > 1:
        raise ValueError(
            "--context-parallel-size: Megatron's own attention, which this script uses, has the whole sequence; "
            "only Transformer Engine's can share it"
        )
    if options.sequence_parallel and tensor == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size 2 or more")
    if options.sequence_parallel and importlib.util.find_spec("apex") is None:
        raise ValueError("--sequence-parallel needs the layer norms of Apex, which is not installed: leave it out")
    if options.overlap_param_gather and not options.use_distributed_optimizer:
        raise ValueError("--overlap-param-gather needs --use-distributed-optimizer: without it nothing is gathered")
    if options.overlap_param_gather and not options.overlap_grad_reduce:
        raise ValueError("--overlap-param-gather needs --overlap-grad-reduce as well")
    if options.use_distributed_optimizer and options.optimizer == "sgd":
        raise ValueError("--use-distributed-optimizer is Adam's: leave --optimizer sgd out")
    ranks = int(os.environ.get("WORLD_SIZE", "0")) if "UNICRON_AGENT" not in os.environ else 0
    if ranks % (tensor * pipeline):
        raise ValueError(
            f"{ranks} ranks are no multiple of a replica's {tensor * pipeline} "
            f"(--tensor-model-parallel-size {tensor} times --pipeline-model-parallel-size {pipeline})"
        )


def stage_layers(options: argparse.Namespace) -> list[int]:
    """Layers of each pipeline stage. Raises ValueError (one line) where they cannot be shared out so."""
    layers, stages = options.num_layers, options.pipeline_model_parallel_size
    first, last = options.decoder_first_pipeline_num_layers, options.decoder_last_pipeline_num_layers
    if stages == 1 and (first or last):
        raise ValueError("--decoder-first/last-pipeline-num-layers need --pipeline-model-parallel-size 2 or more")
    middle, between = layers - (first or 0) - (last or 0), stages - bool(first) - bool(last)
    if middle < 0 or bool(middle) != bool(between) or (between and middle % between):
        named = "--num-layers" if between == stages else "what --decoder-first/last-pipeline-num-layers leave,"
        raise ValueError(
            f"{named} {middle}{'' if between == stages else ' layers,'} cannot be shared out evenly over {between} "
            f"of {stages} pipeline stages (--pipeline-model-parallel-size)"
        )
    each = [middle // between] * between if between else []
    return [*([first] if first else []), *each, *([last] if last else [])]


def virtual_stages(options: argparse.Namespace) -> int | None:
    """Model chunks of each rank in an interleaved pipeline, None where it is none."""
    if (count := options.num_virtual_stages_per_pipeline_rank) is not None:
        return count if count > 1 else None
    if (layers := options.num_layers_per_virtual_pipeline_stage) is not None:
        chunks = options.num_layers // options.pipeline_model_parallel_size // layers
        return chunks if chunks > 1 else None
    return None


def _check_pipeline(options: argparse.Namespace) -> None:
    layers, stages = stage_layers(options), options.pipeline_model_parallel_size
    per_chunk, chunks = options.num_layers_per_virtual_pipeline_stage, options.num_virtual_stages_per_pipeline_rank
    name = "--num-virtual-stages-per-pipeline-rank" if chunks else "--num-layers-per-virtual-pipeline-stage"
    if per_chunk and chunks:
        raise ValueError("give one of --num-layers-per-virtual-pipeline-stage and " + name)
    if (per_chunk or chunks) and stages == 1:
        raise ValueError(f"{name} needs --pipeline-model-parallel-size 2 or more")
    if per_chunk and len(set(layers)) > 1:
        raise ValueError(f"{name} is for stages of equal length: use --num-virtual-stages-per-pipeline-rank")
    for count in layers:
        if count % (per_chunk or chunks or 1):
            raise ValueError(f"a pipeline stage of {count} layers is not a multiple of {name} {per_chunk or chunks}")


def _check_recomputation(options: argparse.Namespace) -> None:
    granularity, method, layers = (
        options.recompute_granularity,
        options.recompute_method,
        options.recompute_num_layers,
    )
    if granularity == "full" and (method is None or layers is None):
        raise ValueError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    if granularity != "full" and (method is not None or layers is not None):
        raise ValueError("--recompute-method and --recompute-num-layers are for --recompute-granularity full")


def _check_dataset(options: argparse.Namespace) -> None:
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
