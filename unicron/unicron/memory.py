"""Training state in memory that outlives the ranks, for scripts without a session (restart mode;
docs/design/memory.md).

`save` and `load` are the whole of it. The node's agent owns the memory.
"""

from __future__ import annotations

from unicron_transition.snapshot.user import load, save

__all__ = ["load", "save"]
