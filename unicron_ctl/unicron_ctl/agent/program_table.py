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
    """Its names, as users write them."""
    has_value: bool
    """A value follows."""
    fate: str
    """The field of :class:`Launcher` that lists it."""
    refusal: str = ""
    """Why the launcher stays if the option is given."""

    @property
    def name(self) -> str:
        """The first long flag, without dashes."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0]).lstrip("-")


class Launcher(Row, frozen=True):
    """A launcher that the agent replaces."""

    programs: Names = ()
    """Names of its program."""
    modules: Names = ()
    """Modules that do the same by `python -m`."""
    all_nodes: bool = False
    """Whether it starts the ranks of all nodes, so srun must not start it."""
    command: str = ""
    """Its command that starts ranks, if it has several commands."""
    abbreviates: bool = True
    """Whether it takes `--rdzv-e` for `--rdzv-endpoint`."""
    anywhere: bool = False
    """Its options may follow the program too, and unknown ones are the program's."""
    like: str = ""
    """The launcher whose options it has, too."""
    ranks: str = ""
    """The option with the number of ranks on a node."""
    nodes: str = ""
    """The option with the number of nodes."""
    honoured: Names = ()
    """Options that the agent reads."""
    replaced: Names = ()
    """Options for which Unicron has its own way."""
    ignored: Names = ()
    """Options that have no effect, as the job's log says."""
    refused: dict[str, str] = {}
    """Options that keep the launcher in place, and why."""

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
    """Programs, and Python modules that do the same."""

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


PROGRAMS = msgspec.toml.decode(Path(__file__).with_name("programs.toml").read_bytes(), type=Programs)
LAUNCHERS = PROGRAMS.launchers
KINDS = {word: kind for kind, each in LAUNCHERS.items() for word in (*each.programs, *each.modules)}
NAMES = frozenset({*PROGRAMS.not_replaced.programs, *(name for each in LAUNCHERS.values() for name in each.programs)})
MODULES = frozenset(module for each in LAUNCHERS.values() for module in each.modules)
