"""Of the stand-in: what Megatron-LM keeps for the whole process."""

import signal

from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.timers import Timers

from .dist_signal_handler import DistributedSignalHandler

_ARGS = _TIMERS = _HANDLER = None
_WRITERS = []


def get_args():
    return _ARGS


def get_timers():
    return _TIMERS


def get_signal_handler():
    return _HANDLER


def get_writers():
    return _WRITERS


def _set_tensorboard_writer(args):
    _set_writer(args, "tensorboard")


def _set_wandb_writer(args):
    _set_writer(args, "wandb")


def _set_one_logger(args):
    _set_writer(args, "one logger")


def _set_writer(args, what):
    if args.rank == args.world_size - 1:
        _WRITERS.append(what)


def set_global_variables(args):
    global _ARGS, _TIMERS, _HANDLER
    _ARGS = args
    init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    _set_tensorboard_writer(args)
    _set_wandb_writer(args)
    _set_one_logger(args)
    _TIMERS = Timers(2, "minmax")
    if args.exit_signal_handler:
        _HANDLER = DistributedSignalHandler(signal.SIGTERM)
