"""A job as Slurm would run it, without Slurm: a real unicrond, one real agent per node, ranks of tiny_gpt."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron_ctl.protocol.client import ask

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 100.0
CONFIG = """[controller]
auth = "none"
slurm = "none"
forming_settle_seconds = 30.0
"""


class RealJob:
    """Job "7" on `nodes` nodes with one rank each. `settings`: further lines of [controller]; the rest is the ranks'
    environment."""

    def __init__(
        self, folder: Path, nodes: int, settings: str = "", script: Path = HERE / "tiny_gpt.py", **environment: str
    ):
        self.folder, self.nodes, self.script = folder, nodes, script
        base = {name: value for name, value in os.environ.items() if not name.startswith(("UNICRON", "SLURM"))}
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._base = {**base, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TINY_OUT": str(folder), **environment}
        self.agents: dict[int, subprocess.Popen] = {}
        (folder / "unicron.toml").write_text(CONFIG + settings)
        self._log = (folder / "log").open("ab")

    def __enter__(self) -> RealJob:
        command = [
            sys.executable,
            "-m",
            "unicron_ctl.controller.main",
            "--config",
            str(self.folder / "unicron.toml"),
            "--listen",
            "tcp://127.0.0.1:0",
            "--state-dir",
            str(self.folder / "state"),
        ]
        self.controller = subprocess.Popen(command, env=self._base, stdout=subprocess.PIPE, stderr=self._log, text=True)
        try:
            self.address = self.controller.stdout.readline().split()[-1]
            for element in range(self.nodes):
                self.start_agent(element)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Everything ends; the ranks die with their agents."""
        for process in [*self.agents.values(), self.controller]:
            process.terminate()
        for process in [*self.agents.values(), self.controller]:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.controller.stdout.close()
        self._log.close()

    def start_agent(self, element: int) -> None:
        """The agent of a node, as srun would start it."""
        place = {
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(element),
            "SLURM_ARRAY_TASK_COUNT": str(self.nodes),
            "SLURM_JOB_NAME": "tiny",
            "SLURM_JOB_USER": "ann",
            "SLURMD_NODENAME": f"n{element}",
            "UNICRON_CONTROLLER": self.address,
            "UNICRON_NODE_ADDRESS": "127.0.0.1",
            "UNICRON_RANKS_PER_NODE": "1",
            "UNICRON_REGISTER_TIMEOUT": "30",
        }
        command = [sys.executable, "-m", "unicron_ctl.agent.main", "run", "--", sys.executable, str(self.script)]
        self.agents[element] = subprocess.Popen(
            command, env={**self._base, **place}, stdout=self._log, stderr=self._log
        )

    # ------------------------------------------------------------ looking
    def ask(self, kind: str, **arguments: Any) -> Any:
        return ask({"kind": kind, **arguments}, self.address, timeout=10.0)

    def status(self) -> dict:
        return self.ask("status")

    def job(self) -> dict | None:
        return next(iter(self.ask("jobs")), None)

    def events(self, *kinds: str, after: int = 0) -> list[dict]:
        """All events of these kinds."""
        found: list[dict] = []
        while page := self.ask("events", after=after, limit=5000):
            found += [event for event in page if event["kind"] in kinds]
            after = page[-1]["id"]
        return found

    def rank(self, slot: int) -> dict:
        return next(rank for element in self.job()["elements"] for rank in element["ranks"] if rank["slot"] == slot)

    @staticmethod
    def now_in(pid: int) -> str:
        """What the process does now, for the message of a failed test."""
        return Path(f"/proc/{pid}/wchan").read_text()

    def wait(self, condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """The first true value of `condition`."""
        deadline = time.monotonic() + limit
        while not (value := condition()):
            assert time.monotonic() < deadline, (
                f"not within {limit:g} s: {what}; {self.job()}\n{(self.folder / 'log').read_text()[-3000:]}"
            )
            assert self.controller.poll() is None, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        return value
