"""Texts of other programs, as they were seen to write them: docs/behaviour has the texts and the releases."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.labels import Weight, label
from unicron_detector.failures.root_cause import one_line
from unicron_detector.failures.severity import Verdict
from unicron_detector.failures.statements import lines_outside_frames

SEEN = Path(__file__).parents[4] / "docs/behaviour"
CLASSIFIER = default_classifier()
ECC = "CUDA error: uncorrectable ECC error encountered"
TRACEBACK = f"""Traceback (most recent call last):
  File "/data/train.py", line 90, in step
    loss.backward()
    ~~~~~~~~~~~~~^^
torch.AcceleratorError: {ECC}
CUDA kernel errors might be asynchronously reported at some other API call."""


def seen(name: str) -> dict[str, Any]:
    return tomllib.loads((SEEN / name).read_text())


def stderr(text: str) -> Verdict:
    return CLASSIFIER.text(text, "stderr")


# ------------------------------------------------------------------------------------------------------- torchrun
REPORTS = seen("torchrun.toml")["report"]


@pytest.mark.parametrize("report", REPORTS, ids=[f"{each['way']} {each['releases']}" for each in REPORTS])
def test_torchruns_report_names_what_ended_first(report):
    text = report["text"]
    assert stderr(text).cause == report["cause"]
    assert CLASSIFIER.exit(1, text).cause == report["cause"]
    behind = "\n".join(f"n1: {line}" for line in text.splitlines())
    assert stderr(behind).cause == report["cause"]
    said, verdict = CLASSIFIER.last_words(text)  # what is told on alone says the same
    assert verdict is not None and stderr(said).cause == report["cause"]


def test_a_report_alone_says_it_too_behind_whatever_prefix():
    """The ranks' own output may be in files of their own."""
    for report in REPORTS:
        text = report["text"]
        if "record(" not in report["way"] and "fail(" not in report["way"] and "getppid" not in report["way"]:
            alone = text[text.index("torch.distributed.elastic.multiprocessing.errors.Chi") :]
        elif "record(" in report["way"]:
            alone = text[text.index("torch.distributed.elastic.multiprocessing.errors.Chi") :]
            assert "ValueError" in alone or "OSError" in alone
        else:
            continue
        expected = report["cause"] if "import" not in report["way"] else "application_error"
        for prefix in ("", "n1: ", "0: ", "2026-10-31 03:11:02,473 - INFO - ", "i.pretrain/0 "):
            assert stderr("\n".join(prefix + line for line in alone.splitlines())).cause == expected, (prefix, alone)


def test_a_report_whose_beginning_is_lost_blames_no_rank_that_torchrun_ended():
    report = next(each["text"] for each in REPORTS if each["way"] == "sys.exit(3)")
    tail = report[report.index("  exitcode ") :]
    assert stderr(tail).cause == "exited_abnormally"
    assert "exitcode: 3" in CLASSIFIER.last_words(tail)[0]


# ----------------------------------------------------------------------------------------------------- NCCL, RCCL
@pytest.mark.parametrize("line", seen("nccl.toml")["line"], ids=lambda line: " ".join(line["releases"]))
def test_what_nccl_says_of_the_hardware_counts_however_its_release_writes_a_line(line):
    assert label(line["info"]) is Weight.NOISE and label(line["warn"]) is Weight.ERROR
    insufficient = "CUDA driver version is insufficient for CUDA runtime version"
    assert stderr(line["warn"]).cause == "configuration_error"
    for words, cause in (
        ("uncorrectable ECC error encountered", "ecc_error"),
        ("uncorrectable NVLink error detected during the execution", "nvlink_error"),
    ):
        for text in (line["warn"], "2026-11-28T14:26:43.123 " + line["warn"], f"{line['info']}\n{line['warn']}\n"):
            verdict = stderr(text.replace(insufficient, words))
            assert (verdict.cause, verdict.severity) == (cause, 1), text
    own = stderr(line["warn"].replace(insufficient, "invalid device ordinal"))
    assert (own.cause, own.scope) == ("cuda_error", "unknown")  # the script chose no device


GO_ON = [warn for group in seen("nccl.toml")["goes-on"] for _, warn in group["warn"]]


@pytest.mark.parametrize("warn", GO_ON)
def test_a_warning_after_which_nccl_goes_on_is_no_failure(warn):
    for before in ("n1:8963:8963 [0] NCCL WARN ", "[2026-11-28 14:26:43] n1:9041:9041 [0] init.cc:2570 (f) NCCL WARN "):
        assert label(before + warn) is Weight.NOISE
        assert CLASSIFIER.match(before + warn, "stderr") is None
        assert stderr(f"{before}{warn}\nn1:8963:8963 [0] NCCL INFO Using network Socket\n").cause == "no_fault"
    after = "n1:1:1 [0] init.cc:1 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1"
    assert stderr(f"{before}{warn}\n{after}").cause == "configuration_error"


HEALTHY = tomllib.loads((Path(__file__).parents[3] / "data/healthy_starts.toml").read_text())["start"]


@pytest.mark.parametrize("start", HEALTHY, ids=lambda start: start["what"])
def test_no_line_of_a_healthy_start_is_a_failure(start):
    lines = list(lines_outside_frames(start["text"]))
    assert [line for line in lines if (found := CLASSIFIER.match(line, "exception")) and found.severity <= 2] == []
    assert stderr(start["text"]).cause in ("no_fault", "other_software_error")  # of nothing known, if it ended here


def test_information_hides_no_end():
    begins = "n1:1:1 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)\n"
    assert stderr(begins * 2).cause == "no_fault"
    ends = {
        "W0101 00:00:00.000000 77 net.cc:1] Connection reset by peer": "other_software_error",
        'Traceback (most recent call last):\n  File "a.py", line 1, in f': "other_software_error",
        "ValueError: lr": "application_error",
        "Segmentation fault (core dumped)": "exited_abnormally",
        f"RuntimeError: {ECC}": "ecc_error",
    }
    for end, cause in ends.items():
        assert stderr(begins + end).cause == cause
    assert stderr(begins).cause == "other_software_error"  # one line alone is what was told on of an end
    assert stderr(f"RuntimeError: the log has NCCL INFO\n{begins}").cause != "no_fault"
    assert CLASSIFIER.exit(1, begins).cause == "application_error"


# --------------------------------------------------------------------------------------------------------- errno
ERRNO = [(number, text, group["cause"]) for group in seen("errno.toml")["errno"] for number, _, text in group["values"]]


@pytest.mark.parametrize(("number", "text", "cause"), ERRNO)
def test_each_errno_is_its_causes_doing(number, text, cause):
    assert os.strerror(number) == text
    raised = type(OSError(number, text)).__name__
    for said in (f"{raised}: [Errno {number}] {text}: '/data/a'", f"OSError: [Errno {number}] {text}: 'a' -> 'b'"):
        for prefix in ("", "[rank2]: "):
            assert stderr(prefix + said).cause == cause


@pytest.mark.parametrize("number", [17, 18, 20, 21, 36, 39, 40])
def test_a_path_that_cannot_be_is_no_fault_of_the_storage_in_other_languages(number):
    text = os.strerror(number)
    for said in (
        f"Error: {text} (os error {number})",
        f"terminate called\n  what():  filesystem error: cannot rename: {text}",
    ):
        assert stderr(said).scope == "application", said


# ------------------------------------------------------------------------------------------------------ tracebacks
def test_source_lines_are_no_statements():
    text = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/usr/lib/rendezvous.py", line 246, in _env_rendezvous_handler
[rank0]:     store = _create_c10d_store(master_addr, master_port, rank, world_size, timeout)
[rank0]:             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]: RuntimeError: The server socket has failed to listen on any local network address.
/usr/lib/a.py:34: UserWarning: it goes on
  warn("The installed version of bitsandbytes was compiled without GPU support. ")
RuntimeError: last"""
    lines = list(lines_outside_frames(text))
    assert [line.split(": ")[-1] for line in lines] == [
        "Traceback (most recent call last):",
        "The server socket has failed to listen on any local network address.",
        "it goes on",
        "last",
    ]
    assert list(lines_outside_frames("a\n  b\n\nc")) == ["a", "  b", "", "c"]


@pytest.mark.parametrize("received", ["1", "15", "SIGHUP"])
def test_an_unfinished_traceback_leaves_what_was_said_before_it(received):
    begun = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/data/run.py", line 355, in wrapper
    return f(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^"""
    signal = "W0920 09:10:41.194000 84933 site-packages/torch/distributed/elastic/agent/server/api.py:719] "
    signal += f"Received {received} death signal, shutting down workers"
    for before, cause in (
        (signal, "killed_from_outside"),
        ("n1:1:1 [0] init.cc:1 NCCL WARN Cuda failure 'uncorrectable ECC error encountered'", "ecc_error"),
        ("[ERROR] No space left on device", "disk_full"),
    ):
        assert stderr(f"{before}\n{begun}").cause == cause
        assert stderr(f"{before}\n{begun}\nValueError: lr").cause != "disk_full"


@pytest.mark.parametrize("who", ["Rank 1", "[Rank 3]: Rank 3"])
def test_a_barrier_that_a_peer_left_is_the_networks(who):
    said = f"{who} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
    verdict = stderr(f"RuntimeError: {said} Please check rank 0 logs for faulty rank.\n Original exception:")
    assert (verdict.cause, verdict.severity) == ("other_network_error", 3)


# --------------------------------------------------------------------------------------------- other accelerators
def test_a_busy_device_is_seen_in_its_line_alone_and_a_graph_blames_no_device():
    busy = "EJ0001: 2024-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training"
    held = CLASSIFIER.match(f"{busy} process is running.", "exception")
    assert held is not None and (held.cause, held.rule) == ("cuda_error", "accelerator-busy")
    assert stderr(f"ValueError: {busy}").cause == "application_error"
    recent = "[ERROR] RecentErrMsg: [PID: 3698671] 2026-06-24-16:04:09.980.816 Resource_Busy(EL0005): The resources"
    assert stderr(f"{recent} are busy.").rule == "accelerator-busy"
    graph = "[19:08:34.165045][PT_BRIDGE ][error][tid:4] graph.cpp: 599Graph compile failed. synStatus=synStatus 26"
    for line in (graph, "[19:08:34][PASS_MANAGER][error][tid:4] Graph optimization failed pass: loadTpcKernels"):
        assert stderr(line).scope == "application"


def codes() -> Iterator[tuple[str, str, int]]:
    for library in seen("accelerators.toml").values():
        for form in library["form"]:
            for code, means in library["codes"].items():
                yield form.replace("%", code), means["cause"], means["severity"]


@pytest.mark.parametrize(("text", "cause", "severity"), list(codes()))
def test_codes_of_other_accelerators(text, cause, severity):
    for whole in (text, "\n".join(["Traceback (most recent call last):", '  File "a.py", line 1, in f', text])):
        verdict = stderr(whole)
        assert (verdict.cause, verdict.severity) == (cause, severity), verdict
    if severity == 1:
        quoted = stderr(f"ValueError: cannot parse {text!r}")
        assert quoted.scope != "hardware"  # what an application quotes blames no node


def test_a_librarys_error_of_the_hardware_stands_above_an_exception_that_says_nothing():
    lines = (
        "2026-Sep-01 10:11:12.200201 2200:2301 ERROR   NRT:nrt_infodump  Failure: NRT_EXEC_HW_ERR_HBM_UE in nrt",
        "RuntimeError: Bad StatusOr access: INTERNAL: RunNeuronCCImpl: error condition !(error != 400)",
    )
    assert stderr("\n".join(lines)).cause == "ecc_error"
    assert (
        stderr(f"{lines[0]}\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB").cause == "cuda_out_of_memory"
    )


@pytest.mark.parametrize("prefix", ["", "[rank2]: ", "0: "])
def test_torch_npus_exception_carries_what_cann_says_of_the_cause(prefix):
    """After public reports: a device that another process holds, a kernel that failed."""
    held = """Traceback (most recent call last):
  File "/data/train.py", line 51, in <module>
    dist.barrier()
RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64
        tsd client wait response fail, device response code[1]. unknown device error.[FUNC:WaitRsp]
        stream setup failed, retCode=0x7020010.[FUNC:SyncGetDevMsg][FILE:api_impl.cc][LINE:4643]
        rtGetDevMsg execute failed, reason=[driver error:internal error][FUNC:FuncErrorReason]"""
    failed = """EXCEPTION STREAM:
  Message info[0]:RTS_HWTS: aicore exception, slot_id=31, stream_id=3
Traceback (most recent call last):
  File "/data/train.py", line 51, in <module>
    train()
RuntimeError: The Inner error is reported as above.
 Since the operator is called asynchronously, the stacktrace may be inaccurate."""
    after = held.replace("stream setup failed", "there is an exception of fftsplus aicore error, core id is 12")
    for text, cause in ((held, "gpu_driver_error"), (failed, "cuda_error"), (after, "cuda_error")):
        whole = "\n".join(prefix + line for line in text.splitlines())
        for said in (whole, one_line(CLASSIFIER.last_words(whole)[0])):  # in full, and as it is told on
            verdict = stderr(said)
            assert (verdict.cause, verdict.severity) == (cause, 2), said
    bare = """[ERROR] 2026-10-11-15:09:34 (PID:29, Device:0, RankID:101) ERR00100 PTA call acl api failed.
EI0002: [PID: 29] 2026-10-11-15:09:34.713.335 The wait execution of the Notify register times out.
        Possible Cause: 1. An exception occurs during the execution on some NPUs in the cluster."""
    whole = "\n".join(prefix + line for line in bare.splitlines())
    assert (stderr(whole).cause, stderr(whole).severity) == ("nccl_timeout", 3)
    quoted = held.replace("[ERROR] HCCL error in:", "the helper's log is")
    assert stderr(quoted).scope != "hardware"
    program = "RuntimeError: uncorrectable ECC error encountered"  # a guess acquits nobody
    assert (stderr(program).severity, stderr(program).scope) == (2, "unknown")


# ---------------------------------------------------------------------------------------------------------- Slurm
def slurms_texts() -> Iterator[tuple[str, str]]:
    table = seen("slurm-texts.toml")
    for each in table["slurmstepd"]:
        yield from ((before + each["text"], each["cause"]) for before in table["before"])
    yield from ((each["text"], each["cause"]) for each in table["srun"])


@pytest.mark.parametrize(("text", "cause"), list(slurms_texts()))
def test_slurms_own_words(text, cause):
    assert stderr(text).cause == cause
    assert stderr(f"step 12 done\n{text}\n").cause == cause
    assert stderr(f"{TRACEBACK}\n{text}\n").cause == "ecc_error"


# ------------------------------------------------------------------------------------------------------- prefixes
PREFIXES = {
    "torchx": "i.pretrain/0 ",
    "pdsh": "worker-1: ",
    "pdsh, a word": "alpha: ",
    "a time": "2026-10-31T03:11:02.473Z ",
    "a time in brackets": "[2026-10-31 03:11:02] ",
    "ts": "Oct 31 03:11:02 ",
    "syslog": "Oct 31 03:11:02 n1 train[4242]: ",
    "syslog, RFC 5424": "<13>1 2026-10-31T03:11:02.473Z n1 train 4242 - - ",
    "Kubernetes": "2026-10-31T03:11:02.473333333Z stderr F ",
    "kubectl": "[pod/train-0/main] ",
    "docker compose": "trainer-0  | ",
    "foreman": "03:11:02 train.1  | ",
    "torch": "[rank0]: ",
    "torchrun": "[trainer3]:",
    "torchrun's template": "r12i0n8:3: ",
    "srun --label": "0: ",
    "srun --label, wide": " 12: ",
    "mpirun": "[1,3]<stderr>:",
    "PRRTE": "[prterun-n1-4242@1,3]<stderr>: ",
    "SageMaker": "[1,mpirank:0,algo-1]<stderr>:",
    "MPICH": "[0] ",
    "Ray": "(RayTrainWorker pid=4242, ip=10.0.0.3) ",
    "SkyPilot": "(head, rank=0, pid=4242) ",
    "Determined": "[rank=1] || ",
    "several": "2026-10-31 03:11:02 n1: [rank0]: ",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_lines_behind_a_prefix_say_the_same(prefix):
    lines = [prefix + line for line in ("step 12 done", *TRACEBACK.splitlines())]
    verdict = stderr("\n".join(lines))
    assert (verdict.cause, verdict.severity) == ("ecc_error", 1)
    assert CLASSIFIER.last_words("\n".join(lines))[0].startswith("torch.AcceleratorError: ")
    late = [f"{prefix.replace('03:11:02', f'03:11:{number}')}{line}" for number, line in enumerate(lines, 10)]
    assert stderr("\n".join(late).replace(prefix + prefix, prefix)).severity == 1
    without_head = "\n".join(lines[2:])  # the tail of a log
    assert stderr(without_head).severity == 1
    full = "\n".join(lines).replace(
        f"torch.AcceleratorError: {ECC}", "OSError: [Errno 28] No space left on device: 'a'"
    )
    assert stderr(full).cause == "disk_full"


@pytest.mark.parametrize("prefix", [each for name, each in PREFIXES.items() if name != "pdsh, a word"])
@pytest.mark.parametrize("line", [f"torch.AcceleratorError: {ECC}", f"RuntimeError: {ECC}"])
def test_one_line_behind_a_prefix_says_the_same(prefix, line):
    for text in (prefix + line, f"{prefix}step 12 done\n{prefix}{line}\n"):
        assert stderr(text).severity == 1
    for own in ("ValueError", "KeyError", "app.ParseError"):
        assert stderr(f"{prefix}{own}: {line!r}").scope != "hardware"


@pytest.mark.parametrize("level", ["INFO", "DEBUG", "WARNING", "ERROR"])
@pytest.mark.parametrize(
    "header",
    [
        "2026-10-31 03:11:02,473 - Trainer - {} - [rank7]: ",
        "{}:launcher:[rank7]: ",
        "2026-10-31 03:11:02 {} n1: ",
        "[2026-10-31 03:11:02] [{}] (RayTrainWorker pid=4242, ip=10.0.0.3) ",
        "2026-10-31 03:11:02,473 - {} - ",
    ],
)
def test_the_level_at_which_a_parent_relays_is_not_the_childs(level, header):
    before = header.format(level)
    lines = [before + line for line in TRACEBACK.splitlines()]
    own = before.partition("[rank7]")[0] + "retries: Connection refused by peer"
    assert stderr("\n".join([*lines, own])).severity == 1
    assert stderr(f"{before}Segmentation fault (core dumped)").cause == "exited_abnormally"


def test_what_a_logger_says_at_level_info_is_still_no_end():
    text = "2026-10-31 03:11:02,473 - Trainer - INFO - RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert stderr(f"{text} was caught\nValueError: lr").cause == "application_error"
    logged = (
        f"2026-10-31 03:11:02,473 - Trainer - INFO - cannot send\n{TRACEBACK}\n2026-10-31 03:11:02,473 - Trainer - INFO"
    )
    assert stderr(f"{logged} - Connection refused").cause == "ecc_error"


def test_an_oom_kill_that_slurm_counts_stands_above_an_exception_that_says_nothing() -> None:
    killed = "slurmstepd: error: Detected 8 oom-kill event(s) in step 59137890.batch cgroup. Some of your processes may"
    for end, cause in (
        ("ray.tune.error.TuneError: ('Trials did not complete', [seed:5591])", "host_out_of_memory"),
        ("ValueError: lr", "application_error"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", "cuda_out_of_memory"),
    ):
        assert stderr(f"{end}\n{killed}").cause == cause


def test_slurms_words_that_an_application_quotes_blame_no_node() -> None:
    quoted = 'RuntimeError: the log had "srun: error: Node failure on n7" in it'
    known = default_classifier().text(quoted, "stderr")
    assert known is None or known.severity > 1
    said = default_classifier().text("srun: error: Node failure on n7", "stderr")
    assert said is not None and said.cause == "node_failed"
