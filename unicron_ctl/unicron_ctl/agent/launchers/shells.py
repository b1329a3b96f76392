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
from dataclasses import dataclass
from pathlib import Path

from unicron_ctl.agent.connections.job_environment import LAUNCH
from unicron_ctl.agent.launchers.commands import (
    CONTAINERS,
    MODULES,
    NAMES,
    NOT_FOR_RANKS,
    SHELLS,
    WRAPPERS,
    NotTaken,
    find_launcher,
    only_command,
    takes_value,
)
from unicron_ctl.agent.ranks.warm_commands import ELSEWHERE
from unicron_ctl.shared.system.plain_file import read_beginning

FOLDER = "_UNICRON_LAUNCHERS"  # the folder at the front of PATH, for the agent that is started from it
PYTHONS = ("python", "python3")
MOST_BYTES = 1 << 16  # that are read of a script
MOST_SCRIPTS = 8  # that are read of those that a container's start names
_PIECE = re.compile(r"\s+|[;&|(){}`\"'!<>=]|[^\s;&|(){}`\"'!<>=]+")
_SIGNS = set(";&|(){}`\"'!<>=")
_BEGINS = _SIGNS - set("<>=")  # behind which a command may begin: also in a quoted text
_KEYWORD = re.compile(r"\b(?:then|do|else|exec|time|if|while|until|eval)$")
_BEHIND = {"exec", *WRAPPERS}
_SETTING = re.compile(r"[A-Za-z_]\w*")
_BY_ANY_NAME = re.compile(rf"(?<![\w/-])(?:{'|'.join(re.escape(name) for name in sorted(NAMES))})$")
_RUNS_ELSEWHERE = {"exec", "run", "ch-run", "shifter"}
_PYTHON_BY_PATH = re.compile(r"/python[\d.]*$")
# Programs that start the ranks of their node by themselves, as a rule by torchrun or its API, and what follows the name
# where only some of its commands do (docs/behaviour/front-ends.toml). The agent does not read what they are told.
OWN_RANKS: dict[str, tuple[str, ...]] = {
    "ft_launcher": (),
    "tune": ("run",),
    "llamafactory-cli": ("train", "sft", "dpo", "rm"),
    "lmf": ("train", "sft", "dpo", "rm"),
    "swift": ("pt", "sft", "rlhf", "infer"),
    "megatron": ("pt", "sft", "rlhf"),
    "axolotl": ("train", "evaluate", "inference", "merge-sharded-fsdp-weights"),
    "oumi": ("distributed",),
    "torchx": ("run",),
    "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo", "distillation"),
    "xtuner": ("train", "test"),
    "mim": ("train", "test", "gridsearch"),
    "autotrain": ("llm", "--config"),
    "ray": ("start", "symmetric-run"),
    "composer": (),
    "verl.trainer.main_ppo": (),
    "verl.trainer.sft_trainer_ray": (),
    "openrlhf.cli.train_ppo_ray": (),
    "areal.infra.launcher.local": (),
    "areal.infra.launcher.ray": (),
    "determined.launch.torch_distributed": (),
    "determined.launch.deepspeed": (),
    "determined.launch.horovod": (),
}
# The module behind `python -m` -> the program that it is.
OWN_MODULES = {
    "nvidia_resiliency_ext.fault_tolerance.launcher": "ft_launcher",
    "torchtune._cli.tune": "tune",
    "llamafactory.cli": "llamafactory-cli",
    "swift.cli.main": "swift",
    "swift.cli._megatron.main": "megatron",
    "axolotl.cli.main": "axolotl",
    "torchx.cli.main": "torchx",
    "autotrain.cli.autotrain": "autotrain",
    "ray.scripts.scripts": "ray",
    "composer.cli": "composer",
    "composer.cli.launcher": "composer",
}
# What a container is given to run, to the end of the command.
_CONTAINER = re.compile(rf"""(?<![\w.-])(?:{"|".join(sorted(CONTAINERS))})\s(?:"[^"]*"|'[^']*'|[^;&|\n"'])*""")
_CHANGES_PATH = re.compile(r"activate\b|\bmodule\s+(?:load|add)\b|\bPATH=", re.MULTILINE)
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
    """Whether the command is a shell, perhaps behind wrappers, whose text names a launcher. Raises NotTaken for one
    that would find the launcher without asking PATH."""
    text = shell_text(command)
    if text is not None and _RUNS_ARGUMENTS.search(text):
        starts = [at for at in range(1, len(command)) if Path(command[at]).name.startswith((*NAMES, "python"))]
        starts = starts[:MOST_SCRIPTS]
        words = next((command[at:] for at in starts if find_launcher(command[at:]) is not None), [])
        text = f"{text}\nexec {shlex.join(words)}"
    text = _CONTAINER.sub(" ", text or "")  # no agent is there
    named = read_names(text)
    if not (named.launcher or named.by_path):
        return False
    how = "its shell script starts the ranks by a launcher"
    told = "write `srun torchrun ...` or `srun python train.py` in the batch script"
    if named.by_path and only_command(command) is None:  # else take_over sees it
        raise NotTaken(f"{how} that is named by its path: name it without a path, or {told}")
    if named.by_path:
        return False
    if named.by_no_function and _CHANGES_PATH.search(text):
        raise NotTaken(f"{how} behind exec or a wrapper after PATH was changed: {told}")
    return True


@dataclass
class Named:
    """What a shell's text names. launcher: the first that a command begins with, or a wrapper runs. own_ranks: the same
    of a program that starts ranks by itself. by_path: one is
    named by its path. by_no_function: one stands behind exec or a wrapper, which ask no function of the shell's."""

    launcher: str = ""
    own_ranks: str = ""
    by_path: bool = False
    by_no_function: bool = False


@dataclass
class _Here:
    """Where in a command the next piece stands. begins: a command may begin there. wrapped: behind a wrapper that one
    began with, and unasked: behind any. other: behind a program that may run another environment's, and
    elsewhere: it does. value_follows: behind its option. by_path: behind a Python
    with a path. module: behind -m. setting: the piece before is a name in front of =, and value: so is one before
    that, with its value still going on. program: the piece before is the name of one of OWN_RANKS, of which some
    commands start ranks."""

    begins: bool = True
    wrapped: bool = False
    unasked: bool = False
    other: bool = False
    elsewhere: bool = False
    value_follows: bool = False
    by_path: bool = False
    module: bool = False
    setting: bool = False
    value: bool = False
    program: str = ""

    def runs(self, before: str) -> bool:
        """Whether a word that stands here is a command, by itself or behind a wrapper."""
        return self.begins or (self.wrapped and before.isspace())

    def own_program(self, word: str, before: str) -> str:
        """The one of OWN_RANKS that a word names which stands here."""
        if self.module and before.isspace():
            return OWN_MODULES.get(word, word if word in OWN_RANKS else "")
        name = word.rpartition("/")[2]
        return name if name in OWN_RANKS and (self.runs(before) or self.runs_elsewhere()) else ""

    def runs_elsewhere(self) -> bool:
        """Whether a word that stands here may be what runs in another environment."""
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


def read_names(text: str) -> Named:
    """What the text names; each of its pieces is looked at once."""
    named, here = Named(), _Here()
    pieces = _PIECE.findall(text)
    for before, piece, after in zip(["\n", *pieces], pieces, [*pieces[1:], "\n"], strict=False):
        if piece.isspace():
            here.pass_blanks(piece, before)
        elif piece in _SIGNS:
            here.pass_sign(piece)
        else:
            if after not in ("=", "!"):
                _hear_word(named, here, piece, before)
            here.pass_word(piece, before, after)
    return named


def _hear_word(named: Named, here: _Here, word: str, before: str) -> None:
    module = here.module and word in MODULES
    runs = here.runs(before)
    if (module and not here.elsewhere) or (word in NAMES and runs):
        named.launcher = named.launcher or word
    _, slash, name = word.rpartition("/")
    if here.program and word in OWN_RANKS[here.program]:
        named.own_ranks = named.own_ranks or f"{here.program} {word}"
    elif OWN_RANKS.get(program := here.own_program(word, before)) == ():
        named.own_ranks = named.own_ranks or program
    elif (here.elsewhere and module) or (here.runs_elsewhere() and name in NAMES and not runs):
        named.own_ranks = named.own_ranks or name
    named.by_path = named.by_path or bool(slash and name in NAMES) or (module and here.by_path)
    if here.unasked and (module or _BY_ANY_NAME.search(word)):
        named.by_no_function = True


def starts_own_ranks(command: Sequence[str]) -> str:
    """What the job's log says of a program that starts the ranks of its node by itself; empty for another one."""
    text = shell_text(command)
    name = read_names(shlex.join(command) if text is None else text).own_ranks
    if not name:
        return ""
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
    scripts = list(dict.fromkeys(word for word in words if word.endswith(".sh")))[:MOST_SCRIPTS]
    for text in (segment, *(_script(word, own=False) or "" for word in scripts)):
        if named := read_names(text).launcher:
            return named
    try:
        found = find_launcher(words)
    except NotTaken:
        return "the launcher"
    return found.name if found is not None else ""


def shell_text(command: Sequence[str]) -> str | None:
    """The text that a shell would run, without comments; None for a command that is no shell's. Raises NotTaken for a
    shell that reads it from its standard input, which it cannot read again."""
    at, last = 0, len(command) - 1
    while at < last and Path(command[at]).name in WRAPPERS:
        at += 1
        while at < last and (command[at].startswith("-") or "=" in command[at] or command[at][:1].isdecimal()):
            at += 1
    if not command:
        return None
    program, words = command[at], list(command[at + 1 :])
    if Path(program).name not in SHELLS:
        return _script(program, own=True) if "/" in program or program.endswith(".sh") else None
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
        return _without_comments(words[0][:MOST_BYTES])
    if words and "s" not in letters:
        return _script(words[0], own=False)
    raise NotTaken("its shell reads from standard input what to run: write that to a file, and `srun bash FILE`")


def _script(path: str, own: bool) -> str | None:
    """The text of a shell script. own: it is executed by itself, so that its first line says whose it is."""
    try:
        text = read_beginning(path, MOST_BYTES)
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
