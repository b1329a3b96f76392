"""A job's state machine as two tables: what the controller does about an event in each phase, and the phase that each
record of a decision leads to. The fold alone sets the phase.

FORMING -> ENTERING -> RUNNING -> OFFERING -> RUNNING     membership grows and shrinks at iteration boundaries
OFFERING -> RUNNING                                       a newcomer failed before the boundary: no rank stops for it
RUNNING, OFFERING, ENTERING -> BREAKING -> ENTERING       any loss, in any step, is just another Break
BREAKING -> FORMING                                       no rank with the training state is left, or all ranks start
                                                          again in another layout
"""

from __future__ import annotations

import enum

from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.shared.log import records


class Event(enum.StrEnum):
    """Events of a job's state machine, from the statuses of its ranks or the clock."""

    READY = "ready"  # forming: enough ranks wait
    LOSS = "loss"  # a failure: members must be left out
    FAULT = "fault"  # a new generation is needed although no rank is lost
    CHANGE = "change"  # newcomers wait, or the plan takes an element away
    WITHDRAW = "withdraw"  # the offer cannot come about, and no rank has taken it
    ENTERED = "entered"  # all members of the plan, or of the offer, run in it
    TIMEOUT = "timeout"  # they did not enter in time
    REPORTED = "reported"  # every survivor has stopped
    NOBODY = "nobody"  # no survivor is left
    LAYOUT = "layout"  # all have stopped, and the plan wants another layout
    FINISHED = "finished"  # all members trained to the end
    FAILED = "failed"  # healing it is pointless


class Action(enum.StrEnum):
    """The controller's answer to an event, each with the record of its success."""

    FORM = "form"  # PlanMade
    BREAK = "break"  # Break
    RESUME = "resume"  # PlanMade
    REFORM = "reform"  # Reform
    RELAYOUT = "relayout"  # Reform
    OFFER = "offer"  # Offer
    WITHDRAW = "withdraw"  # OfferWithdrawn
    ENTER = "enter"  # Entered
    END = "end"  # JobEnded


_ENDS = {Event.FINISHED: Action.END, Event.FAILED: Action.END}
_BREAKS = {Event.LOSS: Action.BREAK, Event.FAULT: Action.BREAK}

ACTIONS: dict[Phase, dict[Event, Action]] = {
    Phase.FORMING: {**_ENDS, Event.READY: Action.FORM, Event.LAYOUT: Action.RELAYOUT},
    Phase.ENTERING: {**_ENDS, **_BREAKS, Event.TIMEOUT: Action.BREAK, Event.ENTERED: Action.ENTER},
    Phase.RUNNING: {**_ENDS, **_BREAKS, Event.CHANGE: Action.OFFER},
    Phase.OFFERING: {
        **_ENDS,
        **_BREAKS,
        Event.TIMEOUT: Action.BREAK,
        Event.ENTERED: Action.ENTER,
        Event.WITHDRAW: Action.WITHDRAW,
    },
    Phase.BREAKING: {
        **_ENDS,
        Event.LOSS: Action.BREAK,
        Event.REPORTED: Action.RESUME,
        Event.NOBODY: Action.REFORM,
        Event.LAYOUT: Action.RELAYOUT,
    },
    Phase.ENDED: {},
}
"""The answers to the events in each phase; an event without one changes nothing."""

PHASES: dict[type[records.Record], Phase] = {
    records.PlanMade: Phase.ENTERING,
    records.GenerationAdopted: Phase.ENTERING,
    records.GenerationEntered: Phase.RUNNING,
    records.Offer: Phase.OFFERING,
    records.OfferWithdrawn: Phase.RUNNING,
    records.Break: Phase.BREAKING,
    records.Reform: Phase.FORMING,
    records.JobEnded: Phase.ENDED,
}
"""The phase after a record; other kinds of records leave the phase as it is."""
