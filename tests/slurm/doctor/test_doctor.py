"""`unicronctl doctor` and `setup` on a real Slurm: from a login node, and with a step on each node."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.plugin_site import Site
from tests.support.processes import ROOT, UNICRONCTL, call, outside_slurm, wait_for
from tests.support.users import User
from unicron_ctl.lab.cluster import LocalCluster, ports

pytestmark = pytest.mark.slurm
HOOKS = ROOT / "slurm_plugin"
# The time-outs of a private cluster are short on purpose.
LACKS = {"time-outs"}
LINES = [
    f"Prolog={HOOKS}/prolog.d/*",
    f"Epilog={HOOKS}/epilog.d/*",
    "PrologFlags=Alloc",
    "SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,nohold_on_prolog_fail",
    f"HealthCheckProgram={HOOKS}/health/unicron-health",
    "HealthCheckInterval=3600",
]


@pytest.fixture
def doctor(site: Site, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """doctor(*words) runs it as a site with munge has it, and returns its exit status and its report."""
    kernel_log = tmp_path / "kernel.log"
    kernel_log.write_text("")
    (tmp_path / "health.conf").write_text(f"UNICRON_PYTHON={sys.executable}\nUNICRON_HEALTH_DRAIN=off\n")
    settings = f'auth = "munge"\naddress = "{site.controller.address}"\n[agent]\nkmsg = "{kernel_log}"\n'
    site.controller.configure(settings)
    environment = site.environment | site.cluster.env() | {"PATH": site.environment["PATH"]}
    environment |= {
        "UNICRON_CONFIG": str(site.controller.config),
        "UNICRON_HEALTH_CONF": str(tmp_path / "health.conf"),
    }

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        done = call(*UNICRONCTL, "doctor", "--json", *words, environment=environment, limit=120.0)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


def wrong(report: dict[str, Any]) -> dict[str, list[str]]:
    """Check -> the texts of what is not good."""
    found: dict[str, list[str]] = {}
    for result in report["results"]:
        if result["verdict"] != "good":
            found.setdefault(result["check"], []).append(result["text"])
    return found


@pytest.mark.site(auth="munge", config_lines=LINES)
def test_a_sound_cluster_is_found_sound_and_a_lost_plugin_is_found(site: Site, doctor) -> None:
    _, report = doctor("--as", "login", "--all")
    assert report["hosts"][1:] == ["n1", "n2"] and len(report["results"]) >= 28
    assert wrong(report).keys() == LACKS, wrong(report)

    (site.folder / "build" / "unicron.so").unlink()
    status, report = doctor("--as", "login")
    assert status == 3
    assert wrong(report).keys() == {*LACKS, "plugin"}
    assert wrong(report)["plugin"] == [f"{site.folder}/build/unicron.so is not there"]


@pytest.mark.wide
@pytest.mark.site(auth="munge", config_lines=LINES)
def test_what_differs_on_one_node_is_found_there(site: Site, doctor) -> None:
    """A busy node is named, a drained one too; the controller that is gone is missed on all hosts."""
    client = site.cluster.client()
    client.drain("n2", "burnt")
    site.controller.close()
    status, report = doctor("--as", "login", "--all")
    assert status == 3 and report["hosts"][1:] == ["n1"]
    found = wrong(report)
    assert "burnt" in found["nodes"][0] and "no controller answers" in found["controller"][0]
    (missed,) = [result for result in report["results"] if result["check"] == "controller"]
    assert missed["hosts"] == report["hosts"] and missed["do"].startswith("start unicrond; open port")

    client.drain("n1", "burnt, too")
    environment = site.environment | site.cluster.env() | {"PATH": site.environment["PATH"]}
    done = call(*UNICRONCTL, "doctor", "--all", environment=environment)
    assert done.returncode == 1 and done.stderr.startswith("unicronctl: no node can be asked now: out of service")


@pytest.mark.wide
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_controller_of_another_user_is_believed_once_it_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    """As the shipped unit has it: User=unicron, who is neither root nor SlurmUser."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-doctor-", dir="/tmp"))
    folder.chmod(0o755)
    environment = outside_slurm() | cluster.env() | {"MUNGE_SOCKET": str(cluster.layout.munge_socket)}
    daemon = User("daemon", folder, environment)
    port = ports.choose(1, str(folder))[0]
    config = folder / "unicron.toml"
    lines = f'[controller]\naddress = "tcp://127.0.0.1:{port}"\nlisten = "tcp://127.0.0.1:{port}"\nslurm = "none"\n'
    config.write_text(lines)
    environment["UNICRON_CONFIG"] = str(config)

    def checks() -> dict[str, dict[str, Any]]:
        done = call(*UNICRONCTL, "doctor", "--as", "head", "--json", environment=environment)
        return {result["check"]: result for result in json.loads(done.stdout)["results"]}

    try:
        words = ["--config", str(config), "--state-dir", str(daemon.folder / "state")]
        daemon.start("unicron_ctl.controller.unicrond:main", *words)
        wait_for(lambda: "listening on" in daemon.log.read_text(), daemon.log.read_text)
        found = checks()
        assert found["controller"]["verdict"] == "problem" and "belongs to daemon" in found["controller"]["text"]
        assert found["controller"]["do"] == f'controller_users = ["daemon"] in [agent] of {config}'
        config.write_text(f'{lines}[agent]\ncontroller_users = ["daemon"]\n')
        found = checks()
        said = found["controller"]["text"], daemon.log.read_text()
        assert found["controller"]["verdict"] == found["controller-user"]["verdict"] == "good", said
        assert found["admin-level"]["verdict"] == "advice", found["admin-level"]
        assert "the controller is daemon's" in found["admin-level"]["text"]
        assert found["admin-level"]["do"] == "User=root in unicrond.service"
    finally:
        daemon.close()
        shutil.rmtree(folder)


@pytest.mark.wide
def test_setup_asks_a_real_slurm_and_unicrond_takes_its_file(cluster: LocalCluster, tmp_path: Path) -> None:
    environment = outside_slurm() | cluster.env()
    path = tmp_path / "etc" / "unicron.toml"

    def setup(*words: str) -> str:
        done = call(*UNICRONCTL, "setup", "--config", path, "--partition", "main", *words, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"would write {path}" in setup("--dry-run") and not path.exists()
    said = setup()
    assert f"wrote {path}" in said and "nohold_on_prolog_fail" in said and "ReturnToService" not in said
    assert "is there already" in setup()
    unicrond = [sys.executable, "-m", "unicron_ctl.controller.unicrond"]
    done = call(*unicrond, "--check", "--config", path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    done = call(*UNICRONCTL, "config", "check", "--config", path, environment=environment)
    assert done.returncode == 0 and "main" in done.stdout and "observe" in done.stdout
