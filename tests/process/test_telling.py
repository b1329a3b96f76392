"""Who hears of a healed job: a real hook of a real unicrond, and the job's own log."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, TINY_PLAIN, World

pytestmark = pytest.mark.process


def test_a_healed_job_is_told_to_the_hook_once_and_is_in_its_log(tmp_path: Path) -> None:
    heard, hook = tmp_path / "heard", tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\n{{ cat; echo; }} >> {heard}\n")
    hook.chmod(0o755)
    settings = f'allow_inject = true\n[notify]\nhook = "{hook}"\nkinds = ["healed"]\ndigest_seconds = 0.2\n'
    settings += '[partition.default]\nmode = "act"\n'

    def notices() -> list[dict[str, object]]:
        lines = heard.read_text().splitlines() if heard.exists() else []
        return [one for line in lines if line for one in json.loads(line)["notices"]]

    with World(tmp_path, 2, settings, TINY_PLAIN, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02") as job:
        job.trains_on([0, 1])
        job.ask("inject", fault="rank-kill", job="7", slot=1)
        job.wait(notices, "the hook is told")
        (event,) = job.events("healed")
        (notice,) = notices()
        assert (notice["id"], notice["job"], notice["kind"]) == (event["id"], "7", "healed")
        job.wait(lambda: job.events("told")[-1:] and job.events("told")[-1]["upto"] == event["id"], "it is on record")
        job.agents[0].process.send_signal(signal.SIGUSR1)
        assert job.array.wait() == [0, 0]
        said = [line for agent in job.agents.values() for line in agent.log.splitlines() if "was healed" in line]
        assert len(said) == 1 and "1 failure was healed" in said[0], job.array.logs
        assert len(notices()) == 1
