"""The files, ports and process marks of a local cluster, without a Slurm."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import stat
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.lab.cluster import LocalCluster, binaries, configuration, ports
from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec, default_state_dir
from unicron_ctl.shared.system.errors import UserError

SPEC = Spec(nodes=3, gpus_per_node=2, auth="munge", ports=(20001, 20002, 20003, 20004))


def _conf(layout: Layout, spec: Spec, version: tuple[int, int] = (22, 5)) -> list[str]:
    return configuration.slurm_conf(layout, spec, "ann", "head", version).splitlines()


def test_slurm_conf_names_nodes_ports_and_what_recovery_relies_on(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    lines = _conf(layout, SPEC)
    assert "SlurmctldPort=20001" in lines
    assert "NodeName=n3 NodeHostname=head NodeAddr=127.0.0.1 Port=20004" in lines
    assert "PartitionName=main Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE" in lines
    assert f"AuthInfo=socket={layout.munge_socket},cred_expire=5" in lines
    assert {"ReturnToService=1", "JobRequeue=1", "KillWait=2", "SlurmdTimeout=10", "GresTypes=gpu"} <= set(lines)
    assert any(line.startswith("NodeName=DEFAULT") and line.endswith("Gres=gpu:2") for line in lines)
    assert configuration.gres_conf(layout, SPEC).splitlines() == [
        f"Name=gpu File={tmp_path}/dev/gpu0",
        f"Name=gpu File={tmp_path}/dev/gpu1",
    ]


def test_slurm_conf_without_gpus_and_munge_and_for_a_later_release(tmp_path: Path) -> None:
    spec = Spec(nodes=1, gpus_per_node=0, auth="none", config_lines=("Prolog=/p",), ports=(1, 2))
    lines = _conf(Layout(tmp_path), spec, (24, 11))
    assert "AuthInfo=cred_expire=5" in lines and "Prolog=/p" in lines
    assert not any("Gres" in line or "SwitchType" in line for line in lines)


@pytest.mark.parametrize("line", ["AuthInfo=cred_expire=120", " authinfo = ttl=60,cred_expire=120 "])
def test_a_line_of_authinfo_keeps_the_clusters_own_munge(tmp_path: Path, line: str) -> None:
    layout = Layout(tmp_path)
    lines = _conf(layout, _with(line))
    assert f"{line.strip()},socket={layout.munge_socket}" in lines
    own = "AuthInfo=socket=/mine,cred_expire=120"
    assert own in _conf(layout, _with(own))


def _with(line: str) -> Spec:
    return dataclasses.replace(SPEC, config_lines=(line,))


def test_with_links_each_host_has_its_name_and_address(tmp_path: Path) -> None:
    spec = Spec(nodes=256, gpus_per_node=1, auth="munge", ports=(1, *[2] * 256), links=True, network="198.18.4.0/23")
    lines = _conf(Layout(tmp_path), spec)
    assert "SlurmctldHost=head(198.18.4.1)" in lines
    assert {"NodeName=n1 NodeAddr=198.18.4.11 Port=2", "NodeName=n256 NodeAddr=198.18.5.10 Port=2"} <= set(lines)


def test_each_cluster_has_a_name_of_its_own(tmp_path: Path) -> None:
    lines = [line for folder in "ab" for line in _conf(Layout(tmp_path / folder), SPEC)]
    assert len({line for line in lines if line.startswith("ClusterName=")}) == 2


def test_socket_paths_are_short_however_deep_the_state_folder_is(tmp_path: Path) -> None:
    layout = Layout(tmp_path.joinpath(*["x" * 40] * 8))
    assert len(f"{layout.spool_dir}/n256/n256_4294967295.4294967291") < 80
    assert len(str(layout.munge_socket)) < 80
    assert layout.short_dir != Layout(tmp_path).short_dir


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 0}, "1 to 256 nodes"),
        ({"nodes": 257}, "1 to 256 nodes"),
        ({"gpus_per_node": -1}, "0 to 64 GPUs"),
        ({"auth": "kerberos"}, "munge or none"),
    ],
)
def test_impossible_clusters_are_wrong_use(tmp_path: Path, options: dict, text: str) -> None:
    with pytest.raises(UserError, match=text) as raised:
        LocalCluster(tmp_path, **options)
    assert raised.value.exit_code == 2


def test_links_need_root_and_a_cluster_that_was_started_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(UserError, match="--links") as raised:
        LocalCluster(tmp_path, links=True).up()
    assert raised.value.exit_code == 1
    for use in (lambda cluster: cluster.links, lambda cluster: cluster.command_prefix("n1")):
        with pytest.raises(UserError, match="unicronctl cluster up --links") as raised:
            use(LocalCluster(tmp_path))
        assert raised.value.exit_code == 2


def test_a_path_that_slurm_conf_cannot_hold_is_wrong_use() -> None:
    with pytest.raises(UserError, match="'/tmp/two words'") as raised:
        LocalCluster("/tmp/two words")
    assert raised.value.exit_code == 2


def test_the_spec_survives_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert layout.load() is None
    layout.save(SPEC)
    assert layout.load() == SPEC
    assert LocalCluster.load(tmp_path).spec == SPEC
    for damage in ("{", "[]", json.dumps({"nodes": 1})):
        layout.state_file.write_text(damage)
        with pytest.raises(UserError, match="damaged"):
            layout.load()


def test_no_cluster_yet_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(str(tmp_path)) + ".*unicronctl cluster up"):
        LocalCluster.load(tmp_path)


def test_somebody_elses_folder_for_sockets_is_not_used(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.short_dir.symlink_to(tmp_path)
    try:
        with pytest.raises(UserError, match=re.escape(str(layout.short_dir))):
            layout.make_short_dir()
    finally:
        layout.short_dir.unlink()


def test_the_folder_for_sockets_is_open_to_readers_whatever_the_umask(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    before = os.umask(0o077)
    try:
        layout.make_short_dir()
        layout.make_short_dir()
        assert stat.S_IMODE(layout.short_dir.stat().st_mode) == 0o755
    finally:
        os.umask(before)
        layout.short_dir.rmdir()


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_CLUSTER_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    assert default_state_dir() == Path("/home/ann/.local/state/unicron/cluster")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert default_state_dir() == Path("/s/unicron/cluster")
    monkeypatch.setenv("UNICRON_CLUSTER_DIR", "/c")
    assert default_state_dir() == Path("/c")


def test_missing_programs_are_named_with_the_apt_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(binaries, "SEARCH_PATH", str(tmp_path))
    with pytest.raises(UserError) as missing:
        binaries.locate(["slurmctld", "squeue", "munged"])
    assert str(missing.value) == snapshot


def test_ports_in_use_are_passed_over() -> None:
    first = ports.choose(3, "seed")
    with socket.create_server(("127.0.0.1", first[1])):
        assert not ports.is_free(first[1])
        again = ports.choose(3, "seed")
    assert first[1] not in again and again[0] == first[0] and len(set(again)) == 3
    assert ports.choose(3, "seed") == first
