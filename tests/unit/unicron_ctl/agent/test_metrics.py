"""The agent's side of metrics: processes through /proc, and the node through a child that may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from detector.sampler import Patient, Sampler, machine
from unicron_ctl.agent.sampling import TRIES, Sampling
from unicron_ctl.agent.vitals import Activity, Usage, Vitals, look
from unicron_ctl.protocol import wire


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


def wait_for_state(pid: int, letter: str) -> bool:
    deadline = time.monotonic() + 20
    while (state := look(pid).state) != letter and time.monotonic() < deadline:
        time.sleep(0.05)
    return state == letter


def test_a_real_process_is_stopped_idle_and_gone():
    child = subprocess.Popen(["sleep", "60"])
    rank = SimpleNamespace(slot=3, alive=True, status=wire.RankStatus(state="running", pid=child.pid))
    vitals = Vitals()
    try:
        assert wait_for_state(child.pid, "S")
        vitals.update([rank], 10.0)
        assert rank.status.process in "SRD" and rank.status.idle == 0.0
        assert vitals.sample([rank], 10.0)[3].keys() == {"rank_memory"}
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_for_state(child.pid, "T")
        vitals.update([rank], 15.0)
        assert rank.status.process == "T" and rank.status.idle >= 0.0
        vitals.update([rank], 20.0)
        vitals.update([rank], 25.0)
        assert rank.status.idle >= 5.0
        found = vitals.sample([rank], 30.0)[3]
        assert found["rank_cpu"] < 0.05 and found["rank_memory"] > 0.0
    finally:
        child.kill()
        child.wait()
    vitals.update([rank], 40.0)
    assert (rank.status.process, rank.status.idle) == ("", 0.0) and vitals.sample([rank], 40.0) == {}


def test_a_new_process_in_a_slot_begins_anew():
    vitals = Vitals()
    rank = SimpleNamespace(slot=0, alive=True, status=wire.RankStatus(state="running", pid=os.getppid()))
    vitals.update([rank], 0.0)
    vitals.sample([rank], 0.0)
    rank.status = wire.RankStatus(state="running", pid=os.getpid())
    vitals.update([rank], 100.0)
    assert rank.status.idle == 0.0 and "rank_cpu" not in vitals.sample([rank], 100.0)[0]


def test_a_file_system_that_hangs_shows_how_long_and_does_not_stop_the_rest(tmp_path):
    sampler, release = Sampler(str(tmp_path), patience=0.05), threading.Event()

    def hanging() -> dict[str, float]:
        release.wait(60)
        return {"file_latency": 0.0}

    assert 0.0 < sampler.sample()["node"]["file_latency"] < 10.0
    sampler._files = Patient(hanging, 0.05)
    first = sampler.sample()["node"]
    time.sleep(0.1)
    second = sampler.sample()["node"]
    assert second["file_latency"] > first["file_latency"] >= 0.05 and second["memory_used"] > 0.0
    release.set()
    deadline = time.monotonic() + 20
    while sampler.sample()["node"]["file_latency"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sampler.sample()["node"]["file_latency"] == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_costs_only_its_own_metric(tmp_path):
    node = Sampler(str(tmp_path / "gone"), patience=5.0).sample()["node"]
    assert "file_latency" not in node and node["memory_used"] > 0.0


def wait_for_sample(sampling: Sampling, now: float):
    deadline = time.monotonic() + 60
    while (found := sampling.turn(now)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_a_child_measures_and_is_replaced_when_it_falls_silent(tmp_path):
    sampling = Sampling(str(tmp_path))
    try:
        sampling.configure(1.0, "", 100.0)
        assert sampling.turn(100.5) is None and sampling._child is None, "nothing is started before it is due"
        found = wait_for_sample(sampling, 101.0)
        assert found.host == machine() and found.node["file_latency"] > 0.0
        first = sampling._child.pid
        os.kill(first, signal.SIGSTOP)
        while sampling.turn(101.0) is not None:
            pass
        began = time.monotonic()
        sampling.turn(107.0)
        assert time.monotonic() - began < 1.0 and sampling._child is None
        assert wait_for_sample(sampling, 108.5) is not None and sampling._child.pid != first
    finally:
        sampling.close()


def test_a_child_that_ends_at_once_is_not_started_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    sampling = Sampling(str(tmp_path))
    sampling.configure(1.0, "", 0.0)
    deadline, now = time.monotonic() + 30, 0.0
    while sampling._tries < TRIES and time.monotonic() < deadline:
        now += 1.0
        assert sampling.turn(now) is None
        time.sleep(0.01)
    for _ in range(20):
        now += 10.0
        sampling.turn(now)
        time.sleep(0.01)
    assert sampling._tries == TRIES and sampling._child is None


def test_no_metrics_where_they_are_switched_off_or_make_no_sense(tmp_path):
    sampling = Sampling(str(tmp_path))
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        sampling.configure(seconds, "", 0.0)
        assert sampling.turn(1e9) is None and sampling._child is None
