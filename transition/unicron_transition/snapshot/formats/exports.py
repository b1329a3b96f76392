"""Exports a checkpoint that was asked for to another format (docs/user-guide.md, "Signals").

The job's first rank starts a process of the lowest priority, which waits until the checkpoint is whole and then writes
another folder from it. The training does not wait for it.
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
from unicron_transition.snapshot.formats import convert, format_table, own
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index

FORMAT = "UNICRON_CHECKPOINT_EXPORT"
LEAST_PRIORITY = 19
LOOK_SECONDS = 0.5
WHOLE_SECONDS = 1800.0  # for all ranks and agents to write their files


def form_of(given: str) -> str:
    """Return the format that UNICRON_CHECKPOINT_EXPORT or the script asks for, "" for none. Raises ValueError."""
    named = os.environ.get(FORMAT) or ""
    form = named or given
    if form and form not in format_table.EXPORTS:
        what = f"{FORMAT}={form!r}" if named else f"export {form!r}"
        raise ValueError(f"{what} must be one of {', '.join(format_table.EXPORTS)}")
    return form


class Exports:
    """The exports of one rank."""

    def __init__(self, folder: Path, form: str, table: str = ""):
        self._folder = folder.absolute()  # of the job's checkpoints
        self._form = form  # one of `format_table.EXPORTS`
        # The names of `Checkpoints.begin_names`, under which a format that holds weights only is written.
        self._table = table if form and format_table.BY_NAME[form].weights_only else ""
        self._here = os.getcwd()  # the table's path is relative to it, and the script might leave it
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, iteration: int, mark: str) -> None:
        """Start to export the checkpoint of `iteration`, which is being written, to FOLDER/FORMAT/iteration-N. mark: of
        its files."""
        if self._process is not None and self._process.poll() is None:
            rank_log.warn(f"the checkpoint of iteration {iteration} is not exported: the export before it is not over")
            return
        reader = folders.new_reader()
        words = (str(self._folder), str(iteration), mark, self._form, self._table, reader)
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        checkpoint = self._folder / folder_name(iteration)
        try:
            checkpoint.mkdir(parents=True, exist_ok=True)
            folders.hold(checkpoint, reader)  # the process releases it
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
    """Wait up to `seconds` until the checkpoint of `iteration` in `folder` is whole, write it in another format and
    return the new folder. mark: of its files. Raises BadCheckpoint, OSError, and then leaves nothing behind."""
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
    with contextlib.suppress(OSError):  # the rank that started this process might be gone
        rank_log.inform(text)


def main(folder: str, iteration: str, mark: str, form: str, table: str, reader: str) -> int:
    """Export one checkpoint and return the exit status. Of the signals that Slurm sends to all processes of a step only
    SIGTERM ends this one."""
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
