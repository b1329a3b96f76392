"""Questions about silent agents and their nodes, and the answers. A restarted controller asks again."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_ctl.shared.protocol.reach import Reach

Key = tuple[str, int]
"""Job and element."""
OWN = ("", -1)
"""The key of this controller itself, as a witness."""


@dataclass(frozen=True)
class Answer:
    """One witness's findings at the agent's door and at the node's slurmd."""

    witness: str
    door: Reach
    slurmd: Reach

    def __str__(self) -> str:
        found = {"agent": self.door, "slurmd": self.slurmd}
        tried = [f"{what} {answer}" for what, answer in found.items() if answer is not Reach.UNKNOWN]
        return f"{self.witness}: {', '.join(tried) or 'nothing known'}"

    @property
    def no_evidence(self) -> bool:
        """Nothing was tried, or the witness has trouble of its own."""
        return self.door is Reach.UNKNOWN and self.slurmd is Reach.UNKNOWN

    @property
    def unreachable(self) -> bool:
        """Neither answers. A node whose slurmd is not known is judged by its agent alone."""
        return {self.door, self.slurmd} - {Reach.UNKNOWN} == {Reach.SILENT}


@dataclass
class Suspicion:
    """One silent agent. Times are seconds on the controller's clock."""

    job: str
    element: int
    agent: str
    node: str
    since: float
    """Its last sign of life."""
    targets: tuple[str, str]
    """The agent's door and the node's slurmd, host:port."""
    number: int = 0
    """The present round of probes; answers to earlier rounds do not count."""
    begun: float = 0.0
    asked: dict[Key, float] = field(default_factory=dict)
    """witness -> when, in this round."""
    answers: dict[Key, Answer] = field(default_factory=dict)
    """witness -> what it said in this round."""
    before: dict[Key, Answer] = field(default_factory=dict)
    """Answers of the last round that reached the door: they count until this round has its own."""
    probing: int = 0
    """Own probes that have not ended; the round that began them is `probe`."""
    probe: int = 0
    reached: bool | None = None
    """Whether the controller's own sockets reached the door or slurmd; None until all have been tried."""
    control: Reach | None = None
    """What the controller found at another node's slurmd in this round, where it tried that as a control."""
    recorded: str = ""
    """What the log says about this suspicion."""

    @property
    def key(self) -> Key:
        return self.job, self.element

    def own(self, witness: Key) -> bool:
        """The witness is this controller or an agent of the same job."""
        return witness[0] in ("", self.job)

    def strangers(self) -> list[Answer]:
        """Answers of other jobs' agents that reached it."""
        return [answer for key, answer in self.answers.items() if not self.own(key) and self.there(answer)]

    def there(self, answer: Answer) -> bool:
        """The answer shows that what is suspected can be reached."""
        return answer.door is Reach.REACHED

    def testimony(self) -> list[Answer]:
        """Answers of other agents, without those that could not try."""
        return [answer for key, answer in self.answers.items() if key != OWN and not answer.no_evidence]


@dataclass
class EndingNode(Suspicion):
    """A node on which an agent died or left while nobody reached its slurmd; `job` to `since` are one such agent's."""

    opened: float = 0.0
    """When the node came under question."""
    until: float | None = None
    """When the question is dropped; None while the node waits for its turn."""
    unreached: int = 0
    """Rounds in a row in which nobody reached it."""
    unreached_since: float = 0.0
    """When the first of them began."""
    counted: bool = False
    """The present round has been counted."""
    refused: bool = False
    """slurmd's port has refused the controller, so its probes need a control."""

    def there(self, answer: Answer) -> bool:
        return Reach.REACHED in (answer.slurmd, answer.door)


@dataclass
class Suspicions:
    """All suspicions, and whether the controller suspects itself."""

    open: dict[Key, Suspicion] = field(default_factory=dict)
    """Silent agents that are not judged yet."""
    ending_nodes: dict[str, EndingNode] = field(default_factory=dict)
    """Nodes that may have ended after an agent on them did, by name."""
    rounds: dict[int, Suspicion] = field(default_factory=dict)
    """Number of a round that counts -> whom it is about."""
    last_number: int = 0
    missing_check_at: float = 0.0
    """When to look next for agents that have not come back."""
    given_up: dict[Key, Suspicion] = field(default_factory=dict)
    """Agents that were given up because they were silent, and have not been heard or shown dead since."""
    recalled: bool = False
    """Agents that an earlier controller gave up are in `given_up`."""

    answered: dict[str, float] = field(default_factory=dict)
    """When the last questions about an ending node were over, by name."""
    leftovers_check_at: float = 0.0
    """When to look next for elements that Slurm still runs without their agents."""
    asked_again: bool = False
    """Nodes on which agents died before this controller's start are in `ending_nodes`."""

    alone_since: float | None = None
    """Since when no agent at all is heard."""
    doubt: str = ""
    """Why silence is not believed now: no node is taken and nothing is requeued."""
    unsure: str = ""
    """Why that may be so in a moment: no node is taken until it is known."""
    most_since: float | None = None
    """Since when the agents on most nodes are silent together; `most_at`: when they were last counted so."""
    most_at: float = 0.0
    counted_at: float = 0.0
    """When silent nodes are counted next."""

    def nodes(self) -> dict[str, float]:
        """The nodes under question, and since when."""
        asked = {suspicion.node: suspicion.since for suspicion in self.open.values()}
        return {node.node: node.since for node in self.ending_nodes.values()} | asked

    def close(self, key: Key) -> None:
        """The agent was heard, or is judged."""
        if (suspicion := self.open.pop(key, None)) is not None:
            self.rounds.pop(suspicion.number, None)

    def close_ending(self, node: str) -> None:
        """Nothing more is asked about the node."""
        if (ending := self.ending_nodes.pop(node, None)) is not None:
            self.rounds.pop(ending.number, None)

    def restart_ending(self, ending: EndingNode, now: float) -> None:
        """Answers until now, and probes under way, do not count any more."""
        self.rounds.pop(ending.number, None)
        ending.number = ending.probe = ending.probing = 0
        ending.asked, ending.answers, ending.begun = {}, {}, now
        ending.unreached, ending.counted = 0, False

    def shift(self, seconds: float) -> None:
        """This process stood still for so long: last words of agents move forward, and so does what follows them."""
        for ending in self.ending_nodes.values():
            ending.opened += seconds
            ending.until = ending.until + seconds if ending.until is not None else None

    def renew_ending(self, now: float) -> None:
        """Every agent counts as heard now, which is no word of theirs."""
        for ending in self.ending_nodes.values():
            ending.opened = now

    def begin_round(self, suspicion: Suspicion, now: float) -> None:
        """New probes: what was said before is old."""
        self.rounds.pop(suspicion.number, None)
        self.last_number += 1
        suspicion.number, suspicion.begun = self.last_number, now
        reached = {key: answer for key, answer in suspicion.answers.items() if answer.door is Reach.REACHED}
        suspicion.before = reached
        suspicion.asked, suspicion.answers, suspicion.control = {}, {}, None
        self.rounds[self.last_number] = suspicion
