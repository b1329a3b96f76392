"""Replication of states that scripts without a session keep with `unicron.memory` (docs/design/memory.md, "For scripts
without a session"). Pure.

A state of which each rank has a part is of use only if the parts are of one iteration. The controller does not know
which iterations a script saves, so a cut is the first saved one from a number on. Ranks that hear of it too late keep a
later one, and the next cut is named further ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.replication.receivers import Away, targets_by_element
from unicron_ctl.controller.replication.strategy import (
    LEAD_SECONDS,
    Pace,
    ReplicationStrategy,
    StoredState,
    domains_of,
    kinds_of,
    with_memory,
)
from unicron_ctl.shared.protocol import structs
from unicron_transition.snapshot.image_format import SAME, USER

HEARD_SECONDS = 1.0  # the greatest age of an agent's word


class ScriptStates(ReplicationStrategy):
    """The strategy for states that plain programs save."""

    lead_seconds = LEAD_SECONDS + HEARD_SECONDS
    removable = False

    def first_iteration(self, job: JobView) -> int:
        newest = newest_saved(job)
        return newest.iteration + 1 if newest is not None else 0

    def begun(self, job: JobView) -> bool:
        return newest_saved(job) is not None

    def rate(self, view: View, job: JobView, pace: Pace) -> float | None:
        newest = newest_saved(job)
        if newest is None:
            return None
        if pace.generation != newest.base:
            pace.generation, pace.iteration, pace.at, pace.rate = newest.base, newest.iteration, view.now, 0.0
        measured = pace.rate > 0.0
        if view.now - pace.at >= 2 * HEARD_SECONDS:
            measured, pace.rate = True, max(0, newest.iteration - pace.iteration) / (view.now - pace.at)
            pace.iteration, pace.at = newest.iteration, view.now
        return pace.rate if measured else None

    def targets(
        self, view: View, job: JobView, waiting: Collection[int], away: Away
    ) -> dict[int, list[structs.Holder]]:
        able, inside, copies = with_memory(job), job.state.inside, job.state.settings.copies
        kind = kinds_of(job.state)[-1]
        if self.alike(job) and len({kind(agent) for agent in able if agent.element in inside}) > copies:
            return {}
        return targets_by_element(able, inside, copies, domains_of(view, job.state), inside_first=True, away=away)

    def stored_states(self, job: JobView) -> list[StoredState]:
        """Return whole states. One of another world's size does not fit, but a world of that size may come back."""
        nodes: dict[tuple[int, int | str, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for agent in with_memory(job):
            for image in agent.status.images:
                if image.kind == USER:
                    size, place = (SAME, 0) if image.mark == SAME else (image.size, image.place)
                    nodes[image.iteration, size, image.base][place].add(agent.node)
        return [
            StoredState(iteration, min(map(len, places.values())), size in (SAME, len(job.state.members)))
            for (iteration, size, _), places in nodes.items()
            if len(places) == (1 if size == SAME else size)
        ]

    def parts(self, job: JobView, agent: AgentView) -> int:
        return 1 if self.alike(job) else len(agent.slots)

    def kept_iterations(self, job: JobView, cut: int) -> set[int]:
        plan = job.state.plan
        images = (image for agent in job.alive() for image in agent.status.images if image.kind == USER)
        base = plan.generation if plan is not None else -1
        return {image.iteration for image in images if image.iteration >= cut and image.base == base}

    def alike(self, job: JobView) -> bool:
        newest = newest_saved(job)
        return newest is not None and newest.mark == SAME


def newest_saved(job: JobView) -> structs.Image | None:
    """Return the newest state that the present world has saved."""
    plan = job.state.plan
    saved = [image for agent in job.alive() if (image := agent.status.saved) is not None]
    mine = [image for image in saved if plan is not None and image.base == plan.generation]
    return max(mine, key=lambda one: one.iteration, default=None)
