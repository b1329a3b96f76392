"""Reads records as they stand in the file."""

from __future__ import annotations

import msgspec

from unicron_ctl.shared.log.records import (
    base,
    failure_records,
    generation_records,
    iteration_records,
    job_records,
    node_records,
    slurm_records,
)
from unicron_ctl.shared.log.records.base import Record, Unreadable

_SUBJECTS = (
    *(base, failure_records, generation_records),
    *(iteration_records, job_records, node_records, slurm_records),
)
KINDS = {
    str(kind.__struct_config__.tag): kind
    for subject in _SUBJECTS
    for kind in vars(subject).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
}
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


def decode(kind: str, payload: bytes | str) -> Record:
    """The record of that kind; :class:`Unreadable`, with the reason, for one that this release cannot read."""
    decoder = _decoders.get(kind)
    if decoder is None:
        return Unreadable(of=kind, reason=f"this release knows no record {kind!r}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unreadable(of=kind, reason=f"a record {kind!r} cannot be read: {error}")
