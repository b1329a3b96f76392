"""Faults on purpose: an order of `unicronctl inject` becomes a message to one agent, where the configuration allows
it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from detector import inject
from unicron_ctl.controller.soft import AgentView
from unicron_ctl.controller.state import JobState
from unicron_ctl.protocol import wire

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

LIVING = ("waiting", "entering", "running", "stopped", "starting")


class NotInjected(ValueError):
    """Why a fault cannot be injected, and what to do about it."""


def perform(
    engine: Engine,
    job: JobState,
    fault: str,
    slot: int | None = None,
    node: str | None = None,
    seconds: float = 0.0,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Breaks one rank of the job: the named slot, one on the named node, or any. Raises NotInjected.

    Returns {"fault", "job", "slot", "node", "seconds", "at", "dry_run"}, and "event" where it was not a dry run.
    A fault that the command itself carries out (a node's power) is only logged here.
    """
    if not engine.config.allow_inject:
        raise NotInjected(
            "this controller injects no faults: set `allow_inject = true` under [controller] in unicron.toml"
        )
    try:
        name, _ = inject.parse(fault)
    except inject.InjectError as error:
        raise NotInjected(str(error)) from None
    if job.ended:
        raise NotInjected(f"job {job.job} has ended")
    if name == "corrupt-checkpoint" and slot is None and node is None and job.members:
        slot = min(job.members)  # the next newcomer gets the state from it
    agent, slot = _target(engine, job, slot, node)
    done = {
        "fault": fault,
        "job": job.job,
        "slot": slot,
        "node": agent.node,
        "seconds": seconds or inject.FAULTS[name][1],
        "at": engine.now,
        "dry_run": dry_run,
    }
    if job.restart_mode and inject.FAULTS[name][0] != "agent":
        raise NotInjected(f"job {job.job} is in restart mode, its ranks are plain programs: rank-kill breaks them, too")
    if not dry_run:
        logged = {key: done[key] for key in ("fault", "slot", "node", "seconds")}
        event = engine.emit(
            "injected", job.job, job.generation, **logged, reason=f"{fault} into slot {slot} on {agent.node}"
        )
        done["event"] = event.id
        incarnation = agent.ranks[slot].incarnation
        if inject.FAULTS[name][0] != "command":
            engine.send(agent.route, wire.Inject(fault=fault, slot=slot, incarnation=incarnation, seconds=seconds))
    return done


def _target(engine: Engine, job: JobState, slot: int | None, node: str | None) -> tuple[AgentView, int]:
    living = {
        rank: view
        for view, rank, status in engine.view(job).all_ranks()
        if view.alive and status.state in LIVING and slot in (None, rank) and node in (None, view.node)
    }
    if not living:
        where = f"slot {slot}" if slot is not None else f"node {node}" if node else "any node"
        raise NotInjected(f"job {job.job} has no living rank in {where}: see `unicronctl status`")
    chosen = random.choice(sorted(set(living) & set(job.members) or living))
    return living[chosen], chosen
