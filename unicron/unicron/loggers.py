"""Loggers for a session's loop that a moving first rank does not break (docs/user-guide.md).

`TensorBoard`, `WandB` and `MLflow`: make one in every rank, and call it with every result.
"""

from __future__ import annotations

from unicron_transition.loggers.logger import Logger
from unicron_transition.loggers.services import MLflow, TensorBoard, WandB

__all__ = ["Logger", "MLflow", "TensorBoard", "WandB"]
