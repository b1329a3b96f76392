"""Findings about slots of a job."""

from __future__ import annotations

from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View


def slot_finding(
    view: View, job: JobView, what: What, slots: tuple[int, ...], source: Source, text: str, by: str
) -> Finding:
    """Return a finding with the element, the node and the iteration of the first slot."""
    slot = slots[0]
    agent, status = job.agent(slot), job.status(slot)
    node = agent.node if agent is not None else job.state.node(slot)
    iteration = status.iteration if status is not None else None
    name, element = job.state.job, job.state.element(slot)
    return Finding(what, name, slots, view.now, source, text, element=element, node=node, by=by, iteration=iteration)
