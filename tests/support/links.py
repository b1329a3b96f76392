"""A cluster with real links, for tests of several hosts: unicrond on the head, agents and ranks on the nodes by sbatch.

    with LinksCluster(tmp_path, nodes=4) as links:
        job = links.submit(3)                       # tiny_gpt.py on three nodes, the fourth is spare
        job.reached(5)
        links.cut("n2")                             # no FIN, no RST
        links.cut("n1,n3", "n4"); links.loss("n1", 0.1); links.heal()
        links.controller.kill(); links.controller.forget(); links.controller.start()
        links.run("n3", "ip", "address"); links.unicronctl("status", "--json"); links.slurm("squeue")

`controller` answers also while the head is cut off: its questions are asked on the head. So are `unicronctl` and
`slurm`. Needs root.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from sbatch_templates.training_metrics import MetricsError, read_metrics
from tests.support.controller import Controller
from tests.support.jobs import FOREVER, TINY, json_lines
from tests.support.processes import LIMIT, ROOT, UNICRONCTL, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.lab.cluster.network import HEAD, IPV4, MOUNTS
from unicron_ctl.lab.demo.stage import MODEL_OPTIONS, TEMPLATES
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.addresses import join

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root")
PORT = 7451
AGENT = f"{sysconfig.get_path('scripts')}/unicron-agent"
# What the plugin does for its jobs (slurm_plugin/spank/batch.c says why), where the agent is written in the jobs.
OTHER_STEP = """export UNICRON_FIRST_STEP=$((${SLURM_RESTART_COUNT:-0} % 4))
for ((step = 0; step < UNICRON_FIRST_STEP; step++)); do UNICRON=0 srun true; done
"""
CLONE_NEWNET = 0x40000000  # sched.h


class HeadController(Controller):
    """A unicrond on the head, with the product's own time limits and munge."""

    usual = 'auth = "munge"\nslurm = "command"\nslurm_poll_seconds = 0.5\n'

    def __init__(self, folder: Path, cluster: LocalCluster, settings: str = ""):
        self.way_in = cluster.command_prefix(HEAD)
        self.namespace = MOUNTS / cluster.layout.network.namespace(HEAD)
        self._asker = ThreadPoolExecutor(1, initializer=self._enter)
        self._reached = f"tcp://{join(cluster.address(HEAD), PORT)}"
        self._listen = self._reached if cluster.spec.family == IPV4 else f"tcp://[::]:{PORT}"
        self._munge = os.environ.get("MUNGE_SOCKET")
        os.environ["MUNGE_SOCKET"] = cluster.env()["MUNGE_SOCKET"]  # who asks is shown by this cluster's munge
        super().__init__(folder, settings, outside_slurm() | cluster.env())

    @property
    def command(self) -> list[str]:
        self.address = self._listen
        return [*self.way_in, *super().command]

    def freeze(self) -> None:
        """SIGSTOP, until `thaw`."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Empty the state folder of one that does not run."""
        assert not self.alive
        shutil.rmtree(self.state_folder)

    def ask(self, kind: str, **arguments: Any) -> Any:
        question = {
            "kind": kind,
            **arguments,
        }  # by number: the asker is on the head's network, but not of its /etc/hosts
        return self._asker.submit(ask_controller, question, self._reached, timeout=30.0).result(LIMIT)

    def close(self) -> None:
        if self.alive:
            self.thaw()
        try:
            super().close()
        finally:
            self._asker.shutdown()
            os.environ.pop("MUNGE_SOCKET", None)
            os.environ.update({"MUNGE_SOCKET": self._munge} if self._munge else {})

    def _enter(self) -> None:
        """A network namespace is a thread's own, and the threads that ZeroMQ starts from it inherit it."""
        with self.namespace.open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.namespace}")


class LinksJob:
    """An array job on a cluster with links; its ranks note their steps in `folder`."""

    notes = "losses.*"  # the files, whose names end with the rank's slot

    def __init__(self, links: LinksCluster, number: str, folder: Path):
        self.links, self.id, self.folder = links, number, folder

    def status(self) -> dict[str, Any]:
        """What the controller says of it; empty before it knows it."""
        return self.links.controller.job(self.id)

    def node(self, element: int) -> str:
        """Where the controller knows an element to run; empty when nowhere."""
        found = [e["node"] for e in self.status().get("elements", []) if e["element"] == element and not e["gone"]]
        return found[0] if found else ""

    def steps(self) -> list[dict[str, Any]]:
        """Every rank's steps, {"slot", "iteration", "generation", "loss", "time"}, in the order of time."""
        found = []
        for path in self.folder.glob(self.notes):
            found += [{"slot": int(path.suffix.lstrip(".slot")), **step} for step in json_lines(path)]
        return sorted(found, key=lambda step: step["time"])

    def last(self) -> int:
        """The last iteration that any rank has stepped, -1 before the first."""
        return max((step["iteration"] for step in self.steps()), default=-1)

    def reached(self, more: int = 1, limit: float = LIMIT) -> int:
        """Wait until it has trained `more` iterations from now on; returns the last one."""
        goal = self.last() + more
        wait_for(lambda: self.last() >= goal, f"iteration {goal} of job {self.id}", limit, self.told)
        return self.last()

    def whole(self, members: int, limit: float = LIMIT) -> None:
        """Wait until it trains with so many ranks, the last step of all of them in one generation."""

        def found() -> bool:
            status = self.status()
            if status.get("state") != "running" or len(status["members"]) != members:
                return False
            return sum(step["generation"] == status["generation"] for step in self.steps()[-2 * members :]) >= members

        wait_for(found, f"job {self.id} trains with {members}", limit, self.told)

    def next_step(self, since: float, limit: float = LIMIT) -> float:
        """Wait for the first step of a later generation than all before that time; returns when it was."""
        before = max((step["generation"] for step in self.steps() if step["time"] < since), default=0)

        def found() -> list[float]:
            return [step["time"] for step in self.steps() if step["generation"] > before]

        return wait_for(found, f"job {self.id} goes on in another generation", limit, self.told)[0]

    def pause(self, since: float) -> float:
        """The longest time without a step of any rank since then, seconds."""
        end = time.time()
        times = [step["time"] for step in self.steps() if since < step["time"] < end]
        return max(b - a for a, b in itertools.pairwise([since, *times, end]))

    def repeated(self) -> int:
        """How many iterations were stepped in two generations by the same rank: work that was lost and done again."""
        seen = [(step["slot"], step["iteration"]) for step in self.steps()]
        return len({iteration for slot, iteration in seen if seen.count((slot, iteration)) > 1})

    def cancel(self) -> None:
        """End it, and wait until Slurm has forgotten its elements' nodes."""
        self.links.slurm("scancel", self.id)
        gone = lambda: not self.links.slurm("squeue", "-h", "-j", self.id, check=False)  # noqa: E731
        wait_for(gone, f"job {self.id} is over", now=lambda: self.links.slurm("squeue"))

    def told(self) -> str:
        """What there is to say for the message of a failed test."""
        logs = [f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in self.folder.glob("*.log")]
        return "\n".join([*logs, self.links.controller.told()])


class GptJob(LinksJob):
    """The template's training; its steps are in its metrics."""

    notes = "metrics/*.slot*"

    def merged(self) -> list[dict[str, Any]]:
        """One record an iteration. Raises AssertionError where ranks contradict each other."""
        (prefix,) = {str(path).rpartition(".slot")[0] for path in self.folder.glob("metrics/*.slot*")}
        try:
            return read_metrics(prefix, tolerance=1e-3)
        except MetricsError as error:
            raise AssertionError(str(error)) from None


class LinksCluster:
    """Nodes n1 ... nN and a head, each with its own link, and a unicrond on the head. A context manager.

    settings: lines of [controller]. plugin: the built SPANK plugin; without it the agent is written in the jobs.
    config_lines: lines of slurm.conf. family: of the hosts' addresses; with both, Slurm itself uses IPv4.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        settings: str = "",
        plugin: Path | None = None,
        config_lines: Sequence[str] = (),
        family: str = IPV4,
    ):
        self.folder, self.plugin = folder, plugin
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = LocalCluster(
            folder / "slurm", nodes=nodes, gpus_per_node=1, config_lines=config_lines, links=True, family=family
        )
        self.environment = outside_slurm() | self.cluster.env() | {"OMP_NUM_THREADS": "1"}
        self.environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), self.environment["PATH"]])
        try:
            self.cluster.up()
            self.controller = HeadController(folder, self.cluster, settings)
            if plugin is not None:
                line = f"optional {plugin} agent={AGENT} controller={self.controller.address}\n"
                (self.cluster.layout.etc_dir / "plugstack.conf").write_text(line)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LinksCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing of it is left, whatever has happened."""
        try:
            if hasattr(self, "controller"):
                self.controller.close()
        finally:
            self.cluster.down()

    # ------------------------------------------------------------ links
    def cut(self, hosts: str, others: str = "") -> float:
        """As `unicronctl cluster cut`: "n1", "n1,n2", "head"; from everything, or from `others`. Returns the time."""
        self.cluster.links.cut(_names(hosts), _names(others))
        return time.time()

    def heal(self, hosts: str = "", others: str = "") -> float:
        """As `unicronctl cluster heal`. Returns the time."""
        self.cluster.links.heal(_names(hosts), _names(others))
        return time.time()

    def loss(self, hosts: str, share: float) -> None:
        """Lose that share of the packets of each of the hosts."""
        self.cluster.links.loss(_names(hosts), share)

    # ------------------------------------------------------------ programs
    def run(self, host: str, *words: str, check: bool = True) -> str:
        """A command's output on a host."""
        done = subprocess.run(
            [*self.cluster.command_prefix(host), *words],
            env=self.environment | {"COLUMNS": "200"},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def unicronctl(self, *words: str, check: bool = True) -> str:
        """One command on the head, to the controller."""
        return self.run(HEAD, "env", f"UNICRON_CONTROLLER={self.controller.address}", *UNICRONCTL, *words, check=check)

    def slurm(self, *words: str, check: bool = True) -> str:
        """One of Slurm's commands on the head."""
        return self.run(HEAD, *words, check=check).strip()

    def nodes(self) -> dict[str, set[str]]:
        """Node -> its states, as Slurm on the head shows them."""
        table = self.slurm("sinfo", "-h", "-N", "-O", "NodeList:20,StateComplete:100")
        listed = [line.split() for line in table.splitlines()]
        return {name: set(states.upper().split("+")) for name, states in listed}

    def clean(self) -> bool:
        """All nodes serve again and nobody runs on them."""
        return set(map(frozenset, self.nodes().values())) == {frozenset({"IDLE"})}

    # ------------------------------------------------------------ jobs
    def submit(
        self, elements: int, command: Sequence[str] = (), options: Sequence[str] = (), **settings: str
    ) -> LinksJob:
        """An array of one-node elements, each with an agent and `tiny_gpt.py`, or another command.

        options: more of sbatch. settings: environment variables of agents and ranks.
        """
        folder = self._folder()
        tiny = {"TINY_OUT": str(folder), "TINY_SAVE": "0", "TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}
        given = {"UNICRON_CONTROLLER": self.controller.address, "UNICRON_RANKS_PER_NODE": "1", **tiny, **settings}
        agent = [] if self.plugin else [AGENT, "run", "--"]
        words = [*agent, *(command or [sys.executable, str(TINY)])]
        script = folder / "job.sh"
        other_step = "" if self.plugin else OTHER_STEP
        script.write_text(f"#!/bin/bash\n{other_step}exec srun --cpu-bind=none {shlex.join(words)}\n")
        return LinksJob(self, self._sbatch(folder, elements, [*options, str(script)], given), folder)

    def submit_gpt(self, elements: int, *words: str, options: Sequence[str] = (), **settings: str) -> GptJob:
        """The template's own job with its own script and data, as a user submits it; `words` are the script's."""
        folder = self._folder()
        given = {"UNICRON_CONTROLLER": self.controller.address, "UNICRON_TEMPLATES": str(TEMPLATES), **settings}
        paced = ["--micro-batch-seconds", "0.1"]  # the cores are for those that start
        wanted = ["--data-path", str(self._dataset()), *MODEL_OPTIONS, *paced, "--train-iterations", "5000", *words]
        template = [str(TEMPLATES / "gpt_elastic.sbatch"), *wanted]
        return GptJob(self, self._sbatch(folder, elements, [*options, *template], given), folder)

    def _folder(self) -> Path:
        folder = self.folder / f"job{len(list(self.folder.glob('job*')))}"
        folder.mkdir()
        return folder

    def _sbatch(self, folder: Path, elements: int, words: Sequence[str], settings: dict[str, str]) -> str:
        fixed = ["--parsable", f"--array=0-{elements - 1}", "-N1", "--exclusive", "--gres=gpu:1", "--requeue"]
        fixed += ["--open-mode=append", f"--output={folder}/%a.log", *(["--unicron"] if self.plugin else [])]
        done = subprocess.run(
            [*self.cluster.command_prefix(HEAD), "sbatch", *fixed, *words],
            env=self.environment | settings,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _dataset(self) -> Path:
        """Megatron's indexed dataset of the source of Python's standard library, made once."""
        prefix = self.folder / "stdlib"
        if not prefix.with_suffix(".bin").exists():
            words = ["--input", sysconfig.get_path("stdlib"), "--suffix", ".py", "--output", str(prefix)]
            command = [sys.executable, str(TEMPLATES / "build_dataset.py"), *words]
            subprocess.run(command, check=True, timeout=2 * LIMIT, capture_output=True)
        return prefix

    def wait(self, look: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """The first true thing that `look` gives while the controller lives."""
        return self.controller.wait(look, what, limit)


def _names(hosts: str) -> list[str]:
    return [host for host in hosts.split(",") if host]
