"""Shell scripts that run a launcher: the script runs as it is, once on the node, and the launcher's name in it means
the agent.

`bash run.sh` with `torchrun ... train.py` in it may compute the launcher's options, prepare data before and clean up
afterwards, so only the shell can say what the launcher is told. A folder at the front of PATH, and functions of bash
for scripts that change PATH, have the launchers' names. So the agent gets the launcher's own words.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from unicron.ctl.agent.connections.job_environment import LAUNCH
from unicron.ctl.agent.launchers.commands import (
    CONTAINERS,
    MODULES,
    NAMES,
    NOT_FOR_RANKS,
    SHELLS,
    WRAPPERS,
    NotTaken,
    find_launcher,
    only_command,
)

FOLDER = "_UNICRON_LAUNCHERS"  # the folder at the front of PATH, for the agent that is started from it
PYTHONS = ("python", "python3")
MOST_BYTES = 1 << 16  # that are read of a script
_NAME = "|".join(re.escape(name) for name in sorted(NAMES))
_MODULE = "|".join(re.escape(name) for name in sorted(MODULES))
_WORD_START, _WORD_END = r"(?:^|[\s;&|()<>\"'`={}])", r"(?=$|[\s;&|()<>\"'`{}])"
_BEHIND = "|".join(sorted({"exec", *WRAPPERS}))
# Where a command may begin: also in a quoted text, and in the value of a variable.
_BEGIN = r"(?:^|[;&|(){}`\"'!]|\b(?:then|do|else|exec|time|if|while|until|eval)\s|(?:^|\s)[A-Za-z_]\w*=)\s*"
_BEGIN += rf"(?:[A-Za-z_]\w*=\S*\s+)*(?:(?:{_BEHIND})\s[^;&|\"'\n]*?(?<=\s))?"
_LAUNCHER = re.compile(rf"{_BEGIN}(?:{_NAME}){_WORD_END}|-m\s+(?:{_MODULE}){_WORD_END}", re.MULTILINE)
# Programs that start the ranks of their node by themselves, as a rule by torchrun or its API: name, and what follows it
# (docs/behaviour/front_ends.toml). The agent does not read what they are told.
OWN_RANKS = {
    "ft_launcher": "",
    "tune": r"\s+run",
    "llamafactory-cli": r"\s+train",
    "lmf": r"\s+train",
    "swift": r"\s+(?:pt|sft|rlhf|infer)",
    "megatron": r"\s+(?:pt|sft|rlhf)",
    "axolotl": r"\s+train",
    "oumi": r"\s+distributed",
    "torchx": r"\s+run",
}
_OWN = "|".join(f"{re.escape(name)}{then}" for name, then in OWN_RANKS.items())
_OWN_RANKS = re.compile(rf"{_BEGIN}(?:\S*/)?({_OWN}){_WORD_END}", re.MULTILINE)
_NAMED = re.compile(rf"(?:{_NAME}|{_MODULE}){_WORD_END}")
# What a container is given to run, to the end of the command.
_CONTAINER = re.compile(rf"""(?<![\w.-])(?:{"|".join(sorted(CONTAINERS))})\s(?:"[^"]*"|'[^']*'|[^;&|\n"'])*""")
_BY_PATH = re.compile(rf"/(?:{_NAME}){_WORD_END}|/python[\d.]*\s[^;&|\n]*-m\s+(?:{_MODULE}){_WORD_END}", re.MULTILINE)
_CHANGES_PATH = re.compile(r"activate\b|\bmodule\s+(?:load|add)\b|\bPATH=", re.MULTILINE)
_RUNS_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*]")
_NOT_BY_FUNCTION = re.compile(
    rf"{_WORD_START}(?:{_BEHIND})\s[^;&|\n]*?(?:(?<![\w/-])(?:{_NAME}){_WORD_END}|-m\s+(?:{_MODULE}){_WORD_END})",
    re.MULTILINE,
)

_SHIM = """#!/bin/sh
exec {python} -I -m unicron.ctl.agent.start.entry run -- {name} "$@"
"""
_PYTHON_SHIM = """#!/bin/sh
# The agent in front of a launcher that is a module; else the next {name} of PATH.
before=
for word in "$@"; do
    if [ "$before" = -m ]; then
        case $word in {modules}) exec {python} -I -m unicron.ctl.agent.start.entry run -- {name} "$@";; esac
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
    """Whether the command is a shell, perhaps behind wrappers, whose text names a launcher. Raises NotTaken for one
    that would find the launcher without asking PATH."""
    text = shell_text(command)
    if text is not None and _RUNS_ARGUMENTS.search(text):
        starts = [at for at in range(1, len(command)) if Path(command[at]).name.startswith((*NAMES, "python"))]
        words = next((command[at:] for at in starts if find_launcher(command[at:]) is not None), [])
        text = f"{text}\nexec {shlex.join(words)}"
    text = _CONTAINER.sub(" ", text or "")  # no agent is there
    if not (_LAUNCHER.search(text) or _BY_PATH.search(text)):
        return False
    how = "its shell script starts the ranks by a launcher"
    told = "write `srun torchrun ...` or `srun python train.py` in the batch script"
    if _BY_PATH.search(text) and only_command(command) is None:  # else take_over sees it
        raise NotTaken(f"{how} that is named by its path: name it without a path, or {told}")
    if _BY_PATH.search(text):
        return False
    if _CHANGES_PATH.search(text) and _NOT_BY_FUNCTION.search(text):
        raise NotTaken(f"{how} behind exec or a wrapper after PATH was changed: {told}")
    return True


def starts_own_ranks(command: Sequence[str]) -> str:
    """What the job's log says of a program that starts the ranks of its node by itself; empty for another one."""
    text = shell_text(command)
    found = _OWN_RANKS.search(shlex.join(command) if text is None else text)
    if found is None:
        return ""
    name = " ".join(found[1].split())
    told = f"{name} starts the ranks of a node by itself, so Unicron restarts whole nodes"
    return f"{told}: to have each rank healed, write `srun torchrun ...` with the script that it runs"


def kept_in_container(command: Sequence[str]) -> str:
    """What the job's log says of a launcher that stays, for it runs in a shell inside a container, or in a container
    inside a shell. Empty where there is none."""
    text = shell_text(command)
    for segment in _CONTAINER.findall(shlex.join(command) if text is None else text):
        try:
            words = shlex.split(segment)
        except ValueError:
            continue
        container = Path(words[0]).name
        launcher = _launcher_within(segment, words)
        if launcher:
            write = "python train.py" if container in NOT_FOR_RANKS else f"{launcher} ..."
            told = f"{launcher} runs inside the container, so Unicron restarts whole nodes"
            return f"{told}: write `srun {container} ... {write}`, without a shell around it or in it"
    return ""


def _launcher_within(segment: str, words: Sequence[str]) -> str:
    """The name of the launcher that these words of a container's start name, or its script does."""
    texts = [segment, *(_script(word, own=False) or "" for word in words if word.endswith(".sh"))]
    begun = next(filter(None, map(_LAUNCHER.search, texts)), None)
    if begun is not None:
        return str(_NAMED.findall(begun[0])[-1])
    try:
        found = find_launcher(words)
    except NotTaken:
        return "the launcher"
    return found.name if found is not None else ""


def shell_text(command: Sequence[str]) -> str | None:
    """The text that a shell would run, without comments; None for a command that is no shell's. Raises NotTaken for a
    shell that reads it from its standard input, which it cannot read again."""
    words = list(command)
    while len(words) > 1 and Path(words[0]).name in WRAPPERS:
        del words[0]
        while len(words) > 1 and (words[0].startswith("-") or "=" in words[0] or words[0][:1].isdigit()):
            del words[0]
    if not words:
        return None
    if Path(words[0]).name not in SHELLS:
        return _script(words[0], own=True) if "/" in words[0] or words[0].endswith(".sh") else None
    del words[0]
    letters = ""
    while words and words[0][:1] in ("-", "+") and "s" not in letters:
        option = words.pop(0)
        if option in ("-", "--"):
            break
        long = option.startswith("--")
        letters += "" if long else option[1:]
        values = option in ("--rcfile", "--init-file") if long else option.count("o") + option.count("O")
        del words[:values]
    if words and "c" in letters:
        return _without_comments(words[0])
    if words and "s" not in letters:
        return _script(words[0], own=False)
    raise NotTaken("its shell reads from standard input what to run: write that to a file, and `srun bash FILE`")


def _script(path: str, own: bool) -> str | None:
    """The text of a shell script. own: it is executed by itself, so that its first line says whose it is."""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    first = text.partition("\n")[0]
    if "\0" in text or (own and not re.search(rf"\b(?:{'|'.join(SHELLS)})\b", first if first[:2] == "#!" else "")):
        return None
    return _without_comments(text)


def _without_comments(text: str) -> str:
    """The text without lines that are comments, each continued line as one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


@contextmanager
def meaning_the_agent(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """An environment of a shell in which the launchers' names mean the agent."""
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
    """The number of this launch among those of the same shell, from 0. The shell's own launches come one after the
    other."""
    try:
        with open(Path(environment[FOLDER], "count"), "ab") as file:
            file.write(b".")
            return str(file.tell() - 1)
    except OSError:  # the shell has ended, and left this one behind
        return "0"


def leave_shell(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command in such a shell, as the user's script has it."""
    folder = environment.get(FOLDER)
    if folder is None:
        return dict(environment)
    environment = {**environment, LAUNCH: count_launch(environment)}
    path = os.pathsep.join(part for part in environment.get("PATH", "").split(os.pathsep) if part != folder)
    names = {FOLDER, *(f"BASH_FUNC_{name}%%" for name in (*NAMES, *PYTHONS))}
    return {name: value for name, value in environment.items() if name not in names} | {"PATH": path}
