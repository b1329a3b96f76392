"""Fault injection: an order of `unicronctl inject` becomes a message to one agent, if the configuration allows it."""

from __future__ import annotations

import random

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.answer_schema import Injection
from unicron_detector.chaos import inject

LIVING = ("waiting", "entering", "running", "stopped", "starting")


class NotInjected(ValueError):
    """A fault cannot be injected; the message says why, and what to do."""


def perform(
    view: View,
    job: JobView,
    fault: str,
    slot: int | None = None,
    node: str | None = None,
    seconds: float = 0.0,
    dry_run: bool = False,
) -> tuple[Injection, Outcome]:
    """Breaks one rank of the job: the named slot, one on the named node, or any. Raises NotInjected.

    Returns the answer and the outcome. A fault that the command itself carries out (a node's power) is only logged.
    """
    if not view.config.allow_inject:
        how = "set `allow_inject = true` under [controller] in unicron.toml"
        raise NotInjected(f"this controller injects no faults: {how}")
    try:
        name, _ = inject.parse(fault)
    except inject.InjectError as error:
        raise NotInjected(str(error)) from None
    if job.state.over:
        raise NotInjected(f"job {job.state.job} has ended")
    if name == "corrupt-checkpoint" and slot is None and node is None and job.state.members:
        slot = min(job.state.members)  # the next newcomer gets the state from it
    agent, slot = _target(job, slot, node)
    lasts = inject.duration(fault, seconds)
    name_of_job, node = job.state.job, agent.node
    done = Injection(fault=fault, job=name_of_job, slot=slot, node=node, seconds=lasts, at=view.now, dry_run=dry_run)
    out = Outcome()
    if not job.state.mode.reports and inject.FAULTS[name][0] != "agent":
        plain = "its ranks are plain programs: rank-kill breaks them, too"
        raise NotInjected(f"job {job.state.job} is in restart mode, {plain}")
    if not dry_run:
        reason = f"{fault} into slot {slot} on {agent.node}"
        record = records.FaultInjected(fault=fault, slot=slot, node=agent.node, seconds=lasts, reason=reason)
        out.record(job.state, record)
        incarnation = agent.ranks[slot].incarnation
        if inject.FAULTS[name][0] != "command":
            out.send(agent, wire.Inject(fault=fault, slot=slot, incarnation=incarnation, seconds=seconds))
    return done, out


def _target(job: JobView, slot: int | None, node: str | None) -> tuple[AgentView, int]:
    living = {
        rank: agent
        for agent, rank, status in job.all_ranks()
        if agent.alive and status.state in LIVING and slot in (None, rank) and node in (None, agent.node)
    }
    if not living:
        where = f"in slot {slot}" if slot is not None else f"on node {node}" if node else "on any node"
        raise NotInjected(f"job {job.state.job} has no living rank {where}: see `unicronctl status`")
    chosen = random.choice(sorted(set(living) & set(job.state.members) or living))
    return living[chosen], chosen
