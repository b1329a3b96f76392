"""Lines that drivers of the Linux kernel print (docs/behaviour/kernel), filled in: only those that mean harm take a
node."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.severity import REPORT, Severity
from unicron_detector.health.kernel_check import proven

KERNEL = Path(__file__).parents[4] / "docs" / "behaviour" / "kernel"
DRIVERS = tomllib.loads((KERNEL / "drivers.toml").read_text())
HARM = tomllib.loads((KERNEL / "harm.toml").read_text())["harm"]
CLASSIFIER = default_classifier()
# printk's conversions (Documentation/core-api/printk-formats), and values for them: errors, zeros, large numbers.
CONVERSION = re.compile(r"%(?:%|[-+ #0]*[\d*]*(?:\.[\d*]+)?(?:hh|ll|[hlLzjtq])?(?P<of>p[A-Za-z]*|[a-zA-Z]))")
VALUES = (
    {"d": "-5", "u": "3", "x": "1f", "s": "name", "p": "-EIO"},
    {"d": "0", "u": "0", "x": "0", "s": "", "p": "0000:5e:00.0"},
    {"d": "12", "u": "130", "x": "dead", "s": "umc", "p": "-ETIMEDOUT"},
)
OF_THE_NETWORK = ("mlx5", "ice", "irdma", "ena", "efa", "nvme", "nfs", "kernel")


@cache
def strings(driver: str) -> tuple[str, ...]:
    lines = (KERNEL / "strings" / f"{driver}.txt").read_text().splitlines()
    assert lines[0].startswith(f"# {driver} in ")
    return tuple(line.split("\t", 1)[1] for line in lines[1:])


def filled(text: str, values: dict[str, str]) -> str:
    def value(hit: re.Match[str]) -> str:
        kind = hit["of"] or "%"
        kind = {"i": "d", "X": "x", "c": "s"}.get(kind, kind[0])
        return "%" if kind == "%" else values.get(kind, "7")

    return CONVERSION.sub(value, text)


def lines_of(driver: str, text: str) -> Iterator[str]:
    """The string as a kernel would print it: behind the driver's first head with all values, since of 53 strings the
    verdict depends on them, and behind each head."""
    first, *others = DRIVERS[driver]["heads"]
    yield from dict.fromkeys(first + filled(text, values) for values in VALUES)
    yield from (head + filled(text, VALUES[0]) for head in others)


@cache
def patterns(driver: str) -> dict[str, re.Pattern[str]]:
    """Return string -> pattern of the lines that are made of it, for strings with enough words of their own."""
    found = {}
    for text in strings(driver):
        own = CONVERSION.split(text)[::2]
        if sum(map(len, own)) >= 12:
            heads = "|".join(map(re.escape, DRIVERS[driver]["heads"]))
            found[text] = re.compile(f"(?:{heads})" + ".*?".join(map(re.escape, own)) + "$")
    return found


@cache
def harmful(driver: str) -> frozenset[str]:
    """The strings of which a line of severity 1 in harm.toml was made."""
    lines = [line for harm in HARM if harm["driver"] == driver and harm["severity"] == 1 for line in harm["lines"]]
    return frozenset(text for text, pattern in patterns(driver).items() if any(map(pattern.match, lines)))


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_other_string_of_a_driver_takes_a_node(driver: str) -> None:
    taken = {
        line: verdict.rule
        for text in strings(driver)
        if text not in harmful(driver)
        for line in lines_of(driver, text)
        if (verdict := CLASSIFIER.match(line, "kernel")) and verdict.severity is Severity.SEV1
    }
    assert taken == {}


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_programs_say_is_not_read_into_a_kernels_words(driver: str) -> None:
    """ "Failed to upload", "please upgrade", "authentication failed", "read timed out": of a driver's own affairs."""
    for text in strings(driver):
        verdict = CLASSIFIER.match(lines_of(driver, text).__next__(), "kernel")
        if verdict is not None:
            assert verdict.scope != "application" or verdict.cause == "host_out_of_memory", text
            assert verdict.cause not in ("checkpoint_corrupt", "nccl_timeout", "connection_reset"), text


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if driver not in OF_THE_NETWORK])
def test_an_errors_name_is_not_the_network(driver: str) -> None:
    names = ("-ETIMEDOUT", "-ECONNRESET", "-EPIPE", "-ENOMEM", "-EROFS", "-ENOSPC")
    for number, text in enumerate(text for text in strings(driver) if "%p" in text):
        line, plain = (filled(text, VALUES[0] | {"p": name}) for name in (names[number % len(names)], "-1"))
        told, expected = (CLASSIFIER.match(DRIVERS[driver]["heads"][0] + each, "kernel") for each in (line, plain))
        assert (told and told.rule) == (expected and expected.rule), line


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: f"{harm['driver']}-{harm['cause']}-{harm['severity']}")
def test_lines_that_mean_harm(harm: dict) -> None:
    for line in harm["lines"]:
        assert any(pattern.match(line) for pattern in patterns(harm["driver"]).values()), f"no driver prints {line}"
        verdict = CLASSIFIER.text(line, "kernel")
        assert (verdict.cause, int(verdict.severity)) == (harm["cause"], harm["severity"]), line
        assert verdict.action != REPORT, line


HEALTHY = (
    "mlx5_core 0000:5e:00.0: print_health_info:424:(pid 0): Health issue observed, sensor, severity(4) WARNING:",
    "mlx5_core 0000:5e:00.0: print_health_info:424:(pid 0): Health issue observed, irisc not responding, severity(5):",
    "mlx5_core 0000:5e:00.0: print_health_info:434:(pid 0): assert_var[0] 0x00000000",
    "mlx5_core 0000:5e:00.0: print_health_info:440:(pid 0): synd 0x10: High temperature",
    "mlx5_core 0000:5e:00.0 eth0: Error cqe on cqn 0x40c, ci 0x1b, qn 0x5a3, opcode 0xd, syndrome 0x2, vendor "
    "syndrome 0x68",
    "mlx5_core 0000:5e:00.0: mlx5_eq_cq_event:215:(pid 0): CQ error on CQN 0x40, syndrome 0x1",
    'nvme nvme1: Removing ctrl: NQN "nqn.2014-08.org.nvmexpress.discovery"',
    "nvme nvme0: failed to set APST feature (2)",
    "nvme nvme0: failed to set host mem (err 5, flags 0x1).",
    "nvme nvme0: I/O tag 832 (0340) opcode 0x2 (Read) QID 12 timeout, reset controller",
    "nvme nvme0: I/O tag 832 (0340) opcode 0x1 (Write) QID 12 timeout, aborting req_op:WRITE(1) size:4096",
    "amdgpu 0000:c1:00.0: amdgpu: Poison is created, no user action is needed.",
    "amdgpu 0000:c1:00.0: amdgpu: Failed to restore BOs of pasid 0x8002, retry after 200 ms",
    "amdgpu 0000:c1:00.0: amdgpu: Failed to init usermode queue manager (-95), use legacy workload submission only",
    "amdgpu 0000:c1:00.0: amdgpu: socket: 0, die: 0, 3 uncorrectable hardware errors detected in total in umc block",
    "ice 0000:31:00.0: can't set link to OFF, err -5 aq_err LIBIE_AQ_RC_EIO not fatal, continuing",
    "ice 0000:31:00.0: tx_timeout: VSI_num: 7, Q 3, NTC: 0x1d, HW_HEAD: 0x1d, NTU: 0xdead, INT: 0x0",
    "ice 0000:31:00.0 irdma0: abnormal ae_id = 0x502 bool qp=1 qp_id = 12, ae_src=5",
    "pcieport 0000:80:03.0: AER: Multiple Uncorrectable (Non-Fatal) error message received from 0000:81:00.0",
    "nvidia 0000:81:00.0: AER: can't recover (no error_detected callback)",
    "pcieport 0000:80:03.0: AER: device recovery failed",
    "pcieport 0000:80:03.0: DPC: containment event, status:0x1f01, ERR_NONFATAL received from 0000:81:00.0",
    "BTRFS info (device sda1): bdev /dev/sda1 errs: wr 4, rd 12, flush 0, corrupt 0, gen 0",
    "XFS (nvme0n1p2): User initiated shutdown received. (0x2) detected at xfs_fs_goingdown+0x5a/0xb0 "
    "(fs/xfs/xfs_fsops.c:511).  Shutting down filesystem.",
    "EXT4-fs (sda1): error count since last fsck: 4",
    "hfi1 0000:5e:00.0: hfi1_0: QSFP not responding, waiting and retrying 3",
    "[Hardware Error]: Uncorrected, software containable error.",
    "qed 0000:5e:00.0: [qed_int:12()]Illegal read by chip from [dead:dead] blocked.",
    "Memory failure: 0x1f3c5a: recovery action for clean LRU page: Recovered",
    "mlx4_en 0000:0d:00.0: LSO not supported, please upgrade to later FW version to enable LSO",
    "clocksource: Watchdog remote CPU 3 read timed out",
)


@pytest.mark.parametrize("line", HEALTHY)
def test_lines_of_healthy_nodes_take_and_drain_nothing(line: str) -> None:
    """Each was seen to take a node, or is of the same kind."""
    verdict = CLASSIFIER.text(line, "kernel")
    assert verdict.severity is not Severity.SEV1
    assert proven(line, CLASSIFIER) is None
    assert verdict.severity is not Severity.SEV2 or verdict.cause != "configuration_error"


def test_an_admins_rule_holds_for_the_kernel_too():
    line = "clocksource: Watchdog remote CPU 3 read timed out"
    assert CLASSIFIER.match(line, "kernel") is None
    rule = {"id": "own", "cause": "other_network_error", "pattern": "remote CPU", "source": "us"}
    known = CLASSIFIER.load({"rule": [rule]}).match(line, "kernel")
    assert known is not None and known.cause == "other_network_error"


@pytest.mark.parametrize(
    ("at", "severity"), [("    0.064265", 3), ("    2.100000", 3), ("    3.064265", 1), ("68183.615790", 1)]
)
def test_a_machine_check_that_the_reset_before_left_is_of_an_earlier_boot(at, severity):
    line = f"[{at}] mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 4: a600000000020408"
    for before in ("", "kernel: ", "Sep 16 19:51:15 n1 kernel: "):
        assert CLASSIFIER.text(before + line, "kernel").severity == severity


def test_of_several_lines_the_worst_counts_and_no_line_excuses_another():
    burst = (
        "mlx5_core 0000:5e:00.0: print_health_info:424:(pid 0): Health issue observed, sensor, severity({}) X:\n"
        "mlx5_core 0000:5e:00.0: print_health_info:434:(pid 0): assert_var[0] 0x00000000\n"
        "ice 0000:31:00.0: can't set link to OFF, err -5 not fatal, continuing"
    )
    assert CLASSIFIER.text(burst.format(3), "kernel").cause == "nic_error"
    assert CLASSIFIER.text(burst.format(4), "kernel").action == REPORT


@pytest.mark.parametrize(
    ("line", "cause", "severity"),
    [
        ("BUG: workqueue lockup - pool cpus=3 node=0 flags=0x0 nice=0 stuck for 41s!", "task_hang", 2),
        ("general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP", "kernel_error", 1),
        ("traps: PANIC: double fault, error_code: 0x0", "kernel_error", 1),
        ("BUG: kernel NULL pointer dereference, address: 0000000000000010", "kernel_error", 1),
        ("SError Interrupt on CPU4, code 0x00000000be000411 -- SError", "host_hardware_error", 1),
        # Bit 61 of the status behind the bank says that it was not corrected, bit 2 of the number before it that the
        # CPU is in the exception. A public report has the first line beside EDAC's "1 CE memory read error".
        ("EDAC sbridge MC0: CPU 0: Machine Check Exception: 0 Bank 5: 8c00004000010090", "hardware_warning", 3),
        ("EDAC MC1: CPU 8: Machine Check Exception: 1 Bank 9: cc000f80000800c0", "hardware_warning", 3),
        ("CPU 0: Machine Check Exception: 0 Bank 5: be00000000800400", "host_hardware_error", 1),
        ("mce: [Hardware Error]: CPU 8: Machine Check Exception: 5 Bank 9: 8c00004000010090", "host_hardware_error", 1),
        ("{1}[Hardware Error]: event severity: fatal", "host_hardware_error", 1),
        ("{1}[Hardware Error]: event severity: corrected", "hardware_warning", 3),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal)", "hardware_warning", 3),
        ("cxi_ss1 0000:c1:00.0: cxi3[hsn3] PCIe non-fatal error", "hardware_warning", 3),
        ("[Hardware Error]: Deferred error, no action required.", "no_fault", 3),
        ("nvme nvme0: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10", "hardware_warning", 3),
        ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff", "hardware_warning", 3),
        ("nvme nvme0: Device not ready; aborting reset, CSTS=0x1", "hardware_warning", 3),
        ("nvme nvme0: Device not ready; aborting initialisation, CSTS=0x0", "local_disk_error", 1),
        ("nvme nvme0: Disabling device after reset failure: -19", "local_disk_error", 1),
        ("habanalabs 0000:1a:00.0: Failed to initialize hl2. Device is NOT usable !", "gpu_driver_error", 1),
        # BERT's records are of an earlier boot; those of now have a number.
        ("[Hardware Error]: event severity: fatal", "hardware_warning", 3),
        ("[Hardware Error]:  Error 0, type: fatal", "hardware_warning", 3),
        ("[Hardware Error]:     Uncorrected: true", "hardware_warning", 3),
        ("{2}[Hardware Error]:     Uncorrected: true", "host_hardware_error", 1),
    ],
)
def test_lines_of_other_builds_and_of_other_values(line: str, cause: str, severity: int) -> None:
    verdict = CLASSIFIER.text(line, "kernel")
    assert (verdict.cause, int(verdict.severity)) == (cause, severity)
