"""What every SlurmClient must do, on a real Slurm. The pyslurm backend takes part where a fitting pyslurm is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import LIMIT, wait_for
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.server.worker import perform
from unicron_ctl.lab.cluster import LocalCluster, binaries
from unicron_ctl.lab.cluster.cluster_processes import Process, kill_all
from unicron_ctl.shared.slurm import CommandLineClient, ElementInfo, PartitionInfo, SlurmClient, SlurmError, drains
from unicron_ctl.shared.slurm.pyslurm_backend import PyslurmClient, matching_pyslurm

pytestmark = pytest.mark.slurm

Wait = Callable[..., ElementInfo]
Submit = Callable[..., str]


def _installed_release() -> str:
    year, month = binaries.slurm_version(binaries.locate(["slurmctld"])["slurmctld"])
    return f"{year}.{month:02}"


_PYSLURM = matching_pyslurm(_installed_release())
_BACKENDS = ["command_line"] + (["pyslurm"] if _PYSLURM is not None else [])


@pytest.fixture(params=_BACKENDS)
def client(request: pytest.FixtureRequest, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    if request.param == "command_line":
        return CommandLineClient(env=cluster.env())
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])
    _PYSLURM.slurm_init(cluster.env()["SLURM_CONF"])
    return PyslurmClient(_PYSLURM, env=cluster.env())


def _notes(tmp_path: Path, count: int) -> list[str]:
    """What the elements noted from inside their job steps, once there are `count` lines."""

    def lines() -> list[str]:
        return (tmp_path / "notes").read_text().splitlines() if (tmp_path / "notes").exists() else []

    wait_for(lambda: len(lines()) >= count, f"{count} notes", now=lines)
    return lines()


def _of(client: SlurmClient, job: str) -> dict[int, ElementInfo]:
    return {info.element: info for info in client.elements() if info.job == job}


def test_nodes_tell_name_state_gpus_and_start_time(client: SlurmClient, cluster: LocalCluster) -> None:
    nodes = {node.name: node for node in client.nodes()}
    assert list(nodes) == ["n1", "n2", "n3", "n4", "n5", "n6"]
    for index, node in enumerate(nodes.values(), start=1):
        assert node.states == {"IDLE"} and node.healthy and node.reason == ""
        assert node.gpus == 1
        assert (node.address, node.port) == ("127.0.0.1", cluster.spec.ports[index])
        assert node.slurmd_start is not None and time.time() - 3600 < node.slurmd_start <= time.time() + 1


def test_down_has_a_reason_and_resume_takes_it_back(client: SlurmClient) -> None:
    client.down("n3", "unicron[node_problem]: Xid 79 State=odd [really]")
    node = next(node for node in client.nodes() if node.name == "n3")
    assert "DOWN" in node.states and not node.healthy
    assert node.reason == "unicron[node_problem]: Xid 79 State=odd [really]"
    client.resume("n3")
    client.resume("n3")
    node = next(node for node in client.nodes() if node.name == "n3")
    assert "IDLE" in node.states and node.reason == ""


def test_a_drained_node_gets_no_work_and_resume_takes_it_back(client: SlurmClient) -> None:
    client.drain("n3", "unicron[health]: gpu: 7 of 8 [really]")
    node = next(node for node in client.nodes() if node.name == "n3")
    assert {"IDLE", "DRAIN"} <= node.states and not node.healthy
    assert node.reason == "unicron[health]: gpu: 7 of 8 [really]"
    client.resume("n3")
    node = next(node for node in client.nodes() if node.name == "n3")
    assert "IDLE" in node.states and "DRAIN" not in node.states and node.reason == ""


@pytest.mark.parametrize("state", ["DRAIN", "DOWN", "FAIL"])
def test_what_an_admin_has_taken_out_keeps_its_reason(client: SlurmClient, cluster: LocalCluster, state: str) -> None:
    words = ["scontrol", "update", "NodeName=n3", f"State={state}", "Reason=fan 2"]
    subprocess.run(words, env=os.environ | cluster.env(), check=True, timeout=LIMIT)
    try:
        before = next(node for node in client.nodes() if node.name == "n3")
        assert before.reason == "fan 2" and state in before.states
        perform(client, Action("drain", "", -1, "n3", "bad", drains.drain_reason(drains.HEALTH, "gpu: 7 of 8")))
        after = next(node for node in client.nodes() if node.name == "n3")
        assert (after.states, after.reason) == (before.states, "fan 2")
    finally:
        client.resume("n3")
    perform(client, Action("drain", "", -1, "n3", "bad", drains.drain_reason(drains.HEALTH, "gpu: 7 of 8")))
    node = next(node for node in client.nodes() if node.name == "n3")
    client.resume("n3")
    assert "DRAIN" in node.states and node.reason == "unicron[health]: gpu: 7 of 8"


def test_elements_of_arrays_and_plain_jobs_are_told_apart(
    client: SlurmClient, submit: Submit, wait_until: Wait
) -> None:
    plain = submit("--job-name=plain one|x", "--comment=a=b | c  %d")
    array = submit("--array=0,2-3", "--hold", "--job-name=array")
    info = wait_until(client, plain, 0, "RUNNING")
    assert (info.name, info.comment, info.restarts, info.held) == ("plain one|x", "a=b | c  %d", 0, False)
    found = _of(client, array)
    assert sorted(found) == [0, 2, 3]
    assert all(info.state == "PENDING" and info.held and info.node is None for info in found.values())
    client.cancel(plain, 0)
    assert wait_until(client, plain, 0, "CANCELLED").job == plain


def test_an_element_tells_what_its_user_asked_for(client: SlurmClient, submit: Submit) -> None:
    before = time.time()
    job = submit("--array=0-1", "--hold", "--exclude=n[2-3]", "--time=1:30:00", "--account=lab", "--comment=mine")
    client.hold(job, 1, "unicron: not now")
    for info in _of(client, job).values():
        assert (info.partition, info.account, info.gres, info.time_limit) == ("main", "lab", "gpu:1", 5400.0)
        assert info.excluded_nodes == {"n2", "n3"} and info.uid == os.getuid() and info.comment == "mine"
        assert before - 2 <= info.submitted <= time.time() + 1
        assert info.features == info.reservation == "" and info.priority == 0
    found = _of(client, job)
    assert [found[element].admin_comment for element in range(2)] == ["", "unicron: not now"]
    node = client.nodes()[0]
    assert node.partitions == ("main",) and node.gres == "gpu:1" and node.reservations == ()


def test_partitions_are_listed_and_what_is_allowed_in_them(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.client().partitions() == [PartitionInfo("main", 6, "UP")]
    (tmp_path / "unicron.toml").write_text("[partition.main]\nmode = 'act'\n[partition.mian]\nmode = 'off'\n")
    call = [sys.executable, "-c", "from unicron_ctl.cli.unicronctl import main; main()"]
    command = [*call, "config", "check", "--config", tmp_path / "unicron.toml"]
    env = os.environ | cluster.env()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert lines[0] == ["main", "6", "UP", "act", "0", "1", "all"], done.stderr
    assert lines[1][:4] == ["mian", "-", "-", "off"] and lines[2][:4] == ["default", "-", "-", "observe"]
    assert done.stderr.strip() == "[partition.mian]: Slurm has no such partition: it has main" and done.returncode == 3


def test_a_reservation_is_seen_at_its_nodes(client: SlurmClient, cluster: LocalCluster) -> None:
    env = os.environ | cluster.env()
    made = "scontrol create reservation ReservationName=night StartTime=now+1hour Duration=60 Users=root Nodes=n[2-3]"
    subprocess.run(made.split(), env=env, check=True, timeout=20, capture_output=True)
    try:
        nodes = {node.name: node.reservations for node in client.nodes()}
    finally:
        subprocess.run(["scontrol", "delete", "ReservationName=night"], env=env, check=True, timeout=20)
    assert [name for name, found in nodes.items() if found] == ["n2", "n3"]
    night = nodes["n2"][0]
    assert night.name == "night" and night.ends - night.starts == 3600 and abs(night.starts - time.time() - 3600) < 60


def test_no_text_of_a_user_breaks_the_listing(
    client: SlurmClient, cluster: LocalCluster, submit: Submit, wait_until: Wait
) -> None:
    """The name is a whole element as release 0.1 read it: another user's, running."""
    other = submit("--array=0-1", "--hold")
    fields = (other, "0", "1", "RUNNING", "n1", "None", "eve", "0", "0", "x", "y")
    forged = "a\n" + "".join(f"{value}\x1f" for value in fields)
    text = "b\x1fc\nd é"
    job = submit(f"--job-name={forged}", f"--comment={text}", f"--account=lab\n{forged}")
    update = ["scontrol", "update", f"JobId={job}", f"Comment={text}\n{forged}"]
    subprocess.run(update, env=os.environ | cluster.env(), check=True, timeout=20)
    found = _of(client, other)
    assert all(info.state == "PENDING" and info.node is None and info.user != "eve" for info in found.values())
    info = wait_until(client, job, 0, "RUNNING")
    assert sorted(found) == [0, 1] and info.name.startswith("a\n") and info.comment.startswith(text)


def test_a_node_moves_from_one_job_to_another(
    client: SlurmClient, submit: Submit, wait_until: Wait, tmp_path: Path
) -> None:
    giver, taker = submit("--array=0-1"), submit("--array=0-2", "--hold")
    moved = wait_until(client, giver, 1, "RUNNING").node
    _notes(tmp_path, 2)
    client.pin(taker, 2, moved)
    client.release(taker, 2)
    client.requeue_hold(giver, 1, "unicron: its node went to another job")
    info = wait_until(client, taker, 2, "RUNNING", moved)
    assert f"2 {moved} 0" in _notes(tmp_path, 3)
    left = wait_until(client, giver, 1, "PENDING")
    assert left.held and left.admin_comment == "unicron: its node went to another job" and left.restarts == 1
    assert info.slurm_id != taker or info.element == 2
    others = _of(client, taker)
    assert others[0].held and others[1].held, "only the pinned element was released"


def test_the_element_of_a_lost_node_restarts_on_a_chosen_one(
    client: SlurmClient, cluster: LocalCluster, submit: Submit, wait_until: Wait, tmp_path: Path
) -> None:
    job = submit("--array=0-1")
    before = wait_until(client, job, 0, "RUNNING")
    wait_until(client, job, 1, "RUNNING")
    _notes(tmp_path, 2)
    cluster.power_off(before.node)
    client.down(before.node, "unicron[node_problem]: no heartbeat")
    wait_until(client, job, 0, "PENDING")
    client.pin(job, 0, "n6")
    client.start_now(job, 0)
    after = wait_until(client, job, 0, "RUNNING", "n6")
    assert (after.slurm_id, after.restarts) == (before.slurm_id, 1)
    assert "0 n6 1" in _notes(tmp_path, 3), "its job step works there too"


def test_a_repaired_node_goes_to_a_held_element(
    client: SlurmClient, cluster: LocalCluster, submit: Submit, wait_until: Wait, tmp_path: Path
) -> None:
    job = submit("--array=0-1")
    lost = wait_until(client, job, 1, "RUNNING").node
    _notes(tmp_path, 2)
    # Down first: Slurm 22.05 spoils the GPU records of an element whose node goes down while it is still completing.
    client.down(lost, "unicron[node_problem]: test")
    wait_until(client, job, 1, "PENDING")
    client.requeue_hold(job, 1, "unicron: no node for it")

    # Slurm starts no second copy on a node where the first one is still ending: it holds the element once more.
    def of_the_first(kind: str) -> list[Process]:
        return [process for process in cluster.processes() if process.node == lost and process.kind == kind]

    wait_for(lambda: not of_the_first("stepd"), "the first copy has ended", now=cluster.processes)
    kill_all(lambda: of_the_first("task"), LIMIT)  # proctrack/linuxproc may overlook one, which stays for its 300 s
    client.resume(lost)
    client.pin(job, 1, lost)
    client.release(job, 1)
    client.release(job, 1)
    client.start_now(job, 1)
    wait_until(client, job, 1, "RUNNING", lost)
    assert f"1 {lost} 1" in _notes(tmp_path, 3)


def test_a_hold_of_what_runs_waits_for_its_next_requeue(client: SlurmClient, submit: Submit, wait_until: Wait) -> None:
    """Slurm forgets the hold only when the element is released. AdminComment says whose it is."""
    job = submit("--array=0-1")
    wait_until(client, job, 1, "RUNNING")
    client.hold(job, 1, "unicron: held, a test")
    assert wait_until(client, job, 1, "RUNNING").admin_comment == "unicron: held, a test"
    client.requeue(job, 1)
    info = wait_until(client, job, 1, "PENDING")
    assert info.held and (info.reason, info.admin_comment) == ("JobHeldAdmin", "unicron: held, a test")
    client.release(job, 1, "unicron: released")
    client.start_now(job, 1)
    assert wait_until(client, job, 1, "RUNNING").admin_comment == "unicron: released"


def test_a_comment_leaves_what_others_wrote(
    client: SlurmClient, cluster: LocalCluster, submit: Submit, wait_until: Wait
) -> None:
    """A hold's, too. Of an element that has ended Slurm changes nothing."""
    job = submit("--array=0-1")
    wait_until(client, job, 1, "RUNNING")
    theirs = "billed to lab 7, as agreed = a|b"
    update = ["scontrol", "update", f"JobId={job}_1", f"AdminComment={theirs}"]
    subprocess.run(update, env=os.environ | cluster.env(), check=True, timeout=LIMIT)
    client.comment(job, 1, "unicron: 1 failure healed")
    assert wait_until(client, job, 1, "RUNNING").admin_comment == f"unicron: 1 failure healed | {theirs}"
    client.hold(job, 1, "unicron: held, a test")
    assert wait_until(client, job, 1, "RUNNING").admin_comment == f"unicron: held, a test | {theirs}"
    assert wait_until(client, job, 0, "RUNNING").admin_comment == ""
    client.cancel(job, 1)
    wait_until(client, job, 1, "CANCELLED")
    client.comment(job, 1, "unicron: 2 failures healed")
    assert wait_until(client, job, 1, "CANCELLED").admin_comment == f"unicron: held, a test | {theirs}"


def test_requeue_in_place_keeps_the_ids(client: SlurmClient, submit: Submit, wait_until: Wait, tmp_path: Path) -> None:
    job = submit("--array=0-1")
    before = wait_until(client, job, 1, "RUNNING")
    _notes(tmp_path, 2)
    client.requeue(job, 1)
    client.requeue(job, 1)  # again is no error; once it starts anew, a second requeue would end it for good
    wait_until(client, job, 1, "PENDING")
    client.start_now(job, 1)
    after = wait_until(client, job, 1, "RUNNING")
    client.start_now(job, 1)  # nor is this one, of what has begun
    assert (after.slurm_id, after.restarts) == (before.slurm_id, 1)
    assert _of(client, job)[0].restarts == 0


def test_what_others_requeued_does_not_start_in_that_second(
    client: SlurmClient, cluster: LocalCluster, submit: Submit, wait_until: Wait, tmp_path: Path
) -> None:
    """A user, or Slurm itself: slurmd takes no credential of the second in which it has ended the element, and Slurm
    22.05 then calls the element FAILED, for good."""
    job = submit("--array=0")
    wait_until(client, job, 0, "RUNNING")
    _notes(tmp_path, 1)
    time.sleep(1.05 - time.time() % 1.0)  # early in a second
    subprocess.run(["scontrol", "requeue", f"{job}_0"], env=os.environ | cluster.env(), check=True, timeout=20)
    wait_until(client, job, 0, "PENDING")
    client.start_now(job, 0)
    assert wait_until(client, job, 0, "RUNNING").restarts == 1
    client.cancel(job)


def test_holding_one_pending_element_leaves_the_rest(client: SlurmClient, submit: Submit, wait_until: Wait) -> None:
    job = submit("--array=0-3", "--begin=now+1hour")
    client.hold(job, 2, "unicron: the plan has no node for it")
    found = _of(client, job)
    assert [found[i].held for i in range(4)] == [False, False, True, False]
    assert found[2].admin_comment == "unicron: the plan has no node for it"
    client.requeue_hold(job, 3, "unicron: pending already")
    found = _of(client, job)
    assert [found[i].held for i in range(4)] == [False, False, True, True]
    client.release(job, 2)
    client.start_now(job, 2)
    wait_until(client, job, 2, "RUNNING")
    assert _of(client, job)[0].state == "PENDING"


def test_a_pin_can_be_taken_back(client: SlurmClient, submit: Submit, wait_until: Wait) -> None:
    client.down("n5", "unicron[node_problem]: test")
    job = submit("--array=0-0", "--hold")
    client.pin(job, 0, "n5")
    client.pin(job, 0, None)
    client.release(job, 0)
    assert wait_until(client, job, 0, "RUNNING").node != "n5"


def test_cancel_one_element_or_all(client: SlurmClient, submit: Submit, wait_until: Wait) -> None:
    job = submit("--array=0-2")
    wait_until(client, job, 2, "RUNNING")
    client.cancel(job, 1, "unicron: why")
    assert wait_until(client, job, 1, "CANCELLED").admin_comment == "unicron: why"
    assert _of(client, job)[0].state == "RUNNING"
    client.cancel(job)
    for element in (0, 2):
        wait_until(client, job, element, "CANCELLED")


def test_what_slurm_refuses_is_one_line_with_its_reason(client: SlurmClient) -> None:
    with pytest.raises(SlurmError, match=r"[Ii]nvalid job") as raised:
        client.requeue("99999", 1)
    assert "\n" not in str(raised.value)
    with pytest.raises(SlurmError, match=r"[Ii]nvalid node"):
        client.down("n77", "unicron[node_problem]: no such node")


def test_nodes_are_named_in_slurms_own_notation(cluster: LocalCluster) -> None:
    client = CommandLineClient(env=cluster.env())
    assert client.hostnames("n[1-3,5], login2") == ["n1", "n2", "n3", "n5", "login2"]
    assert client.hostnames(" ") == []
    with pytest.raises(SlurmError, match="write names like n1,n2"):
        client.hostnames("n[a]")
