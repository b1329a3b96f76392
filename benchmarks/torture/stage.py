"""A private Slurm, a unicrond that acts, and two jobs of a small Megatron model, all real."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.storms.stage import OUT_OF_SERVICE, is_agent
from benchmarks.torture import leaks
from benchmarks.torture.sound import JobNow, Stepped
from tests.support.controller import Controller
from tests.support.jobs import FOREVER, TINY
from tests.support.links import AGENT, OTHER_STEP
from tests.support.processes import LIMIT, ROOT, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster, cluster_processes
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.health.oom_kills import counter_file

NODES = 5
CHECKPOINTS = "checkpoints"  # folder of the jobs' checkpoints below the run's
EPILOG = ROOT / "slurm_plugin" / "epilog.d" / "50-unicron"
KEEP_MINUTES = 1  # for the training state of an element that may return; a site has 15
MICRO_BATCHES = 8
SLOW = "0.15"  # seconds of sleep for each micro-batch, which leaves the cores to ranks that start
SAVE_EVERY = "50"  # iterations between two checkpoints, which no rank may read while the cluster is up
# The limits that protect a site from so many failures; the ranks share this machine's cores.
SETTINGS = """
allow_inject = true
hang_floor_seconds = 5.0
max_isolated_nodes = 1000000
max_isolated_share = 1.0
max_requeues_per_job = 1000000
"""


@dataclass(frozen=True)
class Training:
    """One job."""

    name: str
    elements: int
    """The most nodes that it can use."""
    weight: float
    settings: dict[str, str]
    """Settings of tiny_gpt.py."""


# A learnable task at a low rate: on noise Adam amplifies another order of sums to 1e-3 (docs/measurements.md).
COMMON = {"TINY_RATE": "1e-3", "TINY_SAVE": "0", "TINY_MICRO_BATCHES": str(MICRO_BATCHES)}
TRAININGS = (
    Training("large", 3, 2.0, COMMON | {"TINY_RULE": "0.6"}),
    Training("small", 3, 1.0, COMMON | {"TINY_RULE": "0.4"}),
)
ELEMENTS = {training.name: training.elements for training in TRAININGS}


class SiteController(Controller):
    """A unicrond with munge and the product's own time limits, at the cluster of the run."""

    usual = 'auth = "munge"\nslurm = "command"\nslurm_poll_seconds = 0.5\n'


class Tail:
    """A file to which a rank appends JSON lines."""

    def __init__(self, path: Path):
        self._path, self._offset = path, 0

    def more(self) -> list[dict[str, Any]]:
        """Return the new lines, without a last one that is half written."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.split(b"\n") if line.endswith(b"}")]


class Site:
    """The cluster, its unicrond and the jobs of one leg; the checkpoints are those of all legs."""

    def __init__(self, folder: Path, checkpoints: Path):
        self.folder, self.checkpoints = folder, checkpoints
        self.ids: dict[str, str] = {}
        lines = [f"Epilog={folder}/epilog"]
        self.cluster = LocalCluster(folder / "slurm", nodes=NODES, gpus_per_node=1, auth="munge", config_lines=lines)
        self._memory = self.cluster.layout.memory_dir
        self._write_epilog()
        self._munge = os.environ.get("MUNGE_SOCKET")
        try:
            self.cluster.up()
            os.environ["MUNGE_SOCKET"] = self.cluster.env()["MUNGE_SOCKET"]  # for this program's own questions
            self.controller = SiteController(folder, SETTINGS, outside_slurm() | self.cluster.env())
        except BaseException:
            self.close()
            raise
        self._tails: dict[tuple[str, int], Tail] = {}
        self.stepped: dict[str, dict[int, Stepped]] = {training.name: {} for training in TRAININGS}
        self.first: dict[str, int] = {}  # the first iteration of each job in this leg

    def close(self) -> None:
        """End all of it; its files stay."""
        try:
            if hasattr(self, "controller") and self.controller.alive:
                self.controller.close()
        finally:
            os.environ.pop("MUNGE_SOCKET", None)
            os.environ.update({"MUNGE_SOCKET": self._munge} if self._munge else {})
            self.cluster.down()

    def _write_epilog(self) -> None:
        """Write the project's own epilog, which clears the folder of each node in memory."""
        for node in self.cluster.spec.node_names:
            lines = f"UNICRON_CLEAN_DIRS={self._memory}/{node}\nUNICRON_KEEP_MINUTES={KEEP_MINUTES}\n"
            (self.folder / f"epilog.{node}.conf").write_text(lines + f"UNICRON_LOG={self.folder}/epilog.log\n")
        script = self.folder / "epilog"
        conf = f"{self.folder}/epilog.$SLURMD_NODENAME.conf"
        script.write_text(f"#!/bin/sh\nexport UNICRON_EPILOG_CONF={conf}\nexec {EPILOG}\n")
        script.chmod(0o755)

    # ------------------------------------------------------------ jobs
    def submit(self, training: Training) -> None:
        """Submit an array of one-node elements, each with an agent and a rank."""
        folder = self.folder / training.name
        folder.mkdir()
        (self.checkpoints / training.name).mkdir(parents=True, exist_ok=True)
        given = {
            "UNICRON_CONTROLLER": self.controller.address,
            "UNICRON_RANKS_PER_NODE": "1",
            "UNICRON_WEIGHT": str(training.weight),
            "UNICRON_MIN_NODES": "1",
            "OMP_NUM_THREADS": "1",
            "TINY_OUT": str(folder),
            "TINY_ITERATIONS": FOREVER,
            "TINY_SLOW": SLOW,
            "TINY_CHECKPOINTS": str(self.checkpoints / training.name),
            "TINY_CHECKPOINT_EVERY": SAVE_EVERY,
        }
        script = folder / "job.sh"
        words = shlex.join([AGENT, "run", "--", sys.executable, str(TINY)])
        where = f"export TMPDIR={self._memory}/$SLURMD_NODENAME\n"  # a node without power loses it
        script.write_text(f"#!/bin/bash\n{where}{OTHER_STEP}exec srun --cpu-bind=none {words}\n")
        options = ["--parsable", f"--job-name={training.name}", f"--array=0-{training.elements - 1}", "-N1"]
        options += ["--exclusive", "--gres=gpu:1", "--requeue", "--open-mode=append", f"--output={folder}/%a.log"]
        answer = self.slurm("sbatch", *options, str(script), settings=training.settings | given)
        self.ids[training.name] = answer.split(";")[0]

    def slurm(self, *words: str, settings: dict[str, str] | None = None, check: bool = True) -> str:
        """Run one of Slurm's commands. Raises CalledProcessError if `check`."""
        environment = outside_slurm() | self.cluster.env() | (settings or {})
        environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT, check=check)
        return done.stdout.strip()

    def finish(self) -> None:
        """Ask both jobs to end after their present iteration, as Slurm's --signal would before a time limit."""
        for number in self.ids.values():
            # For waiting elements scancel would retry for a minute and a half.
            self.slurm("scancel", "--state=RUNNING", "--signal=USR1", number, check=False)

    def jobs(self) -> dict[str, JobNow]:
        """Return the jobs by name. Raises UserError if the controller does not answer."""
        found = map(JobNow.of, self.controller.ask("jobs"))
        return {job.name: job for job in found}

    def listen(self) -> None:
        """Read the ranks' new notes into `stepped`."""
        for name, last in self.stepped.items():
            for slot in range(ELEMENTS[name]):
                tail = self._tails.setdefault((name, slot), Tail(self.folder / name / f"losses.{slot}"))
                for line in tail.more():
                    self.first[name] = min(self.first.get(name, line["iteration"]), line["iteration"])
                    last[slot] = Stepped(line["generation"], line["iteration"], line["time"])

    def iteration(self, name: str) -> int:
        """Return the last iteration that any rank of a job has stepped; -1 before the first."""
        return max((step.iteration for step in self.stepped[name].values()), default=-1)

    def reads(self, name: str) -> int:
        """Count how often a rank of the job has read a checkpoint."""
        return reads(self.folder / name, self.checkpoints / name)

    # ------------------------------------------------------------ nodes and processes
    def out_of_service(self) -> dict[str, str]:
        """Return the states of the nodes that are drained or down. Raises SlurmError."""
        nodes = self.cluster.client().nodes()
        return {node.name: "+".join(sorted(node.states)) for node in nodes if node.states & OUT_OF_SERVICE}

    def agents(self, node: str = "") -> list[int]:
        """Return the process ids of the agents, of all nodes or of one."""
        tasks = [p for p in self.cluster.processes() if p.kind == "task" and node in ("", p.node)]
        return [p.pid for p in tasks if is_agent(p.pid)]

    def pass_by(self) -> None:
        """Run another job, with an epilog, on each node."""
        self.slurm("srun", f"-N{NODES}", "--exclusive", "true", check=False)

    def kill_slurmctld(self) -> None:
        """SIGKILL."""
        for process in self.cluster.processes():
            if process.kind == "slurmctld":
                cluster_processes.kill(process)

    def inventory(self) -> leaks.Inventory:
        """Return the inventory. Raises SlurmError."""
        kinds = Counter(process.kind for process in self.cluster.processes())
        places = {"state": self.controller.state_folder, "memory": self._memory}
        held = [f"{e.job}_{e.element} {e.state}" for e in self.cluster.client().elements() if e.state not in OVER]
        nodes = tuple(f"{node}: {states}" for node, states in sorted(self.out_of_service().items()))
        return leaks.Inventory(kinds, leaks.files(places) | _cages(), nodes, tuple(sorted(held)))


def reads(logs: Path, checkpoints: Path) -> int:
    """Count in a job's logs how often a rank has read a checkpoint (`unicron_transition/snapshot/whole_state.py`)."""
    line = f"goes on from {checkpoints}"
    return sum(path.read_text(errors="replace").count(line) for path in logs.glob("*.log"))


OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")


def _cages() -> dict[str, int]:
    """Return the memory cgroups of `oom-kill` (unicron_detector/chaos/memory_cage.py), as if they were files."""
    file = counter_file()
    folders = (file.parent, file.parent.parent) if file is not None else ()
    return {f"cgroup/{path.name}": 0 for folder in folders for path in folder.glob("unicron-oom-*")}


def end_leftovers(folder: Path) -> None:
    """End what an earlier leg has left running. Raises UserError."""
    for leg in sorted(folder.glob("leg*")):
        if (leg / "slurm" / "cluster.json").is_file():
            LocalCluster.load(leg / "slurm").down()
    marks = tuple(f"{mark}{folder}/" for mark in ("", "TINY_OUT="))
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *(f"{name}={value}" for name, value in process.environ().items())]
            if process.pid != os.getpid() and any(word.startswith(marks) for word in words):
                os.kill(process.pid, signal.SIGKILL)
        except (psutil.Error, ProcessLookupError):
            continue
        except PermissionError:
            raise UserError(
                f"process {process.pid} of the run in {folder} is not yours: run this as its user"
            ) from None


def wipe(folder: Path) -> None:
    """Make the folder, or empty it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
