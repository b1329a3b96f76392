"""The state of the controller as bytes, so that a start need not fold the whole log, nor the log be kept for ever.

A *snapshot* is made often. It is a cache: one of other fields is not read. A *base* is made a few times a day, and the
log before the older of the two that are kept may go. So a base is read by later releases as well: a field with a
default may be added to what it is made of; anything else needs a new format of the log.
"""

from __future__ import annotations

import json
import logging
import typing
from collections import deque
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from unicron.ctl.controller.log import records
from unicron.ctl.controller.log.store import Progress, Store, StoreError, nothing, told
from unicron.ctl.controller.model.cluster_state import ClusterState, Deferred, Intent, Mark, Pin, PlanReport, Take
from unicron.ctl.controller.model.fold import replay
from unicron.ctl.controller.model.job_state import (
    AgentRecord,
    Avoided,
    Decided,
    Ending,
    Failure,
    Identity,
    JobState,
    SlotState,
)
from unicron.ctl.controller.model.node_state import HealthReport, NodeState, SeenEvent
from unicron.ctl.protocol import wire
from unicron.detector.failures.escalation import Fault, History, Policy, Recent, Stuck

log = logging.getLogger("unicron.controller")
SAVED = (  # what a state is made of
    *(ClusterState, Mark, Pin, Take, Intent, Deferred, PlanReport),
    *(JobState, Avoided, Failure, SlotState, AgentRecord, Decided, Ending),
    *(NodeState, SeenEvent, HealthReport, History, Fault, Policy, Recent, Stuck),
    *(Identity, wire.Plan, wire.Settings, records.NodeEvent, records.ObservedWeek),
)


def _fields(kind: type) -> list[str]:
    """The names of a dataclass's, a struct's or a named tuple's fields, in their order."""
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(getattr(kind, "__struct_fields__", None) or kind._fields)  # type: ignore[attr-defined]


# A snapshot of other fields is not read; of other limits of the escalation neither, for they are part of the state.
STATE_FORMAT = json.dumps({kind.__name__: _fields(kind) for kind in SAVED} | {"limits": [repr(Policy())]})


def _plain(value: Any) -> Any:
    """What msgspec does not know as something that it knows."""
    if isinstance(value, deque):
        return [value.maxlen, list(value)]
    raise NotImplementedError(f"a {type(value).__name__} in the state")


def _from_plain(kind: Any, value: Any) -> Any:
    """The opposite of :func:`_plain`."""
    if typing.get_origin(kind) is not deque:
        raise NotImplementedError(f"a {kind} in the state")
    (item,) = typing.get_args(kind)
    most, found = value
    return deque(msgspec.convert(found, list[item], builtin_types=(), dec_hook=_from_plain), maxlen=most)  # type: ignore[valid-type]


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(ClusterState, dec_hook=_from_plain)


def freeze(state: ClusterState) -> bytes:
    """The state as a snapshot, or as a base."""
    return _encoder.encode((STATE_FORMAT, state))


DAMAGED = (ValueError, TypeError, NotImplementedError, msgspec.MsgspecError)  # what `thaw` raises for other bytes


def thaw(data: bytes, event: int, of_this_release: bool = True) -> ClusterState:
    """The state after that event. Raises one of DAMAGED for bytes that are none; with `of_this_release` also for one
    of other fields."""
    form, rest = _envelope.decode(data)
    if of_this_release and form != STATE_FORMAT:
        raise ValueError("it is of another release")
    state = _decoder.decode(rest)
    if state.last_event != event:
        raise ValueError(f"it is of event {state.last_event}, not {event}")
    state.history.policy = Policy()
    return state


def read_state(store: Store, progress: Progress = nothing) -> ClusterState:
    """The state after all that the log holds: from the last snapshot if there is a good one, else from a base, else
    from the first event. progress: called every now and then. Raises StoreError where there is nothing to begin with.
    """
    if why := store.open_to_others():
        log.warning("the event log may hold what others have written: %s", why)
    bases, saved = store.bases(), store.snapshot()
    oldest = bases[-1][0] if bases else 0
    if saved is not None and saved[0] >= oldest:  # else the log may have lost what came after it
        try:
            state = thaw(saved[1], saved[0])
            return replay(told(store.replay(after=saved[0]), progress), state)
        except DAMAGED as error:
            log.warning("the snapshot of the state cannot be used, the log is read: %s", error)
    for event, data in bases:
        try:
            state = thaw(data, event, of_this_release=False)
            return replay(told(store.replay(after=event), progress), state)
        except DAMAGED as error:
            why = str(error)
            log.warning("the state at event %d cannot be used, an older one is read: %s", event, why)
    if bases:
        raise StoreError(
            f"{store.path}: the state that it begins with cannot be read ({why}): go back to the release that wrote "
            "it, or move it away and start again, its jobs are adopted"
        )
    return replay(told(store.replay(), progress))
