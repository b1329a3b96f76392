"""Unicron heals large-model training on Slurm clusters. This is what a training script imports (docs/own-training.md).

The four folders beside this one are its parts: `detector`, `transition`, `planner`, and `unicron_ctl` as `unicron.ctl`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_HOMES = {
    "CheckpointError": "unicron.transition.snapshot.checkpoint",
    "Checkpoints": "unicron.transition.snapshot.checkpoint",
    "Layout": "unicron.transition.generations.layout",
    "Session": "unicron.transition.session.session",
    "StepResult": "unicron.transition.iteration.result",
    "init_process_group": "unicron.transition.iteration.rank_process",
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
