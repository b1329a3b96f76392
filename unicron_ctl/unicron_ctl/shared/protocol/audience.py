"""Cuts answers down to what a user may read: owners, readers and admins read all of a job, others what squeue would
show them, or nothing if Slurm's PrivateData says so (slurm.conf(5)). The controller uses these rules, and so does the
page, which asks once for all its viewers (docs/design/trust.md)."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from unicron_ctl.shared.protocol.answer_schema import ADMIN, OWNER, Job, Node, PlanReport, Scenario, Sharing, Status

Answer = TypeVar("Answer", bound=msgspec.Struct)
LAST_FAILURES = 100  # in an answer
JOBS, NODES = "jobs", "nodes"  # values of PrivateData


def without_fields(answer: Answer, *audiences: Meta) -> Answer:
    """Return the answer with defaults in all fields that are only for one of these audiences."""
    return replace(answer, **_defaults(type(answer), audiences))


@functools.cache
def _defaults(kind: type[msgspec.Struct], audiences: tuple[Meta, ...]) -> dict[str, object]:
    return {
        field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(kind)
        if any(note in audiences for note in getattr(field.type, "__metadata__", ()))
    }


def is_owner(uid: int | None, user: str, job_uid: int | None, job_user: str) -> bool:
    """Whether the job is this user's. Of a job that began without a credential only the name is known."""
    return uid == job_uid if job_uid is not None else bool(user) and user == job_user


def job_for_others(job: Job, listed: str | None) -> Job:
    """Return the answer about a job for users who do not own it. listed: its name in Slurm."""
    ended = without_fields(job.ended, OWNER) if job.ended else None
    return replace(without_fields(job, OWNER), ended=ended, name=job.name if listed is None else listed)


def node_for_users(node: Node, mine: Collection[str], private: Collection[str]) -> Node:
    """Return the answer about a node for a user who owns the jobs `mine`. private: Slurm's PrivateData."""
    waiting = {user: how for user, how in node.spare_of.items() if user.partition("_")[0] in mine}
    users = node.used_by
    if JOBS in private:
        users = [user for user in users if user.partition("_")[0] in mine]
    return replace(without_fields(node, ADMIN), spare_of=waiting, used_by=users)


@dataclass(frozen=True)
class Viewer:
    """A user proven by munge."""

    uid: int
    user: str  # the name, empty if the name service does not know it


class Sight:
    """Cuts an admin's answers down to what the controller would tell a viewer.

    Parameters
    ----------
    status
        The answer for admins, with each user's last failures.
    sharing
        The rules by which others see less.
    viewer
        None for a single user (auth = "none").
    """

    def __init__(self, status: Status, sharing: Sharing, viewer: Viewer | None) -> None:
        self._whole, self._sharing, self._viewer = status, sharing, viewer
        self.reads_all = (
            viewer is None or viewer.uid in (0, sharing.uid) or viewer.user in (*sharing.admins, *sharing.readers)
        )
        """The viewer sees as much as an admin."""
        self.mine = frozenset(job.job for job in status.jobs if self.reads_all or self._owns(job))
        """Ids of the jobs of which the viewer sees all."""

    def _owns(self, job: Job) -> bool:
        who = self._viewer
        return who is not None and is_owner(who.uid, who.user, self._sharing.owners.get(job.job), job.user)

    def status(self) -> Status:
        """Return the answer of `unicronctl status` for this viewer."""
        whole, sharing = self._whole, self._sharing
        if self.reads_all:
            return replace(whole, failures=whole.failures[-LAST_FAILURES:])
        private = sharing.private
        jobs = [
            job if job.job in self.mine else job_for_others(job, sharing.names.get(job.job))
            for job in whole.jobs
            if job.job in self.mine or JOBS not in private
        ]
        nodes = [] if NODES in private else [node_for_users(node, self.mine, private) for node in whole.nodes]
        return Status(
            controller=whole.controller,
            jobs=jobs,
            nodes=nodes,
            failures=[failure for failure in whole.failures if failure.job in self.mine][-LAST_FAILURES:],
            attention=[],
            observed=[],
            waf=sum(job.waf for job in jobs),
            plan=PlanReport(),
        )

    def scenario(self, whole: Scenario) -> Scenario:
        """Return the planner's input as this viewer may see it."""
        if self.reads_all:
            return whole
        shown = [job for job in whole.job if job.name in self.mine or JOBS not in self._sharing.private]
        return replace(whole, job=[job if job.name in self.mine else replace(job, node_names=[]) for job in shown])
