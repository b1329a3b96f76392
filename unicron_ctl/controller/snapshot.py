"""The state of the controller as bytes, so that a start need not fold the whole log."""

from __future__ import annotations

import logging
import pickle
from dataclasses import fields, is_dataclass

from detector.escalation import Fault, History, Policy, Recent, Stuck
from unicron_ctl.controller.log import records
from unicron_ctl.controller.log.store import Store
from unicron_ctl.controller.model.cluster import ClusterState, Deferred, Intent, Mark, Pin, PlanReport, Take
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.controller.model.job import (
    AgentRecord,
    Avoided,
    Decided,
    Ending,
    Failure,
    Identity,
    JobState,
    SlotState,
)
from unicron_ctl.controller.model.node import HealthReport, NodeState, SeenEvent
from unicron_ctl.protocol import wire

log = logging.getLogger("unicron.controller")
SAVED = (  # what a snapshot holds
    *(ClusterState, Mark, Pin, Take, Intent, Deferred, PlanReport),
    *(JobState, Avoided, Failure, SlotState, AgentRecord, Decided, Ending),
    *(NodeState, SeenEvent, HealthReport, History, Fault, Policy, Recent, Stuck),
    *(Identity, wire.Plan, wire.Settings, records.NodeEvent, records.ObservedWeek),
)


def _fields(kind: type) -> list[str]:
    """The names of a dataclass's, a struct's or a named tuple's fields, in their order: pickles go by it."""
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(getattr(kind, "__struct_fields__", None) or kind._fields)  # type: ignore[attr-defined]


# A snapshot of other fields is not read; of other limits of the escalation neither, for they are part of the state.
STATE_FORMAT = {kind.__name__: _fields(kind) for kind in SAVED} | {"limits": [repr(Policy())]}


def freeze(state: ClusterState) -> bytes:
    """The state as a snapshot, which only this release reads: its file is the controller's own."""
    return pickle.dumps((STATE_FORMAT, state), protocol=pickle.HIGHEST_PROTOCOL)


def read_state(store: Store) -> ClusterState:
    """The state after all that the log holds: from the last snapshot if there is a good one, else from the start."""
    saved = store.snapshot()
    if saved is not None and (why := store.open_to_others()):  # to read it is to run what is in it
        log.warning("the snapshot of the state is not used, the whole log is read: %s", why)
    elif saved is not None:
        try:
            form, state = pickle.loads(saved[1])
            if form == STATE_FORMAT and isinstance(state, ClusterState) and state.last_event == saved[0]:
                return replay(store.replay(after=saved[0]), state)
        except Exception as error:  # of another release, or damaged: the log holds everything
            log.warning("the snapshot of the state cannot be used, the whole log is read: %r", error)
    return replay(store.replay())
