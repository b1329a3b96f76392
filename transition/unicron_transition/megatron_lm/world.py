"""The world in which Megatron-LM believes to run: one replica that computes all micro-batches of an iteration.

So the number of micro-batches, the samples consumed and the learning rate do not change when replicas come and go. Its
groups are made in the world in which the rank prepares itself (:func:`groups.init_without_peers`), and belong to the
job's generations from then on.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.generations.layout import Layout
from unicron_transition.iteration import rank_process
from unicron_transition.megatron_lm import arguments as options
from unicron_transition.seams.megatron_lm import reads_arguments, replace
from unicron_transition.seams.table import GLOBALS, INITIALIZE, TRAINING

HELPERS = "megatron.core.datasets.helpers_cpp"
LOCK_SECONDS = 1800.0  # an index of a large dataset takes minutes; a rank that holds the lock longer is frozen
LOOK_SECONDS = 0.2


class World:
    """The world that one rank shows to Megatron-LM. `folders` and `layout` are set when the arguments are read."""

    def __init__(self) -> None:
        self.layout = Layout()
        self.folders: options.Folders | None = None

    def install(self) -> None:
        """Replace the functions that read the world, and those that make it."""
        module = reads_arguments()
        replace(module, "parse_args", self._parse)
        replace(module, "validate_args", _validate)
        replace(INITIALIZE, "_initialize_distributed", self._initialize)
        replace(INITIALIZE, "_compile_dependencies", _compile)
        replace(GLOBALS, "_set_one_logger", self._in_the_first_replica)
        replace(TRAINING, "mpu", lambda mpu: _AsOneReplica(mpu, lambda: self.layout.lanes))

    def _parse(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def parse_args(*arguments: Any, **keywords: Any) -> Any:
            args = original(*arguments, **keywords)
            self.layout = options.layout_of(args)
            self.folders = options.take_folders(args)
            args.world_size, args.rank = self.layout.size, self._home()[1]
            args.rerun_mode = "disabled"  # it would run iterations again by itself
            return args

        return parse_args

    def _home(self) -> tuple[int, int]:
        """Return (replica, place) of this rank at its start."""
        size = self.layout.size
        if "UNICRON_SLOT" in os.environ:
            return divmod(int(os.environ["UNICRON_SLOT"]), size)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return self.layout.from_megatron_rank(int(os.environ.get("RANK", "0")), max(ranks // size, 1))

    def _initialize(self, original: Callable[..., None]) -> Callable[..., None]:
        def initialize_distributed(*arguments: Any, **keywords: Any) -> None:
            from megatron.training import get_args

            args = get_args()
            if torch.cuda.device_count() > 0:
                torch.cuda.set_device(args.local_rank)
            rank_process.init_process_group(args.distributed_backend, self.layout)
            original(*arguments, **keywords)  # uses this process group, and makes the model's groups

        return initialize_distributed

    def _in_the_first_replica(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Give NVIDIA's own logger to one rank only: the last one of the replica of the job's first ranks."""

        def set_writer(args: Any) -> None:
            if self._home()[0] == 0:
                original(args)

        return set_writer

    @staticmethod
    def follow() -> None:
        """Give Megatron-LM the present rank and size, for its log. To be called after every step."""
        from megatron.training import get_args

        args = get_args()
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()


class _AsOneReplica:
    """`megatron.core.mpu` for the training loop, whose global batch is that of one replica."""

    def __init__(self, mpu: Any, lanes: Callable[[], int] = lambda: 1):
        self._mpu, self._lanes = mpu, lanes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpu, name)

    def get_data_parallel_world_size(self, with_context_parallel: bool = False, **more: Any) -> int:
        """Return the replica's lanes for the batch; calls with context parallelism build the model (its buffers in
        0.18)."""
        if not with_context_parallel:
            return self._lanes()
        return int(self._mpu.get_data_parallel_world_size(with_context_parallel=True, **more))


def _validate(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_args(args: Any, *arguments: Any, **keywords: Any) -> Any:
        options.check(args)  # before Megatron-LM complains in more words
        original(args, *arguments, **keywords)
        options.check(args)  # now with older names of options resolved
        return args

    return validate_args


def _compile(original: Callable[[], None]) -> Callable[[], None]:
    """Let the first rank compile while the others wait only for that; Megatron-LM lets all wait for rank 0."""

    def compile_dependencies() -> None:
        from megatron.core.datasets import utils

        if find_spec(HELPERS) is None:
            with lock(Path(utils.__file__).parent):
                importlib.invalidate_caches()
                if find_spec(HELPERS) is None:
                    utils.compile_helpers()
        before, utils.compile_helpers = utils.compile_helpers, lambda: None
        try:
            original()
        finally:
            utils.compile_helpers = before

    return compile_dependencies


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a lock file in `folder`, or continue without one: if the folder cannot be written, if the file system has no
    locks, or after LOCK_SECONDS. A rank that reads a half-written file starts again."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path = folder / f".unicron-{os.getuid()}.lock"
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, file)
            _wait_for_lock(file)
        yield


def _wait_for_lock(file: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOOK_SECONDS)
