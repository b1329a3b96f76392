"""When a new plan is made, and what the planner is told: jobs and nodes as Slurm and the agents show them."""

from __future__ import annotations

from collections.abc import Sequence

from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.job import JobState
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.controller.plan.ahead import Ahead
from unicron_ctl.controller.plan.placement import OCCUPIES, held_by_others, usable
from unicron_ctl.controller.plan.planning import JobInput


def replan(view: View, listing: Listing, jobs: Sequence[JobState], ahead: Ahead) -> Outcome:
    """A new plan when what it depends on has changed: the nodes that are there, the jobs, what they can take."""
    out, state, config = Outcome(), view.state, view.config
    found, nodes = inputs(view, jobs), usable_nodes(view, listing, jobs)
    key = f"{len(nodes)} nodes: " + ", ".join(
        f"{i.job} w{i.weight:g} {i.min_nodes}-{i.max_nodes}{' measured' if i.rate else ''}" for i in found
    )
    if key == state.plan_inputs:
        ahead.settle(found, state.assignment, len(nodes), config.mtbf_node_hours, config.transition_seconds)
        return out
    plan, looked_up = ahead.plan(found, len(nodes), config.mtbf_node_hours, config.transition_seconds)
    trigger = f"was: {state.plan_inputs}; is: {key}" if state.plan_inputs else f"first plan: {key}"
    out.record(
        None,
        records.Replanned(
            assignment=dict(plan.assignment),
            reasons=dict(plan.reasons),
            objective=plan.objective,
            waf=plan.waf,
            inputs=key,
            trigger=trigger,
            spares=plan.spares,
            looked_up=looked_up,
            reason=trigger,
        ),
    )
    ahead.settle(found, plan.assignment, len(nodes), config.mtbf_node_hours, config.transition_seconds)
    return out


def usable_nodes(view: View, listing: Listing, jobs: Sequence[JobState]) -> list[str]:
    """The nodes that can be given to these jobs."""
    managed = [job.job for job in jobs]
    return usable(listing.nodes, listing.elements, managed, view.state.out_of_service)


def inputs(view: View, jobs: Sequence[JobState]) -> list[JobInput]:
    """The jobs as the planner sees them; without Slurm, as they are."""
    listing = view.slurm.seen
    if listing is None:
        return [_without_slurm(job) for job in jobs]
    nodes = set(usable_nodes(view, listing, jobs))
    return [_input(view, listing, job, nodes) for job in jobs]


def _without_slurm(job: JobState) -> JobInput:
    count, s = len(job.elements(job.members)), job.settings
    rate = job.measured.get(count, 0.0)
    return JobInput(job.job, s.weight, s.min_nodes, s.max_nodes, count, count, rate, count)


def dead_elements(job: JobState) -> frozenset[int]:
    """Elements whose agent died while the node lives."""
    return frozenset(element for element, agent in job.agents.items() if agent.gone == "agent died")


def _input(view: View, listing: Listing, job: JobState, nodes: set[str]) -> JobInput:
    """Never more nodes than the job has elements that could run."""
    elements, dead = listing.of(job.job).values(), dead_elements(job)
    possible = sum(
        1
        for e in elements
        if e.state in OCCUPIES or (e.state == "PENDING" and not held_by_others(e)) or e.element in dead
    )
    alive = sum(1 for e in elements if e.state == "RUNNING" and e.node in nodes)
    here = {e.node for e in elements if e.state in OCCUPIES}
    fit = len(nodes - (view.avoided(job) - here))
    most = max(1, min(job.settings.max_nodes, possible, max(fit, job.settings.min_nodes)))
    before = min(view.state.assignment.get(job.job, alive), most)
    measured_nodes = len(job.elements(job.members))
    rate = job.measured.get(measured_nodes, 0.0)
    if not rate and job.measured:  # not yet at this size: the last size that was measured
        measured_nodes, rate = list(job.measured.items())[-1]
    return JobInput(
        job.job,
        job.settings.weight,
        min(job.settings.min_nodes, most),
        most,
        max(before, alive),
        alive,
        rate,
        measured_nodes,
        _rates(view, job),
    )


def _rates(view: View, job: JobState) -> dict[int, float]:
    """Measured rates by node count; sizes at which only an earlier run of the same name has been seen count too."""
    if view.config.throughput != "measured":
        return {}
    rates: dict[int, float] = {}
    for known in view.state.jobs.values():
        same = (known.settings.name, known.settings.user) == (job.settings.name, job.settings.user)
        if same and known is not job:
            rates |= known.measured
    return {count: rate for count, rate in {**rates, **job.measured}.items() if rate > 0}
