"""Takes in what Slurm shows of jobs and nodes: who is confirmed, who has ended, and how the nodes are given to jobs."""

from __future__ import annotations

from collections.abc import Callable

from unicron_ctl.controller.core.intake import Intake
from unicron_ctl.controller.core.job_containment import JobContainment
from unicron_ctl.controller.core.turn import Turns
from unicron_ctl.controller.job import registration
from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.controller.plan import reconcile
from unicron_ctl.controller.plan.inputs import around, inputs, replan, why_fixed
from unicron_ctl.controller.plan.slurm_actions import Desk
from unicron_ctl.controller.sense.sensors import When


class Listings:
    """Takes in a listing, job by job; one per core.

    desk: what is asked of Slurm. dirty: the jobs that the core has to bring on.
    """

    def __init__(
        self,
        view: View,
        desk: Desk,
        intake: Intake,
        turns: Turns,
        carry_out: Callable[[Outcome], bool],
        containment: JobContainment,
        dirty: set[str],
    ) -> None:
        self._view, self._desk, self._intake, self._turns = view, desk, intake, turns
        self._carry_out, self._attempt, self._dirty = carry_out, containment.attempt, dirty

    def on_listing(self, listing: Listing) -> None:
        """Takes in the listing that the view has now."""
        self._attempt("", "agents that wait for Slurm's word", self._intake.registrations.on_listing)
        for job in self._view.managed_jobs():
            self._attempt(job.job, "what Slurm says of it", self._take_in_job, listing, job)
        if not self._view.alone:
            self._attempt("", "planning", self._plan, listing)

    def _take_in_job(self, listing: Listing, job: JobState) -> None:
        self._carry_out(registration.confirm_agents(self._view, listing, job))
        if job.over:
            return
        for element in job.noticed:
            agent = self._view.live.agent(job.job, element)
            if agent is not None and agent.noticed_at is not None and listing.asked_at > agent.noticed_at:
                info = listing.of(job.job).get(element)
                agent.shown = info.state if info is not None else "gone"
                agent.restarts = info.restarts if info is not None else 0
                agent.grace = self._view.slurm.grace.get(info.partition, 0.0) if info is not None else 0.0
                self._view.job(job).touched.add(element)
        self._turns.run_sensors(job, When.LISTING)

    def _plan(self, listing: Listing) -> None:
        view, desk = self._view, self._desk
        self._carry_out(reconcile.before_planning(view, desk, listing))
        managed = view.managed_jobs()
        there = around(view, listing, managed)
        for job in managed:  # one that cannot be planned for must not keep the others waiting
            self._attempt(job.job, "its part in the plan", inputs, view, [job], there)
        # One that has registered since Slurm was asked is listed as others' are: what it has is not known yet.
        brief = {element.job for element in listing.elements if element.brief}
        jobs = registration.confirmed_jobs(view, view.managed_jobs())
        jobs = [job for job in jobs if listing.of(job.job) or job.job not in brief]
        kept = [job for job in jobs if why_fixed(view, job)]
        self._carry_out(reconcile.keeping(view, listing, kept))
        jobs = [job for job in jobs if job not in kept]
        planned = [job for job in jobs if permission.acts(view, job)]
        if planned:
            self._carry_out(replan(view, planned, desk.aheads))
            self._carry_out(reconcile.placing(view, desk, listing, planned))
        for job in planned:
            known = view.job(job)
            known.touched.update(element for element in known.agents if job.gives_back(element))
        watched = [job for job in jobs if job not in planned]
        self._carry_out(reconcile.watching(view, desk, listing, watched))
        self._dirty.update(job.job for job in (*jobs, *kept))
