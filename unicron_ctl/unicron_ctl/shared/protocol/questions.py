"""Defines the arguments of the questions that `unicronctl` and the health checks put to the controller."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class NoArguments(msgspec.Struct):
    """Most questions have none."""


Name = Annotated[str, Meta(max_length=256)]
Kinds = Annotated[str, Meta(max_length=2000, pattern=r"^\s*(\S+(\s+\S+){0,19}\s*)?$")]


class Filters(msgspec.Struct, kw_only=True):
    """The wanted part of what the asker may see; empty for all."""

    user: Name = ""
    partition: Name = ""
    nodes: Annotated[str, Meta(max_length=16384)] = ""  # a host list
    since: Annotated[float, Meta(ge=0, le=1e11)] = 0.0  # seconds since the epoch


class StatusQuestion(Filters, kw_only=True):
    """Everything at a glance."""

    brief: bool = False  # without ranks and metrics
    each: bool = False
    """The last failures of each user, not of all together: for a page that cuts the answer for its viewers."""


class EventsQuestion(Filters, kw_only=True):
    """The log after an id, or the part of it before an id."""

    after: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """If it is 0, the newest events before `before` are wanted."""
    before: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # 0 for the end of the log
    limit: Annotated[int, Meta(ge=1, le=10000)] = 200
    job: str | None = None
    kinds: Kinds = ""  # wanted kinds, with spaces between them; empty for all
    without: Kinds = ""  # unwanted kinds
    mark: bool = False  # the answer also has the id up to which the log was read


class ExplainQuestion(msgspec.Struct, kw_only=True):
    """The reasons for the treatment of a job, by id or name."""

    job: str


class HistoryQuestion(msgspec.Struct, kw_only=True):
    """The incidents of a node that the log still has."""

    node: str


class ReportQuestion(msgspec.Struct, kw_only=True):
    """A report on the last `seconds`."""

    seconds: Annotated[float, Meta(gt=0, le=31536000)] = 604800.0


class PauseOrder(msgspec.Struct, kw_only=True):
    """Change nothing in Slurm for a while."""

    partition: str = ""  # empty for all
    seconds: Annotated[float, Meta(ge=0, le=31536000)] = 0.0  # 0 for no end


class ResumeOrder(msgspec.Struct, kw_only=True):
    """Act again where the configuration allows it."""

    partition: str = ""  # empty for all


class InjectOrder(msgspec.Struct, kw_only=True):
    """Break a rank of the job: the slot, one on the node, or any."""

    job: str
    fault: str
    slot: int | None = None
    node: str | None = None
    seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0  # 0 for the fault's own duration
    dry_run: bool = False
