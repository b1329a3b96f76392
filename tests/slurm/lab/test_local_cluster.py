"""The private cluster itself: it comes up beside others, survives accidents, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import is_alive
from tests.support.processes import ROOT, line_in, unicronctl, wait_for
from unicron_ctl.lab.cluster import LocalCluster, binaries, ports, protection
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.reach import Reach, reach
from unicron_ctl.shared.system.errors import UserError

pytestmark = pytest.mark.slurm


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of two nodes of its own, not started; ended whatever the test does."""
    cluster = LocalCluster(tmp_path / "state", nodes=2)
    yield cluster
    cluster.down()


def _mentions(folder: Path) -> list[str]:
    """Command lines of all processes that mention the folder, found without the code under test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


def _assert_nothing_left(cluster: LocalCluster) -> None:
    assert cluster.processes() == []
    assert _mentions(cluster.layout.state_dir) == [] and _mentions(cluster.layout.short_dir) == []
    assert not cluster.layout.short_dir.exists()
    sockets = Path("/proc/net/unix").read_text()
    assert str(cluster.layout.short_dir) not in sockets and str(cluster.layout.state_dir) not in sockets
    assert all(ports.is_free(port) for port in cluster.spec.ports)


def _in_child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def _output(command: list[str], cluster: LocalCluster) -> str:
    env = os.environ | cluster.env()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CRASHING_UP = """
import os, signal, sys
from unicron_ctl.lab.cluster import LocalCluster
launch, left = LocalCluster._launch, [int(sys.argv[2])]
def launch_or_die(self, name, command, host):
    pid = launch(self, name, command, host)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return pid
LocalCluster._launch = launch_or_die
LocalCluster(sys.argv[1], nodes=2).up()
"""


def test_up_twice_is_no_error_and_down_leaves_nothing(small: LocalCluster) -> None:
    small.up()
    before = [(process.pid, process.started) for process in small.processes()]
    small.up()
    LocalCluster(small.layout.state_dir, nodes=2).up()
    assert [(process.pid, process.started) for process in small.processes()] == before
    status = LocalCluster.load(small.layout.state_dir).status()
    assert status.state == "up" and [node.states for node in status.nodes] == [["IDLE"], ["IDLE"]]
    with pytest.raises(UserError, match=r"different cluster \(2 nodes\).*cluster down") as raised:
        LocalCluster(small.layout.state_dir, nodes=3).up()
    assert raised.value.exit_code == 2
    small.down()
    _assert_nothing_left(small)
    small.down()
    assert small.status().state == "down"


def test_a_slurmctld_that_ended_is_started_again_and_jobs_do_not_notice(small: LocalCluster) -> None:
    small.up()
    job = _output(["sbatch", "--parsable", "-w", "n2", "--output=/dev/null", "--wrap", "sleep 301"], small)
    element = lambda: [(e.job, e.state, e.node) for e in small.client().elements()]  # noqa: E731
    wait_for(lambda: element() == [(job, "RUNNING", "n2")], "the job runs", now=element)
    wait_for(lambda: any(process.kind == "task" for process in small.processes()), "its process runs")
    first: dict[tuple[str, str | None], int] = {}  # of each kind and node: later ones may be there for a moment only
    for process in sorted(small.processes(), key=lambda each: each.started):
        first.setdefault((process.kind, process.node), process.pid)
    living = {pid for (kind, _), pid in first.items() if kind != "slurmctld"}
    for process in small.processes():
        if process.kind == "slurmctld":
            os.kill(process.pid, signal.SIGTERM)  # it notes down what runs
    wait_for(lambda: all(process.kind != "slurmctld" for process in small.processes()), "it is gone")
    assert small.status().state == "partial"
    small.up()
    assert small.status().state == "up" and element() == [(job, "RUNNING", "n2")]
    assert living <= {process.pid for process in small.processes()}


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_crash_half_way_up_is_cleared_by_down(small: LocalCluster, launches: int) -> None:
    crashed = _in_child(CRASHING_UP, str(small.layout.state_dir), str(launches))
    assert crashed.returncode == -signal.SIGKILL, crashed.stderr
    wanted = set(["munged", "slurmctld", "slurmd"][:launches])
    shown = lambda: {process.kind for process in small.processes()}  # noqa: E731
    wait_for(lambda: shown() == wanted, "what has just been launched shows", now=small.processes)
    assert LocalCluster.load(small.layout.state_dir).status().state == "partial"
    small.down()
    _assert_nothing_left(small)


def test_a_crash_half_way_up_is_mended_by_up(small: LocalCluster) -> None:
    for launches in (1, 3):
        _in_child(CRASHING_UP, str(small.layout.state_dir), str(launches))
        small.up()
        assert small.status().state == "up"
        small.down()
    _assert_nothing_left(small)


def test_a_port_in_use_is_avoided(small: LocalCluster) -> None:
    wanted = ports.choose(3, f"{small.layout.state_dir} 1")
    with socket.create_server(("127.0.0.1", wanted[0])), socket.create_server(("127.0.0.1", wanted[2])):
        small.up()
        assert not {wanted[0], wanted[2]} & set(small.spec.ports)
        assert small.status().state == "up"


@pytest.mark.wide
def test_a_port_taken_between_choice_and_start_leads_to_another(
    small: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        real, calls = ports.choose, []

        def choose(count: int, seed: str) -> tuple[int, ...]:
            calls.append(seed)
            found = real(count, seed)
            return (taken.getsockname()[1], *found[1:]) if len(calls) == 1 else found

        monkeypatch.setattr(ports, "choose", choose)
        small.up()
    assert len(calls) == 2 and small.status().state == "up"


def test_deep_folders_and_two_clusters_at_once(tmp_path: Path, local_cluster: LocalCluster) -> None:
    deep = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 6)
    assert len(str(deep)) > 150
    cluster = LocalCluster(deep, nodes=1, auth="none")
    try:
        cluster.up()
        assert _output(["srun", "echo", "works"], cluster) == "works"
        assert local_cluster.status().state == "up"
        assert not set(cluster.spec.ports) & set(local_cluster.spec.ports)
    finally:
        cluster.down()
    _assert_nothing_left(cluster)
    assert local_cluster.status().state == "up", "down ended only its own"


def test_the_lines_of_the_caller_reach_slurm(tmp_path: Path) -> None:
    plugstack = f"optional {tmp_path}/absent.so agent=/x"
    options = {"plugstack_lines": [plugstack], "config_lines": ["MaxJobCount=77"]}
    cluster = LocalCluster(tmp_path / "s", nodes=1, auth="none", **options)
    try:
        cluster.up()
        assert "MaxJobCount             = 77" in _output(["scontrol", "show", "config"], cluster)
        assert (cluster.layout.etc_dir / "plugstack.conf").read_text() == plugstack + "\n"
    finally:
        cluster.down()


def test_what_slurm_does_not_accept_is_told_in_one_line(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "s", nodes=1, auth="none", config_lines=["NoSuchOption=1"])
    with pytest.raises(UserError, match=r"slurmctld ended at once: .*(NoSuchOption|slurm.conf)"):
        cluster.up()
    _assert_nothing_left(cluster)


def test_power_off_kills_what_hides_and_power_on_brings_the_node_back(cluster: LocalCluster, tmp_path: Path) -> None:
    client = cluster.client()
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "export PATH=$PATH:/usr/bin:/bin\n"
        "srun --overlap bash -c 'touch $UNICRON_MEMORY_DIR/state; "
        f"echo $UNICRON_MEMORY_DIR > {tmp_path}/memory; "
        f"setsid sleep 301 & echo $! > {tmp_path}/hidden; exec sleep 302' &\n"
        f"setsid sleep 303 & echo $! > {tmp_path}/batch\n"
        "wait\n"
    )
    options = ["-N1", "-w", "n2", "--exclusive", "--requeue", f"--output={tmp_path}/out"]
    job = _output(["sbatch", "--parsable", *options, str(script)], cluster)
    pids = [int(wait_for(lambda name=name: line_in(tmp_path / name), name)) for name in ("hidden", "batch")]
    memory = Path((tmp_path / "memory").read_text().strip())
    assert memory.name == "n2" and (memory / "state").exists()
    others = [p for p in cluster.processes() if p.kind == "slurmd" and p.node != "n2"]
    began = time.monotonic()
    victims = cluster.power_off("n2")
    took = time.monotonic() - began
    assert set(pids) <= {victim.pid for victim in victims} and all(victim.node == "n2" for victim in victims)
    assert {"slurmd", "stepd", "task"} == {victim.kind for victim in victims}
    left = {process.kind for process in cluster.processes() if process.node == "n2"}
    assert left == {"tombstone"}, "its ports are silent, as those of a machine without power"
    port = next(node.port for node in client.nodes() if node.name == "n2")
    wait_for(lambda: reach(f"127.0.0.1:{port}", 0.3) is Reach.SILENT, "slurmd's port is silent")
    assert [p for p in cluster.processes() if p.kind == "slurmd"] == others
    assert took < 2.0
    assert not list(memory.iterdir()), "memory forgets"
    client.down("n2", "unicron[node_problem]: no heartbeat")
    cluster.power_on("n2")
    cluster.power_on("n2")
    node = next(node for node in client.nodes() if node.name == "n2")
    assert "DOWN" in node.states and node.reason.startswith("unicron["), "a node that was set down stays down"
    client.resume("n2")
    client.start_now(job, 0)
    again = ("RUNNING", "n2", 1)
    wait_for(
        lambda: any(e.job == job and (e.state, e.node, e.restarts) == again for e in client.elements()),
        f"element {again}",
        now=client.elements,
    )


def test_a_port_that_others_take_for_a_moment_keeps_no_node_off(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = next(node.port for node in cluster.client().nodes() if node.name == "n3")
    cluster.power_off("n3")
    taken, launch, starts = socket.socket(), cluster._launch, []
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def disturbed(name: str, *more: Any) -> int:
        starts.append(name)
        if len(starts) == 1:
            taken.bind(("", port))
            taken.listen(1)
        else:
            taken.close()
        return launch(name, *more)

    monkeypatch.setattr(cluster, "_launch", disturbed)
    cluster.power_on("n3")
    assert starts == ["slurmd-n3"] * 2


def test_a_node_that_rebooted_unnoticed_loses_its_job_to_the_queue(
    cluster: LocalCluster, submit: Callable[..., str], wait_until: Callable[..., object]
) -> None:
    client = cluster.client()
    job = submit("-w", "n4")
    wait_until(client, job, 0, "RUNNING")
    cluster.power_off("n4")
    cluster.power_on("n4")
    assert wait_until(client, job, 0, "PENDING").restarts == 1


def test_another_user_than_root_can_have_one() -> None:
    """All other tests run as whoever started them: root in a container. This one runs as daemon there, for from 26.05
    on Slurm's daemons refuse to be nobody's."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-user-", dir="/tmp"))
    user = pwd.getpwnam("daemon") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
    try:
        os.chown(folder, user.pw_uid, user.pw_gid)
        report = folder / "report"
        # Forked, not started anew: the interpreter and this folder may be readable for root only.
        child = os.fork()
        if child == 0:
            _child_as(user, folder, report)
        _, status = os.waitpid(child, 0)
        seen = json.loads(report.read_text())
        assert os.waitstatus_to_exitcode(status) == 0, seen
        assert seen == {"uid": user.pw_uid, "state": "up", "owners": [user.pw_uid], "srun": user.pw_name, "left": 0}
    finally:
        LocalCluster(folder / "state").down()
        shutil.rmtree(folder)


def _child_as(user: pwd.struct_passwd, folder: Path, report: Path) -> None:
    seen: dict[str, object] = {}
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
        seen["uid"] = os.getuid()
        os.chdir("/")
        cluster = LocalCluster(folder / "state", nodes=2)
        cluster.up()
        seen["state"] = cluster.status().state
        seen["owners"] = sorted({Path(f"/proc/{process.pid}").stat().st_uid for process in cluster.processes()})
        env = {"PATH": binaries.SEARCH_PATH} | cluster.env()
        done = subprocess.run(["srun", "id", "-un"], env=env, capture_output=True, text=True, timeout=30)
        seen["srun"] = done.stdout.strip() or done.stderr
        cluster.down()
        seen["left"] = len(cluster.processes()) + cluster.layout.short_dir.exists()
    except BaseException as error:
        seen["error"] = repr(error)
    finally:
        report.write_text(json.dumps(seen))
        os._exit(1 if "error" in seen else 0)


def _unicronctl(state_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return unicronctl("cluster", *words, UNICRON_CLUSTER_DIR=str(state_dir))


def test_the_command_brings_a_cluster_up_shows_it_and_takes_it_down(small: LocalCluster) -> None:
    folder = small.layout.state_dir
    up = _unicronctl(folder, "up", "--nodes", "2", "--gpus-per-node", "3", "--auth", "none")
    assert (up.returncode, up.stderr) == (0, "")
    assert up.stdout == f"2 nodes are up; reach them with: export SLURM_CONF={folder}/etc/slurm.conf\n"
    assert _unicronctl(folder, "up", "--nodes", "2", "--gpus-per-node", "3", "--auth", "none").returncode == 0
    other = _unicronctl(folder, "up", "--nodes", "4")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr.startswith("unicronctl: a different cluster (2 nodes) is up in ")
    assert other.stderr.count("\n") == 1

    assert _unicronctl(folder, "power-off", "n2").stdout.startswith("n2 is off: 1 process")
    seen = json.loads(_unicronctl(folder, "status", "--json").stdout)
    assert (seen["state"], [node["gpus"] for node in seen["nodes"]]) == ("partial", [3, 3])
    assert seen["nodes"][1]["slurmd"] is None and seen["nodes"][0]["slurmd"] is not None
    assert _unicronctl(folder, "power-on", "n2").returncode == 0
    wrong = _unicronctl(folder, "power-off", "n3")
    assert (wrong.returncode, wrong.stderr) == (2, "unicronctl: no node 'n3'; this cluster has n1 to n2\n")
    table = _unicronctl(folder, "status").stdout.splitlines()
    assert table[0].startswith("cluster  up ") and len(table) == 4 and table[3].startswith("n2 ")

    down = _unicronctl(folder, "down")
    assert (down.returncode, down.stdout) == (0, "the cluster is down\n")
    _assert_nothing_left(LocalCluster.load(folder))
    assert json.loads(_unicronctl(folder, "status", "--json").stdout)["state"] == "down"
    off = _unicronctl(folder, "power-on", "n2")
    assert off.returncode == 1 and "is down; start it with: unicronctl cluster up" in off.stderr


def test_unicron_on_a_cluster_comes_and_goes_with_it(small: LocalCluster) -> None:
    """A new cluster's knows nothing of the jobs of the last one. Slurm's numbers begin anew: whoever remembers job 1 as
    trained to the end ends the next job 1 untrained."""
    folder = small.layout.state_dir
    known = folder / "unicron" / "controller" / "events.sqlite"
    assert _unicronctl(folder, "up", "--nodes", "2", "--auth", "none").returncode == 0
    refused = _unicronctl(folder, "up", "--nodes", "2", "--auth", "none", "--unicron")
    assert refused.returncode == 2 and "a different cluster (2 nodes) is up" in refused.stderr
    assert protection.address(small.layout) == "", "the unicrond that was started for it has ended"
    assert _unicronctl(folder, "down").returncode == 0

    up = _unicronctl(folder, "up", "--nodes", "2", "--auth", "none", "--unicron")
    assert up.returncode == 0 and 'Unicron is on them: eval "$(unicronctl cluster env)"' in up.stdout, up.stderr
    address = protection.address(small.layout)
    assert is_alive(ask_controller({"kind": "ping"}, address, timeout=30.0))
    before = known.stat().st_ino
    assert _unicronctl(folder, "up", "--nodes", "2", "--auth", "none", "--unicron").returncode == 0, "once more"
    assert known.stat().st_ino == before
    shown = _unicronctl(folder, "env").stdout.splitlines()
    assert f"export UNICRON_CONTROLLER={address}" in shown
    assert f"export SLURM_CONF={folder}/etc/slurm.conf" in shown
    assert address in (folder / "etc" / "plugstack.conf").read_text()

    (unicrond,) = protection.running(small.layout)
    os.kill(unicrond, signal.SIGKILL)
    wait_for(lambda: not protection.running(small.layout), "it is gone, and its address file is not")
    refused = _unicronctl(folder, "up", "--nodes", "3", "--auth", "none", "--unicron")
    assert refused.returncode == 2 and not protection.running(small.layout), "none is left that nobody asked for"
    assert _unicronctl(folder, "up", "--nodes", "2", "--auth", "none", "--unicron").returncode == 0
    assert protection.running(small.layout)

    port = int(protection.address(small.layout).rpartition(":")[2])
    assert _unicronctl(folder, "down").returncode == 0
    _assert_nothing_left(LocalCluster.load(folder))
    assert protection.address(small.layout) == ""

    (known.parent / "last").touch()
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a connection of somebody else's may have the port by now: as good
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        done = _unicronctl(folder, "up", "--nodes", "2", "--auth", "none", "--unicron")
        assert done.returncode == 0, done.stderr
    assert known.is_file() and not (known.parent / "last").exists()
    assert _unicronctl(folder, "down").returncode == 0
