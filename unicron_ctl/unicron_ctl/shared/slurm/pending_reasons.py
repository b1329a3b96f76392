"""Explains why Slurm does not start a pending element, and whether it could start at all. Pure.

Slurm has some 200 reasons, and each release adds more, so they are read by families. Reasons about nodes bar no
element, since another node may do; neither does an unknown reason: a request that Slurm refuses is repeated less and
less often. Source: squeue(1), JOB REASON CODES; Slurm's job_state_reason.c, 22.05 to 26.05.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from unicron_ctl.shared.slurm.slurm_client import ElementInfo, with_blanks

REQUEUE_WAIT = 300.0  # seconds: Slurm delays a requeued element by two minutes; a later begin time is somebody's wish


class Bar(enum.Enum):
    """The obstacle that keeps an element from starting."""

    NOTHING = "nothing"  # nodes, its turn, or a moment
    LIMIT = "limit"  # ends by itself when others of the same limit end
    HOLD = "hold"  # somebody has to release it
    OTHER = "other"  # ends when something else happens: another job, a time, an admin


@dataclass(frozen=True)
class Reason:
    """Why a pending element waits."""

    bar: Bar
    words: str  # one clause for people


# The seconds for which an element is not ordered to start on a node again after Slurm has given such a reason. The
# first reason is about the node as such, the second about its present state.
_REFUSALS = ((re.compile(r"(Bad)?Constraints"), 3600.0), (re.compile(r"ReqNodeNotAvail|Nodes required"), 30.0))
_FREE = Reason(Bar.NOTHING, "")
_RELEASE = "and Slurm holds it: `scontrol release`"
# The first line whose expression matches the beginning of the reason counts.
_TABLE: tuple[tuple[str, Bar, str], ...] = (
    (r"(None)?$", Bar.NOTHING, "Slurm's scheduler has not looked at it yet"),
    (r"Priority", Bar.NOTHING, "jobs of higher priority come first"),
    (r"Resources", Bar.NOTHING, "it waits for nodes"),
    (r"ReqNodeNotAvail|NodeDown|Nodes required", Bar.NOTHING, "the node that it was given is not available"),
    (r"BeginTime", Bar.NOTHING, "Slurm lets a requeued element wait for a while"),
    (r"Prolog|Cleaning|FedJobLock|SchedDefer", Bar.NOTHING, "Slurm is preparing its start"),
    (r"JobHeldUser", Bar.HOLD, "its user holds it: `scontrol release`"),
    (r"JobHeldAdmin", Bar.HOLD, "it is held"),
    (r"JobHoldMaxRequeue", Bar.HOLD, "it was requeued more often than Slurm allows: `scontrol release`"),
    (r"Reservation( .*was d|D)eleted", Bar.HOLD, f"its reservation is over or was deleted, {_RELEASE}"),
    (r"Reservation( .*is i|I)nvalid", Bar.HOLD, f"its reservation is invalid, {_RELEASE}"),
    (r"job requeued in special exit state", Bar.HOLD, f"it was requeued to be looked at, {_RELEASE}"),
    (r"launch failed.*held", Bar.HOLD, "Slurm could not launch it, and holds it: see slurmctld's log"),
    (r"BurstBufferOperation", Bar.HOLD, "its burst buffer failed: see slurmctld's log"),
    (r".*\bheld\b", Bar.HOLD, "it is held"),
    (r"JobArrayTaskLimit|ArrayTaskLimit", Bar.LIMIT, "the array may run no more elements at once (--array=...%N)"),
    (r"Licen[sc]e", Bar.LIMIT, "no licence that it asks for is free"),
    (r"DependencyNeverSatisfied", Bar.OTHER, "a job that it depends on did not end as asked (--dependency)"),
    (r"Dependency", Bar.OTHER, "it waits for another job (--dependency)"),
    (r"Reservation", Bar.OTHER, "its reservation has not begun"),
    (r"PartitionDown|PartitionInactive", Bar.OTHER, "its partition starts no jobs: an admin has closed it"),
    (r"PartitionTimeLimit", Bar.OTHER, "it asks for more time than its partition allows"),
    (r"PartitionNodeLimit", Bar.OTHER, "it asks for more or fewer nodes than its partition allows"),
    (r"Partition", Bar.OTHER, "its partition does not take it"),
    (r"InvalidAccount|AccountNotAllowed", Bar.OTHER, "its account is invalid, or not allowed in its partition"),
    (r"InvalidQOS|QOSNotAllowed", Bar.OTHER, "its QOS is invalid, or not allowed for its partition or account"),
    (r"QOSUsageThreshold", Bar.OTHER, "its QOS's usage threshold is exceeded"),
    (r"(Bad)?Constraints", Bar.OTHER, "no node is what it asks for"),
    (r"MaxMemPerLimit", Bar.OTHER, "it asks for more memory than a CPU or node may give"),
    (r"DeadLine", Bar.OTHER, "its deadline cannot be met"),
    (r"BurstBuffer", Bar.OTHER, "its burst buffer is not ready"),
    (r"Power", Bar.LIMIT, "no power is free for it"),
    (r"FrontEndDown", Bar.OTHER, "no front end is in service"),
    (r"AccountingPolicy", Bar.LIMIT, "a limit of its QOS or account is reached"),
)
# QOSMaxJobsPerUserLimit, AssocGrpCPURunMinutesLimit, QOSMinGRES, MaxNodePerAccount, ...
_LIMIT = re.compile(
    r"(?P<whose>QOS|Assoc(?:iation)?|)(?P<group>Grp|)(?P<bound>Max|Min|)(?P<what>[A-Za-z]*?)"
    r"(?P<run>Run)?(?P<minutes>Minutes|Mins?(?=Per|$))?(?P<per>Per(?:Job|User|Node|Account|Acct))?"
    r"(?:Limit|NotSatisfied)?$"
)
_WHAT = {
    "cpu": "CPUs",
    "node": "nodes",
    "job": "jobs at once",
    "jobs": "jobs at once",
    "submitjob": "submitted jobs",
    "submitjobs": "submitted jobs",
    "mem": "memory",
    "memory": "memory",
    "gres": "GPUs or other GRES",
    "license": "licences",
    "bb": "burst buffer",
    "energy": "energy",
    "billing": "billing units",
    "wall": "wall time",
    "wallduration": "wall time",
    "time": "time",
}
_PER = {"PerJob": "a job", "PerUser": "a user", "PerNode": "a job on one node"}


@lru_cache(maxsize=4096)
def understand(reason: str) -> Reason:
    """Return what this reason of squeue or scontrol means."""
    text = with_blanks(reason)
    for pattern, bar, words in _TABLE:
        if re.match(pattern, text):
            return Reason(bar, words)
    word = re.match(r"[A-Za-z]*", text)
    limit = _LIMIT.match(word[0]) if word else None
    if limit is None or not (limit["whose"] or (limit["bound"] and limit["per"])):
        return _FREE
    return Reason(Bar.LIMIT, _limit(limit))


def _limit(found: re.Match[str]) -> str:
    whose = {"QOS": "its QOS", "": "its QOS or account"}.get(found["whose"], "its account or user")
    what = _WHAT.get(found["what"].lower(), "of a resource")
    if found["minutes"]:
        what += " over time" if not found["run"] else " for the time that its jobs may still run"
    if found["bound"] == "Min":
        return f"{whose} asks for more {what} than it wants"
    per = "an account" if (found["per"] or "").startswith("PerAcc") else _PER.get(found["per"] or "", "a job")
    who = "all its jobs together" if found["group"] else "a user" if what == _WHAT["jobs"] and not found["per"] else per
    return f"{whose} lets {who} have no more {what}"


def refusal_seconds(reason: str) -> float:
    """Return the seconds for which an element that waits with this reason is not ordered to start on its node again; 0
    if it may still start there."""
    return next((seconds for pattern, seconds in _REFUSALS if pattern.match(with_blanks(reason))), 0.0)


def is_told(element: ElementInfo, nodes: Collection[str]) -> bool:
    """Say whether Slurm has been told to start the element on these nodes, so that its reason is about them."""
    return not element.required_nodes or element.required_nodes == set(nodes)


def bar_of(element: ElementInfo, now: float) -> Bar:
    """Return what keeps a pending element from starting. now: seconds since the epoch."""
    return Bar.OTHER if _begins_later(element, now) else understand(element.reason).bar


def barred(element: ElementInfo, now: float) -> bool:
    """Say whether a pending element that is not held cannot start now, whatever nodes are free."""
    return not element.held and bar_of(element, now) is not Bar.NOTHING


def explain_pending(element: ElementInfo, now: float) -> str:
    """Explain in words why a pending element has not started."""
    if _begins_later(element, now):
        return "it is to begin later (--begin)"
    found = understand(element.reason)
    if element.required_nodes and refusal_seconds(element.reason):
        # Slurm says ReqNodeNotAvail of a busy node, too, if others wait for it.
        why = "is busy, reserved or out of service" if found.bar is Bar.NOTHING else "Slurm refuses it"
        return f"it must start on {', '.join(sorted(element.required_nodes))} (ReqNodeList), which {why}"
    if element.held and found.bar is not Bar.HOLD:
        return "Slurm holds it: `scontrol release`"
    return found.words or "Slurm gives this reason and no other"


def _begins_later(element: ElementInfo, now: float) -> bool:
    """Say whether somebody wants the element to begin later. Slurm itself delays only requeued ones, by minutes."""
    if element.reason != "BeginTime" or element.starts is None:
        return False
    return not element.restarts or element.starts - now > REQUEUE_WAIT
