"""When a new plan is made, and the planner's input: jobs and nodes as Slurm and the agents show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.job_state import AGENT_DIED, WITH_BLOCK, AgentRecord, JobState
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.controller.plan import job_layouts, planning
from unicron_ctl.controller.plan.eligible_nodes import Ground, Reach
from unicron_ctl.controller.plan.placement import REQUEUE_SECONDS, held_by_others, usable, whole
from unicron_ctl.controller.plan.planning import Aheads, JobInput
from unicron_ctl.controller.plan.pools import Pool, join_plans, pools
from unicron_ctl.controller.plan.pools import plan as plan_pool
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.partitions import ACT
from unicron_ctl.shared.slurm import pending_reasons
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.squeue import nodes_of
from unicron_ctl.shared.slurm.states import ENDED_BADLY, OCCUPIES
from unicron_detector.words import plural
from unicron_planner.problem.gpus import BEST
from unicron_planner.solver.plan import Plan, flops_text

EVERYBODY = "all users"  # the only owner, if the FLOP/s of all jobs are compared
MOST_TRIES = 4  # to start an element again that never gets an agent: its script may fail everywhere at once


def replan(view: View, jobs: Sequence[JobState], aheads: Aheads) -> Outcome:
    """Makes a new plan if its input has changed: the nodes that are there, the jobs, the nodes that they can use."""
    out, state = Outcome(), view.state
    found = pools(inputs(view, jobs))
    key, assignment = key_of(found), state.assignment
    if key != state.plan_inputs:
        plan, looked_up = plan_for(view, found, aheads)
        trigger = f"was: {state.plan_inputs}; is: {key}" if state.plan_inputs else f"first plan: {key}"
        record = records.ClusterReplanned(
            assignment=dict(plan.assignment),
            reasons=dict(plan.reasons),
            objective=plan.objective,
            waf=plan.waf,
            inputs=key,
            trigger=trigger,
            spares=plan.spares,
            looked_up=looked_up,
            layouts=dict(plan.layouts),
            reason=trigger,
        )
        out.record(None, record)
        assignment = plan.assignment
    config = view.config
    for pool in found:
        ahead = aheads.of(pool.jobs)
        ahead.prepare(pool.jobs, assignment, pool.count, config.mtbf_node_hours, config.transition_seconds)
    aheads.close_others([pool.jobs for pool in found])
    return out


def key_of(found: Sequence[Pool]) -> str:
    """All that a plan depends on, in words. A new plan is made when it changes."""
    return "; ".join(f"{pool.count} nodes: {', '.join(_words(job, pool) for job in pool.jobs)}" for pool in found)


def _words(job: JobInput, pool: Pool) -> str:
    """One job's part of the key."""
    spares = f" of which {job.trains} train, else {job.wait_seconds:g} s" if job.spares else ""
    part = f" of {len(job.reach)}" if len(job.reach) < len(pool.nodes) else ""
    unit = f" by {job.unit}" if job.unit > 1 else ""
    layouts = f" as {job.layout} of {', '.join(job.layouts)}" if job.layouts else ""
    facts = f"{spares}{part}{unit}{layouts}{' measured' if job.rate else ''}"
    return f"{job.job} w{job.weight:g} {job.min_nodes}-{job.max_nodes}{facts} of {job.whose}"


def unit_of(view: View, job: JobState) -> int:
    """The fewest nodes that hold whole replicas."""
    return job.unit(view.job(job).replica)


def plan_for(view: View, found: Sequence[Pool], aheads: Aheads) -> tuple[Plan, bool]:
    """The plan over all pools, and whether all of it was looked up."""
    config, looked = view.config, []

    def solve(jobs: Sequence[JobInput], nodes: int, elsewhere: Mapping[str, int]) -> Plan:
        for pool in found:  # a part of a pool is solved as it comes
            if pool.jobs == tuple(jobs) and not elsewhere:
                plan, was = aheads.of(jobs).plan(jobs, nodes, config.mtbf_node_hours, config.transition_seconds)
                looked.append(was)
                return plan
        looked.append(False)
        return planning.plan(jobs, nodes, config.mtbf_node_hours, config.transition_seconds, elsewhere)

    parts = [plan_pool(pool, solve) for pool in found]
    return join_plans(parts, sum(len(pool.nodes) for pool in found)), all(looked)


def why_fixed(view: View, job: JobState) -> str:
    """Why the plan does not change the nodes of a job that is one allocation; empty for one that may shrink, and for an
    array."""
    settings, rules = job.settings, permission.of_job(view, job.job)
    if not settings.allocation:
        return ""
    if not settings.min_stated or settings.min_nodes >= settings.max_nodes:
        return f"it may shrink with --unicron-min-nodes below {settings.max_nodes}"
    if not settings.no_kill:
        return "its srun is not known to run with --no-kill, and would end with the first node"
    if job.unshrinkable:
        return f"Slurm refused to shrink it: {job.unshrinkable}"
    if job.shrunk >= view.slurm.shrinks:
        never = "never lets it shrink (disable_job_shrink in SchedulerParameters)"
        return f"Slurm {'lets it shrink only once without slurmdbd' if view.slurm.shrinks else never}"
    if rules.mode == ACT and not rules.may("shrink"):
        return rules.refusal("shrink")
    listed = view.slurm.seen.of(job.job) if view.slurm.seen is not None else {}
    if 0 not in listed or any(e.state != "RUNNING" for e in listed.values()):
        return "Slurm does not show it at work with its first node, on which its batch script runs"
    return "" if job.generation else "it has not begun to train"


def ended_in_allocation(job: JobState) -> dict[int, AgentRecord]:
    """Agents of an allocation that have ended, by element: nothing trains there again. Agents whose ranks have trained
    to the end do not count: they stay members, and the batch script may go on with their nodes."""
    return {element: agent for element, agent in job.agents.items() if agent.gone and element not in job.inside}


def elements_of(listing: Listing, job: JobState) -> Mapping[int, ElementInfo]:
    """The elements that the plan gives the job and takes from it: Slurm's, or the nodes of its one allocation."""
    return listing.of(job.job) if job.settings.allocation else listing.rows_of(job.job)


def usable_nodes(view: View, listing: Listing, jobs: Sequence[JobState]) -> list[str]:
    """The nodes that can be given to these jobs."""
    managed = [job.job for job in jobs]
    return usable(listing.nodes, listing.elements, managed, view.state.out_of_service)


@dataclass(frozen=True)
class Around:
    """The nodes for jobs that are planned together."""

    good: frozenset[str]
    """Nodes that can be given to the jobs."""
    ground: Ground


def around(view: View, listing: Listing, jobs: Sequence[JobState]) -> Around:
    """The nodes around these jobs; the demand of other jobs, the costly part, is computed once a listing."""
    names = frozenset(job.job for job in jobs)
    ground = listing.grounds.get(names)
    if ground is None:
        ground = listing.grounds[names] = Ground(listing, names, view.now)
    return Around(frozenset(usable_nodes(view, listing, jobs)), ground)


def reaches(view: View, jobs: Sequence[JobState], among: Around | None = None) -> dict[str, Reach]:
    """The nodes that each of the jobs may be given; {} without Slurm. among: computed before, for them and others."""
    listing = view.slurm.seen
    if listing is None or not jobs:
        return {}
    there, found = among or around(view, listing, jobs), {}
    for job in jobs:
        elements = elements_of(listing, job).values()
        here = [name for e in elements if e.state in OCCUPIES for name in nodes_of(e)]
        reach = there.ground.reach(elements, there.good, here, view.refused_nodes(job))
        if job.settings.allocation:  # it gets no other node
            reach = replace(reach, nodes=reach.nodes.intersection(here), barred={})
        found[job.job] = reach
    return found


def inputs(view: View, jobs: Sequence[JobState], among: Around | None = None) -> list[JobInput]:
    """The jobs as the planner sees them; without Slurm, as they are. among: see :func:`reaches`."""
    listing = view.slurm.seen
    if listing is None:
        return [_without_slurm(view, job) for job in jobs]
    within = reaches(view, jobs, among)
    return [_input(view, listing, job, within[job.job]) for job in jobs]


def _without_slurm(view: View, job: JobState) -> JobInput:
    """The input without Slurm: never more nodes than the job has agents, because its stated size is unconfirmed."""
    count, settings = len(job.inside), job.settings
    most = max(1, min(settings.max_nodes, max(count, len(job.agents))))
    found = JobInput(
        job.job,
        weight(view, job),
        min(settings.min_nodes, most),
        most,
        count,
        count,
        job.measured.get(count, 0.0),
        count,
        unit=unit_of(view, job),
        working=min(most, view.job(job).wanted),
        wait_seconds=view.config.replacement_seconds,
        owner=owner(view, job, None),
    )
    return job_layouts.with_layouts(view, job, found, "", float("inf"))


def dead_elements(job: JobState, now: float) -> frozenset[int]:
    """Elements whose agent died while its node is not known to be gone. In a block also those whose agent left for
    good, because Slurm ends a block only with the last of its agents."""
    dead = {element for element, agent in job.agents.items() if agent.gone == AGENT_DIED}
    if job.settings.block > 1:
        lately = {failure.record.element for failure in job.failures if now - failure.detected_at < REQUEUE_SECONDS}
        dead |= {element for element, agent in job.agents.items() if agent.ended_early} - lately
    return frozenset(dead)


def came_to_nothing(job: JobState, e: ElementInfo) -> bool:
    """Whether the element has to be started again, because Slurm shows that it ended before an agent came.

    After the loss of a node Slurm starts the element again by itself; it may end at once, for example because of
    processes that still live on the lost node. If the node ended its processes first, as at a shutdown, Slurm only saw
    the script fail. An element that Slurm may not requeue is NODE_FAIL and was not started again; one that never gets
    an agent is given up. An allocation that has ended is not started again."""
    if e.state not in ENDED_BADLY or job.settings.allocation:
        return False
    again = e.restarts > 0 or e.state == "FAILED"
    agents = [agent for agent in agents_of(job, e) if agent.tries < MOST_TRIES]
    return any(agent.gone == AGENT_DIED or ((agent.lost or agent.gone == WITH_BLOCK) and again) for agent in agents)


def _ends_for_good(job: JobState, e: ElementInfo) -> bool:
    """Whether Slurm ends the element, as after scancel, and does not start it again.

    A requeue is counted at once, while the element still completes. Its agents were asked to end, or have left by
    themselves; if one died, or was lost with its node, the element may be started again."""
    agents = agents_of(job, e)
    return e.state == "COMPLETING" and bool(agents) and all(_left(agent, e) for agent in agents)


def _left(agent: AgentRecord, e: ElementInfo) -> bool:
    by_itself = bool(agent.gone) and agent.gone not in (AGENT_DIED, WITH_BLOCK)
    return e.restarts == agent.restarts and not agent.lost and (agent.noticed or by_itself)


def _count_claims(view: View, job: JobState, elements: Iterable[ElementInfo]) -> int:
    """The number of elements that have nodes, or could start on some; others claim none."""
    return sum(
        (e.state in OCCUPIES and not _ends_for_good(job, e))
        or _startable(view, e)
        or came_to_nothing(job, e)
        or ending(job, e)
        for e in elements
    )


def ending(job: JobState, e: ElementInfo) -> bool:
    """Whether Slurm shows that the element has ended, and its agent's end is not judged yet."""
    return e.state in ENDED_BADLY and any(not agent.gone for agent in agents_of(job, e))


def agents_of(job: JobState, row: ElementInfo) -> list[AgentRecord]:
    """The agents of one of Slurm's elements."""
    return [job.agents[element] for element in job.nodes_of_block(row.element) if element in job.agents]


def weight(view: View, job: JobState) -> float:
    """The job's weight, at most the limit of its account and QOS."""
    listed = view.slurm.seen.of(job.job).values() if view.slurm.seen else ()
    first = next(iter(listed), None)
    most = permission.of_job(view, job.job).most_weight(first.account if first else "", first.qos if first else "")
    return min(job.settings.weight, most)


def owner(view: View, job: JobState, element: ElementInfo | None) -> str:
    """The owner with whose other jobs the job's FLOP/s are compared. element: one of the job's, as Slurm shows it."""
    compare = view.config.planner.compare
    if compare == "flops":
        return EVERYBODY
    if compare == "account" and element is not None and element.account:
        return f"account {element.account}"
    return element.user if element is not None and element.user else job.owner


def _input(view: View, listing: Listing, job: JobState, within: Reach) -> JobInput:
    """The input with Slurm: never more nodes than the job has in elements that could run; none without such."""
    elements, block = elements_of(listing, job).values(), job.settings.block
    possible = block * _count_claims(view, job, elements)
    alive = block * sum(1 for e in elements if e.state == "RUNNING" and whole(e, within.nodes, block))
    here = {name for e in elements if e.state in OCCUPIES for name in nodes_of(e)}
    fit = len(within.nodes - (view.avoided_nodes(job) - here))
    most = min(job.settings.max_nodes, possible, max(fit, job.settings.min_nodes))
    if job.settings.allocation:
        ended = {agent.node for agent in ended_in_allocation(job).values()}
        most = alive = len(within.nodes - ended) if possible else 0
    reach = within.nodes if most else frozenset[str]()
    most = max(block, most - most % block)
    before = min(view.state.assignment.get(job.job, alive), most)
    measured_nodes = len(job.inside)
    rate = job.measured.get(measured_nodes, 0.0)
    if not rate and job.measured:  # this size is not measured yet: take the last one that is
        measured_nodes, rate = list(job.measured.items())[-1]
    found = JobInput(
        job.job,
        weight(view, job),
        min(job.settings.min_nodes, most),
        most,
        max(before, alive),
        alive,
        min(rate, measured_nodes * within.peak),
        measured_nodes,
        {count: min(one, count * within.peak) for count, one in _rates(view, job).items()},
        reach,
        permission.of_job(view, job.job).spare_nodes,
        unit_of(view, job),
        working=min(most, view.job(job).wanted),
        wait_seconds=_wait_seconds(view, listing, within) if job.settings.spares else 0.0,
        trained=job.generation > 0,
        owner=owner(view, job, next(iter(elements), None)),
        block=block,
    )
    return job_layouts.with_layouts(view, job, found, _gres(listing, within), within.peak)


def _startable(view: View, e: ElementInfo) -> bool:
    """Whether the element waits for nothing but nodes."""
    if e.state != "PENDING" or held_by_others(e, view.state.held):
        return False
    if (e.job, e.element) in view.state.pins and pending_reasons.refusal_seconds(e.reason):
        return True  # on another node
    return not pending_reasons.barred(e, view.now)


def _wait_seconds(view: View, listing: Listing, within: Reach) -> float:
    """Seconds that a lost node's place stays empty without a hot spare: until processes have started on a free node or,
    if there is none, until a node is repaired."""
    config = view.config
    taken = {name for e in listing.elements if e.state in OCCUPIES for name in listing.nodes_of(e)}
    return config.repair_seconds if within.nodes <= taken else config.replacement_seconds


def _gres(listing: Listing, within: Reach) -> str:
    """The GRES of a node that the job may be given; all of them have the same."""
    return next((node.gres for node in listing.nodes if node.name in within.nodes), "")


def _rates(view: View, job: JobState) -> dict[int, float]:
    """Measured rates by node count, including those of earlier runs of the same name."""
    if view.config.throughput != "measured":
        return {}
    rates: dict[int, float] = {}
    for known in view.state.jobs.values():
        same = (known.settings.name, known.settings.user) == (job.settings.name, job.settings.user)
        if same and known is not job:
            rates |= known.measured
    return {count: rate for count, rate in {**rates, **job.measured}.items() if rate > 0}


def bounds(view: View, job: JobState, jobs: Sequence[JobState]) -> str:
    """The limits of a job's part of the plan, in one line; empty without Slurm."""
    within, seen = reaches(view, jobs).get(job.job), view.slurm.seen
    if within is None or seen is None:
        return ""
    limits = [f"{len(within.nodes)} of {len(seen.nodes)} nodes are in reach ({within.asks})"]
    for one in waiting(view, job):
        if not one.starts:
            count = len(one.elements)
            limits.append(f"{plural(count, 'element')} cannot start: {one.reason} ({one.words})")
    if within.barred:
        barred = sorted(within.barred.items(), key=lambda item: (-item[1], item[0]))
        limits.append("out of reach: " + ", ".join(f"{count} {why}" for why, count in barred[:5]))
    rules, counts = permission.of_job(view, job.job), weight(view, job)
    if counts < job.settings.weight:
        limits.append(f"weight {counts:g} of the {job.settings.weight:g} asked for: partition {rules.partition}")
    if rules.spare_nodes:
        limits.append(f"{rules.spare_nodes} spare nodes are kept")
    if within.peak < BEST * 1e6:
        limits.append(f"at most {flops_text(within.peak)} a node")
    refused = [name for name in ("move", "pin", "requeue", "down") if name not in rules.actions]
    if rules.mode != ACT:
        limits.append(f'partition {rules.partition} is in mode "{rules.mode}": the plan is not carried out')
    elif refused:
        limits.append(f"partition {rules.partition} does not allow {', '.join(refused)}")
    return "; ".join(limits)


@dataclass(frozen=True)
class Waiting:
    """Pending elements of a job for which Slurm gives the same reason."""

    elements: list[int]
    reason: str
    words: str
    """The reason, for people."""
    starts: bool
    """They can start once there are nodes."""


def waiting(view: View, job: JobState) -> list[Waiting]:
    """Why the job's pending elements have not started."""
    found: dict[tuple[str, str, bool], list[int]] = {}
    listing = view.slurm.seen
    for e in listing.rows_of(job.job).values() if listing is not None and not job.over else ():
        if e.state == "PENDING":
            ours = e.held and not held_by_others(e, view.state.held)
            words = "the plan has no node for it" if ours else pending_reasons.explain_pending(e, view.now)
            found.setdefault((e.reason, words, ours or _startable(view, e)), []).append(e.element)
    return [Waiting(sorted(numbers), *why) for why, numbers in sorted(found.items())]
