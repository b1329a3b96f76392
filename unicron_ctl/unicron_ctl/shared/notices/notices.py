"""Makes notices for people outside, as a pure function over the log. Sending them is `controller.server.telling`'s.

A notice is made of a record, and its number is the event's: so the same log gives the same notices, also after a
restart. It has no words of jobs, of their programs or their output: it may go to mailboxes and chats. `unicronctl
explain JOB` has those, for whom they are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.system.errors import shorten

ADMIN, HEALED, LEFT = "admin", "healed", "left"  # kinds of notices
QUIET = {ADMIN: 3600.0, HEALED: 0.0, LEFT: 600.0}  # seconds in which the same is not told again
TEXT = 600  # characters of one
MOST_LISTED = 50  # notices of one message; the others are counted
TITLES = {ADMIN: "needs an admin", HEALED: "job healed", LEFT: "node left"}


@dataclass(frozen=True)
class Notice:
    """One thing to tell. id: of its event. time: seconds since the epoch. key: what makes two of them the same."""

    id: int
    time: float
    kind: str
    job: str
    node: str
    text: str
    key: str

    def as_dict(self) -> dict[str, object]:
        """For a hook or a webhook."""
        at = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds")
        return {"id": self.id, "time": at, "kind": self.kind, "job": self.job, "node": self.node, "text": self.text}


@dataclass(frozen=True)
class Message:
    """Several notices as one: a subject, lines for people, and the same as plain data."""

    subject: str
    text: str
    data: dict[str, object]
    html: str = ""
    """The same as a page, for mail."""


_NEEDS = {
    "suspect": "node {node} is a suspect: `unicronctl nodes` says why, and how to test it",
    "withheld": "a limit keeps node {node} in service, or a job on it",
    "refused": "Slurm refuses to take node {node} out of service",
    "take": "a limit keeps Unicron from what it would ask of Slurm",
    "slurm": "Slurm does not answer, and nothing is planned",
}
"""What needs an admin, by the first word of its key. Its reason may quote a job's output, so it stays in the log."""


def _needs_admin(event: Event, record: records.NeedsAdmin) -> Notice | None:
    if record.over:
        return None
    text = _NEEDS.get(record.key.partition(" ")[0], "something needs an admin").format(node=record.node)
    return _notice(event, ADMIN, f"{text}; `unicronctl status` has all", record.key)


def _set_aside(event: Event, record: records.JobSetAside) -> Notice | None:
    if not record.where:  # a mistake of its user
        return None
    text = f"the controller cannot handle job {event.job}, which trains on without protection: see unicrond's log"
    return _notice(event, ADMIN, text, f"aside {event.job}")


def _most_silent(event: Event, record: records.MostSilent) -> Notice | None:
    text = f"{record.silent} of {record.nodes} nodes fell silent together: nothing is done until it is known why"
    return _notice(event, ADMIN, text, "most silent")


def _job_healed(event: Event, record: records.JobHealed) -> Notice | None:
    count = len(record.failures)
    what = f"{record.cause}" + (f" on {record.node}" if record.node else "") + (f" and {count - 1} more" * (count > 1))
    cost = f"{record.lost_seconds:.0f} s of {record.nodes} node{'s' * (record.nodes != 1)} are lost"
    return _notice(event, HEALED, f"job {event.job} trains again {record.seconds:.0f} s after {what}; {cost}", "")


def _node_lost(event: Event, record: records.NodeLost) -> Notice | None:
    return _notice(event, LEFT, f"node {record.node} is lost, and job {event.job} goes on without it", record.node)


def _node_isolated(event: Event, record: records.NodeIsolated) -> Notice | None:
    text = f"node {record.node} is out of service: `scontrol show node {record.node}` says why"
    return _notice(event, LEFT, text, record.node)


def _node_avoided(event: Event, record: records.NodeAvoided) -> Notice | None:
    why = "; it may be at fault: `unicronctl nodes` says how to test it" if record.suspect else ""
    return _notice(event, LEFT, f"job {event.job} leaves node {record.node}{why}", record.node)


def _notice(event: Event, kind: str, text: str, key: str) -> Notice:
    node = str(getattr(event.record, "node", ""))
    return Notice(event.id, event.time, kind, event.job, node, shorten(text, TEXT), f"{kind} {key}")


_OF: dict[type[Record], Callable[[Event, Any], Notice | None]] = {
    records.NeedsAdmin: _needs_admin,
    records.JobSetAside: _set_aside,
    records.MostSilent: _most_silent,
    records.JobHealed: _job_healed,
    records.NodeLost: _node_lost,
    records.NodeIsolated: _node_isolated,
    records.NodeAvoided: _node_avoided,
}
KINDS = tuple(_OF)
"""All kinds of records of which there are notices."""


class Notices:
    """Makes notices of events in order, each once: the same again within QUIET is left out."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def of(self, event: Event) -> Notice | None:
        """The event's notice, if somebody is to hear of it."""
        make = _OF.get(type(event.record))
        notice = make(event, event.record) if make is not None else None
        if notice is None:
            return None
        last, quiet = self._last.get(notice.key), QUIET[notice.kind]
        if quiet:
            self._last = {key: at for key, at in self._last.items() if event.time - at < max(QUIET.values())}
            if last is not None and 0 <= event.time - last < quiet:  # the clock may have stepped back
                return None
            self._last[notice.key] = event.time
        return notice


def compose(notices: Sequence[Notice], left_out: int, where: str) -> Message:
    """One message of these. left_out: how many more there were. where: the controller's address."""
    ordered = sorted(notices, key=lambda notice: (list(QUIET).index(notice.kind), notice.id))
    first, more = ordered[0], len(ordered[MOST_LISTED:]) + left_out
    listed = sorted(ordered[:MOST_LISTED], key=lambda notice: notice.id)
    others = len(notices) + left_out - 1
    subject = f"Unicron: {TITLES[first.kind]}: {shorten(first.text, 100)}" + (f" (+{others})" if others else "")
    lines = []
    for kind in QUIET:
        chosen = [notice for notice in listed if notice.kind == kind]
        lines += [f"{TITLES[kind]}:"] * bool(chosen)
        lines += [f"  {datetime.fromtimestamp(n.time):%Y-%m-%d %H:%M:%S} {n.text}" for n in chosen]
    lines += [f"and {more} more: `unicronctl events`"] * bool(more)
    data = {"version": 1, "controller": where, "notices": [n.as_dict() for n in listed], "left_out": more}
    return Message(subject, "\n".join(lines) + "\n", data)
