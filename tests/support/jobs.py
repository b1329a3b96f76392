"""Real agents with real ranks on this machine, without Slurm: its part is played by setting its variables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import lent
from tests.support.controller import Controller
from tests.support.processes import LIMIT, ROOT, outside_slurm, wait_for

HERE = Path(__file__).resolve().parent
TINY, PLAIN = HERE / "tiny_gpt.py", HERE / "plain_train.py"
# A session without Megatron: for what does not depend on the model. An iteration takes a third of the CPU time.
TINY_PLAIN = [sys.executable, str(HERE / "tiny_plain.py")]
# As the program does it: the working folder is not on its path.
AGENT = [sys.executable, "-P", "-m", "unicron_ctl.agent.start.agent_main"]
FOREVER = "1000000"  # iterations
SLEEPS = "import time\ntime.sleep(600)\n"


def scripted(folder: Path, text: str) -> list[str]:
    """A command that runs this text. Unlike `python -c` it starts from a lent zygote, and so does its node's store,
    which alone would import torch for two seconds."""
    path = folder / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def sleepers(folder: Path, controller: Controller, *lines: str) -> Path:
    """A batch script for a real Slurm, whose agent keeps a sleeping rank; `lines` come before it."""
    script = folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"export PYTHONPATH={ROOT} UNICRON_CONTROLLER={controller.address} UNICRON_NODE_ADDRESS=127.0.0.1\n"
        "export UNICRON_RANKS_PER_NODE=1 UNICRON_REGISTER_TIMEOUT=30\n"
        + "".join(f"{line}\n" for line in lines)
        + f"exec {' '.join(AGENT)} run -- sleep 600\n"
    )
    return script


class Agent:
    """A real `unicron-agent run -- COMMAND` of one element of an array job."""

    def __init__(self, job: Job, element: int, command: Sequence[str], **settings: str):
        tries = len(list(job.folder.glob(f"agent{element}*")))
        self.folder = job.folder / (f"agent{element}.{tries}" if tries else f"agent{element}")
        self.folder.mkdir()
        environment = outside_slurm() | job.environment | {"TMPDIR": str(self.folder)}
        environment |= {"SLURM_ARRAY_TASK_ID": str(element), "SLURMD_NODENAME": f"n{element}"} | settings
        words = ["run", "--", *command]
        with (self.folder / "log").open("wb") as log:
            if job.lent and lent.fits(command, environment):
                self.process: lent.Fork | subprocess.Popen[bytes] = lent.agent(words, environment, log.fileno())
            else:
                self.process = subprocess.Popen(
                    [*AGENT, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    @property
    def log(self) -> str:
        """What it and its ranks have written."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def socket(self) -> Path:
        """Its ranks' socket."""
        return next(self.folder.glob("unicron-*/ranks"))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, limit: float = LIMIT) -> int:
        """Its exit status."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent has not ended within {limit:g} s:\n{self.log}") from None

    def kill(self) -> None:
        """SIGKILL; its ranks die with it."""
        self.process.kill()
        self.process.wait()


# Tests count passes and strike in a certain one, so ranks compute nothing twice unless a test is about that.
UNCHECKED = {"UNICRON_AUDIT": "0", "UNICRON_COMPARE": "0"}


class Job:
    """An array job: `count` agents, each with the same command, `tiny_gpt.py` unless another is given.

    settings: environment variables of the agents and their ranks. `lent`: whether their first zygotes are.
    """

    lent = False

    def __init__(
        self, folder: Path, address: str, name: str, count: int, command: Sequence[str] | None = None, **settings: str
    ):
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.command = list(command or [sys.executable, str(TINY)])
        self.environment = {
            "SLURM_ARRAY_JOB_ID": name,
            "SLURM_JOB_ID": name,
            "SLURM_ARRAY_TASK_COUNT": str(count),
            "SLURM_JOB_NAME": f"job{name}",
            "UNICRON_CONTROLLER": address,
            "UNICRON_NODE_ADDRESS": "127.0.0.1",
            "UNICRON_REGISTER_TIMEOUT": "60",  # the machine may be busy: no job runs unprotected for a late answer
            "OMP_NUM_THREADS": "1",
            "TINY_OUT": str(self.folder),
            "TINY_SAVE": "0",
            "UNICRON_MEMORY_DIR": str(self.folder),
            **UNCHECKED,
            **settings,
        }
        self.agents: dict[int, Agent] = {}
        for element in range(count):
            self.start(element)

    def start(self, element: int, command: Sequence[str] | None = None, **settings: str) -> Agent:
        """The agent of an element, as srun would start it: at the beginning, or once more."""
        self.agents[element] = Agent(self, element, command or self.command, **settings)
        return self.agents[element]

    @property
    def logs(self) -> str:
        """Of all agents."""
        return "\n".join(f"--- agent {element}\n{agent.log}" for element, agent in self.agents.items())

    def wait(self) -> list[int]:
        """The agents' exit statuses."""
        return [agent.wait() for agent in self.agents.values()]

    def losses(self, slot: int) -> list[dict[str, Any]]:
        """The steps that a rank of `tiny_gpt.py` has taken, from its own file."""
        return json_lines(Path(self.environment["TINY_OUT"]) / f"losses.{slot}")

    def reached(self, slot: int, more: int = 1) -> int:
        """Wait until a rank has trained `more` iterations from now on; returns its last one."""
        before = len(self.losses(slot))
        wait_for(lambda: len(self.losses(slot)) >= before + more, lambda: f"slot {slot} goes on\n{self.logs}")
        return self.losses(slot)[-1]["iteration"]

    def close(self) -> None:
        """Whatever is left of it."""
        for agent in self.agents.values():
            agent.kill()


class World(Controller):
    """A controller and its job "7" of `nodes` nodes with one rank each; what the ranks write lies in `folder`.

    settings: lines of [controller]. command: `tiny_gpt.py` unless given. environment: the ranks'.
    """

    def __init__(
        self, folder: Path, nodes: int, settings: str = "", command: Sequence[str] | None = None, **environment: str
    ):
        place = {
            "SLURM_JOB_NAME": "tiny",
            "SLURM_JOB_USER": "ann",
            "SLURM_ARRAY_TASK_COUNT": str(nodes),
            "UNICRON_RANKS_PER_NODE": "1",
            "TINY_OUT": str(folder),
        }
        self.array = Job(folder, "", "7", 0, command, **place | environment)
        super().__init__(folder, settings)
        self.array.environment["UNICRON_CONTROLLER"] = self.address
        try:
            for element in range(nodes):
                self.start_agent(element)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def agents(self) -> dict[int, Agent]:
        return self.array.agents

    def start_agent(self, element: int, **settings: str) -> Agent:
        """The agent of a node, as srun would start it."""
        return self.array.start(element, **settings)

    def trains(self, members: Sequence[int], least: int = 0) -> bool:
        """The job runs with these members and has come to iteration `least`."""
        job = self.job()
        return bool(job) and (job["members"], job["state"]) == (list(members), "running") and job["iteration"] >= least

    def trains_on(self, members: Sequence[int], more: int = 3, limit: float = LIMIT) -> None:
        """Wait until the job runs with these members and has taken `more` iterations since."""
        self.wait(lambda: self.trains(members), f"slots {list(members)} train", limit)
        least = self.job()["iteration"] + more
        self.wait(lambda: self.trains(members, least), f"slots {list(members)} train on to iteration {least}", limit)

    def told(self) -> str:
        return f"{super().told()}\n{self.array.logs[-3000:]}"

    def close(self) -> None:
        """Everything ends; the ranks die with their agents."""
        self.array.close()
        super().close()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """What a rank has noted, a JSON object a line; a line half written is left out."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def undisturbed(folder: Path, iterations: int) -> subprocess.Popen[bytes]:
    """`tiny_gpt.py` in one process in which nothing fails; its losses come into the folder."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    settings = {"TINY_OUT": str(folder), "TINY_ITERATIONS": str(iterations), "TINY_SAVE": "0", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(TINY)], env=outside_slurm() | world | settings, stdout=log, stderr=log
        )
