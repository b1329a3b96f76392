"""The agent's side of metrics: processes through /proc, and the node through a child that may hang."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from unicron_ctl.agent.node.sampling import Sample, Sampling
from unicron_ctl.agent.ranks.vitals import Activity, Usage, Vitals
from unicron_ctl.shared.protocol import structs
from unicron_detector.health.sampler import Sampler


def usage(cpu: float = 0.0, transferred: float = 0.0, state: str = "S") -> Usage:
    return Usage(state, cpu, 1e6, transferred)


@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        (usage(cpu=0.5), 0.0),
        (usage(transferred=1e6), 0.0),
        (usage(state="D"), 0.0),
        (usage(state="R"), 0.0),
        (usage(cpu=0.02, transferred=1000.0), 3.0),
        (usage(state="T"), 3.0),
    ],
)
def test_idle_is_who_neither_computes_nor_reads_or_writes(busy, idle):
    activity = Activity(usage(), 100.0)
    assert activity.idle(usage(), 101.0) == 1.0
    assert activity.idle(usage(), 102.0) == 2.0
    assert activity.idle(busy, 103.0) == idle
    assert activity.idle(busy, 103.5) == idle + 0.5, "too soon to judge"


def test_a_new_process_in_a_slot_begins_anew():
    vitals = Vitals()
    rank = SimpleNamespace(slot=0, alive=True, status=structs.RankStatus(state="running", pid=os.getppid()))
    rank.trainer = os.getppid()
    vitals.update([rank], 0.0)
    vitals.sample([rank], 0.0)
    rank.status, rank.trainer = structs.RankStatus(state="running", pid=os.getpid()), os.getpid()
    vitals.update([rank], 100.0)
    assert rank.status.idle == 0.0 and "rank_cpu" not in vitals.sample([rank], 100.0)[0]


def test_a_directory_that_is_gone_costs_only_its_own_metric(tmp_path):
    line = Sampler(str(tmp_path / "gone"), patience=5.0).sample()
    assert "file_latency" not in line["symptoms"] and line["node"]["memory_used"] > 0.0


def test_between_two_rounds_only_symptoms_are_told_and_that_they_are_over(tmp_path):
    sampling = Sampling(str(tmp_path))

    def told(whole: bool, latency: float) -> bool:
        sample = Sample("boot", whole, symptoms={"file_latency": latency})
        return sampling._worth_telling([sample]) is not None

    looks = [(True, 0.01), (False, 0.01), (False, 3.0), (False, 2.0), (False, 0.01), (False, 0.01), (True, 0.01)]
    assert [told(*look) for look in looks] == [True, False, True, True, True, False, True]


def test_no_metrics_where_they_are_switched_off_or_make_no_sense(tmp_path):
    sampling = Sampling(str(tmp_path))
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        sampling.configure(seconds, "", 0.0)
        assert sampling.read_sample(1e9) is None and sampling._child is None
