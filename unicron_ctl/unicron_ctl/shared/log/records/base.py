"""Defines the common part of all records: one struct per kind, so that a misspelt kind or field cannot be written.

A record holds a decision or an observation; the :class:`Event` around it adds time, job and generation. `reason` is for
people. `source` is as in a finding (:mod:`unicron_ctl.controller.model.finding`).
"""

from __future__ import annotations

import msgspec

from unicron_ctl.shared.protocol.ranges import TEXT
from unicron_ctl.shared.system.errors import shorten

REASON = 4000  # characters of a reason; other texts have TEXT, as in messages
THIS_FAILURE = -1
"""In a record's `failure`: the failure before it in the same outcome; the core puts in its id."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all records. Fields with their defaults are not written."""

    reason: str = ""

    @property
    def kind(self) -> str:
        """The name of its kind in the log."""
        return str(self.__struct_config__.tag)


class Event(msgspec.Struct, frozen=True, dict=True):
    """A record in the log."""

    id: int
    time: float  # seconds since the epoch, by the controller's clock
    job: str  # empty for none
    generation: int
    record: Record

    @property
    def kind(self) -> str:
        return self.record.kind

    @property
    def payload(self) -> bytes:
        """The record as JSON, for the limits on a job's records and for the log. It is made once, without the lock of
        a `cached_property`: a failure of a large job makes thousands of records."""
        known: bytes | None = self.__dict__.get("encoded")
        if known is None:
            known = self.__dict__["encoded"] = encode(self.record)
        return known

    def as_dict(self) -> dict[str, object]:
        """Return the event's and the record's keys as `unicronctl events` shows them."""
        where = {"id": self.id, "time": self.time, "job": self.job, "generation": self.generation}
        return where | {"kind": self.kind} | full(self.record)


def full(record: Record) -> dict[str, object]:
    """Return all fields of a record as plain data, including those with their defaults."""
    return {name: msgspec.to_builtins(getattr(record, name)) for name in record.__struct_fields__}


def with_reason(record: Record, reason: str) -> Record:
    """Return the record with another reason."""
    return msgspec.structs.replace(record, reason=reason)


def with_short_texts(record: Record) -> Record:
    """Return the record with its texts, which may quote jobs, Slurm or libraries, cut to REASON and TEXT characters."""
    texts = {name: getattr(record, name) for name in record.__struct_fields__}
    bounds = {name: REASON if name == "reason" else TEXT for name, text in texts.items() if isinstance(text, str)}
    changed = {name: shorten(texts[name], most) for name, most in bounds.items() if len(texts[name]) > most}
    return msgspec.structs.replace(record, **changed) if changed else record


_encoder = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """Return the record as JSON."""
    return _encoder.encode(record)


class Unreadable(Record, frozen=True, tag="unreadable"):
    """Stands for a record of the log that this release cannot read."""

    of: str  # its kind
