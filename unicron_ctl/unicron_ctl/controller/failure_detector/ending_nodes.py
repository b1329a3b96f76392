"""Nodes that end after an agent on them did (docs/design/silence.md, *A node that fails just after its agent*).

A node that is shut down ends its processes before its network, so its kernel first refuses connections: that proves
only the agent's death. Therefore the node stays under question if nobody reached its slurmd, or if Slurm still runs an
element whose agent died or left. It is lost after UNREACHED_SECONDS without an answer to the controller and to a
witness or, if no witness can be asked, to Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from unicron_ctl.controller.failure_detector import probes
from unicron_ctl.controller.failure_detector.probes import ANSWER_SECONDS, ROUND_SECONDS, Tick
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import AGENT_DIED
from unicron_ctl.controller.model.requests import Knock
from unicron_ctl.controller.model.suspicion import OWN, Answer, EndingNode, Key, Suspicion
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.slurm.states import ASLEEP, OCCUPIES, TAKEN_OUT

# A slurmd that an admin restarts listens again after 1 to 3 s, and its node must not be lost meanwhile. There is no
# hurry: the ranks have been left out already, and only the element's place in Slurm waits.
UNREACHED_SECONDS = 6.0
ROUNDS = 3  # the fewest within that time, since a round's answers may be lost
AT_ONCE = 32  # nodes that are asked about: each probe without an answer keeps one of 64 threads for most of a second
LEFTOVER_SECONDS = 5.0  # between two checks for elements that Slurm still runs without their agents
REACHED_SECONDS = 15.0  # after a node was reached, until it is asked about again for such an element
OUT_OF_SERVICE = TAKEN_OUT | ASLEEP
GREETINGS = 8  # slurmds that are tried at once while all is well, of 64 threads
GREET_AGAIN_SECONDS = 300.0  # between two tries of a slurmd that has not answered


# ---------------------------------------------------------------- which slurmds are known to answer
def greet_slurmds(view: View) -> Outcome:
    """Try the slurmds of nodes with agents, a few at a time, while all is well: only a port that has answered can
    refuse."""
    out, live = Outcome(), view.live
    if view.alone or view.slurm.seen is None:
        return out
    while live.greet_at and len(live.greeted) < GREETINGS:
        node, due = next(iter(live.greet_at.items()))
        if due > view.now:
            break
        live.greet_at[node] = view.now + GREET_AGAIN_SECONDS
        live.greet_at.move_to_end(node)
        address = probes.slurmd_address(view, node)
        if address and not slurmd_known(view, node, address):
            live.greeted.add(node)
            out.requests.append(Knock(node, address))
    return out


def on_knock(view: View, knock: Knock, answer: Reach | None) -> None:
    """Take in the answer of a slurmd; None if the try itself failed."""
    view.live.greeted.discard(knock.node)
    if answer is Reach.REACHED:
        view.live.slurmds[knock.node] = knock.address


def slurmd_known(view: View, node: str, address: str) -> bool:
    """The node's slurmd has answered at this address, so a refusal there means something."""
    return bool(address) and address in (view.live.slurmds.get(node), view.state.node(node).slurmd)


def _record_slurmd(view: View, node: str, out: Outcome) -> None:
    """Record at which address slurmd has answered, for the next controller."""
    address = view.live.slurmds.get(node)
    if address and view.state.node(node).slurmd != address:
        reason = f"the slurmd of {node} has answered at {address}"
        out.record(None, records.SlurmdReached(node=node, address=address, reason=reason))


# ---------------------------------------------------------------- which nodes are under question
def open_ending_node(view: View, suspicion: Suspicion) -> None:
    """Question the node of the suspected agent, which died while nobody reached its slurmd."""
    _open_silent(view, suspicion.job, suspicion.element, suspicion.since, suspicion.reached)
    own, ending = suspicion.answers.get(OWN), view.suspicions.ending_nodes.get(suspicion.node)
    if ending is not None and own is not None and own.slurmd is Reach.REFUSED:
        ending.refused = True


def _recall_ending_nodes(view: View) -> None:
    """Question nodes on which agents died before this controller's start: the log does not tell whose slurmd was
    reached."""
    for job, element, record in view.known_agents():
        if record.gone == AGENT_DIED:
            _open_silent(view, job.job, element, view.started_at, None)


def _open_leftovers(view: View) -> None:
    """Question nodes on which Slurm still runs elements whose agents have ended: usually just the element is about to
    end, but the node may be, too."""
    suspicions = view.suspicions
    suspicions.leftovers_check_at = view.now + LEFTOVER_SECONDS
    suspicions.answered = {node: at for node, at in suspicions.answered.items() if view.now - at < REACHED_SECONDS}
    for job, element, record in view.known_agents():
        asked = record.node in suspicions.ending_nodes or record.node in suspicions.answered
        if record.ended_early and not asked and (job.job, element) in _leftovers(view, record.node):
            _open(view, job.job, element, view.now, None)


def _open_silent(view: View, job: str, element: int, since: float, reached: bool | None) -> None:
    """Question the node. It counts as silent for self-suspicion until somebody reaches it."""
    ending = _open(view, job, element, since, reached)
    if ending is not None:
        view.suspicions.given_up[job, element] = ending


def _open(view: View, job: str, element: int, since: float, reached: bool | None) -> EndingNode | None:
    suspicions, record = view.suspicions, view.state.jobs[job].agents[element]
    targets = probes.targets(view, record.node, record.door)
    if not targets[1]:  # Slurm does not know the node, so there is no slurmd to ask
        return None
    ending = suspicions.ending_nodes.get(record.node)
    if ending is None:
        ending = EndingNode(job, element, record.agent, record.node, since, targets, reached=reached)
        ending.opened = view.now
        suspicions.ending_nodes[record.node] = ending
    return ending


def check_ending_nodes(tick: Tick, out: Outcome) -> None:
    """Probe the nodes under question, and report those that are lost. :mod:`leases` calls this at every tick."""
    view, suspicions = tick.view, tick.view.suspicions
    settled = view.now - view.started_at > view.config.restart_grace and view.slurm.seen is not None
    if settled and not suspicions.asked_again:
        suspicions.asked_again = True
        _recall_ending_nodes(view)
    if settled and view.now >= suspicions.leftovers_check_at:
        _open_leftovers(view)
    for ending in list(islice(suspicions.ending_nodes.values(), AT_ONCE)):
        _check_ending_node(tick, ending, out)


def _check_ending_node(tick: Tick, ending: EndingNode, out: Outcome) -> None:
    view, suspicions, node = tick.view, tick.view.suspicions, ending.node
    if ending.until is None or view.alone or suspicions.doubt:
        ending.until = view.now + view.config.state_wait_seconds
    leftovers = list(_leftovers(view, node))
    if _is_over(view, ending, leftovers):
        suspicions.close_ending(node)
        suspicions.answered[node] = view.now
        return
    _record_slurmd(view, node, out)
    if ending.key not in leftovers:  # another agent that died there stands for the node, with its own witnesses
        ending.job, ending.element = leftovers[0]
        ending.agent = view.state.jobs[ending.job].agents[ending.element].agent
        suspicions.restart_ending(ending, view.now)
    if view.alone:
        suspicions.restart_ending(ending, view.now)
        return
    if suspicions.doubt:  # the node is probed all the same: if anything is reached, it is not silent
        ending.unreached, ending.counted = 0, True
    elif _count_round(tick, ending) and _is_lost(view, ending):
        out.findings += [_finding(tick, ending, key) for key in leftovers]
    if not ending.number or (view.now - ending.begun > ROUND_SECONDS and not ending.probing):
        suspicions.begin_round(ending, view.now)
        door = view.state.jobs[ending.job].agents[ending.element].door
        ending.counted, ending.targets = False, probes.targets(view, node, door)
    probes.send_probes(tick, ending, out)


# ---------------------------------------------------------------- how a question ends quietly
def _leftovers(view: View, node: str) -> Iterator[Key]:
    """Yield elements that Slurm still runs on the node although their agents died or left there."""
    for e in view.slurm.seen.by_node.get(node, ()) if view.slurm.seen is not None else ():
        job = view.state.jobs.get(e.job)
        record = job.agents.get(e.element) if job is not None and not job.over else None
        here = record is not None and record.node == node and record.ended_early
        runs = e.state in OCCUPIES
        if job is not None and here and runs and view.shown_node(job, e.element) is not None:
            yield e.job, e.element


def _is_over(view: View, ending: EndingNode, leftovers: list[Key]) -> bool:
    """Whether no element is left there, somebody reached the node, an agent speaks from there, the time is over, or the
    node is out of service already."""
    reached = OWN in ending.answers and ending.there(ending.answers[OWN])
    speaks = any(agent.alive and agent.last_heard > ending.opened for agent in view.live.on_node(ending.node))
    late = ending.until is not None and view.now > ending.until
    return not leftovers or reached or speaks or late or _out_of_service(view, ending.node)


def _out_of_service(view: View, node: str) -> bool:
    """Whether the node is out of service. A lost node that was only drained here, because other jobs ran there, still
    has to be set down."""
    info, record = view.slurm.node(node), view.state.node(node)
    ours = record.downed and record.drained and not record.proven_bad
    states = info.states & OUT_OF_SERVICE if info is not None else OUT_OF_SERVICE
    return bool(states - {"DRAIN"} if ours else states or record.downed)


# ---------------------------------------------------------------- what the rounds show
def _count_round(tick: Tick, ending: EndingNode) -> bool:
    """Count the present round; true if it has just shown that nobody answers."""
    if any(ending.there(answer) for answer in ending.answers.values()):
        ending.unreached, ending.counted = 0, True
    if ending.counted or not _nobody_answers(tick, ending):
        return False
    ending.unreached_since = ending.unreached_since if ending.unreached else ending.begun
    ending.unreached, ending.counted = ending.unreached + 1, True
    return True


def _nobody_answers(tick: Tick, ending: EndingNode) -> bool:
    """Whether in this round the controller's own sockets got no answer, nor did enough witnesses, or Slurm."""
    own, trusted = ending.answers.get(OWN), slurmd_known(tick.view, ending.node, ending.targets[1])
    trusted = trusted and ending.control is Reach.REACHED
    ending.refused = ending.refused or (own is not None and own.slurmd is Reach.REFUSED)
    if own is None or not _unanswered(own, trusted):
        return False
    agreed = sum(_unanswered(answer, trusted) for answer in ending.testimony())
    if agreed >= probes.needed_witnesses(tick, ending):
        return True
    waits = len(ending.asked) > 1 and tick.view.now - ending.begun < ANSWER_SECONDS
    return not waits and bool(_slurm_calls_dead(tick, ending))


def _unanswered(answer: Answer, trusted: bool) -> bool:
    """Whether nobody answered at all. A kernel that refuses connections at the agent's door lives.

    trusted: slurmd has answered there before, and others answer now. Otherwise a refusal may not be the node's own.
    """
    if answer.slurmd is Reach.REFUSED:
        return trusted
    return answer.slurmd is Reach.SILENT and answer.door is not Reach.REFUSED


def _slurm_calls_dead(tick: Tick, ending: EndingNode) -> str:
    """Return the states by which Slurm calls the node dead, if Slurm was asked since the question was opened."""
    seen = tick.view.slurm.seen
    fresh = seen is not None and seen.asked_at > ending.opened
    return probes.slurm_calls_dead(tick, ending.node) if fresh else ""


def _is_lost(view: View, ending: EndingNode) -> bool:
    """Whether nobody answered for long enough, and no other agent on the node is still to be judged."""
    if ending.unreached < ROUNDS or view.now - ending.unreached_since < UNREACHED_SECONDS:
        return False
    silent = any(suspicion.node == ending.node for suspicion in view.suspicions.open.values())
    return not silent and not any(agent.alive for agent in view.live.on_node(ending.node))


def _finding(tick: Tick, ending: EndingNode, key: Key) -> Finding:
    view = tick.view
    seconds, by = view.now - ending.unreached_since, "own sockets and witnesses"
    if len(ending.testimony()) < probes.needed_witnesses(tick, ending):
        by = f"own sockets and Slurm ({_slurm_calls_dead(tick, ending)})"
    evidence = (
        f"after its agent ended nobody reached the slurmd of {ending.node} in {ending.unreached} rounds of questions "
        f"within {seconds:.1f} s ({'; '.join(map(str, ending.answers.values()))})"
    )
    return Finding(What.NODE_ENDED, key[0], (), view.now, Source.PEER, evidence, key[1], ending.node, by)
