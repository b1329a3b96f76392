"""The actions that are asked of Slurm: when each is asked for, and again, and what their outcomes change.

Slurm's programs are called once for each request (:mod:`unicron_ctl.shared.slurm`): what was refused, or had no effect,
is asked for again here, later each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.cluster_state import GIVES_BACK
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import OUT
from unicron_ctl.controller.model.requests import Action, Run
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import bounds, isolation, readmission
from unicron_ctl.shared.log import records

RETRY_SECONDS = 5.0  # an action that Slurm refused is not asked for again before; after two such, twice as long each
NO_EFFECT_SECONDS = 2.0  # the same where Slurm took it, and nothing has come of it
LONGEST_RETRY = 300.0
STARTS = ("pin", "release", "start_now")  # steps of one thing that is wanted: the element's start
STOPS = (*GIVES_BACK, *OUT)  # actions that end what runs, or keep a node from what would

Target = tuple[str, int]  # (job, element), or (node, -1)


@dataclass
class RetryState:
    """How often one thing was asked of Slurm for one element or node, while Slurm shows the same of it.

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
    """What was asked of Slurm of late. states: (element or node, what is wanted of it) -> how that went."""

    states: dict[tuple[Target, str], RetryState] = field(default_factory=dict)

    def prune(self, view: View) -> None:
        """Forgets what delays nothing any more."""
        self.states = {
            key: one
            for key, one in self.states.items()
            if (one.shown and one.shown == _shown(view, key[0]) and view.now - one.at < 2 * LONGEST_RETRY)
            or (one.refused and view.now < one.until)
        }

    def without_delayed(self, actions: Sequence[Action], now: float) -> list[Action]:
        """The actions but those for elements and nodes of which something has to wait before it is asked again."""
        asked = ((action.target, self.states.get(_wanted(action))) for action in actions)
        wait = {target for target, before in asked if before is not None and now < before.until}
        return [action for action in actions if action.target not in wait]

    def note_requests(self, view: View, actions: Sequence[Action]) -> None:
        """Notes that these actions are asked for now."""
        for key in dict.fromkeys(map(_wanted, actions)):
            before = self.states.get(key)
            self.states[key] = RetryState(_shown(view, key[0]), before.times + 1 if before is not None else 1, view.now)

    def note_outcome(self, action: Action, error: str) -> None:
        """Notes whether Slurm refused an action."""
        before = self.states.get(_wanted(action))
        if before is not None:
            before.refused = before.refused or bool(error)

    def is_refused(self, action: Action) -> bool:
        """Whether Slurm has refused this action of late."""
        before = self.states.get(_wanted(action))
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


def _wanted(action: Action) -> tuple[Target, str]:
    """What is wanted of which element or node: for one, its start on certain nodes."""
    return action.target, f"start {action.node}" if action.action in STARTS else action.action


def _shown(view: View, target: Target) -> tuple[object, ...]:
    """What Slurm shows of the element or the node: while that stays, what is wanted has not come about."""
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
    """What is done for an element whose failure is not mended yet belongs to that failure's story."""
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
            out.records.append((action.job, generation, records.Unpinned(element=action.element)))
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
