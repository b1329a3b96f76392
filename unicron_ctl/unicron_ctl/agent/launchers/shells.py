"""Runs shell scripts that call a launcher: once on each node, and the launcher's name in them means the agent.

`bash run.sh` may compute the options of its `torchrun ... train.py`, prepare data before and clean up afterwards, so
only the shell knows the launcher's words. A folder at the front of PATH has the launchers' names, and so have functions
of bash for scripts that change PATH; both start the agent with the launcher's own words.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unicron_ctl.agent.connections.job_environment import LAUNCH
from unicron_ctl.agent.launchers.commands import (
    ELSEWHERE,
    NOT_FOR_RANKS,
    SHELLS,
    WRAPPERS,
    LauncherStays,
    find_launcher,
    only_command,
    takes_value,
)
from unicron_ctl.agent.program_table import MODULES, NAMES, PROGRAMS
from unicron_ctl.shared.system.plain_file import read_beginning

FOLDER = "_UNICRON_LAUNCHERS"  # the folder at the front of PATH, for the agent that is started from it
PYTHONS = ("python", "python3")
MOST_BYTES = 1 << 16  # of a script that are read
MOST_SCRIPTS = 8  # of those that a container's command names that are read
_PIECE = re.compile(r"\s+|[;&|(){}`\"'!<>=]|[^\s;&|(){}`\"'!<>=]+")
_SIGNS = set(";&|(){}`\"'!<>=")
_BEGINS = _SIGNS - set("<>=")  # signs after which a command may begin, also in a quoted text
_KEYWORD = re.compile(r"\b(?:then|do|else|exec|time|if|while|until|eval)$")
_BEHIND = {"exec", *WRAPPERS}
_SETTING = re.compile(r"[A-Za-z_]\w*")
_BY_ANY_NAME = re.compile(rf"(?<![\w/-])(?:{'|'.join(re.escape(name) for name in sorted(NAMES))})$")
_RUNS_ELSEWHERE = {"exec", "run", "ch-run", "shifter"}
_PYTHON_BY_PATH = re.compile(r"/python[\d.]*$")
OWN_RANKS, OWN_MODULES = PROGRAMS.own_ranks, PROGRAMS.own_modules
# The command that starts a container
_CONTAINER = re.compile(
    rf"""(?<![\w.-])(?:{"|".join(sorted(PROGRAMS.wrappers.containers))})\s(?:"[^"]*"|'[^']*'|[^;&|\n"'])*"""
)
_CHANGES_PATH = re.compile(r"activate\b|\bmodule\s+(?:load|add)\b|\bPATH=", re.MULTILINE)
OTHER_SHELLS = PROGRAMS.shells.others
_OTHER_SHELL = re.compile(rf"\b(?:{'|'.join(OTHER_SHELLS)})\b")
_ANY_SHELL = re.compile(rf"\b(?:{'|'.join((*SHELLS, *OTHER_SHELLS))})\b")
_RUNS_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*]")

_SHIM = """#!/bin/sh
exec {python} -I -m unicron_ctl.agent.start.entry run -- {name} "$@"
"""
_PYTHON_SHIM = """#!/bin/sh
# The agent in front of a launcher that is a module; else the next {name} of PATH.
before=
for word in "$@"; do
    if [ "$before" = -m ]; then
        case $word in {modules}) exec {python} -I -m unicron_ctl.agent.start.entry run -- {name} "$@";; esac
        break
    fi
    case $word in
        -*) before=$word;;
        *.py)
            if [ "${{SLURM_NODEID:-0}}" = 0 ] && [ ! -e {folder}/told ]; then
                : > {folder}/told
                echo "unicron: {name} $word runs as it is, unprotected; only the script's launcher is protected" >&2
            fi
            break;;
        *) break;;
    esac
done
rest=$PATH:
PATH=
while [ -n "$rest" ]; do
    part=${{rest%%:*}}
    rest=${{rest#*:}}
    [ "$part" = {folder} ] || PATH=$PATH${{PATH:+:}}$part
done
export PATH
exec {name} "$@"
"""


def launches(command: Sequence[str]) -> bool:
    """Say whether the command is a shell like sh, perhaps after wrappers, whose text names a launcher. Raises
    LauncherStays if the shell would find the launcher without asking PATH."""
    text = shell_text(command)
    if of_another_shell(command):
        return False
    if text is not None and _RUNS_ARGUMENTS.search(text):
        starts = [at for at in range(1, len(command)) if Path(command[at]).name.startswith((*NAMES, "python"))]
        starts = starts[:MOST_SCRIPTS]
        words = next((command[at:] for at in starts if find_launcher(command[at:]) is not None), [])
        text = f"{text}\nexec {shlex.join(words)}"
    text = _CONTAINER.sub(" ", text or "")  # no agent is in a container
    named = read_names(text)
    if not (named.launcher or named.by_path):
        return False
    how = "its shell script starts the ranks by a launcher"
    advice = "write `srun torchrun ...` or `srun python train.py` in the batch script"
    if named.by_path:
        if only_command(command) is not None:
            return False  # read_launcher handles it
        raise LauncherStays(f"{how} that is named by its path: name it without a path, or {advice}")
    if named.by_no_function and _CHANGES_PATH.search(text):
        raise LauncherStays(f"{how} behind exec or a wrapper after PATH was changed: {advice}")
    return True


@dataclass
class ShellNames:
    """The launchers that a shell's text names, and programs like them."""

    launcher: str = ""
    """The first launcher that begins a command or that a wrapper runs."""
    own_ranks: str = ""
    """The first program that starts ranks by itself."""
    by_path: bool = False
    """A launcher is named by its path."""
    by_no_function: bool = False
    """A launcher follows exec or a wrapper, which call no shell functions."""

    def add_word(self, here: _Position, word: str, before: str) -> None:
        """Note the launchers that a word at this position names."""
        runs, module = here.runs(before), here.module and word in MODULES
        _, slash, name = word.rpartition("/")
        if (module and not here.elsewhere) or (word in NAMES and runs):
            self.launcher = self.launcher or word
        self.own_ranks = self.own_ranks or here.own_ranks(word, before, module)
        self.by_path = self.by_path or bool(slash and name in NAMES) or (module and here.by_path)
        if here.unasked and (module or _BY_ANY_NAME.search(word)):
            self.by_no_function = True


@dataclass
class _Position:
    """The position of the next piece of a text within its command."""

    begins: bool = True
    """A command may begin here."""
    wrapped: bool = False
    """After a wrapper with which a command began."""
    unasked: bool = False
    """After any wrapper."""
    other: bool = False
    """After a program that may run another environment's program."""
    elsewhere: bool = False
    """After such a program and the word that makes it do so."""
    value_follows: bool = False
    """After an option of such a program."""
    by_path: bool = False
    """After a Python with a path."""
    module: bool = False
    """After -m."""
    setting: bool = False
    """After a name before =."""
    value: bool = False
    """In the value of a setting."""
    program: str = ""
    """The previous piece, if it is one of OWN_RANKS that starts ranks with some commands only."""

    def runs(self, before: str) -> bool:
        """Say whether a word here is a command, by itself or after a wrapper."""
        return self.begins or (self.wrapped and before.isspace())

    def own_program(self, word: str, before: str) -> str:
        """Return the program of OWN_RANKS that a word here names."""
        if self.module and before.isspace():
            return OWN_MODULES.get(word, word if word in OWN_RANKS else "")
        name = word.rpartition("/")[2]
        return name if name in OWN_RANKS and (self.runs(before) or self.runs_elsewhere()) else ""

    def own_ranks(self, word: str, before: str, is_launcher: bool) -> str:
        """Return the program that starts ranks by itself, with its command, if a word here names one. is_launcher: the
        word is a launcher's module."""
        program, name = self.own_program(word, before), word.rpartition("/")[2]
        if self.program and word in OWN_RANKS[self.program]:
            return f"{self.program} {word}"
        if OWN_RANKS.get(program) == ():
            return program
        inside = self.runs_elsewhere() and name in NAMES and not self.runs(before)
        return name if inside or (self.elsewhere and is_launcher) else ""

    def runs_elsewhere(self) -> bool:
        """Say whether a word here may be a program that runs in another environment."""
        return self.elsewhere and not self.value_follows

    def pass_blanks(self, blanks: str, before: str) -> None:
        line = "\n" in blanks
        self.begins = self.begins or self.value or line or _KEYWORD.search(before) is not None
        self.module, self.setting, self.value = before.endswith("-m"), False, False
        if line:
            self.program = ""
            self.wrapped = self.unasked = self.other = self.elsewhere = self.by_path = False

    def pass_sign(self, sign: str) -> None:
        self.begins = sign in _BEGINS or (sign == "=" and self.setting)
        self.program = ""
        self.module = self.setting = False
        self.wrapped = self.wrapped and sign not in ";&|\"'"
        self.unasked = self.unasked and sign not in ";&|"
        self.other = self.other and sign not in ";&|"
        self.elsewhere = self.elsewhere and self.other
        self.by_path = self.by_path and sign not in ";&|"

    def pass_word(self, word: str, before: str, after: str) -> None:
        alone = after[:1].isspace()
        self.setting = after == "=" and _SETTING.fullmatch(word) is not None
        self.value = self.value or (self.setting and self.begins)
        self.setting = self.setting and before.isspace()
        self.wrapped = self.wrapped or (alone and self.begins and word in _BEHIND)
        self.unasked = self.unasked or (alone and word in _BEHIND)
        self.by_path = self.by_path or (alone and _PYTHON_BY_PATH.search(word) is not None)
        self.program = self.own_program(word, before)
        name = word.rpartition("/")[2]
        ended = self.elsewhere and word.endswith(".py")  # what follows are its arguments
        self.other = (self.other or (name in ELSEWHERE and self.runs(before))) and not ended
        self.elsewhere = self.other and (self.elsewhere or name in _RUNS_ELSEWHERE)
        self.value_follows = takes_value(word) and alone
        self.begins = self.module = False


def read_names(text: str) -> ShellNames:
    """Return the names in the text; each of its pieces is read once."""
    names, here = ShellNames(), _Position()
    pieces = _PIECE.findall(text)
    for before, piece, after in zip(["\n", *pieces], pieces, [*pieces[1:], "\n"], strict=False):
        if piece.isspace():
            here.pass_blanks(piece, before)
        elif piece in _SIGNS:
            here.pass_sign(piece)
        else:
            if after not in ("=", "!"):
                names.add_word(here, piece, before)
            here.pass_word(piece, before, after)
    return names


def starts_own_ranks(command: Sequence[str]) -> str:
    """Return the job's log line about a program that starts the ranks of its node by itself; empty without one."""
    text = shell_text(command)
    names = read_names(shlex.join(command) if text is None else text)
    name = names.own_ranks or (names.launcher if of_another_shell(command) else "")
    if not name:
        return ""
    return (
        f"{name} starts the ranks of a node by itself, so Unicron restarts whole nodes: to have each rank healed, "
        "write `srun torchrun ...` with the script that it runs"
    )


def kept_in_container(command: Sequence[str]) -> str:
    """Return the job's log line about a launcher that stays because it runs in a shell inside a container, or in a
    container inside a shell; empty without one."""
    text = shell_text(command)
    for segment in _CONTAINER.findall(shlex.join(command) if text is None else text):
        try:
            words = shlex.split(segment)
        except ValueError:
            continue
        container = Path(words[0]).name
        if launcher := _launcher_within(segment, words):
            advice = "python train.py" if container in NOT_FOR_RANKS else f"{launcher} ..."
            return (
                f"{launcher} runs inside the container, so Unicron restarts whole nodes: write `srun {container} ... "
                f"{advice}`, without a shell around it or in it"
            )
    return ""


def _launcher_within(segment: str, words: Sequence[str]) -> str:
    """Return the name of the launcher in a container's command, or in a script that this command names."""
    scripts = list(dict.fromkeys(word for word in words if word.endswith(".sh")))[:MOST_SCRIPTS]
    for text in (segment, *(_script(word, own=False) or "" for word in scripts)):
        if named := read_names(text).launcher:
            return named
    try:
        found = find_launcher(words)
    except LauncherStays:
        return "the launcher"
    return found.name if found is not None else ""


def shell_text(command: Sequence[str]) -> str | None:
    """Return the text that a shell would run, without comments; None if the command is no shell. Raises LauncherStays
    for a shell that reads its standard input, which could not be read again."""
    words = _behind_wrappers(command)
    if not words:
        return None
    if Path(words[0]).name not in (*SHELLS, *OTHER_SHELLS):
        return _script(words[0], own=True) if "/" in words[0] or words[0].endswith(".sh") else None
    letters, words = _split_shell_options(words[1:])
    if words and "c" in letters:
        return _without_comments(words[0][:MOST_BYTES])
    if words and "s" not in letters:
        return _script(words[0], own=False)
    raise LauncherStays("its shell reads from standard input what to run: write that to a file, and `srun bash FILE`")


def of_another_shell(command: Sequence[str]) -> bool:
    """Say whether the command's shell is one, such as csh, in which nothing can replace a launcher."""
    words = _behind_wrappers(command)
    if words and Path(words[0]).name in OTHER_SHELLS:
        return True
    text = _read_text(words[0]) if words and "/" in words[0] else None
    first = (text or "").partition("\n")[0]
    return first.startswith("#!") and _OTHER_SHELL.search(first) is not None


def _behind_wrappers(command: Sequence[str]) -> list[str]:
    """Return the command without wrappers before it that run each rank."""
    at, last = 0, len(command) - 1
    while at < last and Path(command[at]).name in WRAPPERS:
        at += 1
        while at < last and (command[at].startswith("-") or "=" in command[at] or command[at][:1].isdecimal()):
            at += 1
    return list(command[at:])


def _split_shell_options(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the letters of a shell's options, and the words after the options and their values."""
    letters, waiting = "", list(words)
    while waiting and waiting[0][:1] in ("-", "+") and "s" not in letters:
        option = waiting.pop(0)
        if option in ("-", "--"):
            break
        long = option.startswith("--")
        letters += "" if long else option[1:]
        values = option in ("--rcfile", "--init-file") if long else option.count("o") + option.count("O")
        del waiting[:values]
    return letters, waiting


def _read_text(path: str) -> str | None:
    """Return the beginning of a file; None if it cannot be read."""
    try:
        return read_beginning(path, MOST_BYTES)
    except OSError:
        return None


def _script(path: str, own: bool) -> str | None:
    """Return the text of a shell script. own: it is executed itself, so its first line must name a shell."""
    text = _read_text(path)
    first = (text or "").partition("\n")[0]
    if text is None or "\0" in text or (own and not (first.startswith("#!") and _ANY_SHELL.search(first))):
        return None
    return _without_comments(text)


def _without_comments(text: str) -> str:
    """Return the text without comment lines, each continued line as one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


@contextmanager
def meaning_the_agent(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment of a shell in which the launchers' names mean the agent."""
    with tempfile.TemporaryDirectory(prefix="unicron-launchers-") as folder:
        changed = {"PATH": f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}", FOLDER: folder}
        for name in (*sorted(NAMES), *PYTHONS):
            shim = _PYTHON_SHIM if name in PYTHONS else _SHIM
            path = Path(folder, name)
            path.write_text(
                shim.format(name=name, python=shlex.quote(sys.executable), folder=folder, modules="|".join(MODULES))
            )
            path.chmod(0o700)
            changed[f"BASH_FUNC_{name}%%"] = f'() {{ {shlex.quote(str(path))} "$@"; }}'
        yield {**environment, **changed}


def count_launch(environment: Mapping[str, str]) -> str:
    """Return the number of this launch among those of the same shell, from 0. They come one after the other."""
    try:
        with open(Path(environment[FOLDER], "count"), "ab") as file:
            file.write(b".")
            return str(file.tell() - 1)
    except OSError:  # the shell has ended before this launch
        return "0"


def leave_shell(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command in such a shell as the user's script has it."""
    folder = environment.get(FOLDER)
    if folder is None:
        return dict(environment)
    environment = {**environment, LAUNCH: count_launch(environment)}
    path = os.pathsep.join(part for part in environment.get("PATH", "").split(os.pathsep) if part != folder)
    names = {FOLDER, *(f"BASH_FUNC_{name}%%" for name in (*NAMES, *PYTHONS))}
    return {name: value for name, value in environment.items() if name not in names} | {"PATH": path}
