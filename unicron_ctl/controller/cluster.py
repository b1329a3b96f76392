"""The controller's side of Slurm: what it last showed, which nodes are lost or come back, what to ask of it.

Nothing here waits: polls, actions and probes are requests that a thread carries out, and their results come back as
calls. "No answer" is never read as "clean": without a fresh listing nothing is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detector.severity import Severity
from unicron_ctl.controller import slurm_states
from unicron_ctl.controller.admission import Gate, pair_test_command
from unicron_ctl.controller.isolation import Isolation
from unicron_ctl.controller.placement import (
    ENDED_BADLY,
    OCCUPIES,
    OURS,
    Action,
    Need,
    Placement,
    held_by_others,
    place,
)
from unicron_ctl.controller.replanning import Replanning
from unicron_ctl.controller.soft import AgentView
from unicron_ctl.controller.state import AgentRecord, JobState
from unicron_ctl.slurm.client import ElementInfo, NodeInfo

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine, Probe

HURRY_SECONDS = 0.1
RETRY_SECONDS = 5.0  # an action that Slurm refused is not asked for again before
REASON = f"{OURS}[node_problem]"
GONE_SECONDS = 10.0  # a job of which Slurm shows no element for so long is over


@dataclass(frozen=True)
class Poll:
    """List nodes and elements."""


@dataclass(frozen=True)
class Run:
    """Carry out actions in order; the first that fails for an element or node skips the rest of its own."""

    actions: tuple[Action, ...]


@dataclass
class Observation:
    """What Slurm showed, and when it was asked."""

    asked_at: float
    nodes: list[NodeInfo]
    elements: list[ElementInfo]


class Cluster:
    """One per engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seen: Observation | None = None
        self.error = ""
        self.asked_at = 0.0
        self._busy = False
        self._next_poll = 0.0
        self._refused: dict[tuple[str, str, int, str], float] = {}
        self._said: set[tuple[str, str, int, str]] = set()
        self._probing: set[str] = set()
        self._aside: dict[str, str] = {}  # nodes to be set down as soon as Slurm has done it, with the reason
        self._missing_since: dict[str, float] = {}
        self._expected: dict[str, list[int]] = {}
        self.gate = Gate(engine)
        self.replanning = Replanning(engine, self)
        self.isolation = Isolation(engine)

    # ------------------------------------------------------------ questions of the engine
    def put_aside(self) -> set[str]:
        """Nodes that must get no work now, whatever Slurm says of them yet."""
        downed = {name for name, node in self._engine.state.nodes.items() if node.downed}
        return downed | set(self._aside)

    def expected(self, job: JobState) -> list[int] | None:
        """Elements that run or are about to; None while that is not known freshly enough."""
        last_arrival = max(
            (view.last_registered for view in self._engine.agents.values() if view.job == job.job), default=0.0
        )
        if (
            not self._engine.has_slurm
            or self.seen is None
            or self.seen.asked_at < last_arrival
            or job.job not in self._expected
        ):
            return None
        return self._expected[job.job]

    def node_info(self, name: str) -> NodeInfo | None:
        return next((node for node in self.seen.nodes if node.name == name), None) if self.seen else None

    # ------------------------------------------------------------ orders of the engine
    def hurry(self) -> None:
        """Something changed: ask Slurm soon."""
        self._next_poll = min(self._next_poll, self._engine.now + HURRY_SECONDS)

    def tick(self) -> None:
        """Ask Slurm when it is time."""
        engine = self._engine
        if engine.has_slurm and not self._busy and engine.now >= self._next_poll:
            self._busy, self.asked_at = True, engine.now
            engine.requests.append(Poll())

    def probe(self, job: JobState, element: int, agent: AgentRecord, failure: int) -> None:
        """A node is silent: does its slurmd answer?"""
        from unicron_ctl.controller.engine import Probe

        info = self.node_info(agent.node)
        if not self._engine.has_slurm or info is None:
            text = (
                "not confirmed: Slurm has not shown this node"
                if self._engine.has_slurm
                else "not confirmed: runs without Slurm"
            )
            self._engine.emit("failure_action", job.job, failure=failure, text=text)
            return
        self._probing.add(agent.node)
        self._engine.requests.append(Probe(job.job, element, agent.agent, agent.node, info.address, info.port, failure))

    def isolate(self, job: JobState, view: AgentView, failure: int, reason: str) -> bool:
        """Puts a living node aside whose own fault a rank reported. False when that cannot or must not be done: the
        process is to be started again in place then."""
        info = self.node_info(view.node)
        if not self._engine.has_slurm or info is None or not self.isolation.may(job, info, failure, reason):
            return False
        self._down(job, view.element, info, failure, f"{REASON}: {reason}"[:200])
        return True

    # ------------------------------------------------------------ results
    def on_probe(self, probe: Probe, answers: bool) -> None:
        """The node's slurmd answered the connect, or not."""
        engine = self._engine
        self._probing.discard(probe.node)
        job, view = engine.state.jobs.get(probe.job), engine.agents.get((probe.job, probe.element))
        if job is None or job.ended:
            return
        if view is not None and view.agent == probe.agent and view.alive:
            engine.emit(
                "failure_verdict",
                job.job,
                failure=probe.failure,
                severity=int(Severity.SEV3),
                action="reattempt",
                reason=f"{probe.node} was silent and speaks again: its ranks start anew and rejoin",
            )
        elif answers:
            task = slurm_states.task_end(engine.classifier, view.task_status if view is not None else None)
            saw = f" (Slurm saw its task end: {task.reason})" if task else ""
            engine.emit(
                "failure_verdict",
                job.job,
                failure=probe.failure,
                severity=int(Severity.SEV2),
                cause=task.cause if task else "exited_abnormally",
                action="restart",
                reason=f"slurmd on {probe.node} answers: only the agent died{saw}; "
                "its element is started again in place",
            )
            engine.emit("agent_gone", job.job, element=probe.element, agent=probe.agent, reason="agent died")
        else:
            engine.emit(
                "node_lost",
                job.job,
                node=probe.node,
                element=probe.element,
                reason=f"slurmd on {probe.node} does not answer",
            )
            engine.emit(
                "failure_verdict",
                job.job,
                failure=probe.failure,
                severity=int(Severity.SEV1),
                action="isolate",
                reason=f"{probe.node} is lost: no heartbeat, and its slurmd does not answer",
            )
            info = self.node_info(probe.node)
            if info is not None:
                self._down(
                    job, probe.element, info, probe.failure, f"{REASON}: lost heartbeat of {job.job}_{probe.element}"
                )
        self.hurry()

    def on_error(self, message: str) -> None:
        """Slurm did not answer the question."""
        self._busy, self._next_poll = False, self._engine.now + self._engine.config.slurm_poll_seconds
        if message != self.error:
            self._engine.emit("slurm_error", reason=message)
        self.error = message

    def on_poll(self, nodes: Sequence[NodeInfo], elements: Sequence[ElementInfo]) -> None:
        """A fresh listing."""
        engine = self._engine
        self._busy, self._next_poll = False, engine.now + engine.config.slurm_poll_seconds
        if self.error:
            engine.emit("slurm_back", reason="Slurm answers again")
            self.error = ""
        self.seen = Observation(self.asked_at, list(nodes), list(elements))
        slurm_states.look(engine, self.seen)
        actions = [*self.gate.nodes_back(), *self._down_again(), *self._ended_jobs()]
        jobs = self._managed()
        if jobs:
            self.replanning.replan(jobs)
            actions += self._place(jobs)
        self._run(actions)

    def on_done(self, action: Action, error: str) -> None:
        """One action was carried out, or was refused."""
        key = (action.action, action.job, action.element, action.node)
        engine = self._engine
        if error:
            self._refused[key] = engine.now
            engine.emit(
                "slurm_error",
                action.job,
                action=action.action,
                element=action.element,
                node=action.node,
                reason=f"{action.label}: {error}",
            )
            if action.action == "down":
                self.isolation.on_refused(action, error)
            if action.action == "pin":
                engine.emit("unpinned", action.job, element=action.element)
            return
        self._refused.pop(key, None)
        if action.action == "down":
            self._aside.pop(action.node, None)
            self.isolation.refused.pop(action.node, None)
            engine.emit("node_down", action.job, node=action.node, reason=action.text)
        elif action.action == "resume":
            verified = self.gate.verified(action.node)
            engine.emit("node_resumed", node=action.node, reason=action.reason, verified=verified)

    def on_run_done(self) -> None:
        """All actions of a request are through: look at what became of them."""
        self._busy, self._next_poll = False, 0.0

    # ------------------------------------------------------------ nodes
    def _down(self, job: JobState, element: int, node: NodeInfo, failure: int, text: str) -> None:
        engine = self._engine
        if "DOWN" in node.states or "DRAIN" in node.states:
            why = node.reason or "no reason given"
            engine.emit(
                "failure_action",
                job.job,
                failure=failure,
                text=f"{node.name} is out of service already ({why}): left as it is",
            )
            return
        if node.name in self.put_aside():
            engine.emit("failure_action", job.job, failure=failure, text=f"{node.name} is being set down already")
            return
        done = f"set {node.name} down in Slurm: {text}; once it is back, `{pair_test_command(node.name)}` tests it"
        engine.emit("failure_action", job.job, failure=failure, text=done)
        self._aside[node.name] = text
        self._run(
            [Action("down", job.job, element, node.name, "a node that is out of order must get no work", text)],
            urgent=True,
        )

    def _down_again(self) -> list[Action]:
        """What Slurm refused to set down, until it is out of service by whatever means."""
        found = []
        for name, item in list(self.isolation.refused.items()):
            node = self.node_info(name)
            if node is not None and not node.healthy:
                self._aside.pop(name, None)
                del self.isolation.refused[name]
            elif node is not None:
                text = self._aside.get(name, REASON)
                found.append(Action("down", item["job"], -1, name, "Slurm refused it before", text))
        return found

    def being_set_down(self, node: str) -> bool:
        """Asked of Slurm, and not yet to be seen there."""
        return node in self._aside

    # ------------------------------------------------------------ jobs
    def _managed(self) -> list[JobState]:
        return [job for _, job in sorted(self._engine.state.jobs.items()) if not job.ended]

    def elements(self, job: str) -> dict[int, ElementInfo]:
        """What Slurm last showed of the job; there must have been a listing."""
        assert self.seen is not None
        return {e.element: e for e in self.seen.elements if e.job == job}

    def _ended_jobs(self) -> list[Action]:
        """Elements that still wait for a job that is over; and jobs that Slurm no longer runs."""
        engine, actions = self._engine, []
        for job in list(engine.state.jobs.values()):
            elements = self.elements(job.job).values()
            if job.ended:
                actions += [
                    Action("cancel", e.job, e.element, "", f"job {job.job} has ended: {job.ended['reason']}"[:200])
                    for e in elements
                    if e.state == "PENDING" and not held_by_others(e)
                ]
                continue
            here = any(view.job == job.job and view.alive for view in engine.agents.values())
            dead = self.dead(job)
            coming = any(
                e.state in OCCUPIES or e.state == "PENDING" or (e.element in dead and e.state in ENDED_BADLY)
                for e in elements
            )
            if here or coming:
                self._missing_since.pop(job.job, None)
            elif engine.now - self._missing_since.setdefault(job.job, engine.now) > GONE_SECONDS:
                engine.emit(
                    "job_ended", job.job, job.generation, code=0, reason="Slurm no longer runs any of its elements"
                )
        return actions

    @staticmethod
    def dead(job: JobState) -> frozenset[int]:
        """Elements whose agent died."""
        return frozenset(element for element, agent in job.agents.items() if agent.gone == "agent died")

    # ------------------------------------------------------------ placing
    def _place(self, jobs: Sequence[JobState]) -> list[Action]:
        assert self.seen is not None
        engine, state = self._engine, self._engine.state
        needs = []
        for job in jobs:
            inside = set(job.elements({**job.members, **job.joining}))
            needs.append(
                Need(
                    job=job.job,
                    desired=state.assignment.get(job.job, 0),
                    members=frozenset(inside),
                    dead=self.dead(job),
                    leaving=tuple(job.leaving),
                    home={element: agent.node for element, agent in job.agents.items()},
                    why=state.plan_report.get("reasons", {}).get(job.job, ""),
                )
            )
        waiting = self.put_aside() | self._probing
        found = place(needs, self.seen.elements, self.seen.nodes, state.pins, waiting, engine.now)
        self._record_allotment(jobs, found)
        for job_id, element in found.unpinned:
            engine.emit("unpinned", job_id, element=element)
        return found.actions

    def _record_allotment(self, jobs: Sequence[JobState], found: Placement) -> None:
        for job in jobs:
            allotted, leaving = found.allotted[job.job], found.leaving[job.job]
            self._expected[job.job] = allotted
            if job.allotted != allotted or job.leaving != leaving:
                words = f"elements {allotted}" + (f", {leaving} leave at the next boundary" if leaving else "")
                self._engine.emit("allotted", job.job, job.generation, elements=allotted, leaving=leaving, reason=words)

    # ------------------------------------------------------------ acting
    def _run(self, actions: Sequence[Action], urgent: bool = False) -> None:
        """Records the actions and asks for them; those that Slurm has just refused wait."""
        engine, todo = self._engine, []
        for action in actions:
            key = (action.action, action.job, action.element, action.node)
            if engine.now - self._refused.get(key, -RETRY_SECONDS) < RETRY_SECONDS:
                continue
            if engine.config.observe:
                if key not in self._said:
                    self._said.add(key)
                    engine.emit(
                        "observed",
                        action.job,
                        would=action.label,
                        reason=f"observe mode: would {action.label}: {action.reason}",
                    )
                continue
            engine.emit(
                "slurm_action",
                action.job,
                action=action.action,
                element=action.element,
                node=action.node,
                slurm_reason=action.text,
                reason=f"{action.label}: {action.reason}",
            )
            self._for_failures(action)
            todo.append(action)
        if todo:
            self._busy = self._busy or not urgent
            engine.requests.append(Run(tuple(todo)))

    def _for_failures(self, action: Action) -> None:
        """What is done for an element whose failure is not mended yet belongs to that failure's story."""
        job = self._engine.state.jobs.get(action.job)
        if job is None or action.action not in ("requeue", "pin"):
            return
        for failure in list(job.failures):
            if (
                failure["element"] == action.element
                and failure["restored_at"] is None
                and failure["kind"] in ("node", "agent")
            ):
                text = (
                    f"start element {action.job}_{action.element} on {action.node}"
                    if action.action == "pin"
                    else f"requeue {action.job}_{action.element}"
                )
                self._engine.emit("failure_action", action.job, failure=failure["id"], text=text)
