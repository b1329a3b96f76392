"""Admission checks: bad only when proven, time-boxed, switchable."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from unicron_detector.health import checks as module
from unicron_detector.health.checks import (
    CHECKS,
    Settings,
    check_clock,
    check_file_system,
    check_gpu,
    check_memory,
    check_nic,
    judge_gpus,
)
from unicron_detector.health.runner import run


def tree(root: Path, files: dict[str, str]) -> Settings:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Settings(root=str(root), test_mb=1)


def with_(settings: Settings, **changes) -> Settings:
    return msgspec.structs.replace(settings, **changes)


def test_this_machine_is_not_bad_and_quick(tmp_path):
    report = run(Settings(test_mb=1, kernel_state=str(tmp_path / "state")))
    assert report.verdict != "bad"
    assert {result.name for result in report.results} == set(CHECKS)
    assert report.seconds < 5.0
    json.dumps(report.as_dict())


def test_each_check_can_be_switched_off():
    report = run(Settings(skip=tuple(CHECKS)))
    assert {result.verdict for result in report.results} == {"skipped"}
    assert report.verdict == "good"
    assert {result.verdict for result in run(Settings(skip=("all",))).results} == {"skipped"}


def test_a_check_that_raises_is_unknown():
    def broken(_):
        raise RuntimeError("oops")

    assert run(Settings(), checks={"broken": broken}).verdict == "unknown"


# ---------------------------------------------------------------------------------------------------------------- gpu

FINE = "0, 0, No, No, [N/A], 41\n1, 0, No, No, [N/A], 40\n"


@pytest.mark.parametrize(
    ("table", "expected", "verdict", "says"),
    [
        (FINE, 2, "good", "2 GPUs answer"),
        (FINE, 4, "bad", "4 GPUs expected, 2 answer"),
        ("0, 0, Yes, No, [N/A], 41\n", 1, "bad", "could not be remapped"),
        ("0, 3, No, Yes, [N/A], 41\n", 1, "warning", "waits to be retired"),
        ("0, 3, No, No, [N/A], 41\n", 1, "warning", "3 uncorrectable"),
        ("0, [N/A], [N/A], [N/A], [N/A], 41\n", 1, "good", ""),
    ],
)
def test_what_nvidia_smi_reports(table, expected, verdict, says):
    found = judge_gpus(0, table, "", Settings(gpus=expected))
    assert found.verdict == verdict and says in found.reason and found.values["gpus"] == table.count("\n")


def test_nvidia_smi_that_fails():
    lost = "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error"
    assert judge_gpus(15, "", "GPU is lost", Settings()).verdict == "bad"
    assert judge_gpus(255, "", lost, Settings()).verdict == "bad"
    assert judge_gpus(6, "", "No devices were found", Settings()).verdict == "unknown"


def test_nvidia_smi_that_hangs_is_unknown(tmp_path):
    settings = tree(tmp_path, {"proc/driver/nvidia/gpus/0/information": ""})

    def hang(*_, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", 1)

    assert check_gpu(settings, hang).verdict == "unknown"


def test_no_gpu_expected_and_none_there(tmp_path):
    assert check_gpu(tree(tmp_path, {})).verdict == "good"


# ------------------------------------------------------------------------------------------------------------- memory


def test_missing_memory_is_bad(tmp_path):
    settings = tree(tmp_path, {"proc/meminfo": "MemTotal: 131072000 kB\n"})
    assert check_memory(with_(settings, memory_mb=128000)).verdict == "good"
    found = check_memory(with_(settings, memory_mb=256000))
    assert found.verdict == "bad" and "128000 MB of memory" in found.reason


def test_uncorrectable_memory_errors_are_bad(tmp_path):
    files = {"proc/meminfo": "MemTotal: 1000000 kB\n", "sys/devices/system/edac/mc/mc0/ue_count": "0\n"}
    settings = tree(tmp_path, files)
    assert check_memory(settings).verdict == "good"
    tree(tmp_path, {"sys/devices/system/edac/mc/mc0/ue_count": "2\n"})
    assert "2 uncorrectable" in check_memory(settings).reason


# ---------------------------------------------------------------------------------------------------------------- nic


def test_named_interfaces_must_be_up(tmp_path):
    files = {
        "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth1/operstate": "down\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    }
    settings = tree(tmp_path, files)
    assert check_nic(with_(settings, nics=("eth0", "mlx5_0"))).verdict == "good"
    assert check_nic(with_(settings, nics=("eth1",))).verdict == "bad"
    assert "port 1 is 1: DOWN" in check_nic(with_(settings, nics=("mlx5_1",))).reason
    assert check_nic(with_(settings, nics=("ib9",))).verdict == "bad"
    assert check_nic(settings).verdict == "good"


def test_an_interface_that_is_not_there_makes_the_report_bad_unless_switched_off():
    settings, checks = Settings(nics=("nothing0",)), {"nic": check_nic}
    assert run(settings, checks).verdict == "bad"
    assert run(with_(settings, skip=("nic",)), checks).verdict == "good"


def test_no_interface_named_and_none_up_is_unknown(tmp_path):
    assert check_nic(tree(tmp_path, {})).verdict == "unknown"


# -------------------------------------------------------------------------------------------------------- file system


def test_a_writable_path_is_good_and_left_clean(tmp_path):
    assert check_file_system(Settings(paths=(str(tmp_path),))).verdict == "good"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_path_is_a_warning_not_bad(tmp_path):
    assert check_file_system(Settings(paths=(str(tmp_path / "gone"),))).verdict == "warning"


@pytest.mark.parametrize(
    ("kind", "code", "verdict"),
    [
        ("ext4", errno.EIO, "bad"),
        ("nfs4", errno.EIO, "warning"),
        ("ext4", errno.ENOSPC, "warning"),
        ("ext4", errno.EROFS, "bad"),
    ],
)
def test_only_a_local_disks_error_is_proof(tmp_path, monkeypatch, kind, code, verdict):
    settings = tree(tmp_path / "root", {"proc/mounts": f"dev / rootfs rw 0 0\ndev {tmp_path} {kind} rw 0 0\n"})

    def refuse(_):
        raise OSError(code, "no")

    monkeypatch.setattr(module.os, "fsync", refuse)
    assert check_file_system(with_(settings, paths=(str(tmp_path),))).verdict == verdict


# -------------------------------------------------------------------------------------------------------------- clock


@pytest.mark.parametrize(("kept", "verdict"), [(True, "good"), (False, "warning"), (None, "good")])
def test_a_clock_that_no_time_service_keeps_is_a_warning(monkeypatch, kept, verdict):
    monkeypatch.setattr(module, "_is_clock_synchronised", lambda: kept)
    assert check_clock(Settings()).verdict == verdict
