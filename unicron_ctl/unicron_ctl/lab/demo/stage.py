"""The demo's stage: a real private Slurm with the plugin, a controller, a dataset, jobs and their reference runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from unicron import WHEELS
from unicron_ctl.lab.cluster import LocalCluster, protection
from unicron_ctl.lab.cluster.cluster_layout import Layout
from unicron_ctl.lab.cluster.health_program import health_lines
from unicron_ctl.shared.protocol.answer_schema import Element, Job, Status
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.settings.places import TEMPLATES
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.release import rank_roots

CHECK = Path(__file__).with_name("verify.py")
SCRIPT_SECONDS = 120.0
HANG_FLOOR_SECONDS = 60.0  # ten processes share the cores, and an iteration takes long while another rank starts
# A model small enough that two cores train seven ranks of it and two reference runs.
MODEL = "--num-layers 2 --hidden-size 128 --seq-length 128 --micro-batch-size 2 --micro-batches 12"
MODEL_OPTIONS = tuple(MODEL.split())
# The jobs sleep within a micro-batch: ranks that always computed would leave no core to ranks that start.
MICRO_BATCH_SECONDS = 0.25
REFERENCE_SECONDS = 0.03  # of the reference runs, about as long as the computation
# A demo has few iterations: one micro-batch in 12 is audited, which verifies a state some five iterations apart.
CHECKS = {"UNICRON_AUDIT": "12", "UNICRON_COMPARE": "4"}
TRAIN_ITERATIONS = 5000  # for the learning-rate schedule; the demo ends the jobs when its story is over
MODULES = sorted(("megatron", "numpy", "torch", *WHEELS))
FRESH_SECONDS = 0.25
ANSWER_SECONDS = 20.0  # the cores are busy with ten processes that import torch


def check_python(python: Path) -> None:
    """Raise UserError for a Python that cannot train the demo's jobs."""
    look = f"import importlib.util as u; print('lacks', *(name for name in {MODULES} if not u.find_spec(name)))"
    words: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = subprocess.run(
            [python, "-c", look], capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=True
        ).stdout.split()
    if words[:1] != ["lacks"]:
        raise UserError(f"{python} is no Python that runs here: choose one with --python", WRONG_USE)
    if words[1:]:
        raise UserError(f"{python} lacks {', '.join(words[1:])}: choose one that trains with --python", WRONG_USE)


@dataclass(frozen=True)
class DemoJob:
    """One training job of the demo."""

    name: str
    elements: int
    """The most nodes that it can use."""
    weight: float
    min_nodes: int
    seed: int
    ranks_per_node: int = 1


@dataclass
class Stage:
    """Everything that runs during the demo, below one folder."""

    folder: Path
    nodes: int
    jobs: tuple[DemoJob, ...]
    python: Path = Path(sys.executable)  # trains; it needs torch and Megatron-core
    cluster: LocalCluster = field(init=False)
    address: str = field(init=False)
    ids: dict[str, str] = field(default_factory=dict)  # job name -> Slurm job id
    _controller: subprocess.Popen[bytes] | None = None
    _options: list[str] = field(default_factory=list)
    _references: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _status: Status | None = None
    _asked_at: float = float("-inf")

    # ------------------------------------------------------------ up and down
    @contextlib.contextmanager
    def open(self) -> Iterator[Stage]:
        """Set the stage, and afterwards end all that runs."""
        protection.plugin_line("")  # before anything is started
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            layout = Layout(self.folder / "slurm")
            self._controller, self.address = protection.spawn(self.folder, layout, hang_floor=HANG_FLOOR_SECONDS)
            self.cluster = LocalCluster(
                self.folder / "slurm",
                nodes=self.nodes,
                gpus_per_node=1,
                auth="munge",
                config_lines=health_lines(self.folder, layout, self.address),
                plugstack_lines=[protection.plugin_line(self.address)],
            )
            self.cluster.up()
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """End everything, however much of it runs."""
        for process in [*self._references.values(), self._controller]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if hasattr(self, "cluster"):
            self.cluster.down()

    # ------------------------------------------------------------ dataset, jobs, references
    def build_dataset(self) -> None:
        """Make Megatron's indexed dataset of the source of Python's standard library."""
        prefix = str(self.folder / "stdlib")
        self._options = ["--data-path", prefix, *MODEL_OPTIONS, "--train-iterations", str(TRAIN_ITERATIONS)]
        script, source = str(TEMPLATES / "build_dataset.py"), sysconfig.get_path("stdlib")
        self._run_python([script, "--input", source, "--suffix", ".py", "--output", prefix])

    def verify_gradients(self, name: str) -> dict[str, float]:
        """Return how much the gradient of the first iteration of each generation differs from an undisturbed one."""
        seed = str(next(job.seed for job in self.jobs if job.name == name))
        gradients = str(self.folder / name / "gradients")
        output = self._run_python([str(CHECK), str(TEMPLATES), gradients, *self._options, "--seed", seed])
        return msgspec.json.decode(output, type=dict[str, float])

    def _environment(self) -> dict[str, str]:
        """Return the environment of a training outside Slurm, whose Python need not have Unicron."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNICRON", "SLURM"))}
        return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [*rank_roots(), kept.get("PYTHONPATH", "")]))}

    def _run_python(self, words: list[str]) -> str:
        try:
            done = subprocess.run(
                [self.python, *words],
                capture_output=True,
                text=True,
                timeout=SCRIPT_SECONDS,
                check=False,
                env=self._environment(),
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{Path(words[0]).name} took more than {SCRIPT_SECONDS:.0f} s; run it by hand to see why"
            ) from None
        if done.returncode:
            raise UserError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{words[0]} failed")
        return done.stdout

    def submit(self, job: DemoJob) -> str:
        """Submit the template as a user would. Return the array job's id."""
        work = self.folder / job.name
        work.mkdir(exist_ok=True)
        command = [
            "sbatch",
            "--parsable",
            f"--job-name={job.name}",
            f"--array=0-{job.elements - 1}",
            "--unicron",
            f"--unicron-weight={job.weight}",
            f"--unicron-min-nodes={job.min_nodes}",
            str(TEMPLATES / "gpt_elastic.sbatch"),
            *self._options,
            f"--seed={job.seed}",
            f"--micro-batch-seconds={MICRO_BATCH_SECONDS}",
            f"--save-gradients={work / 'gradients'}",
        ]
        path = protection.search_path(self.python.parent)
        environment = os.environ | self.cluster.env() | {"PATH": path, "UNICRON_TEMPLATES": str(TEMPLATES)}
        environment |= {"UNICRON_RANKS_PER_NODE": str(job.ranks_per_node), **CHECKS}
        environment.pop("UNICRON_CONTROLLER", None)
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        if done.returncode:
            raise UserError(f"sbatch: {done.stderr.strip()}")
        self.ids[job.name] = done.stdout.strip().split(";")[0]
        return self.ids[job.name]

    def start_reference(self, job: DemoJob) -> None:
        """Start the job's script, data and seed in one undisturbed process outside Slurm, at a lower priority."""
        work = self.folder / f"{job.name}-reference"
        work.mkdir(exist_ok=True)
        command = [
            *("nice", "-n", "5"),  # nicer than the jobs, but not so nice that it never ends beside other work
            str(self.python),
            str(TEMPLATES / "train_gpt.py"),
            *self._options,
            f"--seed={job.seed}",
            f"--micro-batch-seconds={REFERENCE_SECONDS}",
            f"--metrics={work / 'metrics'}",
        ]
        with (work / "log").open("wb") as log:
            self._references[job.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )

    def references_reached(self, iterations: dict[str, int]) -> bool:
        """Whether the reference run of each job has trained so many iterations. Raises UserError if one failed."""
        for name, process in self._references.items():
            if process.poll() is not None:
                raise UserError(f"the reference run of {name} failed: see {self.folder / f'{name}-reference' / 'log'}")
        files = {name: self.folder / f"{name}-reference" / "metrics.slot0" for name in iterations}
        return all(
            file.is_file() and file.read_bytes().count(b"\n") >= iterations[name] for name, file in files.items()
        )

    def finish(self, job: DemoJob) -> None:
        """Ask the job to end after its present iteration, as Slurm's --signal does before a time limit."""
        subprocess.run(
            ["scancel", "--state=RUNNING", "--signal=USR1", self.ids[job.name]],
            env=os.environ | self.cluster.env(),
            timeout=20,
            check=False,
        )

    # ------------------------------------------------------------ looking and breaking
    def status(self) -> Status:
        """Return the controller's status, at most FRESH_SECONDS old: the training needs the cores."""
        if self._status is None or time.monotonic() - self._asked_at > FRESH_SECONDS:
            answer = ask_controller({"kind": "status"}, address=self.address, timeout=ANSWER_SECONDS)
            self._status = as_struct(answer, Status)
            self._asked_at = time.monotonic()
        return self._status

    def job(self, name: str) -> Job | None:
        """Return one job of the status, None before its first agent has registered."""
        return next((job for job in self.status().jobs if job.job == self.ids[name]), None)

    def known_job(self, name: str) -> Job:
        """Return one job of the status. Raises LookupError before its first agent has registered."""
        found = self.job(name)
        if found is None:
            raise LookupError(f"the controller knows no job {name}")
        return found

    def kill_rank(self, name: str, element: int) -> float:
        """Kill the element's last rank by SIGKILL. Return the time."""
        victim = self.pids(name, element)[-1]
        now = time.time()
        os.kill(victim, signal.SIGKILL)
        return now

    def pids(self, name: str, element: int) -> list[int]:
        """Return the processes of the element's ranks."""
        return [rank.pid for rank in self._element(name, element).ranks]

    def node_of(self, name: str, element: int) -> str:
        """Return the node on which the element runs now."""
        return self._element(name, element).node

    def _element(self, name: str, element: int) -> Element:
        return next(e for e in self.known_job(name).elements if e.element == element)

    def power_off(self, node: str) -> float:
        """Kill every process of the node at once, slurmd too. Return the time."""
        now = time.time()
        self.cluster.power_off(node)
        return now

    def inject(self, name: str, fault: str, slot: int) -> float:
        """Let a fault strike in a rank of the job, as `unicronctl inject` does. Return the time."""
        now = time.time()
        order = {"kind": "inject", "job": self.ids[name], "fault": fault, "slot": slot}
        ask_controller(order, address=self.address, timeout=ANSWER_SECONDS)
        return now

    def metrics(self, name: str) -> Path:
        """Return the prefix of the job's metrics files."""
        return self.folder / name / "metrics" / f"{name}-{self.ids[name]}"

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
