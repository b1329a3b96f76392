"""The escalation's table of one slot of a job: (state, event) -> (state, action)."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """The state of one slot of a job."""

    HEALTHY = "healthy"  # nothing within the window
    REATTEMPTING = "reattempting"  # a SEV3 action runs
    REATTEMPTED = "reattempted"  # it worked; on probation until the window ends
    RESTARTING = "restarting"
    RESTARTED = "restarted"
    ISOLATING = "isolating"  # the job leaves the node: the slot waits for another one or is planned away
    MOVED = "moved"  # the slot runs elsewhere, on probation
    ENDED = "ended"  # the job was ended


class Event(enum.Enum):
    """An event of one slot, given the faults before it."""

    FAULT3 = "fault3"  # a fault that is new here within the window, by severity
    FAULT2 = "fault2"
    FAULT1 = "fault1"
    AGAIN = "again"  # the same cause within the window
    AGAIN_SOFTWARE = "again_software"  # the same, of a kind that no other node would cure
    FAILED = "failed"  # the running action did not help: it timed out, or a fault came while it ran
    RECOVERED = "recovered"  # an iteration finished after the action
    QUIET = "quiet"  # the window passed without a fault
    SHARED = "shared"  # a network fault that another fault explains, or many nodes at once: this node is not to blame
    FLAPPING = "flapping"  # the node has failed too often
    OWN_BUG = "own_bug"  # the job fails by itself, wherever it runs


# ISOLATE: this job leaves the node, which becomes a suspect. MOVE: the same without suspicion.
NOTHING, REATTEMPT, RESTART, MOVE, ISOLATE, END_JOB = "none", "reattempt", "restart", "move", "isolate", "end_job"
RUNNING = {State.REATTEMPTING: REATTEMPT, State.RESTARTING: RESTART, State.ISOLATING: MOVE}  # the action that runs

_S, _E = State, Event
_TO_REATTEMPT = (_S.REATTEMPTING, REATTEMPT)
_TO_RESTART = (_S.RESTARTING, RESTART)
_TO_ISOLATE = (_S.ISOLATING, ISOLATE)
_TO_END = (_S.ENDED, END_JOB)


def _row(
    again: tuple[State, str],
    failed: tuple[State, str],
    recovered: State,
    quiet: State,
    fault3: tuple[State, str] = _TO_REATTEMPT,
    fault2: tuple[State, str] = _TO_RESTART,
) -> dict[Event, tuple[State, str]]:
    return {
        _E.FAULT3: fault3,
        _E.FAULT2: fault2,
        _E.FAULT1: _TO_ISOLATE,
        _E.AGAIN: again,
        _E.AGAIN_SOFTWARE: _TO_RESTART,
        _E.FAILED: failed,
        _E.RECOVERED: (recovered, NOTHING),
        _E.QUIET: (quiet, NOTHING),
        _E.SHARED: _TO_REATTEMPT,
        _E.FLAPPING: _TO_ISOLATE,
        _E.OWN_BUG: _TO_END,
    }


# On probation another fault is met by its own severity; the same fault ("again") and a failed action take the next one.
# A moved slot that fails again restarts first, for its new node is new to the fault. OWN_BUG decides whether the job
# itself is to blame. An application's repeated error moves no job, since no other node would cure it. If the table says
# ISOLATE and the fault is not the node's own (`escalation.decide`), the job moves and the node is not blamed.
TABLE: dict[State, dict[Event, tuple[State, str]]] = {
    _S.HEALTHY: _row(_TO_RESTART, _TO_RESTART, _S.HEALTHY, _S.HEALTHY),
    _S.REATTEMPTING: _row(_TO_RESTART, _TO_RESTART, _S.REATTEMPTED, _S.REATTEMPTING, fault3=_TO_RESTART),
    _S.REATTEMPTED: _row(_TO_RESTART, _TO_RESTART, _S.REATTEMPTED, _S.HEALTHY),
    _S.RESTARTING: _row(_TO_ISOLATE, _TO_ISOLATE, _S.RESTARTED, _S.RESTARTING, fault3=_TO_ISOLATE, fault2=_TO_ISOLATE),
    _S.RESTARTED: _row(_TO_ISOLATE, _TO_ISOLATE, _S.RESTARTED, _S.HEALTHY),
    _S.ISOLATING: _row(_TO_ISOLATE, _TO_ISOLATE, _S.MOVED, _S.ISOLATING, fault3=_TO_RESTART, fault2=_TO_RESTART),
    _S.MOVED: _row(_TO_RESTART, _TO_RESTART, _S.MOVED, _S.HEALTHY),
    _S.ENDED: {event: (_S.ENDED, NOTHING) for event in _E},
}
