"""Requests to Slurm: when each is made and repeated, and the effects of its outcome.

Slurm's programs are called once for each request (:mod:`unicron_ctl.shared.slurm`): a request that was refused, or had
no effect, is repeated here, later each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.cluster_state import GIVES_BACK
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import OUT
from unicron_ctl.controller.model.requests import POWER_OFF, Action, Poll, Run
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import bounds, isolation, pair_tests, readmission
from unicron_ctl.controller.plan.job_comments import Comments
from unicron_ctl.controller.plan.planning import Aheads
from unicron_ctl.controller.sense import fencing
from unicron_ctl.shared.log import records
from unicron_ctl.shared.system.throttle import Throttle

RETRY_SECONDS = 5.0  # before a refused action is requested again; after two refusals, twice as long each time
NO_EFFECT_SECONDS = 2.0  # the same for an accepted action without effect
LONGEST_RETRY = 300.0
HURRY_SECONDS = 0.1
EARLY = 1.0, 3.0  # early listings a second, and at once: Slurm has other work
SHARE = 0.1  # of the time, for usual listings that take long; early ones as much again
LONGEST_PAUSE = 60.0  # between two listings
MOST_FAILURES = 2  # failed listings in a row that lengthen the pause, by one more period each
ASKED_SECONDS = 60.0  # of further polls for a job that has ended
LATELY_SECONDS = 3600.0  # the same at the controller's start
STARTS = ("pin", "release", "start_now")  # steps of one aim: the element's start
STOPS = (*GIVES_BACK, *OUT)  # actions that end work, or keep a node from it

Target = tuple[str, int]  # (job, element), or (node, -1)


@dataclass
class RetryState:
    """The requests with one aim for one element or node, as long as its state in Slurm stays the same."""

    shown: tuple[object, ...]  # that state
    times: int
    at: float  # time of the last request
    refused: bool = False  # Slurm refused one of them

    @property
    def until(self) -> float:
        """When the next request may be made."""
        first = RETRY_SECONDS if self.refused else NO_EFFECT_SECONDS
        return self.at + min(LONGEST_RETRY, first * 2.0 ** min(30, max(0, self.times - 2)))


@dataclass
class Retries:
    """The recent requests to Slurm."""

    states: dict[tuple[Target, str], RetryState] = field(default_factory=dict)
    """(element or node, aim) -> its requests."""

    def prune(self, view: View) -> None:
        """Drops states that delay nothing any more."""
        self.states = {
            key: one
            for key, one in self.states.items()
            if (one.shown and one.shown == _state_shown(view, key[0]) and view.now - one.at < 2 * LONGEST_RETRY)
            or (one.refused and view.now < one.until)
        }

    def without_delayed(self, actions: Sequence[Action], now: float) -> list[Action]:
        """The actions without those for elements and nodes with a request that has to wait."""
        asked = ((action.target, self.states.get(_aim(action))) for action in actions)
        wait = {target for target, before in asked if before is not None and now < before.until}
        return [action for action in actions if action.target not in wait]

    def note_requests(self, view: View, actions: Sequence[Action]) -> None:
        """Notes that these actions are requested now."""
        for key in dict.fromkeys(map(_aim, actions)):
            before = self.states.get(key)
            self.states[key] = RetryState(
                _state_shown(view, key[0]), before.times + 1 if before is not None else 1, view.now
            )

    def note_outcome(self, action: Action, error: str) -> None:
        """Notes whether Slurm refused an action."""
        before = self.states.get(_aim(action))
        if before is not None:
            before.refused = before.refused or bool(error)

    def is_refused(self, action: Action) -> bool:
        """Whether Slurm has refused this action recently."""
        before = self.states.get(_aim(action))
        return before is not None and before.refused


def request_actions(view: View, retries: Retries, actions: Sequence[Action], out: Outcome) -> None:
    """Requests the actions, except for those that have to wait or that a limit forbids.

    While the controller doubts the silence of agents, nothing is stopped or taken, and nothing is started in its place.
    """
    if view.suspicions.doubt:
        kept = {name for action in actions if action.action in STOPS for name in action.nodes}
        actions = [a for a in actions if a.action not in STOPS and kept.isdisjoint(a.nodes)]
    todo = retries.without_delayed(actions, view.now)
    if todo := bounds.within_limits(view, todo, out):
        retries.note_requests(view, todo)
        if allowed := tuple(action for action in todo if not permission.withheld(view, action, out)):
            out.requests.append(Run(allowed))


def _aim(action: Action) -> tuple[Target, str]:
    """The element or node, and the aim of the action: its start on certain nodes, for one."""
    return action.target, f"start {action.node}" if action.action in STARTS else action.action


def _state_shown(view: View, target: Target) -> tuple[object, ...]:
    """The state of the element or node in Slurm: while it stays the same, the action has had no effect."""
    name, element = target
    if element < 0:
        info = view.slurm.node(name)
        return (info.states, info.reason) if info is not None else ()
    e = view.slurm.seen.rows_of(name).get(element) if view.slurm.seen is not None else None
    return (e.state, e.node, e.held, e.restarts) if e is not None else ()


def record_intents(view: View, run: Run) -> Outcome:
    """Records the actions before they are carried out."""
    out = Outcome()
    listing = view.slurm.seen
    for action in run.actions:
        job = view.state.jobs.get(action.job)
        e = listing.rows_of(action.job).get(action.element) if listing is not None else None
        record = records.SlurmAction(
            action=action.action,
            element=action.element,
            node=action.node,
            slurm_reason=action.text,
            restarts=e.restarts if e is not None else -1,
            reason=f"{action.label}: {action.reason}",
        )
        out.records.append((action.job, job.generation if job else 0, record))
        if job is not None and (action.action == "requeue" or (action.action == "pin" and action.node)):
            _for_failures(job, action, out)
    return out


def _for_failures(job: JobState, action: Action, out: Outcome) -> None:
    """Adds an action for an element to the story of its failures that are not mended yet."""
    element = f"{action.job}_{action.element}"
    text = f"start element {element} on {action.node}" if action.action == "pin" else f"requeue {element}"
    for failure in job.failures:
        open_ = failure.restored_at is None and failure.record.kind_of_failure in ("node", "agent")
        if job.block_of(failure.record.element) == action.element and open_:
            out.record(job, records.FailureAction(failure=failure.id, text=text))


def on_outcome(view: View, retries: Retries, gate: readmission.Gate, action: Action, error: str) -> Outcome:
    """Records that Slurm carried out an action, or refused it for the reason in `error`."""
    out, job = Outcome(), view.state.jobs.get(action.job)
    generation = job.generation if job else 0
    retries.note_outcome(action, error)
    if error:
        then = "; the lease of its processes is waited for" if action.action == POWER_OFF else ""
        reason = f"{action.label}: {error}{then}"
        failed = records.SlurmFailed(action=action.action, element=action.element, node=action.node, reason=reason)
        out.records.append((action.job, generation, failed))
        if action.action in OUT:
            out.merge([isolation.note_refusal(view, action, error)])
        elif action.action == "pin":
            out.records.append((action.job, generation, records.ElementUnpinned(element=action.element)))
        return out
    if action.action == "resume":
        verified = gate.verified.pop(action.node, True)
        out.record(None, records.NodeResumed(node=action.node, verified=verified, reason=action.reason))
        return out
    done = records.SlurmDone(
        action=action.action, node=action.node, element=action.element, reason=action.text or action.label
    )
    out.records.append((action.job, generation, done))
    if action.action == POWER_OFF:
        fencing.powered_off(view, action.node, out)
        out.hurry = True
    return out


# ---------------------------------------------------------------- requests under way
@dataclass
class Desk:
    """The requests under way with Slurm; lost with the process. Times in seconds on the controller's clock."""

    asked_at: float = 0.0
    busy: bool = False
    next_poll: float = 0.0
    took: float = 0.0
    """Seconds that the last listing took."""
    failures: int = 0
    """Listings in a row that failed."""
    under_way: set[tuple[str, str, int, str]] = field(default_factory=set)
    """Actions without an outcome yet."""
    retries: Retries = field(default_factory=Retries)
    missing_since: dict[str, float] = field(default_factory=dict)
    """job -> since when Slurm shows none of its elements; only for jobs that have not ended."""
    gate: readmission.Gate = field(default_factory=readmission.Gate)
    pair_tests: pair_tests.PairTests = field(default_factory=pair_tests.PairTests)
    comments: Comments = field(default_factory=Comments)
    aheads: Aheads = field(default_factory=Aheads)
    watched: str = ""
    """The inputs of the last plan for jobs that are only watched."""
    early: Throttle = field(default_factory=lambda: Throttle(*EARLY))

    def hurry(self, now: float, delay: float = HURRY_SECONDS) -> None:
        """Asks Slurm soon after a change, or as soon as another early listing is allowed."""
        price = max(1.0, self.took / SHARE * EARLY[0])
        soon = max(now + delay, self.early.allowed_at("", now, min(price, EARLY[1])))
        if not self.busy and self.next_poll > soon:
            self.early.charge("", now, price)
            self.next_poll = soon

    def on_listing(self, now: float, usual: float, took: float, failed: bool = False) -> None:
        """Sets the time of the next listing after this one, or its failure. usual: seconds between two listings. took:
        seconds that this one took."""
        self.busy, self.took = False, took
        self.failures = self.failures + 1 if failed else 0
        pause = max(self.took, usual * min(MOST_FAILURES, self.failures)) if failed else self.took / SHARE
        self.next_poll = now + max(usual, min(LONGEST_PAUSE, pause))

    def on_actions_done(self, now: float, urgent: bool) -> None:
        """Asks for a listing soon, as all actions of a request are done."""
        self.busy = self.busy and urgent
        self.hurry(now, 0.0)

    def prune(self, view: View) -> None:
        """Drops entries of no further use."""
        self.retries.prune(view)
        jobs = {job.job for job in view.managed_jobs()}
        self.missing_since = {name: at for name, at in self.missing_since.items() if name in jobs}

    def tick(self, view: View, asked_for: Iterable[str]) -> Outcome:
        """Asks Slurm when it is time. asked_for: jobs that are not registered yet."""
        out = Outcome()
        if view.slurm.used and not self.busy and view.now >= self.next_poll:
            self.busy, self.asked_at = True, view.now
            jobs = {job.job for job in view.state.jobs.values() if _in_slurm(view, job)}
            jobs |= {job for _, job, _, _ in view.state.intents if job}
            out.requests.append(Poll(frozenset(jobs.union(asked_for)), bool(view.suspicions.nodes())))
        return out


def _in_slurm(view: View, job: JobState) -> bool:
    """Whether Slurm may have relevant elements of the job: pending ones of an ended job still have to go."""
    if not job.ended:
        return True
    seen = view.slurm.seen
    if view.now - job.ended.time < (ASKED_SECONDS if seen is not None else LATELY_SECONDS):
        return bool(job.submitted)
    if seen is None:
        return False
    ends = ("PENDING", "RUNNING") if job.settings.allocation else ("PENDING",)
    return any(e.state in ends for e in seen.of(job.job).values())
