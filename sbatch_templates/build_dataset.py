"""Make a Megatron indexed dataset (`PREFIX.bin`, `PREFIX.idx`) from a folder of text, byte by byte.

    python build_dataset.py --input FOLDER --output PREFIX [--suffix .py]... [--recursive] [--limit-mb N]

Each file is one document: its bytes (tokens 0-255), then the end-of-document token 256; the vocabulary is 257. The same
files give the same dataset, whatever order the file system lists them in. Both outputs appear complete or not at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

END_OF_DOCUMENT = 256
VOCABULARY = 257


class InputError(Exception):
    """Wrong use; the text is one line that says what to do next."""


class OneLineParser(argparse.ArgumentParser):
    """argparse without its page of usage in front of every error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"build_dataset: {message} (--help lists the options)\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description="Make a byte-level Megatron indexed dataset from a folder of text.")
    parser.add_argument("--input", required=True, type=Path, metavar="FOLDER", help="folder of text files")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--suffix",
        action="append",
        metavar=".EXT",
        help="take files with this ending only; may be repeated (default: all)",
    )
    parser.add_argument("--recursive", action="store_true", help="take the sub-folders too")
    parser.add_argument(
        "--limit-mb", type=float, metavar="N", help="stop before the text exceeds N megabytes (10^6 bytes)"
    )
    options = parser.parse_args(arguments)
    if options.limit_mb is not None and not options.limit_mb > 0:
        parser.error("--limit-mb must be above 0")
    return options


def find_files(folder: Path, suffixes: list[str] | None, recursive: bool) -> list[Path]:
    """Regular files below `folder` in the order of their relative names. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give a folder of text files with --input")
    try:
        candidates = folder.rglob("*") if recursive else folder.iterdir()
        found = [
            path
            for path in candidates
            if path.is_file() and (not suffixes or path.name.endswith(tuple(suffixes))) and path.stat().st_size > 0
        ]
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None
    if not found:
        wanted = f" ending in {' or '.join(suffixes)}" if suffixes else ""
        raise InputError(
            f"no files{wanted} in {folder}: check --input and --suffix"
            + ("" if recursive else ", or add --recursive for sub-folders")
        )
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def build(files: list[Path], output: Path, limit_bytes: float | None = None) -> tuple[int, int]:
    """Write the dataset; returns (documents, tokens).

    Raises InputError when nothing fits the limit or a path can't be used.
    """
    temporary = {suffix: Path(f"{output}{suffix}.tmp{os.getpid()}") for suffix in (".bin", ".idx")}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary[".bin"].touch()  # before the slow import
    except OSError as error:
        raise InputError(f"cannot write {output}.bin: {error.strerror}: choose another --output") from None
    try:
        counts = _write(files, temporary, limit_bytes)
        # .idx last: a reader that finds it finds the .bin that belongs to it.
        Path(f"{output}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(temporary[suffix], f"{output}{suffix}")
        return counts
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror} ({error.filename})") from None
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _write(files: list[Path], temporary: dict[str, Path], limit_bytes: float | None) -> tuple[int, int]:
    import warnings

    warnings.filterwarnings("ignore", module="megatron")  # optional packages that have no part in this
    import numpy
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(temporary[".bin"]), dtype=DType.optimal_dtype(VOCABULARY))
    documents = tokens = 0
    for path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"cannot read {path}: {error.strerror}: remove it or choose a --suffix that leaves it out"
            ) from None
        if limit_bytes is not None and tokens - documents + len(text) > limit_bytes:
            break
        document = numpy.append(numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.int32), END_OF_DOCUMENT)
        builder.add_document(document, [document.size])
        documents, tokens = documents + 1, tokens + document.size
    if not documents:
        raise InputError(f"the first file, {files[0]}, is larger than --limit-mb allows: raise the limit")
    builder.finalize(str(temporary[".idx"]))
    return documents, tokens


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        files = find_files(options.input, options.suffix, options.recursive)
        documents, tokens = build(files, options.output, None if options.limit_mb is None else options.limit_mb * 1e6)
    except InputError as error:
        print(f"build_dataset: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"build_dataset: {error.name} is not installed: pip install 'unicron-slurm[train]'", file=sys.stderr)
        return 1
    print(
        f"{options.output}.bin, {options.output}.idx: {documents} documents, {tokens} tokens, vocabulary {VOCABULARY}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
