"""The tables of Slurm's words for the states of jobs and nodes, and what each means here.

docs/behaviour/slurm-states.toml has the words of each release, and where its source has them. An unknown word is never
read as good news: its element keeps its nodes and is not over, its node gets no work.
"""

from __future__ import annotations

import enum
import logging
from functools import lru_cache

log = logging.getLogger("unicron.slurm")
UNKNOWN = "UNKNOWN"  # an element's state if the table does not have Slurm's word for it


class Job(enum.Flag):
    """The meaning of a job's or an element's state."""

    PENDING = enum.auto()  # waits to be started
    HOLD = enum.auto()  # pending, and held until it is released; the word itself may stay after that
    OCCUPIES = enum.auto()  # has nodes, and there are processes, or may be
    WORKS = enum.auto()  # its processes run, or are about to
    LEAVES = enum.auto()  # its processes end or have ended, and a requeue may be under way
    OVER = enum.auto()  # does not come back by itself
    FAILED = enum.auto()  # is over, and nobody wanted that


_OVER, _FAILED = Job.OVER, Job.OVER | Job.FAILED
_HOLDS = Job.PENDING | Job.HOLD
JOB_WORDS = {
    "PENDING": Job.PENDING,
    "EXPEDITING": Job.PENDING,  # waits after an expedited requeue; its pin can be changed as that of any pending one
    "REQUEUE_HOLD": _HOLDS,  # requeued too often, or by --requeue=expedite although no node has failed
    "SPECIAL_EXIT": _HOLDS,  # `scontrol requeuehold State=SpecialExit`, or RequeueExitHold
    "RESV_DEL_HOLD": _HOLDS,  # its reservation is over, was deleted or is invalid
    "RUNNING": Job.OCCUPIES | Job.WORKS,
    "CONFIGURING": Job.OCCUPIES | Job.WORKS,
    "COMPLETING": Job.OCCUPIES | Job.LEAVES,
    "REQUEUED": Job.OCCUPIES | Job.LEAVES,
    "REQUEUE_FED": Job.OCCUPIES | Job.LEAVES,
    "RESIZING": Job.OCCUPIES,
    "SIGNALING": Job.OCCUPIES,
    "STAGE_OUT": Job.OCCUPIES,
    "STOPPED": Job.OCCUPIES,
    "SUSPENDED": Job.OCCUPIES,
    UNKNOWN: Job.OCCUPIES,
    "COMPLETED": _OVER,
    "CANCELLED": _OVER,
    "DEADLINE": _OVER,
    "PREEMPTED": _OVER,
    "REVOKED": _OVER,  # another cluster of the federation has it
    "TIMEOUT": _OVER,
    "BOOT_FAIL": _FAILED,
    "FAILED": _FAILED,
    "NODE_FAIL": _FAILED,
    "OUT_OF_MEMORY": _FAILED,
    # Flags beside one of the words above, which are printed only where Slurm prints all flags (sacct --json).
    "LAUNCH_FAILED": _OVER,
    "RECONFIG_FAIL": _OVER,
    "POWER_UP_NODE": Job.OCCUPIES,
}


class Node(enum.Flag):
    """The meaning of a word of a node's state. A node has one or more words; at least one must have a meaning."""

    UNUSABLE = enum.auto()  # gets no work
    DOWN = enum.auto()  # Slurm hears nothing of it, or has given it up
    DRAINED = enum.auto()  # somebody has taken it out of service, or it takes itself out: gets no further work
    ASLEEP = enum.auto()  # power saving has it off, or on its way there or back: it answers nobody
    IN_USE = enum.auto()  # somebody's job is there
    REASON = enum.auto()  # its reason is of now, and no old one: Slurm may keep one after a resume
    PLAIN = enum.auto()  # known, and nothing follows from it


_OUT = Node.UNUSABLE | Node.REASON
_DRAIN = _OUT | Node.DRAINED
NODE_WORDS = {
    "IDLE": Node.PLAIN,
    "ALLOCATED": Node.IN_USE,
    "MIXED": Node.IN_USE,
    "DOWN": _OUT | Node.DOWN,
    "ERROR": _OUT,
    "FUTURE": _OUT,
    "UNKNOWN": _OUT,  # slurmd has not registered since slurmctld began
    "INVALID": _OUT,
    # flags
    "BLOCKED": _OUT,  # a job that has its whole topology for itself (--exclusive=topo) runs beside it
    "CLOUD": Node.PLAIN,
    "COMPLETING": Node.IN_USE,
    "DRAIN": _DRAIN,
    "DYNAMIC_FUTURE": Node.PLAIN,
    "DYNAMIC_NORM": Node.PLAIN,
    "EXTERNAL": _OUT,  # has no slurmd
    "FAIL": _DRAIN,
    "INVALID_REG": _OUT,
    "MAINTENANCE": _OUT,
    "NOT_RESPONDING": Node.UNUSABLE | Node.DOWN,
    "PERFCTRS": Node.PLAIN,
    "PLANNED": Node.PLAIN,
    "POWER_DOWN": Node.REASON,  # to be done once it is free, as POWER_UP
    "POWER_UP": Node.PLAIN,
    "POWERED_DOWN": Node.ASLEEP | Node.REASON,
    "POWERING_DOWN": Node.ASLEEP | Node.REASON,
    "POWERING_UP": Node.ASLEEP,
    "REBOOT_ISSUED": _OUT,
    "REBOOT_REQUESTED": Node.REASON,
    "RESERVED": Node.PLAIN,
    "RESUME": Node.PLAIN,
    "?": _OUT,  # a flag for which this release has no word
    # sinfo's, where scontrol has two words
    "CANCEL_REBOOT": Node.PLAIN,
    "DRAINED": _DRAIN,
    "DRAINING": _DRAIN,
    "FAILING": _DRAIN,
    "INVAL": _OUT,
    "MAINT": _OUT,
    "REBOOT": Node.REASON,
    "UNDRAIN": Node.PLAIN,
}
# A sign after a node's state is a flag.
SIGNS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "!": "POWER_DOWN",
    "-": "PLANNED",
}


def jobs(meaning: Job) -> frozenset[str]:
    """Return the words for jobs that mean this."""
    return frozenset(word for word, means in JOB_WORDS.items() if meaning in means)


def nodes(meaning: Node) -> frozenset[str]:
    """Return the words for nodes that mean this."""
    return frozenset(word for word, means in NODE_WORDS.items() if meaning in means)


OCCUPIES, WORKS, LEAVES = jobs(Job.OCCUPIES), jobs(Job.WORKS), jobs(Job.LEAVES)
OVER, ENDED_BADLY = jobs(Job.OVER), jobs(Job.FAILED)
WAITS = jobs(Job.PENDING)  # in a listing; an element's state is PENDING in all of them
UNUSABLE, DOWN, DRAINED = nodes(Node.UNUSABLE), nodes(Node.DOWN), nodes(Node.DRAINED)
ASLEEP, IN_USE, REASON = nodes(Node.ASLEEP), nodes(Node.IN_USE), nodes(Node.REASON)
TAKEN_OUT = frozenset({"DOWN", "DRAIN"})  # as `scontrol update NodeName=... State=` sets them


def element_state(said: str) -> str:
    """Return an element's state by Slurm's word for it: PENDING for all that wait, UNKNOWN for an unknown word."""
    means = JOB_WORDS.get(said)
    if means is None or said == UNKNOWN:
        _warn(f"job state {said!r}: its element keeps its nodes, and is taken for neither pending nor over")
        return UNKNOWN
    return "PENDING" if Job.PENDING in means else said


def on_hold(said: str, priority: int) -> bool:
    """Say whether this word means that the element is held. Slurm may keep the word after the release, but then the
    priority is no longer 0."""
    return priority == 0 and Job.HOLD in JOB_WORDS.get(said, Job.OVER)


def parse_states(text: str) -> frozenset[str]:
    """Convert "DOWN*+DRAIN" to {"DOWN", "NOT_RESPONDING", "DRAIN"}."""
    states = set()
    for part in text.upper().split("+"):
        while part and part[-1] in SIGNS:
            states.add(SIGNS[part[-1]])
            part = part[:-1]
        if part:
            states.add(part)
    return frozenset(states)


def unknown(words: frozenset[str]) -> frozenset[str]:
    """Return those of a node's words that are not in the table, and log them."""
    found = words - NODE_WORDS.keys()
    for word in found:
        _warn(f"node state {word!r}: a node in it gets no work")
    return found


@lru_cache(maxsize=256)
def _warn(text: str) -> None:
    """Log a warning once."""
    log.warning("this Slurm has a word that Unicron does not know, %s", text)
