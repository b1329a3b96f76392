"""Accepts registrations, or keeps them waiting until Slurm confirms them (`unicron_ctl/controller/job/registration.py`
decides)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from unicron_ctl.controller.job.registration import (
    CONFIRM_SECONDS,
    Case,
    Request,
    admission,
    compare,
    refusal,
    turn_away,
    welcome,
)
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import AgentRecord, JobState, owner
from unicron_ctl.controller.model.quotas import LogQuota
from unicron_ctl.controller.model.view import Outcome, Send, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.system.throttle import Throttle

WAITING_KEPT = 20_000  # registrations that wait for Slurm
REFUSALS = 1 / 60, 100.0  # records of final refusals a second, and at once, of all agents together


class Registrations:
    """Accepts registrations, each of which may wait for Slurm; one per core."""

    def __init__(
        self,
        view: View,
        carry_out: Callable[[Outcome], bool],  # the core's
        on_replaced: Callable[[JobState, AgentRecord], None],  # called when an agent takes the place of another
        written: LogQuota,
    ) -> None:
        self._view, self._carry_out, self._on_replaced, self._written = view, carry_out, on_replaced, written
        self._waiting: dict[tuple[str, int, str], Request] = {}
        self._of_user: Counter[int | None] = Counter()  # of those that wait
        self._refusals = Throttle(*REFUSALS)
        self._on_record: set[tuple[str, str]] = set()  # final refusals

    def on_register(self, request: Request) -> None:
        """Handles a registration. Slurm has to confirm it, unless the agent was accepted before."""
        case, name = Case(self._view, request), request.message.job
        owner_key = case.job.owner if case.job is not None else owner(request.asker.uid, request.message.settings.user)
        if not self._written.allows(name, owner_key, self._view.now):
            self._put_off(request, f"job {name} or others of its user have made too many records: it has to wait")
            return
        known = case.known if case.job is not None and not case.job.over else None
        if not self._view.slurm.used or (known is not None and case.is_back):
            self._admit(case, known is None or known.confirmed)
            return
        first = self._waiting.get(request.name)
        if first is None and not self._make_room(request.asker):
            self._put_off(request, f"too many agents of {request.asker} wait for Slurm's word: job {name} has to wait")
            return
        if first is not None:
            self._count(first, -1)
            request = replace(request, since=first.since)
        self._waiting[request.name] = request
        self._count(request, 1)
        self._carry_out(Outcome(hurry=True))
        self._settle_waiting(request)

    def waits(self, name: tuple[str, int, str]) -> bool:
        """Whether this agent (job, element, agent) waits for Slurm."""
        return name in self._waiting

    def waiting_jobs(self) -> set[str]:
        """Jobs that Slurm has to confirm."""
        return {job for job, _, _ in self._waiting}

    def on_listing(self) -> None:
        """Compares the waiting agents with a new listing."""
        for request in list(self._waiting.values()):
            self._settle_waiting(request)

    def on_time(self) -> None:
        """Answers agents that have waited long enough for Slurm, in the order in which they came."""
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if self._view.now - first.since < CONFIRM_SECONDS:
                return
            self._settle_waiting(first)

    def _settle_waiting(self, request: Request) -> None:
        """Accepts or refuses the agent, if Slurm has shown its element or has not answered for long."""
        message = request.message
        found = compare(self._view, (message.job, message.element, message.node), request.asker, request.since)
        if found is None and self._view.now - request.since < CONFIRM_SECONDS:
            return
        self._forget(request.name)
        if isinstance(found, wire.Refusal):
            self._refuse(request, found)
        else:
            self._admit(Case(self._view, request, found), found is not None)

    def _make_room(self, asker: Asker) -> bool:
        """Whether another agent of this user may wait. If too many wait, one of the user with the most is dropped; it
        will register again."""
        if len(self._waiting) < WAITING_KEPT:
            return True
        uid, most = self._of_user.most_common(1)[0]
        if self._of_user[asker.uid] + 1 >= most:
            return False
        self._forget(next(name for name, waiting in reversed(self._waiting.items()) if waiting.asker.uid == uid))
        return True

    def _forget(self, name: tuple[str, int, str]) -> None:
        self._count(self._waiting.pop(name), -1)

    def _count(self, request: Request, by: int) -> None:
        self._of_user[request.asker.uid] += by
        if not self._of_user[request.asker.uid]:
            del self._of_user[request.asker.uid]

    def _put_off(self, request: Request, reason: str) -> None:
        self._carry_out(Outcome(sends=[Send(request.route, wire.Refusal(reason=reason))]))

    def _refuse(self, request: Request, refused: wire.Refusal) -> None:
        """Sends the refusal, and records a final one, each once."""
        out, node = Outcome(sends=[Send(request.route, refused)]), request.message.node
        peer = f"{request.message.job} {request.message.element}"
        news = refused.final and (peer, refused.reason) not in self._on_record
        if news and self._refusals.allows("", self._view.now):
            if len(self._on_record) >= WAITING_KEPT:
                self._on_record.clear()
            self._on_record.add((peer, refused.reason))
            reason = f"{node}: {refused.reason}"
            out.record(None, records.RegistrationRefused(peer=peer, node=node, reason=reason[:400]))
        self._carry_out(out)

    def _admit(self, case: Case, confirmed: bool) -> None:
        """Accepts the agent, unless one of the checks refuses it."""
        view, live, message, route = self._view, self._view.live, case.message, case.request.route
        if (refused := refusal(case)) is not None:
            self._carry_out(turn_away(case, refused))
            return
        if not case.is_back or case.begins:
            live.remove(message.job, message.element)
        before = None if case.begins or case.is_back else case.known
        self._carry_out(admission(case, confirmed))
        job = view.job(view.state.jobs[message.job])
        if before is not None:
            self._on_replaced(job.state, before)
        record = job.state.agents[message.element]  # its claims when it was compared with Slurm count
        agent = job.agents.get(message.element)
        if agent is None:
            slots, key = list(record.slots), case.request.key
            agent = AgentView(message.job, message.element, message.agent, record.node, route, slots, view.now, key)
            agent.last_registered, agent.door = view.now, record.door
            live.add(agent)
            job.last_arrival = view.now
        agent.route, agent.expired = route, False
        agent.images_at, agent.token = message.images, message.token
        agent.number = agent.whole = 0  # any status from now on is newer, and no heartbeat adds to an older one
        agent.repeated.clear()
        live.note_word(agent, view.now)
        job.touched.add(message.element)
        job.changed.update(record.slots)
        job.notice_agent(agent)  # it may have been lost, and its ranks need not change again
        self._carry_out(Outcome(sends=[Send(route, welcome(view, job.state))]))
