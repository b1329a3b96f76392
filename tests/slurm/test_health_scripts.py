"""The admission checks as the prolog and HealthCheckProgram call them: directly, with hardly any environment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import line_in, wait_for
from unicron_ctl.lab.cluster.health_program import HEALTH, PROLOG

BAD = "[health]\nmemory_mb = 999999999\n"


class Scripts:
    """Both scripts with configuration files of their own. `bad`: what the script's status is on a proven-bad node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.config = folder, folder / "log", folder / "unicron.toml"
        self.health = {
            "UNICRON_PYTHON": sys.executable,
            "UNICRON_CONFIG": str(self.config),
            "UNICRON_HEALTH_STATE": str(folder / "health-state"),
        }
        self.prolog = {"UNICRON_CHECK_SHM": "off", "UNICRON_HEALTH_SECONDS": "20"}

    def configure(self, script: Path) -> None:
        """Write the files that it reads."""
        log = {"UNICRON_LOG": str(self.log)}
        # Without a Slurm of its own nothing can be drained: the status and the log are looked at here.
        health = self.health | {"UNICRON_HEALTH_DRAIN": "off"} | log
        if script == HEALTH:
            health = {"UNICRON_HEALTH_SECONDS": self.prolog["UNICRON_HEALTH_SECONDS"]} | health
        (self.folder / "health.conf").write_text(_lines(health))
        prolog = self.prolog | {"UNICRON_HEALTH_CONF": str(self.folder / "health.conf")} | log
        (self.folder / "prolog.conf").write_text(_lines(prolog))

    def begin(self, script: Path, node: str = "n1") -> subprocess.Popen[bytes]:
        """Start it as slurmd on that node does."""
        variable = "UNICRON_HEALTH_CONF" if script == HEALTH else "UNICRON_PROLOG_CONF"
        conf = self.folder / ("health.conf" if script == HEALTH else "prolog.conf")
        return subprocess.Popen(
            [script],
            env={variable: str(conf), "SLURMD_NODENAME": node, "SLURM_JOB_ID": "8", "SLURM_CONF": "/dev/null"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def __call__(self, script: Path, limit: float = 30.0) -> int:
        self.log.unlink(missing_ok=True)
        self.configure(script)
        began = time.monotonic()
        process = self.begin(script)
        said, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < limit
        assert said == b""
        return process.returncode

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def _lines(keys: dict[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in keys.items())


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


@pytest.mark.parametrize("script", [PROLOG, HEALTH])
def test_a_good_node_passes_in_silence(scripts: Scripts, script: Path) -> None:
    scripts.config.write_text("[health]\n")
    assert scripts(script) == 0 and scripts.said() == ""


def test_a_bad_node_fails_the_prolog_but_not_the_health_program(scripts: Scripts) -> None:
    scripts.config.write_text(BAD)
    assert scripts(PROLOG) == 1 and "proven bad: memory" in scripts.said()
    assert scripts(HEALTH) == 0 and "node n1: proven bad: memory" in scripts.said()
    scripts.prolog["UNICRON_CHECK_HEALTH"] = "warn"
    assert scripts(PROLOG) == 0 and "mode warn" in scripts.said()


def test_kill_switches(scripts: Scripts) -> None:
    scripts.config.write_text(BAD)
    scripts.health["UNICRON_HEALTH_SKIP"] = "memory,clock"
    assert scripts(PROLOG) == 0 and scripts.said() == ""
    assert scripts(HEALTH) == 0 and scripts.said() == ""
    scripts.health["UNICRON_HEALTH_SKIP"] = ""
    scripts.prolog["UNICRON_CHECK_HEALTH"] = "off"
    assert scripts(PROLOG) == 0 and scripts.said() == ""


@pytest.mark.parametrize("script", [PROLOG, HEALTH])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"UNICRON_PYTHON": "/nonexistent/python"}, ""),
        ({"UNICRON_PYTHON": "/bin/false"}, ""),  # ends with 1, as Python does when it cannot import us
        ({"UNICRON_CONFIG": "/nonexistent.toml"}, "the defaults are used"),
    ],
)
def test_an_error_of_our_own_drains_nobody(scripts: Scripts, script: Path, keys: dict[str, str], words: str) -> None:
    scripts.config.write_text(BAD)
    scripts.health |= keys
    assert scripts(script) == 0
    assert (words or "nothing is concluded from that") in scripts.said()


@pytest.mark.parametrize("script", [PROLOG, HEALTH])
def test_a_check_that_hangs_holds_nobody(scripts: Scripts, script: Path) -> None:
    hanging = scripts.folder / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    scripts.health["UNICRON_PYTHON"] = str(hanging)
    scripts.prolog["UNICRON_HEALTH_SECONDS"] = "1"
    assert scripts(script, limit=15.0) == 0
    assert "took" in scripts.said()


def test_a_run_never_overlaps_an_earlier_one_on_its_node(scripts: Scripts) -> None:
    """slurmd starts one each interval, also while the last one goes on."""
    slow, began, go = scripts.folder / "python", scripts.folder / "began", scripts.folder / "go"
    slow.write_text(f'#!/bin/sh\necho "$SLURMD_NODENAME" >>{began}\nuntil [ -e {go} ]; do sleep 0.05; done\n')
    slow.chmod(0o755)
    scripts.health["UNICRON_PYTHON"] = str(slow)
    scripts.prolog["UNICRON_HEALTH_SECONDS"] = "49"
    scripts.configure(HEALTH)
    first = scripts.begin(HEALTH)
    wait_for(lambda: line_in(began), "the first run")
    other = scripts.begin(HEALTH, node="n2")
    wait_for(lambda: began.read_text().split() == ["n1", "n2"], "one on another node")
    assert [scripts.begin(HEALTH).wait(30) for _ in range(3)] == [0, 0, 0]
    assert first.poll() is other.poll() is None and scripts.said() == ""
    go.touch()
    assert first.wait(60) == other.wait(60) == 0
    assert scripts(HEALTH) == 0 and began.read_text().split() == ["n1", "n2", "n1"]


def test_a_node_without_a_place_for_the_lock_is_checked_all_the_same(scripts: Scripts) -> None:
    scripts.config.write_text(BAD)
    scripts.health["UNICRON_HEALTH_STATE"] = "/proc/nowhere"
    assert scripts(HEALTH) == 0 and "proven bad: memory" in scripts.said()


@pytest.mark.parametrize("script", [PROLOG, HEALTH])
def test_a_slip_in_the_time_limit_is_said(scripts: Scripts, script: Path) -> None:
    scripts.config.write_text("[health]\n")
    scripts.prolog["UNICRON_HEALTH_SECONDS"] = "soon"
    assert scripts(script) == 0 and "couldn't use UNICRON_HEALTH_SECONDS=soon" in scripts.said()
