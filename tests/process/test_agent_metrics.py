"""The agent's metrics of real processes, and of a node whose reader may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.processes import state_of, wait_for
from unicron_ctl.agent.node.sampling import TRIES, Sampling
from unicron_ctl.agent.ranks.vitals import Vitals
from unicron_ctl.shared.protocol import structs
from unicron_detector.health.sampler import Patient, Sampler, machine

pytestmark = pytest.mark.process


def test_a_real_process_is_stopped_idle_and_gone():
    child = subprocess.Popen(["sleep", "60"])
    status = structs.RankStatus(state="running", pid=child.pid)
    rank = SimpleNamespace(slot=3, alive=True, status=status, trainer=child.pid)
    vitals = Vitals()
    try:
        wait_for(lambda: state_of(child.pid) == "S", "its state")
        vitals.update([rank], 10.0)
        assert rank.status.process in "SRD" and rank.status.idle == 0.0
        assert vitals.sample([rank], 10.0)[3].keys() == {"rank_memory"}
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: state_of(child.pid) == "T", "its state")
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


def test_a_file_system_that_hangs_shows_how_long_and_does_not_stop_the_rest(tmp_path):
    sampler, release = Sampler(str(tmp_path), patience=0.05), threading.Event()

    def hanging() -> dict[str, float]:
        release.wait(60)
        return {"file_latency": 0.0}

    def latency() -> float:
        return sampler.sample()["symptoms"].get("file_latency", -1.0)  # not while the machine writes much

    wait_for(lambda: 0.0 < latency() < 10.0, "a latency")
    sampler._files = Patient(hanging, 0.05)
    first = wait_for(lambda: max(0.0, latency()), "it hangs")
    time.sleep(0.1)
    second = sampler.sample()
    assert first >= 0.05 and second["node"]["memory_used"] > 0.0
    wait_for(lambda: latency() > first, "it still hangs")
    release.set()
    wait_for(lambda: latency() == 0.0, "the file system answers again")
    assert list(tmp_path.iterdir()) == []


def wait_for_sample(sampling: Sampling, now: float):
    return wait_for(lambda: sampling.read_sample(now), "a sample")


def test_a_child_measures_and_is_replaced_when_it_falls_silent(tmp_path):
    sampling = Sampling(str(tmp_path))
    try:
        sampling.configure(1.0, "", 100.0)
        assert sampling.read_sample(100.5) is None and sampling._child is None, "nothing is started before it is due"
        found = wait_for_sample(sampling, 101.0)
        assert found.host == machine() and found.whole and found.node["memory_used"] > 0.0
        first = sampling._child.pid
        os.kill(first, signal.SIGSTOP)
        while sampling.read_sample(101.0) is not None:
            pass
        sampling.read_sample(107.0)
        assert sampling._child is None
        assert wait_for_sample(sampling, 108.5) is not None and sampling._child.pid != first
    finally:
        sampling.close()


def test_a_child_that_ends_at_once_is_not_started_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    sampling = Sampling(str(tmp_path))
    sampling.configure(1.0, "", 0.0)
    now = 0.0

    def tries() -> int:
        nonlocal now
        now += 1.0
        assert sampling.read_sample(now) is None
        return sampling._tries

    wait_for(lambda: tries() == TRIES, "the last try")
    for _ in range(20):
        now += 10.0
        sampling.read_sample(now)
        time.sleep(0.01)
    assert sampling._tries == TRIES and sampling._child is None
