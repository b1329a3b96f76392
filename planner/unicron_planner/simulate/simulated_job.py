"""One job of a replay: its phase, its nodes, and the work that it has to do again."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_planner.problem.objective import Job

RUN, DETECT, TRANSITION, RECOMPUTE, IDLE = "run", "detect", "transition", "recompute", "idle"
NO_FAILURE = 4  # above every severity


@dataclass
class SimulatedJob:
    """A job in the simulator. size: nodes it runs on (as planned); nodes: those it holds, dead ones included until
    they are noticed. level: F while it runs. worst: severity of what is not noticed. ready: when the transition under
    way is over, failures or not. worked: seconds of progress, for checkpoints. debt: seconds to be computed again."""

    spec: Job
    size: int = 0
    nodes: set[int] = field(default_factory=set)
    target: int = 0
    phase: str = IDLE
    level: float = 0.0
    epoch: int = 0
    until: float = 0.0
    worst: int = NO_FAILURE
    ready: float = 0.0
    worked: float = 0.0
    debt: float = 0.0
