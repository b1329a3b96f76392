"""Records of generations: what was planned, broken, offered and entered."""

from __future__ import annotations

import msgspec

from unicron_ctl.shared.log.records.base import Record
from unicron_ctl.shared.protocol.wire import Plan


class Crew(msgspec.Struct, frozen=True, array_like=True):
    """The processes of one agent that belong to a plan: an incarnation for each slot."""

    agent: str
    slots: list[int]
    incarnations: list[int]


class LostProcess(msgspec.Struct, frozen=True, array_like=True):
    """One process that a generation goes on without."""

    slot: int
    agent: str
    incarnation: int


class Break(Record, frozen=True, tag="break"):
    """All generations up to `number` are over."""

    number: int
    lost: list[LostProcess]
    tries: int = 0  # time-outs of entering in a row
    planned: bool = False  # nothing failed: the membership of a job in restart mode changes
    saved: int = -1  # restart mode: the newest iteration whose state was certainly saved
    repeated: int = 0  # restart mode: iterations since the last checkpoint


class PlanMade(Record, frozen=True, tag="plan"):
    """The next generation, and the fate of the micro-batches."""

    plan: Plan
    crews: list[Crew]
    reused: int = 0  # micro-batches kept in survivors' gradients
    recomputed: int = 0  # finished ones that are computed again
    redistributed: int = 0  # those of lost ranks that others compute


class GenerationAdopted(Record, frozen=True, tag="adopted"):
    """A generation that agents show and the log did not have."""

    plan: Plan
    crews: list[Crew]
    whole: bool  # all of its members are in it or entering it


class NumberUsed(Record, frozen=True, tag="number_used"):
    """The number of a generation on which agents began to agree, but did not: it is never used again."""


class MembersReinstated(Record, frozen=True, tag="reinstated"):
    """Members that were thought lost have come back in time."""

    slots: list[int]


class StateAwaited(Record, frozen=True, tag="state_awaited"):
    """The job is not formed anew yet, because these lost members may hold its training state."""

    slots: list[int]


class ElementCutOff(Record, frozen=True, tag="parted"):
    """The element takes no part, because it and others of the job do not reach each other."""

    element: int


class ElementReconnected(Record, frozen=True, tag="rejoined"):
    """The element reaches the others again."""

    element: int


class Offer(Record, frozen=True, tag="offer"):
    """A generation that begins at an iteration boundary."""

    plan: Plan
    crews: list[Crew]  # of the joiners
    joiners: list[int]
    leavers: list[int]


class OfferWithdrawn(Record, frozen=True, tag="offer_withdrawn"):
    """The job trains on without the offer."""

    number: int
    lost: list[LostProcess] = []  # newcomers that failed before they joined


class LastCopy(Record, frozen=True, tag="last_copy"):
    """Only these slots still have the training state: no time limit counts them as lost."""

    slots: list[int]


class GenerationEntered(Record, frozen=True, tag="entered"):
    members: list[int]
    left: list[int] = []  # members of the generation before that left at the boundary
    unfenced: list[int] = []  # restart mode: elements whose processes nothing ends if they are cut off


class Reform(Record, frozen=True, tag="reform"):
    """The job is formed anew, because no rank has the training state any more, or because that is unsound."""

    reached: int = -1  # the furthest iteration to which its ranks had come
    unsound_until: int = -1  # states up to this iteration and after `sound` were found to be wrong; -1: none was
    sound: int = -1  # the newest iteration from which the job may begin then
    verified: bool = False  # an audit has found its state sound; otherwise it is only old enough


class LayoutWanted(Record, frozen=True, tag="layout_wanted"):
    """The plan wants the job in this layout, which may be its present one."""

    layout: str


class LayoutChosen(Record, frozen=True, tag="layout_chosen"):
    """All ranks are started in this layout."""

    layout: str
    save_seconds: float = 0.0  # the time for living ranks to save their state


class Step(Record, frozen=True, tag="step"):
    """One iteration of the whole job."""

    iteration: int
    loss: float | None  # None if it is not finite, which JSON cannot express
    seconds: float
    ranks: int
    nodes: int
    flops: float  # of the iteration
    train_iterations: int  # of the whole training
    micro_batches: int
    computed: int
    nan_since: int = -1  # the first of the latest iterations without a finite loss, or -1
    unsound_seconds: float = 0.0  # of all iterations so far without a finite loss, and of trying some again
    unreported: list[int] = []  # the first hundred micro-batches that no rank reported
    ago: float = 0.0  # seconds since the iteration, if it was reported late


class WorldProved(Record, frozen=True, tag="steady"):
    """Restart mode: the world makes progress."""


class LedgerViolation(Record, frozen=True, tag="ledger_violation"):
    iteration: int
    problems: list[str]


class JobEnded(Record, frozen=True, tag="job_ended"):
    """A job is over."""

    code: int  # the exit status
    disowned: bool = False
    """Slurm knows another job by this id. The agents are released, and their ranks go on."""


class Timing(Record, frozen=True, tag="timing"):
    """When the parts of one recovery ended in one rank, in seconds since it began."""

    slot: int
    seconds: dict[str, float]
