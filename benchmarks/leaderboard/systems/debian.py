"""Peers that need a newer Debian than this one: NVRx 0.7 has wheels for glibc 2.39 and Python 3.12 and 3.14 alone.

`make peers-debian` makes that Debian. Its processes belong to this machine, and see the checkout and the run's folder.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.leaderboard.systems.base import NODES, Absent, Launched
from benchmarks.leaderboard.systems.launchers import FtLauncher, InProcess, Torchrun
from tests.support.processes import ROOT

DEBIAN = Path(os.environ.get("DEBIAN_ROOTS", ROOT / ".roots")) / "sid"
PYTHON = Path("/opt/peers/nvrx/bin/python")  # in there
ENTER = """
root=$1 code=$2 runs=$3 here=$4; shift 4
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for shared in "$code" "$runs"; do mkdir -p "$root$shared"; mount --bind "$shared" "$root$shared"; done
exec chroot "$root" env -C "$here" "$@"
"""


def inside(here: Path, command: Sequence[str | Path]) -> list[str | Path]:
    """Return the command as it is run in that Debian, in the same folder."""
    places = [DEBIAN, ROOT, tempfile.gettempdir(), here]
    return ["unshare", "--mount", "--propagation=private", "sh", "-ec", ENTER, "sh", *places, *command]


class InDebian(Launched):
    """A system whose environment is in that Debian."""

    @property
    def python(self) -> Path:
        return PYTHON

    def _launch(self, place: str, command: Sequence[str | Path], more: Mapping[str, str]) -> None:
        super()._launch(place, inside(self.folder, command), more)

    @classmethod
    def version(cls) -> str:
        if os.geteuid():
            raise Absent("its Debian is entered by root alone")
        if not (DEBIAN / PYTHON.relative_to("/")).exists():
            raise Absent(f"no {PYTHON} in {DEBIAN}: make peers-debian makes it")
        code = f"import importlib.metadata as m; print(m.version({cls.package!r}))"
        command = [str(word) for word in inside(Path("/"), [PYTHON, "-c", code])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return f"{cls.package} {done.stdout.strip()}"


class DebianTorchrun(InDebian, Torchrun):
    """The baseline of those below: the same interpreter, torch and C library."""

    name = "torchrun-debian"


class DebianFtLauncher(InDebian, FtLauncher):
    """NVRx 0.7's docs/source/fault_tolerance/usage_guide.rst, *Hot Spare Nodes*: `min_nodes` train, the others wait."""

    name = "nvrx-0.7-launcher"
    package = "nvidia-resiliency-ext"
    nodes = f"{NODES}:{NODES + 1}"
    standbys = 1

    def node(self, node: int) -> Sequence[str | Path]:
        """Return a node's command. Two launchers with one address close the rendezvous for good."""
        address = f"--local-addr=127.0.0.{node + 2}"
        return [address if str(word).startswith("--local-addr=") else word for word in super().node(node)]

    def head(self) -> Sequence[str | Path]:
        """Return the command of NVRx's own control process, which hosts the store and closes each rendezvous."""
        rendezvous = [
            f"--nnodes={self.nodes}",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-conf=last_call_timeout=1",
            "--rdzv-id=leaderboard",
            "--local-addr=127.0.0.1",
        ]
        return [self.program("nvrx-control"), *rendezvous, "--ft-enable-log-server=false"]


class DebianInProcess(InDebian, InProcess):
    """Set up as before: its usage guide has not changed in this. With LOCAL_RANK each restart needs NVIDIA's driver."""

    name = "nvrx-0.7-inprocess"
    package = "nvidia-resiliency-ext"

    def more(self, node: int) -> Mapping[str, str]:
        return {name: value for name, value in super().more(node).items() if name != "LOCAL_RANK"}
