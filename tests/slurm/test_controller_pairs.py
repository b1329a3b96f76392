"""The controller has a node tested in pairs on a real Slurm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import outside_slurm, wait_for
from unicron_ctl.controller.model.requests import TestPairs
from unicron_ctl.controller.server.worker import Worker
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.slurm.pairs import Findings

pytestmark = pytest.mark.slurm


def test_the_worker_finds_a_bad_node_with_idle_partners(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (outside_slurm() | cluster.env() | {"UNICRON_PAIR_FAULT": "n2:corrupt"}).items():
        monkeypatch.setenv(name, value)
    told: list[Any] = []
    worker = Worker(cluster.client(), 1.0)
    try:
        core: Any = SimpleNamespace(on_pair_test=lambda request, found: told.append((request, found)))
        request = TestPairs("n2", ("n1", "n3", "n4"), "", {"main gloo": 1e9})
        worker.submit(request, core)

        def answered() -> bool:
            for result in worker.results.take_all():
                result()
            return bool(told)

        wait_for(answered, "the findings", 150.0)
        ((asked, found),) = told
        assert asked == request and isinstance(found, Findings), found
        assert list(found.judgement.bad) == ["n2"] and "n1" in found.judgement.good, found
    finally:
        worker.close()
