"""Of the stand-in: the loop, with what the real one does between two iterations."""

import os
import signal
import sys
from datetime import datetime
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import StragglerDetector, check_param_hashes_across_dp_replicas, get_model_config
from torch.utils.data import default_collate

from .global_vars import (
    get_args,
    get_signal_handler,
    get_tensorboard_writer,
    get_timers,
    get_wandb_writer,  # noqa: F401
    get_writers,
)
from .initialize import initialize_megatron
from .releases import takes_more

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:  # before 0.18
    moe_logging = None
stimer = StragglerDetector()
GROUPS = {"0.19": "pg_collection p2p_communicator"}


def pretrain(train_valid_test_dataset_provider, model_provider, model_type, forward_step_func):
    import gpt_model

    initialize_megatron()
    args = get_args()
    print_datetime("after megatron is initialized")
    model = model_provider(args)
    optimizer, scheduler = gpt_model.build_optimizer(args, model)
    train_data, valid_data, test_data = build_train_valid_test_data_iterators(train_valid_test_dataset_provider)
    config, iteration = get_model_config(model[0]), 0
    if args.do_train:
        iteration, _ = train(
            forward_step_func, model, optimizer, scheduler, train_data, valid_data, None, config, {}, None, None
        )
    print_datetime("after training is done")
    for wanted, data, what in ((args.do_valid, valid_data, "validation"), (args.do_test, test_data, "test")):
        if wanted:
            prefix = f"iteration {iteration} on {what} set"
            evaluate_and_print_results(prefix, forward_step_func, data, model, iteration, None, config, verbose=True)


def model_provider(args):
    import gpt_model

    chunks = gpt_model.build_model(args, torch.device("cpu"))
    config = get_model_config(chunks[0])
    config.no_sync_func = config.grad_sync_func = None  # the loop sets them
    return chunks


def forward_step(data_iterator, model):
    """The real one's loss function: (sum over tokens, tokens, {name: both})."""
    import gpt_model

    output, inner = gpt_model.make_forward_step(get_args(), torch.device("cpu"), get_args().micro_batch_seconds)(
        data_iterator, model
    )
    return output, lambda losses: _loss(inner(losses), losses)


def _loss(found, losses):
    loss, tokens = found[0], torch.tensor(losses.numel(), dtype=torch.int)
    total = loss * tokens if len(found) == 2 else loss
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def train_valid_test_datasets_provider(train_val_test_num_samples):
    import train_gpt

    assert train_val_test_num_samples[0] == get_args().train_iters * get_args().global_batch_size
    dataset = train_gpt.build_dataset(get_args())
    return dataset, _Backwards(dataset), _Backwards(dataset)


class _Backwards:
    """The samples from the last one on: those that are trained last, if ever."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, sample):
        return self._dataset[len(self._dataset) - 1 - sample]


def build_train_valid_test_datasets(build_train_valid_test_datasets_provider, train_valid_test_num_samples=None):
    args = get_args()
    return build_train_valid_test_datasets_provider((args.train_iters * args.global_batch_size, 0, 0))


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    args = get_args()
    datasets = build_train_valid_test_datasets(build_train_valid_test_datasets_provider)
    flags = torch.tensor([1, int(args.eval_iters > 0), int(args.eval_iters > 0)])
    torch.distributed.broadcast(flags, 0)
    args.do_train, args.do_valid, args.do_test = map(bool, flags)
    return tuple(_loader(dataset, args) for dataset in datasets)


def _loader(dataset, args):
    """In the order of Megatron's sampler."""
    whole, mine = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for first in range(mine * args.micro_batch_size, len(dataset), whole * args.micro_batch_size):
        yield default_collate([dataset[sample] for sample in range(first, first + args.micro_batch_size)])


@takes_more({"0.19": "p2p_communicator pg_collection"})
def train(
    forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator,
    process_non_loss_data_func, config, checkpointing_context, non_loss_data_func, inference_model=None,
):  # fmt: skip
    args, timers = get_args(), get_timers()
    iteration = args.iteration
    if args.overlap_grad_reduce:
        assert config.no_sync_func is None
        config.no_sync_func = [chunk.no_sync for chunk in model]
        config.no_sync_func = config.no_sync_func[0] if len(model) == 1 else config.no_sync_func
    config.finalize_model_grads_func, config.timers = finalize_model_grads, timers
    timers("interval-time", log_level=0).start(barrier=True)
    print_datetime("before the start of training step")
    if should_disable_forward_pre_hook(args):
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)
    if args.check_weight_hash_across_dp_replicas_interval:
        assert check_param_hashes_across_dp_replicas(model, cross_check=True)
        torch.distributed.barrier()
        print_rank_last(f">>> Weight hashes match after {iteration} iterations...")
    if args.log_straggler:
        stimer.configure(torch.distributed.get_world_size(), torch.distributed.get_rank(), enabled=True)
    start, should_exit, totals = iteration, False, {}
    num_microbatches = get_num_microbatches()
    while iteration < args.train_iters and not should_exit:
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        assert get_num_microbatches() >= num_microbatches, "it only grows"
        num_microbatches = get_num_microbatches()
        loss_dict, skipped, _, _, exit_code, grad_norm, _, _ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config,
            get_forward_backward_func(), iteration=iteration,
        )  # fmt: skip
        if iteration == start and should_disable_forward_pre_hook(args):
            for chunk in model:
                chunk.enable_forward_pre_hook()
        iteration += 1
        batch = mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches()
        args.consumed_train_samples += batch
        params_norm = calc_params_l2_norm(model) if args.log_params_norm else None
        training_log(
            loss_dict, totals, optimizer.param_groups[0]["lr"], iteration, 1.0, False, skipped, grad_norm, params_norm,
            None, 0, is_first_iteration=iteration == start + 1,
        )  # fmt: skip
        if args.eval_interval and iteration % args.eval_interval == 0 and args.do_valid:
            timers("interval-time").stop()
            evaluate_and_print_results(
                f"iteration {iteration}", forward_step_func, valid_data_iterator, model, iteration,
                process_non_loss_data_func, config,
            )  # fmt: skip
            timers("interval-time", log_level=0).start(barrier=True)
        post_training_step_callbacks(model, optimizer, opt_param_scheduler, iteration, None, 1.0)
        should_exit = checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, 0, {}, None)
    if should_exit:
        sys.exit(exit_code)
    return iteration, 0


@takes_more(GROUPS)
def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func,
    iteration=None,
):  # fmt: skip
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=[data_iterator] * len(model) if len(model) > 1 else data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    _, grad_norm, _ = optimizer.step()
    opt_param_scheduler.step(increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    loss_dict = {}
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        value = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
        torch.distributed.all_reduce(value, group=mpu.get_data_parallel_group())
        loss_dict = {"lm loss": value[0] / value[1]}
    return loss_dict, 0, False, False, 0, grad_norm, None, 0


@takes_more(GROUPS)
def evaluate(
    forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False,
    non_loss_data_func=None, eval_iters=None,
):  # fmt: skip
    args, timers = get_args(), get_timers()
    timers("evaluate", log_level=0).start(barrier=True)
    for chunk in model:
        chunk.eval()
    total = {}
    with torch.no_grad():
        for _ in range(args.eval_iters if eval_iters is None else eval_iters):
            losses = get_forward_backward_func()(
                forward_step_func=forward_step_func, data_iterator=data_iterator, model=model,
                num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
                seq_length=args.seq_length, micro_batch_size=args.micro_batch_size, forward_only=True,
            )  # fmt: skip
            if mpu.is_pipeline_last_stage(ignore_virtual=True):
                value = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
                torch.distributed.all_reduce(value, group=mpu.get_data_parallel_group())
                total["lm loss"] = total.get("lm loss", 0) + value
            args.consumed_valid_samples += args.global_batch_size
    for chunk in model:
        chunk.train()
    timers("evaluate").stop()
    timers.log(["evaluate"])
    return {key: value[0] / value[1] for key, value in total.items()}, None, False


@takes_more(GROUPS)
def evaluate_and_print_results(
    prefix, forward_step_func, data_iterator, model, iteration, process_non_loss_data_func, config, verbose=False,
    write_to_tensorboard=True, non_loss_data_func=None,
):  # fmt: skip
    losses, _, _ = evaluate(
        forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose, non_loss_data_func,
        eval_iters=get_args().eval_iters,
    )  # fmt: skip
    line = f" validation loss at {prefix} | "
    for key, value in losses.items():
        line += f"{key} value: {value.item():.6E} | "
    print_rank_last(line)


@takes_more({"0.18": "seqlen_squared_sum_in_batch total_real_tokens_in_batch"})
def training_log(
    loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm,
    params_norm, num_zeros_in_grad, max_attention_logit, pg_collection=None, is_first_iteration=False,
):  # fmt: skip
    """A line for the mean since the last one. What the first one told is in the second once more, as in the real."""
    args, timers = get_args(), get_timers()
    for key, value in loss_dict.items():
        total_loss_dict.setdefault(key, []).append(value.item())
    if args.num_experts is not None:
        _track_experts(args, total_loss_dict, iteration, pg_collection)
    if args.mtp_num_layers is not None:
        scale, found = 1 / get_num_microbatches(), {}
        MTPLossLoggingHelper.track_mtp_metrics(scale, iteration, None, None, found)
        for key, value in found.items():
            total_loss_dict.setdefault(key, []).append(value.item())
    learning_rate = reduce_max_stat_across_model_parallel_group(learning_rate)
    if iteration % args.log_interval and not is_first_iteration:
        return
    seconds = timers("interval-time").elapsed(barrier=True)
    line = f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: {args.consumed_train_samples:12d} |"
    line += f" elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: {learning_rate:.6E} |"
    for key, values in total_loss_dict.items():
        if sum(values) > 0.0:
            line += f" {key}: {sum(values) / len(values):.6E} |"
    if (writer := get_tensorboard_writer()) is not None:
        writer.add_scalar("lm loss", loss_dict["lm loss"].item(), iteration)
    if not is_first_iteration:
        total_loss_dict.clear()
    if params_norm is not None:
        line += f" params norm: {params_norm:.3f} |"
    print_rank_last(f"{line} grad norm: {grad_norm:.5f} | skipped: {skipped_iter} | writers: {len(get_writers())} |")
    timers.log(["forward-backward"], normalizer=1, barrier=True)


def _track_experts(args, total_loss_dict, iteration, pg_collection):
    """The real one's names, and Megatron-core's own sums."""
    kinds = args.moe_router_load_balancing_type
    names = ["load_balancing_loss"] if "aux_loss" in kinds else []
    names += ["seq_load_balancing_loss"] if "seq_aux_loss" in kinds else []
    names += ["z_loss"] if args.moe_z_loss_coeff is not None else []
    scale, found = 1 / get_num_microbatches(), {}
    layers = {"num_layers": args.num_layers, "moe_layer_freq": 1, "mtp_num_layers": args.mtp_num_layers}
    report = moe_logging.get_moe_metrics_tracker().report if moe_logging else moe_utils.track_moe_metrics
    report(
        scale, iteration, total_loss_dict=found, force_initialize=True, track_names=names, pg_collection=pg_collection,
        **layers,
    )  # fmt: skip
    for key, value in found.items():
        total_loss_dict.setdefault(key, []).append(value.item())


def calc_params_l2_norm(model, force_create_fp32_copy=False):
    """Of parameters that all tensor ranks have, each has the same. One rank dies before it if the test wants it."""
    args = get_args()
    if args.dies is not None and args.consumed_train_samples == int(args.dies[0]) * args.global_batch_size:
        if torch.distributed.get_rank() == 0 and not (marker := Path(args.dies[1])).exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    squares = sum(parameter.detach().double().square().sum() for chunk in model for parameter in chunk.parameters())
    torch.distributed.all_reduce(squares, group=mpu.get_model_parallel_group())
    sharded = torch.zeros(1)  # the real one's are the optimizer's, of bf16 only
    torch.distributed.all_reduce(sharded, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return squares.sqrt().item()


def post_training_step_callbacks(
    model, optimizer, opt_param_scheduler, iteration, prof, num_floating_point_operations_since_last_log_event,
    nsys_nvtx_context=None,
):  # fmt: skip
    args = get_args()
    if args.log_straggler and iteration % args.log_interval == 0:
        stimer.report(num_floating_point_operations_since_last_log_event, args.log_interval)
    interval = args.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        if should_disable_forward_pre_hook(args):
            for chunk in model:
                chunk.disable_forward_pre_hook()
        assert check_param_hashes_across_dp_replicas(model, cross_check=True)
        torch.distributed.barrier()
        print_rank_last(f">>> Weight hashes match after {iteration} iterations...")
        if should_disable_forward_pre_hook(args):
            for chunk in model:
                chunk.enable_forward_pre_hook()
    return num_floating_point_operations_since_last_log_event


def checkpoint_and_decide_exit(
    model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far, checkpointing_context,
    train_data_iterator,
):  # fmt: skip
    args = get_args()
    signalled = torch.tensor([int(args.exit_signal_handler and get_signal_handler()._signal_received)])
    torch.distributed.all_reduce(signalled)
    assert args.save is None, "the stand-in has no checkpoints"
    return bool(signalled) or bool(args.exit_interval and iteration % args.exit_interval == 0)


@takes_more({"0.19": "group"})
def reduce_max_stat_across_model_parallel_group(stat):
    value = torch.tensor([stat])
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=mpu.get_model_parallel_group())
    return value.item()


def should_disable_forward_pre_hook(args):
    return args.use_distributed_optimizer and args.overlap_param_gather


def print_datetime(string, override_timestamp=None):
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print(f"[{string}] datetime: {datetime.now()}", flush=True)


def print_rank_last(message):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)
