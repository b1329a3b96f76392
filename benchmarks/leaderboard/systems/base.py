"""The bases of all systems: a folder, nodes, a coordinator, and notes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.leaderboard import notes, processes
from benchmarks.leaderboard.failures import Missed
from benchmarks.leaderboard.notes import Note
from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_ctl.lab.cluster import ports

NODES = 4
HEAD = "head"
RANKS = Path(__file__).resolve().parents[1] / "ranks"
PEERS = ROOT / ".peers"


class Absent(Exception):
    """The system cannot run here; the text is the reason."""


class System:
    """One job with a rank on each of its nodes under one system. All its files are below its folder."""

    name: str
    environment = "torchrun"
    """The folder below .peers with its Python."""
    package = "torch"
    """The package that has its version."""
    collective = 3.0
    """Time-out of a collective in seconds; for some systems this ends a hang."""
    shard = 1
    """Ranks that share the parameters of a replica."""
    standbys = 0
    """Nodes more than ranks, for systems that cannot train with fewer ranks."""

    def __init__(self, folder: Path, size: int = NODES, **variables: str) -> None:
        self.folder, self.run, self.size = folder, uuid.uuid4().hex, size
        self.out = folder / "notes"
        self.out.mkdir(parents=True)
        (folder / "tmp").mkdir()
        self.variables = {
            "TMPDIR": str(folder / "tmp"),
            "LEADERBOARD_OUT": str(self.out),
            "LEADERBOARD_CHECKPOINT": str(folder / "checkpoint.pt"),
            processes.RUN: self.run,
            "LEADERBOARD_COLLECTIVE_SECONDS": str(self.collective),
            "LEADERBOARD_SHARD": str(self.shard),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        self.notes: list[Note] = []
        self._read: dict[Path, int] = {}  # bytes of each file

    # ------------------------------------------------------------ for subclasses
    def start(self) -> None:
        """Start the coordinator and all nodes."""
        raise NotImplementedError

    def power_off(self, node: int) -> None:
        """Kill everything on the node."""
        processes.kill(self.run, str(node))

    def power_on(self, node: int) -> None:
        """Bring the node back, as its site would start it."""
        raise NotImplementedError

    def kill_coordinator(self) -> None:
        processes.kill(self.run, HEAD)

    def start_coordinator(self) -> None:
        raise NotImplementedError

    def begin_again(self) -> None:
        """Restart a whole job that has stopped, as an operator does."""
        for node in range(self.size + self.standbys):
            self.power_off(node)
        self.kill_coordinator()
        self.start_coordinator()
        for node in range(self.size + self.standbys):
            self.power_on(node)

    def close(self) -> None:
        """Kill all of it."""
        processes.kill(self.run)

    @classmethod
    def version(cls) -> str:
        """Return its name and version. Raises Absent."""
        return f"{cls.package} {installed(cls.environment, cls.package)}"

    # ------------------------------------------------------------ its ranks
    def read(self) -> list[Note]:
        """Return the ranks' notes since the last call; `notes` has all."""
        new: list[Note] = []
        for path in sorted(self.out.glob("notes.*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new += notes.parse(whole.decode(), path.name)
        self.notes += new
        return new

    def ranks(self) -> dict[int, Note]:
        """Return the newest training process of each node."""
        starts = sorted((note for note in self.notes if note.what == "start"), key=lambda note: note.time)
        return {note.node: note for note in starts}

    def signal_rank(self, node: int, number: signal.Signals) -> None:
        """Send a signal to the training process of a node. Raises Missed if none lives.

        By then another program may have its pid.
        """
        rank = self.ranks().get(node)
        if rank is None or not processes.belongs(rank.pid, self.run):
            raise Missed(f"no rank lives on node {node}")
        try:
            os.kill(rank.pid, number)
        except ProcessLookupError:
            raise Missed(f"the rank of node {node} has just ended") from None

    def node_of_rank(self, rank: int) -> int:
        """Return the node of the process that was this rank at its last step."""
        nodes = {note.process: note.node for note in self.notes if note.what == "start"}
        some = [note for note in notes.steps(self.notes) if note.rank == rank]
        return nodes[some[-1].process]

    def place(self, node: int) -> int:
        """Return the node that a failure of `node` hits: with standby nodes, the one that has taken its place."""
        return self.node_of_rank(node) if self.standbys else node

    def logs(self, most: int = 2000) -> str:
        """Return the ends of its logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-most:]}" for path in sorted(self.folder.glob("*.log")))


class Launched(System):
    """A system with a command on each node, which a returning node starts again, and a coordinator on the head."""

    def head(self) -> Sequence[str | Path]:
        """Return the coordinator's command."""
        return [self.python, RANKS / "store_host.py", str(self.port)]

    def node(self, node: int) -> Sequence[str | Path]:
        """Return a node's command."""
        raise NotImplementedError

    def more(self, node: int) -> Mapping[str, str]:
        """Return variables of the node's environment."""
        return {}

    def start(self) -> None:
        self.port = free_port()
        self.start_coordinator()
        for node in range(self.size + self.standbys):
            self.power_on(node)

    @property
    def python(self) -> Path:
        return PEERS / self.environment / "bin" / "python"

    def program(self, name: str) -> Path:
        """Return a program of its Python environment."""
        return self.python.with_name(name)

    def power_on(self, node: int) -> None:
        self._launch(str(node), self.node(node), self.more(node))

    def start_coordinator(self) -> None:
        self._launch(HEAD, self.head(), {})
        wait_for(lambda: answers(self.port), lambda: f"{self.name}'s coordinator answers\n{self.logs()}", 60.0)

    def _launch(self, place: str, command: Sequence[str | Path], more: Mapping[str, str]) -> None:
        environment = outside_slurm() | self.variables | {processes.NODE: place} | dict(more)
        with (self.folder / f"{place}.log").open("ab") as log:
            subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def free_port() -> int:
    """Return a port that Linux does not give to outgoing connections: it stays free until it is used."""
    return ports.choose(1, uuid.uuid4().hex)[0]


def answers(port: int) -> bool:
    """Return whether a program listens at the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def installed(environment: str, package: str) -> str:
    """Return a package's version in one of the peers' environments. Raises Absent."""
    python = PEERS / environment / "bin" / "python"
    if not python.exists():
        raise Absent(f"no environment .peers/{environment}: make leaderboard makes it")
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Absent(f".peers/{environment} has no {package}: make leaderboard installs it")
    return done.stdout.strip()


def program(name: str) -> str:
    """Return the path of one of the machine's programs. Raises Absent."""
    if found := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
        return found
    raise Absent(f"no {name} on this machine: make system installs it")
