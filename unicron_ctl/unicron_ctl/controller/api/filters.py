"""Chooses the jobs, nodes and failures that a question asks for, from the answers that its asker would get without a
filter. So a filter, and the hint about a mistyped value, never shows more than the asker may see."""

from __future__ import annotations

import difflib
import re
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence

from unicron_ctl.controller.api import privacy
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import Failure
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_ctl.shared.protocol.questions import Filters
from unicron_ctl.shared.slurm.host_lists import hosts

MOST_COMPARED = 128  # names with which a mistyped one is compared
_HOST_LIST = re.compile(r"[^\[\]\s]*(\[[0-9,-]+\][^\[\]\s]*)*")


class Unanswerable(Exception):
    """The question makes no sense; the text says what would."""


def checked_nodes(core: Core, wanted: Filters, asker: Asker, partitions: Iterable[str]) -> frozenset[str] | None:
    """Return the names of the wanted nodes, None for all. partitions: those that exist. Raises Unanswerable."""
    if wanted.user:
        users = {job.settings.user for job in privacy.visible(core.view, asker)}
        if wanted.user not in users:
            raise Unanswerable(f"no job here is of user {wanted.user!r}{near(wanted.user, users, 'users with jobs')}")
    check_partition(wanted.partition, partitions)
    if not wanted.nodes:
        return None
    names = hosts(wanted.nodes) if _HOST_LIST.fullmatch(wanted.nodes) else []
    if not names:
        raise Unanswerable(f"{wanted.nodes[:100]!r} is no list of nodes: write n1, or n[1-8,12],m3")
    visible = known_nodes(core, asker)
    if unknown := next((name for name in names if name not in visible), ""):
        raise Unanswerable(f"no node is called {unknown[:100]!r}{near(unknown, visible, 'nodes')}")
    return frozenset(names)


def check_partition(name: str, partitions: Iterable[str]) -> None:
    """Raises Unanswerable for a partition that does not exist. name: "" for all."""
    if name and name not in (existing := set(partitions)):
        raise Unanswerable(f"there is no partition {name[:100]!r}{near(name, existing, 'partitions')}")


def near(word: str, known: Collection[str], what: str) -> str:
    """Return a hint: the nearest known word, or the known words."""
    ordered = sorted(known)
    compared = ordered
    if len(ordered) > MOST_COMPARED:  # only the neighbours: comparing all would take seconds
        first = max(0, bisect(ordered, word) - MOST_COMPARED // 2)
        compared = ordered[first : first + MOST_COMPARED]
    if matches := difflib.get_close_matches(word[:100], compared, 1):
        return f": did you mean {matches[0]}?"
    few = ", ".join(ordered[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    return f": {what} are {few or 'none yet'}"


def known_nodes(core: Core, asker: Asker) -> set[str]:
    """Return the names of all nodes that the asker may know; for admins also those that have gone from Slurm."""
    if not privacy.sees_nodes(core.view, asker):
        jobs = (job for job in core.state.jobs.values() if asker.may_read(job))
        return {agent.node for job in jobs for agent in job.agents.values()}
    seen = core.view.slurm.seen
    names = {*(seen.by_name if seen else ()), *(view.node for view in core.view.live.agents())}
    return names | set(core.state.nodes) if asker.reads_all else names


def jobs(
    listed: Sequence[schema.Job], wanted: Filters, names: Collection[str] | None, nodes: Iterable[schema.Node]
) -> list[schema.Job]:
    """Return the wanted jobs. names: of nodes, None for all. nodes: as the asker sees them."""
    on = {user.partition("_")[0] for node in nodes if names is not None and node.node in names for user in node.used_by}
    return [
        job
        for job in listed
        if wanted.user in ("", job.user)
        and (not wanted.partition or wanted.partition in job.partitions)
        and (job.ended is None or job.ended.time >= wanted.since)
        and (
            names is None
            or job.job in on
            or any(one.node in names and (job.ended or not one.gone) for one in job.elements)
        )
    ]


def nodes(
    listed: Sequence[schema.Node], wanted: Filters, names: Collection[str] | None, jobs: Iterable[schema.Job]
) -> list[schema.Node]:
    """Return the wanted nodes. names: of nodes, None for all. jobs: as the asker sees them."""
    theirs = {job.job for job in jobs if job.user == wanted.user}
    return [
        node
        for node in listed
        if (names is None or node.node in names)
        and (not wanted.partition or wanted.partition in node.partitions)
        and (not wanted.user or any(user.partition("_")[0] in theirs for user in node.used_by))
    ]


def failures(
    listed: Iterable[Failure], wanted: Filters, names: Collection[str] | None, jobs: Iterable[schema.Job]
) -> Iterator[Failure]:
    """Yield the wanted failures. names: of nodes, None for all. jobs: the wanted jobs."""
    chosen = {job.job for job in jobs}
    for failure in listed:
        on_node = names is None or failure.record.node in names
        of_job = failure.job in chosen or not (wanted.user or wanted.partition)
        if on_node and of_job and failure.detected_at >= wanted.since:
            yield failure


def kinds(text: str) -> list[str]:
    """Return the kinds of events that the text names. Raises Unanswerable."""
    names = [word.replace("-", "_") for word in text.split()]
    for name in names:
        if name not in records.KINDS:
            raise Unanswerable(f"no event is of kind {name[:100]!r}{near(name, records.KINDS, 'kinds')}")
    return names
