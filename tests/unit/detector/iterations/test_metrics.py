"""TEE: collectors, rates, and peers that stand out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_detector.iterations.peer_metrics import (
    PeerWatch,
    Rates,
    read_cpu,
    read_file_latency,
    read_gpus,
    read_memory,
    read_nics,
    read_node,
    robust_scores,
)

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 9999      10    9    9    0     0          0         0  9999      10    9    9    0     0       0          0
  eth0: 1000      10    1    2    0     0          0         0  2000      10    3    4    0     0       0          0
veth12: 5555      10    9    9    0     0          0         0  5555      10    9    9    0     0       0          0
   ib0: 100       10    0    0    0     0          0         0  200       10    0    0    0     0       0          0
"""


def test_counters_of_the_network(tmp_path):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text(NET_DEV)
    (tmp_path / "class" / "ib0").mkdir(parents=True)
    (tmp_path / "class" / "ib0" / "carrier_changes").write_text("5\n")
    assert read_nics(tmp_path, tmp_path / "class") == {
        "nic_receive": 1100.0,
        "nic_transmit": 2200.0,
        "nic_errors": 4.0,
        "nic_drops": 6.0,
        "carrier_changes": 5.0,
    }


def test_memory_and_cpu(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 250 kB\nShmem: 100 kB\n")
    (tmp_path / "stat").write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\n")
    memory = read_memory(tmp_path)
    assert memory == {"memory_used": 0.75, "shm_used": 0.1, "memory_pressure": 0.125}
    assert read_cpu(tmp_path)["cpu_busy_seconds"] == pytest.approx(2.0)


def test_this_machine_can_be_read(tmp_path):
    assert 0.0 <= read_node()["memory_used"] <= 1.0
    assert read_file_latency(tmp_path)["file_latency"] > 0.0
    assert isinstance(read_gpus(), list)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        read_file_latency(tmp_path / "nowhere")


def test_counters_become_rates_and_gauges_stay():
    rates = Rates()
    assert rates({"nic_receive": 100.0, "memory_used": 0.5}, 10.0) == {"memory_used": 0.5}
    assert rates({"nic_receive": 400.0, "memory_used": 0.6}, 12.0) == {"memory_used": 0.6, "nic_receive": 150.0}
    assert rates({"nic_receive": 5.0}, 13.0) == {"nic_receive": 0.0}
    busy = Rates()
    busy({"cpu_busy_seconds": 0.0, "cpu_count": 4.0}, 0.0)
    assert busy({"cpu_busy_seconds": 2.0, "cpu_count": 4.0}, 1.0) == {"cpu_busy": 0.5}


USUAL = {
    "forward": 0.3,
    "backward": 0.6,
    "cpu_busy": 0.5,
    "nic_receive": 1e9,
    "gpu_temperature": 60.0,
    "gpu_clock": 1700.0,
    "file_latency": 0.01,
    "memory_used": 0.4,
}


def nodes(rng, count=16, noise=0.03):
    return {f"n{i}": {name: value * rng.gauss(1.0, noise) for name, value in USUAL.items()} for i in range(count)}


def rounds(watch, change, count=3, seed=1, peers=16):
    rng = random.Random(seed)
    for _ in range(count):
        values = nodes(rng, peers)
        for name, factor in change.items():
            values["n3"][name] *= factor
        found = watch.judge(values)
    return found


@pytest.mark.parametrize(
    ("metric", "factor"), [("backward", 1.5), ("gpu_clock", 0.6), ("gpu_temperature", 1.6), ("nic_receive", 0.2)]
)
def test_the_peer_that_stands_out_is_named_with_its_metric(metric, factor):
    found = rounds(PeerWatch(), {metric: factor})
    assert [item.peer for item in found] == ["n3"]
    assert found[0].metric == metric
    assert "n3" in found[0].reason and found[0].rounds == 3


def test_one_round_proves_nothing():
    assert rounds(PeerWatch(), {"backward": 3.0}, count=2) == []


def test_a_cool_or_quick_peer_is_no_anomaly_by_that_metric_alone():
    assert rounds(PeerWatch(threshold=1e6), {"gpu_temperature": 0.4}) == []


def test_a_little_off_in_many_metrics_adds_up():
    """No metric alone reaches the threshold, all together do."""
    single = {"forward": 1.22, "backward": 1.22, "nic_receive": 0.78, "memory_used": 1.22}
    found = rounds(PeerWatch(), single)
    assert [item.peer for item in found] == ["n3"]
    assert max(map(abs, found[0].scores.values())) < found[0].distance + 8.0


def test_no_false_alarms_over_many_rounds():
    watch = PeerWatch()
    rng = random.Random(11)
    assert not any(watch.judge(nodes(rng)) for _ in range(cases(2000)))


def test_all_equal_peers_are_fine_and_hair_breadths_do_not_count():
    watch = PeerWatch(rounds=1)
    values = {f"n{i}": dict(USUAL) for i in range(8)}
    values["n0"]["forward"] *= 1.01
    assert watch.judge(values) == []


def test_too_few_peers_give_no_answer():
    assert robust_scores({"a": {"x": 1.0}, "b": {"x": 9.0}}) == {}


VALUES = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0.0, 10.0))


@settings(max_examples=cases(60), deadline=None)
@given(
    st.dictionaries(
        st.text("abcd", min_size=1, max_size=2), st.dictionaries(st.sampled_from(sorted(USUAL)), VALUES), max_size=10
    )
)
def test_any_values_get_an_answer(values):
    for anomaly in PeerWatch(rounds=1).judge(values):
        assert anomaly.peer in values and anomaly.reason
