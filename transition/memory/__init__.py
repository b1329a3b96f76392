"""Training state in memory that outlives the ranks: the agent owns it, ranks write it beside their training
(docs/design/memory.md). `save` and `load` are for scripts without a session, in restart mode."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:  # lazy: the agent imports this package without torch
    if name in __all__:
        return getattr(import_module("transition.memory.user"), name)
    raise AttributeError(f"module 'transition.memory' has no attribute '{name}'")
