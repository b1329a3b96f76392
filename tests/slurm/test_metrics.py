"""Debian's Prometheus: it takes the alert rules, scrapes a real unicrond, knows every expression of the dashboard, and
an alert fires when a node is lost."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import Controller, quick_on_slurm
from tests.support.jobs import sleepers
from tests.support.processes import ROOT, call, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster, ports

pytestmark = [pytest.mark.slurm, pytest.mark.wide]
FOLDER = ROOT / "slurm_plugin" / "monitoring"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: unicron
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def promtool(*words: str | Path, text: str | None = None) -> str:
    """What it says; it must be content."""
    done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    """A real one, which scrapes unicrond's port once a second. Debian's package `prometheus` has it."""

    def __init__(self, folder: Path, port: int) -> None:
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(rules=FOLDER / "unicron-rules.yml", port=port))
        promtool("check", "config", config)
        self.address = f"127.0.0.1:{ports.choose(1, uuid.uuid4().hex)[0]}"
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb", "--log.level=warn"]
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self.address}"], stdout=self._log, stderr=self._log
        )
        try:
            wait_for(self._is_ready, "Prometheus is ready")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5).status == 200
        return False

    def ask(self, what: str, **arguments: str) -> Any:
        """A question of its API."""
        place = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            found = json.load(urllib.request.urlopen(place, timeout=30))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        return found["data"]

    def value(self, expression: str) -> float | None:
        """The value of the expression's only series."""
        found = self.ask("query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else None

    def alerts(self, state: str = "firing") -> set[str]:
        """The alerts in that state."""
        return {one["labels"]["alertname"] for one in self.ask("alerts")["alerts"] if one["state"] == state}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@pytest.fixture
def port() -> int:
    return ports.choose(1, uuid.uuid4().hex)[0]


@pytest.fixture
def controller(cluster: LocalCluster, tmp_path: Path, port: int) -> Iterator[Controller]:
    """One that acts, may take a single node, and has metrics."""
    lines = f'metrics = ":{port}"\nmax_isolated_nodes = 1\n'
    started = Controller(tmp_path, lines + quick_on_slurm("act"), outside_slurm() | cluster.env())
    yield started
    started.close()


@pytest.fixture
def prometheus(tmp_path: Path, port: int) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path, port)
    yield started
    started.close()


def test_the_rules_are_sound_and_fire_when_they_should() -> None:
    assert re.search(r"SUCCESS: \d+ rules found", promtool("check", "rules", FOLDER / "unicron-rules.yml"))
    promtool("test", "rules", ROOT / "tests" / "data" / "unicron-rules-test.yml")


def test_a_lost_node_is_seen_by_prometheus_and_an_alert_fires(
    cluster: LocalCluster, controller: Controller, prometheus: Prometheus, port: int, tmp_path: Path
) -> None:
    options = ["--parsable", "-N1", "--exclusive", "--gres=gpu:1", "--array=0-2", "--requeue", "-o", "/dev/null"]
    done = call("sbatch", *options, sleepers(tmp_path, controller), environment=controller.environment)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    of_job = f'{{jobid="{job}"}}'
    wait_for(lambda: prometheus.value(f"unicron_job_nodes{of_job}") == 3, "three nodes train", now=controller.told)
    assert prometheus.value("up") == 1 and prometheus.value("unicron_agents") == 3
    assert prometheus.value('unicron_nodes{state="good"}') == 6 and not prometheus.alerts()
    assert prometheus.value('unicron_slurm_seconds_count{call="list"}') > 0  # type: ignore[operator]
    assert prometheus.value("unicron_loop_late_seconds_count") > 0  # type: ignore[operator]

    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    promtool("check", "metrics", text=page)
    node = next(e["node"] for e in controller.job(job)["elements"] if e["element"] == 1)
    cluster.power_off(node)
    began = time.monotonic()
    wait_for(lambda: "UnicronBoundNearlyReached" in prometheus.alerts(), "an alert", now=controller.told)
    assert time.monotonic() - began < 60
    wait_for(lambda: prometheus.value('unicron_nodes{state="out_of_service"}') == 1, "the node is out")
    downs = 'unicron_slurm_actions_total{action="down",outcome="done"}'
    wait_for(lambda: prometheus.value(downs) == 1, "it is set down", now=controller.told)
    assert prometheus.value("sum(unicron_failures_total)") >= 1  # type: ignore[operator]
    first = "sum(increase(unicron_failures_total[1h]))"
    assert prometheus.value(first) > 0, "Prometheus saw it come"  # type: ignore[operator]
    assert prometheus.value(f"unicron_job_failures_total{of_job}") >= 1  # type: ignore[operator]

    board = json.loads((FOLDER / "unicron-dashboard.json").read_text())
    shown = 0
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            shown += bool(prometheus.ask("query", query=expression)["result"])
    assert shown > 20, "most panels show something by now"


def test_one_that_is_gone_is_told_of(controller: Controller, prometheus: Prometheus) -> None:
    wait_for(lambda: prometheus.value('up{job="unicron"}') == 1, "it is scraped")
    controller.kill()
    wait_for(lambda: prometheus.value('up{job="unicron"}') == 0, "it is not")
    wait_for(lambda: "UnicronDown" in prometheus.alerts("pending"), "the alert waits its two minutes")
    controller.start()
    wait_for(lambda: prometheus.value('up{job="unicron"}') == 1, "it is scraped again")
