"""A plain Slurm job on the project's local cluster.

It is requeued as a whole: by `--requeue`, or by its own `scontrol requeue` if a step fails (sbatch(1), scontrol(1)).
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from benchmarks.leaderboard import processes
from benchmarks.leaderboard.systems.base import NODES, PEERS, RANKS, System, free_port, program
from tests.support.processes import outside_slurm
from unicron_ctl.lab.cluster.local_cluster import LocalCluster
from unicron_ctl.shared.system.errors import UserError

RESUME_SECONDS = 60.0  # for an operator to bring a node back into service
SCRIPT = """#!/bin/bash
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0; exec {python} {script}'
scontrol requeue $SLURM_JOB_ID
"""


class Requeue(System):
    """sbatch --requeue of one job of four nodes."""

    name = "slurm-requeue"

    def __init__(self, folder: Path, size: int = NODES, **variables: str) -> None:
        super().__init__(folder, size, **variables)
        self.cluster = LocalCluster(folder / "cluster", nodes=size, gpus_per_node=0)

    def start(self) -> None:
        self.cluster.up()
        script = self.folder / "job.sh"
        python = PEERS / self.environment / "bin" / "python"
        script.write_text(SCRIPT.format(port=free_port(), python=python, script=RANKS / "elastic.py"))
        self._submit()

    def _submit(self) -> None:
        options = [f"-N{self.size}", "--ntasks-per-node=1", "--exclusive", "--requeue", "--open-mode=append"]
        command = ["sbatch", "--parsable", *options, f"--output={self.folder}/job.log"]
        self._slurm(*command, str(self.folder / "job.sh"))

    def _slurm(self, *command: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in (outside_slurm() | self.variables).items() if name != processes.NODE}
        environment = kept | self.cluster.env()
        return subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=True
        )

    def power_off(self, node: int) -> None:
        self.cluster.power_off(f"n{node + 1}")

    def power_on(self, node: int) -> None:
        """Bring the node back, and resume it as an operator if Slurm keeps it down, as it does after a reboot."""
        threading.Thread(target=self._serve_again, args=(f"n{node + 1}",), daemon=True).start()

    def _serve_again(self, name: str) -> None:
        try:
            self.cluster.power_on(name)
            deadline = time.monotonic() + RESUME_SECONDS
            while time.monotonic() < deadline:
                states = next(node.states for node in self.cluster.client().nodes() if node.name == name)
                if "DOWN" in states:
                    self._slurm("scontrol", "update", f"nodename={name}", "state=resume")
                elif states & {"IDLE", "ALLOCATED", "MIXED"}:
                    return
                time.sleep(0.5)
        except (UserError, OSError, subprocess.SubprocessError) as error:
            with (self.folder / "operator.log").open("a") as log:
                log.write(f"{name}: {error}\n")

    def kill_coordinator(self) -> None:
        for process in self.cluster.processes():
            if process.kind == "slurmctld":
                os.kill(process.pid, signal.SIGKILL)

    def start_coordinator(self) -> None:
        self.cluster.up()

    def begin_again(self) -> None:
        self.cluster.up()
        self._slurm("scancel", "--me")
        self._submit()

    def close(self) -> None:
        try:
            self.cluster.down()
        finally:
            super().close()

    @classmethod
    def version(cls) -> str:
        super().version()
        done = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()
