"""`unicronctl demo`: see `unicron_ctl.lab.demo`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unicron_ctl.shared.system.columns import show
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.words import plural

if TYPE_CHECKING:
    from rich.console import Console

    from unicron_ctl.lab.demo.stage import DemoJob, Stage

PIPE_COLUMNS = 170


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result here as JSON.")
@click.option(
    "--python",
    type=click.Path(dir_okay=False, path_type=Path),
    default=sys.executable,
    show_default="this program's",
    help="The Python that trains. It needs torch, Megatron-core, msgpack, pyzmq, xxhash.",
)
@click.option("--keep", is_flag=True, help="Keep the folder with logs, metrics and the event log.")
def command(json_path: Path | None, python: Path, keep: bool) -> None:
    """Train two GPT jobs on a private Slurm cluster, break them, watch them heal, and compare their losses with
    undisturbed runs."""
    from unicron_ctl.lab.demo.stage import DemoJob, Stage, check_python

    jobs = (
        DemoJob("gpt-large", elements=3, weight=8.0, min_nodes=1, seed=1234),
        DemoJob("gpt-small", elements=2, weight=1.0, min_nodes=1, seed=4321, ranks_per_node=2),
    )
    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise UserError(f"{json_path}: no such folder; make it or choose another with --json", 2)
    python = Path(shutil.which(python) or python).absolute()
    check_python(python)
    folder = Path(tempfile.mkdtemp(prefix="unicron-demo-"))
    stage = Stage(folder, nodes=6, jobs=jobs, python=python)
    try:
        play(stage, console(), json_path)
    except KeyboardInterrupt:
        raise UserError("interrupted; nothing is left running") from None
    except BaseException:
        keep = True  # the logs say why
        raise
    finally:
        if not keep:
            stage.remove()


def _size(job: DemoJob) -> str:
    ranks = f" of {job.ranks_per_node} ranks" if job.ranks_per_node > 1 else ""
    return f"up to {plural(job.elements, 'node')}{ranks}"


def console() -> Console:
    """Return the terminal, or wide lines if there is none."""
    from rich.console import Console

    here = Console()
    return here if here.is_terminal else Console(width=PIPE_COLUMNS)


def play(stage: Stage, console: Console, json_path: Path | None) -> None:
    """Set the stage, play the story, show and check the result. Raises UserError if something is wrong."""
    from unicron_ctl.lab.demo import report
    from unicron_ctl.lab.demo.live_view import View
    from unicron_ctl.lab.demo.story import Story

    began = time.monotonic()
    with View(console) as view:
        view.add_line("building a dataset from the source of Python's standard library")
        stage.build_dataset()
        view.add_line(f"starting unicrond, slurmctld and {stage.nodes} slurmd below {stage.folder}")
        with stage.open():
            for job in stage.jobs:
                stage.submit(job)
                view.add_line(f"sbatch gpt_elastic.sbatch: {job.name}, {_size(job)}, weight {job.weight:g}")
            story = Story(stage, view.add_line, view.show)
            story.play()
            view.add_line("computing the gradients of all recovered iterations again, undisturbed")
            result = report.collect(story)
            view.add_line(f"done in {time.monotonic() - began:.0f} s")
    show(report.tables(result))
    if json_path is not None:
        report.write_json(result, json_path)
    found = report.problems(result)
    if found:
        raise UserError("; ".join(found))
    print_text(EXPLANATION, lines=True)


EXPLANATION = """
What you saw: when a rank or a node died, the others kept what they had computed of the same iteration, shared the lost
micro-batches among them, and stepped as if nothing had happened. Slurm meanwhile started the lost element again, on the
spare node, or on a node that the planner took from the job where it counted less. When a bit flipped, the ranks found
it by comparing, and went back to the last state that was found sound. `unicronctl status`, `events` and `explain JOB`
tell the same of your own jobs; docs/user-guide.md says how to run them."""
