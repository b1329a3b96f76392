"""Writes the tables of time-outs and limits into docs/reference.md.

python tools/limits_tables.py             writes them
python tools/limits_tables.py --check     only says whether they are up to date
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import get_args, get_origin

import msgspec

from unicron.ctl.settings.config import ELSEWHERE, AgentConfig, ControllerConfig, PlannerConfig
from unicron.ctl.settings.limits import HOMES, LIMITS, RULES, Limit, Range, label, number

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
BEGIN, END = "<!-- limits: made by tools/limits_tables.py -->", "<!-- end of limits -->"


def tables() -> str:
    """The three tables as Markdown."""
    return "\n\n".join(
        [
            "The rules, which `unicrond --check` tests together and prints with their values:",
            _table(("this", "must be", "this", "because"), [_rule(*rule[:4]) for rule in RULES]),
            "What can be set in `unicron.toml`, times in seconds:",
            _table(
                ("field", "default", "range", "meaning"),
                [*_fields(ControllerConfig), *_fields(PlannerConfig), *_fields(AgentConfig)],
            ),
            "What is fixed, in seconds unless it says otherwise. A variable in brackets sets another value for a job:",
            _table(("of", "name", "value", "meaning"), [_fixed(limit) for limit in LIMITS]),
        ]
    )


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field. Python drops them, so they are read from the source."""
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def _rule(low: str, high: str, why: str, equal: bool) -> tuple[str, ...]:
    return f"`{label(low)}`", "at most" if equal else "below", f"`{label(high)}`", why


def _fields(struct: type[msgspec.Struct]) -> list[tuple[str, ...]]:
    said = meanings(struct)
    prefix = {AgentConfig: "[agent] ", PlannerConfig: "[planner] "}.get(struct, "")
    return [
        (f"`{prefix}{field.name}`", _default(field), _range(field.type), said[field.name])
        for field in msgspec.structs.fields(struct)
        if field.name not in ELSEWHERE
    ]


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return number(value) if isinstance(value, int | float) else f'`"{value}"`' if isinstance(value, str) else "none"


def _range(allowed: object) -> str:
    if get_origin(allowed) is not None and all(isinstance(choice, str) for choice in get_args(allowed)):
        return ", ".join(f'`"{choice}"`' for choice in get_args(allowed))
    return next((str(note) for note in getattr(allowed, "__metadata__", ()) if isinstance(note, Range)), "")


def _fixed(limit: Limit) -> tuple[str, ...]:
    name = f"`{limit.name}`" + (f" (`{limit.variable}`)" if limit.variable else "")
    return limit.owner, name, number(limit.value), limit.meaning


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def main(arguments: list[str]) -> int:
    text = GUIDE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    homes = ", ".join(f"{owner}: `{home}`" for owner, home in HOMES.items() if home)
    where = f"Where they live: {homes}; slurm: the defaults of slurm.conf(5)."
    fresh = "\n\n".join([before + BEGIN, tables(), where, END + after])
    if fresh == text:
        return 0
    if "--check" in arguments:
        print(f"{GUIDE}: the tables are out of date: run `python tools/limits_tables.py`", file=sys.stderr)
        return 1
    GUIDE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
