"""The template's training over real links, as a user submits it: one node falls silent without closing a connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.links import NEEDS_ROOT, LinksCluster
from tests.support.plugin_site import build_once
from tests.support.processes import wait_for

pytestmark = [pytest.mark.slurm, NEEDS_ROOT]
HEAL_LIMIT = 180.0  # generous: a rank's start takes half a minute where the cores are shared


@pytest.fixture
def links(tmp_path: Path) -> Iterator[LinksCluster]:
    """Four nodes and the plugin; tests keep one node spare."""
    plugin = build_once(tmp_path / "build")
    # The nodes share this machine's cores: an iteration takes many times as long while another rank starts.
    settings = "hang_floor_seconds = 60.0\n"
    with LinksCluster(tmp_path / "site", nodes=4, settings=settings, plugin=plugin) as site:
        yield site


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_job_goes_on_without_the_node_and_takes_the_spare_one(links: LinksCluster) -> None:
    job = links.submit_gpt(3, "--seed", "7", options=["--unicron-min-nodes=1"])
    job.whole(3, HEAL_LIMIT)
    before, silent = job.status(), job.node(1)
    (spare,) = {f"n{i}" for i in range(1, 5)} - {job.node(element) for element in range(3)}

    cut = links.cut(silent)
    stepped = job.next_step(cut)
    failure = wait_for(links.controller.failures, "the loss is on record", now=job.told)[0]
    assert (failure["node"], failure["severity"], failure["element"]) == (silent, 1, 1)
    assert cut < failure["detected_at"] < stepped
    job.whole(3, HEAL_LIMIT)
    assert job.node(1) == spare
    assert links.cluster.links.faults().cut == [silent], "the node is silent still"

    healed = job.status()
    links.heal()

    def empty() -> bool:
        return not [p for p in links.cluster.processes() if p.node == silent and p.kind in ("stepd", "task")]

    wait_for(empty, f"what ran on {silent} has ended", now=links.cluster.processes)
    job.reached(5)
    after = job.status()
    assert [job.node(element) for element in (0, 2)] == [e["node"] for e in before["elements"] if e["element"] != 1]
    assert (job.node(1), after["generation"], after["members"]) == (spare, healed["generation"], healed["members"])

    links.slurm("scancel", "--state=RUNNING", "--signal=USR1", job.id)
    wait_for(lambda: job.status()["ended"], "the job ends as it was asked to", now=job.told)
    assert job.status()["ended"]["code"] == 0, job.told()
    assert after["ledger_violations"] == job.status()["ledger_violations"] == 0
    iterations = [record["iteration"] for record in job.merged()]
    assert iterations == list(range(iterations[-1] + 1)), "no iteration is missing, and all ranks agree on each"
    wait_for(lambda: not links.slurm("squeue", "-h"), "Slurm is through with it", now=lambda: links.slurm("squeue"))
    links.cluster.client().resume(silent)
    wait_for(links.clean, "all nodes serve again", now=links.nodes)
