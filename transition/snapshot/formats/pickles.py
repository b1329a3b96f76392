"""Pickles of others, read by a table of names.

Megatron's and torch's checkpoints have pickles in them. Only what the tables below name is made from one, and most of
that are records of this file, which do nothing: no module is imported because a pickle says so, and no function is
called but those of the tables. Every other name is refused.
"""

from __future__ import annotations

import collections
import functools
import io
import math
import pickle
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unicron.transition.snapshot.formats.index import RAW, BadCheckpoint, Raw, row_major

MOST = 1 << 30  # bytes of one pickle


class Record:
    """What is kept of an object: the arguments that it was made with, and its state."""

    state: Any = None

    def __init__(self, *args: Any, **keywords: Any):
        self.args = args
        self.__dict__.update(keywords)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) and not state[0]:
            state = state[1]
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})
        else:
            self.state = state

    def __call__(self, *args: Any) -> Record:
        return self

    def append(self, value: Any) -> None:
        """A list of a class of its own; nobody asks what is in it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Namespace(Record):
    """Megatron-LM's arguments."""


@dataclass(frozen=True)
class StorageReference:
    """A storage of torch's: the key of its file in the archive, and the kind of its elements."""

    key: str
    dtype: str


@dataclass(frozen=True)
class TensorReference:
    """A tensor in a file of torch's. Its elements are not read."""

    storage: StorageReference
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: StorageReference, offset: int, shape: Any, strides: Any, *_: Any) -> TensorReference:
    if not isinstance(storage, StorageReference):
        raise pickle.UnpicklingError("a tensor without a storage")
    return TensorReference(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _tensor_of_kind(
    storage: Any, offset: int, shape: Any, strides: Any, _: Any, hooks: Any, kind: Any, *more: Any
) -> Any:
    """A tensor of a kind that has no class of storages: the storage's is that of bytes."""
    if not isinstance(storage, StorageReference) or not isinstance(kind, str):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _tensor(StorageReference(storage.key, kind), offset, shape, strides)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(map(int, values))


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "utf-8"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytes:
    return _encode(data, encoding.replace("-", "")) if isinstance(data, str) else bytes(memoryview(data))


def _scalar(kind: Any, data: bytes = b"") -> Any:
    return np.frombuffer(data, kind)[0].item()


def _dtype(text: str, *_: Any) -> Any:
    if not isinstance(text, str) or "O" in text or "V" in text:
        raise pickle.UnpicklingError(f"numpy type {text!r}")
    return _Type(text)


class _Type(Record):
    """A numpy type; its state says its byte order, which is that of this machine."""

    def __init__(self, text: str):
        super().__init__(text)
        self.numpy = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.numpy = self.numpy.newbyteorder(">")


class _Array(Record):
    """A numpy array: its elements are kept as bytes."""


class _OrderedDict(collections.OrderedDict[Any, Any]):
    """A state_dict has attributes besides its items."""

    def __setstate__(self, state: Any) -> None:
        pass


def _defaultdict(*_: Any) -> dict[Any, Any]:
    return {}


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class _Storage(str):
    """The class of a storage; its text is the kind of its elements."""


def _ordinary_scalar(kind: Any, data: bytes = b"") -> Any:
    return _scalar(kind.numpy if isinstance(kind, _Type) else np.dtype("u1"), data)


# module and name -> what is made of it
_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _OrderedDict,
    ("collections", "defaultdict"): _defaultdict,
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("_codecs", "encode"): _encode,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "getattr"): lambda *_: Record(),  # of an enumeration in a namespace: not asked for here
    ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("pathlib", "PurePosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(map(str, parts)),  # what Python 3.13 calls them
    ("pathlib._local", "PurePosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("datetime", "timedelta"): Record,
    ("io", "BytesIO"): Record,
    ("_io", "BytesIO"): Record,
    ("torch", "Size"): _size,
    ("torch", "device"): Record,
    ("torch", "Tensor"): Record,
    ("torch.serialization", "_get_layout"): lambda text: text,
    ("torch.storage", "UntypedStorage"): _Storage("uint8"),
    ("torch", "UntypedStorage"): _Storage("uint8"),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_kind,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda function, kind, args, state: function(*args),
    **{("torch", name): _Storage(kind) for name, kind in _STORAGES.items()},
    **{("torch", kind): kind for kind in RAW},
    **{
        (f"numpy.{module}.multiarray", name): value
        for module in ("core", "_core")
        for name, value in (("scalar", _ordinary_scalar), ("_reconstruct", _Array))
    },
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): Record,
}
# Kinds of elements, those that are not known here included: the tensor of such a one is named, and the others are read.
_KIND = re.compile(r"(?:b?float|complex|u?int|qu?int|bits)\d\w*")
# Records of these are kept as they are, whatever their class: of torch's format of checkpoints, and of Megatron's
# options, plans and states.
_RECORDS = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.",
    "megatron.training.",
    "megatron.legacy.",
    "signal.",
)


class _Restricted(pickle.Unpickler):
    """Makes nothing but what the tables name."""

    def __init__(self, data: bytes, path: Path):
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and _KIND.fullmatch(name):
            return name
        if f"{module}.".startswith(_RECORDS) and name.replace(".", "").replace("_", "").isalnum():
            return _record(module, name)
        raise BadCheckpoint(
            f"{self._path}: its pickle names {module}.{name}, which no checkpoint needs: it is not read"
        )

    def persistent_load(self, pid: Any) -> StorageReference:
        if isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage" and isinstance(pid[1], _Storage):
            return StorageReference(str(pid[2]), str(pid[1]))
        raise BadCheckpoint(f"{self._path}: its pickle names a storage that is none of torch's")


@functools.cache
def _record(module: str, name: str) -> type[Record]:
    return type(name.rpartition(".")[2], (Record,), {"__module__": f"unread.{module}"})


def unpickled(data: bytes, path: Path) -> Any:
    """What a pickle says, as plain values and records. path: for people. Raises BadCheckpoint."""
    try:
        return _Restricted(data, path).load()
    except BadCheckpoint:
        raise
    except Exception as error:  # a pickle of others may do anything wrong, and each has an error of its own
        raise BadCheckpoint(f"{path}: its pickle cannot be read ({type(error).__name__}: {error})") from None


# ------------------------------------------------------------ torch's archives
class _Window(io.RawIOBase):
    """A part of a file, for reading."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


_LOCAL = struct.Struct("<4s22xHH")  # of a zip's local header: the mark, the lengths of name and extra field


@dataclass
class Archive:
    """A file that `torch.save` wrote, or a part of a file. content: with references in the place of tensors."""

    path: Path
    content: Any
    storages: dict[str, tuple[int, int, int]]  # key -> (where its bytes begin in the file, how many, their CRC-32)

    def raw(self, tensor: TensorReference) -> Raw:
        """Where the elements lie. Raises BadCheckpoint where they are not there."""
        kind = tensor.storage.dtype
        if tensor.storage.key not in self.storages or kind not in RAW:
            raise BadCheckpoint(f"{self.path}: the bytes of one of its tensors are not there")
        begin, length, crc = self.storages[tensor.storage.key]
        size = np.dtype(RAW[kind]).itemsize
        pairs = zip(tensor.shape, tensor.strides, row_major(tensor.shape), strict=True)
        dense = all(extent < 2 or stride == wanted for extent, stride, wanted in pairs) or not all(tensor.shape)
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
        if all(tensor.shape) and (tensor.offset < 0 or last < 0 or (tensor.offset + last + 1) * size > length):
            raise BadCheckpoint(f"{self.path}: one of its tensors is larger than its bytes")
        strides = None if dense else tensor.strides
        whole = tensor.offset == 0 and math.prod(tensor.shape) * size == length
        known = crc if whole and crc and strides is None else None  # 0: torch was told to write none
        return Raw(self.path, begin + tensor.offset * size, kind, tensor.shape, strides, known)


def archive(path: Path, offset: int = 0, length: int | None = None) -> Archive:
    """Read what `torch.save` wrote, without its tensors' elements. Raises BadCheckpoint, OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        end = size if length is None else offset + length
        if offset < 0 or end > size:
            raise BadCheckpoint(f"{path} is cut off: it ends before byte {end}")
        try:
            packed = zipfile.ZipFile(_Window(file, offset, end - offset))
            entries = packed.infolist()
            for each in entries:
                if not each.CRC:  # torch was told to write no checksums; without the attribute none is compared
                    del each.CRC
            pickles = [each for each in entries if each.filename.endswith("data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MOST:
                raise BadCheckpoint(f"{path}: not a file that torch.save wrote")
            content = packed.read(pickles[0])
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise BadCheckpoint(
                f"{path}: not an archive of torch.save ({error}): a file of torch before 1.6 has to be saved anew"
            ) from None
        root = pickles[0].filename.removesuffix("data.pkl")
        order = next((packed.read(each) for each in entries if each.filename == f"{root}byteorder"), b"little")
        if order.strip() != b"little":
            raise BadCheckpoint(f"{path}: of a machine with another byte order")
        storages = {}
        for each in entries:
            if each.filename.startswith(f"{root}data/"):
                if each.compress_type != zipfile.ZIP_STORED:
                    raise BadCheckpoint(f"{path}: its tensors are compressed")
                file.seek(offset + each.header_offset)
                mark, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
                if mark != b"PK\x03\x04":
                    raise BadCheckpoint(f"{path}: not an archive of torch.save")
                begin = offset + each.header_offset + _LOCAL.size + name + extra
                if begin + each.file_size > end:
                    raise BadCheckpoint(f"{path} is cut off: it ends before byte {begin + each.file_size}")
                storages[each.filename.removeprefix(f"{root}data/")] = begin, each.file_size, getattr(each, "CRC", 0)
    return Archive(path, unpickled(content, path), storages)


def plain(value: Any, found: Archive | None = None) -> Any:
    """Plain values only: of a record its fields, of a tensor its elements, which should be few."""
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): plain(each, found) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, found) for each in value]
    if isinstance(value, TensorReference):
        if found is None or np.prod(value.shape) > 64:
            return None
        return found.raw(value).array().tolist()
    if isinstance(value, Namespace):
        return {key: plain(each, found) for key, each in vars(value).items() if key != "args"}
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return None
