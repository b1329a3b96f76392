"""A job's state machine as a table: (phase, event) -> (phase, action). Every pair is there; IGNORE says that nothing
is to be done.

FORMING -> ENTERING -> RUNNING -> OFFERING -> RUNNING     membership grows and shrinks at iteration boundaries
OFFERING -> RUNNING                                       a newcomer failed before the boundary: nobody stops for it
RUNNING, OFFERING, ENTERING -> BREAKING -> ENTERING       any loss, in any step, is just another Break
BREAKING -> FORMING                                       nobody is left who knows the training state, or all ranks
                                                          start again in another layout
"""

from __future__ import annotations

import enum

from unicron.ctl.controller.model.job_state import Phase


class Event(enum.StrEnum):
    """What the statuses of its ranks, or the clock, say."""

    READY = "ready"  # forming: enough ranks wait
    LOSS = "loss"  # a failure says that members must be left out
    FAULT = "fault"  # a new generation is needed although nobody is lost
    CHANGE = "change"  # newcomers wait, or the plan takes an element away
    WITHDRAW = "withdraw"  # what is offered will not come about, and nobody has taken it
    ENTERED = "entered"  # all members of the plan, or of the offer, run in it
    TIMEOUT = "timeout"  # they did not enter in time
    REPORTED = "reported"  # every survivor has stopped
    NOBODY = "nobody"  # no survivor is left
    LAYOUT = "layout"  # all have stopped, and the plan wants another layout
    FINISHED = "finished"  # all members trained to the end
    FAILED = "failed"  # healing it is pointless


class Action(enum.StrEnum):
    """What the controller does on the way."""

    IGNORE = "ignore"
    FORM = "form"
    BREAK = "break"
    RESUME = "resume"
    REFORM = "reform"
    RELAYOUT = "relayout"
    OFFER = "offer"
    WITHDRAW = "withdraw"
    ENTER = "enter"
    END = "end"


_STAY = Action.IGNORE
_S, _E, _A = Phase, Event, Action


def _row(phase: Phase, **changes: tuple[Phase, Action]) -> dict[Event, tuple[Phase, Action]]:
    """One phase's row: what is not named is ignored; what is the same in every living state stands here once."""
    row = {event: (phase, _STAY) for event in Event}
    row[_E.FINISHED] = row[_E.FAILED] = (_S.ENDED, _A.END)
    return row | {Event(name): change for name, change in changes.items()}


_BREAK = (_S.BREAKING, _A.BREAK)
_RELAYOUT = (_S.FORMING, _A.RELAYOUT)

TABLE: dict[Phase, dict[Event, tuple[Phase, Action]]] = {
    _S.FORMING: _row(_S.FORMING, ready=(_S.ENTERING, _A.FORM), layout=_RELAYOUT),
    _S.ENTERING: _row(_S.ENTERING, loss=_BREAK, fault=_BREAK, timeout=_BREAK, entered=(_S.RUNNING, _A.ENTER)),
    _S.RUNNING: _row(_S.RUNNING, loss=_BREAK, fault=_BREAK, change=(_S.OFFERING, _A.OFFER)),
    _S.OFFERING: _row(
        _S.OFFERING,
        loss=_BREAK,
        fault=_BREAK,
        timeout=_BREAK,
        entered=(_S.RUNNING, _A.ENTER),
        withdraw=(_S.RUNNING, _A.WITHDRAW),
    ),
    _S.BREAKING: _row(
        _S.BREAKING,
        loss=_BREAK,
        reported=(_S.ENTERING, _A.RESUME),
        nobody=(_S.FORMING, _A.REFORM),
        layout=_RELAYOUT,
    ),
    _S.ENDED: {event: (_S.ENDED, _STAY) for event in Event},
}


def step(phase: Phase, event: Event) -> tuple[Phase, Action]:
    """The phase after the event, and what to do."""
    return TABLE[phase][event]
