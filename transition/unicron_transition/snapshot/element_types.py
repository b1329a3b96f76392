"""The types of tensors' elements, by torch's names. Agents read them too, so this module needs neither torch nor numpy."""

from __future__ import annotations

# torch's name of a type -> the numpy type that moves it
RAW = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",  # two elements in a byte, which torch counts as one
    "complex32": "<u4",
}


def item_bytes(kind: str) -> int:
    """Return the size of an element. Raises KeyError for an unknown type."""
    return int(RAW[kind][2:])
