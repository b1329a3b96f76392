"""Writes the checkpoint of an index in another format: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unicron_transition.snapshot.formats import format_table, megatron_arguments, names, own, safetensors
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index
from unicron_transition.snapshot.formats.written import FLOATS, Options
from unicron_transition.snapshot.model_facts import other_arithmetic, other_heads

NO_ROOM = "{} cannot be written ({}): make room, or give another folder"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Result = TypeVar("Result")


def export(
    index: Index,
    out: Path,
    form: str,
    table: str = "",
    config: Path | None = None,
    dtype: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the checkpoint to `out`, which must not exist yet. form: one of `format_table.EXPORTS`. table, config,
    dtype, say: as in `Options`. Raises BadCheckpoint, OSError, and leaves nothing behind then."""
    to = format_table.BY_NAME[form]
    write = to.write
    if write is None or (dtype and (dtype not in FLOATS or not to.weights_only)):
        raise BadCheckpoint(f"--dtype is one of {', '.join(FLOATS)}, and for safetensors")
    _adopt(index, config, say)
    options = Options(table, config, dtype, say)
    _whole(out, lambda folder: write(folder, index, options))


def _adopt(index: Index, config: Path | None, say: Callable[[str], None]) -> None:
    """Report what the index lacks, and add the facts of a config.json that the checkpoint does not have. Raises
    BadCheckpoint if the two differ."""
    common = index.common
    for line in common.losses():
        say(line)
    if config is None:
        return
    facts = safetensors.facts_of(config)
    here = "in the checkpoint"
    differences = other_arithmetic(facts.arguments, common.facts.arguments, here)
    wrong = [other_heads(facts, common.facts, here), *differences]
    if difference := next(filter(None, wrong), ""):
        raise BadCheckpoint(f"{config} is of another model ({difference}): give this model's")
    common.facts = common.facts.or_else(facts)


def import_(
    index: Index, out: Path, table: str = "", config: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> Path:
    """Write the checkpoint as one of Unicron's own to the folder of checkpoints `out`, and return its folder. table,
    config, say: as in `Options`. Raises BadCheckpoint, OSError."""
    _adopt(index, config, say)
    if others := index.common.facts.arguments.get(megatron_arguments.NO_COUNTERPART):
        say(f"config.json says {others}: no weight shows it, see that the model that is trained computes so")
    theirs = format_table.BY_NAME[index.format].has_their_names(index)
    if table or (theirs and names.choose("", index, to_theirs=False) is not None):
        index = names.rename(index, table, index.common.facts)
    kinds = {tensor.dtype for tensor in index.parameters() if index.states(tensor.name)}
    if len(kinds) == 1 and not index.common.facts.dtype:
        index.common.facts.dtype = kinds.pop()
    return _undone(out, lambda: own.write(out, index))


def _whole(out: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder, which gets the name `out` when it is complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadCheckpoint(f"{out} is there already: give another folder")
    new = out.with_name(f"{out.name}.{os.getpid()}.new")

    def fill() -> None:
        new.mkdir(parents=True)
        try:
            write(new)
            if out.exists():
                out.rmdir()
            new.rename(out)
        except RuntimeError as error:  # of torch, for a full disk for example
            cause = error.__context__
            if isinstance(cause, KeyboardInterrupt | SystemExit):  # torch complains about its unfinished file then
                raise cause from None
            why = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
            raise BadCheckpoint(NO_ROOM.format(out, why)) from None
        finally:
            shutil.rmtree(new, ignore_errors=True)  # it is gone if it was renamed

    _undone(out, fill)


def _undone(out: Path, write: Callable[[], Result]) -> Result:
    """Call `write`, which makes `out`, and return its result. If it fails, remove the folders that it made. Raises
    BadCheckpoint, OSError."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        return write()
    except BaseException as error:
        with contextlib.suppress(OSError):
            for folder in made:
                if folder.exists():
                    folder.rmdir()
        if isinstance(error, OSError) and error.errno in FULL:
            raise BadCheckpoint(NO_ROOM.format(out, error.strerror)) from None
        raise
