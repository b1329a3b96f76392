"""Findings about slots of a job."""

from __future__ import annotations

from typing import Any

from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View


def slot_finding(
    view: View, job: JobView, what: What, slots: tuple[int, ...], source: Source, text: str, by: str, **details: Any
) -> Finding:
    """Return a finding with the element, the node and the iteration of the first slot. details: its other fields."""
    slot = slots[0]
    element = slot // job.per_node
    agent = job.agents.get(element)
    status = agent.ranks.get(slot) if agent is not None else None
    node = agent.node if agent is not None else job.state.node(slot)
    details.setdefault("iteration", status.iteration if status is not None else None)
    return Finding(what, job.state.job, slots, view.now, source, text, element, node, by, **details)
