"""Which nodes a record is about."""

from __future__ import annotations

from typing import get_type_hints

from unicron_ctl.shared.log.records import KINDS, HangCulprit, Record

_FIELDS = {"node": str, "nodes": list[str], "culprits": list[HangCulprit]}


def nodes_of(record: Record) -> list[str]:
    """Their names; [] where it names none."""
    fields = _NAMING.get(record.kind, ())
    found = [record.node] if "node" in fields and record.node else []  # type: ignore[attr-defined]
    found += [name for name in record.nodes if name not in found] if "nodes" in fields else []  # type: ignore[attr-defined]
    found += [one.node for one in record.culprits] if "culprits" in fields else []  # type: ignore[attr-defined]
    return found


def _fields_of(kind: type[Record]) -> list[str]:
    hints = get_type_hints(kind)
    return [name for name, what in _FIELDS.items() if hints.get(name) == what]


_NAMING = {name: fields for name, kind in KINDS.items() if (fields := _fields_of(kind))}
KINDS_WITH_NODES = tuple(_NAMING)
