"""The table of the private and replaced names of torch and Megatron: where each is, its parameters in each release, its
use.

A rank compares the table with what is installed: torch's rows at its start, Megatron's as soon as Megatron is imported.
It refuses a release that differs or is unknown in one line, before the first iteration.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

# The tested releases, the oldest first; they are within setup.cfg's ranges.
KNOWN_RELEASES = {
    "torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
}
TRUST = "UNICRON_TRUST_VERSIONS"  # 1: an unknown release is tried as if it were the nearest known one
C10D = "torch.distributed.distributed_c10d"
WORKERS = "torch.utils.data._utils.signal_handling"
PEERLESS = "torch.testing._internal.distributed.fake_pg"
CORE = "megatron.core"
BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZERS = "megatron.core.optimizer.optimizer"
TRAINING = "megatron.training.training"
INITIALIZE = "megatron.training.initialize"
ARGUMENTS = "megatron.training.arguments"
GLOBALS = "megatron.training.global_vars"
TIMERS = "megatron.core.timers"
CALCULATORS = "megatron.core.num_microbatches_calculator"
RAMP = "RampupBatchsizeNumMicroBatchesCalculator"
OPTIM = "torch.distributed.optim"
STORAGE = "torch.distributed.checkpoint.filesystem"
RANDOM = "megatron.core.tensor_parallel.random"
TRANSFORMER = "megatron.core.transformer"
FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
PLACEMENTS = "torch.distributed.tensor.placement_types"
SIGNALS = "megatron.training.dist_signal_handler"
BUCKET_GROUP = "_ParamAndGradBucketGroup"
ASKS_ONCE = "has_grad_norm_group.~_has_grad_norm_group_cache"
MAX_STAT = "reduce_max_stat_across_model_parallel_group"
PARSES = "extra_args_provider ignore_unknown_args"
DATASETS = "build_train_valid_test_datasets_provider"
NOT_THERE = "(gone)"  # in place of parameters: this release does not have the name, or does not need it


class Seam(NamedTuple):
    """One name."""

    module: str
    name: str
    """`()` calls what is before it, for attributes of instances. `~` looks the name up in the source, for attributes of
    objects that cannot be made here. `?` marks a part that a build may lack."""
    parameters: str | None
    """None if only its presence is checked, because it is written in C++ or is no function."""
    use: str
    since: Mapping[str, str | None] = MappingProxyType({})
    """Release -> its new parameters, the oldest release first. A `+` in front adds them to those before."""

    def at(self, release: str) -> str | None:
        """Return its parameters in this release; :data:`NOT_THERE` if the release lacks it."""
        parameters = self.parameters
        for first, since in self.since.items():
            if numbers(first) <= numbers(release):
                parameters = f"{parameters}{since[1:]}" if since is not None and since.startswith("+ ") else since
        return parameters


def numbers(release: str) -> tuple[int, ...]:
    """Parse a release, without what follows its numbers: 2.14.1+cpu -> (2, 14, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", release.partition("+")[0])[:3])


def _seams(module: str, use: str, names: Mapping[str, str | None]) -> tuple[Seam, ...]:
    """Return the rows of names with one use. names: name -> parameters."""
    return tuple(Seam(module, name, parameters, use) for name, parameters in names.items())


_REGISTRIES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")
_MESSAGES = ("SEND", "RECV", "RECVANYSOURCE")
TORCH = (
    *_seams(
        C10D, "groups that outlive their world are registered again", {f"_world.{each}": None for each in _REGISTRIES}
    ),
    Seam(C10D, "_world.group_count", None, "reset, or a world that failed to connect shifts the keys of the next"),
    Seam(C10D, "_get_default_group", "", "the world's store, from which groups are built"),
    Seam(C10D, "GroupName", None, "names of groups"),
    *_seams(C10D, "backends of groups", {"Backend": "name", "BackendConfig": "backend"}),
    Seam(
        C10D,
        "_new_process_group_helper",
        "group_size group_rank global_ranks_in_group backend store group_name backend_options timeout pg_tag device_id "
        "group_desc",
        "builds a group by its own ranks alone",
        {"2.14": "+ enable_reconfigure"},
    ),
    Seam(C10D, "_set_pg_timeout", "timeout group", "a group's time-out after it has connected"),
    Seam(C10D, "ProcessGroupGloo?", None, "replaced while groups connect, so that the connection can be given up"),
    Seam(C10D, "ProcessGroupNCCL?._is_initialized", None, "whether there is a communicator to abort"),
    Seam("torch.distributed", "ProcessGroup._get_backend", None, "the backend whose communicators are aborted"),
    Seam("torch.distributed", "Work.wait", None, "replaced, so that a wait for a lost message can be given up"),
    Seam("torch.distributed", "Work._get_op_type", None, "tells waits for messages from others"),
    *_seams("torch._C._distributed_c10d", "kinds of messages", {f"OpType.{kind}": None for kind in _MESSAGES}),
    Seam(WORKERS, "_set_worker_signal_handlers", None, "replaced, so that a worker goes on as long as its rank"),
    *(
        Seam(f"multiprocessing.popen_{how}", "Popen._launch", "self process_obj", "SIGTERM is blocked until it can act")
        for how in ("fork", "spawn_posix", "forkserver")
    ),
    Seam(PEERLESS, "FakeStore", None, "the world in which a rank builds its model has no peers"),
    Seam("torch", "_foreach_copy_", None, "many tensors are copied in one call"),
    Seam("torch._C", "_current_graph_task_id", None, "tells nested backward passes"),
    Seam("torch", "Tensor()._version", None, "whether a tensor was written to"),
    Seam("torch._C", "_cuda_getDeviceCount?", None, "answered from the device files while a zygote imports"),
    Seam("torch.nn", "Module()._non_persistent_buffers_set", None, "buffers that are mere caches are no state"),
    Seam("torch.nn", "Module()._modules", None, "a module's tensors are looked up again only when one was replaced"),
    Seam("torch.nn", "Module()._parameters", None, "the same"),
    Seam("torch.nn", "Module()._buffers", None, "the same"),
    Seam("torch.nn.modules.batchnorm", "_NormBase", None, "layers with running statistics are refused"),
)
# Compared when a session gets its model, whose modules are imported by then.
TORCH_MODELS = (
    Seam("torch._dynamo.eval_frame", "OptimizedModule.~_orig_mod", None, "the module that was compiled"),
    Seam(
        f"{OPTIM}.apply_optimizer_in_backward",
        "~_in_backward_optimizers",
        None,
        "steps in the backward pass are refused",
    ),
    Seam(
        "torch.optim.optimizer",
        "Optimizer.~_optimizer_step_pre_hooks",
        None,
        "what a program does before a step is refused where it would be left out",
    ),
)
# Compared when a model has distributed tensors, whose modules are imported by then.
TORCH_DTENSORS = (
    Seam(
        "torch.distributed.tensor",
        "DTensor.to_local.~_local_tensor",
        None,
        "a rank's part of a tensor, without communication",
    ),
    Seam("torch.distributed.tensor._api", "~_spec", None, "a gradient has its parameter's"),
    Seam(PLACEMENTS, "_StridedShard", None, "the cut of `fully_shard` over a tensor's"),
    Seam(PLACEMENTS, "~split_factor", None, "the same"),
)
# Compared when a script asks for a mesh.
TORCH_MESHES = (
    Seam(
        "torch.distributed.device_mesh",
        "DeviceMesh.__init__",
        "self device_type mesh mesh_dim_names backend_override _init_backend _rank _layout _rank_map _root_mesh",
        "each direction has a group of its own",
        {
            "2.15": "self device_type mesh mesh_dim_names backend_override preserve_rank_order _init_backend _rank "
            "_layout _rank_map _root_mesh"
        },
    ),
    *_seams(
        "torch.distributed.device_mesh",
        "a mesh finds other ranks and groups in each generation",
        dict.fromkeys(("~_rank_map", "~_pg_registry", "~_dim_group_names"), None),
    ),
    Seam("torch.distributed.device_mesh", "DeviceMesh._get_root_mesh", "self", "whether a tensor is on the mesh"),
    Seam(C10D, "_register_process_group", None, "collectives of distributed tensors find a group by its name"),
    Seam(
        PLACEMENTS,
        "Shard._shard_tensor",
        "self tensor mesh mesh_dim src_data_rank",
        "without peers nobody sends a rank its part",
    ),
    Seam(
        PLACEMENTS,
        "Replicate._make_replicate_tensor",
        "tensor mesh mesh_dim src_data_rank",
        "the same",
    ),
)
_LATER = {"2.13": NOT_THERE}  # torch has a function for it
# Compared when a module is sharded.
TORCH_SHARDED = (
    Seam(f"{FULLY_SHARD}._fully_shard", "FSDPModule._get_fsdp_state", "self", "the groups of a module"),
    *_seams(
        f"{FULLY_SHARD}._fully_shard",
        "gradients are added, and each pass reduces them",
        {
            "FSDPModule.set_gradient_divide_factor": "self factor",
            "FSDPModule.set_force_sum_reduction_for_comms": "self enable",
            "FSDPModule.set_requires_gradient_sync": "self requires_gradient_sync recurse",
            "FSDPModule.set_is_last_backward": "self is_last_backward",
            "FSDPModule.reshard": "self",
        },
    ),
    Seam(
        f"{FULLY_SHARD}._fully_shard",
        "FSDPModule.reset_iter_state",
        NOT_THERE,
        "leaves a broken pass",
        {"2.13": "self"},
    ),
    Seam(f"{FULLY_SHARD}._fsdp_state", "~_fsdp_param_group", None, "the parameters that are gathered together"),
    Seam(f"{FULLY_SHARD}._fsdp_state", "~_fsdp_param_groups", NOT_THERE, "the same", {"2.13": None}),
    *_seams(f"{FULLY_SHARD}._fsdp_state", "leaves a broken pass", dict.fromkeys(("~_is_root", "~_state_ctx"), None)),
    *(
        Seam(f"{FULLY_SHARD}._fsdp_state", f"~{name}", None, "leaves a broken pass", _LATER)
        for name in (
            "_comm_ctx _device_handle _modules_to_run_forward all_states iter_forward_root "
            "post_backward_final_callback_queued _training_state"
        ).split()
    ),
    Seam(
        f"{FULLY_SHARD}._fsdp_state",
        "~manual_backward_finalization",
        NOT_THERE,
        "gradients that nobody reduces are refused",
        {"2.15": None},
    ),
    *_seams(
        f"{FULLY_SHARD}._fsdp_param_group",
        "leaves a broken pass",
        {"FSDPParamGroup._to_sharded": "self"} | dict.fromkeys(("~_all_gather_result", "~fsdp_params"), None),
    ),
    *(
        Seam(f"{FULLY_SHARD}._fsdp_param_group", f"~{name}", None, "leaves a broken pass", _LATER)
        for name in (
            "_training_state _post_reduce_event _all_reduce_state _partial_reduce_output _post_forward_indices "
            "_reshard_after_forward_event all_gather_stream reduce_scatter_stream all_reduce_stream all_gather_state "
            "reduce_scatter_state post_forward_order"
        ).split()
    ),
    *_seams(
        f"{FULLY_SHARD}._fsdp_param_group",
        "who holds groups; other reduces are refused",
        dict.fromkeys(
            (
                "~mesh_info",
                "~post_forward_mesh_info",
                "~_all_gather_comm",
                "~_reduce_scatter_comm",
                "~_all_reduce_hook",
            ),
            None,
        ),
    ),
    *_seams(
        f"{FULLY_SHARD}._fsdp_collectives",
        "others are refused",
        {"DefaultAllGather": None, "DefaultReduceScatter": None},
    ),
    Seam(f"{FULLY_SHARD}._fsdp_common", "~shard_process_group", None, "the group that gathers"),
    Seam(f"{FULLY_SHARD}._fsdp_common", "~reduce_scatter_process_group", NOT_THERE, "refused", {"2.13": None}),
    Seam(f"{FULLY_SHARD}._fsdp_common", "TrainingState.IDLE", None, "leaves a broken pass", _LATER),
    *_seams(
        f"{FULLY_SHARD}._fsdp_param",
        "leaves a broken pass",
        dict.fromkeys(("~_unsharded_param", "~sharded_param", "~unsharded_accumulated_grad"), None),
    ),
    *_seams(
        f"{FULLY_SHARD}._fsdp_param",
        "what is refused",
        dict.fromkeys(("~_module_info", "~offload_to_cpu", "~mesh_info"), None),
    ),
    Seam(f"{FULLY_SHARD}._fsdp_param", "~_orig_param_uid", NOT_THERE, "shared parameters", {"2.13": None}),
    Seam(
        f"{FULLY_SHARD}._fsdp_param",
        "FSDPParam.__init__",
        "self param module_info mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy",
        "wrapped: notes shared parameters",
        _LATER,
    ),
    Seam("torch.utils._python_dispatch", "TorchDispatchMode", None, "an optimizer that communicates is refused"),
)
# Compared when a checkpoint of torch's own format is written.
TORCH_CHECKPOINTS = (
    Seam(
        STORAGE, "_StorageInfo", "relative_path offset length transform_descriptors", "where the bytes of a chunk are"
    ),
)
MEGATRON_CORE = (
    Seam(
        BUFFERS,
        "_ParamAndGradBuffer.__init__",
        "self ddp_config param_dtype grad_dtype params data_parallel_group bucket_size param_to_name "
        "gradient_scaling_factor param_indices nccl_ub pg_collection",
        "replaced, so that buckets have room for every number of replicas",
        {
            "0.17": "self ddp_config param_dtype grad_dtype params_with_names data_parallel_group bucket_size "
            "param_to_name gradient_scaling_factor param_indices nccl_ub pg_collection",
            "0.18": "+ param_layout",
        },
    ),
    Seam(BUFFERS, "math.lcm", None, "replaced while a buffer is laid out", {"0.18": NOT_THERE}),
    Seam(
        OPTIMIZER,
        "DistributedOptimizer._compute_per_buffer_param_layout",
        NOT_THERE,
        "wrapped: buckets get room for every number of replicas",
        {"0.18": "params bucket_size data_parallel_world_size ddp_config param_indices"},
    ),
    Seam(
        OPTIMIZER,
        "pad_bucket_end",
        NOT_THERE,
        "replaced while a buffer is laid out",
        {"0.18": "bucket_end_index data_parallel_world_size pad_for_high_nccl_busbw"},
    ),
    Seam(BUFFERS, f"{BUCKET_GROUP}.start_grad_sync", "self force_all_reduce", "wrapped: copies before reduces"),
    Seam(BUFFERS, f"{BUCKET_GROUP}.finish_param_sync", "self skip_next_bucket_dispatch", "gathers parameters"),
    Seam(
        OPTIMIZER,
        "DistributedOptimizer.__init__",
        "self optimizer config grad_scaler init_state_fn model_chunks per_model_buffers data_parallel_group "
        "data_parallel_group_gloo data_parallel_group_idx distributed_optimizer_instance_id",
        "wrapped: it forgets the model's parameters, which a change of size needs",
    ),
    *_seams(
        OPTIMIZER,
        "a change of size",
        {
            "DistributedOptimizer._build_gbuf_range_map": "param_and_grad_buffer",
            "DistributedOptimizer._build_model_param_gbuf_map": "gbuf_ranges",
            "DistributedOptimizer._build_optimizer_group_ranges": "param_groups gbuf_ranges",
            "DistributedOptimizer._build_model_and_main_param_groups": "gbuf_ranges param_gbuf_map opt_group_ranges "
            "config",
            "DistributedOptimizer._copy_main_params_to_model_params": "self",
            "DistributedOptimizer._get_model_param_range_map": "self param",
            "DistributedOptimizer._get_main_param_and_optimizer_states": "self model_param",
        },
    ),
    *_seams(
        OPTIMIZERS,
        "wrapped: the commit comes before it",
        {f"{kind}Optimizer.step_with_ready_grads": "self" for kind in ("MixedPrecision", "FP32", "Chained")},
    ),
    *(
        Seam(OPTIMIZERS, f"{kind}Optimizer.{ASKS_ONCE}", NOT_THERE, "all ranks ask again for a joiner", {"0.19": None})
        for kind in ("Megatron", "Chained")
    ),
    Seam(
        "megatron.core.pipeline_parallel.p2p_communication",
        "_p2p_ops",
        "tensor_send_prev tensor_recv_prev tensor_send_next tensor_recv_next group prev_pipeline_rank "
        "next_pipeline_rank",
        "replaced: with two stages it would send over the world",
    ),
    Seam(RANDOM, "_CUDA_RNG_STATE_TRACKER", None, "random numbers belong to micro-batches"),
    Seam(f"{TRANSFORMER}.moe.moe_utils", "MoEAuxLossAutoScaler.set_loss_scale", "scale", "equal weights"),
    Seam(f"{TRANSFORMER}.multi_token_prediction", "MTPLossAutoScaler.set_loss_scale", "scale", "equal weights"),
)
_GROUPS = {"0.19": "+ pg_collection p2p_communicator"}
MEGATRON_LM = (
    Seam(INITIALIZE, "parse_args", PARSES, "the world that it is told of", {"0.18": NOT_THERE}),
    Seam(INITIALIZE, "validate_args", "args defaults", "options that cannot be healed", {"0.18": NOT_THERE}),
    Seam(ARGUMENTS, "parse_args", NOT_THERE, "the world that it is told of", {"0.18": PARSES}),
    Seam(ARGUMENTS, "validate_args", NOT_THERE, "options that cannot be healed", {"0.18": "args defaults"}),
    Seam(
        INITIALIZE,
        "_initialize_distributed",
        "get_embedding_ranks get_position_embedding_ranks store",
        "the job's groups",
        {"0.19": "+ skip_model_parallel_init"},
    ),
    Seam(INITIALIZE, "_compile_dependencies", "", "no wait for rank 0"),
    *_seams(
        GLOBALS,
        "one rank writes",
        {f"_set_{kind}": "args" for kind in ("tensorboard_writer", "wandb_writer", "one_logger")},
    ),
    *_seams(TRAINING, "one rank writes", {"get_tensorboard_writer": "", "get_wandb_writer": ""}),
    Seam(
        TRAINING,
        "train",
        "forward_step_func model optimizer opt_param_scheduler train_data_iterator valid_data_iterator "
        "process_non_loss_data_func config checkpointing_context non_loss_data_func inference_model",
        "the loop begins where the others are",
        {"0.19": "+ p2p_communicator pg_collection"},
    ),
    Seam(
        TRAINING,
        "train_step",
        "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func iteration",
        "a step is the session's",
        _GROUPS,
    ),
    Seam(
        TRAINING,
        "checkpoint_and_decide_exit",
        "model optimizer opt_param_scheduler iteration num_floating_point_operations_so_far checkpointing_context "
        "train_data_iterator",
        "checkpoints and the end are the session's",
    ),
    Seam(
        TRAINING,
        "evaluate",
        "forward_step_func data_iterator model process_non_loss_data_func config verbose non_loss_data_func eval_iters",
        "the sums are the session's",
        _GROUPS,
    ),
    Seam(
        TRAINING,
        "evaluate_and_print_results",
        "prefix forward_step_func data_iterator model iteration process_non_loss_data_func config verbose "
        "write_to_tensorboard non_loss_data_func",
        "a rank that joins takes part in the present evaluation",
        _GROUPS,
    ),
    Seam(
        TRAINING,
        "training_log",
        "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter grad_norm "
        "params_norm num_zeros_in_grad max_attention_logit pg_collection is_first_iteration",
        "the first iteration is logged once",
        {"0.18": "+ seqlen_squared_sum_in_batch total_real_tokens_in_batch"},
    ),
    Seam(
        TRAINING,
        "post_training_step_callbacks",
        "model optimizer opt_param_scheduler iteration prof num_floating_point_operations_since_last_log_event "
        "nsys_nvtx_context",
        "a loss in its collectives is recovered",
    ),
    Seam("megatron.core.utils", "StragglerDetector.~_off", None, "all ranks measure, or none"),
    Seam(TRAINING, "calc_params_l2_norm", "model force_create_fp32_copy", "a loss in its collectives is recovered"),
    Seam(
        f"{TRANSFORMER}.moe.moe_utils",
        "reduce_aux_losses_tracker_across_ranks",
        "track_names pg_collection",
        "replaced: the session sums what ranks have computed",
        {"0.18": NOT_THERE},
    ),
    Seam(
        f"{TRANSFORMER}.moe.moe_logging",
        "MoEMetricsTracker._sync_metrics",
        NOT_THERE,
        "replaced: the session sums what ranks have computed",
        {"0.18": "self metric_names pg_collection"},
    ),
    Seam(
        f"{TRANSFORMER}.multi_token_prediction",
        "MTPLossLoggingHelper.reduce_loss_in_tracker",
        "",
        "replaced: the session sums what ranks have computed",
        {"0.19": NOT_THERE},
    ),
    Seam(
        f"{TRANSFORMER}.multi_token_prediction",
        "MTPLossLoggingHelper.reduce_metrics_in_tracker",
        NOT_THERE,
        "replaced: the session sums what ranks have computed",
        {"0.19": ""},
    ),
    *_seams(
        TRAINING,
        "samples by index",
        {
            "build_train_valid_test_data_iterators": DATASETS,
            "build_train_valid_test_datasets": f"{DATASETS} train_valid_test_num_samples",
        },
    ),
    Seam(TRAINING, "print_datetime", "string override_timestamp", "no barrier"),
    Seam(TRAINING, "should_disable_forward_pre_hook", "args", "all iterations gather alike"),
    Seam(TRAINING, MAX_STAT, "stat", "no collective between iterations", {"0.19": "+ group"}),
    Seam(SIGNALS, "DistributedSignalHandler.~_signal_received", None, "all end at once"),
    Seam(
        CALCULATORS,
        RAMP,
        "global_batch_size micro_batch_size data_parallel_size decrease_batch_size_if_needed rank "
        "start_global_batch_size batch_size_increment ramup_samples",
        "how the batch grows with the samples; from 0.18 on the option is ignored",
        {"0.18": NOT_THERE},
    ),
    Seam(TIMERS, "Timers.~_timers", None, "no collective between iterations"),
    *_seams(TIMERS, "no barrier", {"Timer.start": "self barrier", "Timer.stop": "self barrier"}),
    Seam(TIMERS, "Timers._get_elapsed_time_all_ranks", "self names reset barrier", "no collective between iterations"),
)


RESTART = "leave the session out, and restart mode heals the script as it is (--unicron-mode=restart)"


class UnsupportedLayout(RuntimeError):
    """This release cannot heal the job because of its layout or model, or of its torch or Megatron."""


def refuse(findings: Iterable[str]) -> None:
    """Raise :class:`UnsupportedLayout` for the first finding, if there is one."""
    for found in findings:
        raise UnsupportedLayout(f"unicron can't heal {found}; or {RESTART}")


def check(package: str, seams: Iterable[Seam], needed: Collection[str] = ()) -> None:
    """Compare the rows with `package`: those of modules that are imported, or `needed`. Raises
    :class:`UnsupportedLayout` for an unknown release, and for one that differs."""
    rows = [seam for seam in seams if seam.module in sys.modules or seam.module in needed]
    if not rows:
        return
    release = installed_release(package)
    if not known(package, release) and os.environ.get(TRUST) != "1":
        refuse_release(package, f"{TRUST}=1 tries it all the same, untested")
    if (found := difference(rows, release)) is not None:
        refuse_release(package, found)


def installed_release(package: str) -> str:
    """Return the release of an imported package; empty if it does not say."""
    return str(getattr(sys.modules.get(package.replace("-", ".")), "__version__", ""))


def known(package: str, release: str) -> bool:
    """Whether a release with the same first two numbers was tested."""
    return any(numbers(each)[:2] == numbers(release)[:2] for each in KNOWN_RELEASES[package])


def refuse_release(package: str, found: str) -> NoReturn:
    """Raise :class:`UnsupportedLayout` for the installed release because of this finding."""
    release, releases = installed_release(package) or "of no known release", ", ".join(KNOWN_RELEASES[package])
    raise UnsupportedLayout(
        f"unicron does not know this {package} ({release}): {found}; install one of {releases}, or run the job with "
        "--unicron-mode=restart"
    )


def difference(seams: Iterable[Seam], release: str) -> str | None:
    """Describe the first row that differs from what is installed; None if there is none."""
    for seam in seams:
        parameters, expected = None, seam.at(release)
        if expected == NOT_THERE:
            continue
        try:
            found = find(seam)
            if expected is not None and found is not ABSENT:
                parameters = _parameters(found)
        except (ImportError, AttributeError, ValueError, TypeError, OSError):
            return f"{seam.module}.{seam.name} is not there"
        if parameters is not None and expected is not None and parameters != expected.split():
            return f"{seam.module}.{seam.name} takes ({', '.join(parameters)})"
    return None


def _parameters(function: Any) -> list[str] | None:
    """Return the names of its parameters; None for a wrapper that passes anything on."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    wraps = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return None if wraps else list(parameters)


ABSENT = object()  # a class that this build of torch does not have


def find(seam: Seam) -> Any:
    """Find the object of the row; :data:`ABSENT` for a missing part with `?`. Raises AttributeError."""
    found: Any = importlib.import_module(seam.module)
    for part in seam.name.split("."):
        if part.startswith("~"):
            if part[1:] not in inspect.getsource(found):
                raise AttributeError(part[1:])
            return found
        if part.endswith("?") and not hasattr(found, part[:-1]):
            return ABSENT
        found = getattr(found, part.rstrip("?()"))
        found = found() if part.endswith("()") else found
    return found
