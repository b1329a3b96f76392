"""Ranks jobs and nodes by how much is wrong with them, so that the worst comes first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from unicron_ctl.shared.protocol.answer_schema import Attention, Job, Node
from unicron_ctl.shared.slurm.host_lists import fold, natural

WRONG, HURT, ODD, FINE, OVER = range(5)
_MARK = "\0"
_HURT = ("breaking", "entering", "forming")


def of_job(job: Job) -> int:
    """Rank a job. WRONG: Unicron does not heal it, or its training is wrong. HURT: it does not train, or lacks nodes.
    ODD: it is slow."""
    if job.ended:
        return OVER
    if job.set_aside or job.ledger_violations or job.nan_since is not None:
        return WRONG
    if job.waits or job.barred or job.silent or job.left_out or job.state in _HURT:
        return HURT
    return ODD if job.degraded or job.anomalies else FINE


def of_node(node: Node) -> int:
    """Rank a node. WRONG: it is out of service, or a check found it bad. HURT: it is silent or a suspect. ODD: its
    values stand out."""
    if not node.healthy or any(report and report.verdict == "bad" for report in (node.health, node.pair_test)):
        return WRONG
    if node.asked_since is not None or node.suspect:
        return HURT
    return ODD if node.anomalies or node.unverified or node.admission else FINE


def jobs_by_trouble(listed: Iterable[Job]) -> list[Job]:
    """Sort jobs, the worst first, and then by number."""
    return sorted(listed, key=lambda job: (of_job(job), natural(job.job)))


def needs_an_admin(listed: Iterable[Attention], together: bool) -> list[str]:
    """Return a line for each thing that needs an admin. together: one line for the same reason of several nodes."""
    groups: dict[str, list[str]] = {}
    for item in listed:
        groups.setdefault(nameless(item.reason, item.node) if together else item.reason, []).append(item.node)
    return [f"needs an admin: {with_names(reason, names)}" for reason, names in groups.items()]


def nameless(text: str, node: str, mark: str = _MARK) -> str:
    """Replace the node's name in the text by a mark."""
    return re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", mark, text) if node and node in text else text


def with_names(text: str, nodes: Sequence[str], mark: str = _MARK) -> str:
    """Replace the mark in the text by these nodes' names, as a host list."""
    return text.replace(mark, fold(nodes)) if mark in text else text
