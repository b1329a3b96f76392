"""A checkpoint that somebody asked for, in another format as well (docs/user-guide.md, "Signals").

The job's first rank starts a process for it, of the lowest priority: it waits until all files of the checkpoint are
there, and writes another folder from them. The training waits for nothing, and a process that fails says so in one
line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from unicron_detector.processes.step_signals import ignore_step_signals
from unicron_transition.iteration import rank_log
from unicron_transition.snapshot import folders
from unicron_transition.snapshot.checkpoint_file import folder_name
from unicron_transition.snapshot.formats import convert, format_table, own, safetensors
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index

FORMAT = "UNICRON_CHECKPOINT_EXPORT"
LEAST_PRIORITY = 19
LOOK_SECONDS = 0.5
WHOLE_SECONDS = 1800.0  # for all ranks and agents to write their files


def form_of(given: str) -> str:
    """The format: UNICRON_CHECKPOINT_EXPORT, or what the script says; "" for none. Raises ValueError, one line."""
    named = os.environ.get(FORMAT) or ""
    form = named or given
    if form and form not in format_table.EXPORTS:
        what = f"{FORMAT}={form!r}" if named else f"export {form!r}"
        raise ValueError(f"{what} must be one of {', '.join(format_table.EXPORTS)}")
    return form


class Exports:
    """The exports of one rank. folder: of the job's checkpoints. form: one of `format_table.EXPORTS`. table: of names,
    as `Checkpoints.begin_names` is; safetensors get them back."""

    def __init__(self, folder: Path, form: str, table: str = ""):
        self._folder, self._form = folder.absolute(), form
        self._table = table if form == safetensors.FORMAT else ""
        self._here = os.getcwd()  # from which the table's file is named; the script may go elsewhere
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, iteration: int, mark: str) -> None:
        """Have the checkpoint of `iteration`, which is being written, exported to FOLDER/FORMAT/iteration-N. mark: that
        of its files."""
        if self._process is not None and self._process.poll() is None:
            rank_log.warn(f"the checkpoint of iteration {iteration} is not exported: the export before it is not over")
            return
        reader = folders.new_reader()
        words = (str(self._folder), str(iteration), mark, self._form, self._table, reader)
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        checkpoint = self._folder / folder_name(iteration)
        try:
            checkpoint.mkdir(parents=True, exist_ok=True)
            folders.hold(checkpoint, reader)  # the process lets go of it
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *words],
                stdin=subprocess.DEVNULL,
                cwd=self._here,
                env=quiet,
                start_new_session=True,
            )
        except OSError as error:
            folders.let_go(checkpoint, reader)
            rank_log.warn(f"the checkpoint of iteration {iteration} is not exported: {error}")


def export(folder: Path, iteration: int, mark: str, form: str, table: str = "", seconds: float = WHOLE_SECONDS) -> Path:
    """Wait until the checkpoint of `iteration` in `folder` is whole, `seconds` at most, and write it in another format;
    returns its folder. mark: that of its files. Raises BadCheckpoint, OSError; then nothing is left of it."""
    index = _whole(folder, iteration, mark, seconds)
    out = folder / form / folder_name(iteration)
    convert.export(index, out, form, table, say=_inform)
    return out


def _whole(folder: Path, iteration: int, mark: str, seconds: float) -> Index:
    until = time.monotonic() + seconds
    while True:
        found = folders.whole(folder)
        mine = next((each for each in found if (each.iteration, each.mark) == (iteration, mark)), None)
        if mine is not None:
            break
        if any(each.iteration > iteration for each in found):
            raise BadCheckpoint("a later one was whole before it")
        if time.monotonic() >= until:
            raise BadCheckpoint(f"it was not whole after {seconds:g} s")
        time.sleep(LOOK_SECONDS)
    return own.read_sound(mine)


def _inform(text: str) -> None:
    with contextlib.suppress(OSError):  # the rank that began this may be gone, and with it who reads
        rank_log.inform(text)


def main(folder: str, iteration: str, mark: str, form: str, table: str, reader: str) -> int:
    """The exit status. Signals that Slurm sends to all of a step are not for this process, but SIGTERM ends it."""
    ignore_step_signals()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.nice(LEAST_PRIORITY)
    try:
        with folders.holding(Path(folder) / folder_name(int(iteration)), reader):
            out = export(Path(folder), int(iteration), mark, form, table)
    except (BadCheckpoint, OSError, SystemExit) as error:
        why = "SIGTERM has ended it" if isinstance(error, SystemExit) else str(error)
        names = f" --names {table}" if table else ""
        again = f"unicronctl checkpoint export {Path(folder) / folder_name(int(iteration))} OUT --format {form}{names}"
        with contextlib.suppress(OSError):
            rank_log.warn(f"the checkpoint of iteration {iteration} was not exported: {why}; to do it later: {again}")
        return 1
    _inform(f"the checkpoint of iteration {iteration} was exported to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
