"""lm-resiliency: torchrun with its rendezvous backend, a standby node, GEMINI's copies, and a manager."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.leaderboard.systems.base import NODES, RANKS, Launched
from benchmarks.leaderboard.systems.launchers import RESTARTS

MOST_NODES = 1000  # that may ever register: each node that comes back counts


class LmResiliency(Launched):
    """lm-resiliency's *Closed-Loop Recovery for Torchrun Training*, *API Guide*, and its example resiliency_cycle.

    It refuses a machine that comes back, for its identity is taken: a node that was off gets a new one.
    """

    name = environment = package = "lm-resiliency"
    collective = 1.0  # as for torchft
    standbys = 1

    def head(self) -> Sequence[str | Path]:
        return [self.python, RANKS / "lm_manager.py", str(self.port), self.folder]

    def node(self, node: int) -> Sequence[str | Path]:
        rendezvous = {
            "store_type": "file",
            "lm_resiliency_restart_context_path": self.folder / f"context{node}" / "context.json",
            "lm_resiliency_join_timeout_ms": 600_000,
            "lm_resiliency_poll_interval_ms": 50,
            "lm_resiliency_heartbeat_timeout_ms": 1000,
        }
        return [
            self.python,
            RANKS / "lm_agent.py",
            f"--nnodes={NODES}:{MOST_NODES}",
            "--nproc-per-node=1",
            f"--max-restarts={RESTARTS}",
            "--monitor-interval=0.1",
            "--rdzv-backend=lm_resiliency",
            f"--rdzv-endpoint={self.folder / 'rendezvous'}",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in rendezvous.items())}",
            "--rdzv-id=leaderboard",
            "--local-addr=127.0.0.1",
            RANKS / "lm_ranks.py",
        ]

    def more(self, node: int) -> Mapping[str, str]:
        identity = self.folder / f"machine-id.{uuid.uuid4().hex}"
        identity.write_text(identity.suffix.removeprefix("."))
        return {"LM_RESILIENCY_MACHINE_ID_PATH": str(identity), "LEADERBOARD_MANAGER": str(self.port)}
