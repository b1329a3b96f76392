"""An unmodified script on a real Slurm: `sbatch --unicron --array=0-1 --wrap "srun python train.py"`, nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.test_spank import build
from unicron_ctl.localslurm import LocalCluster
from unicron_ctl.protocol.client import ask

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "process" / "plain_train.py"
CONFIG = '[controller]\nlisten = "tcp://127.0.0.1:0"\nauth = "none"\nslurm = "command"\nslurm_poll_seconds = 0.5\n'
LIMIT = 60.0


def wait_for(look: Callable[[], Any], what: Callable[[], str]) -> Any:
    """The first true thing that `look` gives."""
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s:\n{what()}"
        time.sleep(0.1)
    return found


class Site:
    """A cluster of two nodes with the plugin, the real agent and a controller."""

    def __init__(self, folder: Path):
        self.folder = folder
        assert build(folder / "build").returncode == 0
        scripts = sysconfig.get_path("scripts")
        path = os.pathsep.join([scripts, os.environ["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"])
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "UNICRON", "SBATCH"))
        }
        self.environment = {**kept, "PATH": path, "PLAIN_OUT": str(folder)}
        self.cluster = LocalCluster(folder / "slurm", nodes=2, gpus_per_node=1, auth="none")
        self.environment |= {"SLURM_CONF": str(self.cluster.layout.slurm_conf)}
        (folder / "unicron.toml").write_text(CONFIG)
        command = [sys.executable, "-m", "unicron_ctl.controller.main", "--config", str(folder / "unicron.toml")]
        with (folder / "unicrond.log").open("wb") as log:
            self._controller = subprocess.Popen(
                [*command, "--state-dir", str(folder / "state")],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        address = folder / "state" / "address"
        wait_for(address.is_file, lambda: (folder / "unicrond.log").read_text())
        self.address = address.read_text().strip()
        self.cluster.up()
        plugin = f"optional {folder}/build/unicron.so agent={scripts}/unicron-agent controller={self.address}\n"
        (self.cluster.layout.etc_dir / "plugstack.conf").write_text(plugin)

    def close(self) -> None:
        self._controller.terminate()
        self._controller.wait(20)
        self.cluster.down()

    def steps(self, element: int) -> list[dict]:
        path = self.folder / f"steps.{element}"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def world(self, after: int) -> dict:
        """The last step of a world of two that is younger than generation `after`."""

        def found() -> list[dict]:
            return [step for step in self.steps(0) if step["size"] == 2 and step["generation"] > after]

        return wait_for(lambda: len(found()) > 2 and found()[-1], self.logs)

    def job(self, number: str) -> dict:
        return next(job for job in ask({"kind": "status"}, self.address, timeout=20)["jobs"] if job["job"] == number)

    def logs(self) -> str:
        files = [*self.folder.glob("slurm-*.out"), self.folder / "unicrond.log"]
        said = [
            f"{e['job']} {e['kind']}: {e.get('reason', '')}" for e in ask({"kind": "events"}, self.address, timeout=20)
        ]
        return "\n".join([*(f"--- {file.name}\n{file.read_text()}" for file in files), "--- events", *said])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(240)
def test_an_unmodified_script_trains_as_one_world_and_survives_a_kill(site: Site) -> None:
    command = ["sbatch", "--parsable", "--unicron", "--unicron-min-nodes=2", "--array=0-1", "-N1", "--exclusive"]
    command += [
        "--wrap",
        f"srun python -c 'print(\"prepared\")' && srun python {SCRIPT}",
    ]  # two steps, one after the other
    done = subprocess.run(
        command, cwd=site.folder, env=site.environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    before = site.world(0)
    assert "restart mode: plain_train.py does not import transition" in site.logs()
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
