"""Reading why a pending element does not start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unicron_ctl.shared.slurm.pending_reasons import Bar, bar_of, barred, explain_pending, refusal_seconds, understand
from unicron_ctl.shared.slurm.slurm_client import ElementInfo

LIMITS = (
    "JobArrayTaskLimit Licenses AccountingPolicy PowerNotAvail PowerReserved QOSMaxJobsPerUserLimit QOSGrpNodeLimit "
    "QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit QOSGrpWallLimit "
    "QOSMaxCpuPerJobLimit QOSMaxNodePerUserLimit QOSMaxWallDurationPerJobLimit QOSMinCpuNotSatisfied QOSMinGRES "
    "QOSMaxGRESPerUser QOSMaxGRESMinutesPerJob QOSGrpBillingRunMinutes QOSJobLimit QOSResourceLimit QOSTimeLimit "
    "AssocGrpNodeLimit AssocGrpGRES AssocGrpGRESRunMinutes AssocMaxJobsLimit AssocMaxNodePerJobLimit AssocGrpBBMinutes "
    "AssocMaxUnknownPerNode AssociationJobLimit AssociationResourceLimit MaxNodePerAccount MaxJobsPerAccount "
    "MaxBillingPerAccount MaxSubmitJobsPerAccount QOSGrpOfThingsToCome AssocMaxWhateverPerUser"
).split()
OTHERS = (
    "Dependency DependencyNeverSatisfied Reservation PartitionDown "
    "PartitionInactive PartitionTimeLimit PartitionNodeLimit PartitionConfig InvalidAccount InvalidQOS QOSNotAllowed "
    "AccountNotAllowed QOSUsageThreshold BadConstraints Constraints MaxMemPerLimit DeadLine BurstBufferResources "
    "BurstBufferStageIn FrontEndDown"
).split()
FREE = [
    "",
    "None",
    "Priority",
    "Resources",
    "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
    "NodeDown",
    "Prolog",
    "Cleaning",
]
FREE += ["Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "SchedDefer"]
FREE += ["FedJobLock", "AReasonOfAReleaseToCome", "NonZeroExitCode"]


def _element(reason: str, restarts: int = 0, starts: float | None = None) -> ElementInfo:
    return ElementInfo("7", 2, "9", "PENDING", None, reason, "", "", "", restarts, starts=starts)


@pytest.mark.parametrize("reason", LIMITS)
def test_limits_of_all_kinds_keep_an_element_from_starting_until_others_end(reason: str) -> None:
    found = understand(reason)
    assert found.bar is Bar.LIMIT and found.words and barred(_element(reason), 0.0)


@pytest.mark.parametrize("reason", OTHERS)
def test_what_somebody_has_to_change_first_keeps_it_from_starting(reason: str) -> None:
    found = understand(reason)
    assert found.bar is Bar.OTHER and found.words and barred(_element(reason), 0.0)


@pytest.mark.parametrize("reason", FREE)
def test_reasons_of_nodes_and_unknown_ones_keep_nobody_from_starting(reason: str) -> None:
    assert understand(reason).bar is Bar.NOTHING and not barred(_element(reason), 0.0)


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "job requeued in held state"])
def test_a_hold_is_a_hold_and_no_bar(reason: str) -> None:
    assert understand(reason).bar is Bar.HOLD and _element(reason).held and not barred(_element(reason), 0.0)


@pytest.mark.parametrize(
    ("reason", "bar"),
    [
        ("launch failed requeued held", Bar.HOLD),
        ("job requeued in held state", Bar.HOLD),
        ("job requeued in special exit state", Bar.HOLD),
        ("Reservation r_1 was deleted", Bar.HOLD),
        ("Reservation r_1 is invalid", Bar.HOLD),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", Bar.NOTHING),
    ],
)
def test_a_reason_means_the_same_with_the_underscores_of_scontrol(reason: str, bar: Bar) -> None:
    found, other = _element(reason), _element(reason.replace(" ", "_"))
    assert understand(other.reason) == understand(reason) and understand(reason).bar is bar
    assert other.held == found.held == (bar is Bar.HOLD)
    assert refusal_seconds(other.reason) == refusal_seconds(reason)


def test_an_element_that_slurm_requeued_too_often_does_not_start_although_nobody_holds_it() -> None:
    assert not _element("JobHoldMaxRequeue").held and barred(_element("JobHoldMaxRequeue"), 0.0)


def test_a_wait_after_a_requeue_is_slurms_and_a_later_begin_time_is_somebodys_wish() -> None:
    assert bar_of(_element("BeginTime", restarts=1, starts=1120.0), 1000.0) is Bar.NOTHING
    assert bar_of(_element("BeginTime", restarts=1, starts=87400.0), 1000.0) is Bar.OTHER
    assert bar_of(_element("BeginTime", restarts=0, starts=1120.0), 1000.0) is Bar.OTHER
    assert "--begin" in explain_pending(_element("BeginTime", starts=1120.0), 1000.0)


@pytest.mark.parametrize(
    "reason",
    [
        "BadConstraints",
        "ReqNodeNotAvail, UnavailableNodes:n1",
        "ReqNodeNotAvail,_May_be_reserved_for_other_job",
        "Nodes required for job are DOWN, DRAINED or reserved",
    ],
)
def test_a_pin_that_waits_its_turn_is_not_told_to_be_refused(reason: str, snapshot) -> None:
    """Defect: of a node that another job has Slurm says ReqNodeNotAvail, too."""
    element = replace(_element(reason), required_nodes=frozenset({"n1"}))
    assert explain_pending(element, 0.0) == snapshot


def test_a_limit_is_named_in_plain_words(snapshot) -> None:
    limits = (
        "QOSMaxJobsPerUserLimit",
        "AssocGrpNodeLimit",
        "MaxNodePerAccount",
        "QOSMinCpuNotSatisfied",
        "JobArrayTaskLimit",
        "AssocMaxGRESPerNode",
    )
    assert {reason: explain_pending(_element(reason), 0.0) for reason in limits} == snapshot
