"""One agent's vote on what follows one generation: a state machine as a table. Pure.

FREE -> ASKED -> PLEDGED            a leader asks, and the controller does not answer
ASKED, PLEDGED -> FREE              the controller speaks: nothing is promised or accepted any more
What was accepted stays, in every state: a majority may have accepted it.
"""

from __future__ import annotations

import enum

from unicron.ctl.protocol.peer_messages import NO_BALLOT, Ballot, Proposal


class Stand(enum.StrEnum):
    """Where the voter stands."""

    FREE = "free"
    ASKED = "asked"  # for a promise; it finds out whether the controller lives
    PLEDGED = "pledged"  # to the leader of `ballot`


class Heard(enum.StrEnum):
    """What happens to it."""

    PREPARE = "prepare"  # of a ballot above the promised one
    AGAIN = "again"  # of the promised one
    OLDER = "older"  # anything of a lower ballot, or a proposal that it has not promised to take
    PROPOSE = "propose"  # of the promised one
    SILENCE = "silence"  # the controller is away
    WORD = "word"  # the controller has spoken


class Act(enum.StrEnum):
    """What it does about it."""

    IGNORE = "ignore"
    ASK = "ask"  # the controller, whether it lives
    PROMISE = "promise"
    ACCEPT = "accept"
    REFUSE = "refuse"
    DECLINE = "decline"  # tell the leader that the controller lives


_S, _H, _A = Stand, Heard, Act
TABLE: dict[Stand, dict[Heard, tuple[Stand, Act]]] = {
    _S.FREE: {
        _H.PREPARE: (_S.ASKED, _A.ASK),
        _H.AGAIN: (_S.FREE, _A.DECLINE),  # the controller has spoken since that promise
        _H.OLDER: (_S.FREE, _A.REFUSE),
        _H.PROPOSE: (_S.FREE, _A.DECLINE),
        _H.SILENCE: (_S.FREE, _A.IGNORE),
        _H.WORD: (_S.FREE, _A.IGNORE),
    },
    _S.ASKED: {
        _H.PREPARE: (_S.ASKED, _A.ASK),
        _H.AGAIN: (_S.ASKED, _A.REFUSE),
        _H.OLDER: (_S.ASKED, _A.REFUSE),
        _H.PROPOSE: (_S.ASKED, _A.REFUSE),
        _H.SILENCE: (_S.PLEDGED, _A.PROMISE),
        _H.WORD: (_S.FREE, _A.DECLINE),
    },
    _S.PLEDGED: {
        _H.PREPARE: (_S.ASKED, _A.ASK),
        _H.AGAIN: (_S.PLEDGED, _A.PROMISE),
        _H.OLDER: (_S.PLEDGED, _A.REFUSE),
        _H.PROPOSE: (_S.PLEDGED, _A.ACCEPT),
        _H.SILENCE: (_S.PLEDGED, _A.IGNORE),
        _H.WORD: (_S.FREE, _A.DECLINE),
    },
}


class Voter:
    """ballot: the highest that it was ever pledged to. asked: the one that it is asked for, in ASKED.

    accepted: what it may not forget: no plan of the same or a lower number is followed beside it.
    """

    def __init__(self) -> None:
        self.stand = Stand.FREE
        self.ballot = self.asked = NO_BALLOT
        self.accepted: Proposal | None = None

    def prepare(self, ballot: Ballot) -> Act:
        """A leader asks for a promise."""
        if ballot > max(self.ballot, self.asked):
            self.asked = ballot
            return self._step(Heard.PREPARE)
        if self.stand is Stand.ASKED and ballot == self.asked:
            return Act.ASK
        return self._step(Heard.AGAIN if ballot == self.ballot else Heard.OLDER)

    def propose(self, proposal: Proposal) -> Act:
        """A leader asks to accept its proposal."""
        act = self._step(Heard.PROPOSE if proposal.ballot == self.ballot else Heard.OLDER)
        if act is Act.ACCEPT:
            self.accepted = proposal
        return act

    def silence(self) -> Act:
        """The controller is away."""
        act = self._step(Heard.SILENCE)
        if act is Act.PROMISE:
            self.ballot = self.asked
        return act

    def word(self) -> Act:
        """The controller has spoken. The leader to be told, if any, is that of :attr:`current`."""
        return self._step(Heard.WORD)

    @property
    def current(self) -> Ballot:
        """The ballot that it was asked for, or pledged to, last."""
        return max(self.ballot, self.asked)

    def _step(self, heard: Heard) -> Act:
        self.stand, act = TABLE[self.stand][heard]
        return act
