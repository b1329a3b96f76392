"""The templates on the card, under a real controller and two real agents without Slurm.

    python -m benchmarks.gpu.templates gloo|apart

Two ranks train; at SIGUSR2 they write and export a checkpoint while they train; a rank is killed and rejoins; another
job goes on from the checkpoint, with the losses of the first one.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.agents import LIMIT, kill_and_rejoin
from benchmarks.gpu.heal import LOSSES
from benchmarks.gpu.rows import on_card, row
from sbatch_templates import build_dataset
from sbatch_templates.training_metrics import read_metrics
from tests.support.jobs import World
from tests.support.processes import signal_step
from unicron_transition.snapshot import folders
from unicron_transition.snapshot.formats import opening

FOREVER = str(10**6)  # iterations
LARGE = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --bf16".split()
SMALL = "--num-layers 2 --hidden-size 64 --seq-length 64".split()
MORE = 3  # iterations of both jobs after the checkpoint
SCRIPTS = Path(build_dataset.__file__).parent


def commands(folder: Path) -> dict[str, list[str]]:
    """Return a command for each template, without the folders of its checkpoints and metrics."""
    prefix = folder / "text"
    build_dataset.build(build_dataset.find_files(SCRIPTS, [".py"], recursive=False), prefix)
    plain = [str(SCRIPTS / "train_plain.py"), "--text", str(SCRIPTS), "--iterations", FOREVER]
    gpt = [str(SCRIPTS / "train_gpt.py"), "--data-path", str(prefix), "--train-iterations", FOREVER]
    gpt += ["--micro-batches", "4", "--save-interval", FOREVER, *(LARGE if on_card() else SMALL)]
    return {"train_plain.py": plain, "train_gpt.py": gpt}


def job(folder: Path, backend: str, words: Sequence[str], shared: str) -> World:
    """Start two agents, each on a node of its own; NCCL takes ranks with other host ids for other hosts."""
    settings = {
        "SLURM_ARRAY_TASK_COUNT": "2",
        "UNICRON_MEMORY_DIR": shared,
        "UNICRON_CHECKPOINT_EXPORT": "dcp",
        "UNICRON_PLAN_TIMEOUT": "30",
    }
    made = World(folder, 0, "", [sys.executable, *words], **settings)
    for element in (0, 1):
        made.start_agent(element, **({"NCCL_HOSTID": f"host{element}"} if backend == "apart" else {}))
    return made


def losses(prefix: Path) -> dict[int, float]:
    return {each["iteration"]: each["loss"] for each in read_metrics(prefix)}


def first_job(folder: Path, made: World) -> dict[str, Any]:
    """Ask for a checkpoint, and kill a rank. Return the seconds of each."""
    found = {}
    made.wait(lambda: made.trains([0, 1], 4), "5 iterations", LIMIT)
    asked = time.monotonic()
    for agent in made.agents.values():
        signal_step(agent.process.pid, signal.SIGUSR2)
    made.wait(lambda: folders.whole(folder / "saves"), "the checkpoint", LIMIT)
    found["saved"] = time.monotonic() - asked
    made.wait(lambda: re.search(r"was (not )?exported", made.array.logs), "its export", LIMIT)
    assert "was exported" in made.array.logs, "it was not exported"
    found["exported"] = time.monotonic() - asked
    saved = folders.whole(folder / "saves")[0].iteration
    made.wait(lambda: made.trains([0, 1], saved + MORE + 1), "iterations after it", LIMIT)
    found["whole_again"] = kill_and_rejoin(made)[1]
    return found


def check(name: str, words: list[str], backend: str, folder: Path, shared: str) -> None:
    with row(f"{backend}, {name}: checkpoint on demand, its export, a kill, another job goes on") as saw:
        saves = ["--save", str(folder / "saves")]
        with job(folder, backend, [*words, *saves, "--metrics", str(folder / "first")], shared) as made:
            try:
                found = first_job(folder, made)
            finally:
                sys.stderr.write(made.told()[-6000:])
        (exported,) = (folder / "saves/dcp").iterdir()
        index, wrong = opening.verify(exported)
        assert not wrong and index is not None and exported.name.endswith(f"{index.iteration}"), f"the export: {wrong}"
        saved = folders.whole(folder / "saves")[0].iteration
        after = folder / "next"
        after.mkdir()
        with job(after, backend, [*words, *saves, "--metrics", str(folder / "second")], shared) as made:
            try:
                made.wait(lambda: made.trains([0, 1], saved + MORE), "it goes on", LIMIT)
            finally:
                sys.stderr.write(made.told()[-6000:])
        ours, other = losses(folder / "second"), losses(folder / "first")
        assert min(ours) == saved, f"the second job began with iteration {min(ours)}, not {saved}"
        both = [each for each in ours if each in other]
        assert both, "the first job has trained no iteration of the second one"
        differ = max(abs(ours[each] / other[each] - 1) for each in both)
        text = ", ".join(f"{what.replace('_', ' ')} after {seconds:.2f} s" for what, seconds in found.items())
        text += f"; {len(index.tensors)} tensors exported; losses of the next job within {differ:.0e}"
        saw(text, ok=differ <= LOSSES, differ=differ, **found)


def main() -> int:
    backend = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as text:
        for name, words in commands(Path(text)).items():
            folder = Path(text, name.removesuffix(".py"))
            folder.mkdir()
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="unicron-gpu-") as shared:
                check(name, words, backend, folder, shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
