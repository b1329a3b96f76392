"""The network that the collectives use, as a job names it to NCCL or gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.unicron_ctl.agent.snapshots.test_copies import HERE
from unicron_ctl.agent.connections import interfaces
from unicron_ctl.agent.connections.interfaces import collectives_address
from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.snapshots.peer_copies import Copies
from unicron_ctl.shared.protocol import structs

ADDRESSES = {"lo": "127.0.0.1", "eth0": "198.18.0.5", "eth01": "198.18.0.6", "ib0": "", "ib1": "198.18.4.7"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with several interfaces; one has no IPv4 address."""
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: list(enumerate(ADDRESSES)))
    monkeypatch.setattr(interfaces, "_address", ADDRESSES.__getitem__)


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ({}, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "198.18.0.5"),
        ({"NCCL_SOCKET_IFNAME": "=eth01"}, "198.18.0.6"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "198.18.4.7"),
        ({"NCCL_SOCKET_IFNAME": "ib0,eth0"}, "198.18.0.5"),
        ({"NCCL_SOCKET_IFNAME": "^lo", "GLOO_SOCKET_IFNAME": "ib1"}, "198.18.4.7"),
        ({"GLOO_SOCKET_IFNAME": "none"}, ""),
    ],
)
def test_the_interface_that_the_job_names_has_the_address(node, told: dict[str, str], address: str) -> None:
    assert collectives_address(told) == address


def test_copies_go_over_it_and_not_over_the_networks_of_the_nodes_name(tmp_path: Path) -> None:
    environment = HERE | {"UNICRON_NODE_ADDRESS": "192.0.2.1", "GLOO_SOCKET_IFNAME": "lo"}
    place = read_place(environment).in_mode(structs.SESSION, "")
    copies = Copies(lambda: tmp_path, place, environment, lambda order: None, print)
    try:
        assert place.address == "192.0.2.1" and copies.address.startswith("127.0.0.1:")
    finally:
        copies.close()
