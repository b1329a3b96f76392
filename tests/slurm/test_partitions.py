"""What the admin allows, on a real Slurm: what is only observed is not touched, and nobody else's hold is released."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.controller import Controller, quick_on_slurm
from tests.support.jobs import sleepers
from tests.support.processes import UNICRONCTL, call, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.slurm.slurm_client import slurms_own

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """start(mode, *options) runs an array of three elements whose agents keep a sleeping rank each."""
    started: list[Controller] = []
    environment = outside_slurm() | cluster.env()

    def run(mode: str, *options: str) -> SimpleNamespace:
        controller = Controller(tmp_path, quick_on_slurm(mode), environment)
        started.append(controller)
        usual = ["--parsable", "-N1", "--exclusive", "--gres=gpu:1", "--array=0-2", "--requeue", "-o", "/dev/null"]
        done = call("sbatch", *usual, *options, sleepers(tmp_path, controller), environment=environment)
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(id=done.stdout.strip(), controller=controller, environment=environment)

    yield run
    for controller in started:
        controller.close()


def _nodes(job: SimpleNamespace) -> dict[int, str]:
    return {e["element"]: e["node"] for e in job.controller.job().get("elements", []) if not e["gone"]}


def test_where_it_only_observes_a_lost_node_is_slurms_matter(
    cluster: LocalCluster, start: Callable[..., SimpleNamespace]
) -> None:
    job, client = start("observe"), cluster.client()
    job.controller.wait(lambda: len(_nodes(job)) == 3, "three agents")
    job.controller.wait(lambda: job.controller.job()["state"] == "running", "the job runs")
    node, before = _nodes(job)[1], job.controller.job()["generation"]
    cluster.power_off(node)
    would = f"down {node}"
    job.controller.wait(lambda: would in [e["would"] for e in job.controller.events("observed")], would)

    def goes_on() -> bool:
        """With two, or with three: Slurm starts the lost element elsewhere while the new world waits for the old one's
        end (docs/design/consensus.md, *A lease for plain programs*)."""
        now = job.controller.job()
        return now["state"] == "running" and now["generation"] > before and node not in _nodes(job).values()

    job.controller.wait(goes_on, "it goes on without the lost node")
    assert job.controller.job()["nodes"] >= 2
    reasons = [info.reason for info in client.nodes()]
    # Slurm 24.11 without slurmdbd puts its word behind the reason that the node once had, that of another test perhaps.
    assert all(slurms_own(reason.rpartition(" : ")[2]) for reason in reasons), reasons
    assert not job.controller.events("slurm_action")
    assert job.controller.ask("status")["controller"]["modes"] == {"default": "observe", "main": "observe"}
    assert "acting would have given" in job.controller.ask("status")["observed"][0]
    _filters(job, node)


def _filters(job: SimpleNamespace, lost: str) -> None:
    """What is asked for by partition and node is what this Slurm shows."""
    ask, other = job.controller.ask, next(iter(_nodes(job).values()))
    assert [one["job"] for one in ask("jobs", partition="main", nodes=other)] == [job.id]
    assert {one["node"] for one in ask("nodes", partition="main", nodes=f"{lost},{other}")} == {lost, other}
    assert {one["node"] for one in ask("events", nodes=lost, kinds="observed")} == {lost}
    kinds = "observed node_lost"
    assert job.id in {one["job"] for one in ask("events", partition="main", kinds=kinds)}


def test_a_hold_of_others_stays_and_so_does_the_users_comment(
    cluster: LocalCluster, start: Callable[..., SimpleNamespace]
) -> None:
    """Release 0.1 released whatever had a Comment that begins with "unicron", which the template wrote."""
    job, client = start("act", "--comment=unicron", "--hold", "--exclude=n5,n6"), cluster.client()

    def elements() -> dict[int, object]:
        return {info.element: info for info in client.elements() if info.job == job.id}

    for element in (0, 1):
        client.release(job.id, element)
    call("scontrol", "update", f"JobId={job.id}_2", "AdminComment=unicron: mine", environment=job.environment)
    job.controller.wait(lambda: len(_nodes(job)) == 2, "two agents")
    job.controller.wait(lambda: job.controller.job()["state"] == "running", "the job runs")
    node = _nodes(job)[1]
    cluster.power_off(node)
    wait_for(lambda: any("unicron" in i.reason for i in client.nodes()), f"{node} is set down", now=client.nodes)
    job.controller.wait(
        lambda: {e["element"] for e in job.controller.events("slurm_action") if e["action"] == "pin"} == {1},
        "it is replaced",
    )
    found = elements()
    assert found[2].held and found[2].comment == found[0].comment == "unicron", found  # type: ignore[attr-defined]
    assert all(e["element"] != 2 for e in job.controller.events("slurm_action"))
    pinned = {e["node"] for e in job.controller.events("slurm_action") if e["action"] == "pin"}
    assert pinned <= {"n1", "n2", "n3", "n4"} and os.getuid() == found[0].uid  # type: ignore[attr-defined]
    said = job.controller.ask("explain", job=job.id)["bounds"]
    assert "in reach (partition main, gpu:1)" in said and "excluded by the job" in said


@pytest.mark.wide
def test_a_pause_keeps_its_hands_off_and_its_end_lets_it_act(
    cluster: LocalCluster, start: Callable[..., SimpleNamespace]
) -> None:
    job = start("act")
    job.controller.wait(lambda: len(_nodes(job)) == 3, "three agents")
    job.controller.wait(lambda: job.controller.job()["state"] == "running", "the job runs")

    def unicronctl(*words: str) -> tuple[int, str]:
        done = call(*UNICRONCTL, *words, "--controller", job.controller.address, environment=job.environment)
        return done.returncode, done.stdout + done.stderr

    assert unicronctl("ping")[0] == 0 and unicronctl("status")[0] == 0
    code, said = unicronctl("pause", "main", "--for", "1h")
    assert code == 0 and "partition main is paused until" in said and "main: observe" in said
    code, said = unicronctl("pause", "mian")
    assert code == 1 and "there is no partition 'mian'" in said
    first = _nodes(job)[1]
    cluster.power_off(first)
    would = f"down {first}"
    job.controller.wait(lambda: would in [e["would"] for e in job.controller.events("observed")], would)
    assert not job.controller.events("slurm_action")

    code, said = unicronctl("resume")
    assert code == 0 and "nothing is paused" in said and "main: act" in said
    second = _nodes(job)[2]
    cluster.power_off(second)

    def downed() -> bool:
        return (second, "down") in [(e["node"], e["action"]) for e in job.controller.events("slurm_action")]

    job.controller.wait(downed, f"{second} is set down")
    job.controller.kill()
    assert unicronctl("ping", "--seconds", "1")[0] == 1
    job.controller.start()
