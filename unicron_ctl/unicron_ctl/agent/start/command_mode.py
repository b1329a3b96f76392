"""Chooses how a job is healed: in `session` mode, within the iteration, if its script uses `unicron.Session`; in
`restart` mode, by new processes in a new world, for any other program (docs/user-guide.md)."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unicron_ctl.agent.program_table import PROGRAMS
from unicron_ctl.shared.protocol.structs import RESTART, SESSION
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.plain_file import read_beginning

AUTO = "auto"
MODES = (AUTO, SESSION, RESTART)
MAX_BYTES = 1 << 20  # of a script's text that are read
# `import unicron`, `from unicron import Session`; not `memory`, `data` or `loggers` alone, which restart mode has
_ALONE = r"(?:memory|data|loggers)\b"
_ONE = rf"{_ALONE}[ \t]*(?:as[ \t]+\w+[ \t]*)?"
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+unicron(?:_transition)?(?!\.{_ALONE})(?:\.\w+)*[ \t]+import\b"
    rf"(?![ \t]+{_ONE}(?:,[ \t]*{_ONE})*\r?(?:#|$))"
    rf"|import[ \t]+(?:[\w.]+(?:[ \t]+as[ \t]+\w+)?[ \t]*,[ \t]*)*unicron(?:_transition)?\b(?!\.{_ALONE}))",
    re.MULTILINE,
)
# `from megatron.training import pretrain`: a program of Megatron-LM's, or made like one
_MEGATRON_LM = re.compile(
    r"^(?:from[ \t]+megatron\.training(?:\.\w+)*[ \t]+import|import[ \t]+megatron\.training)\b", re.MULTILINE
)
_PYTHON = re.compile(r"(?:^|[\s/\"'=;&|(])i?(?:python|pypy)[\d.]*t?(?=[\s\"');&|]|$)|\.(?:py|pyz|pex)\b", re.MULTILINE)
_SCRIPT = re.compile(r"(?<![\w./~+-])[\w./~+-]+\.py\b")
MOST_NAMES = 256  # of scripts in a shell's text that are looked for
MOST_SCRIPTS = 16  # of those that a shell's text names that are read
MOST_OF_HELPER = 1 << 17  # bytes of a program that only helps: parsing takes long
_PIECE = re.compile(r"[^\s;&|(){}`\"'!<>]+")  # of a shell's text
_PROGRAM = re.compile(r"[\w./+][\w./+-]{0,254}")
MOST_WORDS = 64  # of such a text
MOST_PROGRAMS = 8  # of a command's words that may name the program, after wrappers
_MONITORS = {"GPUtil", "gpustat", "nvidia_smi", "prometheus_client", "psutil", "pynvml", "requests"}
# Modules and calls by which a Python program runs another one
_RUN_MORE = {"concurrent", "ctypes", "importlib", "multiprocessing", "pty", "runpy", "subprocess"}
_RUNS_MORE = set(
    "__import__ compile eval exec execl execle execlp execv execve execvp execvpe fork popen posix_spawn posix_spawnp "
    "spawnl spawnv spawnvp system".split()
)
# Programs that a monitor may run: none of them trains, or runs another program
_MONITOR_PROGRAMS = set(
    "amd-smi cat date dcgmi df du free gpustat hostname iostat ls mpstat nvidia-smi ps rocm-smi sacct sensors sinfo "
    "squeue sstat uname uptime vmstat w who".split()
)
_SHELL_SYNTAX = re.compile(r"[;&|`$<>()\n]")
_HARMLESS = {"CalledProcessError", "DEVNULL", "PIPE", "STDOUT", "SubprocessError", "TimeoutExpired"}  # of subprocess
_ADVICE = "say --unicron-mode=session if it imports unicron"
LAUNCHER = ("-m", "unicron.transition.megatron_lm")  # before a Megatron-LM program, which it heals unmodified


@dataclass(frozen=True)
class Mode:
    """The way in which a job is healed."""

    name: str
    """session or restart."""
    reason: str
    """Why it was chosen."""
    launched: bool = False
    """The command is a program of Megatron-LM, which session mode runs by :mod:`unicron_transition.megatron_lm`."""
    text: str = field(default="", compare=False)
    """The text of its script, if that could be read."""


def asked_mode(option: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return (auto, session or restart; where the user said so). Raises UserError for anything else."""
    text, where = (option, "--mode") if option else (environment.get("UNICRON_MODE", ""), "UNICRON_MODE")
    if not text:
        return AUTO, ""
    if text not in MODES:
        raise UserError(f"{where}={text!r}: write {', '.join(MODES[:-1])} or {MODES[-1]}", WRONG_USE)
    return text, where


def choose_mode(asked: str, where: str, command: Sequence[str], folder: Path, imports: Sequence[Path]) -> Mode:
    """Return the mode of a command that runs in `folder`. imports: where its Python looks for modules first.

    auto reads the script's text and follows no imports: if another module imports `unicron`, the user says
    `--unicron-mode=session`.
    """
    name, text = _program(command, folder, imports)
    uses = text is not None and _IMPORT.search(text) is not None
    megatron_lm = text is not None and not uses and name.endswith(".py") and _MEGATRON_LM.search(text) is not None
    if asked != AUTO:
        launched = asked == SESSION and megatron_lm
        by = f", {name} by {LAUNCHER[1]}" if launched else ""
        return Mode(asked, f"{where}={asked}{by}", launched, text or "")
    if text is None:
        return Mode(RESTART, name)
    if uses:
        return Mode(SESSION, f"{name} imports unicron")
    hint = "; it is Megatron-LM's, which session mode heals within the iteration, if asked for" if megatron_lm else ""
    return Mode(RESTART, f"{name} does not import unicron{hint}", text=text)


def is_python(command: Sequence[str], text: str) -> bool:
    """Say whether the command names Python, or a program written in Python. text: what its shell runs, if any."""
    if _PYTHON.search("\n".join([*command, text])):
        return True
    words = dict.fromkeys(filter(_PROGRAM.fullmatch, _PIECE.findall(text)))  # front ends that the shell finds by PATH
    for word in (*command[:MOST_PROGRAMS], *itertools.islice(words, MOST_WORDS)):
        with contextlib.suppress(OSError), open(shutil.which(word) or os.devnull, "rb") as file:
            first = file.readline(4096)
            if first.startswith(b"#!") and b"python" in first:
                return True
    return False


def add_launcher(command: Sequence[str]) -> list[str]:
    """Return the command with :data:`LAUNCHER` in front of its script."""
    at = next(number for number, word in enumerate(command) if word.endswith(".py"))
    return [*command[:at], *LAUNCHER, *command[at:]]


def scripts_of(text: str, folder: Path) -> str:
    """Return a shell's text and the texts of the first Python scripts that it names."""
    names = list(dict.fromkeys(_SCRIPT.findall(text)))[:MOST_NAMES]
    paths = [path for path in (folder / name for name in names) if os.path.isfile(path)][:MOST_SCRIPTS]
    return "\n".join([text, *map(_read, paths)])[:MAX_BYTES]


def only_helps(text: str) -> bool:
    """Say whether this Python program surely trains nothing: it imports only Python's own modules and those of
    monitors, and runs no other programs than such as nvidia-smi."""
    if len(text) > MOST_OF_HELPER:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module if node.module and not node.level else ".")
        elif isinstance(node, ast.Call) and (called := _name_of(node)) in _RUNS_MORE:
            if called not in ("system", "popen") or not _runs_monitor(node):
                return False
    names = {name.split(".")[0] for name in imported}
    if "subprocess" in names and _only_runs_monitors(tree):
        names.discard("subprocess")
        names.add("os")
    return bool(names) and names <= (sys.stdlib_module_names | _MONITORS) - _RUN_MORE


def _name_of(call: ast.Call) -> str:
    """Return the name by which a function is called; empty without one."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _only_runs_monitors(tree: ast.Module) -> bool:
    """Say whether each use of the module subprocess runs a monitor's program, as far as the text shows."""
    nodes = list(ast.walk(tree))
    names = set[str]().union(*map(_names_of_subprocess, nodes))
    known = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _HARMLESS}
    for node in nodes:
        if isinstance(node, ast.Call) and _runs_monitor(node):
            known.add(id(node.func.value if isinstance(node.func, ast.Attribute) else node.func))
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    return "*" not in names and all(id(node) in known for node in uses)


def _names_of_subprocess(node: ast.AST) -> set[str]:
    """Return the names that an import gives to subprocess, or to its parts that may run something."""
    match node:
        case ast.Import(names=names):
            return {alias.asname or alias.name for alias in names if alias.name == "subprocess"}
        case ast.ImportFrom(module="subprocess", names=names):
            return {alias.asname or alias.name for alias in names if alias.name not in _HARMLESS}
    return set()


def _runs_monitor(call: ast.Call) -> bool:
    """Say whether the call's first argument is the command of a monitor's program."""
    if not call.args or any(keyword.arg in (None, "args", "executable", "preexec_fn") for keyword in call.keywords):
        return False
    first = call.args[0]
    if isinstance(first, ast.List | ast.Tuple) and first.elts:
        first = first.elts[0]
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str) or _SHELL_SYNTAX.search(first.value):
        return False
    return Path((first.value.split() or [""])[0]).name in _MONITOR_PROGRAMS


def _program(command: Sequence[str], folder: Path, imports: Sequence[Path]) -> tuple[str, str | None]:
    """Return (name, text) of the first Python script in the command; without a text, the name says why."""
    python = False
    for position, word in enumerate(command):
        following = command[position + 1] if position + 1 < len(command) else ""
        if python and word == "-c":
            return "the code after -c", following
        if python and word == "-":
            return f"Python reads its script from standard input: {_ADVICE}", None
        if python and word == "-m":
            if following.split(".")[0] == "unicron":
                return f"-m {following}", f"import {following}"
            path = _module(following, imports)
            return (f"-m {following}", _read(path)) if path else (f"module {following} is none of the job's own", None)
        if word.endswith(".py") and os.path.isfile(folder / word):
            return Path(word).name, _read(folder / word)
        python = python or Path(word).name.startswith("python")
    name = Path(command[0]).name if command else "no command"
    if name in (*PROGRAMS.shells.posix, *PROGRAMS.shells.others):
        return f"{name} runs what is not read here: {_ADVICE}", None
    return f"{name} is no Python script" if command else name, None


def _module(name: str, imports: Sequence[Path]) -> Path | None:
    """Return the file that `python -m NAME` runs, found without importing anything."""
    inner = "/".join(name.split("."))
    paths = (folder / path for folder in imports for path in (f"{inner}/__main__.py", f"{inner}.py"))
    return next((path for path in paths if os.path.isfile(path)), None)


def _read(path: Path) -> str:
    try:
        return read_beginning(path, MAX_BYTES)
    except OSError:
        return ""
