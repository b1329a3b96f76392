"""A controller that listens at the addresses of both families, and agents that come by either."""

from __future__ import annotations

import os
import socket

import pytest

from tests.support.controller import Controller
from tests.support.jobs import SLEEPS, Job, scripted
from tests.support.munged import controller_in, own_realm
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.addresses import join, split

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start munged for others"),
    pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6"),
]


class Everywhere(Controller):
    """Defect: `listen = "tcp://[::]:7451"` passed `--check` and could not be bound."""

    @property
    def options(self) -> list[str]:
        *others, _ = super().options
        return [*others, "tcp://[::]:0"]


@pytest.fixture
def munged(monkeypatch):
    with own_realm(monkeypatch) as started:
        yield started


@pytest.fixture
def controller(munged, tmp_path):
    with controller_in(munged, tmp_path, Everywhere) as started:
        yield started


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_agents_of_both_families_are_protected(controller, munged, tmp_path, host):
    """What is said of where they are has the form in which Slurm and others say it, too."""
    address = f"tcp://{join(host, split(controller.address.removeprefix('tcp://'))[1])}"
    settings = {"UNICRON_MODE": "session", "UNICRON_NODE_ADDRESS": host, **munged.environment}
    job = Job(tmp_path, address, "21", 1, scripted(tmp_path, SLEEPS), **settings)
    try:
        controller.wait(lambda: controller.rank(0, "21").get("pid"), "the agent is taken in")
        (event,) = controller.events("agent_registered", job="21")
        assert split(event["door"])[0] == host == event["address"]
        assert split(event["peer"])[0] == host
        assert ask_controller({"kind": "status"}, address, timeout=30.0)
    finally:
        job.close()
