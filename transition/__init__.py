"""In the ranks: micro-batch ledger, group rebuild, state migration. The training script's API is
`init_process_group`, `Session` and `Checkpoints`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "CheckpointError": "checkpoint",
    "Checkpoints": "checkpoint",
    "Layout": "layout",
    "Session": "session",
    "StepResult": "result",
    "init_process_group": "process",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:  # lazy: the agent imports this package without torch
    if name in _MODULES:
        return getattr(import_module(f"transition.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'transition' has no attribute '{name}'")
