"""What fails together, as a real slurmctld tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm
TREE = ["SwitchName=leaf1 Nodes=n[1-2]", "SwitchName=leaf2 Nodes=n3", "SwitchName=top Switches=leaf[1-2]"]


def test_nodes_are_told_apart_by_their_leaf_switches(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "s", nodes=3, gpus_per_node=0, auth="none", topology_lines=TREE)
    try:
        cluster.up()
        assert cluster.client().domains() == {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2"}
    finally:
        cluster.down()


def test_without_a_topology_there_is_nothing_to_tell(cluster: LocalCluster) -> None:
    client = cluster.client()
    assert client.nodes() and client.domains() == {}
