"""`unicronctl pair-test` on a real Slurm, with a real controller that hears of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.controller import Controller, quick_on_slurm
from tests.support.processes import UNICRONCTL, call, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.tools import pair_test

pytestmark = pytest.mark.slurm
PairTest = Callable[..., dict[str, Any]]


@pytest.fixture
def observer(cluster: LocalCluster, tmp_path: Path) -> Iterator[Controller]:
    """A controller that changes nothing in Slurm."""
    started = Controller(tmp_path, quick_on_slurm("observe"), outside_slurm() | cluster.env())
    yield started
    started.close()


@pytest.fixture
def tested(cluster: LocalCluster, observer: Controller, tmp_path: Path) -> PairTest:
    """tested(*options, **variables): what `unicronctl pair-test --json` prints."""
    environment = outside_slurm() | cluster.env() | {"UNICRON_CONTROLLER": observer.address}
    words = ["pair-test", "--backend", "sockets", "--seconds", "0.2", "--patience", "20", "--queue", "60", "--json"]

    def run(*options: str, **variables: str) -> dict[str, Any]:
        done = call(*UNICRONCTL, *words, *options, cwd=tmp_path, environment=environment | variables, limit=100)
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (3 if found["bad"] else 0), done.stderr
        return found

    return run


def test_it_finds_the_node_that_corrupts_data(cluster: LocalCluster, observer: Controller, tested: PairTest) -> None:
    found = tested("--nodes", "n3", "--drain", UNICRON_PAIR_FAULT="n3:corrupt")
    assert list(found["bad"]) == ["n3"] and "wrong sum" in found["bad"]["n3"]
    assert sorted(found["good"]) == ["n1", "n2", "n4", "n5", "n6"] and not found["unknown"], found
    (node,) = [node for node in cluster.client().nodes() if node.name == "n3"]
    assert "DRAIN" in node.states and node.reason.startswith("unicron[health]: pair test")
    assert observer.node("n3")["pair_test"]["verdict"] == "bad"
    assert {test["round"] for test in found["tests"]} == {1, 2}


@pytest.mark.wide
def test_it_survives_a_node_that_crashes_and_drains_only_when_told(cluster: LocalCluster, tested: PairTest) -> None:
    found = tested(UNICRON_PAIR_FAULT="n5:crash")
    assert list(found["bad"]) == ["n5"] and len(found["good"]) == 5
    assert all(node.healthy for node in cluster.client().nodes())
    assert all(test["bandwidth"] > 0 and test["latency"] > 0 for test in found["tests"] if test["passed"])


def test_it_takes_slurms_own_notation(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    for more in ((), ("--helpers",)):
        shown = CliRunner().invoke(pair_test.command, ["--dry-run", "--nodes", "n[2-5]", *more])
        assert shown.exit_code == 0, shown.output
        words = [word for word in shown.output.split() if word.startswith("--nodelist=")]
        witnesses = ["--nodelist=n1,n6"] if more else []  # which nobody has named
        assert words == ["--nodelist=n2,n3", "--nodelist=n4,n5", *witnesses]
