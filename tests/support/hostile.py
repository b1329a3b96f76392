"""Messages made from the schema of the protocol: well formed, with values at the ends of every field's range, or with
one value beyond it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from unicron_detector.formats import HINT

Known = Mapping[str, st.SearchStrategy[Any]]
ENDS = (0, 1, -1, 2**31, 2**53 + 1, 2**62, -(2**63), 2**63 - 1, 2**64 - 1)
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))
NASTY = ("", "\x1b[2J\x1b]0;owned\x07", "\x00", "ü" * 40, "7_1\n8_1|root", "%s{0!r}[bold]", "x" * 300, "\u202e")


def messages(union: Any, known: Known) -> st.SearchStrategy[bytes]:
    """Messages of `union`, or of one kind, that its decoder should take, but for what is checked of a message as a
    whole. known: values of fields by their names."""
    kinds = alternatives(inspect.type_info(union))
    return st.one_of([inside(kind, known) for kind in kinds]).map(msgspec.msgpack.encode)


def beyond(kind: inspect.Type, known: Known) -> st.SearchStrategy[tuple[str, bytes]]:
    """(path, message): one field of the message, anywhere in it, is beyond its range."""
    sound = inside(kind, known)

    @st.composite
    def spoilt(draw: st.DrawFn) -> tuple[str, bytes]:
        message = draw(sound)
        found = [(path, spot) for path, spot in fields(kind, message) if outside(spot[2])]
        path, (holder, key, inner) = draw(st.sampled_from(found))
        holder[key] = draw(st.sampled_from(outside(inner)))
        return path, msgspec.msgpack.encode(message)

    return spoilt()


def fields(kind: Any, value: Any, path: str = "") -> list[tuple[str, tuple[Any, Any, Any]]]:
    """Every leaf of a message made by `inside`: its path, and (what holds it, under which key, its type)."""
    found: list[tuple[str, tuple[Any, Any, Any]]] = []
    if isinstance(kind, inspect.StructType):
        for number, field in enumerate(kind.fields):
            key: Any = number if kind.array_like else field.encode_name
            where = f"{path}.{field.name}"
            if (number >= len(value)) if kind.array_like else (key not in value):
                continue
            inner = alternatives(field.type)
            if value[key] is None:
                continue
            found.append((where, (value, key, field.type)))
            for one in inner:
                if isinstance(one, inspect.StructType | inspect.ListType | inspect.DictType):
                    found += fields(one, value[key], where)
    elif isinstance(kind, inspect.ListType):
        for number, item in enumerate(value):
            found.append((f"{path}[]", (value, number, kind.item_type)))
            found += fields(kind.item_type, item, f"{path}[]")
    elif isinstance(kind, inspect.DictType):
        for key, item in value.items():
            found.append((f"{path}{{}}", (value, key, kind.value_type)))
            found += fields(kind.value_type, item, f"{path}{{}}")
    return found


def alternatives(kind: Any) -> list[Any]:
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def outside(kind: Any) -> list[Any]:
    """Values that the type must refuse, of the right type where that is possible; empty for what takes anything."""
    if isinstance(kind, inspect.UnionType):
        parts = [outside(one) for one in kind.types if not isinstance(one, inspect.NoneType)]
        return parts[0] if len(parts) == 1 else []
    if isinstance(kind, inspect.IntType):
        ends = [n for n in (_least(kind) - 1, _most(kind) + 1, *ENDS) if -(2**63) <= n < 2**64]
        return [n for n in ends if not _least(kind) <= n <= _most(kind)]
    if isinstance(kind, inspect.FloatType):
        return [] if kind.ge is None else [*NO_NUMBERS, kind.ge * 2 - 1, kind.le * 2, -1e308, 1e308]
    if isinstance(kind, inspect.StrType):
        found = ["x" * (kind.max_length + 1)] if kind.max_length is not None else []
        if kind.pattern is not None:
            found += [text for text in NASTY if not re.search(kind.pattern, text)]
        return found
    if isinstance(kind, inspect.ListType):
        return [[0] * (kind.max_length + 1)] if kind.max_length is not None and kind.max_length < 10**5 else []
    return []


def inside(kind: Any, known: Known, name: str = "") -> st.SearchStrategy[Any]:
    """Plain data that the type takes; the ends of its range come often. `name` is the field's."""
    if name in known:
        return known[name]
    if isinstance(kind, inspect.StructType):
        return _struct(kind, known)
    if isinstance(kind, inspect.UnionType):
        return st.one_of([inside(one, known, name) for one in kind.types])
    if isinstance(kind, inspect.IntType):
        least, most = _least(kind), _most(kind)
        return st.sampled_from(sorted({least, most, *(n for n in (0, 1, 2) if least <= n <= most)})) | st.integers(
            least, most
        )
    if isinstance(kind, inspect.FloatType):
        if kind.ge is None:
            return st.floats()
        ends = {kind.ge, kind.le, min(kind.le, max(kind.ge, 5e-324))}
        return st.sampled_from(sorted(ends)) | st.floats(kind.ge, kind.le)
    if isinstance(kind, inspect.StrType):
        return _text(kind)
    if isinstance(kind, inspect.ListType):
        return st.lists(inside(kind.item_type, known, f"{name}[]"), min_size=kind.min_length or 0, max_size=4)
    if isinstance(kind, inspect.DictType):
        keys = inside(kind.key_type, known, "slot" if isinstance(kind.key_type, inspect.IntType) else "")
        return st.dictionaries(keys, inside(kind.value_type, known), max_size=3)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*(inside(one, known) for one in kind.item_types)).map(list)
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(sorted(kind.values))
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    if isinstance(kind, inspect.NoneType):
        return st.none()
    return st.sampled_from([None, b"\xc0", 0, "x", [1], {"a": 1}])


def _text(kind: inspect.StrType) -> st.SearchStrategy[str]:
    most = 10**6 if kind.max_length is None else kind.max_length
    if kind.pattern is not None:
        return st.from_regex(kind.pattern).filter(lambda text: (kind.min_length or 0) <= len(text) <= most)
    long = ["x" * most] if most <= 10**5 else []
    return st.sampled_from([text for text in (*NASTY, *long) if len(text) <= most]) | st.text(max_size=min(most, 40))


def _struct(kind: inspect.StructType, known: Known) -> st.SearchStrategy[Any]:
    """A struct with all that it must have, and some of what it may."""
    drawn = {field.name: inside(field.type, known, field.name) for field in kind.fields if field.name != "v"}

    @st.composite
    def struct(draw: st.DrawFn) -> Any:
        values: dict[str, Any] = {kind.tag_field: kind.tag} if kind.tag_field else {}
        for field in kind.fields:
            if field.name == "v":
                values["v"] = HINT.number if field.required else field.default
            elif field.required or field.name in known or kind.array_like or draw(st.booleans()):
                values[field.encode_name] = draw(drawn[field.name])
        if "slots" in values and "phases" in values:  # as long as its slots, or it is refused for that
            slots = values["slots"] = sorted(set(values["slots"]))
            for name, usual in {"micro_batches": [], "seconds": 0.5, "losses": None}.items():
                values[name] = [(draw(drawn[name]) or [usual])[0] for _ in slots]
            values["phases"] = draw(st.binary(min_size=48 * len(slots), max_size=48 * len(slots)))
            values["computed"] = {slot: [0] for slot in slots[:1]}
        elif "settings" in values and "slots" in values:  # the element's, or the message is refused for them
            count = values["settings"].setdefault("ranks_per_node", 1)
            first = values["element"] * count
            values["slots"] = list(range(first, first + count))
        return list(values.values()) if kind.array_like else values

    return struct()


def _least(kind: inspect.IntType) -> int:
    return kind.ge if kind.ge is not None else kind.gt + 1 if kind.gt is not None else -(2**63)


def _most(kind: inspect.IntType) -> int:
    return kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 2**63 - 1
