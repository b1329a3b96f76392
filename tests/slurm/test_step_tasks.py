"""Several tasks on a node, on a real Slurm with the real agent: `srun --ntasks-per-node=2 python train.py`."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.support.jobs import PLAIN
from tests.support.plugin_site import Site
from tests.support.processes import wait_for

pytestmark = pytest.mark.slurm
SCRIPT = f"""import os, runpy, sys
print("card", os.environ["CARD"], "rank", os.environ["SLURM_PROCID"], "of", os.environ["SLURM_NTASKS"], flush=True)
print("error of", os.environ["SLURM_LOCALID"], file=sys.stderr, flush=True)
runpy.run_path({str(PLAIN)!r}, run_name="__main__")
"""


def test_the_tasks_of_a_node_train_as_its_ranks(site: Site) -> None:
    """A world of two nodes with two tasks each: each rank has its own task's variables and output, a killed one comes
    back, and the step ends as its ranks do, or as Slurm says."""
    (site.folder / "train.py").write_text(SCRIPT)
    prolog = site.folder / "prolog"
    prolog.write_text("#!/bin/sh\necho export CARD=$((SLURM_LOCALID + 5))\n")
    prolog.chmod(0o755)

    def submitted(step: str) -> str:
        return site.submit("--unicron-min-nodes=2", "--array=0-1", "-N1", "--exclusive", "--wrap", step)

    def pids(after: int) -> dict[int, int]:
        """rank -> process, of a world of four that is younger than generation `after`."""
        steps = [*site.steps(0), *site.steps(1)]
        return {step["rank"]: step["pid"] for step in steps if step["size"] == 4 and step["generation"] > after}

    step = f"srun -l --ntasks-per-node=2 --task-prolog={prolog} python train.py"
    number = submitted(f"{step}; echo END $?")
    before = wait_for(lambda: len(found := pids(0)) == 4 and found, site.logs)
    generation = max(step["generation"] for step in site.steps(0))
    os.kill(before[3], signal.SIGKILL)
    after = wait_for(lambda: len(found := pids(generation)) == 4 and found, site.logs)
    assert not set(after.values()) & set(before.values())
    assert max(step["begun"] for step in site.steps(0)) > 0, "from its checkpoint"
    (site.folder / "stop").touch()
    outputs = [site.folder / f"slurm-{number}_{element}.out" for element in (0, 1)]
    wait_for(lambda: all("END 0\n" in path.read_text() for path in outputs), site.logs)
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert (site.job(number)["mode"], site.job(number)["ended"]["code"]) == ("restart", 0)
    for node, path in enumerate(outputs):
        lines = path.read_text().splitlines()
        for task in (0, 1):
            rank = 2 * node + task
            assert lines.count(f"{task}: card {task + 5} rank {rank} of 4") == 2, site.logs()
            # The last line of a rank that was ended may lack its newline: srun goes on in it.
            errors = [line for line in lines if re.fullmatch(rf"{task}: .*error of {task}", line)]
            assert len(errors) == 2, site.logs()
            assert [line for line in lines if re.match(f"{task}: rank {rank} of 4 is through", line)], site.logs()

    (site.folder / "stop").unlink()
    other = submitted(step)
    wait_for(lambda: set(pids(0).values()) - set(after.values()) - set(before.values()), site.logs)
    site.run("scancel", other)
    wait_for(lambda: not site.run("squeue", "-h"), site.logs)
