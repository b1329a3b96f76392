"""Decides from what replicas have computed twice, and from their states, who has computed wrongly
(docs/design/soundness.md). A replica is named by its data-parallel rank, a rank's place in it by a number.

Gradients of one micro-batch are equal bit by bit wherever they are computed. If a device's kernels do not repeat their
results, gradients count as equal within the difference that was measured at the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron_transition.iteration.ledger import UNKNOWN

MOST_NOISE = 1e-2  # of a gradient's norm: what differs more is another gradient
LEAST = 2.0**-52  # of gradients whose bits differ and whose norms do not
MARGIN = 10.0  # times the largest difference that was measured
ROUNDS = 2  # of one audit: who differed is asked again, beside another auditor


class Digest(NamedTuple):
    """A gradient in few numbers, each exact in a float."""

    bits: float
    """A checksum of all bits, a whole number below 2^52."""
    norm: float
    difference: float
    """The sum of every second number minus the sum of the others."""

    def distance(self, other: Digest) -> float:
        """Return how far they are apart, relative to the larger norm: 0 only if all bits are equal."""
        if self.bits == other.bits:
            return 0.0
        apart = max(abs(self.norm - other.norm), abs(self.difference - other.difference))
        largest = max(self.norm, other.norm)
        return max(apart / largest, LEAST) if math.isfinite(apart) and largest > 0 else math.inf


class Weights(NamedTuple):
    """A gradient before and after its reduce in few numbers, of which the sum over all replicas is known."""

    before: float
    """The difference (:class:`Digest`) of the rank's own sum."""
    norm: float
    """The norm of the same."""
    after: float
    """The difference of what the reduce has left in this rank's part."""


NUMBERS = len(Digest._fields)
WIDTH = 2 * NUMBERS + 1 + len(Weights._fields)  # of a replica's row at one place
ROUNDING = 64.0  # times the precision of the gradients' format: what a sum of many replicas may be off
Claim = tuple[int, int, Digest]  # (who says it, of whose micro-batch, what) at one place


@dataclass(frozen=True)
class Findings:
    """The findings of the ranks of one place in one round."""

    own: Mapping[int, Digest]
    """Replica -> the gradient of its first micro-batch."""
    audited: Mapping[int, Digest]
    """Replica -> that gradient, as its auditor has computed it."""
    states: Mapping[int, float]
    """Replica -> checksum of its parameters and the optimizer's state."""
    sums: Mapping[int, Weights] = field(default_factory=dict)
    """Replica -> its gradient before and after the reduce."""
    shift: int = 1
    """The auditor of a replica is so many replicas further."""

    def claims(self, replicas: int) -> list[Claim]:
        """Return who says what of whom."""
        audited = [((of + self.shift) % replicas, of, digest) for of, digest in self.audited.items()]
        return [*((of, of, digest) for of, digest in self.own.items()), *audited]


def pack_findings(
    place: int,
    places: int,
    replica: int,
    replicas: int,
    own: Digest | None,
    audited: tuple[int, Digest] | None,
    state: float | None,
    sums: Weights | None = None,
) -> list[float]:
    """Return what this rank says, as numbers whose maximum over all members has what all of them say."""
    numbers = [UNKNOWN] * (places * replicas * WIDTH)

    def put(of: int, column: int, values: Iterable[float]) -> None:
        start = (place * replicas + of) * WIDTH + column
        values = [value if math.isfinite(value) else math.inf for value in values]
        numbers[start : start + len(values)] = values

    if own is not None:
        put(replica, 0, own)
    if audited is not None:
        put(audited[0], NUMBERS, audited[1])
    if state is not None:
        put(replica, 2 * NUMBERS, [state])
    if sums is not None:
        put(replica, 2 * NUMBERS + 1, sums)
    return numbers


def unpack_findings(numbers: Sequence[float], places: int, replicas: int, shift: int) -> list[Findings]:
    """Return what the ranks have said, place by place."""
    found = []
    for place in range(places):
        own, audited, states, sums = dict[int, Digest](), dict[int, Digest](), dict[int, float](), dict[int, Weights]()
        for of in range(replicas):
            start = (place * replicas + of) * WIDTH
            row = numbers[start : start + WIDTH]
            if row[0] != UNKNOWN:
                own[of] = Digest(*row[:NUMBERS])
            if row[NUMBERS] != UNKNOWN:
                audited[of] = Digest(*row[NUMBERS : 2 * NUMBERS])
            if row[2 * NUMBERS] != UNKNOWN:
                states[of] = row[2 * NUMBERS]
            if row[-1] != UNKNOWN:
                sums[of] = Weights(*row[2 * NUMBERS + 1 :])
        found.append(Findings(own, audited, states, sums, shift))
    return found


@dataclass(frozen=True)
class Verdict:
    """A difference between replicas, and who is at fault."""

    what: str
    """`gradient`, `state`, `sum`, `link` (what replicas send each other) or `number` (a parameter is not finite)."""
    culprits: frozenset[int]
    """Replicas that are proven wrong; empty if no majority says who is right."""
    among: frozenset[int]
    """Replicas that differ from each other."""


def differing_states(rounds: Sequence[Findings]) -> Verdict | None:
    """Compare the states of the replicas, by place: most of them are right."""
    culprits, among = set[int](), set[int]()
    for told in rounds:
        counts = Counter(told.states.values())
        if len(counts) < 2:
            continue
        value, most = counts.most_common(1)[0]
        others = {of for of, state in told.states.items() if state != value}
        among |= others
        if 2 * most > len(told.states):
            culprits |= others
        else:
            among |= set(told.states)
    return Verdict("state", frozenset(culprits), frozenset(among)) if among else None


def wrong_sum(told: Findings, precision: float, parts: bool) -> set[int]:
    """Return the replicas in which the reduce has left something else than the sum of what all have sent; all of them
    if the `parts` of the sum are in different replicas. precision: of the gradients' format."""
    if not all(math.isfinite(each.norm) for each in told.sums.values()):
        return set()  # a gradient scaler skips such a step, else it is none
    sent = math.fsum(each.before for each in told.sums.values())
    most = ROUNDING * precision * math.fsum(each.norm for each in told.sums.values())
    if parts:
        right = abs(math.fsum(each.after for each in told.sums.values()) - sent) <= most
        return set() if right else set(told.sums)
    return {of for of, each in told.sums.items() if not abs(each.after - sent) <= most}


def spoilt_by(damaged: Iterable[tuple[int, int]], node_of: Callable[[int], int] = lambda replica: replica) -> Verdict:
    """Judge what did not arrive as it was sent, (sender, receiver): a replica is the culprit if all of it was sent or
    received by that one alone; by one pair alone, it may be either of them or what is between them. So it may be if all
    the others are on one other node.

    >>> sorted(spoilt_by([(1, 2), (1, 0)]).culprits), sorted(spoilt_by([(1, 2)]).among)
    ([1], [1, 2])
    """
    pairs = [frozenset(pair) for pair in damaged]
    among = frozenset[int]().union(*pairs)
    common = frozenset.intersection(*pairs) if pairs else among
    own, others = ({node_of(one) for one in some} for some in (common, among - common))
    proven = len(common) == 1 and (len(others) > 1 or others == own)
    return Verdict("link", common if proven else frozenset(), among)


def agree(told: Findings, tolerance: float) -> bool:
    """Whether each audited gradient is the one that its replica has computed."""
    return all(told.own[of].distance(digest) <= tolerance for of, digest in told.audited.items() if of in told.own)


def wrong_gradients(rounds: Sequence[Sequence[Findings]], replicas: int, tolerance: float) -> Verdict | None:
    """Judge all rounds of an audit, each place by place. Of a gradient that replicas do not agree on, the one is right
    that most of them say, and of as many the one that was said most often."""
    culprits, among = set[int](), set[int]()
    for told in zip(*rounds, strict=True):  # of one place
        claims = [claim for one in told for claim in one.claims(replicas)]
        for of in {of for _, of, _ in claims}:
            about = [(who, digest) for who, whose, digest in claims if whose == of]
            right = _right(about, tolerance)
            first = about[0][1]
            if all(first.distance(digest) <= tolerance for _, digest in about):
                continue
            among |= {who for who, _ in about}
            if right is not None:
                culprits |= {who for who, digest in about if digest.distance(right) > tolerance}
    return Verdict("gradient", frozenset(culprits), frozenset(among)) if among else None


def _right(about: Sequence[tuple[int, Digest]], tolerance: float) -> Digest | None:
    """Return the gradient that most say; None if two are said by as many and as often."""
    ranked = []
    for _, digest in about:
        same = [who for who, other in about if digest.distance(other) <= tolerance]
        ranked.append((len(set(same)), len(same), digest))
    best = max(ranked, key=lambda one: one[:2])
    rivals = [one for one in ranked if one[:2] == best[:2] and one[2].distance(best[2]) > tolerance]
    return None if rivals else best[2]


@dataclass(frozen=True)
class Calibration:
    """The result of the first audit of a session."""

    tolerance: float
    """Relative difference up to which gradients are equal."""
    trouble: str = ""
    """The reason why nothing can be audited."""
    between: bool = False
    """Ranks differ from each other by far more than each does from itself: no noise explains that."""


def calibrate(rounds: Sequence[Sequence[Findings]], replicas: int) -> Calibration:
    """Measure how well gradients repeat, from an audit's two rounds in a sound start."""
    again = other = 0.0
    for first, second in zip(*rounds, strict=True):
        again = max([again, *(first.own[of].distance(second.own[of]) for of in first.own if of in second.own)])
        for told in (first, second):
            other = max([other, *(told.own[of].distance(each) for of, each in told.audited.items() if of in told.own)])
    noise = max(again, other)
    if noise <= MOST_NOISE:
        return Calibration(MARGIN * noise, between=other > MARGIN * again)
    if again > MOST_NOISE:
        return Calibration(0.0, "one rank computes another gradient when it computes a micro-batch again")
    return Calibration(0.0, "two ranks compute other gradients of the same micro-batch, each of them repeatably")
