"""The decisions that differ between the two ways of healing a job: *session*, within the iteration, and *restart* of
all processes.

The state machine is the same. In restart mode (`loop.plain_ranks`) no rank keeps a training state, so every Break leads
to a new world of the processes that are there, and no node joins at a boundary. `model.healing_modes` has the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_ctl.controller.job.candidates import waiting_elements
from unicron_ctl.controller.job.deciding import decide
from unicron_ctl.controller.model import healing_modes
from unicron_ctl.controller.model.agent_view import keeps
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import look_again
from unicron_ctl.controller.model.state_machine import Event
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.replication.script_states import newest_saved
from unicron_ctl.shared.consensus.survivors_plan import Decision
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_detector.words import plural

STEADY_SECONDS = 600.0  # a world that has run for so long works: earlier failures are forgiven
MOST_RESTARTS = 16  # after losses, in a row without progress in between
STORE_SECONDS = 60.0  # a rendezvous store is started three times in less
NO_STORE = "no node of the job could start a rendezvous store: the agents' lines in the job's output say why"


@dataclass(frozen=True)
class Trigger:
    """An event of the state machine, and why."""

    event: Event
    reason: str
    joiners: tuple[int, ...] = ()
    """Slots that come in."""
    leavers: tuple[int, ...] = ()
    """Members that the plan takes away."""
    code: int = 0
    """With FINISHED and FAILED: the exit code of the job's agents."""
    decision: Decision | None = None
    """With REPORTED: how the survivors go on, if that is known already."""


class Session:
    """Healing within the iteration: the survivors have the training state."""

    def settle_from(self, view: View, job: JobView, coming: Sequence[int], arrival: float) -> float:
        """Since when a forming job has waited for more nodes. arrival: when the last ready one came."""
        return arrival

    def awaits_moved(self, view: View, job: JobState) -> bool:
        """Whether no world may form yet because elements are on their way to other nodes."""
        return False

    def join_delay(self, config: ControllerConfig) -> float:
        """Seconds without another newcomer, after which all of them are taken in together."""
        return config.offer_delay

    def change(self, view: View, job: JobView, words: str, joiners: list[int], leavers: list[int]) -> Trigger | None:
        """The event for waiting newcomers and leaving members: an offer at the next boundary."""
        return Trigger(Event.CHANGE, words, tuple(joiners), tuple(leavers))

    def after_stop(self, view: View, job: JobView) -> Trigger | None:
        """The event once all survivors are at rest: they go on, if those with the training state make a replica."""
        nobody, decision = _nobody(view, job)
        if nobody:
            return Trigger(Event.NOBODY, nobody)
        if not job.has_store():  # it ended, and its agent starts it again
            late = job.seconds_without_store(view.now) > STORE_SECONDS
            return Trigger(Event.NOBODY, NO_STORE) if late else None
        return Trigger(Event.REPORTED, "all survivors have stopped", decision=decision)

    def why_exhausted(self, job: JobState) -> str:
        """Why it is useless to form another generation; empty while it is not."""
        return ""

    def report(self, view: View, job: JobView, logged: LoggedNewcomers) -> Outcome:
        """Records news of a running job. Called at every tick."""
        return Outcome()


def given_up(job: JobView) -> dict[int, int]:
    """The ranks that have given up their training state because it is unsound, with the last verified iteration that
    each knows; -1 for none."""
    waiting = (agent for _, agent in sorted(job.agents.items()) if agent.waits)
    ranks = ((slot, status.went_back) for agent in waiting for slot, status in sorted(agent.ranks.items()))
    return {slot: verified for slot, verified in ranks if verified is not None}


def _nobody(view: View, job: JobView) -> tuple[str, Decision | None]:
    """Why no survivor can go on; empty if some can. And how they go on, if that was found on the way."""
    if given_up(job):
        return "the ranks have given up their training state, which is unsound", None
    if view.now < job.nobody_until or not job.anybody_stopped():
        return "no member is left that has the training state", None
    if not any(agent.waits for agent in job.agents.values()):  # none of those that have stopped keeps its state
        return "", None
    reports = job.reports()
    if reports and not any(keeps(status) for status in reports.values()):
        return "", None
    if (decision := decide(job, reports)) is not None:
        return "", decision
    job.nobody_until = look_again(view.now, len(job.state.members))
    return "the survivors make no replica with a training state that is whole", None


@dataclass
class LoggedNewcomers:
    """The newcomers that the log says wait, by generation."""

    newcomers: tuple[int, tuple[int, ...]] | None = None


class Restart:
    """All processes end and start again in a new world."""

    def settle_from(self, view: View, job: JobView, coming: Sequence[int], arrival: float) -> float:
        """Counts from the start of processes that start again: a world shrinks for lost nodes, not for program
        errors."""
        starts = (job.state.slot(slot).not_before for element in coming for slot in job.agents[element].slots)
        return max([arrival, job.last_arrival if coming else 0.0, *starts])

    def awaits_moved(self, view: View, job: JobState) -> bool:
        """Waits for elements that move although their node is not a suspect: the world does not shrink for them."""
        marks = (job.avoid.get(agent.node) for element, agent in job.agents.items() if job.moves(element))
        return any(m and not m.suspect and view.now - m.at < view.config.isolate_seconds for m in marks)

    def join_delay(self, config: ControllerConfig) -> float:
        return config.join_after_seconds

    def change(self, view: View, job: JobView, words: str, joiners: list[int], leavers: list[int]) -> Trigger | None:
        """Stops all processes for a new world, because there is no boundary. The plan has weighed leavers."""
        state = job.state
        good, reason = True, "nodes leave: the processes of the others start again"
        if not leavers:
            inside, more = len(state.inside), len(state.elements(joiners))
            good, reason = worth(inside, more, view.now - state.since, view.config)
        return Trigger(Event.FAULT, f"{words}: {reason}") if good else None

    def after_stop(self, view: View, job: JobView) -> Trigger | None:
        return Trigger(Event.NOBODY, "all processes of the world have ended")

    def why_exhausted(self, job: JobState) -> str:
        if job.restarts < MOST_RESTARTS:
            return ""
        last = job.failures[-1].record.reason if job.failures else ""
        short = f"the world broke {job.restarts} times in a row within {STEADY_SECONDS:.0f} s of its start"
        short += ", and saved nothing new"
        return f"{short}, the last time because: {last}" if last else short

    def report(self, view: View, job: JobView, logged: LoggedNewcomers) -> Outcome:
        """Records that a world has proved itself, and why newcomers have to wait."""
        out, state = Outcome(), job.state
        if state.phase is not Phase.RUNNING or state.plan is None:
            return out
        age, generation = view.now - state.since, state.plan.generation
        if state.steady != generation and (proof := _proof(job, age)) is not None:
            out.record(state, proof, generation)
        if job.room <= 0:  # all that wait are spares
            return out
        inside, waiting = set(state.inside), waiting_elements(view, job)
        newcomers = tuple(e for e in waiting if e not in inside and e not in state.leaving)
        if newcomers and logged.newcomers != (generation, newcomers):
            good, reason = worth(len(inside), len(newcomers), age, view.config)
            if not good:
                logged.newcomers = generation, newcomers
                out.record(state, records.NewcomersWait(elements=list(newcomers), reason=reason), generation)
        return out


def _proof(job: JobView, age: float) -> records.WorldProved | None:
    """Proof that the world, `age` seconds old, makes progress: it has lasted, or it has saved a later state than
    earlier worlds. A world that fails at the same iteration again and again saves none."""
    ranks, saved = len(job.state.members), newest_saved(job)
    if saved is not None and saved.iteration > job.state.reached:
        reason = f"the world of {plural(ranks, 'rank')} has saved the state of iteration {saved.iteration}"
        return records.WorldProved(reason=reason)
    if age >= STEADY_SECONDS:
        return records.WorldProved(reason=f"the world of {plural(ranks, 'rank')} has run for {STEADY_SECONDS:.0f} s")
    return None


def worth(nodes: int, newcomers: int, age: float, config: ControllerConfig) -> tuple[bool, str]:
    """Whether to end a world of `nodes` nodes, `age` seconds old, for one with `newcomers` more; and why.

    A restart costs the work since the script's last checkpoint, on average half of `checkpoint_seconds` and at most the
    world's age, and the start. It gains the newcomers' share until the expected failure of the larger world, after
    which they would come in anyway.
    """
    cost = restart_cost(age, config)
    until_failure = config.mtbf_node_hours * 3600.0 / max(1, nodes + newcomers)
    gain = until_failure * newcomers / max(1, nodes)
    sums = (
        f"a restart costs about {cost:.0f} s of work, and {newcomers} more node{'s' if newcomers > 1 else ''} beside "
        f"{nodes} bring{'' if newcomers > 1 else 's'} {gain:.0f} s until a failure is to be expected"
    )
    if gain > cost:
        return True, f"{sums}: all processes start again in a larger world"
    return False, f"{sums}: they wait for the next restart"


def restart_cost(age: float, config: ControllerConfig) -> float:
    """Seconds that it costs to end a world `age` seconds old: the work since its last checkpoint, and the start."""
    return min(age, config.checkpoint_seconds / 2.0) + config.transition_seconds


SESSION, RESTART = Session(), Restart()


def mode_of(job: JobState) -> Session | Restart:
    """The job's strategy."""
    return RESTART if job.mode is healing_modes.RESTART else SESSION
