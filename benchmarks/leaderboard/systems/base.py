"""The base of all systems: a folder, nodes, a coordinator, and notes."""

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
    """The system cannot be run here; the text says why."""


class System:
    """One job of four ranks on four nodes, under one system. Subclasses say how it is started.

    settings: what was chosen for it, for the documents. folder: its own, below which all files are.
    """

    name: str
    settings: str
    environment = "torchrun"  # folder below .peers that has its Python
    package = "torch"  # whose version there is its own
    collective = 3.0  # seconds for a collective, where it is this that ends a hang

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.run = folder, uuid.uuid4().hex
        self.out = folder / "notes"
        self.out.mkdir(parents=True)
        (folder / "tmp").mkdir()
        self.variables = {
            "TMPDIR": str(folder / "tmp"),
            "LEADERBOARD_OUT": str(self.out),
            "LEADERBOARD_CHECKPOINT": str(folder / "checkpoint.pt"),
            processes.RUN: self.run,
            "LEADERBOARD_COLLECTIVE_SECONDS": str(self.collective),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        self.notes: list[Note] = []
        self._read: dict[Path, int] = {}  # how far

    # ------------------------------------------------------------ what a subclass says
    def start(self) -> None:
        """The coordinator and all nodes."""
        raise NotImplementedError

    def power_off(self, node: int) -> None:
        """Everything on the node dies at once."""
        processes.kill(self.run, str(node))

    def power_on(self, node: int) -> None:
        """The node is there again, as its site would start it."""
        raise NotImplementedError

    def kill_coordinator(self) -> None:
        processes.kill(self.run, HEAD)

    def start_coordinator(self) -> None:
        raise NotImplementedError

    def begin_again(self) -> None:
        """End all of a job that has stopped and start it once more, as an operator does."""
        for node in range(NODES):
            self.power_off(node)
        self.kill_coordinator()
        self.start_coordinator()
        for node in range(NODES):
            self.power_on(node)

    def close(self) -> None:
        """Nothing is left."""
        processes.kill(self.run)

    @classmethod
    def version(cls) -> str:
        """Raises Absent."""
        return f"{cls.package} {installed(cls.environment, cls.package)}"

    # ------------------------------------------------------------ what is seen of it
    def read(self) -> list[Note]:
        """Return what its ranks have noted since the last call; all of it is in `notes`."""
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
        """node -> its newest training process."""
        starts = sorted((note for note in self.notes if note.what == "start"), key=lambda note: note.time)
        return {note.node: note for note in starts}

    def signal_rank(self, node: int, number: signal.Signals) -> None:
        """To the training process of a node. Raises Missed where none lives; a stranger may have its pid by then."""
        rank = self.ranks().get(node)
        if rank is None or not processes.belongs(rank.pid, self.run):
            raise Missed(f"no rank lives on node {node}")
        try:
            os.kill(rank.pid, number)
        except ProcessLookupError:
            raise Missed(f"the rank of node {node} has just ended") from None

    def node_of_rank_0(self) -> int:
        """Return where the process runs that was rank 0 at its last step."""
        nodes = {note.process: note.node for note in self.notes if note.what == "start"}
        zeros = [note for note in notes.steps(self.notes) if note.rank == 0]
        return nodes[zeros[-1].process]

    def logs(self, most: int = 2000) -> str:
        """The ends of all that it has written."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-most:]}" for path in sorted(self.folder.glob("*.log")))


class Launched(System):
    """One command on each node, and one on the head. A node that is there again starts its command again."""

    def head(self) -> Sequence[str | Path]:
        """The coordinator's command."""
        return [self.python, RANKS / "store_host.py", str(self.port)]

    def node(self, node: int) -> Sequence[str | Path]:
        """A node's command."""
        raise NotImplementedError

    def more(self, node: int) -> Mapping[str, str]:
        """More of its environment."""
        return {}

    def start(self) -> None:
        self.port = free_port()
        self.start_coordinator()
        for node in range(NODES):
            self.power_on(node)

    @property
    def python(self) -> Path:
        return PEERS / self.environment / "bin" / "python"

    def program(self, name: str) -> Path:
        """Return a program of its environment."""
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
    """None that Linux gives to outgoing connections, for nobody holds it until it is used."""
    return ports.choose(1, uuid.uuid4().hex)[0]


def answers(port: int) -> bool:
    """Somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def installed(environment: str, package: str) -> str:
    """The version in one of the peers' environments. Raises Absent."""
    python = PEERS / environment / "bin" / "python"
    if not python.exists():
        raise Absent(f"no environment .peers/{environment}: make leaderboard makes it")
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Absent(f".peers/{environment} has no {package}: make leaderboard installs it")
    return done.stdout.strip()


def program(name: str) -> str:
    """One of the machine's programs. Raises Absent."""
    if found := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
        return found
    raise Absent(f"no {name} on this machine: make system installs it")
