"""Finds the launcher in a command, and the Python that would run it."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unicron_ctl.agent.program_table import MODULES, NAMES, PROGRAMS
from unicron_ctl.agent.ranks.warm_commands import PYTHON, VALUE_OPTIONS

SHELLS = PROGRAMS.shells.posix
WRAPPERS = PROGRAMS.wrappers.of_a_rank
ELSEWHERE = PROGRAMS.wrappers.elsewhere
NOT_FOR_RANKS = PROGRAMS.wrappers.of_one_process
SHELL_SYNTAX = set("$`;&|<>(){}*?[]~#!\n\\")
# Options without a value, of programs that run a command in another environment (docs/behaviour/front-ends.toml)
_FLAG = re.compile(
    r"-[qvsgU]+|--(?:no-(?!extra$|group$|.*-package$).*|all-.*|active|dev|exact|frozen|isolated|live-stream|locked"
    r"|managed-python|offline|only-dev|quiet|recreate|refresh|reinstall|site-packages|system|upgrade|verbose)?"
)


class LauncherStays(Exception):
    """Raised if the command needs its launcher. The message says why, and what to write instead."""


@dataclass(frozen=True)
class LauncherCommand:
    """A launcher within a command."""

    name: str
    """The launcher, as the command names it."""
    prefix: list[str]
    """Words before it."""
    words: list[str]
    """Words after it: its arguments."""
    python: list[str]
    """The Python that would run it."""
    environment: dict[str, str]
    """Variables that an `env` before it sets."""


def find_launcher(command: Sequence[str]) -> LauncherCommand | None:
    """Return the launcher that the command runs, directly or through wrappers. Raises LauncherStays if a wrapper cannot
    run each rank."""
    words, environment = _without_env(list(command))
    at, elsewhere = 0, False
    while at < len(words):
        name = Path(words[at]).name
        if (launcher := _launcher_at(words, at, elsewhere)) is not None:
            name, rest, python = launcher
            return LauncherCommand(name, words[:at], rest, python, environment)
        if name in SHELLS and (inner := only_command(words[at:])) is not None:
            inner, variables = _without_env(inner) if at == 0 else (inner, {})
            words[at:], environment = inner, environment | variables
            continue
        if name not in WRAPPERS | ELSEWHERE | NOT_FOR_RANKS:
            return None
        following = _next_program(words, at + 1, name in ELSEWHERE)
        if following is None:
            return None
        if name in NOT_FOR_RANKS:
            if _launcher_at(words, following, True) is not None:
                raise LauncherStays(f"its launcher stands behind {name}: write `srun {name} ... python train.py`")
            return None
        at, elsewhere = following, elsewhere or name in ELSEWHERE
    return None


def _without_env(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command after `env A=1`, and the variables. An `env` with options is kept, for each rank."""
    environment: dict[str, str] = {}
    while words and Path(words[0]).name == "env":
        settings = list(itertools.takewhile(re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL).fullmatch, words[1:]))
        rest = words[1 + len(settings) :]
        if not rest or rest[0].startswith("-"):
            break
        environment |= {name: value for name, _, value in (text.partition("=") for text in settings)}
        words = rest
    return words, environment


def _next_program(words: Sequence[str], start: int, elsewhere: bool) -> int | None:
    """Return the index of the launcher or wrapper that a wrapper runs; None for anything else."""
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
    """Say whether the next word is this option's value, as after `-n` in `conda run -n deepspeed python train.py`.
    An unknown option is assumed to have one: to mistake a value for a launcher would break the command."""
    return option.startswith("-") and "=" not in option and not _FLAG.fullmatch(option)


def _launcher_at(words: Sequence[str], at: int, elsewhere: bool) -> tuple[str, list[str], list[str]] | None:
    """Return (name, arguments, Python that runs it) of the launcher at this index, if there is one."""
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
    """Return the words of TEXT in `bash -c TEXT`; None unless it is a single command without shell syntax."""
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
    """Return the Python that the first lines of a launcher's script name; `python` if they name none."""
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
    """Say whether this is `python -u -m submitit.core._submit FOLDER`, which calls a submitted function."""
    return "submitit.core._submit" in command[1:] and command[list(command).index("submitit.core._submit") - 1] == "-m"
