"""The common part of all records: one struct per kind, so that a misspelt kind or field cannot be written.

A record says what was decided or seen; when, of which job and in which generation is said by the :class:`Event` around
it. `reason` is for people and is in every record that somebody may ask about. Sources: a finding's, see
:mod:`unicron_ctl.controller.model.finding`.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from unicron_ctl.shared.protocol.ranges import TEXT
from unicron_ctl.shared.system.errors import shorten

REASON = 4000  # characters of a reason; other texts have TEXT, as in messages
THIS_FAILURE = -1
"""As a record's `failure`: the failure that the same outcome records before it; the core puts its id in."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all records. A field that has its default is not written."""

    reason: str = ""

    @property
    def kind(self) -> str:
        """The name of its kind in the log."""
        return str(self.__struct_config__.tag)


class Event(msgspec.Struct, frozen=True, dict=True):
    """A record in the log. time: seconds since the epoch, the controller's clock. job: "" where none is concerned."""

    id: int
    time: float
    job: str
    generation: int
    record: Record

    @property
    def kind(self) -> str:
        return self.record.kind

    @cached_property
    def payload(self) -> bytes:
        """The record as JSON; made once, for the bounds on a job's records and for the log."""
        return encode(self.record)

    def as_dict(self) -> dict[str, object]:
        """For `unicronctl events`: the envelope's keys and the record's."""
        where = {"id": self.id, "time": self.time, "job": self.job, "generation": self.generation}
        return where | {"kind": self.kind} | full(self.record)


def full(record: Record) -> dict[str, object]:
    """All fields of a record as plain data, those with their defaults included."""
    return {name: msgspec.to_builtins(getattr(record, name)) for name in record.__struct_fields__}


def with_reason(record: Record, reason: str) -> Record:
    """The record with another reason."""
    return msgspec.structs.replace(record, reason=reason)


def with_short_texts(record: Record) -> Record:
    """The record with its texts cut to REASON and TEXT characters: much in them was said by others, by jobs, Slurm and
    libraries."""
    texts = {name: getattr(record, name) for name in record.__struct_fields__}
    bounds = {name: REASON if name == "reason" else TEXT for name, text in texts.items() if isinstance(text, str)}
    changed = {name: shorten(texts[name], most) for name, most in bounds.items() if len(texts[name]) > most}
    return msgspec.structs.replace(record, **changed) if changed else record


_encoder = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return _encoder.encode(record)


class Unreadable(Record, frozen=True, tag="unreadable"):
    """Stands in, when the log is read, for a record that this release cannot read. `of`: its kind."""

    of: str
