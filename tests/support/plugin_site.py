"""A real Slurm with the plugin, the real agent and a controller, as a site has them."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.controller import Controller
from tests.support.jobs import json_lines
from tests.support.processes import ROOT, call, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster

SOURCE = ROOT / "slurm_plugin" / "spank"
SETTINGS = 'slurm = "command"\nslurm_poll_seconds = 0.5\n'


def build(folder: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-s", "-C", str(SOURCE), f"O={folder}", *targets], capture_output=True, text=True, timeout=100
    )


@cache
def _built() -> Path:
    """A folder with the plugin, which this process has built."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-plugin-"))
    atexit.register(shutil.rmtree, folder)
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def build_once(folder: Path) -> Path:
    """Put the plugin as it is built by default into `folder`, and return its path."""
    shutil.copytree(_built(), folder)
    return folder / "unicron.so"


class Site:
    """A cluster with the plugin, the real agent and a controller. config_lines: of slurm.conf."""

    def __init__(
        self, folder: Path, nodes: int = 2, gpus: int = 1, auth: str = "none", config_lines: Sequence[str] = ()
    ):
        self.folder = folder
        plugin = build_once(folder / "build")
        scripts = sysconfig.get_path("scripts")
        self.environment = outside_slurm() | {"PLAIN_OUT": str(folder)}
        programs = [scripts, self.environment["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"]
        self.environment["PATH"] = os.pathsep.join(programs)
        self.cluster = LocalCluster(
            folder / "slurm", nodes=nodes, gpus_per_node=gpus, auth=auth, config_lines=config_lines
        )
        self.environment |= {"SLURM_CONF": str(self.cluster.layout.slurm_conf)}
        self.controller = Controller(folder, f'{SETTINGS}auth = "{auth}"\n', self.environment)
        self.cluster.up()
        line = f"optional {plugin} agent={scripts}/unicron-agent controller={self.controller.address}\n"
        (self.cluster.layout.etc_dir / "plugstack.conf").write_text(line)

    def use_agent(self, path: Path) -> None:
        """From now on another agent is put in front of commands."""
        plugstack = self.cluster.layout.etc_dir / "plugstack.conf"
        plugstack.write_text(re.sub(r"agent=\S+", f"agent={path}", plugstack.read_text()))

    def close(self) -> None:
        self.controller.close()
        self.cluster.down()

    def steps(self, element: int) -> list[dict]:
        return json_lines(self.folder / f"steps.{element}")

    def run(self, *words: object, **environment: str) -> str:
        """The output of a command that succeeds."""
        done = call(*words, cwd=self.folder, environment=self.environment | environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *words: object, **environment: str) -> str:
        """The number of a job of sbatch's, with the plugin's options among the words."""
        return self.run("sbatch", "--parsable", *words, **environment)

    def power_off(self, node: str) -> None:
        """The node is gone, and an admin says so, which proves it: else a new world waits for its processes' end."""
        self.cluster.power_off(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def world(self, after: int = 0, size: int = 2) -> dict:
        """Wait until one rank of a world of this size that is younger than `after` has made three steps; the last."""

        def found() -> dict | None:
            for path in sorted(self.folder.glob("steps.*")):
                steps = [one for one in json_lines(path) if one["size"] == size and one["generation"] > after]
                if len(steps) > 2:
                    return steps[-1]
            return None

        return wait_for(found, self.logs)

    def job(self, number: str) -> dict:
        return self.controller.job(number)

    def logs(self) -> str:
        files = [*self.folder.glob("slurm-*.out"), self.folder / "unicrond.log"]
        said = [f"{e['job']} {e['kind']}: {e.get('reason', '')}" for e in self.controller.events()]
        return "\n".join([*(f"--- {file.name}\n{file.read_text()}" for file in files), "--- events", *said])
