"""A job that is one allocation of several nodes, on a real Slurm: the shape of nearly all public scripts."""

from __future__ import annotations

import os

import pytest

from tests.support.jobs import PLAIN
from tests.support.plugin_site import Site
from tests.support.processes import call, wait_for

pytestmark = pytest.mark.site(nodes=4)


def test_an_allocation_is_one_world_and_goes_on_without_a_lost_node(site: Site) -> None:
    options = ("--unicron", "-N3", "--no-kill", "--gres=gpu:1", "--exclusive")
    number = site.submit(*options, "--wrap", f"srun python {PLAIN}")
    before = site.world(size=3)
    nodes = site.run("squeue", "-h", "-j", number, "-o", "%N")
    assert nodes == "n[1-3]" and site.job(number)["nodes"] == 3
    site.power_off("n3")
    after = site.world(before["generation"], 2)
    assert after["begun"] >= before["step"]
    wait_for(lambda: site.run("squeue", "-h", "-j", number, "-o", "%N") == "n[1-2]", site.logs)
    explained = call(
        "unicronctl", "explain", number, "--controller", site.controller.address, environment=site.environment
    )
    assert "it is one allocation, of 3 nodes, which the plan leaves as it is" in explained.stdout, explained
    asked = [event["action"] for event in site.controller.events("slurm_action")]
    assert not {"requeue", "requeue_hold", "hold", "release", "pin", "down"} & set(asked), asked

    site.power_off("n1")  # the batch host
    last = site.world(after["generation"], 1)
    assert last["begun"] >= after["step"]
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    state = "%T"
    wait_for(lambda: site.run("squeue", "-h", "--states=all", "-j", number, "-o", state) != "RUNNING", site.logs)
    assert os.path.exists(site.folder / "checkpoint")


def test_a_spare_inside_takes_the_place_of_a_lost_node(site: Site) -> None:
    words = ("-N3", "--exclusive", "--unicron-spares=1", "--unicron-min-nodes=2")  # the plugin adds --no-kill
    number = site.submit("--unicron", *words, "--wrap", f"srun python {PLAIN}")
    before = site.world(size=2)
    wait_for(lambda: site.job(number)["spares_ready"] == 1, site.logs)
    member = max(site.job(number)["members"])
    site.power_off(f"n{member + 1}")
    after = site.world(before["generation"], 2)
    assert after["begun"] >= before["step"] and site.job(number)["nodes"] == 2
    (site.folder / "stop").touch()
    wait_for(lambda: site.job(number)["state"] == "ended", site.logs)
    assert site.job(number)["ended"]["code"] == 0


@pytest.mark.wide
def test_an_allocation_gives_a_node_back_to_the_job_that_is_to_have_it(site: Site) -> None:
    words = ("-N3", "--exclusive", "--unicron-min-nodes=2", "--unicron-weight=0.1")
    wrap = f"srun python {PLAIN}; echo srun ended with $?"
    number = site.submit("--unicron", *words, "--output=first.out", "--wrap", wrap)
    before = site.world(size=3)
    other = site.folder / "other"
    other.mkdir()
    site.environment["PLAIN_OUT"] = str(other)
    array = site.submit("--unicron", "--array=0-1", "-N1", "--exclusive", "--wrap", f"srun python {PLAIN}")

    def at_work(job: str) -> str:
        return site.run("squeue", "-h", "-r", "-t", "RUNNING", "-j", job, "-o", "%N")

    wait_for(lambda: set(at_work(array).split()) == {"n3", "n4"} and site.job(array)["nodes"] == 2, site.logs)
    assert at_work(number) == "n[1-2]"
    after = site.world(before["generation"], 2)
    assert after["begun"] >= before["step"] and not site.job(number)["failures"]
    asked = [event for event in site.controller.events("slurm_action") if event["job"] == number]
    assert [(event["action"], event["node"], event["slurm_reason"]) for event in asked] == [("shrink", "n3", "n1,n2")]
    words = ("unicronctl", "explain", number, "--controller", site.controller.address)
    explained = call(*words, environment=site.environment)
    assert "only once without slurmdbd" in explained.stdout, explained
    for folder in (site.folder, other):
        (folder / "stop").touch()
    for job in (number, array):
        wait_for(lambda job=job: site.job(job)["state"] == "ended", site.logs)
    wait_for(lambda: "srun ended with 0" in (site.folder / "first.out").read_text(), site.logs)
