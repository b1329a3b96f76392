"""Nodes that end after an agent on them did.

A node that is shut down ends its processes before its network: for a moment its kernel refuses connections, at the
agent's door and at slurmd's port. That says that the agent died, and nothing of the node. Where nobody reached the
node's slurmd in that moment, the node stays under question. So it does where Slurm still runs an element whose agent
has died or left: a shutdown may ask processes to end, and slurmd may answer for a while. Each round this controller's
own sockets and up to two living agents try the agent's door and the node's slurmd.

- It ends quietly, in doubt for the node: when this controller reaches one of them, when an agent speaks from there,
  when Slurm has the node out of service or does not run the element there any more, when the job is over, and after
  `state_wait_seconds`. An agent that says that it is reached may lie, about another job's element, too: the count
  begins anew.
- A door that refuses while slurmd is silent says nothing: the kernel lives, and something drops what comes for slurmd.
- A refusal at slurmd's port counts only where this controller has reached slurmd before (`doors`), and reaches another
  node's now (the control): it may listen at another port, and something on the way may refuse.
- The node is lost when nobody has reached its slurmd for UNREACHED_SECONDS: by this controller's own sockets, and by
  the witnesses or, where nobody can be asked, by Slurm.
- While the controller hears nobody, or suspects itself (`sense.together`), nothing counts.

The log says which agents died. What was asked about their nodes is lost with the process, and asked again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from unicron.ctl.controller.failure_detector import doors, elsewhere, probes
from unicron.ctl.controller.failure_detector.probes import ANSWER_SECONDS, ROUND_SECONDS, Sight
from unicron.ctl.controller.log import records
from unicron.ctl.controller.model.finding import Finding, Source, What
from unicron.ctl.controller.model.inquiry import OWN, Ending, Inquiry, Key, Word
from unicron.ctl.controller.model.job_state import AGENT_DIED
from unicron.ctl.controller.model.view import Outcome, View
from unicron.ctl.protocol.reach import Reach

# An admin who starts slurmd again must not lose the node: it listens again after 1 to 3 s. A node that ends needs no
# more: what it runs has been left out already, and only its place in Slurm waits for this.
UNREACHED_SECONDS = 6.0
ROUNDS = 3  # the fewest in that time: one whose answers are lost says nothing
# Nodes that are asked about at once, the others wait: when a rack is shut down, each own try that gets no answer
# keeps one of 64 threads for most of a second, and the limits let few nodes be taken anyhow.
AT_ONCE = 32
STAY_SECONDS = 5.0  # between two looks for elements that Slurm still runs without their agents
REACHED_SECONDS = 15.0  # after a node was reached, until it is asked about again for such an element
OUT_OF_SERVICE = frozenset({"DOWN", "DRAIN", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})


def begin(view: View, inquiry: Inquiry) -> None:
    """Its agent died, and nobody reached its node's slurmd. Where Slurm does not know the node nobody can be asked."""
    _begin(view, inquiry.job, inquiry.element, inquiry.since, inquiry.reached)
    own, one = inquiry.words.get(OWN), view.inquiries.ending.get(inquiry.node)
    if one is not None and own is not None and own.slurmd is Reach.REFUSED:
        one.refused = True


def _recall(view: View) -> None:
    """After a start: nobody knows any more whose slurmd was reached when their agents died."""
    for job in view.state.jobs.values():
        for element, record in job.agents.items() if not job.over else ():
            if record.gone == AGENT_DIED:
                _begin(view, job.job, element, view.started_at, None)


def _stay(view: View) -> None:
    """Slurm still runs elements whose agents have ended: most are about to end, but the node may be, too."""
    inquiries = view.inquiries
    inquiries.stay_look_at = view.now + STAY_SECONDS
    inquiries.answered = {node: at for node, at in inquiries.answered.items() if view.now - at < REACHED_SECONDS}
    for job in view.state.jobs.values():
        for element, record in job.agents.items() if not job.over else ():
            if not record.ended_early or record.node in inquiries.ending or record.node in inquiries.answered:
                continue
            if (job.job, element) in _died(view, record.node):
                _open(view, job.job, element, view.now, None)


def _begin(view: View, job: str, element: int, since: float, reached: bool | None) -> None:
    """For `sense.together` its node is silent until somebody reaches it."""
    one = _open(view, job, element, since, reached)
    if one is not None:
        view.inquiries.judged[job, element] = one


def _open(view: View, job: str, element: int, since: float, reached: bool | None) -> Ending | None:
    inquiries, record = view.inquiries, view.state.jobs[job].agents[element]
    targets = probes.targets(view, record.node, record.door)
    if not targets[1]:
        return None
    one = inquiries.ending.get(record.node)
    if one is None:
        one = Ending(job, element, record.agent, record.node, since, targets, reached=reached)
        one.opened = view.now
        inquiries.ending[record.node] = one
    return one


def look(view: View, sight: Sight, out: Outcome) -> None:
    """Asks, and reports the nodes that are lost. Only `sense.silence` calls it, at every tick."""
    inquiries = view.inquiries
    settled = view.now - view.started_at > view.config.restart_grace and view.slurm.seen is not None
    if settled and not inquiries.asked_again:
        inquiries.asked_again = True
        _recall(view)
    if settled and view.now >= inquiries.stay_look_at:
        _stay(view)
    for node, one in list(islice(inquiries.ending.items(), AT_ONCE)):
        if one.until is None or view.alone or inquiries.doubt:
            one.until = view.now + view.config.state_wait_seconds
        died = list(_died(view, node))
        if _over(view, one, died):
            inquiries.close_ending(node)
            inquiries.answered[node] = view.now
            continue
        _note_slurmd(view, node, out)
        if (one.job, one.element) not in died:  # others died there, too: theirs are the witnesses now
            _follow(view, one, *died[0])
        if view.alone:
            inquiries.anew(one, view.now)
            continue
        if inquiries.doubt:  # it is asked all the same: whoever is reached is not silent
            one.unreached, one.counted = 0, True
        elif _count(view, sight, one) and _lost(view, one):  # and again after the next round, if it is not believed
            out.findings += [_finding(view, sight, one, key) for key in died]
        if not one.number or (view.now - one.begun > ROUND_SECONDS and not one.probing):
            inquiries.begin_round(one, view.now)
            door = view.state.jobs[one.job].agents[one.element].door
            one.counted, one.targets = False, probes.targets(view, node, door)
        probes.ask(view, sight, one, out)


def _note_slurmd(view: View, node: str, out: Outcome) -> None:
    """The next controller, too, is to know that a refusal there means something."""
    address = view.live.slurmds.get(node)
    if address and view.state.node(node).slurmd != address:
        reason = f"the slurmd of {node} has answered at {address}"
        out.record(None, records.SlurmdReached(node=node, address=address, reason=reason))


def _follow(view: View, one: Ending, job: str, element: int) -> None:
    """Another agent that died there speaks for the node from now on, and asks its own job's agents."""
    one.job, one.element, one.agent = job, element, view.state.jobs[job].agents[element].agent
    view.inquiries.anew(one, view.now)


# ---------------------------------------------------------------- how it ends quietly
def _died(view: View, node: str) -> Iterator[Key]:
    """The elements whose agents died or left on the node, and that Slurm still runs there: they wait for it."""
    for e in view.slurm.seen.by_node.get(node, ()) if view.slurm.seen is not None else ():
        job = view.state.jobs.get(e.job)
        record = job.agents.get(e.element) if job is not None and not job.over else None
        here = record is not None and record.node == node and record.ended_early
        if job is not None and here and e.state in elsewhere.HERE and view.shown_node(job, e.element) is not None:
            yield e.job, e.element


def _over(view: View, one: Ending, died: list[Key]) -> bool:
    reached = OWN in one.words and one.there(one.words[OWN])
    speaks = any(agent.alive and agent.last_heard > one.opened for agent in view.live.on_node(one.node))
    return not died or reached or speaks or (one.until is not None and view.now > one.until) or _settled(view, one.node)


def _settled(view: View, node: str) -> bool:
    """It is out of service. Not one that was drained here because it was lost while others ran there: when they are
    gone, too, it is set down."""
    info, known = view.slurm.node(node), view.state.node(node)
    ours = known.downed and known.drained and not known.proven_bad
    states = info.states & OUT_OF_SERVICE if info is not None else OUT_OF_SERVICE
    return bool(states - {"DRAIN"} if ours else states or known.downed)


# ---------------------------------------------------------------- what the rounds say
def _count(view: View, sight: Sight, one: Ending) -> bool:
    """Whether one more round has shown, just now, that nobody answers."""
    if any(one.there(word) for word in one.words.values()):
        one.unreached, one.counted = 0, True
    if one.counted or not _nobody(view, sight, one):
        return False
    one.unreached_since = one.unreached_since if one.unreached else one.begun
    one.unreached, one.counted = one.unreached + 1, True
    return True


def _nobody(view: View, sight: Sight, one: Ending) -> bool:
    """In this round this controller's own sockets got no answer, nor did enough others, nor anybody else."""
    own, known = one.words.get(OWN), doors.slurmd_known(view, one.node, one.targets[1])
    known = known and one.control is Reach.REACHED
    one.refused = one.refused or (own is not None and own.slurmd is Reach.REFUSED)
    if own is None or not _gone(own, known):
        return False
    if sum(_gone(word, known) for word in one.witnessed()) >= probes.needed(view, sight, one):
        return True
    waits = len(one.asked) > 1 and view.now - one.begun < ANSWER_SECONDS
    return not waits and bool(_slurm(view, sight, one))


def _gone(word: Word, known: bool) -> bool:
    """Nobody answered, and not only slurmd's port was silent: a kernel that refuses at the door lives. known: slurmd
    has answered there, and others answer now; else a refusal is no word of the node's."""
    if word.slurmd is Reach.REFUSED:
        return known
    return word.slurmd is Reach.SILENT and word.door is not Reach.REFUSED


def _slurm(view: View, sight: Sight, one: Ending) -> str:
    """What Slurm, asked since then, says of the node."""
    seen = view.slurm.seen
    return probes.slurm_says(view, sight, one.node) if seen is not None and seen.asked_at > one.opened else ""


def _lost(view: View, one: Ending) -> bool:
    """... for long enough, and no agent is left there that is not judged yet."""
    if one.unreached < ROUNDS or view.now - one.unreached_since < UNREACHED_SECONDS:
        return False
    silent = any(inquiry.node == one.node for inquiry in view.inquiries.open.values())
    return not silent and not any(agent.alive for agent in view.live.on_node(one.node))


def _finding(view: View, sight: Sight, one: Ending, key: Key) -> Finding:
    words: list[Word] = list(one.words.values())
    seconds, by = view.now - one.unreached_since, "own sockets and witnesses"
    if len(one.witnessed()) < probes.needed(view, sight, one):
        by = f"own sockets and Slurm ({_slurm(view, sight, one)})"
    said = (
        f"after its agent ended nobody reached the slurmd of {one.node} in {one.unreached} rounds of questions within "
        f"{seconds:.1f} s ({'; '.join(map(str, words))})"
    )
    job, element = key
    return Finding(What.NODE_ENDED, job, (), view.now, Source.PEER, said, element=element, node=one.node, by=by)
