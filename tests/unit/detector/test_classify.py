"""Classification: the corpus of real error texts, exits, Xids, Slurm states, hostile input."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector.classify import MAX_TEXT, default_classifier
from detector.severity import Severity

CORPUS = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "errors.jsonl").read_text().splitlines()]
CLASSIFIER = default_classifier()


def test_the_corpus_is_large_and_sourced():
    assert len(CORPUS) >= 150
    assert all(entry["source"].startswith("https://github.com/") for entry in CORPUS)
    assert len({(entry["text"], entry["channel"]) for entry in CORPUS}) == len(CORPUS)
    assert {entry["split"] for entry in CORPUS} >= {"development", "held-out"}


def test_accuracy_over_the_corpus():
    causes = severities = 0
    for entry in CORPUS:
        verdict = CLASSIFIER.text(entry["text"], entry["channel"])
        causes += verdict.cause == entry["cause"]
        severities += int(verdict.severity) == entry["severity"]
    assert causes / len(CORPUS) >= 0.95
    assert severities / len(CORPUS) >= 0.95


def test_no_application_error_is_isolated():
    for entry in CORPUS:
        if CLASSIFIER.table.causes[entry["cause"]].scope != "hardware":
            assert CLASSIFIER.text(entry["text"], entry["channel"]).severity is not Severity.SEV1, entry["text"]


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: ECC key has the wrong length",
        "KeyError: 'nvlink_bandwidth'",
        "AssertionError: expected DMA buffer of size 5",
        "RuntimeError: model 'gpu driver' not registered",
        "print: retry after NVLink topology check",
        "ImportError: cannot import name 'Xid' from 'tracker'",
        "loss 0.31 xid 79 step 48",
        "ValueError: Xid 79 is no user id",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/uncorrectable.bin'",
    ],
)
def test_words_alone_prove_no_hardware_fault(text):
    assert CLASSIFIER.text(text).severity is not Severity.SEV1


def test_a_root_cause_stands_above_its_symptoms():
    text = (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "[rank1]: NCCL error: remote process exited or there was a network error\n"
        "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600013 milliseconds"
    )
    assert CLASSIFIER.text(text).cause == "cuda_out_of_memory"


def test_the_drivers_own_recovery_action_is_obeyed():
    line = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    assert CLASSIFIER.text(line, "kernel").severity is Severity.SEV1
    line = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
    assert CLASSIFIER.text(line, "kernel").action == "report"


def test_of_several_xids_the_worst_counts():
    text = (
        "NVRM: Xid (PCI:0000:3b:00): 63, row remapping\nNVRM: Xid (PCI:0000:3b:00): 45, pid=1\n"
        "NVRM: Xid (PCI:0000:3b:00): 48, DBE"
    )
    verdict = CLASSIFIER.text(text, "kernel")
    assert (verdict.cause, verdict.severity) == ("ecc_error", Severity.SEV1)


@pytest.mark.parametrize(
    ("code", "cause", "severity"),
    [
        (13, "cuda_error", 2),
        (38, "hardware_warning", 3),
        (46, "gpu_driver_error", 1),
        (80, "cuda_error", 2),
        (109, "gpu_driver_error", 1),
        (157, "hardware_warning", 3),
        (31, "illegal_memory_access", 2),
        (43, "cuda_error", 2),
        (45, "cuda_error", 2),
        (48, "ecc_error", 1),
        (63, "hardware_warning", 3),
        (64, "ecc_error", 1),
        (74, "nvlink_error", 1),
        (79, "gpu_lost", 1),
        (92, "hardware_warning", 3),
        (94, "ecc_contained", 2),
        (95, "ecc_error", 1),
        (119, "gpu_driver_error", 1),
        (149, "nvlink_error", 1),
        (4242, "cuda_error", 2),
    ],
)
def test_xids(code, cause, severity):
    verdict = CLASSIFIER.xid(code)
    assert (verdict.cause, int(verdict.severity)) == (cause, severity)
    assert str(code) in verdict.reason
    assert CLASSIFIER.text(f"NVRM: Xid (PCI:0000:01:00): {code}, pid=1", "kernel").cause == cause


@pytest.mark.parametrize(
    ("status", "arguments", "cause"),
    [
        (1, {}, "application_error"),
        (2, {}, "configuration_error"),
        (127, {}, "configuration_error"),
        (77, {}, "exited_abnormally"),
        (-9, {}, "killed_from_outside"),
        (137, {}, "killed_from_outside"),
        ("0:9", {}, "killed_from_outside"),
        ("1:0", {}, "application_error"),
        ("SIGKILL", {}, "killed_from_outside"),
        ("kill", {}, "killed_from_outside"),
        (signal.SIGSEGV, {}, "exited_abnormally"),
        (-6, {}, "exited_abnormally"),
        (-64, {}, "exited_abnormally"),
        (-9, {"oom": True}, "host_out_of_memory"),
        (1, {"stderr_tail": "ncclRemoteError: peer gone"}, "connection_reset"),
        (-6, {"stderr_tail": "CUDA error: an illegal memory access was encountered"}, "illegal_memory_access"),
        (1, {"stderr_tail": "CUDA error: uncorrectable ECC error encountered"}, "ecc_error"),
        (1, {"stderr_tail": "mce: [Hardware Error]: Machine check events logged"}, "application_error"),
    ],
)
def test_exits(status, arguments, cause):
    verdict = CLASSIFIER.exit(status, **arguments)
    assert verdict.cause == cause
    assert verdict.severity <= Severity.SEV2 and verdict.action in ("restart", "isolate")


def test_a_clean_exit_is_no_fault():
    assert (CLASSIFIER.exit(0).cause, CLASSIFIER.exit(0).action) == ("finished", "report")
    assert CLASSIFIER.exit(0, "Connection refused").cause == "finished"


def test_a_status_that_is_none():
    with pytest.raises(ValueError, match="no exit status"):
        CLASSIFIER.exit("perhaps")


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("NODE_FAIL", "node_failed"),
        ("DOWN*", "node_failed"),
        ("OUT_OF_MEMORY", "host_out_of_memory"),
        ("CANCELLED by 1000", "killed_from_outside"),
        ("TIMEOUT", "killed_from_outside"),
        ("FAILED", "exited_abnormally"),
        ("COMPLETED", "finished"),
        ("SOMETHING_NEW", "exited_abnormally"),
        ("", "exited_abnormally"),
    ],
)
def test_slurm_states(state, cause):
    assert CLASSIFIER.slurm(state).cause == cause


def test_ordinary_kernel_lines_are_no_faults():
    for line in [
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
        "EXT4-fs (nvme0n1p3): mounted filesystem with ordered data mode",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01",
        "usb 1-1: new high-speed USB device number 2",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "eth0: renamed from veth12",
        "perf: interrupt took too long (2608 > 2500), lowering kernel.perf_event_max_sample_rate",
        'audit: type=1400 apparmor="STATUS"',
    ]:
        assert CLASSIFIER.match(line, "kernel") is None, line


def test_a_generic_rule_is_no_knowledge_of_the_fault():
    assert CLASSIFIER.text("RuntimeError: something odd").cause == "application_error"
    assert CLASSIFIER.match("RuntimeError: something odd") is None
    assert CLASSIFIER.match("RuntimeError: something odd", generic=True).rule == "python-exception"
    assert CLASSIFIER.match("RuntimeError: Connection reset by peer").cause == "connection_reset"


def test_rules_for_one_source_hold_there_only():
    classifier = CLASSIFIER.load({"rule": [{"pattern": "kaboom", "cause": "gpu_lost", "only_from": ["kernel"]}]})
    assert classifier.text("kaboom", "kernel").severity is Severity.SEV1
    assert classifier.text("kaboom", "stderr").rule == "default"


def test_known_causes_by_name():
    assert CLASSIFIER.cause("lost_connection", "no heartbeat for 2 s").action == "isolate"
    assert CLASSIFIER.cause("task_hang").reason == "task hangs"
    with pytest.raises(KeyError):
        CLASSIFIER.cause("gremlins")


def test_head_and_tail_of_a_huge_text_are_read():
    noise = "x " * MAX_TEXT
    assert CLASSIFIER.text("Connection refused\n" + noise).cause == "connection_refused"
    assert CLASSIFIER.text(noise + "\nConnection refused").cause == "connection_refused"


@pytest.mark.parametrize(
    "hostile",
    [
        "a" * 300_000,
        "(" * 50_000,
        "Xid " * 60_000,
        "gloo " * 60_000,
        "error: " * 50_000,
        "NCCL WARN " * 40_000,
        "CUDA " * 60_000,
        "\n" * 100_000,
        "mlx5" * 60_000,
        "E" * 90_000 + "rror",
    ],
)
def test_no_text_takes_long(hostile):
    start = time.process_time()
    CLASSIFIER.text(hostile)
    assert time.process_time() - start < 1.5


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=400), st.sampled_from(["exception", "stderr", "kernel", "nccl", "?"]))
def test_any_text_gets_a_verdict(text, source):
    verdict = CLASSIFIER.text(text, source)
    assert verdict.cause in CLASSIFIER.table.causes and verdict.reason and verdict.rule
    assert json.dumps(verdict.as_dict())
    assert CLASSIFIER.text(text, source) == verdict


@settings(max_examples=100, deadline=None)
@given(st.integers(-200, 400), st.text(max_size=80), st.booleans())
def test_any_exit_gets_a_verdict(status, tail, oom):
    verdict = CLASSIFIER.exit(status, tail, oom)
    if status != 0 or oom:
        assert verdict.severity <= Severity.SEV2
