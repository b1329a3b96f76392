"""Fold rules for requests to Slurm: intents and outcomes, takes, and nodes where elements must not start."""

from __future__ import annotations

from dataclasses import replace

from unicron_ctl.controller.model.cluster_state import HOLDS, REQUEUES, TAKES, ClusterState, Intent, Mark, Pin, Take
from unicron_ctl.controller.model.job_rules import leave_with_block
from unicron_ctl.controller.model.job_state import AgentRecord, AvoidedNode, JobState, RefusedNode
from unicron_ctl.controller.model.node_state import OUT
from unicron_ctl.controller.model.requests import POWER_OFF
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.slurm.squeue import names_of


def on_action(state: ClusterState, event: Event, record: records.SlurmAction) -> None:
    if record.action == "pin" and record.node:
        state.pins[event.job, record.element] = Pin(record.node, event.time)
    elif record.action in ("pin", "cancel"):
        state.pins.pop((event.job, record.element), None)
    if record.action in HOLDS:
        state.held.add((event.job, record.element))
        state.once_held[event.job, record.element] = event.time
    elif record.action == "release":
        state.held.discard((event.job, record.element))
    key = record.action, event.job, record.element, record.node
    state.intents[key] = Intent(event.time, record.slurm_reason, record.restarts)
    if record.action == POWER_OFF:  # it counts in the limit on nodes taken out of service, also if Slurm keeps the node
        state.isolated[record.node] = Mark(event.time, event.job)
    if record.action in TAKES:
        job = state.jobs.get(event.job)
        preempted = job is not None and job.was_noticed(record.element * job.settings.block)
        state.taken.append(Take(event.time, record.action, event.job, record.element, preempted))
        state.withheld_takes.pop(f"{record.action} {event.job}", None)


def on_done(state: ClusterState, event: Event, record: records.SlurmDone) -> None:
    settle_intents(state, event.job, record.action, record.element, record.node)
    pin = state.pins.get((event.job, record.element))
    if record.action == "pin" and pin is not None and pin.node == record.node:
        state.pins[event.job, record.element] = Pin(pin.node, event.time)  # earlier answers of Slurm are not about it
    if (event.job, record.element) in state.once_held:
        state.once_held[event.job, record.element] = event.time


def on_failed(state: ClusterState, event: Event, record: records.SlurmFailed) -> None:
    settle_intents(state, event.job, record.action, record.element, record.node)
    if record.action in HOLDS:
        state.held.discard((event.job, record.element))
    elif record.action == "release":
        state.held.add((event.job, record.element))
    if record.action in TAKES:  # nothing was taken
        asked = (record.action, event.job, record.element)
        for take in reversed(state.taken):
            if (take.action, take.job, take.element) == asked:
                state.taken.remove(take)
                break


def settle_intents(state: ClusterState, job: str, action: str, element: int, node: str) -> None:
    """Drops requests to Slurm that are done, or never will be; those about a node for all jobs."""
    done = [
        key
        for key in state.intents
        if key[0] == action and key[3] == node and (action in OUT or key[1:3] == (job, element))
    ]
    for key in done:
        del state.intents[key]


def on_withheld(state: ClusterState, event: Event, record: records.TakeWithheld) -> None:
    state.withheld_takes[f"{record.action} {event.job}"] = Mark(event.time, event.job, record.reason)


def on_held_again(state: ClusterState, event: Event, record: records.HeldAgain) -> None:
    state.held.add((event.job, record.element))


def on_unpinned(state: ClusterState, event: Event, record: records.ElementUnpinned) -> None:
    if not record.node:  # else Slurm has the pin until it is asked to take it back
        state.pins.pop((event.job, record.element), None)


def on_refused(job: JobState, event: Event, record: records.ElementUnpinned) -> None:
    for node in names_of(record.node):
        job.refused[node] = RefusedNode(record.until, record.said)


# ---------------------------------------------------------------- one job's elements
def on_avoided(job: JobState, event: Event, record: records.NodeAvoided) -> None:
    job.avoid[record.node] = AvoidedNode(event.time, record.reason, record.agent, record.suspect)
    if record.agent:
        leave_with_block(job, record.element)
    if job.swap is not None and job.swap.element == record.element:
        job.swap = None


def on_of_element(job: JobState, event: Event, record: records.SlurmAction) -> None:
    if record.action in REQUEUES:
        job.requeued[record.element] = event.time
        for agent in _agents(job, record.element):
            agent.tries += 1


def on_of_element_done(job: JobState, event: Event, record: records.SlurmDone) -> None:
    job.shrunk += record.action == "shrink"


def on_of_element_failed(job: JobState, event: Event, record: records.SlurmFailed) -> None:
    if record.action == "shrink":
        job.unshrinkable = record.reason
    if record.action not in REQUEUES:
        return
    if job.settings.allocation:
        job.unrequeueable = record.reason
    job.requeued.pop(record.element, None)
    for agent in _agents(job, record.element):
        agent.tries -= 1
        mark = job.avoid.get(agent.node)
        if mark is not None and mark.agent == agent.agent:  # it stays where it is, and may work
            job.avoid[agent.node] = replace(mark, agent="")


def _agents(job: JobState, element: int) -> list[AgentRecord]:
    """The agents on the nodes of one of Slurm's elements."""
    return [job.agents[number] for number in job.nodes_of_block(element) if number in job.agents]
