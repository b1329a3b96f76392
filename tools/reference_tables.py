"""Writes the tables of variables, rules and settings into docs/reference.md, from the code.

python tools/reference_tables.py             writes them
python tools/reference_tables.py --check     only says whether they are up to date
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args, get_origin

import msgspec

from unicron_ctl.shared.settings import limits
from unicron_ctl.shared.settings.config import OTHER_TABLES, AgentConfig, ControllerConfig, PlannerConfig
from unicron_ctl.shared.settings.limits import FIXED_LIMITS, RULES, Range, label, number
from unicron_ctl.shared.settings.meanings import docstrings, meanings
from unicron_ctl.shared.settings.notify import NotifyConfig
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_ctl.shared.settings.variables import OF_JOBS, OF_PROGRAMS, Variable
from unicron_detector.health.checks import HealthConfig

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "controller": ControllerConfig,
    "planner": PlannerConfig,
    "agent": AgentConfig,
    "partition.NAME": PartitionConfig,
    "health": HealthConfig,
    "notify": NotifyConfig,
}
BEGIN, END = "<!-- {}: made by tools/reference_tables.py -->", "<!-- end of {} -->"


def tables() -> dict[str, str]:
    """The tables as Markdown, by the name of their place."""
    rules = [
        (f"`{label(low)}`", "at most" if equal else "below", f"`{label(high)}`", why)
        for low, high, why, equal, _ in RULES
    ]
    texts = docstrings(ast.parse(inspect.getsource(limits)).body)
    fixed = [(f"`{name}`", number(value), texts[name]) for name, value in FIXED_LIMITS.items()]
    rows = [
        row
        for section, struct in SECTIONS.items()
        for row in fields("" if section == "controller" else f"[{section}] ", struct)
    ]
    return {
        "variables of a job": _table(("name", "meaning", "default"), _variables(OF_JOBS)),
        "variables of programs": _table(("name", "meaning", "default"), _variables(OF_PROGRAMS)),
        "settings": _table(("field", "default", "range", "meaning"), rows),
        "rules": _table(("this", "must be", "this", "because"), rules),
        "fixed limits": _table(("name", "value", "meaning"), fixed),
    }


def _variables(listed: Iterable[Variable]) -> list[tuple[str, ...]]:
    return [(f"`{one.name}`", one.meaning, one.default) for one in listed]


def fields(prefix: str, struct: type[msgspec.Struct]) -> list[tuple[str, ...]]:
    """(name, default, range, meaning) of each field of a section, in Markdown."""
    texts = meanings(struct)
    return [
        (f"`{prefix}{field.name}`", _default(field), _range(field.type), texts[field.name])
        for field in msgspec.structs.fields(struct)
        if field.name not in OTHER_TABLES
    ]


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, tuple | list) and value:
        return ", ".join(f'`"{each}"`' for each in value)
    return number(value) if isinstance(value, int | float) else f'`"{value}"`' if isinstance(value, str) else "none"


def _range(allowed: object) -> str:
    if get_origin(allowed) is not None and all(isinstance(choice, str) for choice in get_args(allowed)):
        return ", ".join(f'`"{choice}"`' for choice in get_args(allowed))
    notes = getattr(allowed, "__metadata__", ())
    if not notes and (kinds := get_args(allowed)):  # `| None`
        notes = getattr(kinds[0], "__metadata__", ())
    return next((_bounds(note) for note in notes), "")


def _bounds(note: Range | msgspec.Meta) -> str:
    if isinstance(note, Range):
        return str(note)
    low = f"above {number(note.gt)}" if note.gt is not None else f"{number(note.ge or 0)} or more"
    return low if note.le is None else f"{low}, at most {number(note.le)}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def main(arguments: list[str]) -> int:
    text = fresh = REFERENCE.read_text()
    for name, table in tables().items():
        before, begin, rest = fresh.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        assert begin and end, f"{REFERENCE} has no place for the {name}"
        fresh = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    if fresh == text:
        return 0
    if "--check" in arguments:
        print(f"{REFERENCE}: the tables are out of date: run `python tools/reference_tables.py`", file=sys.stderr)
        return 1
    REFERENCE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
