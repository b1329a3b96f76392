"""Limits on taking nodes out of service, and on requeuing and holding elements, each over a stretch of time.

A detector that is wrong about one node is wrong about many: a bad rule or a fault of the switch must not take the whole
cluster out of service. At a limit the controller stops taking, records it, and goes on with what takes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from unicron_ctl.controller.model.cluster_state import GIVES_BACK, Mark
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_detector.words import plural

MINUTE = 60.0  # seconds in which requeues and holds of all jobs are counted


# ---------------------------------------------------------------- nodes
def most_isolated(config: ControllerConfig, cluster_nodes: int) -> int:
    """Return the number of nodes that may be taken out of service within the window."""
    return max(config.max_isolated_nodes, int(config.max_isolated_share * cluster_nodes))


def too_many(
    node: str, isolated: Mapping[str, Mark], cluster_nodes: int, config: ControllerConfig, now: float, state: str
) -> str:
    """Return why the node must not be taken out of service now, and what to do; empty if it may be. Pure.

    isolated: nodes that were taken out, even if somebody has given them back: that may be Slurm itself
    (ReturnToService=2). state: the state that the node would get, in Slurm's words.
    """
    window = config.isolation_window_seconds
    recent = [name for name, item in isolated.items() if now - item.at < window and name != node]
    most = most_isolated(config, cluster_nodes)
    if len(recent) < most:
        return ""
    return (
        f"{_names(recent)} taken out of service within {window:g} s, and no more than {most} of {cluster_nodes} nodes "
        f"may be (max_isolated_nodes, max_isolated_share): look at it, then "
        f"`scontrol update NodeName={node} State={state} Reason=...`, or raise the limit"
    )


def left_too_many(
    job: str, left: Collection[str], job_nodes: Collection[str], node: str, config: ControllerConfig
) -> str:
    """Return why the job must not leave this node, too; empty if it may. Pure.

    left: the nodes that it left within the window. job_nodes: the nodes where it runs.
    """
    others = set(left) - {node}
    size = len({*job_nodes, *others, node})
    most = max(1, int(config.max_isolated_job_share * size))
    if len(others) < most:
        return ""
    return (
        f"job {job} has left {', '.join(sorted(others)[:8])} within {config.isolation_window_seconds:g} s, and no more "
        f"than {most} of its {size} nodes may be left (max_isolated_job_share)"
    )


def standing(view: View) -> dict[str, tuple[int, int]]:
    """Return, by the setting's name, the used part of each limit of the whole cluster, and the limit."""
    config, now = view.config, view.now
    recent = sum(now - mark.at < config.isolation_window_seconds for mark in view.state.isolated.values())
    minute = Counter[str]()
    for take in reversed(view.state.taken):
        if now - take.at >= MINUTE:
            break
        minute[take.action] += 1
    return {
        "max_isolated_nodes": (recent, most_isolated(config, len(view.slurm.seen.nodes) if view.slurm.seen else 0)),
        "max_requeues_per_minute": (sum(minute[name] for name in GIVES_BACK), config.max_requeues_per_minute),
        "max_holds_per_minute": (minute["hold"], config.max_holds_per_minute),
    }


def _names(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{shown} {'were' if len(names) > 1 else 'was'}" if names else "none was"


# ---------------------------------------------------------------- elements
class Bounds:
    """The limits in this turn. Earlier takes are counted once, however many actions are checked."""

    def __init__(self, view: View) -> None:
        self._view, self._minute, self._requeued = view, Counter[str](), Counter[str]()
        window = view.config.isolation_window_seconds
        for take in reversed(view.state.taken):
            age = view.now - take.at
            if age >= max(MINUTE, window):
                break
            self._minute[take.action] += age < MINUTE
            self._requeued[take.job] += take.action in GIVES_BACK and age < window and not take.preempted

    def refuse(self, action: Action) -> str:
        """Return why the action must not be requested now; empty if it may be, and then it counts."""
        why, name, known = "", action.action, self._view.state.jobs.get(action.job)
        preempted = known is not None and known.was_noticed(action.element * known.settings.block)
        if name in GIVES_BACK:
            why = "" if preempted else self._of_job(action.job)  # a failure is not to find its job's share used up
            why = why or self._of_all(GIVES_BACK, "max_requeues_per_minute")
        elif name == "hold":
            why = self._of_all(("hold",), "max_holds_per_minute")
        if not why:
            self._minute[name] += 1
            self._requeued[action.job] += name in GIVES_BACK and not preempted
        return why

    def _of_job(self, job: str) -> str:
        view, window = self._view, self._view.config.isolation_window_seconds
        known = view.state.jobs.get(job)
        most = max(view.config.max_requeues_per_job, len(known.agents) if known else 0)
        return _limit(f" of job {job}", "requeued", self._requeued[job], window, most, "max_requeues_per_job")

    def _of_all(self, actions: tuple[str, ...], name: str) -> str:
        done = "held" if actions == ("hold",) else "requeued"
        most: int = getattr(self._view.config, name)
        return _limit("", done, sum(self._minute[action] for action in actions), MINUTE, most, name)


def _limit(whose: str, done: str, count: int, seconds: float, most: int, name: str) -> str:
    if count < most:
        return ""
    taken = f"{plural(count, 'element')}{whose} {'was' if count == 1 else 'were'} {done}"
    return f"{taken} within {seconds:g} s, and no more than {most} may be ({name})"


def within_limits(view: View, actions: Collection[Action], out: Outcome) -> list[Action]:
    """Return the actions that no limit forbids. If an element may not leave its node, nothing is started there."""
    bounds, found, kinds = Bounds(view), [], set()
    kept: set[str] = set()
    for action in actions:
        why = bounds.refuse(action)
        if why:
            kept.update(action.nodes)
            if (which := (action.job, action.action)) not in kinds:
                kinds.add(which)
                record_withheld(view, action, why, out)
        else:
            found.append(action)
    return [action for action in found if kept.isdisjoint(action.nodes)]


def record_withheld(view: View, action: Action, why: str, out: Outcome) -> None:
    """Record, once a minute, that the action is not requested of Slurm."""
    known, which = view.state.withheld_takes.get(f"{action.action} {action.job}"), (action.job, action.action)
    again = any(isinstance(r, records.TakeWithheld) and (job, r.action) == which for job, _, r in out.records)
    if again or (known is not None and view.now - known.at < MINUTE):
        return
    job = view.state.jobs.get(action.job)
    reason = f"{action.label} is not done: {why}; raise the limit if that is usual here"
    record = records.TakeWithheld(action=action.action, element=action.element, node=action.node, reason=reason)
    out.records.append((action.job, job.generation if job else 0, record))
