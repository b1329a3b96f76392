"""Tables of names: Hugging Face's names for the tensors of a Megatron model, and their order of rows.

An entry is a list of pieces: rows of one tensor that are rows, or columns, of another. So a table works in both
directions, and renaming a tensor copies nothing.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unicron_transition.snapshot.formats.index import (
    EMBEDDING,
    STATE,
    VOCABULARY,
    Array,
    BadCheckpoint,
    Block,
    Index,
    Place,
    Raw,
    Tensor,
    raw_type,
)
from unicron_transition.snapshot.formats.written import Out, cast, of
from unicron_transition.snapshot.model_facts import ModelFacts

TABLES = Path(__file__).with_name("names.toml")
MEGATRON, AUTOMATIC = "megatron", "auto"
MISTRALS = "tok_embeddings.weight"
OTHER_ROWS = (
    "the tensors are named as in Mistral's and Meta's consolidated files, whose queries and keys have another order of "
    "rows: take the repository's model*.safetensors, or convert them with transformers, or give a table with --names"
)
HEADS = "the number of heads is not known: give the model's config.json with --config"


@dataclass(frozen=True)
class Entry:
    """A line of a table."""

    mine: str
    theirs: tuple[str, ...]
    """Names with `{}` for the layer."""
    qkv: bool = False
    transposed: bool = False

    @property
    def layered(self) -> bool:
        return "{}" in self.theirs[0]

    @property
    def same(self) -> bool:
        """Whether it is one tensor under another name, with the same elements."""
        return len(self.theirs) == 1 and not (self.qkv or self.transposed or self.layered)


@dataclass(frozen=True)
class Table:
    """A table of names."""

    name: str
    entries: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    """Endings of names that hold no weights."""
    needed: str = ""
    """A tensor that only these models have."""
    prefix: str = ""
    """The start of all names, unless the model is saved without its head."""


@dataclass(frozen=True)
class Piece:
    """Rows [begin, begin + count) of tensor number `theirs` of an entry are rows of Megatron's from `mine` on."""

    theirs: int
    begin: int
    mine: int
    count: int


# ------------------------------------------------------------ tables
def tables(path: Path | None = None) -> dict[str, Table]:
    """Return the tables of a file, ours by default. Raises BadCheckpoint."""
    path = path or TABLES
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path}: {error}") from None
    known = tables() if path != TABLES else {}
    if content and not all(isinstance(value, dict) and not {"rows", "qkv"} & set(value) for value in content.values()):
        content = {path.stem: content}  # one table, without a name
    return {name: _table(path, name, lines, known) for name, lines in content.items()}


def _table(path: Path, name: str, lines: dict[str, Any], known: Mapping[str, Table]) -> Table:
    like, ignored = lines.pop("like", None), list(lines.pop("ignored", []))
    needed, prefix = str(lines.pop("needed", "")), lines.pop("prefix", None)
    if like is not None and like not in known:
        raise BadCheckpoint(f"{path}: [{name}] is like {like!r}: there are {', '.join(known)}")
    entries = {entry.mine: entry for entry in known[like].entries} if like else {}
    ignored += known[like].ignored if like else ()
    prefix = str(prefix if prefix is not None else known[like].prefix if like else "")
    for mine, value in lines.items():
        try:
            entries[mine] = _entry(mine, value)
        except (TypeError, ValueError, KeyError) as error:
            raise BadCheckpoint(f"{path}: [{name}] {mine!r}: {error}: see the top of {TABLES.name}") from None
    if not entries:
        raise BadCheckpoint(f"{path}: [{name}] names no tensor")
    return Table(name, tuple(entries.values()), tuple(ignored), needed, prefix)


def _entry(mine: str, value: Any) -> Entry:
    if isinstance(value, str):
        return Entry(mine, (value,))
    wrong = set(value) - {"rows", "qkv", "transposed"}
    if wrong or ("rows" in value) == ("qkv" in value):
        raise ValueError(f"write rows or qkv, not {sorted(value)}")
    theirs = tuple(value.get("rows") or value["qkv"])
    if not all(isinstance(each, str) for each in theirs) or ("qkv" in value and len(theirs) not in (1, 3)):
        raise ValueError("write names: one or three of qkv")
    return Entry(mine, theirs, "qkv" in value, bool(value.get("transposed")))


def choose(names: str, index: Index, to_theirs: bool) -> Table | None:
    """Return the table for `--names`: one of ours, FILE, FILE:TABLE, or with "auto" or "" the one of ours that fits.
    None for Megatron's own names, or if none fits. Raises BadCheckpoint."""
    ours = tables()
    if names == MEGATRON:
        return None
    if names in ours:
        return ours[names]
    if names and names != AUTOMATIC:
        path, _, name = names.partition(":")
        found = tables(Path(path))
        if name and name not in found:
            raise BadCheckpoint(f"{path} has no table {name!r}: there are {', '.join(found)}")
        if not name and len(found) > 1:
            raise BadCheckpoint(f"{path} has several tables: write {path}:{next(iter(found))}, for example")
        return found[name] if name else next(iter(found.values()))
    if not to_theirs and MISTRALS in index.tensors:
        raise BadCheckpoint(OTHER_ROWS)
    fitting = [table for table in ours.values() if (_fits(table, index) if to_theirs else _is_of(table, index))]
    return fitting[0] if len(fitting) == 1 else None


def _fits(table: Table, index: Index) -> bool:
    """Whether the table has all of Megatron's tensors in the index, with the same kind of gated layers."""
    known = {entry.mine for entry in table.entries}
    there = {tensor.name for tensor in index.parameters()}
    gated = any(entry.mine.endswith("linear_fc1.weight") and len(entry.theirs) == 2 for entry in table.entries)
    needed = table.needed in there if table.needed else bool(there)
    return needed and there <= known and index.common.facts.gated in (None, gated)


def _is_of(table: Table, index: Index) -> bool:
    return table.entries[0].theirs[0].format(0) in _add_prefix(index, table).tensors


def _add_prefix(index: Index, table: Table) -> Index:
    """Return the index with the table's prefix in front of all names, if it lacks it."""
    if not table.prefix or any(name.startswith(table.prefix) for name in index.tensors):
        return index
    theirs = {name for entry in table.entries for name in entry.theirs}
    tensors = {name if name in theirs else table.prefix + name: each for name, each in index.tensors.items()}
    return replace(index, tensors=tensors)


# ------------------------------------------------------------ how the rows lie
def _pieces(entry: Entry, rows: int, facts: ModelFacts) -> list[Piece]:
    """Return the pieces of one layer of Megatron's tensor, which has so many rows. Raises BadCheckpoint."""
    if not entry.qkv:
        each, left = divmod(rows, len(entry.theirs))
        if left:
            raise BadCheckpoint(f"{entry.mine}: {rows} rows are not {len(entry.theirs)} equal parts")
        return [Piece(number, 0, number * each, each) for number in range(len(entry.theirs))]
    heads, groups = facts.heads, facts.groups
    if not heads or not groups:
        raise BadCheckpoint(f"{entry.mine}: {HEADS}")
    queries = heads // groups
    size, left = divmod(rows, groups * (queries + 2))
    if left or heads % groups:
        raise BadCheckpoint(f"{entry.mine}: {rows} rows are not those of {heads} heads in {groups} groups")
    one = len(entry.theirs) == 1
    bases = (0, heads * size, (heads + groups) * size) if one else (0, 0, 0)
    found = []
    for group in range(groups):
        at = group * (queries + 2) * size
        for number, (count, mine) in enumerate(
            ((queries, at), (1, at + queries * size), (1, at + (queries + 1) * size))
        ):
            begin = bases[number] + group * count * size
            found.append(Piece(0 if one else number, begin, mine, count * size))
    return found


# ------------------------------------------------------------ theirs to Megatron's
def of_megatron(index: Index) -> bool:
    """Whether the tensors have the names of a Megatron model."""
    return EMBEDDING in index.tensors or index.common.facts.gated is not None


def rename(index: Index, names: str, facts: ModelFacts) -> Index:
    """Return the index under Megatron's names. facts: about the model that gets it; facts in the index come first.
    Raises BadCheckpoint."""
    table = choose(names, index, to_theirs=False)
    if table is None:
        if names == MEGATRON:
            return index
        some = ", ".join(list(index.tensors)[:3])
        raise BadCheckpoint(
            f"no table of names fits this checkpoint, whose tensors are {some}, ...: give one with --names FILE"
        )
    index = _add_prefix(index, table)
    found = Index(index.format, index.iteration, index.layout, {}, index.common)
    found.common.facts = index.common.facts.or_else(facts)
    used: set[str] = set()
    for entry in table.entries:
        layers = _layers(entry, index)
        if layers:
            used |= _add(found, entry, index, layers)
    left = [name for name in index.tensors if name not in used and not name.endswith(table.ignored or ("\0",))]
    if left:
        first = index.tensors[left[0]].name
        raise BadCheckpoint(
            f"the table {table.name} has no place for {first} ({len(left)} in all): add it with --names FILE"
        )
    return found


def _layers(entry: Entry, index: Index) -> int:
    """Count the layers that have this entry's tensors."""
    if not entry.layered:
        return int(entry.theirs[0] in index.tensors)
    count = 0
    while entry.theirs[0].format(count) in index.tensors:
        count += 1
    return count


def _add(found: Index, entry: Entry, index: Index, layers: int) -> set[str]:
    if entry.same:
        (name,) = entry.theirs
        found.tensors[entry.mine] = replace(index.tensors[name], name=entry.mine)
        return {name}
    used: set[str] = set()
    for layer in range(layers):
        names = [name.format(layer) for name in entry.theirs]
        missing = [name for name in names if name not in index.tensors]
        if missing:
            raise BadCheckpoint(f"{missing[0]} is not there, and {names[0]} is")
        theirs = [index.tensors[name] for name in names]
        used |= set(names)
        rest = _rest(entry, theirs[0])
        rows = sum(tensor.shape[-1 if entry.transposed else 0] for tensor in theirs)
        shape = (layers, rows, *rest) if entry.layered else (rows, *rest)
        pieces = _pieces(entry, rows, found.common.facts)
        _check_rows(entry, theirs, pieces)
        for piece in pieces:
            tensor = theirs[piece.theirs]
            extent = (piece.count, *rest)
            offset: Place = (piece.mine, *(0 for _ in rest))
            if entry.layered:
                offset, extent = (layer, *offset), (1, *extent)
            find = partial(_part, tensor, piece, entry.transposed)
            found.add(entry.mine, shape, tensor.dtype, Block.of(offset, extent, find))
    return used


def _check_rows(entry: Entry, theirs: Sequence[Tensor], pieces: Iterable[Piece]) -> None:
    """Raises BadCheckpoint unless the tensors have just the rows that the pieces take from them."""
    for number, tensor in enumerate(theirs):
        wanted = sum(piece.count for piece in pieces if piece.theirs == number)
        if (rows := tensor.shape[-1 if entry.transposed else 0]) != wanted:
            why = "the heads and groups of config.json are not this model's" if entry.qkv else "its parts are not equal"
            raise BadCheckpoint(f"{tensor.name} has {rows} rows, and {wanted} belong into {entry.mine}: {why}")


def _rest(entry: Entry, tensor: Tensor) -> Place:
    if len(tensor.shape) not in ((2,) if entry.transposed else (1, 2)):
        raise BadCheckpoint(f"{tensor.name} has {len(tensor.shape)} dimensions, and the table has it otherwise")
    return tensor.shape[:1] if entry.transposed else tensor.shape[1:]


def _part(tensor: Tensor, piece: Piece, transposed: bool) -> Raw:
    """Return the place of a piece's rows in a file."""
    block = tensor.blocks[0]
    if len(tensor.blocks) != 1 or not block.whole or block.find is None:
        raise BadCheckpoint(f"{tensor.name} is cut into blocks: it cannot be renamed")
    raw = block.find()
    if raw.strides is not None:
        raise BadCheckpoint(f"{tensor.name} does not lie row by row: it cannot be renamed")
    size = raw_type(raw.dtype).itemsize
    if transposed:
        inside, outside = tensor.shape
        return Raw(raw.path, raw.offset + piece.begin * size, raw.dtype, (piece.count, inside), (1, outside))
    width = math.prod(tensor.shape[1:])
    return Raw(raw.path, raw.offset + piece.begin * width * size, raw.dtype, (piece.count, *tensor.shape[1:]))


# ------------------------------------------------------------ Megatron's to theirs
def outs(index: Index, names: str, dtypes: Mapping[str, str]) -> list[Out] | None:
    """Return the model's tensors under Hugging Face's names, None if no table fits and none was asked for. dtypes: by
    Megatron's name, "" for that of the index. Raises BadCheckpoint."""
    table = choose(names, index, to_theirs=True)
    if table is None:
        return None
    known = {entry.mine: entry for entry in table.entries}
    lost = [tensor.name for tensor in index.parameters() if tensor.name not in known]
    if lost:
        raise BadCheckpoint(f"the table {table.name} has no name for {lost[0]}: add it with --names FILE")
    return list(_all(index, known, dtypes))


def _all(index: Index, known: Mapping[str, Entry], dtypes: Mapping[str, str]) -> Iterator[Out]:
    for tensor in index.parameters():
        entry, facts, dtype = known[tensor.name], index.common.facts, dtypes[tensor.name]
        if entry.same and tensor.name not in VOCABULARY:
            yield of(tensor, entry.theirs[0], dtype)
            continue
        layers = tensor.shape[0] if entry.layered else 1
        rows = tensor.shape[1 if entry.layered else 0]
        rest = tensor.shape[2 if entry.layered else 1 :]
        pieces = _pieces(entry, rows, facts)
        for layer in range(layers):
            for number, name in enumerate(entry.theirs):
                mine = [piece for piece in pieces if piece.theirs == number]
                count = sum(piece.count for piece in mine)
                if tensor.name in VOCABULARY and 0 < facts.vocabulary < count:
                    count = facts.vocabulary
                    mine = [Piece(0, 0, 0, count)]
                shape = (*rest, count) if entry.transposed else (count, *rest)
                read = partial(_theirs, tensor, entry, layer, mine, shape, dtype)
                box = ((0,) * len(shape), shape)
                yield Out(name.format(layer), shape, dtype or tensor.dtype, [box], read)


def _theirs(
    tensor: Tensor, entry: Entry, layer: int, pieces: list[Piece], shape: Place, dtype: str, *_: Place
) -> Array:
    wanted = dtype or tensor.dtype
    found: Array = np.empty(shape, raw_type(wanted))
    for piece in pieces:
        rest = tensor.shape[2:] if entry.layered else tensor.shape[1:]
        offset: Place = (piece.mine, *(0 for _ in rest))
        extent: Place = (piece.count, *rest)
        if entry.layered:
            offset, extent = (layer, *offset), (1, *extent)
        rows = cast(tensor.read(offset, extent), tensor.dtype, wanted).reshape(piece.count, *rest)
        end = piece.begin + piece.count
        if entry.transposed:
            found[:, piece.begin : end] = rows.T
        else:
            found[piece.begin : end] = rows
    return found


# ------------------------------------------------------------ plain modules
# Prefixes that scripts give to a module's names. `0.` is the number of a session's only chunk.
OUTER = ("0.", "", *(f"{chunk}{head}" for head in ("model.", "module.", "state_dict.") for chunk in ("0.", "")))
WRAPPERS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Match(NamedTuple):
    """The tensors of a plain module in a checkpoint."""

    chosen: dict[str, str]
    """Name here -> name there."""
    twins: list[tuple[str, str]]
    """Pairs there that are one tensor here."""
    left: list[str]
    """Tensors of the checkpoint's model that this model does not have."""
    beside: list[str]
    """Tensors that are not of the checkpoint's model."""


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the wrappers in it, which other programs have not."""
    return WRAPPERS.sub("", name)


def match(there: Mapping[str, bool], mine: Mapping[str, str]) -> Match | None:
    """Find a plain module's tensors in a checkpoint, under any prefix; None if some are missing. there: name -> whether
    an optimizer has a state for it. mine: name -> the first name of the same tensor. Raises BadCheckpoint if the model
    is there twice."""
    bare = {without_wrappers(name): name for name in there}
    fitting = _fitting_heads(bare, mine)
    if not fitting:
        return None
    head, names = fitting[0]
    root = _root(head)
    twice = next((other for other, _ in fitting if _root(other) != root), None)
    if twice is not None and head not in OUTER:
        raise BadCheckpoint(f"it has the model twice, as {head}* and as {twice}*: save one of them")
    found: dict[str, list[str]] = {}
    for name, first in names.items():
        if name in bare:
            found.setdefault(first, []).append(bare[name])
    chosen = {first: max(same, key=lambda name: there[name]) for first, same in found.items()}
    twins = [(chosen[first], name) for first, same in found.items() for name in same if name != chosen[first]]
    others = [name for name in there if without_wrappers(name) not in names]
    beside = [name for name in others if root and _root(name) != root]
    return Match(chosen, twins, [name for name in others if name not in beside], beside)


def _fitting_heads(bare: Mapping[str, str], mine: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """List the prefixes under which all of a module's tensors are there, the likeliest first, with the module's names
    under each. bare: the names there, without wrappers."""
    short = {without_wrappers(name.partition(".")[2]): first for name, first in mine.items()}
    longest = max(short, key=lambda key: key.count("."), default="")
    anchors = [key for key, first in short.items() if first == short[longest]]
    pairs = dict.fromkeys(filter(None, (_heads(name, key) for key in anchors for name in bare)))
    found = []
    for head, tail in sorted(pairs, key=lambda pair: OUTER.index(pair[0]) if pair[0] in OUTER else len(OUTER)):
        names = {head + key.removeprefix(tail): first for key, first in short.items() if key.startswith(tail)}
        if {first for name, first in names.items() if name in bare} == set(mine.values()):
            found.append((head, names))
    return found


def _root(name: str) -> str:
    return name.removeprefix("0.").partition(".")[0]


def _heads(name: str, key: str) -> tuple[str, str] | None:
    """Return the different prefixes of two names with a common end, None if their ends differ."""
    one, other = name.split("."), key.split(".")
    count = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one[::-1], other[::-1], strict=False))
    )
    begins = [".".join([*each[: len(each) - count], ""]) for each in (one, other)]
    return (begins[0], begins[1]) if count else None


def select(index: Index, chosen: Mapping[str, str]) -> Index:
    """Return an index of these tensors under other names (new -> old), with the optimizer's state for them."""
    found = replace(index, tensors={}, others={})
    for fresh, old in chosen.items():
        found.tensors[fresh] = replace(index.tensors[old], name=fresh)
        for key, tensor in index.states(old).items():
            name = f"{STATE}{key}.{fresh}"
            found.tensors[name] = replace(tensor, name=name)
        if old in index.others:
            found.others[fresh] = index.others[old]
    return found
