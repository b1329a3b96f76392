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
    """witness -> when it was asked in this round."""
    answers: dict[Key, Answer] = field(default_factory=dict)
    """witness -> its answer in this round."""
    before: dict[Key, Answer] = field(default_factory=dict)
    """Answers of the previous round that reached the door: they count until this round has its own."""
    probing: int = 0
    """The controller's own probes that have not ended; the round that began them is `probe`."""
    probe: int = 0
    reached: bool | None = None
    """Whether the controller's own sockets reached the door or slurmd; None until all have been tried."""
    control: Reach | None = None
    """The result at another node's slurmd in this round, if the controller tried one as a control."""
    recorded: str = ""
    """The text of the last record about this suspicion."""

    @property
    def key(self) -> Key:
        return self.job, self.element

    def own(self, witness: Key) -> bool:
        """Whether the witness is this controller or an agent of the same job."""
        return witness[0] in ("", self.job)

    def strangers(self) -> list[Answer]:
        """Answers of other jobs' agents that reached it."""
        return [answer for key, answer in self.answers.items() if not self.own(key) and self.there(answer)]

    def there(self, answer: Answer) -> bool:
        """Whether the answer shows that the suspect can be reached."""
        return answer.door is Reach.REACHED

    def testimony(self) -> list[Answer]:
        """Answers of agents that could try."""
        return [answer for key, answer in self.answers.items() if key != OWN and not answer.no_evidence]


@dataclass
class EndingNode(Suspicion):
    """A node on which an agent died or left while its slurmd was unreachable; `job` to `since` are one such agent's."""

    opened: float = 0.0
    """When the node came under question."""
    until: float | None = None
    """When the question is dropped; None while the node waits for its turn."""
    unreached: int = 0
    """Rounds in a row in which no witness reached it."""
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
    """Number of a round that counts -> its suspicion."""
    last_number: int = 0
    missing_check_at: float = 0.0
    """When to look next for agents that have not come back."""
    given_up: dict[Key, Suspicion] = field(default_factory=dict)
    """Agents that were given up as silent, and have not been heard or shown dead since."""
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
    """Why silence does not count as evidence now: no node is taken and nothing is requeued."""
    unsure: str = ""
    """Why `doubt` may be set in a moment: no node is taken until that is clear."""
    most_since: float | None = None
    """Since when the agents on most nodes have been silent together."""
    most_at: float = 0.0
    """When they were last counted so."""
    counted_at: float = 0.0
    """When to count silent nodes next."""

    def nodes(self) -> dict[str, float]:
        """The nodes in question, and since when."""
        asked = {suspicion.node: suspicion.since for suspicion in self.open.values()}
        return {node.node: node.since for node in self.ending_nodes.values()} | asked

    def close(self, key: Key) -> None:
        """Ends a suspicion: the agent was heard, or is judged."""
        if (suspicion := self.open.pop(key, None)) is not None:
            self.rounds.pop(suspicion.number, None)

    def close_ending(self, node: str) -> None:
        """Ends the questions about the node."""
        if (ending := self.ending_nodes.pop(node, None)) is not None:
            self.rounds.pop(ending.number, None)

    def restart_ending(self, ending: EndingNode, now: float) -> None:
        """Discards the answers until now, and the probes under way."""
        self.rounds.pop(ending.number, None)
        ending.number = ending.probe = ending.probing = 0
        ending.asked, ending.answers, ending.begun = {}, {}, now
        ending.unreached, ending.counted = 0, False

    def shift(self, seconds: float) -> None:
        """Adds the seconds for which this process stood still to all times."""
        for ending in self.ending_nodes.values():
            ending.opened += seconds
            ending.until = ending.until + seconds if ending.until is not None else None

    def renew_ending(self, now: float) -> None:
        """Begins the questions anew, because every agent counts as heard now."""
        for ending in self.ending_nodes.values():
            ending.opened = now

    def begin_round(self, suspicion: Suspicion, now: float) -> None:
        """Begins a round of probes; earlier answers that reached the door stay in `before`."""
        self.rounds.pop(suspicion.number, None)
        self.last_number += 1
        suspicion.number, suspicion.begun = self.last_number, now
        suspicion.before = {key: answer for key, answer in suspicion.answers.items() if answer.door is Reach.REACHED}
        suspicion.asked, suspicion.answers, suspicion.control = {}, {}, None
        self.rounds[self.last_number] = suspicion
