"""A checkpoint that somebody asked for, in another format as well (docs/user-guide.md, "Signals").

The job's first rank starts a process for it, of the lowest priority: it waits until all files of the checkpoint are
there, and writes OUT from them. The training waits for nothing, and a process that fails says so in one line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from unicron.transition.iteration.rank_log import inform, warn
from unicron.transition.snapshot import folders
from unicron.transition.snapshot.checkpoint_file import folder_name
from unicron.transition.snapshot.formats import convert, verify
from unicron.transition.snapshot.formats.index import BadCheckpoint

FORMAT = "UNICRON_CHECKPOINT_EXPORT"
LEAST_PRIORITY = 19
LOOK_SECONDS = 0.5
WHOLE_SECONDS = 1800.0  # for all ranks and agents to write their files
ERRORS = (BadCheckpoint, OSError)


def form_of(given: str) -> str:
    """The format: UNICRON_CHECKPOINT_EXPORT, or what the script says; "" for none. Raises ValueError, one line."""
    form = os.environ.get(FORMAT) or given
    if form and form not in convert.FORMATS:
        raise ValueError(f"{FORMAT}={form!r}: write one of {', '.join(convert.FORMATS)}, or nothing")
    return form


class Exports:
    """The exports of one rank. folder: of the job's checkpoints. form: one of `convert.FORMATS`. table: of names, as
    `Checkpoints.begin_names` is."""

    def __init__(self, folder: Path, form: str, table: str = ""):
        self._folder, self._form, self._table = folder.absolute(), form, table
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, iteration: int) -> None:
        """Have the checkpoint of `iteration`, which is being written, exported to FOLDER/FORMAT/iteration-N."""
        if self._process is not None and self._process.poll() is None:
            warn(f"the checkpoint of iteration {iteration} is not exported: the export before it is not over")
            return
        words = (str(self._folder), str(iteration), self._form, self._table)
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *words], stdin=subprocess.DEVNULL, env=quiet, start_new_session=True
            )
        except OSError as error:
            warn(f"the checkpoint of iteration {iteration} is not exported: {error}")


def export(folder: Path, iteration: int, form: str, table: str = "", seconds: float = WHOLE_SECONDS) -> Path:
    """Wait until the checkpoint of `iteration` in `folder` is whole, `seconds` at most, and write it in another format;
    returns its folder. Raises BadCheckpoint, OSError; then nothing is left of it."""
    until = time.monotonic() + seconds
    while not any(each.iteration == iteration for each in folders.whole(folder)):
        if time.monotonic() >= until:
            raise BadCheckpoint(f"it was not whole after {seconds:g} s")
        time.sleep(LOOK_SECONDS)
    index, wrong = verify.problems(folder / folder_name(iteration))
    if index is None or wrong:
        raise BadCheckpoint(wrong[0])
    out = folder / form / folder_name(iteration)
    convert.export(index, out, form, table, say=inform)
    return out


def main(folder: str, iteration: str, form: str, table: str) -> int:
    """The exit status."""
    os.nice(LEAST_PRIORITY)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing half stays
    try:
        out = export(Path(folder), int(iteration), form, table)
    except ERRORS as error:
        again = f"unicronctl checkpoint export {folder} OUT --format {form}"
        warn(f"the checkpoint of iteration {iteration} was not exported: {error}; to do it later: {again}")
        return 1
    inform(f"the checkpoint of iteration {iteration} was exported to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
