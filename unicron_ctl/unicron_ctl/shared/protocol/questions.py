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
    """The wanted part of what the asker may see; empty for all. nodes: a host list. since: seconds since the epoch."""

    user: Name = ""
    partition: Name = ""
    nodes: Annotated[str, Meta(max_length=16384)] = ""
    since: Annotated[float, Meta(ge=0, le=1e11)] = 0.0


class StatusQuestion(Filters, kw_only=True):
    """Everything at a glance. brief: without ranks and metrics. each: the last failures of each user, not of all
    together, for a page that cuts the answer for its viewers."""

    brief: bool = False
    each: bool = False


class EventsQuestion(Filters, kw_only=True):
    """The log after an id, or with 0 its newest part before an id (0: the end). kinds, without: wanted and unwanted
    kinds, with spaces between them. mark: the answer has the id up to which the log was read."""

    after: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    before: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    limit: Annotated[int, Meta(ge=1, le=10000)] = 200
    job: str | None = None
    kinds: Kinds = ""
    without: Kinds = ""
    mark: bool = False


class ExplainQuestion(msgspec.Struct, kw_only=True):
    """The reasons for the treatment of a job, by id or name."""

    job: str


class ReportQuestion(msgspec.Struct, kw_only=True):
    """A report on the last `seconds`."""

    seconds: Annotated[float, Meta(gt=0, le=31536000)] = 604800.0


class PauseOrder(msgspec.Struct, kw_only=True):
    """Change nothing in Slurm for a while. partition: "" for all. seconds: 0 for no end."""

    partition: str = ""
    seconds: Annotated[float, Meta(ge=0, le=31536000)] = 0.0


class ResumeOrder(msgspec.Struct, kw_only=True):
    """Act again where the configuration allows it. partition: "" for all."""

    partition: str = ""


class InjectOrder(msgspec.Struct, kw_only=True):
    """Break a rank of the job: the slot, one on the node, or any. seconds: 0 for the fault's own duration."""

    job: str
    fault: str
    slot: int | None = None
    node: str | None = None
    seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    dry_run: bool = False
