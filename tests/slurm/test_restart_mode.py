"""An unmodified script on a real Slurm: `sbatch --unicron --array=0-1 --wrap "srun python train.py"`, nothing else."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.jobs import PLAIN
from tests.support.plugin_site import Site
from tests.support.processes import wait_for


@pytest.mark.wide  # as in test_step_tasks, with two tasks on each node
def test_an_unmodified_script_trains_as_one_world_and_survives_a_kill(site: Site) -> None:
    options = ("--unicron", "--unicron-min-nodes=2", "--array=0-1", "-N1", "--exclusive")
    steps = f"srun python -c 'print(\"prepared\")' && srun python {PLAIN}"
    number = site.submit(*options, "--wrap", steps)
    before = site.world()
    assert "restart mode: plain_train.py does not import unicron" in site.logs()
    assert site.job(number)["mode"] == "restart" and site.logs().count("\nprepared\n") == 2
    wait_for(lambda: all(map(site.steps, (0, 1))), site.logs)
    first = [site.steps(element)[-1] for element in (0, 1)]
    assert [one["rank"] for one in first] == [0, 1]
    os.kill(first[1]["pid"], signal.SIGKILL)
    after = site.world(before["generation"])
    assert after["begun"] >= before["step"] and after["pid"] not in [one["pid"] for one in first]
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert site.job(number)["ended"]["code"] == 0
    assert [site.steps(element)[-1]["step"] for element in (0, 1)] == [site.steps(0)[-1]["step"]] * 2
    wait_for(lambda: site.logs().count("is through") == 2, site.logs)


def test_by_default_a_training_is_protected_and_nothing_else(site: Site) -> None:
    """Defect: with default=on an ordinary array became one world, MPI did not run, each helper was a registration."""
    plugstack = site.cluster.layout.etc_dir / "plugstack.conf"
    plugstack.write_text(f"{plugstack.read_text().strip()} default=on\n")
    sweep = site.folder / "sweep.py"
    sweep.write_text("import os\nprint('run', os.environ['SLURM_ARRAY_TASK_ID'], os.environ.get('RANK', 'alone'))\n")

    (site.folder / "place.py").write_text(
        "import os\nprint('node', os.environ['SLURM_NODEID'], 'of', os.environ['SLURM_NNODES'], "
        "os.environ.get('RANK', 'alone'))\n"
    )
    (site.folder / "train.py").write_text(
        "import os, pathlib, time\nwhile not pathlib.Path('stop').exists():\n    time.sleep(0.1)\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )

    array = site.submit("--array=0-3", "-N1", "--wrap", f"srun hostname; srun python {sweep}; echo END $?")
    ranks = "import os; print('rank', os.environ['SLURM_PROCID'], os.environ['SLURM_NTASKS'])"
    mpi = site.submit("-N2", "--ntasks-per-node=2", "--wrap", f'srun python -c "{ranks}"; echo END $?')
    outputs = {site.folder / f"slurm-{array}_{element}.out": f"run {element} alone" for element in range(4)}
    outputs[site.folder / f"slurm-{mpi}.out"] = "rank 3 4"
    for path, said in outputs.items():
        wait_for(lambda path=path: path.exists() and "END 0\n" in path.read_text(), site.logs)
        assert path.read_text().splitlines().count(said) == 1 and "unicron" not in path.read_text(), path.read_text()
    assert site.controller.ask("jobs") == [] and not site.controller.events("registration_refused")

    for asked, ranks_seen in (((), {"alone"}), (("--unicron",), {"0", "1"})):
        rigid = site.submit("-N2", *asked, "--wrap", f"srun python {site.folder}/place.py; echo END $?")
        path = site.folder / f"slurm-{rigid}.out"
        wait_for(lambda path=path: path.exists() and "END 0\n" in path.read_text(), site.logs)
        text = path.read_text()
        places = [line.split() for line in text.splitlines() if line.startswith("node ")]
        assert sorted(words[1:4] for words in places) == [["0", "of", "2"], ["1", "of", "2"]], text
        assert {words[4] for words in places} == ranks_seen and "unprotected" not in text, text
    wait_for(lambda: all(job["ended"] for job in site.controller.ask("jobs")), site.logs)

    number = site.submit("-N1", "--wrap", f"srun hostname; srun python {site.folder}/train.py; echo END $?")
    wait_for(lambda: site.controller.job(number).get("state") == "running", site.logs)
    assert {job["job"] for job in site.controller.ask("jobs")} == {rigid, number}
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert "rank 0 of 1" in (site.folder / f"slurm-{number}.out").read_text()
