"""Launchers in a command, such as torchrun: the agent reads what they are told, and starts the ranks in their place.

`srun torchrun --nproc-per-node 8 train.py` becomes `python -u train.py` in eight ranks on each node. `LAUNCHERS` is the
table of those that are known. What cannot be done without a launcher is a :class:`NotTaken`: its command runs as it is,
unprotected, and the text says what to write.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unicron.ctl.agent.ranks.placeholders import placeholder
from unicron.ctl.agent.start import launcher_options as options
from unicron.ctl.agent.start.accelerate_launch import ask_accelerate
from unicron.ctl.agent.start.launcher_options import LOST, REPLACED, Options, Unreadable, read_options
from unicron.ctl.agent.start.not_taken import NotTaken

PYTHON = re.compile(r"python[\d.]*t?")
SHELLS = ("ash", "bash", "dash", "ksh", "sh", "zsh")
# Programs that run the command in their arguments, and may stand in front of each rank.
WRAPPERS = {"chrt", "env", "ionice", "linux32", "linux64", "nice", "nohup", "numactl", "prlimit", "setarch", "setpriv"}
WRAPPERS |= {"setsid", "stdbuf", "taskset", "time", "timeout"}
# The same, with another Python inside than outside.
ELSEWHERE = {"apptainer", "ch-run", "conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry"}
ELSEWHERE |= {"shifter", "singularity", "uv"}
# Programs that watch one process, or hide the environment from it.
NOT_FOR_RANKS = {"compute-sanitizer", "cuda-gdb", "docker", "enroot", "gdb", "ltrace", "ncu", "nsys", "perf", "podman"}
NOT_FOR_RANKS |= {"podman-hpc", "rocprof", "sarus", "script", "strace", "sudo", "unbuffer", "valgrind", "xargs"}
# Launchers that the agent does not replace.
OTHERS = {"aprun", "colossalai", "composer", "horovodrun", "jsrun", "prun"}
SHELL_SYNTAX = set("$`;&|<>(){}*?[]~#!\n\\")
VALUE_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")  # of Python, which take the next word
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
    and those that nobody honours now.
    """

    launcher: str
    command: list[str]
    ranks: str = ""
    nodes: tuple[int, int] = (0, 0)
    total: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A launcher within a command: its words, the Python that would run it, and the words in front of it."""

    name: str
    prefix: list[str]
    words: list[str]
    python: list[str]
    environment: dict[str, str]


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
    words = [word for word in found.words]
    environment = {}
    while "-genv" in words[:-2]:  # two values follow
        at = words.index("-genv")
        environment[words[at + 1]] = words[at + 2]
        del words[at : at + 3]
    read = read_options(options.MPIRUN, words, abbreviated=False)
    program = [read.program, *read.words]
    if not PYTHON.fullmatch(Path(read.program).name) and not read.program.endswith(".py"):
        raise NotTaken(f"{Path(read.program).name} is no Python script, and an MPI program needs mpirun")
    if script := next((word for word in program if word.endswith(".py")), ""):
        with contextlib.suppress(OSError), open(script, encoding="utf-8", errors="replace") as file:
            if needs := USES_MPI.search(file.read(MOST_BYTES)):
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
    nodes = read_nodes(read.text("nnodes")) if told["machines"] > 1 else (0, 0)
    environment = told["environment"] | _console(read)
    return Taken(found.name, _program(read, found.python), read.text("nproc-per-node"), nodes, environment=environment)


Reader = Callable[[Found], Taken]
# names of programs; modules behind `python -m`; what reads the options
LAUNCHERS: tuple[tuple[tuple[str, ...], tuple[str, ...], Reader], ...] = (
    (("torchrun",), ("torch.distributed.run", "torch.distributed.elastic"), _from_torchrun),
    ((), ("torch.distributed.launch",), _from_torch_launch),
    (("accelerate", "accelerate-launch"), ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
     _from_accelerate),
    (("deepspeed", "ds", "deepspeed.pt"), ("deepspeed.launcher.runner",), _from_deepspeed),
    (("fabric",), (), _from_fabric),
    (("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"), (), _from_mpirun),
)  # fmt: skip
_BY_NAME = {name: reader for names, _, reader in LAUNCHERS for name in names}
_BY_MODULE = {module: reader for _, modules, reader in LAUNCHERS for module in modules}
NAMES = frozenset({*_BY_NAME, *OTHERS})
MODULES = frozenset(_BY_MODULE)


# ---------------------------------------------------------------- a launcher in a command
def take_over(command: Sequence[str]) -> Taken | None:
    """What the launcher in the command was told; None for a command without one. Raises NotTaken."""
    found = find_launcher(command)
    if found is None:
        return None
    reader = _BY_NAME.get(found.name) or _BY_MODULE.get(found.name)
    if reader is None:
        raise NotTaken(f"its command starts the ranks by {found.name}, as the agent would: {PLAIN_SCRIPT}")
    try:
        taken = reader(found)
    except Unreadable as error:
        raise NotTaken(f"{found.name}'s options cannot be read ({error}): {PLAIN_SCRIPT}") from None
    except NotTaken as error:
        raise NotTaken(f"its command starts the ranks by {found.name}, and {error}" if str(error) else "") from None
    return replace(taken, command=[*found.prefix, *taken.command], environment=found.environment | taken.environment)


def find_launcher(command: Sequence[str]) -> Found | None:
    """The launcher that the command runs, directly or behind wrappers. Raises NotTaken for one behind a wrapper that
    does not go with ranks."""
    words = list(command)
    environment: dict[str, str] = {}
    at, elsewhere = 0, False
    while at < len(words):
        name = Path(words[at]).name
        if name == "env" and at == 0:
            while at + 1 < len(words) and re.fullmatch(r"[A-Za-z_]\w*=.*", words[at + 1], re.DOTALL):
                at += 1
                variable, _, value = words[at].partition("=")
                environment[variable] = value
            if at + 1 < len(words) and not words[at + 1].startswith("-"):
                words, at = words[at + 1 :], 0
                continue
            environment, at = {}, 0  # it has options, and stays in front of each rank
        if (here := _launcher_at(words, at, elsewhere)) is not None:
            name, rest, python = here
            return Found(name, words[:at], rest, python, environment)
        if name in SHELLS and at == 0 and (inner := only_command(words)) is not None:
            words = inner
            continue
        if name in WRAPPERS or name in ELSEWHERE or name in NOT_FOR_RANKS:
            following = _next_program(words, at + 1, name in ELSEWHERE)
            if following is None:
                return None
            if name in NOT_FOR_RANKS:
                if _launcher_at(words, following, True) is not None:
                    raise NotTaken(f"its launcher stands behind {name}: write `srun {name} ... python train.py`")
                return None
            at, elsewhere = following, elsewhere or name in ELSEWHERE
            continue
        return None
    return None


def _next_program(words: Sequence[str], start: int, elsewhere: bool) -> int | None:
    """Where a wrapper's command begins that names a launcher, a Python or another wrapper."""
    for at in range(start, len(words)):
        name = Path(words[at]).name
        if name in WRAPPERS | ELSEWHERE | NOT_FOR_RANKS and not words[at - 1].startswith("-"):
            return at
        if _launcher_at(words, at, elsewhere) is not None:
            return at
        if PYTHON.fullmatch(name) or name in SHELLS or name.endswith(".py"):
            return None
    return None


def _launcher_at(words: Sequence[str], at: int, elsewhere: bool) -> tuple[str, list[str], list[str]] | None:
    """(name, its own words, the Python that runs it) of a launcher that begins there."""
    name = Path(words[at]).name
    if name in NAMES:
        python = ["python"] if elsewhere else [_interpreter(words[at])]
        words = list(words[at + 1 :])
    elif PYTHON.fullmatch(name):
        end = at + 1
        while end < len(words) and words[end].startswith("-") and words[end] not in ("-m", "-c"):
            end += 2 if words[end] in VALUE_OPTIONS else 1
        python = list(words[at:end])
        is_module = end < len(words) and words[end] == "-m"
        end += is_module
        if end >= len(words):
            return None
        name = words[end] if is_module else Path(words[end]).name
        if name not in (MODULES if is_module else NAMES):
            return None
        words = list(words[end + 1 :])
    else:
        return None
    if name in ("accelerate-launch", "accelerate.commands.launch"):
        words.insert(0, "launch")
    return name, words, python


def only_command(words: Sequence[str]) -> list[str] | None:
    """The words of `bash -c TEXT` whose text is one command without any of the shell's own syntax."""
    if len(words) < 3 or not all(re.fullmatch(r"-[a-z]*", word) for word in words[1:-1]):
        return None
    if "c" not in words[-2] or SHELL_SYNTAX & set(words[-1]):
        return None
    try:
        inner = shlex.split(words[-1])
    except ValueError:
        return None
    inner = inner[1:] if inner[:1] == ["exec"] else inner
    if inner and re.fullmatch(r"[A-Za-z_]\w*=.*", inner[0]):
        inner = ["env", *inner]
    return inner or None


def _interpreter(program: str) -> str:
    """The Python of a launcher's own script, by its first lines; `python` where they do not say."""
    path = shutil.which(program)
    try:
        with open(path or program, "rb") as file:
            first, second = (file.readline(4096).decode(errors="replace").strip() for _ in range(2))
    except OSError:
        return "python"
    for words in (first.removeprefix("#!").split(), second.removeprefix("'''exec'").split()):
        for word in words:
            if PYTHON.fullmatch(Path(word.strip("\"'")).name):
                return word.strip("\"'")
    return "python"


def is_submitit(command: Sequence[str]) -> bool:
    """`python -u -m submitit.core._submit FOLDER`, which calls the function that its user has submitted."""
    return "submitit.core._submit" in command[1:] and command[list(command).index("submitit.core._submit") - 1] == "-m"


# ---------------------------------------------------------------- what follows for the job
def count_ranks(taken: Taken, environment: Mapping[str, str], nodes: int, cpus: int, devices: int) -> int:
    """The ranks of a node. nodes: of the job; cpus, devices: of this node. Raises NotTaken."""
    text = taken.ranks
    if not text and taken.total:
        per_node, left = divmod(taken.total, max(1, nodes))
        if left:
            raise NotTaken(f"{taken.launcher} starts {taken.total} processes, which {nodes} nodes cannot share evenly")
        return per_node
    if not text:
        return 1
    if text.isdecimal() and int(text) > 0:
        return int(text)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len([device for device in visible.split(",") if device.strip()]) if visible else 0
    allocated = environment.get("SLURM_GPUS_ON_NODE", "")
    gpus = gpus or (int(allocated) if allocated.isdecimal() else 0) or devices
    if text in ("gpu", "auto") and gpus:
        return gpus
    if text in ("cpu", "auto"):
        return cpus
    if text == "gpu":
        raise NotTaken(f"{taken.launcher} starts a process for each GPU, and this node has none: write their number")
    raise NotTaken(f"{taken.launcher} starts {text!r} processes a node: write a number, gpu, cpu or auto")


def fewest_nodes(taken: Taken, elements: int, block: int, spares: int, array: bool) -> int:
    """The nodes that the launcher's world needs at least, 0 where it does not say. The job has so many elements of
    `block` nodes each. array: they come one by one; in one allocation `--nnodes 8` only repeats what sbatch was told,
    and the job may go on without a lost node. Raises NotTaken."""
    (least, most), nodes = taken.nodes, elements * block
    if most <= 1 or (array and most <= block):
        return 0  # the launchers of each node, or element, were told of it alone
    if least == most and most not in (nodes, nodes - spares):
        raise NotTaken(
            f"{taken.launcher} was told of {most} nodes, and the job has {nodes}: write --nnodes {nodes}, or leave "
            "the option out"
        )
    if least > nodes:
        raise NotTaken(f"{taken.launcher} needs {least} nodes, and the job has {nodes}: ask Slurm for more")
    least += -least % block if array else 0
    return least if array or least < most else 0


def describe(taken: Taken, ranks: int) -> str:
    """The line in the job's log that says what was taken over."""
    told = f"{taken.launcher} is left out: the agent starts {ranks} rank{'s' if ranks > 1 else ''} on each node"
    if taken.replaced:
        told += f"; Unicron has its own way of {', '.join(taken.replaced)}"
    if taken.lost:
        told += f"; nobody honours {', '.join(taken.lost)}"
    return told
