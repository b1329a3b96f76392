"""The world of an unprotected job, as a fake squeue and scontrol show it; the files that would hide unicron's."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unicron
from tests.support.processes import ROOT
from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.ranks import static_world as module
from unicron_ctl.agent.ranks.static_world import World, outside_the_step, static_world
from unicron_ctl.agent.start.agent_main import hidden_packages, import_folders
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.system.errors import UserError

SEEN = tomllib.loads((ROOT / "docs" / "behaviour" / "slurm-jobs.toml").read_text())
SQUEUE = """#!/bin/sh
printf '2 n7\\n0 n3\\n'
"""
SCONTROL = """#!/bin/sh
case "$*" in
    "show hostnames n[3,7]") printf 'n3\\nn7\\n' ;;
    "-o show node n3") echo "NodeName=n3 Arch=x86_64 NodeAddr=10.0.0.3 NodeHostName=n3" ;;
    *) exit 1 ;;
esac
"""
JOB = {"SLURM_JOB_ID": "131", "UNICRON_NODE_ADDRESS": "10.0.0.9"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Sets what `squeue` and `scontrol` are."""
    now = [0.0]
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(module, "LIMIT_SECONDS", 5.0)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin:/usr/bin")

    def write(squeue: str, scontrol: str = SCONTROL) -> None:
        for name, text in (("squeue", squeue), ("scontrol", scontrol)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)

    return write


def array(element: int, count: int = 3, ranks: int = 1) -> dict[str, str]:
    own = {"SLURM_ARRAY_JOB_ID": "130", "SLURM_ARRAY_TASK_ID": str(element), "SLURM_ARRAY_TASK_COUNT": str(count)}
    return JOB | own | {"UNICRON_RANKS_PER_NODE": str(ranks)}


def test_elements_that_run_are_the_nodes_of_the_world(slurm):
    slurm(SQUEUE)
    world = static_world(read_place(array(2, ranks=4)), array(2, ranks=4))
    assert [world.environment(local, {})["RANK"] for local in range(4)] == ["4", "5", "6", "7"]
    shown = world.environment(1, {"RANK": "0", "HOME": "/home/ann"})
    assert shown["HOME"] == "/home/ann" and (shown["RANK"], shown["WORLD_SIZE"]) == ("5", "8")
    assert (shown["MASTER_ADDR"], shown["MASTER_PORT"]) == ("10.0.0.3", "20130")
    first = static_world(read_place(array(0, ranks=4)), array(0, ranks=4))
    assert (first.node, first.nodes, first.master, first.port) == (0, 2, world.master, world.port)


@pytest.mark.parametrize(
    "squeue",
    [
        "#!/bin/sh\nexit 1\n",
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller'\n",
        "#!/bin/sh\nprintf '0 n3\\n1 n4\\n'\n",  # answers, but does not know this element
        "#!/bin/sh\nprintf '2 n7\\n'; exit 1\n",
    ],
)
def test_without_slurms_answer_no_element_trains_alone(slurm, squeue):
    slurm(squeue)
    with pytest.raises(UserError, match=r"\b130 .*\b130_2\b") as caught:
        static_world(read_place(array(2)), array(2))
    assert caught.value.exit_code == 1


def test_without_slurms_programs_no_element_trains_alone(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="Slurm does not say"):
        static_world(read_place(array(1)), array(1))


def test_all_nodes_of_elements_that_have_several_are_of_the_world(slurm):
    slurm("#!/bin/sh\nprintf '2 n[7-8]\\n0 n[3-4]\\n'\n")
    environment = array(2) | {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[7-8]", "SLURMD_NODENAME": "n8"}
    world = static_world(read_place(environment), environment)
    assert (world.node, world.nodes, world.master, world.names) == (3, 4, "10.0.0.3", ("n3", "n4", "n7", "n8"))


def test_an_element_that_is_alone_is_a_world_of_its_own_nodes(slurm):
    slurm("#!/bin/sh\nexit 1\n")
    environment = array(2) | {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[3,7]", "SLURMD_NODENAME": "n7"}
    world = static_world(read_place(environment).alone(), environment)
    assert (world.node, world.nodes, world.master) == (1, 2, "10.0.0.3")
    one = array(2)
    assert static_world(read_place(one).alone(), one).nodes == 1


def test_a_step_of_one_allocation_that_goes_on_unprotected_has_all_of_its_nodes_and_a_port_of_its_own():
    """Defect: each of its nodes was a world."""
    said = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURMD_NODENAME": "n2", "SLURM_JOB_NODELIST": "n[1-2]"}
    worlds = [static_world(read_place(one).alone(), one) for one in (said, said | {"SLURM_STEP_ID": "1"})]
    assert [(world.node, world.nodes) for world in worlds] == [(1, 2)] * 2
    assert worlds[0].port != worlds[1].port


def test_one_node_needs_no_answer(slurm):
    slurm("#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 1\n")
    for environment in (array(5, count=1, ranks=2), JOB | {"UNICRON_RANKS_PER_NODE": "2"}):
        world = static_world(read_place(environment), environment)
        assert (world.node, world.nodes, world.ranks_per_node, world.master) == (0, 1, 2, "10.0.0.9")


def test_a_plain_job_of_several_nodes_meets_at_its_first_node(slurm):
    slurm("#!/bin/sh\nexit 1\n")
    environment = JOB | {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[3,7]"}
    world = static_world(read_place(environment), environment)
    assert (world.node, world.nodes, world.master) == (1, 2, "10.0.0.3")
    lost = environment | {"SLURM_JOB_NODELIST": "n3"}
    with pytest.raises(UserError, match=r"\bjob 131\b"):
        static_world(read_place(lost), lost)


@pytest.mark.parametrize(("gpus", "ranks"), [("8", 8), ("0", 1), ("", 1)])
def test_a_node_has_a_rank_for_each_gpu(gpus, ranks):
    place = read_place(JOB | {"SLURM_GPUS_ON_NODE": gpus})
    assert place.slots == list(range(ranks))


def test_the_address_is_that_of_the_interface_to_the_controller():
    assert read_place({"SLURM_JOB_ID": "1"}, "tcp://127.0.0.1:7451").address == "127.0.0.1"


def test_torchruns_whole_set_is_there() -> None:
    """torch.distributed.run, Environment Variables, and what its agent sets besides."""
    shown = World(1, 2, 4, "10.0.0.3", 20130, "130", 2).environment(
        1, {"OMP_NUM_THREADS": "8", "_UNICRON_LAUNCHER": "torchrun"}
    )
    assert {name: value for name, value in shown.items() if not name.startswith("SLURM")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.3",
        "MASTER_PORT": "20130",
        "TORCHELASTIC_RUN_ID": "130",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "1000000",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "8",
    }
    torchrun = Path(importlib.util.find_spec("torch").origin).parent / "distributed/elastic/agent/server"  # type: ignore
    its_own = (torchrun / "local_elastic_agent.py").read_text().split("worker_env = {")[1].split("}\n")[0]
    assert set(re.findall(r'^ *"(\w+)":', its_own, re.MULTILINE)) <= shown.keys()


def test_slurms_variables_tell_the_world_and_not_the_step() -> None:
    of_the_step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_ID": "130"}
    shown = World(1, 2, 4, "10.0.0.3", 20130, "130").environment(3, of_the_step)
    assert {name: value for name, value in shown.items() if name.startswith("SLURM")} == {
        "SLURM_JOB_ID": "130",
        "SLURM_JOB_NODELIST": "10.0.0.3",
        "SLURM_NODELIST": "10.0.0.3",
        "SLURM_STEP_NODELIST": "10.0.0.3",
        "SLURM_PROCID": "7",
        "SLURM_LOCALID": "3",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    assert World(0, 1, 2, "a", 1, "1").environment(0, {})["SLURM_TASKS_PER_NODE"] == "2"


@pytest.mark.parametrize("reads", SEEN["reads"], ids=lambda reads: reads["library"])
def test_libraries_that_read_slurms_variables_find_the_world(reads: dict[str, Any]) -> None:
    """Defect: jax.distributed.initialize() failed, for SLURM_STEP_NODELIST was hidden."""
    own = {name: "1" for name in SEEN["step"]["names"]} | {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "130"}
    world = World(1, 2, 2, "10.0.0.1", 20130, "130", names=("n1", "n2"))
    shown = world.environment(1, outside_the_step(own))
    assert set(reads["names"]) <= shown.keys()
    seen = {f"SLURM_STEP_{name}": value for name, value in SEEN["step"]["values"].items()}
    told = {name: shown[name] for name in seen}
    assert hosts(told.pop("SLURM_STEP_NODELIST")) == hosts(seen.pop("SLURM_STEP_NODELIST"))
    assert told == seen and "SLURM_STEP_LAUNCHER_PORT" not in shown


def test_jax_meets_at_one_port_in_an_array() -> None:
    """It makes the port of SLURM_JOB_ID, which each element has to itself (seen with 0.10.2)."""
    element, own = {"SLURM_ARRAY_TASK_ID": "1"}, {"JAX_COORDINATOR_ADDRESS": "mine:1"}
    for master, address in (("10.0.0.3", "10.0.0.3:20130"), ("fd00::3", "[fd00::3]:20130")):
        world = World(1, 2, 1, master, 20130, "130")
        assert world.environment(0, element)["JAX_COORDINATOR_ADDRESS"] == address
        assert world.environment(0, element | own)["JAX_COORDINATOR_ADDRESS"] == "mine:1"
        assert "JAX_COORDINATOR_ADDRESS" not in world.environment(0, {})


def test_what_describes_one_elements_step_is_hidden() -> None:
    kept = {"SLURM_JOB_ID": "131", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NAME": "gpt", "SLURM_CPUS_ON_NODE": "8"}
    kept |= {"SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "n2", "SLURM_SUBMIT_DIR": "/home/ann", "PMIND": "x"}
    kept |= {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_GPUS": "0,1"}
    step = ("NTASKS", "NTASKS_PER_NODE", "PROCID", "NNODES", "JOB_NODELIST", "STEP_NUM_TASKS", "STEP_LAUNCHER_PORT")
    hidden = {f"SLURM_{name}": "1" for name in step} | {"PMI_SIZE": "1", "PMIX_RANK": "0"}
    assert outside_the_step(kept | hidden) == kept


def test_the_folders_that_lead_pythons_search(tmp_path):
    (tmp_path / "lib" / "unicron").mkdir(parents=True)
    (tmp_path / "lib" / "unicron" / "__init__.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "unicron").mkdir()  # no package: unicron's own goes before it
    here = str(tmp_path)
    assert import_folders(["python", "bin/train.py", "--config", "lib/a.py"], here, "") == [tmp_path / "bin"]
    assert import_folders(["python", "-m", "train", "bin/a.py"], here, "lib") == [tmp_path, tmp_path / "lib"]
    assert hidden_packages([tmp_path / "bin"]) == []
    assert hidden_packages([tmp_path / "bin", tmp_path / "lib"]) == [tmp_path / "lib" / "unicron"]
    own = Path(unicron.__file__).resolve().parents[1]
    assert hidden_packages([tmp_path / "bin", own, tmp_path / "lib"]) == []


def test_who_is_told_to_be_started_by_torchrun() -> None:
    """Lightning takes Slurm for its launcher, and requeues, only where nothing says torchrun; submitit's functions set
    torch's variables themselves."""
    world = World(0, 2, 1, "10.0.0.3", 20130, "130", names=("n3", "n7"))
    plain, element = world.environment(0, {}), world.environment(0, {"SLURM_ARRAY_TASK_ID": "0"})
    assert "TORCHELASTIC_RUN_ID" in element and not [name for name in plain if name.startswith("TORCHELASTIC")]
    assert plain["RANK"] == "0" and plain["SLURM_JOB_NODELIST"] == "n3,n7"
    submitit = world.environment(0, {"_UNICRON_LAUNCHER": "submitit"})
    assert not {"RANK", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & submitit.keys()
    assert (submitit["SLURM_PROCID"], submitit["SLURM_NTASKS"]) == ("0", "2")
