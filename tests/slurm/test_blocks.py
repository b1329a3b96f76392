"""An array whose elements have two nodes each, on a real Slurm: a world takes or leaves an element as a whole."""

from __future__ import annotations

import pytest

from tests.support.jobs import PLAIN
from tests.support.plugin_site import Site
from tests.support.processes import wait_for

pytestmark = pytest.mark.site(nodes=4)


def test_a_block_leaves_with_its_lost_node_and_comes_back_whole(site: Site) -> None:
    said = "echo no-kill: $SLURM_NO_KILL."
    options = ("--unicron", "--array=0-1", "-N2", "--gres=gpu:1", "--exclusive")
    number = site.submit(*options, "--wrap", f"{said}; srun python {PLAIN}")
    before = site.world(size=4)
    assert "no-kill: .\n" in (site.folder / f"slurm-{number}_0.out").read_text(), "it ends as a whole"
    rows = site.run("squeue", "-h", "-r", "-j", number, "-o", "%K %N").splitlines()
    assert sorted(rows) == ["0 n[1-2]", "1 n[3-4]"]
    job = site.job(number)
    assert (job["nodes"], job["max_nodes"], job["min_nodes"]) == (4, 4, 2)
    assert [(one["element"], one["node"]) for one in job["elements"]] == [(n, f"n{n + 1}") for n in range(4)]

    site.power_off("n4")
    after = site.world(before["generation"], 2)
    assert after["begun"] >= before["step"] and site.job(number)["members"] == [0, 1]
    kinds = [event["kind_of_failure"] for event in site.controller.events("failure_detected")]
    assert len([kind for kind in kinds if kind != "rank"]) <= 1, site.logs()  # the agent on n3 ends with the block

    site.cluster.power_on("n4")
    site.run("scontrol", "update", "nodename=n4", "state=resume")
    last = site.world(after["generation"], 4)
    assert last["begun"] >= after["step"] and site.job(number)["members"] == list(range(4))
    shown = site.run("unicronctl", "status", "--controller", site.controller.address)
    assert f"{number}_0 n1,n2; {number}_1 n3,n4" in shown, shown
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert site.job(number)["ended"]["code"] == 0
