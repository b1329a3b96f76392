"""The parts of a local cluster, and the places of its files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from unicron_ctl.lab.cluster.cluster_processes import Marks
from unicron_ctl.lab.cluster.network import BOTH, IPV4, IPV6, Network
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.whole_file import write_whole

STATE_FILE = "cluster.json"
SHORT_FOLDERS = Path("/tmp")


@dataclass(frozen=True)
class Spec:
    """The user's request, and the ports and the network that the cluster got."""

    nodes: int
    gpus_per_node: int
    auth: str
    plugstack_lines: tuple[str, ...] = ()
    config_lines: tuple[str, ...] = ()
    topology_lines: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    """slurmctld's, one for each node, and the last two for the accounting."""
    links: bool = False
    network: str = ""
    """With links, for example 198.18.4.0/23."""
    accounting: bool = False
    family: str = IPV4

    def check(self) -> None:
        """Raise UserError (wrong use) for values that no cluster can have."""
        if not 1 <= self.nodes <= 256:
            raise UserError(f"a local cluster has 1 to 256 nodes, not {self.nodes}", WRONG_USE)
        if not 0 <= self.gpus_per_node <= 64:
            raise UserError(f"a node has 0 to 64 GPUs, not {self.gpus_per_node}", WRONG_USE)
        if self.auth not in ("munge", "none"):
            raise UserError(f"auth is munge or none, not {self.auth!r}", WRONG_USE)
        if self.family not in (IPV4, IPV6, BOTH):
            raise UserError(f"a family of addresses is {IPV4}, {IPV6} or {BOTH}, not {self.family!r}", WRONG_USE)
        if self.family != IPV4 and not self.links:
            raise UserError("only a cluster with links has a family of addresses to choose: add --links", WRONG_USE)
        if self.accounting and self.links:
            raise UserError("a cluster with links has no accounting: choose one of --links and --accounting", WRONG_USE)

    def address(self, host: str) -> str:
        """Return the numeric address by which Slurm finds a host of a cluster with links."""
        return Network.address(self.network, host, IPV6 if self.family == IPV6 else IPV4)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    def same_wish(self, other: Spec) -> bool:
        """Whether both ask for the same cluster, whatever ports and network it got."""
        return dataclasses.replace(self, ports=(), network="") == dataclasses.replace(other, ports=(), network="")


class Layout:
    """Paths of one cluster.

    Long-lived files (configuration, logs, controller state) are in the state folder. Unix sockets are in a folder with
    a short name in SHORT_FOLDERS, since a socket's path may have 107 characters at most. munge's files are there too,
    since munged refuses keys and logs below folders that a group may write.
    """

    def __init__(self, state_dir: str | os.PathLike[str]) -> None:
        self.state_dir = Path(os.path.realpath(os.path.expanduser(state_dir)))
        if not re.fullmatch(r"[A-Za-z0-9._/+@~-]+", str(self.state_dir)):
            raise UserError(
                f"slurm.conf cannot hold the path {str(self.state_dir)!r}; "
                "name a state folder without special characters",
                WRONG_USE,
            )
        self.digest = hashlib.sha256(str(self.state_dir).encode()).hexdigest()[:10]
        self.cluster_name = f"unicron_{self.digest}"  # job ids and node names are the same in all local clusters
        self.short_dir = SHORT_FOLDERS / f"unicron-{self.digest}"
        self.etc_dir = self.state_dir / "etc"
        self.slurm_conf = self.etc_dir / "slurm.conf"
        self.log_dir = self.state_dir / "log"
        self.save_dir = self.state_dir / "state"
        self.gpu_dir = self.state_dir / "dev"
        self.spool_dir = self.short_dir / "spool"
        self.task_prolog = self.short_dir / "task_prolog"  # any user's jobs execute it
        self.memory_dir = self.short_dir / "memory"  # each node's /dev/shm
        self.database_dir = self.short_dir / "database"
        self.munge_dir = self.short_dir / "munge"
        self.munge_socket = self.munge_dir / "socket"
        self.state_file = self.state_dir / STATE_FILE
        self.lock_file = self.state_dir / "lock"
        self.network = Network(self.digest, self.short_dir)

    @property
    def marks(self) -> Marks:
        logs, database = str(self.log_dir), str(self.database_dir)
        return Marks(str(self.slurm_conf), str(self.munge_socket), logs, database, self.network.prefix)

    def make_short_dir(self) -> None:
        """Make the folder for sockets. Raises UserError if another user put something in its place."""
        try:
            self.short_dir.mkdir(mode=0o755)
        except FileExistsError:
            pass
        found = self.short_dir.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UserError(f"{self.short_dir} is not a folder of this program; remove it or name another state folder")
        self.short_dir.chmod(0o755)  # whatever the umask: users' jobs reach munge and their scripts through it

    def save(self, spec: Spec) -> None:
        """Write the state file, whole or not at all."""
        write_whole(self.state_file, msgspec.json.encode(spec).decode())

    def load(self) -> Spec | None:
        """Return the saved spec; None if there never was a cluster here. Raises UserError for a damaged file."""
        try:
            return msgspec.json.decode(self.state_file.read_bytes(), type=Spec)
        except FileNotFoundError:
            return None
        except ValueError:  # and msgspec's errors
            raise UserError(f"{self.state_file} is damaged; run 'unicronctl cluster down' and remove it") from None


def default_state_dir() -> Path:
    """Return $UNICRON_CLUSTER_DIR, or else unicron/cluster below the user's XDG state folder."""
    if chosen := os.environ.get("UNICRON_CLUSTER_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "unicron" / "cluster"
