"""What a node's counters and connections say."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from unicron_detector.health.connections import Connection, Losses, parse_connection
from unicron_detector.health.symptoms import LEAST, SymptomReader, notable

KEY = (1, 0, b"")


def message(remote: str, sent: int, again: int, twice: int = 0, local: str = "10.0.0.1") -> bytes:
    """A struct inet_diag_msg with another attribute before its tcp_info."""
    ends = socket.inet_aton(local).ljust(16, b"\0") + socket.inet_aton(remote).ljust(16, b"\0")
    info = bytearray(232)
    for at, value in ((100, again), (156, sent), (216, twice)):
        struct.pack_into("=I", info, at, value)
    attributes = struct.pack("=HHB3x", 5, 8, 1) + struct.pack("=HH", 4 + len(info), 2) + bytes(info)
    return bytes(4) + struct.pack("=HH", 1, 2) + ends + struct.pack("=III", 0, 7, 8) + bytes(20) + attributes


def test_a_connection_is_read_without_what_had_arrived_all_the_same():
    one = parse_connection(message("10.0.0.2", 500, 30, 5), socket.AF_INET)
    assert one is not None and (one.local, one.remote, one.sent, one.lost) == ("10.0.0.1", "10.0.0.2", 500, 25)
    assert parse_connection(message("127.0.0.1", 500, 30), socket.AF_INET) is None
    assert parse_connection(message("10.0.0.1", 500, 30), socket.AF_INET) is None, "to this host"
    assert parse_connection(message("10.0.0.2", 5, 3)[:150], socket.AF_INET) is None, "of an older kernel"


def test_losses_are_those_since_the_last_look():
    losses = Losses()
    assert losses.compare({KEY: Connection(KEY, "a", "b", 1000, 50)}, 10.0) == {}, "nobody knows since when"
    found = losses.compare({KEY: Connection(KEY, "a", "b", 1100, 60)}, 12.0)
    assert found == {"b": (50.0, 5.0)} and losses.addresses == ["a"]
    assert losses.compare({KEY: Connection(KEY, "a", "b", 1200, 60)}, 14.0) == {}


def node(folder: Path, stalled: int = 0, written: int = 0, throttled: tuple[int, int] | None = None) -> Path:
    (folder / "pressure").mkdir(exist_ok=True)
    (folder / "pressure" / "io").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={stalled}\nfull total=0\n")
    (folder / "vmstat").write_text(f"nr_free_pages 1\npgpgout {written}\n")
    (folder / "stat").write_text("cpu 1 2 3\nprocs_blocked 0\n")
    (folder / "self").mkdir(exist_ok=True)
    group = folder / "groups" / "job" / "task"
    group.mkdir(parents=True, exist_ok=True)
    (folder / "self" / "cgroup").write_text("0::/job/task\n")
    mount = f"1 0 0:1 / {folder / 'groups'} rw - cgroup2 none rw\n"
    (folder / "self" / "mountinfo").write_text(mount)
    for name in (group, group.parent):
        (name / "cpu.stat").write_text("usage_usec 5\n")
    if throttled:
        (group.parent / "cpu.stat").write_text("usage_usec 5\nnr_periods {}\nnr_throttled {}\n".format(*throttled))
    return folder


def test_withheld_processor_time_is_that_of_the_group_which_withholds_it(tmp_path):
    reader = SymptomReader(lambda: None, node(tmp_path, throttled=(100, 10)))
    assert reader.read(0.0)[0] == {}
    node(tmp_path, throttled=(120, 28))
    assert reader.read(2.0)[0] == {"cpu_throttled": 0.9}


@pytest.mark.parametrize(
    ("stalled", "written", "looks"),
    [(0, 0, False), (100_000, 0, False), (500_000, 0, True), (2_000_000, 100_000, False)],
    ids=["idle", "hardly a wait", "waits", "writes as fast as it can"],
)
def test_the_disk_is_looked_at_while_somebody_waits_for_it(tmp_path, stalled, written, looks):
    reader = SymptomReader(lambda: 1.0, node(tmp_path))
    reader.read(0.0)
    node(tmp_path, stalled, written)
    assert reader.read(2.0)[0] == ({"file_latency": 1.0} if looks else {})
    node(tmp_path, stalled, written)
    assert ("file_latency" in reader.read(4.0)[0]) is looks, "and until it is quick again"


def test_only_what_a_healthy_node_does_not_show_is_told_at_once():
    assert not notable({name: least for name, least in LEAST.items()}, {})
    assert notable({"cpu_throttled": 0.5}, {})
