"""Megatron-LM's options: which cannot be healed, and what those mean that are carried out here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicron_transition.generations.layout import Layout
from unicron_transition.seams.megatron_lm import CannotHeal, growing_batches

# attribute of the arguments -> what follows "unicron can't heal". Each is refused where it is set.
REFUSED_OPTIONS = {
    "perform_rl_step": "--perform-rl-step",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes",
    "use_torch_fsdp2": "--use-torch-fsdp2: use --use-distributed-optimizer",
    "use_megatron_fsdp": "--use-megatron-fsdp: use --use-distributed-optimizer",
    "inprocess_restart": "--inprocess-restart, which restarts what unicron keeps: leave it out",
    "enable_ft_package": "--enable-ft-package, which would end what unicron heals: leave it out",
    "fake_process_group": "--fake-process-group: leave it out",
    "lazy_mpu_init": "--lazy-mpu-init: leave it out",
    "use_tp_pp_dp_mapping": "--use-tp-pp-dp-mapping: leave it out",
    "use_sharp": "--use-sharp: leave it out",
    "tp_comm_overlap": "--tp-comm-overlap, which holds groups of its own: leave it out",
    "nccl_ub": "--use-nccl-ub: leave it out",
    "nccl_communicator_config_path": "--nccl-communicator-config-path: leave it out",
    "high_priority_stream_groups": "--high-priority-stream-groups: leave it out",
    "create_all_gather_group": "--create-all-gather-group: leave it out",
    "num_experts": "--num-experts, whose log and auxiliary losses communicate between two iterations",
    "mtp_num_layers": "--mtp-num-layers, whose log communicates between two iterations",
    "data_parallel_random_init": "--data-parallel-random-init: all replicas have to begin alike",
    "iterations_to_skip": "--iterations-to-skip: leave it out",
    "phase_transition_iterations": "--phase-transition-iterations: leave it out",
    "step_batch_size_schedule": "--step-batch-size-schedule: give --global-batch-size",
    "gpu_sniff_test_interval": "--gpu-sniff-test-interval, which communicates between two iterations: leave it out",
    "fim_data": "--fim-data, whose samples depend on those before them",
    "sft": "--sft",
    "vision_pretraining": "--vision-pretraining",
    "moe_use_upcycling": "--moe-use-upcycling",
    "skip_train": "--skip-train: there is nothing to heal",
    "yaml_cfg": "--yaml-cfg: give the options in the command",
    "adlr_autoresume": "--adlr-autoresume: leave it out, Slurm requeues the job",
    "distributed_timeout_seconds_after_init": "--distributed-timeout-seconds-after-init: leave it out",
    "non_persistent_save_interval": "--non-persistent-save-interval: leave it out, ranks keep the state in memory",
    "non_persistent_ckpt_type": "--non-persistent-ckpt-type: leave it out, ranks keep the state in memory",
    "ckpt_convert_format": "--ckpt-convert-format: nothing is trained then",
    "pretrained_checkpoint": "--pretrained-checkpoint: name its folder with --load, and give --finetune",
    "ckpt_step": "--ckpt-step: the newest sound checkpoint is gone on from",
    "use_checkpoint_args": "--use-checkpoint-args: give the options in the command",
    "log_params_norm": "--log-params-norm, which communicates between two iterations: leave it out",
    "log_straggler": "--log-straggler, which communicates between two iterations: `unicronctl status` names slow ranks",
    "log_energy": "--log-energy, which communicates between two iterations: leave it out",
    "log_max_attention_logit": "--log-max-attention-logit, which communicates between two iterations: leave it out",
    "qk_clip": "--qk-clip, which communicates between two iterations",
    "full_validation": "--full-validation: give --eval-iters",
    "multiple_validation_sets": "--multiple-validation-sets: evaluate them from a checkpoint",
    "check_weight_hash_across_dp_replicas_interval": "--check-weight-hash-across-dp-replicas-interval: leave it out",
    "save_dgrads_interval": "--save-dgrads-interval: leave it out",
    "save_wgrads_interval": "--save-wgrads-interval: leave it out",
    "save_params_interval": "--save-params-interval: leave it out",
    "save_activations_interval": "--save-activations-interval: leave it out",
    "logits_save_dir": "--logits-save-dir: leave it out",
    "run_workload_inspector_server": "--run-workload-inspector-server: leave it out",
    "optimizer_cuda_graph": "--optimizer-cuda-graph: leave it out",
    "optimizer_cpu_offload": "--optimizer-cpu-offload: leave it out",
}
# attribute -> (the only value that is healed, how to say it)
ONLY = {
    "context_parallel_size": (1, "context parallelism: leave --context-parallel-size out"),
    "expert_model_parallel_size": (1, "expert parallelism: leave --expert-model-parallel-size out"),
    "num_distributed_optimizer_instances": (1, "several instances of the distributed optimizer"),
    "dataloader_type": ("single", "--dataloader-type other than single: its samples depend on the number of ranks"),
    "cuda_graph_impl": ("none", "CUDA graphs, which hold the groups that they were captured with"),
}


@dataclass(frozen=True)
class Folders:
    """The folders of Unicron's checkpoints: where they are written every `interval` iterations, where they may come
    from."""

    save: Path | None
    load: Path | None
    interval: int
    needed: bool  # --exit-on-missing-checkpoint
    optimizer: bool = True  # its state is taken from `load`, too: neither --no-load-optim nor --finetune
    iteration: bool = True  # the training goes on with the iteration of `load`: no --finetune


def layout_of(args: Any) -> Layout:
    """Return the layout of a replica that Megatron-LM's arguments state."""
    return Layout(args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size)


def take_folders(args: Any) -> Folders:
    """Take the folders of checkpoints out of the arguments: Megatron-LM's own are written by all ranks together, and
    one that dies meanwhile would take the others with it. Raises :class:`CannotHeal` for folders that contradict an
    option."""
    found = Folders(
        Path(args.save) if args.save else None,
        Path(args.load) if args.load else None,
        int(args.save_interval or 0),
        bool(getattr(args, "exit_on_missing_checkpoint", False)),
        not (getattr(args, "no_load_optim", None) or getattr(args, "finetune", False)),
        not getattr(args, "finetune", False),
    )
    if not found.iteration and (found.load is None or found.load == found.save):
        raise CannotHeal("give --finetune a --load that is another folder than --save")
    args.finetune = False  # there is nothing that Megatron-LM itself would load
    args.save = args.load = None
    args.async_save = False
    return found


def check(args: Any) -> None:
    """Raises :class:`CannotHeal` for the first option that cannot be healed."""
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
