"""An unmodified script on a real Slurm: `sbatch --unicron --array=0-1 --wrap "srun python train.py"`, nothing else."""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.test_spank import build
from tests.support.controller import Controller
from tests.support.jobs import PLAIN, json_lines
from tests.support.processes import call, outside_slurm, wait_for
from unicron.ctl.lab.cluster import LocalCluster

SETTINGS = 'slurm = "command"\nslurm_poll_seconds = 0.5\n'


class Site:
    """A cluster with the plugin, the real agent and a controller."""

    def __init__(self, folder: Path, nodes: int = 2):
        self.folder = folder
        assert build(folder / "build").returncode == 0
        scripts = sysconfig.get_path("scripts")
        self.environment = outside_slurm() | {"PLAIN_OUT": str(folder)}
        programs = [scripts, self.environment["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"]
        self.environment["PATH"] = os.pathsep.join(programs)
        self.cluster = LocalCluster(folder / "slurm", nodes=nodes, gpus_per_node=1, auth="none")
        self.environment |= {"SLURM_CONF": str(self.cluster.layout.slurm_conf)}
        self.controller = Controller(folder, SETTINGS, self.environment)
        self.cluster.up()
        plugin = (
            f"optional {folder}/build/unicron.so agent={scripts}/unicron-agent controller={self.controller.address}\n"
        )
        (self.cluster.layout.etc_dir / "plugstack.conf").write_text(plugin)

    def close(self) -> None:
        self.controller.close()
        self.cluster.down()

    def steps(self, element: int) -> list[dict]:
        return json_lines(self.folder / f"steps.{element}")

    def world(self, after: int) -> dict:
        """The last step of a world of two that is younger than generation `after`."""

        def found() -> list[dict]:
            return [step for step in self.steps(0) if step["size"] == 2 and step["generation"] > after]

        return wait_for(lambda: len(found()) > 2 and found()[-1], self.logs)

    def job(self, number: str) -> dict:
        return self.controller.job(number)

    def logs(self) -> str:
        files = [*self.folder.glob("slurm-*.out"), self.folder / "unicrond.log"]
        said = [f"{e['job']} {e['kind']}: {e.get('reason', '')}" for e in self.controller.events()]
        return "\n".join([*(f"--- {file.name}\n{file.read_text()}" for file in files), "--- events", *said])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_an_unmodified_script_trains_as_one_world_and_survives_a_kill(site: Site) -> None:
    command = ["sbatch", "--parsable", "--unicron", "--unicron-min-nodes=2", "--array=0-1", "-N1", "--exclusive"]
    command += [
        "--wrap",
        f"srun python -c 'print(\"prepared\")' && srun python {PLAIN}",
    ]  # two steps, one after the other
    done = call(*command, cwd=site.folder, environment=site.environment)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    before = site.world(0)
    assert "restart mode: plain_train.py does not import unicron" in site.logs()
    assert site.job(number)["mode"] == "restart" and site.logs().count("\nprepared\n") == 2
    victim = site.steps(1)[-1]
    assert (before["rank"], victim["rank"]) == (0, 1)
    os.kill(victim["pid"], signal.SIGKILL)
    after = site.world(before["generation"])
    assert after["begun"] >= before["step"] and after["pid"] != before["pid"]
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

    def submitted(*words: str) -> str:
        done = call("sbatch", "--parsable", *words, cwd=site.folder, environment=site.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    array = submitted("--array=0-3", "-N1", "--wrap", f"srun hostname; srun python {sweep}; echo END $?")
    ranks = "import os; print('rank', os.environ['SLURM_PROCID'], os.environ['SLURM_NTASKS'])"
    mpi = submitted("-N2", "--ntasks-per-node=2", "--wrap", f'srun python -c "{ranks}"; echo END $?')
    outputs = {site.folder / f"slurm-{array}_{element}.out": f"run {element} alone" for element in range(4)}
    outputs[site.folder / f"slurm-{mpi}.out"] = "rank 3 4"
    for path, said in outputs.items():
        wait_for(lambda path=path: path.exists() and "END 0\n" in path.read_text(), site.logs)
        assert path.read_text().splitlines().count(said) == 1 and "unicron" not in path.read_text(), path.read_text()
    assert site.controller.ask("jobs") == [] and not site.controller.events("registration_refused")

    for asked, ranks_seen in (((), {"alone"}), (("--unicron",), {"0", "1"})):
        rigid = submitted("-N2", *asked, "--wrap", f"srun python {site.folder}/place.py; echo END $?")
        path = site.folder / f"slurm-{rigid}.out"
        wait_for(lambda path=path: path.exists() and "END 0\n" in path.read_text(), site.logs)
        text = path.read_text()
        places = [line.split() for line in text.splitlines() if line.startswith("node ")]
        assert sorted(words[1:4] for words in places) == [["0", "of", "2"], ["1", "of", "2"]], text
        assert {words[4] for words in places} == ranks_seen and "unprotected" not in text, text
    wait_for(lambda: all(job["ended"] for job in site.controller.ask("jobs")), site.logs)

    number = submitted("-N1", "--wrap", f"srun hostname; srun python {site.folder}/train.py; echo END $?")
    wait_for(lambda: site.controller.job(number).get("state") == "running", site.logs)
    assert {job["job"] for job in site.controller.ask("jobs")} == {rigid, number}
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert "rank 0 of 1" in (site.folder / f"slurm-{number}.out").read_text()
