"""A launcher in a command: where it stands, and in which Python it would run."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unicron_ctl.agent.ranks.warm_commands import ELSEWHERE

PYTHON = re.compile(r"python[\d.]*t?")
SHELLS = ("ash", "bash", "dash", "ksh", "sh", "zsh")
# Programs that run the command in their arguments, and may stand in front of each rank.
WRAPPERS = {"chrt", "env", "ionice", "linux32", "linux64", "nice", "nohup", "numactl", "prlimit", "setarch", "setpriv"}
WRAPPERS |= {"setsid", "stdbuf", "taskset", "time", "timeout"}
# Programs that watch one process, or hide the environment from it.
NOT_FOR_RANKS = {"compute-sanitizer", "cuda-gdb", "docker", "enroot", "gdb", "ltrace", "ncu", "nsys", "perf", "podman"}
NOT_FOR_RANKS |= {"podman-hpc", "rocprof", "sarus", "script", "strace", "sudo", "unbuffer", "valgrind", "xargs"}
CONTAINERS = {"apptainer", "ch-run", "docker", "enroot", "podman", "podman-hpc", "sarus", "shifter", "singularity"}
# Launchers that the agent does not replace. (slurm_plugin/spank/command.c has all of them, too.)
OTHERS = {"aprun", "colossalai", "composer", "horovodrun", "jsrun", "prun"}
# Debian's alternatives have these ends: openmpi-bin 4.1.4, mpich 4.0.2
MPI = tuple(f"{name}{end}" for name in ("mpirun", "mpiexec") for end in ("", ".hydra", ".mpich", ".openmpi"))
SHELL_SYNTAX = set("$`;&|<>(){}*?[]~#!\n\\")
# Options without a value, of programs that run a command in another environment (docs/behaviour/front-ends.toml)
_FLAG = re.compile(
    r"-[qvsgU]+|--(?:no-(?!extra$|group$|.*-package$).*|all-.*|active|dev|exact|frozen|isolated|live-stream|locked"
    r"|managed-python|offline|only-dev|quiet|recreate|refresh|reinstall|site-packages|system|upgrade|verbose)?"
)
VALUE_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")  # of Python, which take the next word
# The launchers that the agent replaces: kind -> names of programs, modules behind `python -m`. readers.py reads each.
LAUNCHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": (("torchrun",), ("torch.distributed.run", "torch.distributed.elastic")),
    "torch launch": ((), ("torch.distributed.launch",)),
    "accelerate": (
        ("accelerate", "accelerate-launch"),
        ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    ),
    "deepspeed": (("deepspeed", "ds", "deepspeed.pt"), ("deepspeed.launcher.runner",)),
    "fabric": (("fabric",), ()),
    "mpi": ((*MPI, "orterun", "prterun"), ()),
}
KINDS = {word: kind for kind, (names, modules) in LAUNCHERS.items() for word in (*names, *modules)}
NAMES = frozenset({*OTHERS, *(name for names, _ in LAUNCHERS.values() for name in names)})
MODULES = frozenset(module for _, modules in LAUNCHERS.values() for module in modules)


class NotTaken(Exception):
    """The command cannot run without its launcher; the text says why, and what to write."""


@dataclass(frozen=True)
class Found:
    """A launcher within a command: its words, the Python that would run it, and the words in front of it."""

    name: str
    prefix: list[str]
    words: list[str]
    python: list[str]
    environment: dict[str, str]


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
        if name in SHELLS and (inner := only_command(words[at:])) is not None:
            words[at:] = inner
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
        if elsewhere and takes_value(words[at - 1]):
            continue
        if name in WRAPPERS | ELSEWHERE | NOT_FOR_RANKS and not words[at - 1].startswith("-"):
            return at
        if _launcher_at(words, at, elsewhere) is not None:
            return at
        if name in SHELLS and words[at + 1 : at + 2] == ["-c"] and only_command(words[at:]) is not None:
            return at
        if PYTHON.fullmatch(name) or name in SHELLS or name.endswith(".py"):
            return None
    return None


def takes_value(option: str) -> bool:
    """Whether the next word is the value of this one, as `deepspeed` in `conda run -n deepspeed python train.py`. An
    option that nobody knows does: a value for a launcher would break the command."""
    return option.startswith("-") and "=" not in option and not _FLAG.fullmatch(option)


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
