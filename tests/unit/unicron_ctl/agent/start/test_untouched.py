"""What the agent leaves alone."""

from __future__ import annotations

import re
import shlex

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.connections.step_tasks import StepTask
from unicron_ctl.agent.launchers.readers import read_launcher
from unicron_ctl.agent.start.command_mode import Mode
from unicron_ctl.agent.start.untouched import (
    describe_array,
    digest,
    meant,
    why_alone,
    why_by_ranks,
    why_by_shape,
    why_sweep,
)
from unicron_ctl.shared.protocol.structs import RESTART, SESSION, Settings

DEFAULT = {"UNICRON_BY_DEFAULT": "1"}
ELEMENT = {"SLURM_ARRAY_TASK_ID": "3"}
PLAIN = "import torch\n"
LIGHTNING = "print(os.environ['SLURM_PROCID'])"


@pytest.mark.parametrize(
    ("environment", "mode", "script", "ranks", "protected"),
    [
        (DEFAULT, RESTART, PLAIN, 1, True),
        (DEFAULT | ELEMENT, SESSION, PLAIN, 8, True),
        (DEFAULT | ELEMENT, RESTART, PLAIN, 1, False),
        (DEFAULT, RESTART, PLAIN, 8, False),
        (DEFAULT, RESTART, LIGHTNING, 1, False),
        (DEFAULT, RESTART, "module submitit.core._submit is none of the job's own", 1, False),
        ({}, RESTART, LIGHTNING, 8, True),
        (ELEMENT, RESTART, PLAIN, 1, True),
    ],
)
def test_the_administrators_default_protects_only_what_was_meant(
    environment: dict[str, str], mode: str, script: str, ranks: int, protected: bool
) -> None:
    assert meant(Mode(mode, script, text=script), ranks, environment) is protected


@pytest.mark.parametrize(
    ("tasks", "many"), [("1", ""), ("1(x4)", ""), ("8(x2)", "8 tasks"), ("1,2(x3),1", "2 tasks"), ("", ""), ("x", "")]
)
def test_a_step_of_several_tasks_a_node(tasks: str, many: str) -> None:
    why = why_by_shape({"SLURM_STEP_TASKS_PER_NODE": tasks})
    assert bool(why) is bool(many) and many in why


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        ({"SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "4"}, []),
        ({"SLURM_JOB_NUM_NODES": "8", "SLURM_STEP_NUM_NODES": "2"}, ["2", "8"]),
        ({"SLURM_NNODES": "2", "SLURM_ARRAY_TASK_ID": "0"}, []),
        ({"SLURM_NNODES": "1", "SLURM_ARRAY_TASK_ID": "0"}, []),
        ({"SLURM_NNODES": "1"}, []),
    ],
)
def test_a_step_of_several_nodes(environment: dict[str, str], numbers: list[str]) -> None:
    found = why_by_shape(environment)
    assert re.findall(r"\d+", found) == numbers and bool(found) is bool(numbers)


NAMES_IT = "lr = RATES[int(os.environ['SLURM_ARRAY_TASK_ID'])]"


@pytest.mark.parametrize(
    ("environment", "text", "says"),
    [
        (ELEMENT, NAMES_IT, "its script names SLURM_ARRAY_TASK_ID"),
        (ELEMENT | {"UNICRON_SWEEP": "run.sh"}, PLAIN, "run.sh names SLURM_ARRAY_TASK_ID"),
        (ELEMENT | {"UNICRON_SWEEP": "0"}, NAMES_IT, ""),
        (ELEMENT, "folder = os.environ['SLURM_ARRAY_JOB_ID']", ""),
        ({}, NAMES_IT, ""),
        ({"UNICRON_SWEEP": "run.sh"}, NAMES_IT, ""),
    ],
)
def test_an_array_whose_scripts_name_its_elements_is_a_sweep(environment: dict[str, str], text: str, says: str) -> None:
    why = why_sweep(environment, "its script", text)
    assert bool(why) is bool(says) and says in why


@pytest.mark.parametrize(
    ("environment", "line", "says"),
    [
        (ELEMENT, "torchrun --standalone --nproc_per_node 1 t.py", True),
        (ELEMENT | {"SLURM_NNODES": "1"}, "torchrun --nnodes 1 t.py", True),
        (ELEMENT | {"SLURM_NNODES": "1"}, "deepspeed --num_nodes 1 t.py", True),
        (ELEMENT | {"SLURM_NNODES": "2"}, "torchrun --nnodes 1 t.py", False),
        (ELEMENT, "torchrun --nproc_per_node 1 t.py", False),
        (ELEMENT, "torchrun --nnodes 1:4 t.py", False),
        (ELEMENT | {"UNICRON_SWEEP": "0"}, "torchrun --standalone t.py", False),
        (ELEMENT | {"SLURM_ARRAY_TASK_COUNT": "1"}, "torchrun --standalone t.py", False),
        ({}, "torchrun --standalone t.py", False),
    ],
)
def test_a_launcher_of_one_node_in_an_array_is_one_run_of_a_sweep(
    environment: dict[str, str], line: str, says: bool, snapshot: SnapshotAssertion
) -> None:
    """Defect: two runs, each with a torchrun --standalone of its own, became one world."""
    taken = read_launcher(shlex.split(line))
    assert taken is not None
    why = why_alone(environment, taken)
    assert bool(why) is says and why == snapshot


def test_an_array_says_that_it_is_one_training() -> None:
    said = describe_array(ELEMENT | {"SLURM_ARRAY_JOB_ID": "41"}, 4)
    assert re.search(r"\b4 elements\b.*\b41\b", said)
    assert (
        describe_array({}, 4) == describe_array(ELEMENT, 1) == describe_array(ELEMENT | {"UNICRON_SWEEP": "0"}, 4) == ""
    )


def element(job: str) -> dict[str, str]:
    """The environment of an element of array 41."""
    return {**ELEMENT, "SLURM_ARRAY_JOB_ID": "41", "SLURM_JOB_ID": job, "SLURMD_NODENAME": f"n{job}"}


def same(one: list[str], other: list[str], jobs: tuple[str, str] = ("41", "42")) -> bool:
    """Whether the controller takes the commands of two elements for one."""
    first, second = (
        Settings(name="gpt", user="ada", command=digest(command, element(job)))
        for command, job in zip((one, other), jobs, strict=True)
    )
    assert first.runs_as(second) is second.runs_as(first)
    return first.runs_as(second)


def test_the_commands_of_an_arrays_elements_are_told_apart() -> None:
    train = ["python", "train.py", "--lr"]
    assert same([*train, "1"], [*train, "1"]) and not same([*train, "1"], [*train, "2"])
    assert not same(["a b"], ["a", "b"])
    assert same(["/tmp/41/python", "--host=n41"], ["/tmp/42/python", "--host=n42"])
    assert same(["/tmp/41/python", "--save=runs/gpt-41"], ["/tmp/42/python", "--save=runs/gpt-41"])
    assert not same(["python", "--seed", "41"], ["python", "--seed", "42"])
    assert digest(train, {}) == digest(train, ELEMENT | {"UNICRON_SWEEP": "0"}) == ""


@pytest.mark.parametrize("word", ["/data/x5y/z", "/data/5/z", "run/n5", "n4n5/", "/tmp/5.2/n5-5", "/v5/n5x"])
def test_a_folder_that_happens_to_be_called_like_an_elements_job_or_node_makes_no_sweep(word: str) -> None:
    assert same(["python", word], ["python", word], ("5", "2"))


def test_such_a_folder_beside_one_of_the_elements_own() -> None:
    one, other = ["/tmp/5/python", "/data/x5y", "/run5", "/an5"], ["/tmp/2/python", "/data/x5y", "/run5", "/an5"]
    assert same(one, other, ("5", "2"))


def test_tasks_that_the_plugin_has_joined_are_one_agents() -> None:
    environment = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "1"}
    assert why_by_shape(environment, 8) == "" and why_by_shape(environment, 1) != ""


@pytest.mark.parametrize(
    ("tasks", "script", "environment", "said"),
    [
        (2, PLAIN, {}, ""),
        (2, "import os\nfrom mpi4py import MPI\n", {}, "uses MPI"),
        (2, "import horovod.torch as hvd\n", {}, "uses MPI"),
        (0, "from mpi4py import MPI\n", {}, ""),
        (2, PLAIN, {"CARD": "/nonexistent/nvidia1", "SLURM_GPUS_ON_NODE": "8"}, "--gpus-per-node=8"),
        (2, PLAIN, {"CARD": "/dev/null"}, ""),
        (0, PLAIN, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b", "UNICRON_RANKS_PER_NODE": "2"}, "MIG"),
        (0, PLAIN, {"CUDA_VISIBLE_DEVICES": "MIG-a", "UNICRON_RANKS_PER_NODE": "1"}, ""),
        (2, PLAIN, {"CUDA_VISIBLE_DEVICES": "MIG-a"}, ""),
    ],
)
def test_ranks_that_would_not_be_what_tasks_are(
    tasks: int, script: str, environment: dict[str, str], said: str
) -> None:
    devices = (environment["CARD"],) if "CARD" in environment else ()
    joined = [StepTask({}, frozenset({0}), devices, 1, 2)] * tasks
    place = read_place({"SLURM_JOB_ID": "1", "UNICRON_NODE_ADDRESS": "a"} | environment, tasks=joined)
    assert place.settings.ranks_per_node == max(tasks, int(environment.get("UNICRON_RANKS_PER_NODE", "1")))
    why = why_by_ranks(place, Mode(RESTART, "", text=script), environment)
    assert (said in why) if said else why == ""
