"""Restart mode: jobs whose processes know nothing of the protocol (`unicron_ctl.agent.plain_ranks`).

For the state machine such a job differs in little: nobody keeps a training state, so every Break leads to a new world
of those that are there, and there is no boundary at which a node could join. What has to be decided otherwise is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from detector.escalation import REATTEMPT, Decision
from detector.severity import Severity, Verdict
from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller.machine import State

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine
    from unicron_ctl.controller.state import JobState
    from unicron_ctl.protocol.wire import Exit

STEADY_SECONDS = 600.0  # a world that has run so long has worked: what failed before is forgiven
MOST_RESTARTS = 16  # after losses, in a row without a steady world in between
BACKOFF_WORTH_WAITING = 10.0  # seconds; a slot whose process is to start again later is not waited for


def worth(nodes: int, newcomers: int, age: float, config: ControllerConfig) -> tuple[bool, str]:
    """Whether a world of `nodes` nodes, `age` seconds old, is to be ended for one with `newcomers` more; and why. Pure.

    What a restart costs: the work since the script's last checkpoint, on average half of `checkpoint_seconds` and never
    more than the world is old, and the start. What it brings: the newcomers' share until the larger world must be
    expected to fail, which would take them in anyhow.
    """
    cost = min(age, config.checkpoint_seconds / 2.0) + config.transition_seconds
    until_failure = config.mtbf_node_hours * 3600.0 / max(1, nodes + newcomers)
    gain = until_failure * newcomers / max(1, nodes)
    sums = (
        f"a restart costs about {cost:.0f} s of work, and {newcomers} more node{'s' if newcomers > 1 else ''} beside "
        f"{nodes} bring{'' if newcomers > 1 else 's'} {gain:.0f} s until a failure is to be expected"
    )
    if gain > cost:
        return True, f"{sums}: all processes start again in a larger world"
    return False, f"{sums}: they wait for the next restart"


def exhausted(job: JobState) -> str:
    """Why it is no use to form another world; empty while it is."""
    if not job.restart_mode or job.restarts < MOST_RESTARTS:
        return ""
    last = job.failures[-1]["reason"] if job.failures else ""
    short = f"the world broke {job.restarts} times in a row within {STEADY_SECONDS:.0f} s of its start"
    return f"{short}, the last time because: {last}" if last else short


def reading(job: JobState, verdict: Verdict, end: Exit) -> Verdict:
    """The verdict, with this knowledge: an exit status that no rule knows is the plain program's own word."""
    if job.restart_mode and verdict.scope == "unknown" and 0 < end.code < 128:
        return replace(verdict, scope="application")
    return verdict


def consequence(engine: Engine, job: JobState, verdict: Verdict, end: Exit) -> Decision | None:
    """The decision about an end that is none of the process's own doing; None for any other.

    A plain program dies when a peer dies. What it says then is an error of the network; and who ends while the world is
    breaking, unless it had just begun, ends of that. Neither may cost a healthy node its place.
    """
    if not job.restart_mode:
        return None
    late = job.phase == State.BREAKING and bool(job.lost) and end.lived > engine.state.history.policy.quick_seconds
    if verdict.scope != "network" and not late:
        return None
    reason = f"{verdict.reason}; programs that lose a peer end so, and nobody is blamed for it"
    return Decision(Severity.SEV3, REATTEMPT, reason, verdict.cause)


def look(engine: Engine, job: JobState, waiting: Sequence[int]) -> None:
    """Records that a world has proved itself, and why newcomers (elements) are kept waiting. Called at every tick."""
    if not job.restart_mode or job.phase != State.RUNNING or job.plan is None:
        return
    age = engine.now - job.since
    if age >= STEADY_SECONDS and job.steady != job.plan.generation:
        reason = f"the world of {len(job.plan.members)} ranks has run for {STEADY_SECONDS:.0f} s"
        engine.emit("steady", job.job, job.plan.generation, reason=reason)
    inside = set(job.elements(job.members))
    newcomers = tuple(element for element in waiting if element not in inside and element not in job.leaving)
    key = (job.plan.generation, newcomers)
    if newcomers and engine.kept_waiting.get(job.job) != key:
        good, reason = worth(len(inside), len(newcomers), age, engine.config)
        if not good:
            engine.kept_waiting[job.job] = key
            engine.emit("newcomers_wait", job.job, job.plan.generation, elements=list(newcomers), reason=reason)
