"""A job of which no rank is left goes on from the newest checkpoint: real ranks, agents and controller."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.jobs import World, json_lines

pytestmark = pytest.mark.process
ITERATIONS = 12


def test_all_ranks_die_and_the_job_goes_on_from_its_checkpoint(tmp_path):
    settings = {"TINY_ITERATIONS": str(ITERATIONS), "TINY_SLOW": "0.1", "UNICRON_MEMORY_EVERY": "0"}
    with World(tmp_path, nodes=2, TINY_CHECKPOINTS=str(tmp_path / "saves"), **settings) as job:
        job.wait(lambda: job.trains([0, 1], 5), "6 iterations")
        assert job.ask("explain", job="7")["checkpoints"] == str(tmp_path / "saves")
        for slot in (0, 1):
            os.kill(job.rank(slot)["pid"], signal.SIGKILL)
        job.wait(lambda: job.job()["ended"], "the job is trained to its end")
        assert job.job()["ended"]["code"] == 0 and job.job()["ledger_violations"] == 0
        assert job.array.logs.count(f"goes on from {tmp_path}") == 1, (
            "one rank reads it, and the other has it from that"
        )
    for slot in (0, 1):
        trained = json_lines(tmp_path / f"losses.{slot}")
        again = next(n for n, one in enumerate(trained) if one["generation"] > trained[0]["generation"])
        assert trained[again]["iteration"] in (4, 6, 8), "of the newest checkpoint, not of the start"
        losses = {}
        for one in trained:
            assert losses.setdefault(one["iteration"], one["loss"]) == pytest.approx(one["loss"], rel=1e-6)
        assert sorted(losses) == list(range(ITERATIONS))
    names = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert names == ["iteration-00000010", "iteration-00000012"]
