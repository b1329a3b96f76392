"""Which of a process's last statements counts: labels, chains, aborts, frames, and whose socket it was."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.labels import Weight, label
from unicron_detector.failures.statements import exception, statements

CLASSIFIER = default_classifier()
FRAMES = "\n".join(
    f"frame #{number}: c10d::{name}() + 0x57 (0x7a70 in /opt/torch/lib/libtorch_cuda.so)"
    for number, name in enumerate(("connection_reset", "Watchdog caught collective operation timeout", "clone"))
)


def cause(*lines: str, exit_code: int = 1) -> str:
    return CLASSIFIER.exit(exit_code, "\n".join(lines)).cause


@pytest.mark.parametrize(
    ("line", "weight"),
    [
        ("n1:70:70 [0] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file", Weight.NOISE),
        ("n1:70:70 [0] transport/net_ib.cc:10 NCCL WARN NET/IB : Got completion", Weight.ERROR),
        ("[W socket.cpp:601] [c10d] The client socket has failed to connect", Weight.NOISE),
        ("[rank0]:[E1101 03:11:40.1 ProcessGroupNCCL.cpp:1896] x".removeprefix("[rank0]:"), Weight.ERROR),
        ("F0302 11:12:13.400000 90211 reader.cc:201] Check failed", Weight.FATAL),
        ("W0302 11:12:13.400000 90211 reader.cc:201] slow", Weight.NOISE),
        ("2025-01-05 10:11:12.100000: W tensorflow/dso_loader.cc:64] Could not load dynamic library", Weight.NOISE),
        ("E0923 11:14:11.123000 139 torch/distributed/elastic/multiprocessing/api.py:869] failed", Weight.ERROR),
        ("2025-03-01 01:00:00,100 - trainer - WARNING - Connection timed out", Weight.NOISE),
        ("2025-01-01 10:00:00.000 | INFO     | data:open:12 - connection refused", Weight.NOISE),
        ("[2025-01-01 00:00:00,000] [ERROR] [launch.py:321:sigkill_handler] exits", Weight.ERROR),
        ("WARNING:root:No route to host", Weight.NOISE),
        ("CRITICAL:root:stopped", Weight.ERROR),
        ("[NeMo W 2025-01-01 00:00:00 nemo_logging:349] timed out", Weight.NOISE),
        ('time="2025-01-01" level=warning msg="connection reset"', Weight.NOISE),
        ("/env/torch/cuda/__init__.py:60: FutureWarning: NVML_ERROR_LIB_RM_VERSION_MISMATCH", Weight.NOISE),
        ("[1736.1] [n4:5012 :0] ib_mlx5_log.c:171  UCX  ERROR Remote access error", Weight.ERROR),
        ("[1736.1] [n4:5012 :0] ib.c:171  UCX  WARN  retry", Weight.NOISE),
        ("slurmstepd: error: pyxis: couldn't start container", Weight.ERROR),
        ("RuntimeError: unhandled system error (run with NCCL_DEBUG=INFO for details)", None),
        ("loss is 3.2 in ERROR_BOUND", None),
    ],
)
def test_writers_label_their_lines(line, weight):
    assert label(line) is weight


def test_an_abort_names_its_reason_and_its_frames_are_no_words():
    what = "  what():  [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error"
    lines = ["terminate called after throwing an instance of 'std::runtime_error'", what + " encountered", FRAMES]
    verdict = CLASSIFIER.exit(-6, "\n".join(lines))
    assert (verdict.cause, verdict.severity) == ("ecc_error", 1)
    assert cause("thread '<unnamed>' panicked at src/a.rs:1:2:", "index out of bounds", FRAMES) == "exited_abnormally"
    assert cause("*** SIGABRT received at time=1 on cpu 2 ***", FRAMES, exit_code=-6) == "exited_abnormally"


def test_information_and_warnings_are_never_the_cause():
    lines = (
        "n1:1:1 [0] NCCL INFO NET/Plugin: cannot open shared object file: No such file or directory",
        "W0101 00:00:00.000000 77 net.cc:1] Connection reset by peer",
    )
    assert cause(*lines, exit_code=-9) == "killed_from_outside"
    assert CLASSIFIER.text("\n".join(lines), "stderr").rule == "default"
    assert cause(*lines, "n1:1:9 [0] NCCL WARN NET/IB : Got completion with error 12") == "other_network_error"


def test_the_last_exception_counts_and_handled_ones_do_not():
    first = (
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "OSError: [Errno 28] No space left on device",
    )
    last = ("Traceback (most recent call last):", '  File "b.py", line 2', "KeyError: 'x'")
    assert cause(*first, "step 3 done", *last) == "application_error"
    assert cause("ERROR:up:cannot send", *first, "INFO:train:goes on", *last) == "application_error"
    assert cause(*last, "step 3 done", *first) == "disk_full"


@pytest.mark.parametrize(
    ("first", "sentence", "last", "expected"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 0, "ValueError: step failed", "ecc_error"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, "KeyError: 'x'", "ecc_error"),
        ("KeyError: 'x'", 1, "torch.OutOfMemoryError: CUDA out of memory.", "cuda_out_of_memory"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", 1, "KeyError: 'x'", "application_error"),
        ("OSError: [Errno 116] Stale file handle", 0, "ValueError: no data", "file_system_error"),
    ],
)
def test_chains_of_exceptions(first, sentence, last, expected):
    link = (
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    )[sentence]
    head = "Traceback (most recent call last):"
    frame = '  File "a.py", line 1, in f\n    timed_out(socket)\n    ^^^^^^^^^'
    assert cause(head, frame, first, "", link, "", head, frame, last) == expected


def test_groups_of_exceptions_are_read_and_a_peers_error_yields():
    text = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 5, in <module>
  | ExceptionGroup: many (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 3, in f
    | torch.OutOfMemoryError: CUDA out of memory.
    +---------------- 2 ----------------
    | ConnectionResetError: [Errno 104] Connection reset by peer
    +------------------------------------"""
    assert cause(text) == "cuda_out_of_memory"


def test_a_launchers_report_yields_to_what_its_child_said():
    report = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "Root Cause (first observed failure):",
        "  exitcode  : 1 (pid: 13)",
    )
    assert cause("RuntimeError: CUDA error: misaligned address", *report) == "illegal_memory_access"
    assert cause(*report) == "application_error"  # as for a process that ends with 1
    told = ("[rank1]: RuntimeError: NCCL error: remote process exited", "[rank3]: ValueError: lr", *report)
    assert cause(*told) == "application_error"


@pytest.mark.parametrize(("code", "expected"), [(-9, "killed_from_outside"), (-11, "exited_abnormally")])
def test_a_report_and_the_line_before_it_say_the_same(code, expected):
    head = "ChildFailedError:", "Root Cause (first observed failure):"
    field = f"  exitcode  : {code} (pid: 13)"
    assert cause(*head, field) == expected
    assert CLASSIFIER.text(field, "stderr").cause == expected  # what is left of it where its head was cut off
    assert cause(f"api.py:732] failed (exitcode: {code}) local_rank: 0 (pid: 13) of binary: python3") == expected
    assert cause(f"  traceback : Signal {-code} (SIGOWN) received by PID 13") == expected


def test_a_programs_own_field_of_that_name_is_no_report():
    assert cause("ValueError: lr", "  exitcode: 0") == "application_error"
    assert "Root Cause" not in CLASSIFIER.last_words("step 1 done\n  exitcode: -9\n")[0]


@pytest.mark.parametrize(
    ("file", "error", "expected"),
    [
        ("multiprocessing/connection.py", "ConnectionResetError: [Errno 104] Connection reset by peer", "worker_died"),
        ("torch/utils/data/dataloader.py", "EOFError", "worker_died"),
        ("multiprocessing/managers.py", "ConnectionRefusedError: [Errno 111] Connection refused", "worker_died"),
        ("concurrent/futures/process.py", "BrokenPipeError: [Errno 32] Broken pipe", "worker_died"),
        ("urllib3/connection.py", "TimeoutError: [Errno 110] Connection timed out", "service_unreachable"),
        ("site-packages/redis/connection.py", "ConnectionResetError: [Errno 104] x", "service_unreachable"),
        ("own/net.py", "ConnectionResetError: [Errno 104] Connection reset by peer", "connection_reset"),
    ],
)
def test_the_frames_tell_whose_socket_it_was(file, error, expected):
    lines = ("Traceback (most recent call last):", f'  File "/usr/lib/{file}", line 9, in f', "    recv()", error)
    verdict = CLASSIFIER.exit(1, "\n".join(lines))
    assert verdict.cause == expected
    assert (verdict.scope == "network") == (expected == "connection_reset")


def test_what_frames_name_is_no_reason_for_other_errors():
    lines = ("Traceback (most recent call last):", '  File "/x/multiprocessing/pool.py", line 9, in f', "KeyError: 'x'")
    assert cause(*lines) == "application_error"


LINES = """Traceback (most recent call last):
  File "a.py", line 1
    x = 1
ValueError: x
frame #0: f()

  | ExceptionGroup: x
    +---------------- 1 ----------------
what(): y
terminate called
Exception ignored in: x
During handling of the above exception, another exception occurred:
[rank0]: [rank1]: x
3: 3: x
\x1b[31m
NCCL INFO""".split("\n")


@settings(max_examples=cases(300), deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_any_order_of_lines_is_read(lines):
    said, _ = CLASSIFIER.last_words("\n".join(lines))
    assert isinstance(said, str)
    assert all(one.text for one in statements("\n".join(lines)))


@pytest.mark.parametrize(
    "line", ["[" * 9000, "(" * 9000, "a: " * 3000, " | " * 3000, "1: " * 3000, "x." * 4000 + "Error", "-" * 9000]
)
def test_hostile_lines_take_no_time(line):
    began = time.process_time()
    CLASSIFIER.last_words("\n".join([line] * 20))
    assert time.process_time() - began < 5.0


NCCL_SUMMARY = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (  # a summary yields to what it sums up
            ("n1:70:90 [1] net_ib.cc:180 NCCL WARN NET/IB : Got completion from peer with status=12", NCCL_SUMMARY),
            "other_network_error",
        ),
        (
            (
                "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some step tasks have been OOM Killed.",
                "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
            ),
            "host_out_of_memory",
        ),
        (  # who failed yields to what it failed of
            (
                "slurmstepd: error: pyxis:     FATAL ERROR:Failed to write to output: No space left on device",
                "slurmstepd: error: pyxis: couldn't start container",
            ),
            "disk_full",
        ),
        (  # a parent's report of a compiler yields to the compiler
            (
                "kernel.cu:3:10: fatal error: cuda.h: No such file or directory",
                "compilation terminated.",
                "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.",
            ),
            "configuration_error",
        ),
        (  # a warning that carries a backtrace is torch's way to tell an error
            (
                "[rank2]:[W729 10:15:17.5 TCPStore.cpp:125] [c10d] recvValue failed: Connection reset by peer",
                "Exception raised from recvBytes at Utils.hpp:675 (most recent call first):",
                FRAMES,
            ),
            "connection_reset",
        ),
        (  # TensorFlow logs what failed an operation as a warning
            ("W tensorflow/core/framework/op_kernel.cc:968] Resource exhausted: OOM when allocating tensor",),
            "cuda_out_of_memory",
        ),
        (  # help texts list what may have happened
            (
                "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.",
                "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high",
                "memory usage. (2) ray stop --force is called. (3) Connection refused.",
            ),
            "exited_abnormally",
        ),
        (("value: Connection", "error: the answer was 42", "KeyError: 'loss'"), "application_error"),
    ],
)
def test_what_says_how_yields_to_what_says_why(lines, expected):
    assert cause(*lines) == expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch.distributed.DistStoreError: timed out", "torch.distributed.DistStoreError"),
        ("c10::Error: x", "c10::Error"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("value: 3", None),
        ("the Error: 3", None),
    ],
)
def test_speakers_and_statements_read_one_type(line, named):
    found = exception(line)
    assert (found.group(1) if found else None) == named
