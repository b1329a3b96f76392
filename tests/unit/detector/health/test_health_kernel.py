"""The kernel log as root's health check reads it: what the kernel itself said, until a reboot or until it is mended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.texts import masked
from unicron_detector.failures.classify import default_classifier
from unicron_detector.health.checks import Settings, check_kernel
from unicron_detector.health.kernel_check import proven

GPU_LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FATAL = {
    GPU_LOST: "gpu_lost",
    "NVRM Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.": "gpu_lost",
    "NVRM: Xid (PCI:0000:3b:00): 48, pid=12, name=python, An uncorrectable double bit error (DBE)": "ecc_error",
    "amdgpu 0000:83:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block": "ecc_error",
    "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0)": "host_hardware_error",
    "EDAC MC0: 1 UE on mc#0csrow#1channel#2 (csrow:1 channel:2 page:0x1f offset:0x0 grain:64)": "host_hardware_error",
    "mce: [Hardware Error]: CPU 3: Machine Check Exception: 7 Bank 1: bd80000000100134": "host_hardware_error",
    "pcieport 0000:00:01.1: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction": "host_hardware_error",
    "mlx5_core 0000:17:00.0: device's health compromised - reached miss count": "nic_error",
}
HARMLESS = [
    "usb 1-1: new high-speed USB device number 2",
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault",
    "NVRM: Xid (PCI:0000:3b:00): 13, pid=4242, name=GPU has fallen off the bus",
    "NVRM: Xid (PCI:0000:3b:00): 119, pid=1337, name=python3, Timeout waiting for RPC from GSP!",
    "pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0",
    "pcieport 0000:64:01.0: pciehp: Slot(21): Link Down",  # an admin may have pulled the device
    # lines that begin with the name of a process, which its user has chosen
    "NVRM: Xid 79[4242]: segfault at 0 ip 00005581 sp 00007ffd error 4 in a.out",
    "NVRM: Xid (PCI:[4242]: segfault at 0 ip 00005581 sp 00007ffd error 4 in NVRM: Xid (PCI:0000:3b:00): 79",
    "EDAC MC0: 1 UE [4242]: segfault at 0 ip 00005581 sp 00007ffd error 4",
    "EDAC MC0: UE pa[4242]: segfault at 0 ip 00005581 sp 00007ffd error 4",
    "EDAC MC0: 1 UE [4242]: segfault at 0 ip 00005581 sp 00007ffd error 4 on mc#0",
    "{1}[Hardware Er[4242] general protection fault ip:5581 sp:7ffd error:0 in a.out: Hardware Error Fatal",
    "Memory failure:[4242]: segfault at 0",
    "Out of memory: Killed process 4242 (NVRM: Xid (PCI) total-vm:9kB: 79",
    "traps: GPU is lost[12] trap invalid opcode ip:1 sp:2 error:0 in uncorrectable ecc error occurred",
]


@pytest.mark.parametrize(("line", "cause"), FATAL.items())
def test_what_proves_the_hardware_broken(line: str, cause: str) -> None:
    verdict = proven(line, default_classifier())
    assert verdict is not None and verdict.cause == cause


@pytest.mark.parametrize("line", HARMLESS)
def test_what_does_not_and_what_a_user_can_write(line: str) -> None:
    assert proven(line, default_classifier()) is None


class Node:
    """A node with a kernel log of its own: a file in the format of /dev/kmsg."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines, self.number = folder, "", 0
        self.boot("first")

    def boot(self, name: str) -> None:
        path = self.folder / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
        self.lines, self.number = "", 0
        self.say("Linux version 6.1")

    def say(self, line: str, priority: int = 2) -> None:
        self.lines += f"{priority},{self.number},5140900,-;{line}\n SUBSYSTEM=pci\n"
        self.number += 1
        (self.folder / "dev").mkdir(exist_ok=True)
        (self.folder / "dev/kmsg").write_text(self.lines)

    def check(self, **settings: object) -> tuple[str, str]:
        state = str(self.folder / "state")
        found = check_kernel(Settings(root=str(self.folder), kernel_state=state, **settings))  # type: ignore[arg-type]
        return found.verdict, found.reason


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_what_was_there_before_the_first_check_is_history(node: Node) -> None:
    node.say(GPU_LOST)
    assert node.check()[0] == node.check()[0] == "good"


def test_a_fatal_line_counts_until_the_node_is_booted(node: Node) -> None:
    assert node.check()[0] == "good"
    node.say("all is well")
    node.say(GPU_LOST)
    verdict, reason = node.check()
    assert verdict == "bad" and "gpu_lost: NVRM: Xid" in reason and "until a reboot" in reason
    assert node.check()[0] == "bad", "also at the next check, which finds nothing new"
    node.boot("second")
    assert node.check()[0] == "good"
    node.boot("third")
    node.say(GPU_LOST)
    assert node.check()[0] == "bad", "said while it was booting, before the first check"


def test_an_admin_who_has_mended_it_removes_what_is_remembered(node: Node) -> None:
    node.check()
    node.say(GPU_LOST)
    reason = node.check()[1]
    state = Path(reason.split("`rm ")[1].split("`")[0])
    assert json.loads(state.read_text())["bad"] and state.stat().st_mode & 0o022 == 0
    state.unlink()
    assert node.check()[0] == node.check()[0] == "good"


def test_only_the_kernels_own_records_count(node: Node) -> None:
    """A program that may write to /dev/kmsg, as some in containers, writes under another facility (LOG_USER)."""
    node.check()
    node.say(GPU_LOST, priority=8 + 2)
    assert node.check()[0] == "good"


def test_the_admins_own_rules_hold(node: Node) -> None:
    rule = {"id": "ours", "cause": "hardware_warning", "kind": "xid", "codes": [79]}
    node.check()
    node.say(GPU_LOST)
    assert node.check(severity={"rule": [rule]})[0] == "good"


def test_what_cannot_be_read_or_kept_is_a_warning_and_no_more(node: Node, snapshot) -> None:
    node.check()
    (node.folder / "state").chmod(0o777)
    verdict, reason = node.check()
    assert (verdict, masked(reason, node.folder)) == snapshot
    (node.folder / "dev/kmsg").unlink()
    verdict, reason = node.check()
    assert verdict == "warning" and "No such file" in reason
    (node.folder / "state").chmod(0o700)
    node.say("back")
    for content in (b"{", b"[]", b'{"boot": "\xff"}'):
        next((node.folder / "state").iterdir()).write_bytes(content)
        assert node.check()[0] == "good"


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg cannot be read here")
def test_the_real_kernel_log_is_read_to_its_end(tmp_path: Path) -> None:
    settings = Settings(kernel_state=str(tmp_path / "state"))
    assert check_kernel(settings).verdict == check_kernel(settings).verdict == "good"
    (state,) = (tmp_path / "state").iterdir()
    assert json.loads(state.read_text())["last"] >= 0
