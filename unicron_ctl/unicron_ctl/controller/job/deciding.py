"""Decides how the survivors of a Break go on (`unicron_ctl.shared.consensus`)."""

from __future__ import annotations

from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_transition.generations import layout


def decide(job: JobView, reports: dict[int, RankStatus] | None = None) -> survivors_plan.Decision | None:
    """The way on for the survivors that have stopped; None if none of them can go on. reports: theirs, if known."""
    reports = job.reports() if reports is None else reports
    if not reports:
        return None
    total, at = map(max, zip(*{(status.micro_batches, status.iteration) for status in reports.values()}, strict=True))
    return survivors_plan.decide(
        reports,
        total,
        _furthest_end(job),
        _lost_done(job, at),
        _lost_share(job, at, total, next(iter(reports.values())).lanes),
        at,
        job.replica,
        job.state.order,
    )


def _furthest_end(job: JobView) -> int | None:
    """The iterations that a finished member has trained: fewer than wanted if the script was asked to stop."""
    if len(job.unfinished) == len(job.state.survivors()):
        return None
    ends = [status for slot in job.state.members if job.finished(slot) and (status := job.status(slot)) is not None]
    return max((end.iteration + 1 if end.phase == "stepped" else end.train_iterations for end in ends), default=None)


def _lost_done(job: JobView, iteration: int) -> dict[int, list[int]]:
    """The micro-batches of the iteration that lost ranks had finished."""
    found = {}
    for slot, identity in job.state.lost.items():
        status = job.last_word(slot, identity)
        if status is not None and status.iteration == iteration and status.phase != "stepped":
            found[slot] = status.done
    return found


def _lost_share(job: JobView, iteration: int, total: int, lanes: int) -> list[int]:
    """The micro-batches of the iteration that were planned for replicas that have lost a rank."""
    plan = job.state.plan
    if plan is None or not job.state.lost:
        return []
    planned = plan.assignment if plan.iteration == iteration else {}
    heads, hit = layout.heads(plan.members, plan.replica), job.state.hit()
    shares = _shares_by_speed(job, heads, iteration, total, lanes)
    usual = {
        slot: layout.deal(total, len(heads), place, lanes, shares) for place, slot in enumerate(heads) if slot in hit
    }
    return [index for slot in usual for index in planned.get(slot, usual[slot])]


def _shares_by_speed(job: JobView, heads: list[int], iteration: int, total: int, lanes: int) -> list[int]:
    """The rounds that each replica had of the iteration by its speed; empty in an equal deal."""
    shares = []
    for slot in heads:
        lost = job.state.lost.get(slot)
        status = job.status(slot) if lost is None else job.last_word(slot, lost)
        known = status is not None and status.iteration == iteration
        shares.append(-(-status.share // lanes) if status is not None and known else 0)
    rounds = -(-total // lanes)
    if shares.count(0) == 1 and sum(shares) < rounds:  # one that was lost before it told
        shares[shares.index(0)] = rounds - sum(shares)
    return shares if 0 not in shares and sum(shares) == rounds else []
