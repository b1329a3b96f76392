"""Unicron heals large-model training on Slurm clusters. This is what a training script imports (docs/own-training.md).

What it needs is in `unicron_transition` and `unicron_detector`; the programs are in `unicron_ctl`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors, which cannot follow __getattr__
    from unicron_transition.generations.layout import Layout as Layout
    from unicron_transition.iteration.ledger import StepResult as StepResult
    from unicron_transition.iteration.rank_process import context_mesh as context_mesh
    from unicron_transition.iteration.rank_process import init_process_group as init_process_group
    from unicron_transition.iteration.rank_process import shard_mesh as shard_mesh
    from unicron_transition.iteration.rank_process import tensor_mesh as tensor_mesh
    from unicron_transition.session.session import Session as Session
    from unicron_transition.snapshot.checkpoint import CheckpointError as CheckpointError
    from unicron_transition.snapshot.checkpoint import Checkpoints as Checkpoints

_HOMES = {
    "CheckpointError": "unicron_transition.snapshot.checkpoint",
    "Checkpoints": "unicron_transition.snapshot.checkpoint",
    "Layout": "unicron_transition.generations.layout",
    "Session": "unicron_transition.session.session",
    "StepResult": "unicron_transition.iteration.ledger",
    "context_mesh": "unicron_transition.iteration.rank_process",
    "init_process_group": "unicron_transition.iteration.rank_process",
    "shard_mesh": "unicron_transition.iteration.rank_process",
    "tensor_mesh": "unicron_transition.iteration.rank_process",
}
_MODULES = ("data", "loggers", "memory")
__all__ = [*_HOMES, *_MODULES]
WHEELS = {"msgpack": "msgpack", "xxhash": "xxhash", "zmq": "pyzmq"}  # what ranks need beside torch: module -> wheel


def __getattr__(name: str) -> Any:  # lazy: agents and commands import this package without torch
    try:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        if name in _MODULES:
            return import_module(f"unicron.{name}")
    except ModuleNotFoundError as error:
        if error.name not in WHEELS:
            raise
        text = f"unicron needs {error.name} here: {sys.executable} -m pip install {' '.join(WHEELS.values())}"
        raise ModuleNotFoundError(text, name=error.name) from None
    raise AttributeError(f"module 'unicron' has no attribute '{name}'")
