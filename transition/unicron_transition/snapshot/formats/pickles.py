"""Reads the pickles in the checkpoints of Megatron and torch, which anybody could have written.

A pickle can only make objects of the tables below, most of them records without behaviour. No module is imported for
it, no other function is called, and every other name is refused. A small pickle can describe something endless, such as
nested lists that each appear twice. So each reading has a budget that grows with the size of the file. The pickle
module's reader in Python does the work: unlike the one in C, it can be interrupted, and allocates nothing in advance.
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
from typing import Any, BinaryIO, ClassVar

import numpy as np

from unicron_transition.snapshot.formats.index import BadCheckpoint, Raw, check_shape, row_major
from unicron_transition.snapshot.image_format import RAW
from unicron_transition.snapshot.reading import DENSE, allowance, open_plain, text_in

LEAST = 1 << 22  # the budget of the smallest pickle
FEW = 64  # elements of a tensor that counts as a plain value
VALUE, READ = 32, 4096  # the cost of a value, about its bytes in memory; the cost of reading a tensor


class Budget:
    """The budget for reading a pickle of `size` bytes. Raises BadCheckpoint when it is spent."""

    def __init__(self, path: Path, size: int):
        self._path, self._left = path, LEAST + DENSE * size

    def spend(self, cost: int) -> None:
        """Count a cost in bytes."""
        self._left -= cost
        if self._left < 0:
            raise BadCheckpoint(f"{self._path}: what it describes is far larger than itself: it is damaged, or a trap")


class Record:
    """An object without behaviour: its arguments and its state."""

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
        """Accept an element of a list of another class, and forget it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Namespace(Record):
    """Megatron-LM's arguments."""


@dataclass(frozen=True)
class StorageReference:
    """A storage of torch: the key of its file in the archive, and the type of its elements."""

    key: str
    dtype: str


@dataclass(frozen=True)
class TensorReference:
    """A tensor in a file of torch.save, without its elements."""

    storage: StorageReference
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: StorageReference, offset: int, shape: Any, strides: Any, *_: Any) -> TensorReference:
    if not isinstance(storage, StorageReference):
        raise pickle.UnpicklingError("a tensor without a storage")
    return TensorReference(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _tensor_of_kind(
    storage: Any, offset: int, shape: Any, strides: Any, _: Any, hooks: Any, kind: Any, *__: Any
) -> Any:
    """Make a tensor of a type without a class of storages: its storage is one of bytes."""
    if not isinstance(storage, StorageReference) or not isinstance(kind, str):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _tensor(StorageReference(storage.key, kind), offset, shape, strides)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if function not in (_tensor, _tensor_of_kind, _parameter):
        raise pickle.UnpicklingError("a tensor that no function of torch makes")
    return function(*args)


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "utf-8"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytes:
    return _encode(data, encoding.replace("-", "")) if isinstance(data, str) else bytes(memoryview(data))


def _scalar(kind: Any, data: bytes = b"") -> Any:
    return np.frombuffer(data, kind.numpy if isinstance(kind, _Type) else np.dtype("u1"))[0].item()


def _dtype(text: str, *_: Any) -> Any:
    if not isinstance(text, str) or not re.fullmatch(r"[<>=|]?[?biufcSU]\d{0,3}", text):
        raise pickle.UnpicklingError(f"numpy type {text!r}")
    return _Type(text)


class _Type(Record):
    """A numpy type. Its state has the byte order."""

    def __init__(self, text: str):
        super().__init__(text)
        self.numpy = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.numpy = self.numpy.newbyteorder(">")


class _Array(Record):
    """A numpy array, with its elements as bytes."""


class _OrderedDict(collections.OrderedDict[Any, Any]):
    """A state_dict, without its attributes."""

    def __setstate__(self, state: Any) -> None:
        pass


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
    """A class of storages; its text is the type of the elements."""


# (module, name) -> the value, class or function that takes its place
_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("_codecs", "encode"): _encode,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "getattr"): lambda *_: Record(),  # an enumeration in a namespace, which is not read
    **{
        (f"pathlib{part}", f"{kind}Path"): lambda *parts: "/".join(parts)
        for part in ("", "._local")
        for kind in ("Posix", "PurePosix")
    },
    ("datetime", "timedelta"): Record,
    ("io", "BytesIO"): Record,
    ("_io", "BytesIO"): Record,
    ("torch", "Size"): lambda values=(): tuple(map(int, values)),
    ("torch", "device"): Record,
    ("torch", "Tensor"): Record,
    ("torch.serialization", "_get_layout"): lambda text: text,
    ("torch.storage", "UntypedStorage"): _Storage("uint8"),
    ("torch", "UntypedStorage"): _Storage("uint8"),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_kind,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    **{("torch", name): _Storage(kind) for name, kind in _STORAGES.items()},
    **{("torch", kind): kind for kind in RAW},
    **{
        (f"numpy.{module}.multiarray", name): value
        for module in ("core", "_core")
        for name, value in (("scalar", _scalar), ("_reconstruct", _Array))
    },
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): Record,
}
# Types of elements, also unknown ones: their tensors are listed as unread, and the others are read.
_KIND = re.compile(r"(?:b?float|complex|u?int|qu?int|bits)\d\w*")
# Modules of which every class becomes a record: torch's format of checkpoints, and Megatron's options and states.
_RECORDS = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.",
    "megatron.training.",
    "megatron.legacy.",
    "signal.",
)
# Refused: what pickles of Python 3 do not need, and what is outside of the pickle.
_OTHER_CODES = (
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INST,
    pickle.OBJ,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)
_KEYS = (str, bytes, int, float, complex, type(None), Record, StorageReference)


def _check_keys(keys: Any) -> None:
    """Raises UnpicklingError for keys that take long to hash: tuples of tuples, and endless numbers."""
    for key in keys:
        for part in key if isinstance(key, tuple) and len(key) <= FEW else (key,):
            if not isinstance(part, _KEYS) or (isinstance(part, int) and part.bit_length() > 64):
                raise pickle.UnpicklingError(f"a key of the kind {type(part).__name__}")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set | frozenset) else 1


_CALLABLES = {id(each) for each in _NAMES.values() if callable(each)}
_InPython: Any = pickle._Unpickler  # type checkers do not know its methods


def _check_first(load: Any, step: int) -> Any:
    """Return a method that checks the keys first: every `step`-th object on the stack since the last mark."""

    def load_checked(self: Any) -> None:
        _check_keys(self.stack[::step])
        load(self)

    return load_checked


class _TableUnpickler(_InPython):  # type: ignore[misc]
    """Makes only objects of the tables."""

    dispatch: ClassVar[dict[int, Any]] = {
        op: load for op, load in _InPython.dispatch.items() if bytes([op]) not in _OTHER_CODES
    }

    def __init__(self, data: bytes, path: Path, budget: Budget):
        super().__init__(io.BytesIO(data))
        self._path, self._budget = path, budget

    def _call(self, function: Any, args: Any, keywords: Any = None) -> Any:
        """Call a function or class of the tables. Raises UnpicklingError for any other object."""
        record = isinstance(function, Record) or (isinstance(function, type) and issubclass(function, Record))
        if not record and id(function) not in _CALLABLES:
            raise pickle.UnpicklingError(f"a call of {type(function).__name__}")
        keywords = keywords or {}
        self._budget.spend(VALUE + sum(map(_length, args)) * 8 + len(keywords) * VALUE)
        if function in (set, frozenset, _OrderedDict):
            keys = [key for each in args for key in each]
            self._budget.spend(VALUE * len(keys))
            _check_keys((key for key, _ in keys) if function is _OrderedDict else keys)
        return function(*args, **keywords)

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.append(self._call(function, args))

    def _newobj_ex(self) -> None:
        keywords, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.append(self._call(function, args, keywords))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Record | _OrderedDict):
            raise pickle.UnpicklingError(f"a state of {type(made).__name__}")
        parts = state if isinstance(state, tuple) else (state,)
        self._budget.spend(VALUE * sum(len(part) for part in parts if isinstance(part, dict)))
        made.__setstate__(state)

    def _bytearray8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(min(length, 1 << 62))))

    def _empty_set(self) -> None:
        self._budget.spend(8 * VALUE)
        self.append(set())

    def _set_item(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    for _op, _load in (
        (pickle.REDUCE, _reduce),
        (pickle.NEWOBJ, _reduce),
        (pickle.NEWOBJ_EX, _newobj_ex),
        (pickle.BUILD, _build),
        (pickle.BYTEARRAY8, _bytearray8),
        (pickle.EMPTY_SET, _empty_set),
        (pickle.SETITEM, _set_item),
        (pickle.SETITEMS, _check_first(_InPython.load_setitems, 2)),
        (pickle.DICT, _check_first(_InPython.load_dict, 2)),
        (pickle.ADDITEMS, _check_first(_InPython.load_additems, 1)),
        (pickle.FROZENSET, _check_first(_InPython.load_frozenset, 1)),
    ):
        dispatch[_op[0]] = _load

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get(("builtins" if module == "__builtin__" else module, name))  # as torch.save spells it
        if found is not None:
            return found
        if module == "torch" and _KIND.fullmatch(name):
            return name
        if f"{module}.".startswith(_RECORDS) and name.replace(".", "").replace("_", "").isalnum():
            self._budget.spend(READ)
            return _record(module, name)
        named = f"{module}.{name}"[:100]
        raise BadCheckpoint(f"{self._path}: its pickle names {named}, which no checkpoint needs: it is not read")

    def persistent_load(self, pid: Any) -> StorageReference:
        if isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage" and isinstance(pid[1], _Storage):
            return StorageReference(str(pid[2]), str(pid[1]))
        raise BadCheckpoint(f"{self._path}: its pickle names a storage that is none of torch's")


@functools.cache
def _record(module: str, name: str) -> type[Record]:
    return type(name.rpartition(".")[2], (Record,), {"__module__": f"unread.{module}"})


def unpickle(data: bytes, path: Path, budget: Budget | None = None) -> Any:
    """Read a pickle as plain values and records. path: for messages. Raises BadCheckpoint."""
    try:
        return _TableUnpickler(data, path, budget or Budget(path, len(data))).load()
    except BadCheckpoint:
        raise
    except Exception as error:  # a bad pickle can cause any error
        raise BadCheckpoint(f"{path}: its pickle cannot be read ({type(error).__name__}: {str(error)[:100]})") from None


# ------------------------------------------------------------ torch's archives
class _Window(io.RawIOBase):
    """A part of a file, of which only a bounded number of bytes can be read. Raises OSError."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        self._file, self._offset, self._length, self._at = file, offset, length, 0
        self._left = allowance(file)

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
        self._left -= size
        if self._left < 0:
            raise ValueError("what is in it is larger than what is written of it")
        self._file.seek(self._offset + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


_LOCAL = struct.Struct("<4s22xHH")  # in a zip's local header: the mark, the lengths of name and extra field


@dataclass
class Archive:
    """A file of `torch.save`, or a part of a file."""

    path: Path
    content: Any
    """The object, with references in place of tensors."""
    storages: dict[str, tuple[int, int, int]]
    """Key -> (first byte in the file, number of bytes, their CRC-32)."""
    budget: Budget
    """The rest of the budget, for :func:`plain`."""

    def raw(self, tensor: TensorReference) -> Raw:
        """Return the place of a tensor's elements. Raises BadCheckpoint if they are not in the file."""
        kind = tensor.storage.dtype
        if tensor.storage.key not in self.storages or kind not in RAW:
            raise BadCheckpoint(f"{self.path}: the bytes of one of its tensors are not there")
        begin, length, crc = self.storages[tensor.storage.key]
        size = np.dtype(RAW[kind]).itemsize
        check_shape(str(self.path), tensor.shape)
        pairs = zip(tensor.shape, tensor.strides, row_major(tensor.shape), strict=True)
        dense = all(extent < 2 or stride == wanted for extent, stride, wanted in pairs) or not all(tensor.shape)
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
        # With negative strides, the last element could be inside of the storage and others outside.
        outside = tensor.offset < 0 or min(tensor.strides, default=0) < 0 or (tensor.offset + last + 1) * size > length
        if all(tensor.shape) and (outside or math.prod(tensor.shape) * size > length):
            raise BadCheckpoint(f"{self.path}: one of its tensors is larger than its bytes")
        strides = None if dense else tensor.strides
        whole = tensor.offset == 0 and math.prod(tensor.shape) * size == length
        known = crc if whole and crc and strides is None else None  # 0: torch wrote no checksums
        return Raw(self.path, begin + tensor.offset * size, kind, tensor.shape, strides, known)


def archive(path: Path, offset: int = 0, length: int | None = None) -> Archive:
    """Open what `torch.save` wrote, without reading the elements of tensors. Raises BadCheckpoint, OSError."""
    with open_plain(path) as file:
        size = path.stat().st_size
        end = size if length is None else offset + length
        if offset < 0 or end > size:
            raise BadCheckpoint(f"{path} is cut off: it ends before byte {end}")
        try:
            content, storages = _unpack(path, file, offset, end)
        except (BadCheckpoint, OSError):
            raise
        except Exception as error:  # zipfile raises many kinds of errors
            raise BadCheckpoint(
                f"{path}: not an archive of torch.save{text_in(file)} ({str(error)[:100]}): it is damaged, "
                "or of a torch before 1.6 and has to be saved anew"
            ) from None
    budget = Budget(path, len(content))
    return Archive(path, unpickle(content, path, budget), storages, budget)


def _unpack(path: Path, file: BinaryIO, offset: int, end: int) -> tuple[bytes, dict[str, tuple[int, int, int]]]:
    """Return the pickle of an archive, and the places of its storages."""
    packed = zipfile.ZipFile(_Window(file, offset, end - offset))
    entries = packed.infolist()
    for each in entries:
        if not each.CRC:  # torch wrote no checksums; without the attribute none is compared
            del each.CRC
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
        raise BadCheckpoint(f"{path}: it is compressed, which torch.save never does: save it anew")
    pickles = [each for each in entries if each.filename.endswith("data.pkl")]
    if len(pickles) != 1:
        raise BadCheckpoint(f"{path}: not a file that torch.save wrote")
    content = packed.read(pickles[0])
    root = pickles[0].filename.removesuffix("data.pkl")
    order = next((packed.read(each) for each in entries if each.filename == f"{root}byteorder"), b"little")
    if order.strip() != b"little":
        raise BadCheckpoint(f"{path}: of a machine with another byte order")
    storages = {}
    for each in entries:
        if each.filename.startswith(f"{root}data/"):
            file.seek(offset + each.header_offset)
            mark, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
            if mark != b"PK\x03\x04":
                raise BadCheckpoint(f"{path}: not an archive of torch.save")
            begin = offset + each.header_offset + _LOCAL.size + name + extra
            if begin + each.file_size > end:
                raise BadCheckpoint(f"{path} is cut off: it ends before byte {begin + each.file_size}")
            storages[each.filename.removeprefix(f"{root}data/")] = begin, each.file_size, getattr(each, "CRC", 0)
    return content, storages


def plain(value: Any, found: Archive) -> Any:
    """Convert content to plain values: namespaces to dictionaries, small tensors to lists, anything else to None.
    Raises BadCheckpoint when the budget is spent."""
    found.budget.spend(VALUE + (len(value) if isinstance(value, str | bytes) else 0))
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): plain(each, found) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, found) for each in value]
    if isinstance(value, TensorReference):
        if math.prod(value.shape) > FEW:
            return None
        found.budget.spend(READ)
        return found.raw(value).array().tolist()
    if isinstance(value, Namespace):
        return {key: plain(each, found) for key, each in vars(value).items() if key != "args"}
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return None
