"""Unicron's own checkpoints, by their index."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.formats.index import (
    PARAMETER,
    STATE,
    BadCheckpoint,
    Block,
    Common,
    Index,
    Raw,
    raw_type,
)
from unicron_transition.snapshot.image_format import ALIGN, STEP, BadImage, Found, read_page
from unicron_transition.snapshot.reading import unpacked

FORMAT = "unicron"


def newest(folder: Path) -> folders.Found | None:
    """The newest whole checkpoint of a folder of checkpoints, or the one in that folder; None for neither."""
    if (match := folders.FOLDER.fullmatch(folder.name)) is not None:
        return next((each for each in folders.whole(folder.parent) if each.iteration == int(match[1])), None)
    return next(iter(folders.whole(folder)), None)


def read(found: folders.Found) -> Index:
    """The index of one. Raises BadCheckpoint, OSError."""
    try:
        pages = [read_page(path) for path in found.paths]
        heads = [_head(page) for page in pages]
    except BadImage as error:
        raise BadCheckpoint(f"{error}: run `unicronctl checkpoint verify`, or use the checkpoint before") from None
    first = heads[0]
    facts = dict(first.get("facts") or {})
    common = Common(
        groups=first["groups"],
        schedule=first["scheduler"],
        scales=first["scales"],
        seed=first["seed"],
        loss=first["loss"],
        args=dict(facts.pop("arguments", {})),
        facts=facts,
    )
    index = Index(FORMAT, found.iteration, first["layout"], {}, common)
    steps: list[float] = []
    for page, head in zip(pages, heads, strict=True):
        for tensor in _tensors(page, head, steps):
            index.add(*tensor)
        for name, *_, others, _ in head["about"]["index"]:
            if others:
                index.others.setdefault(name, {}).update(others)
    group_steps = [group["step"] for group in common.groups if isinstance(group.get("step"), int | float)]
    common.step = max([*steps, *group_steps], default=None)
    return _without_chunk(index)


def _head(page: Found) -> dict[str, Any]:
    head = page.head()
    try:
        told: dict[str, Any] = unpacked(checkpoint_file.file_head(page.key, head))
        told["about"] = unpacked(told["about"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadImage(f"{page.path}: not a training state of this release ({error})") from None
    return told


def laid_out(tensors: list[Any], begin: int) -> list[tuple[str, int, int]]:
    """(dtype, elements, byte in the file or -1 for steps) of each tensor of an image's head. begin: of the data."""
    found, at = [], 0
    for kind, count, *where in tensors:
        if where == [STEP]:
            found.append((kind, count, -1))
            continue
        found.append((kind, count, begin + (where[0] if where else at)))
        at += -(-count * raw_type(kind).itemsize // ALIGN) * ALIGN
    return found


def _tensors(page: Found, head: dict[str, Any], steps: list[float]) -> Iterator[tuple[Any, ...]]:
    """What :meth:`Index.add` takes, of each tensor in a file. steps: gets the counts of steps that it names."""
    places = laid_out(head["about"]["tensors"], page.offset)
    for name, whole, offset, extent, begin, end, keys, others, values in head["about"]["index"]:
        for key, number in keys.items():
            kind, count, at = places[number]
            if at < 0:
                continue
            full = name if key == PARAMETER else f"{STATE}{key}.{name}"
            find = partial(Raw, page.path, at, kind, (count,))
            block = Block(tuple(offset), tuple(extent), begin, end, find)
            yield full, whole, kind, block
        if isinstance(others.get("step"), int | float):
            steps.append(float(others["step"]))
        for key, (number, shape) in values.items():
            kind, count, at = places[number]
            find = partial(Raw, page.path, at, kind, tuple(shape))
            if key == "step":
                steps.append(float(head["step"] if at < 0 else find().array().item()))
            if at >= 0:
                yield f"{STATE}{key}.{name}", shape, kind, Block.of((0,) * len(shape), tuple(shape), find)


def _without_chunk(index: Index) -> Index:
    """Names of a plain module without the number of its chunk, of which there is one."""
    if not all(tensor.name.startswith("0.") for tensor in index.parameters()):
        return index
    for name in list(index.tensors):
        tensor = index.tensors.pop(name)
        if name.startswith(STATE):
            key, _, parameter = name.removeprefix(STATE).partition(".")
            tensor.name = f"{STATE}{key}.{parameter.removeprefix('0.')}"
        else:
            tensor.name = name.removeprefix("0.")
        index.tensors[tensor.name] = tensor
    index.others = {name.removeprefix("0."): others for name, others in index.others.items()}
    return index


def read_sound(found: folders.Found) -> Index:
    """The index of one, all of whose files are read before. Raises BadCheckpoint where one is damaged, and OSError."""
    if wrong := check(found):
        raise BadCheckpoint(wrong[0])
    return read(found)


def check(found: folders.Found) -> list[str]:
    """What is wrong with the files of one, a line each. All of them are read."""
    wrong = []
    for path in found.paths:
        try:
            page = read_page(path)
            _head(page)
            page.check_file()
        except (BadImage, OSError) as error:
            wrong.append(str(error))
    return wrong
