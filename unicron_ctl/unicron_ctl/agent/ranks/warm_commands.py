"""Decides which ranks can start warm, and what their zygote imports (docs/design/warm-processes.md). Pure."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from unicron_ctl.agent.program_table import PROGRAMS
from unicron_ctl.shared.system.errors import WRONG_USE, UserError

WARM, PRELOAD = "UNICRON_WARM", "UNICRON_PRELOAD"
PYTHON = re.compile(r"python[\d.]*t?")
_ALONE = re.compile(r"-[bBdEIOPqsSuv]+|-[WX].+")  # options of the interpreter that are one word each, python(1)
VALUE_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")  # of Python, with a value in the next word
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def python_command(command: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return (interpreter and its options, `SCRIPT ...` or `-m MODULE ...`) of a command that runs a Python script;
    None for any other command."""
    if not command or not PYTHON.fullmatch(os.path.basename(command[0])):
        return None
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] != "-m":
        if command[at] not in VALUE_OPTIONS and not _ALONE.fullmatch(command[at]):
            return None
        at += 2 if command[at] in VALUE_OPTIONS else 1
    words = list(command[at:])
    sound = len(words) > 1 if words[:1] == ["-m"] else bool(words) and words[0].endswith(".py")
    return (list(command[:at]), words) if sound else None


def python_of(command: Sequence[str]) -> list[str]:
    """Return the words that start the Python that has torch: the first Python in the command, with its container or
    environment; without one, this Python."""
    if os.path.basename(command[0]).startswith("python"):  # also a wrapper such as python-of-the-project
        return [command[0]]
    at = next((at for at, word in enumerate(command) if PYTHON.fullmatch(os.path.basename(word))), None)
    if at is None:
        return [sys.executable]
    first = next((start for start in range(at) if os.path.basename(command[start]) in PROGRAMS.wrappers.elsewhere), at)
    return list(command[first : at + 1])


def wanted(environment: Mapping[str, str]) -> bool:
    """Say whether ranks should start warm. Raises UserError for another value than 0 and 1."""
    value = environment.get(WARM, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{WARM}={value!r}: write 0 to start every rank cold, or unset it", WRONG_USE)
    return value != "0"


def named_modules(environment: Mapping[str, str]) -> list[str]:
    """Return the modules that the user wants imported beside the script's own. Raises UserError for a wrong name."""
    names = [name.strip() for name in environment.get(PRELOAD, "").split(",") if name.strip()]
    for name in names:
        if not _MODULE.fullmatch(name):
            raise UserError(f"{PRELOAD}: {name!r} is not a module; write names as in `import`, with commas between")
    return names


def common(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the variables that these ranks have in common: the zygote's."""
    first, *others = ranks
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
