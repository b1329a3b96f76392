"""The actions that are asked of Slurm: when each is asked for, and again, and what their outcomes change.

Slurm's programs are called once for each request (:mod:`unicron_ctl.shared.slurm`): what was refused, or had no effect,
is asked for again here, later each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.cluster_state import GIVES_BACK
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import OUT
from unicron_ctl.controller.model.requests import Action, Poll, Run
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import bounds, isolation, readmission
from unicron_ctl.controller.plan.job_comments import Comments
from unicron_ctl.controller.plan.planning import Aheads
from unicron_ctl.shared.log import records
from unicron_ctl.shared.system.throttle import Throttle

RETRY_SECONDS = 5.0  # an action that Slurm refused is not asked for again before; after two such, twice as long each
NO_EFFECT_SECONDS = 2.0  # the same where Slurm took it, and nothing has come of it
LONGEST_RETRY = 300.0
HURRY_SECONDS = 0.1
EARLY = 1.0, 3.0  # early listings a second, and at once: whatever happens, Slurm has other work
SHARE = 0.1  # of the time that the usual listings may take, where each takes long; early ones as much again
LONGEST_PAUSE = 60.0  # between two listings
MOST_FAILURES = 2  # failed listings in a row that make the pause longer: one more period each
ASKED_SECONDS = 60.0  # for which Slurm is still asked about a job that has ended
LATELY_SECONDS = 3600.0  # the same at the controller's start
STARTS = ("pin", "release", "start_now")  # steps of one thing that is wanted: the element's start
STOPS = (*GIVES_BACK, *OUT)  # actions that end what runs, or keep a node from what would

Target = tuple[str, int]  # (job, element), or (node, -1)


@dataclass
class RetryState:
    """One thing that was asked of Slurm for one element or node, while Slurm shows the same of it.

    shown: what Slurm showed of it when it was asked. at: when it was last asked. refused: Slurm refused it.
    """

    shown: tuple[object, ...] = ()
    times: int = 0
    at: float = 0.0
    refused: bool = False

    @property
    def until(self) -> float:
        """When it may be asked for again."""
        first = RETRY_SECONDS if self.refused else NO_EFFECT_SECONDS
        return self.at + min(LONGEST_RETRY, first * 2.0 ** min(30, max(0, self.times - 2)))


@dataclass
class Retries:
    """The requests to Slurm of late. states: (element or node, what is wanted of it) -> how that went."""

    states: dict[tuple[Target, str], RetryState] = field(default_factory=dict)

    def prune(self, view: View) -> None:
        """Forgets what delays nothing any more."""
        self.states = {
            key: one
            for key, one in self.states.items()
            if (one.shown and one.shown == _state_shown(view, key[0]) and view.now - one.at < 2 * LONGEST_RETRY)
            or (one.refused and view.now < one.until)
        }

    def without_delayed(self, actions: Sequence[Action], now: float) -> list[Action]:
        """The actions but those for elements and nodes of which something has to wait before it is asked again."""
        asked = ((action.target, self.states.get(_aim(action))) for action in actions)
        wait = {target for target, before in asked if before is not None and now < before.until}
        return [action for action in actions if action.target not in wait]

    def note_requests(self, view: View, actions: Sequence[Action]) -> None:
        """Notes that these actions are asked for now."""
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
        """Whether Slurm has refused this action of late."""
        before = self.states.get(_aim(action))
        return before is not None and before.refused


def request_actions(view: View, retries: Retries, actions: Sequence[Action], out: Outcome) -> None:
    """Asks for the actions. Those that have to wait before they are asked again, or that a limit forbids, are left out.

    While the controller does not trust the silence that it hears, nothing is stopped or taken, and nothing is started
    in place of what would have been.
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
    """The element or node, and what is wanted of it: its start on certain nodes, for one."""
    return action.target, f"start {action.node}" if action.action in STARTS else action.action


def _state_shown(view: View, target: Target) -> tuple[object, ...]:
    """The element or the node as Slurm shows it: while that stays, what is wanted has not come about."""
    name, element = target
    if element < 0:
        info = view.slurm.node(name)
        return (info.states, info.reason) if info is not None else ()
    e = view.slurm.seen.rows_of(name).get(element) if view.slurm.seen is not None else None
    return (e.state, e.node, e.held, e.restarts) if e is not None else ()


def record_intents(view: View, run: Run) -> Outcome:
    """Records what is going to be asked of Slurm, before the actions are carried out."""
    out = Outcome()
    listing = view.slurm.seen
    for action in run.actions:
        job = view.state.jobs.get(action.job)
        known = listing.rows_of(action.job).get(action.element) if listing is not None else None
        record = records.SlurmAction(
            action=action.action,
            element=action.element,
            node=action.node,
            slurm_reason=action.text,
            restarts=known.restarts if known is not None else -1,
            reason=f"{action.label}: {action.reason}",
        )
        out.records.append((action.job, job.generation if job else 0, record))
        if job is not None and (action.action == "requeue" or (action.action == "pin" and action.node)):
            _for_failures(job, action, out)
    return out


def _for_failures(job: JobState, action: Action, out: Outcome) -> None:
    """Record what is done for an element whose failure is not mended yet in that failure's story."""
    element = f"{action.job}_{action.element}"
    text = f"start element {element} on {action.node}" if action.action == "pin" else f"requeue {element}"
    for failure in job.failures:
        open_ = failure.restored_at is None and failure.record.kind_of_failure in ("node", "agent")
        if job.block_of(failure.record.element) == action.element and open_:
            out.record(job, records.FailureAction(failure=failure.id, text=text))


def on_outcome(view: View, retries: Retries, gate: readmission.Gate, action: Action, error: str) -> Outcome:
    """Records that Slurm carried out an action, or refused it. error: why it refused, or empty."""
    out, job = Outcome(), view.state.jobs.get(action.job)
    generation = job.generation if job else 0
    retries.note_outcome(action, error)
    if error:
        failed = records.SlurmFailed(
            action=action.action, element=action.element, node=action.node, reason=f"{action.label}: {error}"
        )
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
    return out


# ---------------------------------------------------------------- what is under way
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
    """Actions of which this process waits to hear the outcome."""
    retries: Retries = field(default_factory=Retries)
    missing_since: dict[str, float] = field(default_factory=dict)
    """job -> since when Slurm shows none of its elements; only of jobs that have not ended."""
    gate: readmission.Gate = field(default_factory=readmission.Gate)
    comments: Comments = field(default_factory=Comments)
    aheads: Aheads = field(default_factory=Aheads)
    watched: str = ""
    """What the last plan depended on for jobs that are only watched."""
    early: Throttle = field(default_factory=lambda: Throttle(*EARLY))

    def hurry(self, now: float, delay: float = HURRY_SECONDS) -> None:
        """Something changed: asks Slurm soon, or as soon as there may be another early listing."""
        price = max(1.0, self.took / SHARE * EARLY[0])
        soon = max(now + delay, self.early.allowed_at("", now, min(price, EARLY[1])))
        if not self.busy and self.next_poll > soon:
            self.early.charge("", now, price)
            self.next_poll = soon

    def on_listing(self, now: float, usual: float, took: float, failed: bool = False) -> None:
        """Slurm has answered, or has not: says when it is asked again. usual: the seconds between two listings. took:
        those that this one took."""
        self.busy, self.took = False, took
        self.failures = self.failures + 1 if failed else 0
        pause = max(self.took, usual * min(MOST_FAILURES, self.failures)) if failed else self.took / SHARE
        self.next_poll = now + max(usual, min(LONGEST_PAUSE, pause))

    def on_actions_done(self, now: float, urgent: bool) -> None:
        """All actions of a request are through: what became of them is looked at soon."""
        self.busy = self.busy and urgent
        self.hurry(now, 0.0)

    def prune(self, view: View) -> None:
        """Forgets what says nothing any more."""
        self.retries.prune(view)
        jobs = {job.job for job in view.managed_jobs()}
        self.missing_since = {name: at for name, at in self.missing_since.items() if name in jobs}

    def tick(self, view: View, asked_for: Iterable[str]) -> Outcome:
        """Asks Slurm when it is time. asked_for: jobs that are not known yet."""
        out = Outcome()
        if view.slurm.used and not self.busy and view.now >= self.next_poll:
            self.busy, self.asked_at = True, view.now
            jobs = {job.job for job in view.state.jobs.values() if _in_slurm(view, job)}
            jobs |= {job for _, job, _, _ in view.state.intents if job}
            out.requests.append(Poll(frozenset(jobs.union(asked_for)), bool(view.suspicions.nodes())))
        return out


def _in_slurm(view: View, job: JobState) -> bool:
    """Slurm may have elements of it that matter: of an ended one, those that are pending still have to go."""
    if not job.ended:
        return True
    seen = view.slurm.seen
    if view.now - job.ended.time < (ASKED_SECONDS if seen is not None else LATELY_SECONDS):
        return bool(job.submitted)
    if seen is None:
        return False
    ends = ("PENDING", "RUNNING") if job.settings.allocation else ("PENDING",)
    return any(e.state in ends for e in seen.of(job.job).values())
