"""Clusters whose hosts have addresses of IPv6 only, or of both families: agents are protected, and heal, in each."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.links import NEEDS_ROOT, LinksCluster
from unicron_ctl.lab.cluster.network import BOTH, IPV6

pytestmark = [pytest.mark.slurm, NEEDS_ROOT]
PATIENT = 300.0  # seconds: torch is imported on each node, by processes that share a busy machine
# What comes for the head by IPv6 is lost, as where a firewall or a route of one family is wrong.
DEAD_IPV6 = """add table bridge six
table bridge six { chain forward { type filter hook forward priority 1;
  iifname head meta protocol ip6 drop; oifname head meta protocol ip6 drop; }; }
"""


def heals(links: LinksCluster) -> None:
    """Two nodes train, one of them loses its rank, and commands are answered: all as with IPv4."""
    job = links.submit(2, GLOO_SOCKET_IFNAME="eth0")
    job.whole(2, PATIENT)
    before = job.status()["generation"]
    os.kill(links.controller.rank(1, job.id)["pid"], signal.SIGKILL)
    job.next_step(time.time(), PATIENT)
    job.whole(2, PATIENT)
    assert job.status()["generation"] > before
    assert "running" in links.unicronctl("jobs")


@pytest.mark.wide
def test_a_cluster_of_ipv6_only(tmp_path: Path) -> None:
    with LinksCluster(tmp_path, nodes=2, family=IPV6) as links:
        assert links.cluster.address("n1").startswith("fd75:")
        heals(links)
        (job,) = links.controller.ask("jobs")
        before = job["generation"]
        links.cut("n2")
        links.controller.wait(
            lambda: links.controller.job(job["job"])["generation"] > before, "the others go on", PATIENT
        )
        links.controller.wait(
            lambda: len(links.controller.job(job["job"])["members"]) == 1, "without the silent node", PATIENT
        )


@pytest.mark.wide
def test_a_head_whose_first_address_is_dead(tmp_path: Path) -> None:
    """Its name leads to an address of IPv6 before that of IPv4."""
    with LinksCluster(tmp_path, nodes=2, family=BOTH) as links:
        links.cluster.layout.network.rules(DEAD_IPV6)
        assert "fd75:" in links.run("n1", "getent", "ahosts", "head").splitlines()[0]
        heals(links)
        links.controller.kill()
        links.controller.start()
        (job,) = links.controller.ask("jobs")
        links.controller.wait(
            lambda: links.controller.job(job["job"])["state"] == "running", "agents come back", PATIENT
        )
