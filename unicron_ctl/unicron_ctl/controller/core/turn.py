"""One job's turn: sense, judge, decide, act.

A Break and a plan go out before their consequences are computed (`later`): thousands of agents hear of a death while
the controller still checks its members.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from unicron_ctl.controller.job import adoption, job_events, spares, swaps, transitions
from unicron_ctl.controller.job.modes import Trigger
from unicron_ctl.controller.job.orders import Order, StandingOrders, awaits_doors, due_orders, next_start
from unicron_ctl.controller.job.runtime import JobRuntime, report_healed
from unicron_ctl.controller.judge.rank_failures import revive
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.state_machine import ACTIONS
from unicron_ctl.controller.model.view import Outcome, Send, View
from unicron_ctl.controller.replication.cuts import cut_orders, report_gaps
from unicron_ctl.controller.sense import members
from unicron_ctl.controller.sense.sensors import SENSORS, When
from unicron_ctl.shared.protocol import wire

EVENTS_PER_TURN = 50  # of one job's state machine; more would be a loop
ORDERS_KEPT = 200  # of one agent, with the time of each
SOON = 1e-6  # seconds; sums of times are not exact


class BrokenInvariant(Exception):
    """A job is in a state in which it must not be."""


class Turns:
    """Takes each job's turns."""

    def __init__(
        self,
        view: View,
        runtime: Callable[[JobState], JobRuntime],  # this and the next two are the core's
        carry_out: Callable[[Outcome], bool],
        send: Callable[[Send], None],
    ) -> None:
        self._view, self._runtime, self._carry_out, self._send = view, runtime, carry_out, send
        self.later: set[str] = set()
        """Jobs whose turn goes on once the decisions have gone out."""
        self.begun: set[str] = set()
        """Jobs in a new phase whose members have not all been checked."""

    def advance(self, job: JobState) -> None:
        """Takes the job as far as it can go now."""
        view = self._view.job(job)
        if not job.over and view.ahead and adoption.ahead(view):
            self._carry_out(adoption.adopt_generation(self._view, view))
            if adoption.ahead(view):
                return  # nothing is decided about an unknown generation
        if not job.over:
            self._sense(job, view)
            for _ in range(EVENTS_PER_TURN):
                if job.over:
                    break
                before, trigger = job.phase, job_events.next_event(self._view, view)
                if trigger is None or not self._transit(job, view, trigger):
                    break
                if job.phase is not before and job.phase in (Phase.BREAKING, Phase.ENTERING):
                    self._send_first(job, view)
                    return
                self._sense(job, view)
            else:
                raise BrokenInvariant(f"the state machine does not come to rest in {job.phase}")
            runtime = self._runtime(job)
            sensors = runtime.sensors
            self._carry_out(swaps.advance(self._view, view, sensors.times, runtime.swaps, sensors.peers.standing))
            self._revive_outsiders(job, view)
            self._carry_out(report_healed(view))
            self._carry_out(spares.report_spares(self._view, view, runtime.spares))
        if not job.set_aside and (view.touched or job.job in self.begun):
            self._send_orders(job)

    # ------------------------------------------------------------ sense
    def run_sensors(self, job: JobState, when: When) -> None:
        """Runs the sensors of this occasion; the findings of each are judged before the next one runs."""
        view, memory = self._view.job(job), self._runtime(job).sensors
        for sensor in SENSORS:
            if sensor.when is when:
                if job.over:
                    return
                outcome = sensor.sense(self._view, view, memory)
                self._order(outcome.orders)
                self._carry_out(outcome)

    def _sense(self, job: JobState, view: JobView) -> None:
        if job.over:
            return
        self._begin_phase(job, view)
        for _ in range(2):  # the judgement of the first findings may change the meaning of others
            if not self._sense_changes(job, view):
                break
        if job.over:
            return
        progress = view.progress
        blocked = progress.blocked
        self.run_sensors(job, When.TURN)
        if progress.blocked is not blocked:
            view.touched.update(job.elements(job.hit(progress.blocked)))

    def _sense_changes(self, job: JobState, view: JobView) -> bool:
        """Takes in the slots that changed. Returns whether some needed a closer look."""
        runtime = self._runtime(job)
        if view.going:
            members.take_in_progress(view, runtime.sensors.iterations.standing)
        memory = runtime.sensors
        if view.together:
            if job.phase is Phase.OFFERING:
                view.touched.update(view.together)
            members.take_in_nodes(view, memory.iterations.standing)
        if not view.changed:
            return False
        if job.phase is Phase.OFFERING:
            view.touched.update({job.element(slot) for slot in view.changed})
        odd = members.take_in_changes(view, memory.iterations.standing)
        view.changed.clear()
        if not odd:
            return False
        memory.odd = view.notice_all(odd, self._view.now)
        memory.iterations.standing.on_change(view, odd)
        runtime.on_change(view, odd)
        view.touched.update({slot // view.per_node for slot in odd})
        if memory.odd:
            self.run_sensors(job, When.CHANGE)
        return bool(memory.odd)

    # ------------------------------------------------------------ decide and act
    def _send_first(self, job: JobState, view: JobView) -> None:
        """Sends a Break or a plan before anything else is computed."""
        self.later.add(job.job)
        if job.phase is Phase.BREAKING:
            orders = self._standing_orders(view)
            self._order([(agent, orders.break_key, orders.broken) for agent in view.alive()], view)
        else:
            view.touched.update(view.agents)
            self._send_orders(job)

    def _transit(self, job: JobState, view: JobView, trigger: Trigger) -> bool:
        """Makes one step of the job's state machine. Returns False if the event changes nothing in this phase."""
        action = ACTIONS[job.phase].get(trigger.event)
        return action is not None and self._carry_out(transitions.PERFORM[action](self._view, view, trigger))

    def _revive_outsiders(self, job: JobState, view: JobView) -> None:
        """Starts processes again that a plan left out."""
        if job.over:
            return
        runtime = self._runtime(job)
        for slot in sorted(runtime.outsiders):
            agent = view.agent(slot)
            if agent is None or not agent.alive:
                runtime.outsiders.discard(slot)  # its successor is checked when it comes
                continue
            if runtime.is_outsider(view, slot):
                self._carry_out(revive(self._view, view, slot))
            if not runtime.is_outsider(view, slot):
                runtime.outsiders.discard(slot)

    def _begin_phase(self, job: JobState, view: JobView) -> None:
        """Checks all members once, after the decisions have gone out."""
        if job.job in self.begun:
            self.begun.discard(job.job)
            if job.phase is not Phase.OFFERING:
                self._runtime(job).sensors.iterations.standing.clear()
            view.begin_phase()

    def repeat_orders(self, job: JobState) -> None:
        """Repeats orders that were not obeyed. Called at every tick."""
        view = self._view.job(job)
        self._requeue_due_orders(view)
        runtime = self._runtime(job)
        cuts = list(cut_orders(self._view, view, runtime.cuts, runtime.spares.ready))
        self._order((agent, f"cut {order.iteration}", order) for agent, order in cuts)
        self._carry_out(report_gaps(view, runtime.cuts))
        if view.touched:
            self._send_orders(job)

    def _send_orders(self, job: JobState) -> None:
        """Sends every order that may not have been obeyed; each agent is checked again when the order may be
        repeated."""
        view = self._view.job(job)
        if job.over:
            self._begin_phase(job, view)
        orders, now = self._standing_orders(view), self._view.now
        rest: list[tuple[AgentView, str, Order]] = []
        for element in sorted(view.touched):
            agent = view.agents.get(element)
            if agent is None:
                continue
            ordered = False
            for key, message in due_orders(view, agent, orders, now):
                ordered = True
                if isinstance(message, wire.Break):  # all agents hear of a Break before anything else happens
                    self._order([(agent, key, message)], view)
                else:
                    rest.append((agent, key, message))
            starts = next_start(view, agent, now) if element in view.restarts else None
            if starts is not None:
                self._recheck(view, element, starts)
            elif not ordered:
                view.restarts.discard(element)
            if awaits_doors(view, agent, orders):
                self._recheck(view, element, now + self._view.config.repeat_seconds)
        view.touched.clear()
        self._order(rest, view)

    def _standing_orders(self, view: JobView) -> StandingOrders:
        """Returns the job's orders for all agents, and makes them anew when they change."""
        job, arrivals = view.state, view.last_arrival
        if job.over:
            return StandingOrders(job)
        runtime = self._runtime(job)
        blocked = view.progress.blocked
        if runtime.standing_orders is None or not runtime.standing_orders.holds(job, arrivals, blocked):
            runtime.standing_orders = StandingOrders(job, arrivals, blocked=blocked)
        return runtime.standing_orders

    @staticmethod
    def _recheck(view: JobView, element: int, at: float) -> None:
        if at < view.due.get(element, float("inf")):
            view.due[element] = at
            heapq.heappush(view.order_checks, (at, element))

    def _requeue_due_orders(self, view: JobView) -> None:
        """Checks agents that got an order a while ago."""
        while view.order_checks and view.order_checks[0][0] <= self._view.now:
            at, element = heapq.heappop(view.order_checks)
            if view.due.get(element) == at:
                del view.due[element]
                view.touched.add(element)

    def _order(self, orders: Iterable[tuple[AgentView, str, Order]], view: JobView | None = None) -> None:
        """Sends the orders, but for those that were sent a moment ago. view: the agents' job, in which each agent is
        checked again when its order may be repeated.

        It is one loop, because a Break and a plan go to all agents of a large job.
        """
        now, pause = self._view.now, self._view.config.repeat_seconds
        for agent, key, order in orders:
            last = agent.repeated.get(key)
            if last is not None and now - last < pause - SOON:
                again = last + pause
            else:
                if len(agent.repeated) > ORDERS_KEPT:
                    agent.repeated.clear()
                agent.repeated[key], again = now, now + pause
                self._send(Send(agent.route, order() if callable(order) else order))
            if view is not None:
                self._recheck(view, agent.element, again)
