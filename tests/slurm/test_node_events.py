"""What nodes and Slurm itself say, acted upon in a real Slurm: real agents with idle ranks, a real unicrond; a FIFO
stands for each node's kernel log.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from tests.support.controller import Controller
from tests.support.jobs import sleepers
from tests.support.processes import UNICRONCTL, call, outside_slurm, wait_for

GPU_LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
SETTINGS = """
slurm = "command"
slurm_poll_seconds = 0.5
lease_periods = 1.8
max_isolated_job_share = 1.0
"""


@pytest.fixture
def job(cluster, tmp_path):
    """An array of three elements whose agents keep a sleeping rank each, and their controller."""
    for node in cluster.spec.node_names:
        os.mkfifo(tmp_path / f"kmsg.{node}")
    environment = outside_slurm() | cluster.env()
    controller = Controller(tmp_path, SETTINGS, environment)
    try:
        script = sleepers(
            tmp_path,
            controller,
            f"export UNICRON_KMSG={tmp_path}/kmsg.$SLURMD_NODENAME",
            f"echo $$ > {tmp_path}/pid.$SLURM_ARRAY_TASK_ID",
        )
        options = ["--parsable", "-N1", "--exclusive", "--gres=gpu:1", "--array=0-2", "-o", "/dev/null"]
        done = call("sbatch", *options, script, environment=environment)
        assert done.returncode == 0, done.stderr
        told = SimpleNamespace(id=done.stdout.strip(), folder=tmp_path, controller=controller)
        told.agents = lambda: {e["element"]: e["node"] for e in controller.job().get("elements", [])}
        controller.wait(lambda: len(told.agents()) == 3, "three agents")
        controller.wait(lambda: controller.ask("nodes")[0]["states"], "a listing of Slurm's")
        yield told
    finally:
        controller.close()


def failures(job, element: int) -> list[dict]:
    return [failure for failure in job.controller.failures() if failure["element"] == element]


def test_the_kernels_word_moves_the_job_and_slurms_word_explains_lost_agents(cluster, job):
    client, node = cluster.client(), job.agents()[1]
    beside = ["--parsable", "-N1", f"--nodelist={node}", "--oversubscribe", "-o", "/dev/null", "--wrap", "sleep 600"]
    with (job.folder / f"kmsg.{node}").open("w") as log:
        log.write(f"3,1,2,-;{GPU_LOST}\n")

    def moved() -> bool:
        found = [e for e in client.elements() if (e.job, e.element) == (job.id, 1)]
        return bool(found) and found[0].state == "RUNNING" and found[0].node not in (None, node)

    wait_for(moved, f"element 1 off {node}", now=client.elements)
    (failure,) = failures(job, 1)
    assert (failure["node"], failure["severity"], failure["cause"]) == (node, 1, "gpu_lost")
    assert all(info.healthy for info in client.nodes()), "an agent is its user's process: the node stays in service"
    assert "fallen off the bus" in job.controller.node(node)["suspect"]
    assert [item["node"] for item in job.controller.ask("status")["attention"]] == [node]
    shown = call(*UNICRONCTL, "status", "--controller", job.controller.address, environment=outside_slurm())
    assert shown.returncode == 3 and f"unicronctl pair-test --nodes {node}" in shown.stdout, shown
    done = call("sbatch", *beside, environment=outside_slurm() | cluster.env())
    assert done.returncode == 0, done.stderr
    other = done.stdout.strip()
    wait_for(
        lambda: any(e.job == other and e.state == "RUNNING" and e.node == node for e in client.elements()),
        "another user's job runs there",
        now=client.elements,
    )
    client.cancel(other)
    job.controller.wait(lambda: len(job.controller.job().get("members", [])) == 3, "all three work again")

    client.cancel(job.id, 2)
    os.kill(int((job.folder / "pid.0").read_text()), signal.SIGKILL)

    def explained(element: int, word: str) -> bool:
        return any(f"{job.id}_{element} is {word}" in failure["reason"] for failure in failures(job, element))

    job.controller.wait(lambda: 2 not in job.controller.job().get("members", []), "the cancelled element has left")
    wait_for(lambda: explained(0, "FAILED"), "Slurm's word on the killed agent", now=job.controller.failures)
    assert failures(job, 0)[0]["cause"] == "killed_from_outside", failures(job, 0)
    assert len(failures(job, 1)) == 1, "the node that the job left is told of once"
