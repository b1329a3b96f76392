"""In the ranks: micro-batch ledger, group rebuild, state migration. The training script's API is
`init_process_group`, `Session` and `Checkpoints`."""

from __future__ import annotations

from typing import Any

__all__ = ["CheckpointError", "Checkpoints", "Session", "StepResult", "init_process_group"]


def __getattr__(name: str) -> Any:  # lazy: the agent imports this package without torch
    if name in __all__:
        from transition import session

        return getattr(session, name)
    raise AttributeError(f"module 'transition' has no attribute '{name}'")
