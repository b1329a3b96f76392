"""A cluster with links: hosts in network namespaces, real packets that are dropped, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.links import NEEDS_ROOT
from tests.support.nodes import all_idle
from tests.support.processes import LIMIT, ROOT, unicronctl, wait_for
from unicron_ctl.lab.cluster import LocalCluster, network

pytestmark = [pytest.mark.slurm, NEEDS_ROOT]
SLURMD = 6818
PYTHON = sys.executable

# One connection: for each line of its input it says something and prints what comes of it within a second.
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30.0) as channel:
    channel.settimeout(1.0)
    for line in sys.stdin:
        try:
            channel.sendall(b"?")
            print("answer" if channel.recv(1) else "closed", flush=True)
        except TimeoutError:
            print("silence", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)
"""
ECHO = """
import socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    channel, _ = server.accept()
    while data := channel.recv(1):
        channel.sendall(data)
"""
COUNT = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbox:
    inbox.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE: the machine may be busy with something else
    inbox.bind(("0.0.0.0", int(sys.argv[1])))
    print("ready", flush=True)
    inbox.settimeout(5.0)
    count = 0
    try:
        while inbox.recv(16):
            count += 1
    except TimeoutError:
        print(count, flush=True)
"""
SEND = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outbox:
    for number in range(2000):
        outbox.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
        if number % 50 == 0:
            time.sleep(0.002)
"""
# Ends itself with SIGKILL before the n-th call of a network tool or start of a daemon.
CRASHING_UP = """
import os, signal, sys
from unicron_ctl.lab.cluster import LocalCluster, network
left = [int(sys.argv[2])]
def deadly(function):
    def call(*arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
network._call = deadly(network._call)
LocalCluster._launch = deadly(LocalCluster._launch)
LocalCluster(sys.argv[1], nodes=2, links=True).up()
"""


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes and a head with links of their own."""
    cluster = LocalCluster(tmp_path_factory.mktemp("links") / "state", nodes=3, links=True)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(linked: LocalCluster) -> Iterator[LocalCluster]:
    """The same, whole before and after each test."""
    yield linked
    linked.links.heal()
    for node in linked.spec.node_names:
        linked.power_on(node)
        linked.client().resume(node)
    wait_for(lambda: all_idle(linked.client()), "all nodes are idle", now=linked.client().nodes)


def run(cluster: LocalCluster, host: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | cluster.env()
    return subprocess.run(
        [*cluster.command_prefix(host), *words], env=env, capture_output=True, text=True, timeout=LIMIT
    )


@contextlib.contextmanager
def start(cluster: LocalCluster, host: str, program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [*cluster.command_prefix(host), PYTHON, "-c", program, *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=os.environ | cluster.env(), stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def says(client: subprocess.Popen[str], word: str) -> None:
    """Let TALK talk until that comes of it."""

    def talk() -> str:
        print(file=client.stdin, flush=True)
        return line(client)

    wait_for(lambda: talk() == word, f"{word} on the connection")


def assert_reaches(cluster: LocalCluster, source: str, host: str) -> None:
    wait_for(lambda: reach(cluster, source, host), f"{source} reaches {host}")


def reach(cluster: LocalCluster, source: str, host: str) -> bool:
    """A new connection from one host to another's slurmd or slurmctld is accepted within a second."""
    port = cluster.spec.ports[0] if host == "head" else SLURMD
    program = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.0)"
    return run(cluster, source, PYTHON, "-c", program, host, str(port)).returncode == 0


def test_hosts_have_their_own_names_addresses_and_interfaces(cluster: LocalCluster) -> None:
    seen = run(cluster, "n2", "sh", "-c", "hostname; ls /sys/class/net; test -d /sys/fs/cgroup && getent hosts n3")
    name, *interfaces, other = seen.stdout.split("\n")[:-1]
    assert name == "n2" and sorted(interfaces) == ["eth0", "lo"]
    assert other.split() == [cluster.address("n3"), "n3"]
    assert socket.gethostname() != "n2" and "eth0@" not in Path("/etc/hosts").read_text()
    mine = run(cluster, "n2", PYTHON, "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))")
    assert mine.stdout.strip() == cluster.address("n2")
    sockets = {node: os.readlink(f"/proc/{pid}/ns/net") for node, pid in _slurmds(cluster).items()}
    assert len(set(sockets.values()) | {os.readlink("/proc/self/ns/net")}) == 4


def test_ordinary_clients_reach_the_head_from_outside(cluster: LocalCluster) -> None:
    done = subprocess.run(
        ["srun", "-N3", "hostname"], env=os.environ | cluster.env(), capture_output=True, text=True, timeout=LIMIT
    )
    assert sorted(done.stdout.split()) == ["n1", "n2", "n3"], done.stderr
    assert run(cluster, "n1", "srun", "-w", "n3", "hostname").stdout == "n3\n"


def test_a_cut_is_silence_for_old_connections_and_new_ones_until_it_is_healed(cluster: LocalCluster) -> None:
    with start(cluster, "n2", ECHO, "9001") as server:
        assert line(server) == "ready"
        with start(cluster, "n1", TALK, "n2", "9001") as client:
            says(client, "answer")
            cluster.links.cut(["n2"])
            says(client, "silence")
            says(client, "silence")
            assert not reach(cluster, "n1", "n2") and not reach(cluster, "n2", "head")
            assert_reaches(cluster, "n1", "n3")
            carrier = run(cluster, "n2", "cat", "/sys/class/net/eth0/carrier")
            assert carrier.stdout == "1\n", "the link looks as if nothing were wrong"
            cluster.links.heal(["n2"])
            says(client, "answer")
    assert_reaches(cluster, "n1", "n2")
    assert_reaches(cluster, "n2", "head")


def test_the_head_cut_off_leaves_the_nodes_to_each_other(cluster: LocalCluster) -> None:
    cluster.links.cut(["head"])
    assert not reach(cluster, "n1", "head")
    assert_reaches(cluster, "n1", "n2")
    outside = subprocess.run(["sinfo"], env=os.environ | cluster.env() | {"SLURM_CONF": str(_impatient(cluster))})
    assert outside.returncode != 0, "nor does anybody outside reach it"
    assert run(cluster, "head", "sinfo", "-h", "-o", "%D").stdout == "3\n", "on the head itself slurmctld answers"
    cluster.links.heal()
    assert_reaches(cluster, "n1", "head")


def test_two_nodes_cut_apart_reach_all_others(cluster: LocalCluster) -> None:
    cluster.links.cut(["n1"], ["n2", "n3"])
    assert [reach(cluster, "n1", host) for host in ("n2", "n3")] == [False, False]
    assert not reach(cluster, "n2", "n1")
    assert_reaches(cluster, "n1", "head")
    assert_reaches(cluster, "n2", "n3")
    cluster.links.heal(["n2"], ["n1"])
    assert_reaches(cluster, "n2", "n1")
    assert not reach(cluster, "n3", "n1")
    cluster.links.heal(["n3"])
    assert_reaches(cluster, "n3", "n1")


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.wide), 0.3])
def test_a_share_of_packets_is_lost(cluster: LocalCluster, share: float) -> None:
    cluster.links.loss(["n2"], share)
    with start(cluster, "n2", COUNT, "9002") as counter:
        assert line(counter) == "ready"
        assert run(cluster, "n1", PYTHON, "-c", SEND, "n2", "9002").returncode == 0
        arrived = int(line(counter))
    # Of 2000: the standard deviation of 30 % is 20.
    assert arrived == 2000 if share == 0 else abs(arrived - 1400) < 120


def test_a_node_without_power_closes_no_connection_and_comes_back_as_after_a_reboot(cluster: LocalCluster) -> None:
    server = subprocess.Popen(
        [*cluster.command_prefix("n2"), PYTHON, "-c", ECHO, "9003"], stdout=subprocess.PIPE, text=True
    )
    assert line(server) == "ready"
    with start(cluster, "n1", TALK, "n2", "9003") as client:
        says(client, "answer")
        victims = cluster.power_off("n2")
        assert server.wait(LIMIT) == -signal.SIGKILL, "whatever ran there is gone, started by Slurm or not"
        assert {"slurmd", "task"} <= {victim.kind for victim in victims}
        says(client, "silence")
        says(client, "silence")
        cluster.links.heal()
        assert not reach(cluster, "n1", "n2"), "mended links do not give it power"
        cluster.power_on("n2")
        assert_reaches(cluster, "n1", "n2")

        def ended() -> bool:
            print(file=client.stdin, flush=True)
            return line(client) in ("closed", "ConnectionResetError", "BrokenPipeError")

        wait_for(ended, "the node knows nothing of the connection any more")
    assert cluster.links.faults().off == []


def test_two_clusters_with_links_live_side_by_side(cluster: LocalCluster, tmp_path: Path) -> None:
    other = LocalCluster(tmp_path / "other", nodes=1, links=True)
    try:
        other.up()
        assert other.spec.network != cluster.spec.network
        assert run(other, "n1", "srun", "hostname").stdout == "n1\n"
        cut = run(other, "n1", PYTHON, "-c", "import socket, sys; socket.create_connection((sys.argv[1], 6818), 1)")
        assert cut.returncode != 0
        other.links.cut(["n1"])
        assert_reaches(cluster, "n2", "n1")
    finally:
        other.down()
    _assert_nothing_left(other)
    assert cluster.status().state == "up", "down ended only its own"
    assert_reaches(cluster, "n1", "head")


@pytest.mark.parametrize("calls", [2, *(pytest.param(calls, marks=pytest.mark.wide) for calls in (3, 5, 7, 9, 11))])
def test_a_crash_half_way_up_is_cleared_by_down_and_mended_by_up(tmp_path: Path, calls: int) -> None:
    cluster = LocalCluster(tmp_path / "state", nodes=2, links=True)
    try:
        for mend in (cluster.down, cluster.up):
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            crashed = subprocess.run(
                [PYTHON, "-c", CRASHING_UP, str(tmp_path / "state"), str(calls)], env=env, timeout=LIMIT
            )
            assert crashed.returncode == -signal.SIGKILL
            mend()
        assert cluster.status().state == "up"
        assert_reaches(cluster, "n1", "n2")
    finally:
        cluster.down()
    _assert_nothing_left(cluster)


def test_what_a_folder_that_is_gone_has_left_is_removed_by_the_next_cluster(tmp_path: Path) -> None:
    lost = LocalCluster(tmp_path / "lost", nodes=1, links=True)
    lost.up()
    lost.layout.state_dir.rename(tmp_path / "elsewhere")
    other = LocalCluster(tmp_path / "other", nodes=1, links=True)
    try:
        other.up()
        _assert_nothing_left(lost)
    finally:
        lost.down()
        other.down()


def test_the_command_cuts_heals_loses_and_runs(cluster: LocalCluster) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return unicronctl("cluster", *words, UNICRON_CLUSTER_DIR=str(cluster.layout.state_dir))

    assert call("cut", "n1,n2", "n3").stdout == "n1,n2 and n3 are cut apart\n"
    assert call("cut", "n2").stdout == "n2 cut off\n"
    assert call("loss", "n1", "10%").stdout == "n1 loses 10% of all packets\n"
    status = json.loads(call("status", "--json").stdout)["links"]
    assert (status["cut"], status["apart"], status["loss"]) == (["n2"], [["n1", "n3"], ["n2", "n3"]], {"n1": 0.1})
    table = call("status").stdout
    assert "n2 cut off, n1 and n3 cut apart, n2 and n3 cut apart, n1 loses 10%" in table
    assert call("heal").stdout == "healed\n"
    assert "all links are whole" in call("status").stdout
    ran = call("run", "n3", "--", "sh", "-c", "hostname; echo $SLURM_CONF; exit 7")
    assert (ran.returncode, ran.stdout) == (7, f"n3\n{cluster.layout.slurm_conf}\n")
    for words, told in (
        (("cut", "n9"), "no node 'n9'; this cluster has n1 to n3 and head"),
        (("cut", "n1", "n1"), "n1 cannot be cut from itself; name different hosts"),
        (("loss", "n1", "300%"), "a share of packets must be 0% to 100%, not '300%'"),
        (("cut",), "name a node, or head"),
    ):
        wrong = call(*words)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1) and told in wrong.stderr


def _impatient(cluster: LocalCluster) -> Path:
    """The cluster's slurm.conf for clients that wait for a second only."""
    path = cluster.layout.etc_dir / "impatient.conf"
    path.write_text(cluster.layout.slurm_conf.read_text().replace("MessageTimeout=10", "MessageTimeout=1"))
    return path


def _slurmds(cluster: LocalCluster) -> dict[str, int]:
    return {p.node: p.pid for p in cluster.processes() if p.kind == "slurmd" and p.node}


def _assert_nothing_left(cluster: LocalCluster) -> None:
    digest = cluster.layout.digest
    assert cluster.processes() == [] and not cluster.layout.network.present()
    assert not [name for name in os.listdir(network.MOUNTS) if digest in name]
    assert not [name for name in os.listdir("/sys/class/net") if digest in name]
    assert not [name for name in os.listdir(network.REGISTRY) if digest in name]
    assert digest not in Path("/proc/self/mounts").read_text()
    assert not cluster.layout.short_dir.exists()
