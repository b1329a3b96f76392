"""Finds the nodes that a record is about."""

from __future__ import annotations

from typing import get_type_hints

from unicron_ctl.shared.log.records import KINDS, HangCulprit, Record

_FIELDS = {"node": str, "nodes": list[str], "culprits": list[HangCulprit]}


def nodes_of(record: Record) -> list[str]:
    """Return the names of the record's nodes."""
    fields = _NAMING.get(record.kind, ())
    names = [record.node] if "node" in fields and record.node else []  # type: ignore[attr-defined]
    names += [name for name in record.nodes if name not in names] if "nodes" in fields else []  # type: ignore[attr-defined]
    names += [one.node for one in record.culprits] if "culprits" in fields else []  # type: ignore[attr-defined]
    return names


_HINTS = {name: get_type_hints(kind) for name, kind in KINDS.items()}
_NAMING = {name: dict(found) for name, hints in _HINTS.items() if (found := _FIELDS.items() & hints.items())}
KINDS_WITH_NODES = tuple(_NAMING)
