"""What is replaced in Megatron-LM, and whether it is what is known here: another release is refused, not guessed at."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

RELEASES = ("0.16.1",)
TRAINING = "megatron.training.training"
INITIALIZE = "megatron.training.initialize"
GLOBALS = "megatron.training.global_vars"
TIMERS = "megatron.core.timers"
# module, name in it, parameters
SEAMS: tuple[tuple[str, str, str], ...] = (
    (INITIALIZE, "parse_args", "extra_args_provider ignore_unknown_args"),
    (INITIALIZE, "validate_args", "args defaults"),
    (INITIALIZE, "_initialize_distributed", "get_embedding_ranks get_position_embedding_ranks store"),
    (INITIALIZE, "_compile_dependencies", ""),
    (GLOBALS, "_set_tensorboard_writer", "args"),
    (GLOBALS, "_set_wandb_writer", "args"),
    (GLOBALS, "_set_one_logger", "args"),
    (
        TRAINING,
        "train",
        "forward_step_func model optimizer opt_param_scheduler train_data_iterator valid_data_iterator "
        "process_non_loss_data_func config checkpointing_context non_loss_data_func inference_model",
    ),
    (
        TRAINING,
        "train_step",
        "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func iteration",
    ),
    (
        TRAINING,
        "checkpoint_and_decide_exit",
        "model optimizer opt_param_scheduler iteration num_floating_point_operations_so_far checkpointing_context "
        "train_data_iterator",
    ),
    (
        TRAINING,
        "training_log",
        "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter grad_norm "
        "params_norm num_zeros_in_grad max_attention_logit pg_collection is_first_iteration",
    ),
    (TRAINING, "build_train_valid_test_data_iterators", "build_train_valid_test_datasets_provider"),
    (
        TRAINING,
        "build_train_valid_test_datasets",
        "build_train_valid_test_datasets_provider train_valid_test_num_samples",
    ),
    (TRAINING, "print_datetime", "string override_timestamp"),
    (TRAINING, "should_disable_forward_pre_hook", "args"),
    (TRAINING, "reduce_max_stat_across_model_parallel_group", "stat"),
    (TIMERS, "Timer.start", "self barrier"),
    (TIMERS, "Timer.stop", "self barrier"),
    (TIMERS, "Timers._get_elapsed_time_all_ranks", "self names reset barrier"),
)


class Refused(RuntimeError):
    """This Megatron-LM, or what it was asked to do, cannot be healed; one line that says what to do."""


def check() -> None:
    """Imports `megatron.training`. Raises :class:`Refused` for one that is not there, or not known."""
    try:
        importlib.import_module("megatron.training")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.training"):
            raise Refused(f"Megatron-LM needs {error.name}, which is not installed: pip install {error.name}") from None
        raise Refused(
            "no megatron.training beside the script or in PYTHONPATH: name the script in a checkout of Megatron-LM"
        ) from None
    release = importlib.import_module("megatron.core").__version__
    instead = "check that one out, or run the job with --unicron-mode=restart"
    if release not in RELEASES:
        raise Refused(f"knows Megatron-LM core_v{RELEASES[-1]}, and this is core_v{release}: {instead}")
    for module, name, wanted in SEAMS:
        found = _parameters(module, name)
        if found != wanted.split():
            what = "is not there" if found is None else f"takes ({', '.join(found)})"
            raise Refused(f"this is not Megatron-LM core_v{release}, in which {module}.{name} {what}: {instead}")


def _parameters(module: str, name: str) -> list[str] | None:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return None if found is None else list(inspect.signature(found).parameters)


def replace(module: str, name: str, by: Callable[[Any], Any]) -> None:
    """Puts `by(original)` in the place of what `SEAMS` calls so."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, by(getattr(owner, last)))
