"""`unicronctl report` about a job that a real unicrond has healed: the week's report, and a bundle."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, TINY_PLAIN, World
from tests.support.processes import unicronctl

pytestmark = pytest.mark.process


def test_a_healed_job_is_in_the_weeks_report_and_in_the_bundle(tmp_path: Path) -> None:
    settings = 'allow_inject = true\n[partition.default]\nmode = "act"\n'
    with World(tmp_path, 2, settings, TINY_PLAIN, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02") as job:
        job.trains_on([0, 1])
        job.ask("inject", fault="rank-kill", job="7", slot=1)
        job.wait(lambda: job.events("healed"), "it is healed")
        (event,) = job.events("healed")
        place = {"UNICRON_CONFIG": str(job.config), "UNICRON_CONTROLLER": job.address}
        report = unicronctl("report", "week", **place)
        assert "recoveries: 1" in report.stdout and event["cause"] in report.stdout, report
        bundle = tmp_path / "bundle.tar.gz"
        packed = unicronctl("report", "7", "-o", str(bundle), **place)
        assert packed.returncode == 0, packed
        with tarfile.open(bundle) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"explain.json", "events.jsonl", "configuration.json"} <= names
