"""A launcher's command line: its options, its program, and the program's words. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from unicron_ctl.agent.program_table import LAUNCHERS, Launcher, Option

Values = dict[str, str | list[str] | bool]


class Unreadable(ValueError):
    """The options do not fit the launcher's; the text says which."""


class Options:
    """The options of a command line by name, its program, and the program's words."""

    def __init__(self, launcher: Launcher, given: Mapping[str, str | list[str] | bool], program: str, words: list[str]):
        self._launcher, self._given = launcher, given
        self.program, self.words = program, words

    def __contains__(self, name: str) -> bool:
        return bool(self._given.get(name))

    def text(self, name: str, default: str = "") -> str:
        """Return the value of the option, the last one if it was given several times."""
        value = self._given.get(name)
        value = value[-1] if isinstance(value, list) else value
        return value if isinstance(value, str) else default

    def all(self, name: str) -> list[str]:
        """Return all values of an option that may be given several times."""
        value = self._given.get(name)
        return value if isinstance(value, list) else []

    def with_fate(self, fate: str) -> list[str]:
        """Return the given options with this fate, each as `--name`."""
        return [f"--{option.name}" for option in self._launcher.options if option.fate == fate and option.name in self]

    @property
    def refusal(self) -> str:
        """The first option that keeps the launcher in place, and why; empty without one."""
        refused = (option for option in self._launcher.options if option.refusal and option.name in self)
        return next((f"its --{option.name} {option.refusal}" for option in refused), "")


def read_options(launcher: Launcher, words: Sequence[str], defaults: Mapping[str, str] | None = None) -> Options:
    """Read the words after a launcher's name. defaults: values of options that are not given. Raises Unreadable."""
    flags = {flag: option for option in launcher.options for flag in option.flags}
    given: Values = {}
    waiting, rest = deque(words), list[str]()
    while waiting and (launcher.anywhere or not rest):
        word = waiting.popleft()
        if word == "--":
            break
        flag, value = _split_option(word, flags, launcher.abbreviates)
        if flag is not None:
            _add_value(given, flags[flag], word, value, waiting)
        elif word.startswith("-") and len(word) > 1 and not launcher.anywhere:
            raise Unreadable(f"it has no option {word}")
        else:
            rest.append(word)
    program, words = _split_program([*rest, *waiting], launcher.anywhere)
    return Options(launcher, {**(defaults or {}), **given}, program, words)


def _add_value(given: Values, option: Option, word: str, value: str | None, waiting: deque[str]) -> None:
    if not option.has_value:
        given[option.name] = True
        return
    if value is None and not waiting:
        raise Unreadable(f"{word} needs a value")
    values = given.setdefault(option.name, [])
    assert isinstance(values, list)
    values.append(waiting.popleft() if value is None else value)


def _split_program(words: list[str], anywhere: bool) -> tuple[str, list[str]]:
    """Return the program and its words. Options before it are the program's, if those may stand anywhere."""
    for at, word in enumerate(words):
        if not (anywhere and word.startswith("-")):
            return word, words[:at] + words[at + 1 :]
    raise Unreadable("it names no script")


def _split_option(word: str, flags: Mapping[str, Option], abbreviates: bool) -> tuple[str | None, str | None]:
    """Return (flag, value within the word) of an option, (None, None) of any other word."""
    flag, equals, value = word.partition("=")
    if flag in flags:
        return flag, value if equals else None
    if not abbreviates:
        return None, None
    if len(word) > 2 and word[0] == "-" and word[1] != "-" and word[:2] in flags and flags[word[:2]].has_value:
        return word[:2], word[2:]
    if flag.startswith("--"):
        fitting = [known for known in flags if known.startswith(flag)]
        if len({flags[known] for known in fitting}) == 1:
            return fitting[0], value if equals else None
    return None, None


def torch_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options that torchrun reads from variables: PET_NPROC_PER_NODE for --nproc-per-node, and so on."""
    found = {}
    for option in LAUNCHERS["torchrun"].options:
        value = environment.get("PET_" + option.name.upper().replace("-", "_"), "")
        if value and (option.has_value or value != "0"):
            found[option.name] = value
    return found
