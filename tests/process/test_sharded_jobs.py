"""Jobs of sharded modules with real agents and a real controller: replicas over nodes, a sole replica, checkpoints of
another number of shards."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.jobs import World, json_lines
from tests.support.moments import fault
from tests.support.processes import LIMIT, ROOT, outside_slurm
from tests.support.warm import Script

pytestmark = pytest.mark.process
SCRIPT = ROOT / "tests" / "support" / "tiny_sharded.py"
COMMAND = [sys.executable, str(SCRIPT)]
ITERATIONS = 8
SETTINGS = {"TINY_ITERATIONS": str(ITERATIONS), "TINY_SLOW": "0.03"}


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[int, float]:
    """By iteration, of a loop of torch alone."""
    folder = tmp_path_factory.mktemp("alone")
    environment = outside_slurm() | SETTINGS | {"TINY_ALONE": "1", "TINY_SHARD": "1", "TINY_OUT": str(folder)}
    done = Script(SCRIPT, environment=environment).wait(LIMIT)
    assert done.returncode == 0, done.stderr
    return {one["iteration"]: one["loss"] for one in json_lines(folder / "losses.0")}


def test_a_sole_replica_goes_on_from_the_memory_of_its_nodes(tmp_path, losses):
    """A rank of F4 is killed in a reduce-scatter. No replica is left, and no checkpoint was written: the others keep
    their shards, and the new rank finds its own in its node's memory."""
    faults = json.dumps([fault(2, 4, "scatter", 1)])
    more = {"TINY_SHARD": "4", "TINY_FAULT": faults}
    with World(tmp_path, nodes=4, command=COMMAND, **SETTINGS, **more) as job:
        job.wait(lambda: job.job().get("ended"), "the job is trained to its end")
        assert job.job()["ended"]["code"] == 0 and job.job()["ledger_violations"] == 0, job.told()
    for slot in range(4):
        steps = json_lines(tmp_path / f"losses.{slot}")
        assert [one["iteration"] for one in steps] == list(range(ITERATIONS)), "none was lost, none was stepped twice"
        for one in steps:
            assert one["loss"] == pytest.approx(losses[one["iteration"]], rel=1e-6)
