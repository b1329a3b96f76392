"""Launchers in a command, such as torchrun: the agent reads what they are told, and starts the ranks in their place.

`srun torchrun --nproc-per-node 8 train.py` becomes `python -u train.py` in eight ranks on each node. What cannot be
done without a launcher is a :class:`NotTaken`: its command runs as it is, unprotected, and the text says what to write.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unicron_ctl.agent.launchers import option_tables as options
from unicron_ctl.agent.launchers.accelerate import ask_accelerate
from unicron_ctl.agent.launchers.commands import KINDS, PYTHON, Found, NotTaken, find_launcher
from unicron_ctl.agent.launchers.option_tables import LOST, REPLACED, Options, Unreadable, read_options
from unicron_ctl.agent.ranks.placeholders import placeholder
from unicron_ctl.shared.system.plain_file import read_beginning

MOST_BYTES = 1 << 20  # that are read of a script
USES_MPI = re.compile(r"^[ \t]*(?:import|from)[ \t]+(mpi4py|horovod)\b", re.MULTILINE)
PLAIN_SCRIPT = "write `srun python train.py` without it, and the agent starts the ranks"
CONSOLE = "UNICRON_CONSOLE_RANKS"


@dataclass(frozen=True)
class Taken:
    """What a launcher was told.

    launcher: its name. command: what each rank runs. ranks: on a node, as the launcher has it: a number, or gpu, auto,
    cpu; empty where nothing says. nodes: fewest and most, (0, 0) where nothing says. total: ranks of all nodes, 0 where
    nothing says. environment: variables that the ranks get. replaced, lost: options that Unicron has its own way of,
    and those that nobody honours now. warning: what a part of it did that nobody does now.
    """

    launcher: str
    command: list[str]
    ranks: str = ""
    nodes: tuple[int, int] = (0, 0)
    total: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    warning: str = ""


# ---------------------------------------------------------------- torchrun
def _program(read: Options, python: Sequence[str], local_rank: str = "") -> list[str]:
    """The command of a rank, as torchrun and deepspeed build it."""
    words = [read.program, *([local_rank] if local_rank else []), *read.words]
    if "no-python" in read or "no_python" in read:
        if "module" in read:
            raise NotTaken("its --module and --no-python exclude each other: write one of them")
        return words
    return [*python, *([] if "-u" in python else ["-u"]), *(["-m"] if "module" in read else []), *words]


def read_nodes(text: str) -> tuple[int, int]:
    """torchrun's --nnodes. Raises NotTaken."""
    try:
        counts = [int(count) for count in text.split(":")] if text else [0]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2) or counts != sorted(counts):
        raise NotTaken(f"its --nnodes={text} is neither a number nor MIN:MAX: write --nnodes $SLURM_NNODES")
    return counts[0], counts[-1]


def _console(read: Options) -> dict[str, str]:
    """Where a rank's output goes: UNICRON_LOG_DIR, and which ranks the job's own log shows."""
    made = {}
    if folder := read.text("log-dir"):
        made["UNICRON_LOG_DIR"] = os.path.abspath(folder)
    if shown := read.text("local-ranks-filter"):
        made[CONSOLE] = shown
    if folder and read.text("redirects") == "3" and read.text("tee", "0") == "0":
        made[CONSOLE] = "none"
    return made


def _from_torchrun(found: Found, legacy: bool = False) -> Taken:
    table = options.TORCH_LAUNCH if legacy else options.TORCHRUN
    read = read_options(table, found.words, options.torch_defaults(os.environ))
    if "print-completion" in read:
        raise NotTaken("its --print-completion starts no rank: run it without --unicron")
    if "virtual-local-rank" in read:
        raise NotTaken("its --virtual-local-rank is nothing that the agent does: leave it out")
    lost = read.that_are(LOST)
    streams = [name for name in ("redirects", "tee") if read.text(name, "0") not in ("0", "3")]
    lost += [f"--{name}={read.text(name)} (both streams are written)" for name in streams]
    local_rank = f"--local-rank={placeholder('LOCAL_RANK')}" if legacy and "use-env" not in read else ""
    return Taken(
        found.name,
        _program(read, found.python, local_rank),
        read.text("nproc-per-node", "1"),
        read_nodes(read.text("nnodes")),
        environment=_console(read) | ({"ROLE_NAME": read.text("role")} if "role" in read else {}),
        replaced=read.that_are(REPLACED),
        lost=lost,
        warning=_strange_rendezvous(read.text("rdzv-backend")),
    )


def _strange_rendezvous(backend: str) -> str:
    """The warning about a rendezvous that is none of torch's own: it may do more than to form a world."""
    if backend in ("", *options.BACKENDS):
        return ""
    return (
        f"--rdzv-backend={backend} is none of torch's own, and nobody calls it, for Unicron forms each world: "
        "if it does more than that, run the job without --unicron"
    )


def _from_torch_launch(found: Found) -> Taken:
    return _from_torchrun(found, legacy=True)


# ---------------------------------------------------------------- deepspeed
def _from_deepspeed(found: Found) -> Taken:
    read = read_options(options.DEEPSPEED, found.words)
    for name, told in (
        ("exclude", "name the GPUs with --include localhost:0,1, or CUDA_VISIBLE_DEVICES"),
        ("autotuning", "tune without --unicron"),
        ("venv_script", "activate the environment in front of srun"),
    ):
        if name in read:
            raise NotTaken(f"its --{name} is nothing that the agent does: {told}")
    ranks, environment = "gpu", {}
    if (count := read.text("num_gpus", "-1")) != "-1":
        ranks = count
    elif include := read.text("include"):
        host, _, gpus = include.partition(":")
        if "@" in include or host != "localhost" or not gpus:
            raise NotTaken("its --include names hosts, which Slurm chooses here: write --include localhost:0,1")
        ranks, environment["CUDA_VISIBLE_DEVICES"] = str(len(gpus.split(","))), gpus
    if (folder := read.text("enable_each_rank_log", "None")) != "None":
        environment |= {"UNICRON_LOG_DIR": os.path.abspath(folder), CONSOLE: "none"}
    local_rank = "" if "no_local_rank" in read else f"--local_rank={placeholder('LOCAL_RANK')}"
    nodes = read_nodes(text) if (text := read.text("num_nodes", "-1")) != "-1" else (0, 0)
    environment |= {
        "LOCAL_SIZE": placeholder("LOCAL_WORLD_SIZE"),
        "CROSS_RANK": placeholder("GROUP_RANK"),
        "CROSS_SIZE": placeholder("GROUP_WORLD_SIZE"),
    }
    command = _program(read, found.python, local_rank)
    return Taken(
        found.name,
        command,
        ranks,
        nodes,
        environment=environment,
        replaced=read.that_are(REPLACED),
        lost=read.that_are(LOST),
    )


# ---------------------------------------------------------------- Lightning Fabric
def _from_fabric(found: Found) -> Taken:
    if found.words[:1] != ["run"]:
        raise NotTaken("")  # `fabric consolidate` trains nothing
    read = read_options(options.FABRIC, found.words[1:], abbreviated=False, anywhere=True)
    accelerator, devices = read.text("accelerator"), read.text("devices", "1")
    environment = {"LT_CLI_USED": "1", "LT_DEVICES": devices, "LT_NUM_NODES": placeholder("GROUP_WORLD_SIZE")}
    for name in ("accelerator", "strategy", "precision"):
        if name in read:
            environment[f"LT_{name.upper()}"] = read.text(name)
    if accelerator == "tpu":
        raise NotTaken("its --accelerator=tpu starts processes of another kind: leave --unicron out")
    if read.text("strategy") == "dp":
        devices = "1"
    elif "," in devices:
        devices = str(len([device for device in devices.split(",") if device]))
    elif devices == "-1":
        devices = "cpu" if accelerator == "cpu" else "gpu"
    nodes = read_nodes(read.text("num-nodes"))
    command = _program(read, found.python)
    devices = "1" if devices == "auto" else devices
    return Taken(found.name, command, devices, nodes, environment=environment, replaced=read.that_are(REPLACED))


# ---------------------------------------------------------------- MPI
def _from_mpirun(found: Found) -> Taken:
    if ":" in found.words:
        raise NotTaken(f"it starts several programs: {PLAIN_SCRIPT}")
    words, environment, at = list[str](), dict[str, str](), 0
    while at < len(found.words):
        if found.words[at] == "-genv" and at + 2 < len(found.words):  # two values follow
            environment[found.words[at + 1]] = found.words[at + 2]
            at += 3
        else:
            words.append(found.words[at])
            at += 1
    read = read_options(options.MPIRUN, words, abbreviated=False)
    program = [read.program, *read.words]
    if not PYTHON.fullmatch(Path(read.program).name) and not read.program.endswith(".py"):
        raise NotTaken(f"{Path(read.program).name} is no Python script, and an MPI program needs mpirun")
    if script := next((word for word in program if word.endswith(".py")), ""):
        with contextlib.suppress(OSError):
            if needs := USES_MPI.search(read_beginning(script, MOST_BYTES)):
                raise NotTaken(f"{Path(script).name} needs it, for it imports {needs[1]}")
    for text in read.all("x"):
        name, equals, value = text.partition("=")
        environment[name] = value if equals else os.environ.get(name, "")
    per_node = read.text("npernode")
    if mapped := read.text("map-by"):
        if fits := re.fullmatch(r"ppr:(\d+):node(?::.*)?", mapped):
            per_node = per_node or fits[1]
    for name, variable in (
        ("OMPI_COMM_WORLD_RANK", "RANK"),
        ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_NODE_RANK", "LOCAL_RANK"),
    ):
        environment[name] = placeholder(variable)
    total = read.text("np", "0")
    if not total.isdecimal():
        raise NotTaken(f"its -n {total} is no number: write -n 8")
    return Taken(
        found.name,
        program,
        per_node,
        total=int(total),
        environment=environment,
        replaced=read.that_are(REPLACED),
        lost=read.that_are(LOST),
    )


# ---------------------------------------------------------------- accelerate
def _from_accelerate(found: Found) -> Taken:
    if found.words[:1] != ["launch"]:
        raise NotTaken("")  # `accelerate config`, `env`, `test` train nothing that lasts
    told = ask_accelerate(found.python, found.words[1:])
    if "command" in told:  # it would start one process itself
        command = told["command"]
        if Path(command[0]).name.startswith(("mpi", "deepspeed")):
            raise NotTaken(f"it would start {Path(command[0]).name}: {PLAIN_SCRIPT}")
        asked = told["processes"]
        alone = "accelerate itself starts one a node without --multi_gpu, where it sees no more than one GPU"
        lost = [f"--num_processes={asked} ({alone})"] if asked > told["machines"] else []
        return Taken(found.name, command, "1", environment=told["environment"], lost=lost)
    given = {name: value for name, value in told["torchrun"].items() if value not in (None, "", False)}
    read = Options(options.TORCHRUN, given, told["program"], told["words"])
    own = itertools.takewhile(lambda word: word != told["program"], found.words)
    written = any(word.partition("=")[0] in ("--num_machines", "--num-machines") for word in own)  # else 1 is a default
    nodes = read_nodes(read.text("nnodes")) if told["machines"] > 1 or written else (0, 0)
    environment = told["environment"] | _console(read)
    return Taken(found.name, _program(read, found.python), read.text("nproc-per-node"), nodes, environment=environment)


# ---------------------------------------------------------------- all of them
READERS: dict[str, Callable[[Found], Taken]] = {
    "torchrun": _from_torchrun,
    "torch launch": _from_torch_launch,
    "accelerate": _from_accelerate,
    "deepspeed": _from_deepspeed,
    "fabric": _from_fabric,
    "mpi": _from_mpirun,
}


def take_over(command: Sequence[str]) -> Taken | None:
    """What the launcher in the command was told; None for a command without one. Raises NotTaken."""
    found = find_launcher(command)
    if found is None:
        return None
    if found.name not in KINDS:
        raise NotTaken(f"its command starts the ranks by {found.name}, as the agent would: {PLAIN_SCRIPT}")
    try:
        taken = READERS[KINDS[found.name]](found)
    except Unreadable as error:
        raise NotTaken(f"{found.name}'s options cannot be read ({error}): {PLAIN_SCRIPT}") from None
    except NotTaken as error:
        raise NotTaken(f"its command starts the ranks by {found.name}, and {error}" if str(error) else "") from None
    return replace(taken, command=[*found.prefix, *taken.command], environment=found.environment | taken.environment)
