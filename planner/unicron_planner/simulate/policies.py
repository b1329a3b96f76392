"""Detection, recovery and placement by system. Figures come from each system's own paper or code, named beside them,
and are never fitted to a result. [S] read in a stored source, [R] recalled, [choice] ours. Unicron's own figures are
in docs/design/paper.md.

Sources read: microsoft/varuna at a2145cc, SymbioticLab/Oobleck at 3b7a0c2, uclasystem/bamboo at 8080929, PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate.causes import Cause

D_TIMEOUT = 1800.0  # collective time-out of Megatron: 30 min (Unicron) [S]
CHECKPOINT = 1800.0  # a checkpoint every 30 min (Unicron) [R]
REQUEUE, SETUP = 540.0, 840.0  # terminate and requeue 9 min, environment and CUDA set-up 14 min (same) [S]
BOUND = "bound"  # a placement that knows the future; nothing is replayed (unicron_planner.simulate.clairvoyant)
BOUND_NAME = "clairvoyant"
ITERATION = 30.0  # seconds an iteration, as in large runs [choice]


@dataclass(frozen=True)
class Policy:
    """The behaviour of one system."""

    name: str
    placement: str
    """optimal (the planner), equally, by_weight, by_size: all nodes are redistributed at every change. own: each job
    keeps its nodes, and shrinks and grows by its own losses. fixed: a job runs on all its nodes or not at all. bound:
    not a system, but an upper bound on all of them."""
    detect: Mapping[str, float]
    """Seconds until a failure is noticed, by detection method."""
    transition: Mapping[int, float | None]
    """Seconds from then until the job goes on, by severity; None: the scenario's D_transition."""
    checkpoint: float | None = None
    """Seconds between the checkpoints that a recovery falls back to; None if it needs none."""
    redo: float = 0.0
    """Iterations that a recovery without a checkpoint computes again."""
    healthy: float = 1.0
    """Throughput without failures, relative to Megatron's."""
    graceful: bool = True
    """Whether a planned change loses no work."""
    ahead: bool = False
    """Whether the planner weighs the next failures (unicron_planner.ahead)."""
    notice: bool = False
    """Whether a job leaves a node at the last iteration boundary before an announced loss."""
    sources: tuple[str, ...] = field(default=())


def _all(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("node_health", "process", "exception", "statistical"), seconds)


# Unicron's own detection times (docs/design/paper.md, section 3) [R]: statistical monitoring needs three iterations.
_UNICRON_DETECT = {"node_health": 5.6, "process": 1.8, "exception": 0.3, "statistical": 3 * ITERATION}
# In place: SEV3 reattempts the collective, SEV2 restarts a process from a replica's state (docs/design/paper.md).
_UNICRON_TRANSITION = {1: None, 2: None, 3: 5.0}


def _unicron(name: str, placement: str, ahead: bool = False, notice: bool = False) -> Policy:
    return Policy(
        name,
        placement,
        _UNICRON_DETECT,
        _UNICRON_TRANSITION,
        redo=0.5,
        ahead=ahead,
        notice=notice,
        sources=(
            "detection: Unicron [R]",
            "D_transition: the scenario's",
            "SEV3 reattempt 5 s [choice]",
            "at most half an iteration of the lost rank is computed again (docs/design/micro-batch-reuse.md)",
        ),
    )


POLICIES = {
    policy.name: policy
    for policy in (
        _unicron("unicron", "optimal"),
        _unicron("unicron-ahead", "optimal", ahead=True),
        _unicron("unicron-notice", "optimal", notice=True),
        _unicron("equally", "equally"),
        _unicron("by_weight", "by_weight"),
        _unicron("by_size", "by_size"),
        _unicron(BOUND_NAME, BOUND),
        Policy(
            "megatron",
            "fixed",
            {**_all(D_TIMEOUT), "node_health": 5.7},
            dict.fromkeys((1, 2, 3), REQUEUE + SETUP),
            checkpoint=CHECKPOINT,
            sources=(
                "detection: D_timeout 30 min, node health 5.7 s (Unicron)",
                "restart: 9 + 14 min (Unicron) [S]",
                "checkpoint every 30 min (Unicron) [R]",
                "waits for repair, or takes a hot spare where there is one",
            ),
        ),
        Policy(
            "oobleck",
            "own",
            {**_all(5.0), "statistical": D_TIMEOUT},
            dict.fromkeys((1, 2, 3)),
            redo=0.5,
            sources=(
                "detection: a closed connection, at the latest its 5 s time-out (elastic/message_util.py) [S]",
                "hangs: nothing in its code looks for them, so D_timeout",
                "regrouping: the scenario's D_transition [choice: none published for these sizes]",
                "the iteration under way is lost (no reuse in its engine)",
                "healthy 1.0: an upper bound, its own sources give none beside Megatron [choice]",
            ),
        ),
        Policy(
            "varuna",
            "own",
            {**_all(60.0), "statistical": 900.0},
            dict.fromkeys((1, 2, 3), SETUP),
            checkpoint=CHECKPOINT,
            healthy=0.75,
            sources=(
                "detection: 60 s wait for transient errors to pass (varuna/morph_server.py) [S]",
                "hangs: progress is looked at every 30 min, 15 min on average (varuna/catch_all.py) [S]",
                "morphing restarts all processes (docs/morphing.rst) [S]: set-up 14 min as Megatron's",
                "healthy 0.75: activations are always recomputed, 3 of 4 FLOP are useful [R]",
                "planned changes checkpoint first (docs/morphing.rst) [S]",
            ),
        ),
        Policy(
            "bamboo",
            "own",
            {**_all(20.0), "statistical": D_TIMEOUT},
            dict.fromkeys((1, 2, 3), 30.0),
            redo=1.0,
            healthy=(264 / 1.45 / 48) / (264 / 2.51 / 20),
            sources=(
                "detection: local rendezvous 20 s; then a global one, 30 s (simulation/simulator.py) [S]",
                "healthy 0.72: BERT samples per instance, 48 redundant (1.45 s a step) against 20 plain (2.51 s), "
                "same file [S]",
                "hangs: D_timeout",
            ),
        ),
        Policy(
            "torchelastic",
            "own",
            {**_all(0.1), "node_health": 15.0, "statistical": 600.0},
            dict.fromkeys((1, 2, 3), 30.0 + SETUP),
            checkpoint=CHECKPOINT,
            graceful=False,
            sources=(
                "monitor interval 0.1 s; keep-alive 5 s x 3; last call 30 s (torch/distributed) [S]",
                "hangs: NCCL time-out of process groups, 10 min [R]",
                "every change of membership restarts all workers",
                "set-up 14 min and a checkpoint every 30 min as Megatron's",
            ),
        ),
    )
}


def policy(name: str) -> Policy:
    """The policy of that name. Raises PlanError if there is none."""
    if name not in POLICIES:
        raise PlanError(f"unknown policy {name!r}: use {', '.join(POLICIES)}")
    return POLICIES[name]


def detection_seconds(of: Policy, cause: Cause) -> float:
    """The seconds from a failure until the system notices it."""
    seconds = of.detect[cause.method]
    if not math.isfinite(seconds):
        raise PlanError(f"policy {of.name} never detects {cause.name}")
    return seconds
