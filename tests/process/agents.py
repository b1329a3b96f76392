"""A real unicrond and real agents on this machine, without Slurm: the tests play its part by setting its variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from unicron_ctl.errors import UserError
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.client import ask

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).resolve().parent / "tiny_gpt.py"
LIMIT = 90.0
# Generous: the tests are about what happens, and the machine may be busy with something else.
CONFIG = """
[controller]
auth = "none"
slurm = "none"
heartbeat_period = 1.0
lease_periods = 6
forming_settle_seconds = 80
report_timeout = 80
enter_timeout = 80
restart_grace = 20
"""
T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str | Callable[[], str], limit: float = LIMIT) -> T:
    """The first true thing that `look` gives."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what() if callable(what) else what}"
        time.sleep(0.05)
    return found


def is_alive(pid: int) -> bool:
    """A process that is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outside_slurm() -> dict[str, str]:
    """This environment without anything that would tell an agent where it is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "UNICRON", "TINY"))}
    return {**kept, "PYTHONPATH": str(ROOT)}


class Controller:
    """A unicrond with a state folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "unicron.toml").write_text(CONFIG)
        self.address = "tcp://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it, at the address that it had before."""
        command = [sys.executable, "-m", "unicron_ctl.controller.main", "--config", str(self.folder / "unicron.toml")]
        command += ["--state-dir", str(self.folder / "state"), "--listen", self.address]
        with (self.folder / "unicrond.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=outside_slurm(), stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("unicrond: listening on tcp://"), (self.folder / "unicrond.log").read_text()
        self.address = line.split()[-1]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def job(self, name: str) -> dict[str, Any]:
        """One job of `unicronctl status`; empty before its first agent has registered."""
        jobs = ask({"kind": "status"}, self.address, timeout=30)["jobs"]
        return next((job for job in jobs if job["job"] == name), {})

    def events(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        """The job's events, of one kind or all."""
        try:
            found = ask({"kind": "events", "limit": 5000, "job": name}, self.address, timeout=30)
        except UserError as error:
            assert "no job is called" in str(error), error
            return []
        return [event for event in found if kind in ("", event["kind"])]

    def rank(self, name: str, slot: int) -> dict[str, Any]:
        """What the controller knows of a rank; empty before it is there."""
        elements = self.job(name).get("elements", [])
        return next((rank for element in elements for rank in element["ranks"] if rank["slot"] == slot), {})

    def close(self) -> None:
        """SIGTERM ends it."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(LIMIT)
            assert self.process.stdout is not None
            self.process.stdout.close()


class Agent:
    """A real `unicron-agent run -- COMMAND` of one element of an array job."""

    def __init__(self, job: Job, element: int, command: list[str], **settings: str):
        self.folder = job.folder / f"agent{element}"
        self.folder.mkdir()
        environment = outside_slurm() | job.environment | {"TMPDIR": str(self.folder)}
        environment |= {"SLURM_ARRAY_TASK_ID": str(element), "SLURMD_NODENAME": f"n{element}"} | settings
        program = [sys.executable, "-m", "unicron_ctl.agent.main", "run", "--", *command]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                program, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        """What it and its ranks have written."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def socket(self) -> Path:
        """Its ranks' socket."""
        return next(self.folder.glob("unicron-*/ranks"))

    def wait(self, limit: float = LIMIT) -> int:
        """Its exit status."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent has not ended within {limit:g} s:\n{self.log}") from None


class Job:
    """An array job: `count` agents, each with the same command, `tiny_gpt.py` unless another is given."""

    def __init__(
        self, folder: Path, address: str, name: str, count: int, command: list[str] | None = None, **settings: str
    ):
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.environment = {
            "SLURM_ARRAY_JOB_ID": name,
            "SLURM_JOB_ID": name,
            "SLURM_ARRAY_TASK_COUNT": str(count),
            "SLURM_JOB_NAME": f"job{name}",
            "UNICRON_CONTROLLER": address,
            "TINY_OUT": str(self.folder),
            "TINY_SAVE": "0",
            **settings,
        }
        self.agents = [Agent(self, element, command or [sys.executable, str(TINY)]) for element in range(count)]

    @property
    def logs(self) -> str:
        """Of all agents."""
        return "\n".join(f"--- agent {element}\n{agent.log}" for element, agent in enumerate(self.agents))

    def losses(self, slot: int) -> list[dict[str, Any]]:
        """The steps that a rank has taken, from its own file."""
        path = self.folder / f"losses.{slot}"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def reached(self, slot: int, more: int = 1) -> int:
        """Wait until a rank has trained `more` iterations from now on; returns its last one."""
        before = len(self.losses(slot))
        wait_for(lambda: len(self.losses(slot)) >= before + more, lambda: f"slot {slot} goes on\n{self.logs}")
        return self.losses(slot)[-1]["iteration"]

    def close(self) -> None:
        """Whatever is left of it."""
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()


class FakeController:
    """The controller's side of the protocol in the test's own hands."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an agent that connects again is the same one
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._route = b""

    def hear(self, fits: Callable[[Any], bool], what: str, limit: float = LIMIT) -> Any:
        """The next message that fits; others are dropped."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self._socket.poll(100):
                self._route, data = self._socket.recv_multipart()
                message = wire.decode(data, wire.ToController)
                if fits(message):
                    return message
        raise AssertionError(f"not within {limit:g} s: {what}")

    def status(self, fits: Callable[[wire.Status], bool] = lambda status: True, what: str = "a status") -> wire.Status:
        """The next status that fits."""
        return self.hear(lambda message: isinstance(message, wire.Status) and fits(message), what)

    def rank(self, fits: Callable[[wire.RankStatus], bool], what: str, slot: int = 0) -> wire.RankStatus:
        """The next status of a rank that fits."""
        return self.status(lambda status: slot in status.ranks and fits(status.ranks[slot]), what).ranks[slot]

    def welcome(self, heartbeat_period: float = 0.5, **settings: float) -> wire.Status:
        """Take the agent in; returns its first status."""
        self.hear(lambda message: isinstance(message, wire.Register), "the registration")
        self.send(wire.Welcome(heartbeat_period=heartbeat_period, controller="test", **settings))
        return self.status()

    def plan(self, plan: wire.Plan, slots: list[int]) -> None:
        """Send the agent with these slots its share."""
        self.send(wire.share(plan, wire.common(plan), slots))

    def send(self, message: wire.Message | bytes) -> None:
        """To the agent that spoke last."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        self._socket.send_multipart([self._route, data])

    def close(self) -> None:
        """Nothing is sent any more."""
        self._context.destroy(linger=0)
