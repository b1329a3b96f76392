"""Makes notices for mailboxes and chats from the log's records; `controller.server.telling` sends them. Pure.

A notice has the number of its event, so the same log gives the same notices, even after a restart. It never quotes
jobs, their programs or their output, which `unicronctl explain JOB` shows to those who may see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.system.errors import shorten
from unicron_detector.words import plural

ADMIN, HEALED, LEFT = "admin", "healed", "left"  # kinds of notices
QUIET = {ADMIN: 3600.0, HEALED: 0.0, LEFT: 600.0}  # seconds before the same notice may come again
TEXT = 600  # characters of a notice
MOST_LISTED = 50  # notices in one message; further ones are counted
TITLES = {ADMIN: "needs an admin", HEALED: "job healed", LEFT: "node left"}


@dataclass(frozen=True)
class Notice:
    """A notice."""

    id: int  # of its event
    time: float  # seconds since the epoch
    kind: str
    job: str
    node: str
    text: str
    key: str  # equal for notices of the same thing

    def as_dict(self) -> dict[str, object]:
        """Return the notice as a hook or a webhook gets it."""
        at = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds")
        return {"id": self.id, "time": at, "kind": self.kind, "job": self.job, "node": self.node, "text": self.text}


@dataclass(frozen=True)
class Message:
    """Several notices as one message: a subject, a text for people, and the same as plain data."""

    subject: str
    text: str
    data: dict[str, object]
    html: str = ""
    """The text as a page, for the mail of the weekly report."""


_NEEDS = {
    "suspect": "node {node} is a suspect: `unicronctl nodes` says why, and how to test it",
    "withheld": "a limit keeps node {node} in service, or a job on it",
    "refused": "Slurm refuses to take node {node} out of service",
    "take": "a limit keeps Unicron from what it would ask of Slurm",
    "slurm": "Slurm does not answer, and nothing is planned",
}
"""Texts by the first word of a record's key. Its reason stays in the log, because it may quote a job's output."""


KINDS = (
    records.NeedsAdmin,
    records.JobSetAside,
    records.MostSilent,
    records.JobHealed,
    records.NodeLost,
    records.NodeIsolated,
    records.NodeAvoided,
)
"""All kinds of records that have notices."""


def _notice(event: Event) -> Notice | None:
    """Return the notice of an event, whether it repeats another or not."""
    job = event.job
    match event.record:
        case records.NeedsAdmin(key=key, node=node, over=False):
            what = _NEEDS.get(key.partition(" ")[0], "something needs an admin").format(node=node)
            kind, text = ADMIN, f"{what}; `unicronctl status` has all"
        case records.JobSetAside(where=where) if where:  # without it, a mistake of the job's user
            kind, key = ADMIN, f"aside {job}"
            text = f"the controller cannot handle job {job}, which trains on without protection: see unicrond's log"
        case records.MostSilent(silent=silent, nodes=nodes):
            kind, key = ADMIN, "most silent"
            text = f"{silent} of {nodes} nodes fell silent together: nothing is done until it is known why"
        case records.JobHealed() as healed:
            kind, key, more = HEALED, "", len(healed.failures) - 1
            what = healed.cause + f" on {healed.node}" * bool(healed.node) + f" and {more} more" * (more > 0)
            cost = f"{healed.lost_seconds:.0f} s of {plural(healed.nodes, 'node')} are lost"
            text = f"job {job} trains again {healed.seconds:.0f} s after {what}; {cost}"
        case records.NodeLost(node=key):
            kind, text = LEFT, f"node {key} is lost, and job {job} goes on without it"
        case records.NodeIsolated(node=key):
            kind, text = LEFT, f"node {key} is out of service: `scontrol show node {key}` says why"
        case records.NodeAvoided(node=key, suspect=suspect):
            why = "; it may be at fault: `unicronctl nodes` says how to test it" if suspect else ""
            kind, text = LEFT, f"job {job} leaves node {key}{why}"
        case _:
            return None
    node = str(getattr(event.record, "node", ""))
    return Notice(event.id, event.time, kind, job, node, shorten(text, TEXT), f"{kind} {key}")


class Notices:
    """Makes notices from events in order, and leaves out a notice that repeats another within QUIET."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def of(self, event: Event) -> Notice | None:
        """Return the event's notice, if it has one."""
        notice = _notice(event)
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
    """Make one message of the notices. left_out: how many more there were. where: the controller's address."""
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
