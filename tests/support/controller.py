"""A real unicrond."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tests.support import lent
from tests.support.processes import LIMIT, ROOT, outside_slurm, wait_for
from unicron_ctl.shared.protocol.answer_schema import Pong
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.release import release

COMMAND = [sys.executable, "-m", "unicron_ctl.controller.unicrond"]
PAGE = 5000  # events of one answer
# The tests are about what happens, and the machine may be busy with something else: nobody is lost for being late.
CALM = """
auth = "none"
slurm = "none"
lease_periods = 6
fence_seconds = 60
forming_settle_seconds = 80
report_timeout = 40
enter_timeout = 80
restart_grace = 20
"""
ACTS = """
[partition.default]
mode = "act"
max_weight = 100
"""
T = TypeVar("T")


def quick_on_slurm(mode: str) -> str:
    """Lines of [controller] for a real Slurm, in which what may be done in the partition is `mode`."""
    return f"""
slurm = "command"
slurm_poll_seconds = 0.5
lease_periods = 3
forming_settle_seconds = 1
[partition.main]
mode = "{mode}"
"""


def is_alive(answer: Any) -> bool:
    """Whether this is the whole answer of a controller of this user that was asked for a sign of life."""
    assert msgspec.convert(answer, Pong) and set(answer) == set(Pong.__struct_fields__), answer
    return bool(answer["uid"] == os.getuid() and answer["release"] == release())


class Controller:
    """A unicrond whose configuration, state and log lie in a folder of its own.

    settings: lines of [controller], in place of those of the same names in `usual`; it acts in all partitions unless
    they have tables of their own. environment: instead of the one outside Slurm. `lent`: whether it is a fork of the
    tests' zygote, whatever its command is.
    """

    usual = CALM
    lent = False

    def __init__(self, folder: Path, settings: str = "", environment: Mapping[str, str] | None = None):
        self.folder = folder
        self.state_folder = folder / "state"
        self.config = folder / "unicron.toml"
        self.environment = outside_slurm() if environment is None else dict(environment)
        self.configure(settings)
        self.address = "tcp://127.0.0.1:0"
        self.start()

    # ------------------------------------------------------------ the process
    @property
    def command(self) -> list[str]:
        """How it is started."""
        return [*COMMAND, *self.options]

    @property
    def options(self) -> list[str]:
        """It listens at the address that it had before."""
        return ["--config", str(self.config), "--state-dir", str(self.state_folder), "--listen", self.address]

    def configure(self, settings: str) -> None:
        """Write its configuration; a running one reads it at SIGHUP."""
        given = {line.split("=")[0].strip() for line in settings.splitlines()}
        kept = [line for line in self.usual.splitlines() if line.split("=")[0].strip() not in given]
        acts = "" if "[partition" in settings else ACTS
        self.config.write_text("\n".join(["[controller]", *kept, settings, acts]))

    def start(self) -> None:
        """Start it, at the address that it had before."""
        path = self.folder / "unicrond.log"
        if self.lent:
            self.process: lent.Fork | subprocess.Popen[str] = lent.controller(self.options, self.environment, path)
        else:
            with path.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command,
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("unicrond: listening on tcp://"):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may have ended by itself: then with which status?
                self.process.wait(5.0)
            self.kill()
            raise AssertionError(f"unicrond has not started, exit status {self.process.poll()}: {line}{self.log}")
        self.address = line.split()[-1]

    def reload(self, settings: str) -> None:
        """Give it another configuration while it runs."""
        self.configure(settings)
        self.process.send_signal(signal.SIGHUP)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """What it has written to its standard error."""
        path = self.folder / "unicrond.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._gone()

    def close(self) -> None:
        """SIGTERM ends it cleanly."""
        if self.alive:
            self.process.terminate()
            try:
                assert self.process.wait(LIMIT) == 0, f"SIGTERM ends it cleanly:\n{self.log[-3000:]}"
            finally:
                self.kill()
        self._gone()

    def _gone(self) -> None:
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    # ------------------------------------------------------------ looking
    def ask(self, kind: str, **arguments: Any) -> Any:
        """A question or an order, as `unicronctl` sends it."""
        return ask_controller({"kind": kind, **arguments}, self.address, timeout=30.0)

    def status(self) -> dict[str, Any]:
        """`unicronctl status`."""
        return self.ask("status")

    def job(self, name: str = "") -> dict[str, Any]:
        """One job of `unicronctl jobs`, the first unless named; empty before its first agent has registered."""
        return next((job for job in self.ask("jobs") if name in ("", job["job"])), {})

    def rank(self, slot: int, job: str = "") -> dict[str, Any]:
        """What the controller knows of a rank; empty before it is there."""
        elements = self.job(job).get("elements", [])
        return next((rank for element in elements for rank in element["ranks"] if rank["slot"] == slot), {})

    def node(self, name: str) -> dict[str, Any]:
        """What `unicronctl nodes` says of a node; empty when it is not known."""
        return next((node for node in self.ask("nodes") if node["node"] == name), {})

    def failures(self) -> list[dict[str, Any]]:
        """Those of `unicronctl status`, the oldest first."""
        return self.status()["failures"]

    def events(self, *kinds: str, job: str = "", after: int = 0) -> list[dict[str, Any]]:
        """The events of these kinds, or of all, that came after this one; of a job when it is named."""
        found: list[dict[str, Any]] = []
        only = {"job": job} if job else {}
        while page := self._events(after=after, limit=PAGE, **only):
            found += [event for event in page if not kinds or event["kind"] in kinds]
            after = page[-1]["id"]
        return found

    def _events(self, **arguments: Any) -> list[dict[str, Any]]:
        try:
            return self.ask("events", **arguments)
        except UserError as error:
            assert "no job is called" in str(error), error
            return []

    def wait(self, look: Callable[[], T], what: str | Callable[[], object], limit: float = LIMIT) -> T:
        """The first true thing that `look` gives while the controller lives."""

        def alive() -> T:
            assert self.alive, f"unicrond has ended with {self.process.returncode}:\n{self.log[-3000:]}"
            return look()

        return wait_for(alive, what, limit, self.told)

    def told(self) -> str:
        """What there is to say for the message of a failed test."""
        try:
            jobs = self.ask("jobs")
        except UserError as error:
            jobs = error
        return f"{jobs}\n{self.log[-3000:]}"
