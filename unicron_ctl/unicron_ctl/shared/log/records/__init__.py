"""Gives all kinds of records one name, and reads records from the log's file."""

# ruff: noqa: F403 - each kind stands in its subject's file, and nowhere else

import msgspec

from unicron_ctl.shared.log.records.base import *
from unicron_ctl.shared.log.records.base import Record, Unreadable
from unicron_ctl.shared.log.records.failure_records import *
from unicron_ctl.shared.log.records.generation_records import *
from unicron_ctl.shared.log.records.iteration_records import *
from unicron_ctl.shared.log.records.job_records import *
from unicron_ctl.shared.log.records.node_records import *
from unicron_ctl.shared.log.records.slurm_records import *

KINDS = {
    str(kind.__struct_config__.tag): kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
}
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


def decode(kind: str, payload: bytes | str) -> Record:
    """Decode a record of that kind; return :class:`Unreadable`, with the reason, if this release cannot read it."""
    decoder = _decoders.get(kind)
    if decoder is None:
        return Unreadable(of=kind, reason=f"this release knows no record {kind!r}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unreadable(of=kind, reason=f"a record {kind!r} cannot be read: {error}")
