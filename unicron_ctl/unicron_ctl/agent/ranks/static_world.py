"""The world of plain programs: torchrun's and Slurm's variables, also for a job without a controller.

An element of a job array sees the others only through Slurm. So every agent asks squeue which elements run, waits until
the answer no longer changes, and derives the same world from it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.ranks.placeholders import fill_variables
from unicron_ctl.shared.protocol.ranges import LAUNCHES
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.health.program_output import TooMuchOutput, run_program

SETTLE_SECONDS = 3.0
LIMIT_SECONDS = 60.0
FIRST_PORT, PORTS = 20000, 12000  # below the ports that Linux gives to connecting sockets
LAUNCHER = "_UNICRON_LAUNCHER"  # the launcher that the agent replaces, in its own environment; unset for srun alone
SUBMITIT = "submitit"
MAX_RESTARTS = 1_000_000  # no limit: the controller decides whether the job goes on
# Variables of srun about its step and where that runs (srun(1), OUTPUT ENVIRONMENT VARIABLES), and the launchers' own.
# The step's number and GPUs are the rank's own in any world.
_OF_THE_STEP = re.compile(
    r"SLURM_(STEP(?!_?ID\Z|_GPUS\Z).*|NTASKS.*|NPROCS|PROCID|LOCALID|NODEID|NNODES|JOB_NUM_NODES|NODELIST|"
    r"JOB_NODELIST|TASKS_PER_NODE|GTIDS|TASK_PID|DISTRIBUTION|LAUNCH_NODE_IPADDR|SRUN_COMM_.*|MPI_TYPE|PMI.*)|PMIX?_.*"
)
_NODE_LISTS = "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"
_OF_TORCH = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class World:
    """A node's part of the job."""

    node: int
    """Its number, from 0."""
    nodes: int
    ranks_per_node: int
    master: str
    """An address of the first node."""
    port: int
    run: str
    """The job's id."""
    restarts: int = 0
    """The number of worlds that the job has had before."""
    names: tuple[str, ...] = ()
    """The nodes' names, if Slurm tells them."""

    def environment(self, local: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with the variables that torchrun sets for the node's rank `local` (torch.distributed.run,
        Environment Variables), and Slurm's variables of a step that is this world.

        All of torchrun's are set, since programs that find only some assume another launcher. If srun started a job
        that is no array, torchelastic's are left out; submitit's functions set torch's variables themselves, and refuse
        existing ones.
        """
        rank, size = str(self.node * self.ranks_per_node + local), str(self.nodes * self.ranks_per_node)
        usual = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "ROLE_NAME": "default"}
        usual |= {"OMP_NUM_THREADS": "1"} if self.ranks_per_node > 1 else {}
        if "SLURM_ARRAY_TASK_ID" in base:  # JAX derives its port from SLURM_JOB_ID, which differs between elements
            host = f"[{self.master}]" if ":" in self.master else self.master
            usual["JAX_COORDINATOR_ADDRESS"] = f"{host}:{self.port}"
        made = {
            **usual,
            **base,
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store
            **slurm_world(int(rank), int(size), local, self.ranks_per_node, self.node),
            **dict.fromkeys(_NODE_LISTS, ",".join(self.names) or self.master),
        }
        launcher = made.pop(LAUNCHER, "")
        if launcher == SUBMITIT:
            made = {name: value for name, value in made.items() if name not in _OF_TORCH}
        if launcher == SUBMITIT or (not launcher and "SLURM_ARRAY_TASK_ID" not in base):
            made = {name: value for name, value in made.items() if not name.startswith("TORCHELASTIC_")}
        return fill_variables(made)


def slurm_world(rank: int, size: int, local: int, per_node: int, node: int) -> dict[str, str]:
    """Return srun's variables for the task that is this rank, as if one step had started the whole world. JAX,
    TensorFlow's SlurmClusterResolver and idr_torch read the names with STEP."""
    nodes = size // per_node
    tasks = f"{per_node}(x{nodes})" if nodes > 1 else str(per_node)
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(size),
        "SLURM_NPROCS": str(size),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


def outside_the_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the Slurm step. If the step is one element of a job, they would
    describe a world of one node."""
    return {name: value for name, value in environment.items() if not _OF_THE_STEP.fullmatch(name)}


def static_world(place: Place, environment: Mapping[str, str] = os.environ) -> World:
    """Return the world of this job as Slurm shows it now. Raises UserError if Slurm does not show the nodes of a job
    that has several: each would train alone, and all write the same files."""
    port = FIRST_PORT + (int(place.job) + place.step // LAUNCHES) % PORTS  # steps may run at the same time
    ranks = place.settings.ranks_per_node
    if place.settings.max_nodes == 1:
        return World(0, 1, ranks, place.address, port, place.job)
    array, block = "SLURM_ARRAY_TASK_ID" in environment, place.settings.block
    if array and place.settings.max_nodes > block:
        running = _wait_for_elements(place.job, place.element, block)
        elements = sorted(running)
    else:
        names = hosts(environment.get("SLURM_JOB_NODELIST", ""))
        least = place.element - place.element % block if array else 0
        running = dict(enumerate(names, least)) if len(names) == place.settings.max_nodes else {}
        elements = list(running)
    if place.element not in running:
        raise UserError(
            f"Slurm does not say which nodes job {place.job} has, so {place.label} cannot train together with the "
            "others: find out why squeue and scontrol do not answer here"
        )
    first = _address(running[elements[0]])
    all_nodes = tuple(running[element] for element in elements)
    return World(elements.index(place.element), len(elements), ranks, first, port, place.job, names=all_nodes)


def _wait_for_elements(job: str, own: int, block: int) -> dict[int, str]:
    """Return element -> node of the elements that run, once the answer includes `own` and no longer changes; after
    LIMIT_SECONDS the last answer."""
    deadline = time.monotonic() + LIMIT_SECONDS
    last: dict[int, str] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = _running(job, block)
        if now != last:
            last, since = now, time.monotonic()
        elif own in now and time.monotonic() - since >= SETTLE_SECONDS:
            break
        time.sleep(0.5)
    return last


def _running(job: str, block: int) -> dict[int, str]:
    lines = _answer(["squeue", "--local", "-h", "-r", "-j", job, "-t", "RUNNING", "-o", "%K %N"])
    words = [line.split() for line in lines]
    running = [(int(pair[0]), hosts(pair[1])) for pair in words if len(pair) == 2 and pair[0].isdecimal()]
    return {first * block + place: name for first, names in running for place, name in enumerate(names[:block])}


def _address(node: str) -> str:
    for word in " ".join(_answer(["scontrol", "-o", "show", "node", node])).split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    return node


def _answer(command: list[str]) -> list[str]:
    try:
        done = run_program(command, 10.0)
    except (OSError, subprocess.TimeoutExpired, TooMuchOutput):
        return []
    return done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []
