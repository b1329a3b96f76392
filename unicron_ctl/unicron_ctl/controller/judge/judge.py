"""Turns findings into failures, each with its remedy. Only the judges use the classifier and the escalation.

`judge` returns one :class:`records.FailureDetected`, which the core numbers, and what is done about it at once: a
process to start, a node to take out of service, members to leave out.
"""

from __future__ import annotations

from collections.abc import Callable

from unicron_ctl.controller.judge import agent_failures, notes, rank_failures
from unicron_ctl.controller.model.finding import Finding, What
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View

JUDGES: dict[What, Callable[[View, JobView, Finding], Outcome]] = {
    What.EXIT: rank_failures.rank_exited,
    What.WANTED_END: rank_failures.wanted_end,
    What.REPLACED: rank_failures.leave_out_member,
    What.BROKEN: rank_failures.rank_broken,
    What.STOPPED: rank_failures.ranks_stopped,
    What.LATE: rank_failures.leave_out_member,
    What.PARTED: agent_failures.node_parted,
    What.UNUSABLE: rank_failures.leave_out_member,
    What.HANG: rank_failures.hang,
    What.COLLECTIVE: rank_failures.collective,
    What.NOTE: notes.record_note,
    What.NODE_LOST: agent_failures.node_lost,
    What.AGENT_DIED: agent_failures.agent_died,
    What.NODE_ENDED: agent_failures.node_ended,
    What.MISSED: agent_failures.member_missed,
    What.LEFT: agent_failures.agent_left,
    What.NODE: agent_failures.node_unfit,
    What.SLURM: agent_failures.slurm_said,
    What.ACTION: agent_failures.action_failed,
}


def judge(view: View, finding: Finding) -> Outcome:
    """Return what is done about the finding; empty if it is nothing new, or nothing at all."""
    state = view.state.jobs.get(finding.job)
    if state is None or state.over:
        return Outcome()
    return JUDGES[finding.what](view, view.job(state), finding)
