"""What a node's words, Slurm's states and wait statuses mean: pure."""

from __future__ import annotations

import pytest

from unicron_ctl.controller.judge import evidence
from unicron_ctl.controller.judge.judge import JUDGES
from unicron_ctl.controller.model.finding import What
from unicron_ctl.controller.sense.slurm_states import describe
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_detector.failures.classify import default_classifier
from unicron_detector.health.kernel_log import pid_in

PAGE_FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault"
OOM = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:900000kB, anon-rss:800000kB"


def test_every_kind_of_finding_has_a_judge():
    assert set(JUDGES) == set(What), "one without would set its job aside"


@pytest.mark.parametrize(
    ("text", "code", "pid", "own_exit", "expected"),
    [
        (PAGE_FAULT, -6, 4242, (-6,), True),
        (PAGE_FAULT, -6, 7, (-6,), True),  # 4242 is no rank's here: a container's numbers differ
        (PAGE_FAULT, -9, 7, (-9,), False),  # nothing of CUDA kills a process with SIGKILL
        (OOM, -9, 4242, (-9,), True),
        (OOM, -9, 7, (-9,), False),  # another process was killed
        (OOM, 1, 4242, (1,), False),
        (OOM, 1, 5, (1, "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed."), True),
        ("python[4242]: segfault at 0 ip 00007f error 4 in libtorch.so", -11, 4242, (-11,), True),
        ("python[4242]: segfault at 0 ip 00007f error 4 in libtorch.so", 1, 4242, (1,), False),
    ],
)
def test_which_lines_explain_which_ends(text, code, pid, own_exit, expected):
    classifier = default_classifier()
    verdict = classifier.match(text, "kernel")
    said = records.NodeEvent(
        node="n1",
        source="kernel",
        text=text,
        code="",
        count=1,
        at=0.0,
        pid=pid_in(text),
        mark="a:1",
        cause=verdict.cause,
        severity=int(verdict.severity),
        scope=verdict.scope,
        rule=verdict.rule,
        action="report",
        reason="",
    )
    assert evidence.explains(said, code, pid, classifier.exit(*own_exit), [pid]) is expected


@pytest.mark.parametrize(
    ("state", "exit_code", "cause"),
    [
        ("OUT_OF_MEMORY", "0:125", "host_out_of_memory"),
        ("NODE_FAIL", "", "node_failed"),
        ("TIMEOUT", "", "killed_from_outside"),
        ("PREEMPTED", "", "killed_from_outside"),
        ("CANCELLED", "", "killed_from_outside"),
        ("FAILED", "0:9", "killed_from_outside"),
        ("FAILED", "137:0", "killed_from_outside"),
        ("FAILED", "0:11", "exited_abnormally"),
        ("FAILED", "1:0", "application_error"),
        ("FAILED", "", "exited_abnormally"),
    ],
)
def test_states_and_exit_codes_of_elements(state, exit_code, cause):
    element = ElementInfo("7", 1, "9", state, None, "", "x", "ann", "", 0, exit_code)
    assert evidence.element_end(default_classifier(), element).cause == cause
    assert state in describe(element)


def test_elements_that_run_or_ended_well_say_nothing():
    for state in ("RUNNING", "PENDING", "COMPLETED", "COMPLETING"):
        element = ElementInfo("7", 1, "9", state, "n1", "", "x", "ann", "", 0)
        assert evidence.element_end(default_classifier(), element) is None


def test_the_tasks_wait_status_of_a_hint():
    classifier = default_classifier()
    assert evidence.task_end(classifier, 9).cause == "killed_from_outside"
    assert evidence.task_end(classifier, 256).cause == "application_error"
    for nothing in (None, 0, 0x7F):
        assert evidence.task_end(classifier, nothing) is None
