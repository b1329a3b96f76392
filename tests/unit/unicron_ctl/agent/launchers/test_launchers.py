"""Launchers in a command: found, read, left out, or refused in one line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.agent.launchers import readers
from unicron_ctl.agent.launchers.accelerate import Answer
from unicron_ctl.agent.launchers.commands import LauncherStays, is_submitit, takes_value
from unicron_ctl.agent.launchers.launcher_options import Unreadable, read_options
from unicron_ctl.agent.launchers.readers import BACKENDS, Launch, read_launcher
from unicron_ctl.agent.launchers.world import count_ranks, describe, fewest_nodes
from unicron_ctl.agent.program_table import LAUNCHERS, PROGRAMS
from unicron_ctl.agent.ranks.placeholders import fill_words

ROOT = Path(__file__).resolve().parents[5]
TORCHRUN = LAUNCHERS["torchrun"]


def launch_of(line: str) -> Launch:
    found = read_launcher(shlex.split(line))
    assert found is not None, line
    return found


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers are none of this machine's, so their Python is `python`."""
    monkeypatch.setenv("PATH", "/nonexistent")


def test_options_of_programs_that_run_in_another_environment_are_those_that_they_have():
    seen = tomllib.loads((ROOT / "docs/behaviour/front-ends.toml").read_text())
    assert [flag for flags in seen["flags"].values() for flag in flags if takes_value(flag)] == []
    assert [option for options in seen["values"].values() for option in options if not takes_value(option)] == []


@pytest.mark.parametrize(
    "line",
    [
        "conda run -n deepspeed python train.py",
        "conda run -p /envs/accelerate --no-capture-output python train.py",
        "micromamba run -n composer python train.py",
        "uv run --with deepspeed train.py",
        "uv run --no-group accelerate --extra deepspeed train.py",
        "pixi run -e deepspeed python train.py",
    ],
)
def test_an_environment_that_is_named_like_a_launcher_is_none(line: str) -> None:
    """Defect: `conda run -n deepspeed python train.py` ran `conda run -n python -u python`."""
    assert read_launcher(shlex.split(line)) is None


TABLE = ROOT / "unicron_ctl/unicron_ctl/agent/programs.toml"


def plugins_words(table: Path) -> dict[str, set[str]]:
    """The lists of the plugin's that its build makes of a table."""
    command = ["awk", "-f", ROOT / "slurm_plugin/spank/programs.awk", table]
    made = subprocess.run(command, env={"PATH": os.defpath}, capture_output=True, text=True, check=True).stdout
    lists = re.findall(r"^static const char \*const (\w+)\[\] = \{\n(.*?)^\};", made, re.DOTALL | re.MULTILINE)
    return {name: set(re.findall(r'"([^"]+)"', words)) for name, words in lists}


def test_the_plugin_is_built_from_the_agents_table():
    """Defect: a batch script with mpirun in it was told to write `srun mpirun`, which starts one for each task."""
    all_nodes = {name for each in LAUNCHERS.values() if each.all_nodes for name in each.programs}
    wrappers = PROGRAMS.wrappers
    assert plugins_words(TABLE) == {
        "starters": all_nodes | set(PROGRAMS.not_replaced.programs),
        "launchers": {name for each in LAUNCHERS.values() for name in each.programs} - all_nodes,
        "launcher_modules": {module for each in LAUNCHERS.values() for module in each.modules},
        "servers": set(PROGRAMS.servers.programs),
        "server_modules": set(PROGRAMS.servers.modules),
        "wrappers": set().union(*(getattr(wrappers, name) for name in wrappers.__struct_fields__)),
        "shells": {*PROGRAMS.shells.posix, *PROGRAMS.shells.others},
    }


def test_the_plugin_is_not_built_from_a_table_that_lacks_a_list(tmp_path: Path) -> None:
    table = tmp_path / "programs.toml"
    table.write_text(TABLE.read_text().replace("[shells]", "[other]"))
    with pytest.raises(subprocess.CalledProcessError):
        plugins_words(table)


def test_a_launcher_of_the_usual_form_is_one_entry_of_the_table(tmp_path: Path) -> None:
    """Another process reads the longer table, as an agent does when it starts."""
    table = tmp_path / "programs.toml"
    entry = """
[launchers.another]
programs = ["anotherrun"]
modules = ["another.run"]
ranks = "procs"
nodes = "hosts"
honoured = ["--procs =", "--hosts ="]
ignored = ["--fast"]
"""
    table.write_text(TABLE.read_text() + entry)
    words = plugins_words(table)
    assert "anotherrun" in words["launchers"] and "another.run" in words["launcher_modules"]
    code = f"""
from pathlib import Path
Path.with_name = lambda self, name: Path({str(table)!r})
from unicron_ctl.agent.launchers.readers import read_launcher
from unicron_ctl.agent.launchers.shells import launches
for start in ("anotherrun", "python -m another.run"):
    launch = read_launcher([*start.split(), "--procs", "4", "--hosts=2", "--fast", "train.py", "x"])
    assert (launch.ranks, launch.nodes, launch.ignored) == ("4", (2, 2), ["--fast"]), launch
    assert launch.command == ["python", "-u", "train.py", "x"], launch
    assert launches(["bash", "-c", f"cd x; {{start}} train.py"])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_servers_are_those_that_were_seen():
    """Defect: a script that serves a model was told to start it by srun, as if it were a training."""
    seen = tomllib.loads((ROOT / "docs/behaviour/servers.toml").read_text())["server"]
    assert set(PROGRAMS.servers.programs) == {name for one in seen for name in one.get("names", [])}
    assert set(PROGRAMS.servers.modules) == {module for one in seen for module in one.get("modules", [])}


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("torchrun train.py --lr 3", "python -u train.py --lr 3"),
        ("/opt/venv/bin/torchrun --nnodes=2 train.py --nnodes 5", "python -u train.py --nnodes 5"),
        ("torchrun -m pkg.train x", "python -u -m pkg.train x"),
        ("torchrun --no-python ./a.out x", "./a.out x"),
        ("torchrun --run-path train.py", "python -u train.py"),
        ("python3 -u -W ignore -m torch.distributed.run train.py", "python3 -u -W ignore train.py"),
        ("python /usr/bin/torchrun --rdzv-e h:1 train.py", "python -u train.py"),
        ("python -m torch.distributed.launch train.py a", "python -u train.py --local-rank=3 a"),
        ("python -m torch.distributed.launch --use_env train.py a", "python -u train.py a"),
        ("deepspeed --num_gpus 4 train.py --deepspeed", "python -u train.py --local_rank=3 --deepspeed"),
        ("deepspeed --no_local_rank --module pkg.train", "python -u -m pkg.train"),
        ("fabric run train.py --x 1 --devices 2 --y", "python -u train.py --x 1 --y"),
        ("mpirun -np 8 -x A=3 --bind-to none python train.py x", "python train.py x"),
        ("mpiexec -n 2 -genv A 3 train.py", "train.py"),
        ("env A=1 B= torchrun train.py", "python -u train.py"),
        ("env -u A torchrun train.py", "env -u A python -u train.py"),
        ("numactl --interleave=all torchrun train.py", "numactl --interleave=all python -u train.py"),
        ("nice -n 5 taskset -c 0-3 torchrun train.py", "nice -n 5 taskset -c 0-3 python -u train.py"),
        ("timeout -s KILL 1h python3 -m torch.distributed.run t.py", "timeout -s KILL 1h python3 -u t.py"),
        ("tini -s -- torchrun train.py", "tini -s -- python -u train.py"),
        ("dumb-init torchrun train.py", "dumb-init python -u train.py"),
        ("apptainer exec --nv image.sif torchrun train.py", "apptainer exec --nv image.sif python -u train.py"),
        ("apptainer exec i.sif bash -c 'torchrun train.py a'", "apptainer exec i.sif python -u train.py a"),
        ("apptainer exec i.sif bash -c 'A=1 torchrun t.py'", "apptainer exec i.sif env A=1 python -u t.py"),
        ("bash -c 'apptainer exec i.sif torchrun t.py'", "apptainer exec i.sif python -u t.py"),
        ("conda run -n env torchrun train.py", "conda run -n env python -u train.py"),
        ("conda run -n deepspeed torchrun train.py", "conda run -n deepspeed python -u train.py"),
        ("conda run --no-capture-output torchrun train.py", "conda run --no-capture-output python -u train.py"),
        ("uv run --frozen -q torchrun train.py", "uv run --frozen -q python -u train.py"),
        ("uv run --with deepspeed -- torchrun train.py", "uv run --with deepspeed -- python -u train.py"),
        ("bash -c 'exec torchrun train.py --text \"a b\"'", "python -u train.py --text 'a b'"),
        ("bash -lc 'A=1 numactl -l torchrun train.py'", "numactl -l python -u train.py"),
    ],
)
def test_what_each_rank_runs(line: str, command: str) -> None:
    assert fill_words(launch_of(line).command, {"LOCAL_RANK": "3"}) == shlex.split(command)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --launcher torchrun",
        "nice python train.py torchrun",
        "train.sh torchrun",
        "bash -c 'torchrun $X train.py'",  # only the shell knows its words: shells.py
        "bash run.sh torchrun",
        "python -c torchrun",
        "hostname",
        "env",
        "",
    ],
)
def test_a_command_without_a_launcher(line: str) -> None:
    assert read_launcher(shlex.split(line)) is None


@pytest.mark.parametrize(
    "line",
    [
        "composer -n 8 train.py",
        "nsys profile -o x torchrun train.py",
        "torchrun --what train.py",
        "torchrun",
        "torchrun --nnodes",
        "torchrun --nnodes 4:2 train.py",
        "torchrun --nnodes some train.py",
        "torchrun -m --no-python train",
        "torchrun --virtual-local-rank train.py",
        "deepspeed --include host1:0,1 train.py",
        "deepspeed --exclude localhost:0 train.py",
        "deepspeed --autotuning run train.py",
        "mpirun -np 2 ./solver",
        "mpirun -np 1 python a.py : -np 1 python b.py",
        "mpirun --mca btl tcp python a.py",
        "mpirun -np many python a.py",
        "fabric run --accelerator tpu train.py",
    ],
)
def test_a_command_that_needs_its_launcher_is_refused_in_one_line(line: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(LauncherStays) as refused:
        read_launcher(shlex.split(line))
    said = str(refused.value)
    assert said == snapshot and "\n" not in said


@pytest.mark.parametrize("line", ["fabric consolidate folder", "accelerate config"])
def test_a_launchers_command_that_starts_no_ranks_is_refused_without_a_word(line: str) -> None:
    with pytest.raises(LauncherStays, match=r"^$"):
        read_launcher(shlex.split(line))


@pytest.mark.parametrize(("processes", "lost"), [(2, False), (4, True)])
def test_ranks_that_accelerate_itself_would_not_start_are_named(processes, lost, monkeypatch) -> None:
    told = Answer(command=["python", "train.py"], environment={}, machines=2, processes=processes)
    monkeypatch.setattr(readers, "ask_accelerate", lambda *_: told)
    found = launch_of(f"accelerate launch --num_machines 2 --num_processes {processes} train.py")
    assert found.ranks == "1" and bool(found.ignored) is lost
    assert ("nobody honours --num_processes=4" in describe(found, 1)) is lost


@pytest.mark.parametrize(("options", "nodes"), [("--num_machines=1", (1, 1)), ("", (0, 0))])
def test_one_machine_counts_where_it_is_written(options, nodes, monkeypatch) -> None:
    """accelerate's default and its configuration files have it, too."""
    read = {"nnodes": "1", "nproc_per_node": "2"}
    told = Answer(torchrun=read, program="t.py", environment={}, machines=1, processes=2)
    monkeypatch.setattr(readers, "ask_accelerate", lambda *_: told)
    assert launch_of(f"accelerate launch {options} --num_processes 2 t.py --num_machines 1").nodes == nodes


def test_a_script_that_uses_mpi_itself_keeps_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom mpi4py import MPI\n")
    with pytest.raises(LauncherStays, match=r"train\.py .*\bmpi4py"):
        launch_of(f"mpirun -n 2 python {script}")


def test_the_variables_that_launchers_set() -> None:
    assert launch_of("env A=1 torchrun --role trainer train.py").environment == {"A": "1", "ROLE_NAME": "trainer"}
    fabric = launch_of("fabric run --strategy=ddp --devices 2 --precision bf16-mixed train.py").environment
    assert (fabric["LT_CLI_USED"], fabric["LT_DEVICES"], fabric["LT_STRATEGY"]) == ("1", "2", "ddp")
    assert fabric["LT_PRECISION"] == "bf16-mixed" and "LT_ACCELERATOR" not in fabric
    assert launch_of("deepspeed --include localhost:1,3 train.py").environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert launch_of("mpirun -x A=3 python train.py").environment["A"] == "3"


def test_where_the_output_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    logs = str(tmp_path / "logs")
    tee = launch_of("torchrun --log-dir logs --tee 3 --local-ranks-filter 0 train.py")
    assert tee.environment == {"UNICRON_LOG_DIR": logs, "UNICRON_CONSOLE_RANKS": "0"} and not tee.ignored
    away = launch_of("torchrun --log-dir logs -r3 train.py")
    assert away.environment == {"UNICRON_LOG_DIR": logs, "UNICRON_CONSOLE_RANKS": "none"}
    (both,) = launch_of("torchrun --log-dir logs -t 0:1 train.py").ignored
    assert both.startswith("--tee=0:1 ")
    each = launch_of("deepspeed --enable_each_rank_log logs train.py")
    assert each.environment.items() >= {"UNICRON_LOG_DIR": logs, "UNICRON_CONSOLE_RANKS": "none"}.items()


def test_options_that_unicron_replaces_and_those_that_nobody_honours_are_named(snapshot: SnapshotAssertion) -> None:
    found = launch_of("torchrun --standalone --max-restarts=3 --numa-binding node --nproc_per_node 2 train.py")
    assert (found.replaced, found.ignored) == (["--standalone", "--max-restarts"], ["--numa-binding"])
    assert describe(found, 2) == snapshot


def test_torchrun_reads_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_MODULE", "1")
    monkeypatch.setenv("PET_NO_PYTHON", "0")
    found = launch_of("torchrun pkg.train")
    assert (found.ranks, found.command) == ("4", ["python", "-u", "-m", "pkg.train"])
    assert launch_of("torchrun --nproc-per-node 2 pkg.train").ranks == "2"


@pytest.mark.parametrize(
    ("line", "environment", "nodes", "ranks"),
    [
        ("torchrun t.py", {}, 4, 1),
        ("torchrun --nproc-per-node 8 t.py", {"SLURM_GPUS_ON_NODE": "2"}, 4, 8),
        ("torchrun --nproc-per-node gpu t.py", {"SLURM_GPUS_ON_NODE": "2"}, 4, 2),
        ("torchrun --nproc-per-node gpu t.py", {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2"}, 4, 3),
        ("torchrun --nproc-per-node auto t.py", {}, 4, 5),
        ("torchrun --nproc-per-node cpu t.py", {"SLURM_GPUS_ON_NODE": "2"}, 4, 16),
        ("deepspeed t.py", {}, 4, 5),
        ("deepspeed --include localhost:0,2 t.py", {}, 4, 2),
        ("fabric run t.py", {}, 1, 1),
        ("fabric run --devices 0,1 t.py", {}, 1, 2),
        ("fabric run --devices -1 --accelerator cuda t.py", {"SLURM_GPUS_ON_NODE": "2"}, 1, 2),
        ("fabric run --devices auto t.py", {}, 1, 1),
        ("mpirun -np 8 python t.py", {}, 4, 2),
        ("mpirun -np 8 --map-by ppr:8:node python t.py", {}, 4, 8),
        ("mpirun -npernode 4 python t.py", {}, 4, 4),
        ("mpirun python t.py", {}, 4, 1),
    ],
)
def test_how_many_ranks_a_node_gets(line: str, environment: dict[str, str], nodes: int, ranks: int) -> None:
    assert count_ranks(launch_of(line), environment, nodes, cpus=16, devices=5) == ranks


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node gpu t.py",
        "torchrun --nproc-per-node many t.py",
        "torchrun --nproc-per-node 0 t.py",
        "mpirun -np 3 python t.py",
    ],
)
def test_numbers_of_ranks_that_make_no_sense(line: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(LauncherStays) as refused:
        count_ranks(launch_of(line), {}, nodes=2, cpus=16, devices=0)
    assert str(refused.value) == snapshot


@pytest.mark.parametrize(
    ("nnodes", "job", "spares", "fewest"),
    [("1", 4, 0, 0), ("4", 4, 0, 4), ("2:4", 4, 0, 2), ("1:4", 4, 0, 1), ("2:9", 4, 0, 2), ("3", 4, 1, 3)],
)
def test_the_nodes_of_the_world(nnodes: str, job: int, spares: int, fewest: int) -> None:
    found = launch_of(f"torchrun --nnodes {nnodes} t.py")
    assert fewest_nodes(found, job, 1, spares, array=True) == fewest
    assert fewest_nodes(found, 1, job, spares, array=False) == (fewest if ":" in nnodes else 0)


@pytest.mark.parametrize(("nnodes", "fewest"), [("2", 0), ("6", 6), ("3:6", 4)])
def test_the_nodes_of_an_array_whose_elements_have_two(nnodes: str, fewest: int) -> None:
    """Told of its element's nodes, a launcher says nothing of the job."""
    assert fewest_nodes(launch_of(f"torchrun --nnodes {nnodes} t.py"), 3, 2, 0, array=True) == fewest


@pytest.mark.parametrize("nnodes", ["2", "5:8"])
def test_a_launcher_that_was_told_of_other_nodes(nnodes: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(LauncherStays) as refused:
        fewest_nodes(launch_of(f"torchrun --nnodes {nnodes} t.py"), 4, 1, 0, True)
    assert str(refused.value) == snapshot


def test_submitits_own_command_is_known() -> None:
    assert is_submitit(shlex.split("/opt/env/bin/python -u -m submitit.core._submit /folder"))
    assert not is_submitit(["python", "submitit.core._submit"]) and not is_submitit(["python", "train.py"])


# ---------------------------------------------------------------- the real ones
def _flags(parser: object) -> dict[str, bool]:
    """Each of its options by its flags: whether a value follows."""
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]  # type: ignore[attr-defined]
    return {" ".join(sorted(action.option_strings)): action.nargs != 0 for action in actions}


def _table(name: str) -> dict[str, bool]:
    return {" ".join(sorted(option.flags)): option.has_value for option in LAUNCHERS[name].options}


def test_torchs_own_options_are_those_of_the_table() -> None:
    """A new release of torch's with a new option shows here; it runs in each cell of tools/matrix.toml."""
    from torch.distributed.run import get_args_parser

    table = _table("torchrun")
    assert _flags(get_args_parser()).items() <= table.items()
    seen = tomllib.loads((ROOT / "docs/behaviour/torchrun.toml").read_text())["options"]
    by_release = {
        release: {each.removesuffix(" VALUE"): each.endswith(" VALUE") for each in flags}
        for release, flags in seen.items()
    }
    assert table == {flag: value for flags in by_release.values() for flag, value in flags.items()}
    cells = tomllib.loads((ROOT / "tools/matrix.toml").read_text()).values()
    assert {cell["torch"] for cell in cells} <= by_release.keys()


def test_options_that_only_some_releases_of_torch_have_leave_a_job_protected() -> None:
    line = "torchrun --log-line-prefix-template '${hostname}:${rank}: ' --shutdown-timeout 5 --nproc-per-node 2 t.py"
    read = launch_of(line)
    assert (read.ranks, read.command[-1], read.ignored) == ("2", "t.py", ["--log-line-prefix-template"])
    with pytest.raises(LauncherStays, match="starts no rank"):
        launch_of("torchrun --print-completion bash t.py")


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2 --nproc_per_node=8 t.py a --nnodes 3",
        "-m -t3 --tee 1 --rdzv-id=a=b -r 0:1 pkg.t x",
        "--standalone --max-restarts 3 --rdzv-end h:1 --no-python ./t",
    ],
)
def test_they_are_read_as_torchrun_reads_them(line: str) -> None:
    from torch.distributed.run import get_args_parser

    real, ours = (vars(get_args_parser().parse_args(shlex.split(line))), read_options(TORCHRUN, shlex.split(line)))
    assert (ours.program, ours.words) == (real["training_script"], real["training_script_args"])
    for option in TORCHRUN.options:
        name = option.name
        if option.has_value and name in ours:
            assert ours.text(name) == str(real[name.replace("-", "_")])
        elif not option.has_value:
            assert (name in ours) is bool(real[name.replace("-", "_")])


@pytest.mark.long
def test_fabrics_own_options_are_those_of_the_table() -> None:
    from lightning_fabric import cli

    command = cli._main.commands["run"]
    real = {" ".join(sorted(each.opts)): True for each in command.params if each.opts[0].startswith("-")}
    assert _table("fabric") == real


@pytest.mark.deepspeed
def test_deepspeeds_own_options_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from deepspeed.launcher import runner

    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None: parsers.append(self))
    runner.parse_args([])
    assert _table("deepspeed") == _flags(parsers[0])


def test_an_ambiguous_abbreviation_is_no_option() -> None:
    with pytest.raises(Unreadable):
        read_options(TORCHRUN, ["--rdzv", "x", "t.py"])


def test_a_rendezvous_that_is_none_of_torchs_own_is_named() -> None:
    """Defect: what a package had registered was replaced, and an INFO line named the option alone."""
    from torch.distributed.elastic.rendezvous import registry

    registry._register_default_handlers()
    assert set(BACKENDS) == set(registry.handler_registry._registry)
    for backend in BACKENDS:
        taken = read_launcher(["torchrun", f"--rdzv-backend={backend}", "train.py"])
        assert taken is not None and taken.warning == "" and "--rdzv-backend" in taken.replaced
    taken = read_launcher(["torchrun", "--rdzv_backend", "mine", "train.py"])
    assert taken is not None and taken.warning.startswith("--rdzv-backend=mine ")
