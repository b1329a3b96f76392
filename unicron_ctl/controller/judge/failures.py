"""From findings to failures, each with its remedy: the only user of the classifier and of the escalation.

`judge` returns one :class:`records.FailureDetected`, first in the outcome so that its number is known, and what is
done about it at once: a process to start, a node to put out of service, members to leave out.
"""

from __future__ import annotations

from collections.abc import Callable

from unicron_ctl.controller.judge import agents, ranks
from unicron_ctl.controller.model.finding import Finding, What
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View

JUDGES: dict[What, Callable[[View, JobView, Finding], Outcome]] = {
    What.EXIT: ranks.exited,
    What.WANTED_END: ranks.wanted_end,
    What.REPLACED: ranks.lost,
    What.BROKEN: ranks.broken,
    What.STOPPED: ranks.stopped,
    What.LATE: ranks.lost,
    What.PARTED: agents.parted,
    What.UNUSABLE: ranks.lost,
    What.HANG: ranks.hang,
    What.COLLECTIVE: ranks.collective,
    What.NOTE: ranks.note,
    What.NODE_LOST: agents.node_lost,
    What.AGENT_DIED: agents.agent_died,
    What.NODE_ENDED: agents.node_ended,
    What.MISSED: agents.missed,
    What.LEFT: agents.left,
    What.NODE: agents.node_unfit,
    What.ACTION: agents.action_failed,
}


def judge(view: View, finding: Finding) -> Outcome:
    """What the finding means and what is done about it; empty when it is nothing new, or nothing at all."""
    state = view.state.jobs.get(finding.job)
    if state is None or state.over:
        return Outcome()
    return JUDGES[finding.what](view, view.job(state), finding)
