"""One job's turn: sense, judge, decide, act.

A Break and a plan go out before what follows from them is worked out (`later`): thousands of agents hear of a death
while the controller still looks through its members.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from unicron.ctl.controller.failure_detector import quorum
from unicron.ctl.controller.job import adoption, job_events, spares, transitions
from unicron.ctl.controller.job.desk import JobDesk
from unicron.ctl.controller.job.modes import Happening
from unicron.ctl.controller.job.orders import Letter, Order, due_orders, next_start
from unicron.ctl.controller.judge.rank_failures import revive
from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.finding import Finding
from unicron.ctl.controller.model.job_state import JobState, Phase
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.state_machine import ACTIONS
from unicron.ctl.controller.model.view import Outcome, Send, View
from unicron.ctl.controller.replication.cuts import cut_orders, report_gaps
from unicron.ctl.controller.sense import members, progress
from unicron.ctl.controller.sense.sensors import SENSORS
from unicron.ctl.protocol import wire

EVENTS_PER_TURN = 50  # of one job's state machine; more would be a loop
ORDERS_KEPT = 200  # of one agent: when each was sent last
SOON = 1e-6  # seconds; sums of times are not exact


class BrokenInvariant(Exception):
    """A job is in a state in which it must not be."""


class Turns:
    """desk: what is remembered of a job. carry_out, judge, send: the core's door."""

    def __init__(
        self,
        view: View,
        desk: Callable[[JobState], JobDesk],
        carry_out: Callable[[Outcome], bool],
        judge: Callable[[Finding], None],
        send: Callable[[Send], None],
    ) -> None:
        self._view, self._desk, self._carry_out, self._judge, self._send = view, desk, carry_out, judge, send
        self.later: set[str] = set()
        """Jobs whose turn goes on once what was decided has gone out."""
        self.begun: set[str] = set()
        """Jobs in a new phase, of which not all members have been looked at."""

    def advance(self, job: JobState) -> None:
        """Sense, judge, decide, act."""
        view = self._view.job(job)
        if not job.over and view.live.ahead and adoption.ahead(view):
            self._carry_out(adoption.adopt_generation(self._view, view))
            if adoption.ahead(view):
                return  # nothing is decided of what is not known
        if not job.over:
            self._sense(job, view)
            for _ in range(EVENTS_PER_TURN):
                if job.over:
                    break
                before, happening = job.phase, job_events.next_event(self._view, view)
                if happening is None or not self._transit(job, view, happening):
                    break
                if job.phase is not before and job.phase in (Phase.BREAKING, Phase.ENTERING):
                    self._send_first(job, view)
                    return
                self._sense(job, view)
            else:
                raise BrokenInvariant(f"the state machine does not come to rest in {job.phase}")
            self._revive(job, view)
            self._carry_out(spares.report_spares(self._view, view, self._desk(job).waiting))
        if not job.set_aside and (view.live.touched or job.job in self.begun):
            self._send_orders(job)

    def _send_first(self, job: JobState, view: JobView) -> None:
        """A Break, or a plan, is on its way before anything else is worked out."""
        self.later.add(job.job)
        if job.phase is Phase.BREAKING:
            letter = self._letter(view)
            for agent in view.alive():
                self._recheck(view, agent.element, self._order(agent, letter.break_key, letter.broken))
        else:
            view.live.touched.update(view.agents)
            self._send_orders(job)

    def _sense(self, job: JobState, view: JobView) -> None:
        if job.over:
            return
        live, desk = view.live, self._desk(job)
        self._begin_phase(job, view)
        for _ in range(2):  # what is made of the first findings may change what others mean
            if not live.changed:
                break
            if job.phase is Phase.OFFERING:
                live.touched.update({job.element(slot) for slot in live.changed})
            odd = members.plain(view, desk.watch.standing)
            live.changed.clear()
            if not odd:
                break
            found = list(members.look(self._view, view, odd))
            for slot in odd:
                view.notice(slot, self._view.now)
                desk.watch.standing.notice(view, slot)
                desk.notice_outsider(view, slot)
                live.touched.add(job.element(slot))
            for finding in found:
                self._judge(finding)
        if not job.over:
            for sensor in SENSORS:
                for finding in list(sensor(self._view, view)):
                    self._judge(finding)
            self._unblock(job, view)
            live.overdue = progress.late_to_enter(self._view, view, desk.times)
            for look in (progress.late_to_stop, progress.never_entered):
                self._carry_out(look(self._view, view, desk.times))
            self._ask_witnesses(job, view)
            for agent in quorum.agents_with_free_votes(self._view, view):
                over = quorum.last_vote(job, agent)
                self._order(agent, f"over {over}", wire.Ping(over=over))

    def _unblock(self, job: JobState, view: JobView) -> None:
        """Whoever waits for a rank of its replica that has stopped is told to stop, too."""
        found = progress.blocked(self._view, view)
        if found - view.live.blocked:
            view.live.blocked |= found
            view.live.touched.update(job.elements(job.hit(view.live.blocked)))

    def _ask_witnesses(self, job: JobState, view: JobView) -> None:
        """After a rank stopped by itself every agent is asked whether it lives."""
        if job.phase is Phase.BREAKING:
            return
        latest = self._view.now - progress.WITNESS_SECONDS
        since = max((at for at in view.live.stopped.values() if at <= latest), default=None)
        if since is not None:
            for agent in progress.unheard_since(view, since):
                self._order(agent, f"ping {since}", wire.Ping())

    def _transit(self, job: JobState, view: JobView, happening: Happening) -> bool:
        """One step of the job's state machine. False when the event changes nothing in this phase."""
        action = ACTIONS[job.phase].get(happening.event)
        return action is not None and self._carry_out(transitions.PERFORM[action](self._view, view, happening))

    def _revive(self, job: JobState, view: JobView) -> None:
        """Starts processes again that a plan went on without."""
        if job.over:
            return
        desk = self._desk(job)
        for slot in sorted(desk.outsiders):
            agent = view.agent(slot)
            if agent is None or not agent.alive:
                desk.outsiders.discard(slot)  # what comes in its place is looked at when it does
                continue
            self._carry_out(revive(self._view, view, slot))
            if not desk.is_outsider(view, slot):
                desk.outsiders.discard(slot)

    def _begin_phase(self, job: JobState, view: JobView) -> None:
        """All members are looked at once; put off until what was decided has gone out."""
        if job.job in self.begun:
            self.begun.discard(job.job)
            if job.phase is not Phase.OFFERING:
                self._desk(job).watch.standing.clear()
            view.begin_phase(self._view.now)

    def repeat_orders(self, job: JobState) -> None:
        """Tells those again who have not obeyed. Called at every tick."""
        view = self._view.job(job)
        self._look_again(view)
        desk = self._desk(job)
        for agent, order in list(cut_orders(self._view, view, desk.cuts, desk.waiting.ready)):
            self._order(agent, f"cut {order.iteration}", order)
        self._carry_out(report_gaps(view, desk.cuts))
        if view.live.touched:
            self._send_orders(job)

    def _send_orders(self, job: JobState) -> None:
        """Tells every agent that may not have obeyed; whoever is told something is looked at again when it may be
        repeated."""
        view = self._view.job(job)
        if job.over:
            self._begin_phase(job, view)
        letter, now = self._letter(view), self._view.now
        rest: list[tuple[AgentView, str, Order]] = []
        for element in sorted(view.live.touched):
            agent = view.agents.get(element)
            if agent is None:
                continue
            told = False
            for key, message in due_orders(view, agent, letter, now):
                told = True
                if isinstance(message, wire.Break):  # everybody hears of a Break before anything else happens
                    self._recheck(view, element, self._order(agent, key, message))
                else:
                    rest.append((agent, key, message))
            starts = next_start(view, agent, now) if element in view.live.restarts else None
            if starts is not None:
                self._recheck(view, element, starts)
            elif not told:
                view.live.restarts.discard(element)
        view.live.touched.clear()
        for agent, key, message in rest:
            self._recheck(view, agent.element, self._order(agent, key, message))

    def _letter(self, view: JobView) -> Letter:
        """Kept as long as it says what is to be said."""
        job, arrivals = view.state, view.live.last_arrival
        if job.over:
            return Letter(job)
        desk = self._desk(job)
        blocked = view.live.blocked
        if desk.letter is None or not desk.letter.holds(job, arrivals, blocked):
            desk.letter = Letter(job, arrivals, blocked=blocked)
        return desk.letter

    @staticmethod
    def _recheck(view: JobView, element: int, at: float) -> None:
        if at < view.live.due.get(element, float("inf")):
            view.live.due[element] = at
            heapq.heappush(view.live.told, (at, element))

    def _look_again(self, view: JobView) -> None:
        """Agents that were told something a while ago: have they obeyed?"""
        told = view.live.told
        while told and told[0][0] <= self._view.now:
            at, element = heapq.heappop(told)
            if view.live.due.get(element) == at:
                del view.live.due[element]
                view.live.touched.add(element)

    def _order(self, agent: AgentView, key: str, order: Order) -> float:
        """Sends it, unless that was done a moment ago. Returns when it may be repeated."""
        now, pause = self._view.now, self._view.config.repeat_seconds
        last = agent.repeated.get(key)
        if last is not None and now - last < pause - SOON:
            return last + pause
        if len(agent.repeated) > ORDERS_KEPT:
            agent.repeated.clear()
        agent.repeated[key] = now
        self._send(Send(agent.route, order() if callable(order) else order))
        return now + pause
