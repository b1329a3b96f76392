"""The programs that a step's command may name: the table in `programs.toml`, from which the plugin is also built."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

Names = tuple[str, ...]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A table of `programs.toml` that refuses keys that it does not know."""


class Option(msgspec.Struct, frozen=True):
    """An option of a launcher."""

    flags: Names
    """Its names, as they are written"""
    has_value: bool
    """A value follows"""
    fate: str
    """What becomes of it: the field of :class:`Launcher` that lists it"""
    refusal: str = ""
    """Why the launcher stays where the option is given"""

    @property
    def name(self) -> str:
        """The first long flag, without dashes."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0]).lstrip("-")


class Launcher(Row, frozen=True):
    """A launcher that the agent replaces."""

    programs: Names = ()
    """Names of its program"""
    modules: Names = ()
    """Modules behind `python -m` that are the same"""
    all_nodes: bool = False
    """It starts the ranks of all nodes, so that srun must not stand in front of it"""
    command: str = ""
    """The first word behind its name with which it starts ranks, where it has several commands"""
    abbreviates: bool = True
    """It takes `--rdzv-e` for `--rdzv-endpoint`"""
    anywhere: bool = False
    """Its options may stand behind the program too, and those that it does not know are the program's"""
    like: str = ""
    """The launcher whose options it has beside its own"""
    ranks: str = ""
    """The option with the number of ranks on a node"""
    nodes: str = ""
    """The option with the number of nodes"""
    honoured: Names = ()
    """Options that the agent reads"""
    replaced: Names = ()
    """Options of which Unicron has its own way"""
    ignored: Names = ()
    """Options that nobody honours, as the job's log says"""
    refused: dict[str, str] = {}
    """Options with which the launcher stays, and why"""

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """All its options."""
        fates = {fate: getattr(self, fate) for fate in ("honoured", "replaced", "ignored", "refused")}
        own = [
            Option(tuple(text.removesuffix("=").split()), text.endswith("="), fate, self.refused.get(text, ""))
            for fate, texts in fates.items()
            for text in texts
        ]
        return (*(LAUNCHERS[self.like].options if self.like else ()), *own)


class Words(Row, frozen=True):
    """Programs, and modules of Python that are the same."""

    programs: Names
    modules: Names = ()


class Wrappers(Row, frozen=True):
    """Programs that run the command in their arguments."""

    of_a_rank: frozenset[str]
    of_one_process: frozenset[str]
    elsewhere: frozenset[str]
    containers: frozenset[str]
    others: frozenset[str]


class Shells(Row, frozen=True):
    """Shells with the syntax of sh, and others."""

    posix: Names
    others: Names


class Programs(Row, frozen=True):
    """The whole table; the file explains each part of it."""

    launchers: dict[str, Launcher]
    not_replaced: Words
    own_ranks: dict[str, Names]
    own_modules: dict[str, str]
    servers: Words
    wrappers: Wrappers
    shells: Shells


def read_table(text: str) -> Programs:
    """Return the table of this text. Raises msgspec.MsgspecError."""
    return msgspec.convert(msgspec.toml.decode(text), Programs)


PROGRAMS = read_table(Path(__file__).with_name("programs.toml").read_text(encoding="utf-8"))
LAUNCHERS = PROGRAMS.launchers
KINDS = {word: kind for kind, each in LAUNCHERS.items() for word in (*each.programs, *each.modules)}
NAMES = frozenset({*PROGRAMS.not_replaced.programs, *(name for each in LAUNCHERS.values() for name in each.programs)})
MODULES = frozenset(module for each in LAUNCHERS.values() for module in each.modules)
