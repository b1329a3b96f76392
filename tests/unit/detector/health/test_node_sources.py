"""The node's own sources: kernel log, memory cgroup, links; from files as the kernel writes them."""

from __future__ import annotations

import os
import select

import pytest

from unicron_detector.failures.classify import default_classifier
from unicron_detector.health.kernel_log import (
    BURST_SECONDS,
    LONGEST_BURST,
    PER_MINUTE,
    KernelFaults,
    KernelLog,
    line_of,
    pid_in,
    why_not,
)
from unicron_detector.health.links import LinkWatch, describe
from unicron_detector.health.oom_kills import CLAIM_SECONDS, REPORT_SECONDS, OomKills, counter_file, read_count

XID = "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, Ch 00000010"
# As Linux 6.1 writes them for one kill in a memory cgroup.
OOM_LINES = [
    "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "Tasks state (memory values in pages):",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/uid_0/job_7,"
    "task_memcg=/slurm/uid_0/job_7,task=python,pid=4242,uid=0",
    "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1063140kB, anon-rss:1013064kB, file-rss:5632kB",
    "oom_reaper: reaped process 4242 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
]


# ---------------------------------------------------------------- lines
@pytest.mark.parametrize(
    ("record", "text"),
    [
        (b"6,339,5140900,-;NET: Registered protocol\n SUBSYSTEM=net\n DEVICE=+a\n", "NET: Registered protocol"),
        (b"3,340,5140901,c,caller=T1;NVRM: Xid\\x20(x)\n", "NVRM: Xid (x)"),
        (b"[  12.345678] NVRM: Xid (PCI:0000:3b:00): 79", "[ 12.345678] NVRM: Xid (PCI:0000:3b:00): 79"),
        (b"4,1,2,-;\xff\xfe broken", "\ufffd\ufffd broken"),
        (b"", ""),
    ],
)
def test_records_and_plain_lines(record, text):
    assert line_of(record) == text


def test_a_fifo_gives_lines_from_now_on_and_outlives_its_writer(tmp_path):
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = KernelLog(str(path))
    assert log.pollable and log.read() == []
    for text in (b"6,1,2,-;one\nhal", b"f\n"):
        with path.open("wb") as writer:
            writer.write(text)
        assert select.select([log], [], [], 5)[0]
    assert log.read() == ["one", "half"]
    assert not select.select([log], [], [], 0)[0], "no end of file when nobody writes"
    log.close()


def test_a_file_is_followed_through_truncation_and_replacement(tmp_path):
    path = tmp_path / "kernel.log"
    path.write_text("old\n")
    log = KernelLog(str(path))
    assert not log.pollable and log.read() == []
    with path.open("a") as writer:
        writer.write("new\n")
    assert log.read() == ["new"]
    path.write_text("cut\n")
    assert log.read() == ["cut"]
    path.rename(tmp_path / "kernel.log.1")
    assert log.read() == [], "between the two steps of a rotation"
    path.write_text("fresh\n")
    assert log.read() == ["fresh"]
    log.close()


def test_a_device_that_has_an_end_is_not_polled():
    log = KernelLog("/dev/null")
    assert log.pollable and log.read() == [] and not log.pollable
    log.close()


def test_what_cannot_be_opened_is_one_line_with_a_remedy(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        KernelLog(str(tmp_path / "nothing"))
    assert "UNICRON_KMSG" in why_not(missing.value, "nothing") and "\n" not in why_not(missing.value, "nothing")
    assert "dmesg_restrict" in why_not(PermissionError(1, "Operation not permitted"), "/dev/kmsg")


# ---------------------------------------------------------------- faults
def test_only_what_a_kernel_would_say_of_a_fault_is_one():
    faults = KernelFaults(default_classifier())
    quiet = [
        "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
        "systemd[1]: Started Session 4 of user ann.",
        "audit: type=1400 apparmor=DENIED operation=open comm=python: Permission denied",
        "ice 0000:31:00.0: can't set link to OFF, err -5 not fatal, continuing",
        "ModuleNotFoundError: No module named 'x'",
        "RuntimeError: CUDA out of memory",
    ]
    assert [line for line in quiet if faults.read_line(line, 0.0)] == []
    loud = {
        XID: "illegal_memory_access",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.": "gpu_lost",
        "mlx5_core 0000:5e:00.0: device's health compromised - reached miss count": "nic_error",
        "python[4242]: segfault at 0 ip 00007f sp 00007f error 4 in libtorch_cpu.so": "exited_abnormally",
        "mlx5_core 0000:5e:00.0 ib0: Link down": "link_flapping",
    }
    assert {line: fault.verdict.cause for line in loud if (fault := faults.read_line(line, 0.0))} == loud


def test_one_out_of_memory_kill_is_one_fault_with_its_process():
    faults = KernelFaults(default_classifier())
    found = [fault for line in OOM_LINES if (fault := faults.read_line(line, 0.0))]
    assert [(fault.verdict.cause, pid_in(fault.text)) for fault in found] == [("host_out_of_memory", 4242)]
    second = OOM_LINES[3].replace("4242", "4243")
    assert faults.read_line(second, 1.0), "another process is another fault"


def test_a_burst_is_told_once_and_again_when_it_does_not_end():
    faults, told = KernelFaults(default_classifier()), []
    for tick in range(700):
        fault = faults.read_line(XID, tick * 1.0)
        told += [(tick, fault.count)] if fault else []
    assert told == [(0, 1), (LONGEST_BURST, LONGEST_BURST), (2 * LONGEST_BURST, LONGEST_BURST)]
    after = faults.read_line(XID, 700.0 + BURST_SECONDS)
    assert after and after.count > 1, "those held back are counted"


def test_the_rate_is_limited_and_what_was_held_back_comes_later():
    faults = KernelFaults(default_classifier())
    lines = [f"NVRM: Xid (PCI:0000:{bus:02x}:00): 13, pid=7" for bus in range(100)]
    assert sum(faults.read_line(line, 1.0) is not None for line in lines) == PER_MINUTE
    assert faults.read_line(lines[-1], 70.0).count == 2


def test_a_rule_of_the_admin_for_kernels_counts_whatever_its_cause():
    rule = {"id": "ours", "pattern": "our fabric is tired", "cause": "application_error", "only_from": ["kernel"]}
    faults = KernelFaults(default_classifier().load({"severity": {"rule": [rule]}}))
    assert faults.read_line("our fabric is tired", 0.0).code == "ours"


@pytest.mark.parametrize(
    ("line", "pid"),
    [
        (XID, 77),
        ("NVRM: Xid (PCI:0000:3b:00): 13, pid='1234', name=python", 1234),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus", None),
        ("INFO: task python:991 blocked for more than 120 seconds.", 991),
        ("python[4242]: segfault at 0 ip 0", 4242),
        (OOM_LINES[3], 4242),
    ],
)
def test_the_process_that_a_line_names(line, pid):
    assert pid_in(line) == pid


# ---------------------------------------------------------------- memory
MOUNTS_V1 = (
    "35 31 0:32 / {root}/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / {root}/unified rw - cgroup2 cgroup2 rw\n"
)
MOUNTS_V2 = "25 30 0:23 {inside} {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def fake_proc(tmp_path, mounts: str, cgroup: str):
    """/proc of a process in that cgroup; returns (proc, where cgroups are mounted)."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(mounts.replace("{root}", str(root)))
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, root


def write(file, count: int, text: str = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.format(count))


def test_the_counter_of_version_1(tmp_path):
    cgroup = "9:name=systemd:/\n4:memory:/slurm/uid_0/job_7\n0::/\n"
    proc, root = fake_proc(tmp_path, MOUNTS_V1, cgroup)
    assert counter_file(proc=proc) is None
    write(root / "memory" / "slurm/uid_0/job_7" / "memory.oom_control", 3)
    assert read_count(counter_file(proc=proc)) == 3


@pytest.mark.parametrize("inside", ["/", "/docker/abc"])
def test_the_counter_of_version_2_in_a_container_too(tmp_path, inside):
    path = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    full = path if inside == "/" else inside + path
    proc, root = fake_proc(tmp_path, MOUNTS_V2.replace("{inside}", inside), f"0::{full}\n")
    events = "low 0\nhigh 0\nmax 310\noom 4\noom_kill {}\noom_group_kill 9\n"
    write(root / path[1:] / "memory.events", 2, events)
    assert read_count(counter_file(proc=proc)) == 2


def test_no_counter_is_no_error(tmp_path):
    assert counter_file(proc=tmp_path) is None
    kills = OomKills(None)
    assert not kills.claim() and kills.unclaimed_kills() == 0
    (tmp_path / "x").write_text("oom_kill many\n")
    assert read_count(tmp_path / "x") is None


def test_each_kill_explains_one_end_and_those_before_the_start_none(tmp_path):
    file, clock = tmp_path / "memory.events", [100.0]
    write(file, 5)
    kills = OomKills(file, lambda: clock[0])
    assert not kills.claim(), "killed before we came"
    write(file, 7)
    assert kills.claim() and kills.claim() and not kills.claim()
    write(file, 8)
    assert kills.unclaimed_kills() == 0, "read, and too new to be told of"
    clock[0] += CLAIM_SECONDS + 1
    assert not kills.claim(), "too long ago"
    file.unlink()
    assert not kills.claim()


def test_a_kill_of_another_process_of_the_cgroup_is_told_once(tmp_path):
    file, clock = tmp_path / "memory.events", [100.0]
    write(file, 0)
    kills = OomKills(file, lambda: clock[0])
    write(file, 2)
    assert kills.unclaimed_kills() == 0 and kills.claim(), "one of them was a rank"
    clock[0] += REPORT_SECONDS + 0.1
    assert kills.unclaimed_kills() == 1 and kills.unclaimed_kills() == 0


# ---------------------------------------------------------------- links
def test_links_of_devices_and_of_infiniband_ports(tmp_path):
    def link(name: str, value: int, device: bool = True) -> None:
        folder = tmp_path / "net" / name
        (folder / "device" if device else folder).mkdir(parents=True, exist_ok=True)
        (folder / "carrier_changes").write_text(f"{value}\n")

    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters" / "link_downed"
    port.parent.mkdir(parents=True)
    port.write_text("0\n")
    link("ib0", 2)
    link("docker0", 2, device=False)
    watch = LinkWatch(tmp_path)
    assert watch.new_flaps() == {}
    link("eth0", 7)  # it is new
    link("ib0", 4)
    link("docker0", 9, device=False)
    port.write_text("1\n")
    assert watch.new_flaps() == {"ib0": 2, "mlx5_0:1": 1}
    assert watch.new_flaps() == {}
    link("ib0", 0)  # the driver was loaded anew
    assert watch.new_flaps() == {}


def test_a_flap_in_words(snapshot):
    assert [describe("ib0", 2, 5.0), describe("mlx5_0:1", 1, 5.0)] == snapshot
