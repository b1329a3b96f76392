"""Samples in shards of MosaicML's format MDS: `index.json`, and binary files with an offset for each sample.

Written from the description of the format in the package mosaicml-streaming, which is not needed. Images stay bytes.
Columns that would have to be unpickled are refused.
"""

from __future__ import annotations

import json
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unicron_transition.data.files import OpenFiles, Sample, Shards

UNPACKED_SHARDS = 4  # compressed shards that stay in memory
NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}


def _number(dtype: str) -> Callable[[bytes], Any]:
    return lambda data: np.frombuffer(data, dtype)[0]


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "json": json.loads,
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "jpeg": bytes,
    "png": bytes,
    **{name: _number(name) for name in NUMBERS},
}


class MDS:
    """A map-style dataset of the samples in a folder of MDS shards, in their order.

    Shards compressed with zstd need the package zstandard; other compressions are refused.

    Parameters
    ----------
    folder
        The folder that has `index.json`.
    decode
        `decode(sample)` converts a sample; by default it is a dictionary of values by column.

    Raises
    ------
    ValueError
        For a folder or a column that cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, decode: Callable[[Sample], Any] | None = None):
        self._folder, self._decode = Path(folder), decode
        try:
            listed = json.loads((self._folder / "index.json").read_text())["shards"]
            self._files = [_Shard(self._folder, entry) for entry in listed]
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{self._folder} is no folder of MDS shards: {error!r}; check the path") from None
        self._shards, self._open = Shards(shard.samples for shard in self._files), OpenFiles()
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: int) -> Any:
        index, place = self._shards.find(number)
        shard = self._files[index]
        begin, end = struct.unpack("<II", self._read(index, 4 * (1 + place), 8))
        sample = shard.sample(self._read(index, begin, end - begin))
        return sample if self._decode is None else self._decode(sample)

    def _read(self, index: int, begin: int, size: int) -> bytes:
        shard = self._files[index]
        if not shard.zipped:
            return self._open.read(str(shard.path), begin, size)
        if index not in self._unpacked:
            zstandard = import_module("zstandard")
            if len(self._unpacked) >= UNPACKED_SHARDS:
                self._unpacked.popitem(last=False)
            with shard.path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
                self._unpacked[index] = reader.read()
        return self._unpacked[index][begin : begin + size]


class _Shard:
    """One shard, from its entry in the index."""

    def __init__(self, folder: Path, entry: Mapping[str, Any]):
        compression = entry.get("compression")
        if entry.get("format") != "mds":
            raise ValueError(f"{folder} has a shard of format {entry.get('format')}: only mds can be read")
        if compression:
            _check_zstd(folder, str(compression))
        self.zipped = bool(compression)
        self.path = folder / entry["zip_data" if compression else "raw_data"]["basename"]
        self.samples = int(entry["samples"])
        columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True)
        self._columns = [(name, _decoder(folder, name, encoding), size) for name, encoding, size in columns]

    def sample(self, data: bytes) -> Sample:
        """Return the values of a sample by column; the data begin with the sizes of columns without a fixed one."""
        free = sum(size is None for _, _, size in self._columns)
        sizes = iter(struct.unpack(f"<{free}I", data[: 4 * free]))
        values, begin = {}, 4 * free
        for name, decode, size in self._columns:
            end = begin + (next(sizes) if size is None else size)
            values[name] = decode(data[begin:end])
            begin = end
        return values


def _check_zstd(folder: Path, compression: str) -> None:
    try:
        import_module("zstandard")
    except ImportError:
        packed = compression.partition(":")[0] == "zstd"
        instead = "pip install zstandard, or write the shards" if packed else "write them"
        raise ValueError(
            f"{folder} has shards that are compressed with {compression}: {instead} uncompressed"
        ) from None
    if compression.partition(":")[0] != "zstd":
        raise ValueError(f"{folder} has shards compressed with {compression}: write them uncompressed")


def _decoder(folder: Path, column: str, encoding: str) -> Callable[[bytes], Any]:
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        return _array_decoder(*rest.split(":")) if rest else _array_decoder()
    if encoding in DECODERS:
        return DECODERS[encoding]
    raise ValueError(
        f"{folder}: column {column} is of encoding {encoding}, which cannot be read here: write it as bytes"
    )


def _array_decoder(dtype: str = "", shape: str = "") -> Callable[[bytes], Any]:
    fixed = tuple(map(int, shape.split(","))) if shape else None

    def decode_array(data: bytes) -> Any:
        begin, kind, form = 0, dtype, fixed
        if not kind:
            kind, begin = DTYPES[data[0]], 1
        if form is None:
            axes, width = data[begin] >> 2, 1 << data[begin] % 4
            begin += 1
            form = tuple(int(each) for each in np.frombuffer(data[begin : begin + axes * width], f"<u{width}"))
            begin += axes * width
        return np.frombuffer(data[begin:], kind).reshape(form).copy()

    return decode_array
