"""The controller's state as bytes, so that a start need not fold the whole log, and old parts of the log can go.

Later releases read it, too: fields with a default may be added; any other change needs a new format of the log.
"""

from __future__ import annotations

import logging
import typing
from collections import deque
from typing import Any

import msgspec

from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.shared.log.store import STATES, Progress, Store, StoreError, nothing, with_progress
from unicron_detector.failures.fault_history import Policy

log = logging.getLogger("unicron.controller")


def _plain(value: Any) -> Any:
    """Converts types that msgspec does not know."""
    if isinstance(value, deque):
        return [value.maxlen, list(value)]
    raise NotImplementedError(f"a {type(value).__name__} in the state")


def _from_plain(kind: Any, value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if typing.get_origin(kind) is not deque:
        raise NotImplementedError(f"a {kind} in the state")
    (item,) = typing.get_args(kind)
    most, found = value
    return deque(msgspec.convert(found, list[item], builtin_types=(), dec_hook=_from_plain), maxlen=most)  # type: ignore[valid-type]


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(ClusterState, dec_hook=_from_plain)
DAMAGE_ERRORS = (ValueError, TypeError, NotImplementedError, msgspec.MsgspecError)  # from `thaw`, for damaged bytes


def freeze(state: ClusterState) -> bytes:
    """Return the state as bytes."""
    return _encoder.encode(state)


def thaw(data: bytes, event: int) -> ClusterState:
    """Return the state after that event. Raises one of DAMAGE_ERRORS for damaged bytes."""
    state = _decoder.decode(data)
    if state.last_event != event:
        raise ValueError(f"it is of event {state.last_event}, not {event}")
    state.history.policy = Policy()
    return state


def read_state(store: Store, progress: Progress = nothing) -> ClusterState:
    """Return the state after all events of the log, from the newest saved state that can be read, else from the first
    event.

    progress: called now and then. Raises StoreError if there is nothing to begin with.
    """
    if why := store.open_to_others():
        log.warning("the event log is not protected: %s", why)
    states = store.states()
    for event, data in states:
        try:
            state = thaw(data, event)
            return replay(with_progress(store.replay(after=event), progress), state)
        except DAMAGE_ERRORS as error:
            why = str(error)
            log.warning("the state at event %d cannot be used; what is older is read: %s", event, why)
    if len(states) == STATES:  # the log may have lost its beginning
        raise StoreError(
            f"{store.path}: the state that it begins with cannot be read ({why}): go back to the release that wrote "
            "it, or move it away and start again, its jobs are adopted"
        )
    return replay(with_progress(store.replay(), progress))
