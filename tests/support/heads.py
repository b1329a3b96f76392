"""Two real unicronds on one state folder: the controller and its standby."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

from tests.support.controller import ACTS, CALM, COMMAND
from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.errors import UserError


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Head:
    """One of them. `ready`: the time at which it said that it listens."""

    usual = CALM
    command = COMMAND

    def __init__(self, folder: Path, name: str, address: str, addresses: list[str], state: str = "state") -> None:
        self.folder, self.name, self.address = folder, name, address
        self.state_folder, self.environment = folder / state, outside_slurm()
        self.config = folder / f"{name}.toml"
        named = ", ".join(f'"{one}"' for one in addresses)
        self.config.write_text(f"[controller]\n{self.usual}\naddress = [{named}]\n{ACTS}")
        self.start()

    def start(self) -> None:
        self.out, self.log_file = self.folder / f"{self.name}.out", self.folder / f"{self.name}.log"
        words = ["--config", str(self.config), "--state-dir", str(self.state_folder), "--listen", self.address]
        with self.out.open("wb") as out, self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *words],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def leads(self) -> bool:
        return self.out.read_text().startswith("unicrond: listening")

    def await_lead(self, limit: float = 60.0) -> None:
        wait_for(lambda: self.leads, "it is the controller", limit, lambda: self.log)

    def await_standby(self) -> None:
        wait_for(lambda: "standby: waits for" in self.log, "it waits", 60.0, lambda: self.log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Heads:
    """The controller and its standby; `address` is what agents get."""

    def __init__(self, folder: Path) -> None:
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.address, self.folder = ",".join(addresses), folder
        self.first = Head(folder, "first", addresses[0], addresses)
        self.first.await_lead()
        self.second = Head(folder, "second", addresses[1], addresses)
        self.second.await_standby()

    def ask(self, kind: str, **arguments: Any) -> Any:
        """A question, as `unicronctl` asks both addresses for the controller."""
        return ask_controller({"kind": kind, **arguments}, self.address, timeout=10.0)

    def job(self) -> dict[str, Any]:
        """The only job; empty where it is not known, or nobody answers."""
        try:
            return next(iter(self.ask("jobs")), {})
        except UserError:
            return {}

    def ids(self) -> list[int]:
        """Of all events in the log."""
        with sqlite3.connect(f"file:{self.folder / 'state' / 'events.sqlite'}?mode=ro", uri=True, timeout=10.0) as log:
            return [number for (number,) in log.execute("SELECT id FROM event ORDER BY id")]

    def kinds(self, after: int = 0) -> list[str]:
        with sqlite3.connect(f"file:{self.folder / 'state' / 'events.sqlite'}?mode=ro", uri=True, timeout=10.0) as log:
            return [kind for (kind,) in log.execute("SELECT kind FROM event WHERE id > ? ORDER BY id", (after,))]

    def close(self) -> None:
        self.first.close()
        self.second.close()


def contiguous(ids: list[int]) -> bool:
    """No event is missing. Steps may be thinned, so this is for short logs."""
    return ids == list(range(ids[0], ids[0] + len(ids)))
