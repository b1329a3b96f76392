"""Reads the layouts in which a job can run, and the sizes of its model, from the variables of its submission."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from unicron_ctl.shared.protocol import ranges
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_detector.words import plural
from unicron_transition.generations.layout import StatedLayout, parse_layout

LAYOUTS, MODEL = "UNICRON_LAYOUTS", "UNICRON_MODEL"
AUTO = "auto"
MOST_STAGES = 1024  # that `auto` tries by itself
REQUIRED_SIZES = ("layers", "hidden", "heads", "seq-length", "vocab", "global-batch")
SIZES = (*REQUIRED_SIZES, "micro-batch", "recompute")  # sequences of a micro-batch, by default 1; 1: full recomputation


def read_model(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the model's sizes, {} without any. Raises UserError, one line."""
    text = environment.get(MODEL, "").strip()
    sizes: dict[str, int] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in SIZES or name in sizes or not value.isascii() or not value.isdecimal():
            raise _wrong(MODEL, f"{word} is {'there twice' if name in sizes else 'no size of a model'}", _EXAMPLE)
        sizes[name] = int(value)
        if not int(name != "recompute") <= sizes[name] <= ranges.MOST_COUNT:
            raise _wrong(MODEL, f"{word} is out of range", _EXAMPLE)
    missing = [name for name in REQUIRED_SIZES if name not in sizes]
    if text and missing:
        raise _wrong(MODEL, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", _EXAMPLE)
    return sizes


def read_layouts(environment: Mapping[str, str], per_node: int, nodes: int, model: Mapping[str, int]) -> list[str]:
    """Return the layouts, the preferred first, as :attr:`StatedLayout.text` writes them; [] without any. per_node:
    ranks of a node; nodes: the most that the job can have. Raises UserError, one line, for a layout that no number of
    nodes can run."""
    text = environment.get(LAYOUTS, "").strip()
    if not text:
        return []
    words = text.split()
    found = _all(words[1:], per_node, nodes, model) if words[0] == AUTO else [_read(one) for one in text.split(",")]
    names = [one.text for one in found]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise _wrong(LAYOUTS, f"{double} is there twice", "name each layout once")
    if len(names) > ranges.MOST_LAYOUTS:
        raise _wrong(LAYOUTS, f"{len(names)} layouts are too many", f"name at most {ranges.MOST_LAYOUTS}")
    for one in found:
        if problem := misfit(one, per_node, nodes, model):
            raise _wrong(LAYOUTS, f"{one.text} {problem}", "leave it out")
    return names


def misfit(one: StatedLayout, per_node: int, nodes: int, model: Mapping[str, int]) -> str:
    """Return why no number of nodes can run the layout; empty if one can."""
    size = one.layout.size
    if size > per_node * nodes:
        return f"needs {size} ranks, and the job has at most {per_node * nodes} ({plural(nodes, 'node')} of {per_node})"
    if size % per_node and per_node % size:
        return f"is a replica of {size} ranks, which neither fills nodes of {per_node} ranks nor shares one evenly"
    shared = {
        "heads": (one.layout.tensor, "heads"),
        "layers": (one.layout.pipeline * one.virtual, "layers"),
        "hidden": (one.layout.shard, "hidden units"),  # a session refuses uneven shards
    }
    for name, (parts, words) in shared.items() if model else ():
        if model[name] % parts:
            return f"cannot share out the model's {model[name]} {words}"
    return ""


def _read(text: str) -> StatedLayout:
    try:
        return parse_layout(text)
    except ValueError as error:
        instead = 'several are parted by commas, "auto TP8 PP4" tries all up to there'
        raise _wrong(LAYOUTS, str(error), instead) from None


def _all(limits: list[str], per_node: int, nodes: int, model: Mapping[str, int]) -> list[StatedLayout]:
    """Return the layouts that fit, fewest ranks first; tensor parallelism stays within a node."""
    if not model:
        raise _wrong(LAYOUTS, f"{AUTO} needs the sizes of the model", f'give {MODEL}="{_SIZES}"')
    deepest = min(model["layers"], per_node * nodes, MOST_STAGES)
    most = _read(" ".join(limits)) if limits else StatedLayout(parse_layout(f"TP{per_node} PP{deepest}").layout)
    if most.virtual > 1:
        raise _wrong(LAYOUTS, f"{AUTO} tries no virtual stages (VPP{most.virtual})", "name those layouts one by one")
    tensor, shards = _powers(min(most.layout.tensor, per_node)), _powers(most.layout.shard)
    ways = product(tensor, range(1, most.layout.pipeline + 1), shards)
    found = [_read(f"TP{tp} PP{pp} F{shard}") for tp, pp, shard in ways]
    fit = [one for one in found if not misfit(one, per_node, nodes, model)]
    if not fit:
        unfit = f"no layout up to {most.text} fits this model and {plural(nodes, 'node')}"
        raise _wrong(LAYOUTS, unfit, "name the layouts")
    return sorted(fit, key=lambda one: one.layout.size)


def _powers(most: int) -> list[int]:
    """Return the powers of two up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _wrong(name: str, what: str, instead: str) -> UserError:
    return UserError(f"{name}: {what}: {instead}", WRONG_USE)


_SIZES = "layers=32 hidden=4096 heads=32 seq-length=2048 vocab=51200 global-batch=512"
_EXAMPLE = f'write it like "{_SIZES}", and micro-batch=1, recompute=1 where they are so'
