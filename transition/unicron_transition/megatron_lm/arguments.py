"""Megatron-LM's options: those that cannot be healed, and the meaning of those that are carried out here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicron_transition.generations.layout import Layout
from unicron_transition.megatron import limits
from unicron_transition.seams.megatron_lm import CannotHeal, growing_batches


def _options(names: str, advice: str = ": leave it out") -> dict[str, str]:
    """Return attribute -> words for options that are called like their attributes."""
    return {name: f"--{name.replace('_', '-')}{advice}" for name in names.split()}


# Attribute of the arguments -> the words that follow "can't heal". Each option is refused if it is set.
REFUSED_OPTIONS = {
    **_options(
        "perform_rl_step hybrid_context_parallel hierarchical_context_parallel_sizes sft vision_pretraining",
        "",
    ),
    **_options(
        "fake_process_group lazy_mpu_init use_tp_pp_dp_mapping use_sharp nccl_communicator_config_path "
        "high_priority_stream_groups create_all_gather_group iterations_to_skip logits_save_dir "
        "phase_transition_iterations distributed_timeout_seconds_after_init save_dgrads_interval save_wgrads_interval "
        "save_params_interval save_activations_interval run_workload_inspector_server optimizer_cuda_graph log_energy"
    ),
    "nccl_ub": "--use-nccl-ub: leave it out",
    **_options("log_max_attention_logit", ", which is a part of Megatron-LM's own step: leave it out"),
    **_options("inprocess_restart", ", which restarts what unicron keeps: leave it out"),
    **_options("enable_ft_package", ", which would end what unicron heals: leave it out"),
    **_options("data_parallel_random_init", ": all replicas have to begin alike"),
    **_options("step_batch_size_schedule", ": give --global-batch-size"),
    **_options("fim_data", ", whose samples depend on those before them"),
    **_options("skip_train", ": there is nothing to heal"),
    **_options("yaml_cfg use_checkpoint_args", ": give the options in the command"),
    **_options("adlr_autoresume", ": leave it out, Slurm requeues the job"),
    **_options(
        "non_persistent_save_interval non_persistent_ckpt_type", ": leave it out, ranks keep the state in memory"
    ),
    **_options("ckpt_convert_format", ": nothing is trained then"),
    **_options("pretrained_checkpoint", ": name its folder with --load, and give --finetune"),
    **_options("ckpt_step", ": the newest sound checkpoint is gone on from"),
    **_options("full_validation", ": give --eval-iters"),
    **_options("multiple_validation_sets", ": evaluate them from a checkpoint"),
}
# Attribute -> (the only value that can be healed, the words for any other).
ONLY = {
    "context_parallel_size": (1, "context parallelism: leave --context-parallel-size out"),
    "dataloader_type": ("single", "--dataloader-type other than single: its samples depend on the number of ranks"),
}
# Setting of the table of limits -> the option that sets it, where that has another name.
OPTIONS = {
    "average_in_collective": "ddp_average_in_collective",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
}


@dataclass(frozen=True)
class Folders:
    """The folders of Unicron's checkpoints."""

    save: Path | None  # where they are written
    load: Path | None  # where the training may begin from
    interval: int
    """Iterations between two checkpoints."""
    needed: bool
    """--exit-on-missing-checkpoint."""
    optimizer: bool = True
    """Whether to load the optimizer's state: neither --no-load-optim nor --finetune."""
    iteration: bool = True
    """Whether to continue with the iteration of `load`: no --finetune."""


def layout_of(args: Any) -> Layout:
    """Return the layout of a replica that Megatron-LM's arguments state."""
    tensor = args.tensor_model_parallel_size
    lanes = limits.lanes_of(
        tensor, getattr(args, "expert_model_parallel_size", 1) or 1, getattr(args, "expert_tensor_parallel_size", None)
    )
    return Layout(tensor, args.context_parallel_size, args.pipeline_model_parallel_size, expert=lanes)


def take_folders(args: Any) -> Folders:
    """Take the folders of checkpoints out of the arguments: all ranks write Megatron-LM's own checkpoints together, and
    one that dies meanwhile would take the others with it. Raises :class:`CannotHeal` for folders that contradict an
    option."""
    folders = Folders(
        Path(args.save) if args.save else None,
        Path(args.load) if args.load else None,
        int(args.save_interval or 0),
        bool(getattr(args, "exit_on_missing_checkpoint", False)),
        not (getattr(args, "no_load_optim", None) or getattr(args, "finetune", False)),
        not getattr(args, "finetune", False),
    )
    if not folders.iteration and (folders.load is None or folders.load == folders.save):
        raise CannotHeal("give --finetune a --load that is another folder than --save")
    args.finetune = False  # Megatron-LM itself must load nothing
    args.save = args.load = None
    args.async_save = False
    return folders


def check(args: Any) -> None:
    """Raise :class:`CannotHeal` for the first option that cannot be healed."""
    for words in _wrong(args):
        raise CannotHeal(f"can't heal {words}; or run the job with --unicron-mode=restart")
    if args.global_batch_size is None:
        raise CannotHeal("give --global-batch-size: by default it would follow the number of ranks, which may change")


def _wrong(args: Any) -> Iterator[str]:
    for name, words in REFUSED_OPTIONS.items():
        if getattr(args, name, None):
            yield words
    for name, (value, words) in ONLY.items():
        if getattr(args, name, value) not in (value, None):
            yield words
    yield from limits.limits_of(
        lambda name: getattr(args, OPTIONS.get(name, name), None),
        lambda name: f"--{OPTIONS.get(name, name).replace('_', '-')}",
    )
    tied = not getattr(args, "untie_embeddings_and_output_weights", False)
    yield from limits.over_stages(getattr(args, "mtp_num_layers", None), args.pipeline_model_parallel_size, tied)
    if args.distributed_backend not in ("nccl", "gloo"):
        yield f"--distributed-backend {args.distributed_backend}: use nccl"
    for name in ("micro", "global"):
        if (size := getattr(args, f"eval_{name}_batch_size", None)) not in (None, getattr(args, f"{name}_batch_size")):
            yield f"--eval-{name}-batch-size {size}: evaluations have the sizes of the training"
    if getattr(args, "tensor_parallel_num_weight_shards", None) not in (None, args.tensor_model_parallel_size):
        yield "--tensor-parallel-num-weight-shards, which spreads weights over further ranks: leave it out"
    if getattr(args, "rampup_batch_size", None) and growing_batches() is None:
        yield "--rampup-batch-size, which this Megatron-LM ignores: leave it out"
    if args.optimizer not in ("adam", "sgd"):
        yield f"--optimizer {args.optimizer}: use adam or sgd"
