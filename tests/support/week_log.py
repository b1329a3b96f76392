"""The log of a week with failures of three jobs, for the weekly report."""

from __future__ import annotations

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record


def failure(cause: str, node: str, severity: int = 2) -> records.FailureDetected:
    usual = {"kind_of_failure": "rank", "slots": [1], "action": "restart", "detected_by": "exit", "source": "agent"}
    return records.FailureDetected(cause=cause, severity=severity, node=node, **usual)  # type: ignore[arg-type]


def healed(seconds: float, nodes: int = 36) -> records.JobHealed:
    return records.JobHealed(failures=[1], cause="oom", seconds=seconds, lost_seconds=seconds, nodes=nodes)


LOG: list[tuple[float, str, Record]] = [
    (5.0, "7", failure("before", "n1")),
    (10.0, "7", failure("unknown", "n1", 3)),
    (11.0, "7", records.FailureVerdict(failure=2, cause="gpu_lost", severity=1)),
    (12.0, "7", records.NodeLost(node="n1", element=0)),
    (13.0, "", records.NodeIsolated(node="n1")),
    (20.0, "7", healed(100.0)),
    (30.0, "8", failure("oom", "n2")),
    (31.0, "8", failure("oom", "n2")),
    (40.0, "8", records.JobEnded(code=1)),
    (50.0, "", records.NeedsAdmin(key="slurm", reason="Slurm does not answer")),
    (60.0, "", records.NeedsAdmin(key="slurm", over=True)),
    (99.0, "9", failure("after", "n3")),
]


def log() -> list[Event]:
    return [Event(number + 1, at, job, 1, record) for number, (at, job, record) in enumerate(LOG)]
