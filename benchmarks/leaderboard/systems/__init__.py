"""The systems, each with its own way to start, strike and end a job."""

from __future__ import annotations

from benchmarks.leaderboard.systems.base import System
from benchmarks.leaderboard.systems.debian import DebianFtLauncher, DebianInProcess, DebianTorchrun
from benchmarks.leaderboard.systems.launchers import (
    FtLauncher,
    InProcess,
    ShardedTorchft,
    ShardedTorchrun,
    Torchft,
    TorchftNightly,
    Torchrun,
)
from benchmarks.leaderboard.systems.lm_resiliency import LmResiliency
from benchmarks.leaderboard.systems.slurm import Requeue
from benchmarks.leaderboard.systems.unicron import Restart, Session, ShardedSession

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        Torchrun,
        Torchft,
        TorchftNightly,
        LmResiliency,
        InProcess,
        FtLauncher,
        DebianTorchrun,
        DebianInProcess,
        DebianFtLauncher,
        Requeue,
        Restart,
        Session,
    )
}
"""The systems by their names, with the model in each rank as a whole."""
SHARDED: dict[str, type[System]] = {system.name: system for system in (ShardedTorchrun, ShardedTorchft, ShardedSession)}
"""Those that train it sharded by `fully_shard`, two replicas of two ranks."""
MODELS = {"dp": SYSTEMS, "hsdp": SHARDED}
