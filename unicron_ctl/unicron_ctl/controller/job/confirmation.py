"""Slurm's record decides whether an agent is what it says: owner, array size, state and node of its element.

An agent is taken in once a listing shows its element at work, on its node, for its user. What Slurm does not know yet
waits for the next listing; what differs is refused. When Slurm does not answer within `CONFIRM_SECONDS` the agent is
taken in unconfirmed: its job is healed within itself, and nothing is done in Slurm for it, or to its node, until a
listing confirms it (:meth:`View.shown_node`, :func:`confirmed_jobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_ctl.controller.model.agent_view import Route
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.submission import another
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import OCCUPIES

CONFIRM_SECONDS = 5.0  # then an agent is taken in although Slurm does not answer
LISTING_SECONDS = 30.0  # a listing that is older confirms nobody


@dataclass
class Waiting:
    """A registration that Slurm has not confirmed yet. since: when it first came."""

    route: Route
    message: wire.Register
    key: str
    asker: Asker
    since: float


def compare(view: View, message: wire.Register, asker: Asker, since: float) -> ElementInfo | wire.Refusal | None:
    """The element as Slurm shows it; why the agent is refused; or None while Slurm has not said. Pure.

    Only a listing that was asked for after the agent came can refuse it, and finally only by showing another owner or
    another node.
    """
    seen = view.slurm.seen
    if seen is None:
        return None
    name, fresh = f"element {message.element} of job {message.job}", seen.asked_at >= since
    info = seen.of(message.job).get(message.element)
    if info is None:
        return wire.Refusal(reason=f"Slurm shows no {name}") if fresh else None
    mine = asker.admin or asker.uid == info.uid
    works = info.state in OCCUPIES and message.node in seen.nodes_of(info)
    if mine and works and view.now - seen.asked_at <= LISTING_SECONDS:
        return info
    if not fresh:
        return None
    if not mine:
        return wire.Refusal(reason=f"job {message.job}: {asker} is not its owner {info.user}", final=True)
    if info.state in OCCUPIES and not works:
        return wire.Refusal(reason=f"Slurm runs {name} on {info.node}, not on {message.node}", final=True)
    return None if works else wire.Refusal(reason=f"Slurm shows {name} as {info.state}, not at work")


def nodes(seen: Listing, job: str) -> tuple[list[str], int]:
    """(nodes of the allocation in the order of its elements, how often Slurm has requeued it); ([], 0) for an array."""
    found = [info for _, info in sorted(seen.of(job).items()) if info.allocation > 1 and info.node]
    return [info.node or "" for info in found], found[0].restarts if found else 0


# ---------------------------------------------------------------- those that were taken in unconfirmed
def confirmed_jobs(view: View, jobs: Sequence[JobState]) -> list[JobState]:
    """The jobs whose owner Slurm has shown."""
    return [job for job in jobs if job.submitted or not view.slurm.used]


def confirm_agents(view: View, listing: Listing, job: JobState) -> Outcome:
    """Records what the listing says of a job, or of its agents, that Slurm had not confirmed yet."""
    out = Outcome()
    unsure = [element for element, agent in job.agents.items() if not agent.confirmed]
    if job.submitted and not unsure:
        return out
    if (other := next(iter(listing.of(job.job).values()), None)) is not None and another(job, other):
        reason = f"Slurm shows job {job.job} as {other.user}'s"
        out.record(job, records.JobEnded(code=1, reason=reason, disowned=True))
        return out
    for element in sorted(job.agents) if not job.submitted else unsure:
        agent = job.agents[element]
        claim = wire.Register(
            job=job.job,
            element=element,
            agent=agent.agent,
            node=agent.node,
            address=agent.address,
            slots=list(agent.slots),
            settings=job.settings,
        )
        info = compare(view, claim, Asker(uid=job.uid, admin=job.uid is None), listing.asked_at)
        if not isinstance(info, ElementInfo):
            continue
        if not job.submitted and not out.records:
            said = f"Slurm shows job {job.job} as {info.user}'s"
            out.record(
                job,
                records.JobConfirmed(
                    uid=info.uid,
                    user=info.user,
                    submitted=info.submitted,
                    most=len(listing.of(job.job)),
                    nodes=nodes(listing, job.job)[0],
                    restarts=nodes(listing, job.job)[1],
                    reason=said,
                ),
            )
        out.record(job, records.AgentConfirmed(element=element, agent=agent.agent))
    return out
