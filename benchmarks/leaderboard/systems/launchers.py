"""torchrun, ft_launcher, torchft and NVRx's wrapper: a command on each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.leaderboard.systems.base import HEAD, RANKS, Launched, answers, free_port
from tests.support.processes import wait_for

RESTARTS = "1000"  # more than any job needs


class Torchrun(Launched):
    """docs.pytorch.org/docs/stable/elastic/run.html, *Elastic*, and elastic/rendezvous.html for the c10d handler.

    By default torch 2.13 uses one store for all worlds of a job without separating their keys: ranks of a new world
    find the addresses of the last one, and never connect. The variable gives each world its own store.
    """

    name = "torchrun"

    def node(self, node: int) -> Sequence[str | Path]:
        return [self.program("torchrun"), *self._options(), RANKS / "elastic.py"]

    def more(self, node: int) -> Mapping[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def _sizes(self) -> str:
        least = self.size if self.standbys or self.shard > 1 else 1
        return f"--nnodes={least}:{self.size + self.standbys}"

    def _options(self) -> list[str]:
        rendezvous = "is_host=0,last_call_timeout=1,join_timeout=600,keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            self._sizes(),
            "--nproc-per-node=1",
            f"--max-restarts={RESTARTS}",
            "--monitor-interval=0.1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            f"--rdzv-conf={rendezvous}",
            "--rdzv-id=leaderboard",
            "--local-addr=127.0.0.1",
        ]


class ShardedTorchrun(Torchrun):
    """docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html. Its checkpoints are of a fixed number of shards, so
    all nodes must be there."""

    shard = 2


class FtLauncher(Torchrun):
    """NVRx's docs/source/fault_tolerance/usage_guide.rst and integration/heartbeats.rst, its example of the
    heartbeats API."""

    name = "nvrx-launcher"
    environment, package = "nvrx", "nvidia-resiliency-ext"

    def node(self, node: int) -> Sequence[str | Path]:
        heartbeats = [
            "--ft-rank-heartbeat-timeout=3",
            "--ft-initial-rank-heartbeat-timeout=60",
            "--ft-workload-check-interval=0.5",
            "--ft-node-health-check-interval=1",
            "--ft-restart-policy=any-failed",
            "--ft-enable-nic-monitor=false",
            "--workers-stop-timeout=2",
            "--term-timeout=2",
        ]
        rendezvous = [
            option if not option.startswith("--rdzv-conf") else "--rdzv-conf=is_host=0,last_call_timeout=1"
            for option in self._options()
        ]
        return [self.program("ft_launcher"), *rendezvous, *heartbeats, RANKS / "elastic.py", "--heartbeats"]


class InProcess(Launched):
    """NVRx's docs/source/inprocess/usage_guide.rst and examples/inprocess/optimal_example.py."""

    name = "nvrx-inprocess"
    environment, package = "nvrx", "nvidia-resiliency-ext"
    collective = 1.0  # ranks that are no neighbours of a dead one wait for it; a false alarm costs as much

    def node(self, node: int) -> Sequence[str | Path]:
        return [self.python, RANKS / "inprocess.py"]

    def more(self, node: int) -> Mapping[str, str]:
        store = f"127.0.0.1:{self.port}"
        world = {"RANK": str(node), "WORLD_SIZE": str(self.size), "LOCAL_RANK": "0", "LEADERBOARD_STORE": store}
        # As in its advanced_example.py: without it each access to the store logs that it waits.
        quiet = {"TORCH_CPP_LOG_LEVEL": "error"}
        return world | quiet | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}


class Torchft(Launched):
    """torchft's README (*Lighthouse*, *Running DDP*), its train_ddp.py and torchx.py."""

    name = "torchft"
    environment, package = "torchft", "torchft"
    collective = 1.0  # ranks that are no neighbours of a dead one wait for it; a false alarm costs a step

    def head(self) -> Sequence[str | Path]:
        return [
            self.program("torchft_lighthouse"),
            f"--bind=127.0.0.1:{self.port}",
            "--min_replicas=1",
            "--quorum_tick_ms=100",
            "--join_timeout_ms=10000",
            "--heartbeat_timeout_ms=1000",
        ]

    def node(self, node: int) -> Sequence[str | Path]:
        launcher = ["--nnodes=1", "--nproc-per-node=1", f"--max-restarts={RESTARTS}", "--monitor-interval=0.1"]
        return [
            self.program("torchrun"),
            *launcher,
            "--rdzv-endpoint=127.0.0.1:0",
            "--rdzv-backend=c10d",
            "--local-addr=127.0.0.1",
            RANKS / "torchft_ranks.py",
        ]

    def more(self, node: int) -> Mapping[str, str]:
        return {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}",
            "TORCHFT_QUORUM_RETRIES": "20",
            "REPLICA_GROUP_ID": str(node),
            "NUM_REPLICA_GROUPS": str(self.size),
        }


class ShardedTorchft(Torchft):
    """The same with a replica group of two nodes, whose rendezvous is on the head, where it survives any node."""

    shard = 2

    def start(self) -> None:
        self.store_port = free_port()
        super().start()

    def start_coordinator(self) -> None:
        super().start_coordinator()
        self._launch(HEAD, [self.python, RANKS / "store_host.py", str(self.store_port)], {})
        wait_for(lambda: answers(self.store_port), lambda: f"the store answers\n{self.logs()}", 60.0)

    def node(self, node: int) -> Sequence[str | Path]:
        rendezvous = "is_host=0,last_call_timeout=1,join_timeout=600,keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            self.program("torchrun"),
            f"--nnodes={self.shard}",
            "--nproc-per-node=1",
            f"--max-restarts={RESTARTS}",
            "--monitor-interval=0.1",
            f"--rdzv-endpoint=127.0.0.1:{self.store_port}",
            "--rdzv-backend=c10d",
            f"--rdzv-conf={rendezvous}",
            f"--rdzv-id=replica{node // self.shard}",
            "--local-addr=127.0.0.1",
            RANKS / "torchft_ranks.py",
        ]

    def more(self, node: int) -> Mapping[str, str]:
        replicas = {"REPLICA_GROUP_ID": str(node // self.shard), "NUM_REPLICA_GROUPS": str(self.size // self.shard)}
        return {**super().more(node), **replicas, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class TorchftNightly(Torchft):
    """The newest build of torchft's development."""

    name = "torchft-nightly"
    environment = package = "torchft-nightly"
