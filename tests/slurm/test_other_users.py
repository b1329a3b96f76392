"""Different users of one cluster: with agent, socket, sbatch and scontrol nobody gets at another's job."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.support.controller import Controller
from tests.support.processes import outside_slurm, wait_for
from tests.support.users import AGENT, User
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.controller_discovery import Hello
from unicron_ctl.shared.protocol.encryption import secure_client
from unicron_ctl.shared.slurm import ElementInfo
from unicron_ctl.shared.system.errors import UserError

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(os.getuid() != 0, reason="only root can be two other users")]
SETTINGS = 'auth = "munge"\nslurm = "command"\nslurm_poll_seconds = 0.5\nallow_inject = true\n'
# A rank that fails once, with a status of its user's own.
RANK = "[ -e failed ] && exec sleep 600; touch failed; exit $STATUS"


@pytest.fixture
def site(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A controller that acts, and two users, each with a job of one element at work."""
    monkeypatch.setenv("MUNGE_SOCKET", str(cluster.layout.munge_socket))  # the test itself asks, too
    monkeypatch.setenv("SLURM_CONF", str(cluster.layout.slurm_conf))
    environment = outside_slurm() | cluster.env()
    environment["PATH"] += ":/usr/sbin:/usr/bin:/bin"
    controller = Controller(tmp_path, SETTINGS, environment)
    folder = Path(tempfile.mkdtemp(prefix="unicron-users-", dir="/tmp"))
    folder.chmod(0o755)
    conf = folder / "slurm.conf"  # the cluster's own lies in pytest's folder, which is root's alone
    conf.write_text(
        "".join(
            line
            for line in cluster.layout.slurm_conf.read_text().splitlines(keepends=True)
            if not line.startswith("PlugStackConfig")
        )
    )
    theirs = environment | {"SLURM_CONF": str(conf), "UNICRON_CONTROLLER": controller.address}
    users = [User(name, folder, theirs) for name in ("nobody", "daemon")]
    try:
        yield SimpleNamespace(
            cluster=cluster,
            controller=controller,
            owner=users[0],
            thief=users[1],
            of_owner=_submit(cluster, users[0]),
            of_thief=_submit(cluster, users[1]),
        )
    finally:
        for user in users:
            user.close()
        controller.close()
        shutil.rmtree(folder)


def _submit(cluster: LocalCluster, user: User) -> ElementInfo:
    """A job of the user's, at work."""
    options = ["--parsable", "--array=0-0", "-N1", "--requeue", "--comment=mine", "--output=/dev/null"]
    done = user.call("sbatch", *options, "--wrap=exec sleep 300")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    wait_for(lambda: _element(cluster, job).state == "RUNNING", f"job {job} runs", now=cluster.client().elements)
    found = _element(cluster, job)
    assert found.uid == user.uid
    return found


def _element(cluster: LocalCluster, job: str) -> ElementInfo:
    return next(info for info in cluster.client().elements() if info.job == job)


def _agent(user: User, of: ElementInfo, node: str = "") -> None:
    """Start an agent that says it is that element's."""
    settings = {
        "SLURM_ARRAY_JOB_ID": of.job,
        "SLURM_JOB_ID": of.job,
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_TASK_COUNT": "1",
        "SLURMD_NODENAME": node or of.node or "",
        "UNICRON_NODE_ADDRESS": "127.0.0.1",
        "UNICRON_MODE": "restart",
        "UNICRON_REGISTER_TIMEOUT": "80",
        "STATUS": str(_status(user)),
    }
    user.start(AGENT, "run", "--", "/bin/sh", "-c", RANK, **settings)


def _status(user: User) -> int:
    return 10 + user.uid % 100


def _said(user: User) -> str:
    return user.log.read_text() if user.log.exists() else ""


def _refusals(user: User) -> int:
    return _said(user).count("is not its owner")


def attack() -> None:
    """What the thief asks and orders of the job, of which he knows all but the keys; prints what he is told."""
    address, job, node, agent, ranks, owner = sys.argv[1:]
    told: dict[str, Any] = {}

    def order(name: str, kind: str, **arguments: Any) -> None:
        try:
            told[name] = ask_controller({"kind": kind, **arguments}, address, timeout=30.0)
        except UserError as error:
            told[name] = f"refused: {error}"

    order("jobs", "jobs")
    order("status", "status")
    order("nodes", "nodes")
    order("scenario", "scenario")
    order("events", "events", job=job)
    order("events of the node", "events", nodes=node)
    order("events of the owner", "events", user=owner)
    order("failures on the node", "status", nodes=node)
    order("explain", "explain", job=job)
    order("inject", "inject", job=job, slot=0, fault="rank-kill")
    order("health", "health", node=node, source="interval", verdict="bad", reason="mine", at=time.time(), drain=True)
    told["status of his agent"] = _speak_for(address, job, agent)
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(ranks)
            told["ranks"] = "connected"
        except OSError as error:
            told["ranks"] = f"refused: {error.strerror}"
    print(json.dumps(told, default=str), flush=True)


def _speak_for(address: str, job: str, agent: str) -> str:
    """A status in the agent's name: its rank is done."""
    hello = Hello(address)
    key = hello.wait_for_key(30.0)
    hello.close()
    assert key
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    channel.setsockopt(zmq.LINGER, 0)
    secure_client(channel, key)
    channel.connect(address)
    done = {0: structs.RankStatus(state="finished", changed=time.time())}
    status = wire.Status(job=job, element=0, agent=agent, sent=time.time(), number=10**6, store="", ranks=done)
    channel.send(wire.encode(status))
    heard = wire.decode(channel.recv(), wire.ToAgent) if channel.poll(30_000) else None
    channel.close()
    context.term()
    return f"refused: {heard.reason}" if isinstance(heard, wire.Refusal) else str(heard)


def _untouched(site: SimpleNamespace, before: ElementInfo) -> None:
    """The owner's element is as it was, in Slurm and to the controller."""
    assert _element(site.cluster, before.job) == before, "not requeued, held or commented"
    assert site.controller.events("slurm_action") == []
    assert all(node.reason == "" for node in site.cluster.client().nodes())
    (element,) = site.controller.job(before.job)["elements"]
    assert not element["gone"] and element["node"] == before.node
    assert len(site.controller.events("agent_registered", job=before.job)) == 1


def test_an_agent_with_anothers_job_id_is_not_taken_in(site: SimpleNamespace) -> None:
    """Before the owner's agent has come, and after."""
    controller, before = site.controller, _element(site.cluster, site.of_owner.job)
    _agent(site.thief, site.of_owner)
    wait_for(lambda: _refusals(site.thief) == 1, "the thief is refused", now=lambda: _said(site.thief))
    assert controller.job(before.job) == {}, "what its owner did not ask for is not managed"
    _agent(site.owner, site.of_owner)
    controller.wait(lambda: controller.job(before.job).get("elements"), lambda: _said(site.owner))
    _agent(site.thief, site.of_owner)
    _agent(site.thief, site.of_owner, node=site.of_thief.node or "")
    wait_for(lambda: _refusals(site.thief) == 3, "he is refused", now=lambda: _said(site.thief))
    _untouched(site, before)


def test_orders_and_questions_about_anothers_job_are_refused(site: SimpleNamespace) -> None:
    """By one who has a job of his own at work, which is managed, too."""
    controller, owner, thief, job = site.controller, site.owner, site.thief, site.of_owner.job
    for user, of in ((owner, site.of_owner), (thief, site.of_thief)):
        _agent(user, of)
        controller.wait(lambda of=of: controller.job(of.job).get("failures"), lambda user=user: _said(user))
    controller.wait(lambda: controller.job(job)["state"] == "running", "the owner's rank is back")
    before = _element(site.cluster, job)
    (registered,) = controller.events("agent_registered", job=job)
    (ranks,) = owner.folder.glob("unicron-*/ranks")
    words = [controller.address, job, before.node, registered["agent"], str(ranks), owner.name]
    his = _attack(thief, words)
    assert his["explain"] == f"refused: {thief.name} may not read this: only the job's owner, readers and admins"
    assert his["inject"] == f"refused: {thief.name} may not inject here: only the job's owner and admins"
    assert his["health"] == f"refused: {thief.name} may not report health here: only root and admins"
    assert his["status of his agent"] == "refused: register first" and his["ranks"] == "refused: Permission denied"
    failed = f"exit status {_status(owner)}"
    assert his["events"] == [] and failed not in json.dumps(his)
    may_not = f"refused: {thief.name} may not read events of {owner.name}'s jobs: only they, readers and admins"
    assert his["events of the owner"] == may_not and his["events of the node"] == []
    assert his["failures on the node"]["failures"] == []
    for command in (
        ["scancel", job],
        ["scancel", "--state=RUNNING", "--signal=USR1", job],
        ["scontrol", "requeue", f"{job}_0"],
        ["scontrol", "hold", f"{job}_0"],
        ["scontrol", "update", f"JobId={job}_0", "AdminComment=unicron: held"],
        ["scontrol", "update", f"NodeName={before.node}", "State=DRAIN", "Reason=unicron[health]: mine"],
    ):
        done = thief.call(*command)
        assert done.returncode != 0, f"{command}: {done.stdout}{done.stderr}"
    _untouched(site, before)
    mine = _attack(owner, words)
    assert failed in json.dumps(mine["explain"]) and mine["events"], "it was there to be read"
    assert mine["events of the owner"] and mine["events of the node"] and mine["failures on the node"]["failures"]
    assert mine["ranks"] == "connected" and "refused" not in mine["inject"], mine


def _attack(user: User, words: list[str]) -> dict[str, Any]:
    process = user.start(f"{__name__}:attack", *words)
    assert process.wait(60) == 0, _said(user)
    return json.loads(_said(user).splitlines()[-1])
