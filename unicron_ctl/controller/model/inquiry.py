"""What is asked about silent agents, and what was answered. Lost with the process: the next controller asks again."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron.ctl.protocol.reach import Reach

Key = tuple[str, int]
"""Job and element."""
OWN = ("", -1)
"""The key of this controller itself, as a witness."""


@dataclass(frozen=True)
class Word:
    """What one witness says of the agent's door and of the node's slurmd."""

    witness: str
    door: Reach
    slurmd: Reach

    def __str__(self) -> str:
        said = {"agent": self.door, "slurmd": self.slurmd}
        tried = [f"{what} {word}" for what, word in said.items() if word is not Reach.UNKNOWN]
        return f"{self.witness}: {', '.join(tried) or 'nothing known'}"

    @property
    def no_evidence(self) -> bool:
        """Nothing was tried there, or the witness has trouble of its own."""
        return self.door is Reach.UNKNOWN and self.slurmd is Reach.UNKNOWN

    @property
    def unreachable(self) -> bool:
        """Neither answers; a node without a known slurmd is judged by its agent alone."""
        words = {self.door, self.slurmd} - {Reach.UNKNOWN}
        return words == {Reach.SILENT}


@dataclass
class Inquiry:
    """One silent agent. Times in seconds on the controller's clock.

    since: its last sign of life. number: of the round of questions; an answer to an earlier one no longer counts.
    asked: witness -> when, in this round. words: witness -> what it said in this round.
    """

    job: str
    element: int
    agent: str
    node: str
    since: float
    targets: tuple[str, str]
    number: int = 0
    begun: float = 0.0
    asked: dict[Key, float] = field(default_factory=dict)
    words: dict[Key, Word] = field(default_factory=dict)
    before: dict[Key, Word] = field(default_factory=dict)
    """Those of the round before who reached it: they count until this round's have answered."""
    probing: int = 0
    """Tries of this controller's own that have not ended, and the number of the round that began them (`probe`)."""
    probe: int = 0
    reached: bool | None = None
    """This controller's own sockets got through to its door or to its node's slurmd; None while not all have tried."""
    control: Reach | None = None
    """What they found in this round at another agent's door, or at another node's slurmd, where that was asked for."""
    said: str = ""
    """What was last put on record of it."""

    def own(self, witness: Key) -> bool:
        """The witness is this controller or an agent of the same job, and no stranger."""
        return witness[0] in ("", self.job)

    def strangers(self) -> list[Word]:
        """What agents of other jobs say, those that say that it is there."""
        return [word for key, word in self.words.items() if not self.own(key) and self.there(word)]

    def there(self, word: Word) -> bool:
        """The word says that whom it is about can be reached."""
        return word.door is Reach.REACHED

    def witnessed(self) -> list[Word]:
        """What other agents say, without those who could not try."""
        return [word for key, word in self.words.items() if key != OWN and not word.no_evidence]


@dataclass
class Ending(Inquiry):
    """A node on which an agent died while nobody reached the node's slurmd. job, element, agent and since are those of
    one of the agents that died so."""

    opened: float = 0.0
    """Since when it is under question."""
    until: float | None = None
    """When that is given up, for nobody is asked for ever; None while it waits for its turn."""
    unreached: int = 0
    """Rounds in which everybody who was asked found that nobody answers, since somebody last did."""
    unreached_since: float = 0.0
    """When the first of them began."""
    counted: bool = False
    """The present round is one of them."""
    refused: bool = False
    """Its slurmd's port has refused this controller: that counts only beside another one that answers."""

    def there(self, word: Word) -> bool:
        return Reach.REACHED in (word.slurmd, word.door)


@dataclass
class Inquiries:
    """All of them."""

    open: dict[Key, Inquiry] = field(default_factory=dict)
    ending: dict[str, Ending] = field(default_factory=dict)
    """Nodes that may have ended after an agent on them did, by name (`sense.ending`)."""
    rounds: dict[int, Inquiry] = field(default_factory=dict)
    """Number of a round that counts -> what it is about."""
    last: int = 0
    look_at: float = 0.0
    """When to look for agents that have not come back."""
    alone_since: float | None = None
    """Since when nobody at all is heard: the trouble is this controller's own."""

    judged: dict[Key, Inquiry] = field(default_factory=dict)
    """Those that were given up because they were silent, and that have not been heard or shown dead since."""
    recalled: bool = False
    """Those whom the controller before this one had given up are among them."""
    answered: dict[str, float] = field(default_factory=dict)
    """When the last questions about such a node were over (`ending`)."""
    stay_look_at: float = 0.0
    """When to look for elements that Slurm still runs without their agents."""
    asked_again: bool = False
    """Nodes on which agents died before this controller's start are among those that may have ended (`ending`)."""
    doubt: str = ""
    """Why silence is not to be believed now: no node is taken, and nothing requeued (`sense.together`)."""
    unsure: str = ""
    """Why that may be so in a moment: until then no node is taken. Agents that report in step are late all at once."""
    most_since: float | None = None
    """Since when the agents on most nodes are silent together; `most_at`: when they were last counted so."""
    most_at: float = 0.0
    counted_at: float = 0.0
    """When they are counted next."""

    def nodes(self) -> dict[str, float]:
        """The nodes about which somebody is asked, and since when it is not known whether it lives."""
        asked = {inquiry.node: inquiry.since for inquiry in self.open.values()}
        return {one.node: one.since for one in self.ending.values()} | asked

    def close(self, key: Key) -> None:
        """The agent was heard of, or is judged."""
        if (inquiry := self.open.pop(key, None)) is not None:
            self.rounds.pop(inquiry.number, None)

    def close_ending(self, node: str) -> None:
        """Nothing more is asked about the node."""
        if (one := self.ending.pop(node, None)) is not None:
            self.rounds.pop(one.number, None)

    def anew(self, one: Ending, now: float) -> None:
        """What was answered until now, and what is still under way, says nothing."""
        self.rounds.pop(one.number, None)
        one.number = one.probe = one.probing = 0
        one.asked, one.words, one.begun = {}, {}, now
        one.unreached, one.counted = 0, False

    def shift(self, seconds: float) -> None:
        """This process stood still for so long: the agents' last words are put forward, too."""
        for one in self.ending.values():
            one.opened += seconds
            one.until = one.until + seconds if one.until is not None else None

    def renew(self, now: float) -> None:
        """Every agent counts as heard now: that is no word of theirs."""
        for one in self.ending.values():
            one.opened = now

    def begin_round(self, inquiry: Inquiry, now: float) -> None:
        """New questions: what was said before is old."""
        self.rounds.pop(inquiry.number, None)
        self.last += 1
        inquiry.number, inquiry.begun = self.last, now
        inquiry.before = {key: word for key, word in inquiry.words.items() if word.door is Reach.REACHED}
        inquiry.asked, inquiry.words, inquiry.control = {}, {}, None
        self.rounds[self.last] = inquiry
