"""`unicronctl checkpoint`: shows and verifies checkpoints of any format, and converts them. It needs neither a GPU nor
a controller, and torch only to write `torch_dist` and `dcp`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from unicron_ctl.shared.commands.options import Number, print_json
from unicron_ctl.shared.system.errors import FAILURE, PROBLEM_FOUND, WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.health.program_output import run_program
from unicron_detector.words import plural
from unicron_transition.snapshot import folders, reading
from unicron_transition.snapshot.formats import convert, finite, opening, own
from unicron_transition.snapshot.formats.format_table import BY_NAME, EXPORTS
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index

WAIT_SECONDS = 600.0
LOOK_SECONDS = 0.5


class TensorReport(msgspec.Struct, kw_only=True):
    """One tensor."""

    name: str
    shape: list[int]
    dtype: str
    """The name that torch gives it."""


class CheckpointReport(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl checkpoint show`."""

    format: str
    """unicron, torch_dist, torch, dcp or safetensors."""
    iteration: int
    """The iteration to go on with."""
    layout: str
    """The layout of the ranks that wrote it, "" if the checkpoint does not say."""
    tensors: list[TensorReport]


def report(index: Index) -> CheckpointReport:
    """Return the data that `show` prints."""
    tensors = [TensorReport(name=t.name, shape=list(t.shape), dtype=t.dtype) for t in index.tensors.values()]
    return CheckpointReport(format=index.format, iteration=index.iteration, layout=index.layout, tensors=tensors)


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does: it releases the checkpoint, and leaves nothing half written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _of_folder(folder: Path) -> Iterator[Index]:
    """Yield the index of an undamaged checkpoint, which no job removes meanwhile. Raises UserError and OSError.

    A copy of a damaged checkpoint would have valid checksums, so a damaged one is refused.
    """
    with reading.files_of(folder), opening.holding(folder) as at:
        index, wrong = opening.verify(at)
        if index is None or wrong:
            more = f" (and {len(wrong) - 1} more: see `unicronctl checkpoint verify`)" if len(wrong) > 1 else ""
            raise UserError(f"{wrong[0]}{more}")
        yield index


def _open(folder: Path) -> Index:
    try:
        with reading.files_of(folder):
            return opening.index_of(folder)
    except (BadCheckpoint, OSError) as error:
        raise UserError(_line_of(error)) from None


def _line_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)


FOLDER = click.Path(path_type=Path)
NAMES = click.option(
    "--names", metavar="TABLE", default="", help="llama, gpt2, megatron, FILE or FILE:TABLE [default: what fits]."
)
CONFIG = click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The model's config.json."
)


@click.group("checkpoint")
def command() -> None:
    """Show, convert and verify checkpoints."""


@command.command()
@click.argument("folder", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
def show(folder: Path, as_json: bool) -> None:
    """List the tensors of the newest checkpoint in FOLDER. None is read."""
    index = _open(folder)
    if as_json:
        print_json(report(index))
        return
    size = sum(tensor.nbytes for tensor in index.tensors.values())
    layout = f", written by {index.layout}" if index.layout else ""
    tensors = f"{plural(len(index.tensors), 'tensor')}, {size / 1e9:.3f} GB"
    audited = ", verified by an audit" if _is_verified(folder, index) else ""
    print_text(f"{index.format}, iteration {index.iteration}{layout}: {tensors}{audited}")
    for line in index.common.losses():
        print_text(line, err=True)
    for tensor in index.tensors.values():
        print_text(f"{tensor.name}  {list(tensor.shape)}  {tensor.dtype}")


def _is_verified(folder: Path, index: Index) -> bool:
    whole = own.newest(folder.resolve()) if index.format == own.FORMAT else None
    return whole is not None and whole.verified


@command.command("verify")
@click.argument("folder", type=FOLDER)
def verify_command(folder: Path) -> int:
    """Read the newest checkpoint in FOLDER, and say what is damaged, and what is no number or infinite.

    The exit status is 3 if something is. Infinities in a buffer are said, and are no problem: masks have them.
    """
    notes: list[str] = []
    try:
        with reading.files_of(folder):
            index, wrong = opening.verify(folder)
            if index is not None and not wrong:
                wrong, notes = finite.examine(index)
    except (BadCheckpoint, OSError) as error:
        raise UserError(_line_of(error)) from None
    for line in (*wrong, *notes):
        print_text(line, err=True)
    if wrong or index is None:
        return PROBLEM_FOUND if index is not None else FAILURE
    if index.common.doubt:
        print_text(index.common.doubt, err=True)
    checks = BY_NAME[index.format].checksums
    known = "all whole" if checks else "of the right length (this format has no checksums)"
    print_text(
        f"{folder}: {index.format}, iteration {index.iteration}: {plural(len(index.tensors), 'tensor')}, {known}"
    )
    return 0


@command.command()
@click.argument("source", metavar="FOLDER|JOB")
@click.argument("out", type=FOLDER)
@click.option("--format", "form", type=click.Choice(EXPORTS), default=EXPORTS[0], show_default=True)
@NAMES
@CONFIG
@click.option("--dtype", default="", help="For safetensors: bfloat16, float16, float32 [default: the model's].")
@click.option("--from", "saves", type=FOLDER, help="With JOB: the folder of its checkpoints [default: what it says].")
@click.option(
    "--wait", type=Number(0), default=WAIT_SECONDS, show_default=True, help="With JOB: seconds for its checkpoint."
)
def export(
    source: str, out: Path, form: str, names: str, config: Path | None, dtype: str, saves: Path | None, wait: float
) -> None:
    """Write the newest checkpoint in FOLDER as OUT, a new folder, in another format.

    With JOB, a running job of yours, it is asked for a checkpoint first.
    """
    folder = Path(source)
    of_job = not folder.exists() and source.replace("_", "").isdecimal()
    try:
        with _tidy(), _of_job(source, saves or _folder_of(source), wait) if of_job else _of_folder(folder) as index:
            convert.export(index, out, form, names, config, dtype, lambda line: print_text(line, err=True))
    except (BadCheckpoint, OSError) as error:
        raise UserError(_line_of(error)) from None
    print_text(f"{out}: {form}, iteration {index.iteration}")


@command.command("import")
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER)
@NAMES
@CONFIG
def import_command(folder: Path, out: Path, names: str, config: Path | None) -> None:
    """Write the newest checkpoint in FOLDER, of any format, as one of Unicron's own into the folder OUT.

    A training can also begin from FOLDER as it is (`begin_from`, or Megatron-LM's --load).
    """
    try:
        with _tidy(), _of_folder(folder) as index:
            at = convert.import_(index, out, names, config, lambda line: print_text(line, err=True))
    except (BadCheckpoint, OSError) as error:
        raise UserError(_line_of(error)) from None
    print_text(f"{at}: written")


# ------------------------------------------------------------ from a running job
def _folder_of(job: str) -> Path:
    """Return the folder into which a job saves, which the controller knows from its ranks."""
    from unicron_ctl.shared.protocol.client import ask_controller

    hint = "name the folder of its checkpoints with --from"
    try:
        folder = ask_controller({"kind": "explain", "job": job.partition("_")[0]})["checkpoints"]
    except UserError as error:
        raise UserError(f"{error}; or {hint}") from None
    if not folder:
        raise UserError(f"job {job} does not say where it saves: {hint}", WRONG_USE)
    if not Path(folder).is_dir():
        raise UserError(f"job {job} saves in {folder}, and there is no such folder here: {hint}", WRONG_USE)
    return Path(folder)


@contextlib.contextmanager
def _of_job(job: str, saves: Path, wait: float) -> Iterator[Index]:
    """Ask the job for a checkpoint, and yield its index. The job does not remove it meanwhile. Raises BadCheckpoint."""
    found = _request(job, saves, wait)
    with reading.files_of(saves), folders.holding(found.folder):
        yield own.read_sound(found)


def _request(job: str, saves: Path, wait: float) -> folders.WholeCheckpoint:
    """Ask a running job for a checkpoint by SIGUSR2, and return it when it is whole."""

    def whole() -> dict[tuple[int, str], folders.WholeCheckpoint]:
        return {(each.iteration, each.mark): each for each in folders.whole(saves)}

    before = whole()
    asked = run_program(["scancel", "--state=RUNNING", "--signal=USR2", job], 30.0)
    if asked.returncode != 0:
        errors = asked.stderr.decode(errors="replace").strip().splitlines() or ["scancel failed"]
        raise UserError(f"job {job} was not asked for a checkpoint: {errors[-1]}")
    deadline = time.monotonic() + wait
    newest = max((iteration for iteration, _ in before), default=0)
    while not (fresh := [each for key, each in whole().items() if key not in before and each.iteration >= newest]):
        if time.monotonic() >= deadline:
            raise UserError(
                f"no new checkpoint was whole in {saves} after {wait:g} s: see the job's log, or --wait more"
            )
        time.sleep(LOOK_SECONDS)
    return max(fresh, key=lambda each: each.iteration)
