"""Reads the options of launchers such as torchrun, so that the agent starts the ranks in their place.

`srun torchrun --nproc-per-node 8 train.py` becomes `python -u train.py` in eight ranks on each node. A command that
needs its launcher raises :class:`LauncherStays` and runs as it is, unprotected; the text says what to write.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unicron_ctl.agent.launchers.accelerate import ask_accelerate
from unicron_ctl.agent.launchers.commands import LauncherCommand, LauncherStays, find_launcher
from unicron_ctl.agent.launchers.launcher_options import Options, Unreadable, read_options, torch_defaults
from unicron_ctl.agent.program_table import KINDS, LAUNCHERS, Launcher
from unicron_ctl.agent.ranks.placeholders import placeholder
from unicron_ctl.agent.ranks.warm_commands import PYTHON
from unicron_ctl.shared.system.plain_file import read_beginning

MOST_BYTES = 1 << 20  # of a script that are read
USES_MPI = re.compile(r"^[ \t]*(?:import|from)[ \t]+(mpi4py|horovod)\b", re.MULTILINE)
PLAIN_SCRIPT = "write `srun python train.py` without it, and the agent starts the ranks"
CONSOLE = "UNICRON_CONSOLE_RANKS"
# torch's own rendezvous backends; others are registered by packages (the entry points torchrun.handlers).
BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
OF_MPI = {
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_NODE_RANK": "LOCAL_RANK",
}


@dataclass(frozen=True)
class Launch:
    """A launcher's command line, ready for the agent."""

    launcher: str
    """Its name."""
    command: list[str]
    """The command of each rank."""
    ranks: str = ""
    """Ranks on a node, as the launcher's option says: a number, gpu, auto or cpu; empty without that option."""
    nodes: tuple[int, int] = (0, 0)
    """Fewest and most nodes; (0, 0) if unknown."""
    total: int = 0
    """Ranks of all nodes; 0 if unknown."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the ranks get."""
    replaced: list[str] = field(default_factory=list)
    """Options for which Unicron has its own way."""
    ignored: list[str] = field(default_factory=list)
    """Options that have no effect now."""
    warning: str = ""
    """A part of the launcher's work that nothing does now."""


def rank_command(read: Options, python: Sequence[str], local_rank: str = "") -> list[str]:
    """Return the command of a rank, as torchrun and deepspeed build it."""
    words = [read.program, *([local_rank] if local_rank else []), *read.words]
    if "no-python" in read or "no_python" in read:
        if "module" in read:
            raise LauncherStays("its --module and --no-python exclude each other: write one of them")
        return words
    return [*python, *([] if "-u" in python else ["-u"]), *(["-m"] if "module" in read else []), *words]


def read_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of torchrun's --nnodes. Raises LauncherStays."""
    try:
        counts = [int(count) for count in text.split(":")] if text else [0]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2) or counts != sorted(counts):
        raise LauncherStays(f"its --nnodes={text} is neither a number nor MIN:MAX: write --nnodes $SLURM_NNODES")
    return counts[0], counts[-1]


def _read_usual(found: LauncherCommand, launcher: Launcher, read: Options) -> Launch:
    """Read the options that the table names, which is all for a launcher without a reader of its own."""
    return Launch(
        found.name,
        rank_command(read, found.python),
        read.text(launcher.ranks, "1"),
        read_nodes(read.text(launcher.nodes)),
        replaced=read.with_fate("replaced"),
        ignored=read.with_fate("ignored"),
    )


# ---------------------------------------------------------------- torchrun
def _console(read: Options) -> dict[str, str]:
    """Return the variables for UNICRON_LOG_DIR and for the ranks that the job's own log shows."""
    made = {}
    if folder := read.text("log-dir"):
        made["UNICRON_LOG_DIR"] = os.path.abspath(folder)
    if shown := read.text("local-ranks-filter"):
        made[CONSOLE] = shown
    if folder and read.text("redirects") == "3" and read.text("tee", "0") == "0":
        made[CONSOLE] = "none"
    return made


def _read_torchrun(found: LauncherCommand, launcher: Launcher, read: Options) -> Launch:
    launch = _read_usual(found, launcher, read)
    streams = [name for name in ("redirects", "tee") if read.text(name, "0") not in ("0", "3")]
    return replace(
        launch,
        environment=_console(read) | ({"ROLE_NAME": read.text("role")} if "role" in read else {}),
        ignored=[*launch.ignored, *(f"--{name}={read.text(name)} (both streams are written)" for name in streams)],
        warning=_warn_of_rendezvous(read.text("rdzv-backend")),
    )


def _warn_of_rendezvous(backend: str) -> str:
    """Return the warning about a rendezvous backend that is not torch's own: it may do more than form a world."""
    if backend in ("", *BACKENDS):
        return ""
    return (
        f"--rdzv-backend={backend} is none of torch's own, and nobody calls it, for Unicron forms each world: "
        "if it does more than that, run the job without --unicron"
    )


def _read_torch_launch(found: LauncherCommand, launcher: Launcher, read: Options) -> Launch:
    local_rank = "" if "use-env" in read else f"--local-rank={placeholder('LOCAL_RANK')}"
    launch = _read_torchrun(found, launcher, read)
    return replace(launch, command=rank_command(read, found.python, local_rank))


# ---------------------------------------------------------------- deepspeed
def _read_deepspeed(found: LauncherCommand, launcher: Launcher, read: Options) -> Launch:
    ranks, environment = "gpu", {}
    if (count := read.text("num_gpus", "-1")) != "-1":
        ranks = count
    elif include := read.text("include"):
        host, _, gpus = include.partition(":")
        if "@" in include or host != "localhost" or not gpus:
            raise LauncherStays("its --include names hosts, which Slurm chooses here: write --include localhost:0,1")
        ranks, environment["CUDA_VISIBLE_DEVICES"] = str(len(gpus.split(","))), gpus
    if (folder := read.text("enable_each_rank_log", "None")) != "None":
        environment |= {"UNICRON_LOG_DIR": os.path.abspath(folder), CONSOLE: "none"}
    environment |= {
        "LOCAL_SIZE": placeholder("LOCAL_WORLD_SIZE"),
        "CROSS_RANK": placeholder("GROUP_RANK"),
        "CROSS_SIZE": placeholder("GROUP_WORLD_SIZE"),
    }
    local_rank = "" if "no_local_rank" in read else f"--local_rank={placeholder('LOCAL_RANK')}"
    nodes = read_nodes(text) if (text := read.text("num_nodes", "-1")) != "-1" else (0, 0)
    launch = _read_usual(found, launcher, read)
    command = rank_command(read, found.python, local_rank)
    return replace(launch, command=command, ranks=ranks, nodes=nodes, environment=environment)


# ---------------------------------------------------------------- Lightning Fabric
def _read_fabric(found: LauncherCommand, launcher: Launcher, read: Options) -> Launch:
    accelerator, devices = read.text("accelerator"), read.text("devices", "1")
    environment = {"LT_CLI_USED": "1", "LT_DEVICES": devices, "LT_NUM_NODES": placeholder("GROUP_WORLD_SIZE")}
    for name in ("accelerator", "strategy", "precision"):
        if name in read:
            environment[f"LT_{name.upper()}"] = read.text(name)
    if accelerator == "tpu":
        raise LauncherStays("its --accelerator=tpu starts processes of another kind: leave --unicron out")
    if read.text("strategy") == "dp" or devices == "auto":
        devices = "1"
    elif "," in devices:
        devices = str(len([device for device in devices.split(",") if device]))
    elif devices == "-1":
        devices = "cpu" if accelerator == "cpu" else "gpu"
    return replace(_read_usual(found, launcher, read), ranks=devices, environment=environment)


# ---------------------------------------------------------------- MPI
def _read_mpirun(found: LauncherCommand, launcher: Launcher, read: Options) -> Launch:
    if not PYTHON.fullmatch(Path(read.program).name) and not read.program.endswith(".py"):
        raise LauncherStays(f"{Path(read.program).name} is no Python script, and an MPI program needs mpirun")
    command = [read.program, *read.words]
    _refuse_mpi_script(next((word for word in command if word.endswith(".py")), ""))
    total = read.text("np", "0")
    if not total.isdecimal():
        raise LauncherStays(f"its -n {total} is no number: write -n 8")
    environment = {}
    for text in read.all("x"):
        name, equals, value = text.partition("=")
        environment[name] = value if equals else os.environ.get(name, "")
    environment |= {name: placeholder(variable) for name, variable in OF_MPI.items()}
    mapped = re.fullmatch(r"ppr:(\d+):node(?::.*)?", read.text("map-by"))
    ranks = read.text("npernode") or (mapped[1] if mapped else "")
    launch = _read_usual(found, launcher, read)
    return replace(launch, command=command, ranks=ranks, total=int(total), environment=environment)


def _refuse_mpi_script(script: str) -> None:
    """Raise LauncherStays for a script that uses MPI itself."""
    with contextlib.suppress(OSError):
        if script and (needs := USES_MPI.search(read_beginning(script, MOST_BYTES))):
            raise LauncherStays(f"{Path(script).name} needs it, for it imports {needs[1]}")


def _without_genv(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of mpiexec without `-genv NAME VALUE`, the only option with two values, and those variables."""
    if ":" in words:
        raise LauncherStays(f"it starts several programs: {PLAIN_SCRIPT}")
    kept, environment, waiting = list[str](), dict[str, str](), deque(words)
    while waiting:
        word = waiting.popleft()
        if word == "-genv" and len(waiting) > 1:
            name, value = waiting.popleft(), waiting.popleft()
            environment[name] = value
        else:
            kept.append(word)
    return kept, environment


# ---------------------------------------------------------------- accelerate
def _read_accelerate(found: LauncherCommand) -> Launch:
    answer = ask_accelerate(found.python, found.words)
    if command := answer.command:  # it would start one process itself
        if Path(command[0]).name.startswith(("mpi", "deepspeed")):
            raise LauncherStays(f"it would start {Path(command[0]).name}: {PLAIN_SCRIPT}")
        alone = "accelerate itself starts one a node without --multi_gpu, where it sees no more than one GPU"
        more = answer.processes > answer.machines
        ignored = [f"--num_processes={answer.processes} ({alone})"] if more else []
        return Launch(found.name, command, "1", environment=answer.environment, ignored=ignored)
    read = Options(LAUNCHERS["torchrun"], answer.torchrun, answer.program, answer.words)
    own = itertools.takewhile(lambda word: word != answer.program, found.words)
    written = any(word.partition("=")[0] in ("--num_machines", "--num-machines") for word in own)  # else 1 is a default
    nodes = read_nodes(read.text("nnodes")) if answer.machines > 1 or written else (0, 0)
    environment = answer.environment | _console(read)
    command = rank_command(read, found.python)
    return Launch(found.name, command, read.text("nproc-per-node"), nodes, environment=environment)


# ---------------------------------------------------------------- all of them
READERS: dict[str, Callable[[LauncherCommand, Launcher, Options], Launch]] = {
    "torchrun": _read_torchrun,
    "torch launch": _read_torch_launch,
    "deepspeed": _read_deepspeed,
    "fabric": _read_fabric,
    "mpi": _read_mpirun,
}


def _read(found: LauncherCommand, kind: str) -> Launch:
    launcher, variables = LAUNCHERS[kind], dict[str, str]()
    if launcher.command:
        if found.words[:1] != [launcher.command]:
            raise LauncherStays("")  # `accelerate config`, `fabric consolidate` train nothing
        found = replace(found, words=found.words[1:])
    if kind == "accelerate":
        return _read_accelerate(found)
    if kind == "mpi":
        words, variables = _without_genv(found.words)
        found = replace(found, words=words)
    of_torch = "torchrun" in (kind, launcher.like)
    read = read_options(launcher, found.words, torch_defaults(os.environ) if of_torch else None)
    if read.refusal:
        raise LauncherStays(read.refusal)
    launch = READERS.get(kind, _read_usual)(found, launcher, read)
    return replace(launch, environment=variables | launch.environment)


def read_launcher(command: Sequence[str]) -> Launch | None:
    """Read the launcher in the command; None for a command without one. Raises LauncherStays."""
    found = find_launcher(command)
    if found is None:
        return None
    if found.name not in KINDS:
        raise LauncherStays(f"its command starts the ranks by {found.name}, as the agent would: {PLAIN_SCRIPT}")
    try:
        launch = _read(found, KINDS[found.name])
    except Unreadable as error:
        raise LauncherStays(f"{found.name}'s options cannot be read ({error}): {PLAIN_SCRIPT}") from None
    except LauncherStays as error:
        why = f"its command starts the ranks by {found.name}, and {error}" if str(error) else ""
        raise LauncherStays(why) from None
    return replace(launch, command=[*found.prefix, *launch.command], environment=found.environment | launch.environment)
