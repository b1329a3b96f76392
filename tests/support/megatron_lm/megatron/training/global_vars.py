"""Of the stand-in: what Megatron-LM keeps for the whole process."""

import signal
import time
from pathlib import Path

from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.timers import Timers

from .dist_signal_handler import DistributedSignalHandler
from .releases import SINCE_18

_ARGS = _TIMERS = _HANDLER = _TENSORBOARD = None
_WRITERS = []


def get_args():
    return _ARGS


def get_timers():
    return _TIMERS


def get_signal_handler():
    return _HANDLER


def get_writers():
    return _WRITERS


class Writer:
    """Stands for TensorBoard's: lines of a file of its own, each a step and a value or a step to begin with."""

    def __init__(self, folder):
        self._folder, self._file, self.purge_step = Path(folder), None, None

    def add_scalar(self, name, value, step):
        if self._file is None:
            self._folder.mkdir(exist_ok=True)
            self._file = (self._folder / f"{time.time():.6f}").open("w")
            if self.purge_step is not None:
                self._file.write(f"purge {self.purge_step}\n")
            self.purge_step = None
        self._file.write(f"{step} {value}\n")

    def flush(self):
        if self._file is not None:
            self._file.flush()

    def close(self):
        if self._file is not None:
            self._file.close()
            self._file = None


def get_tensorboard_writer():
    return _TENSORBOARD


def get_wandb_writer():
    return None


def _set_tensorboard_writer(args):
    global _TENSORBOARD
    assert _TENSORBOARD is None
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        _TENSORBOARD = Writer(args.tensorboard_dir)
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
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        **({} if SINCE_18 else {"rampup_batch_size": args.rampup_batch_size}),
    )
    _set_tensorboard_writer(args)
    _set_wandb_writer(args)
    _set_one_logger(args)
    _TIMERS = Timers(2, "minmax")
    if args.exit_signal_handler:
        _HANDLER = DistributedSignalHandler(signal.SIGTERM)
