"""Nodes with symptoms that their peers do not have: lost packets, a slow disk, processor time that is withheld.

Agents tell them within :attr:`ControllerConfig.symptom_seconds`, and only while there are any. What a node tells three
times in a row, and its peers do not, is an anomaly like any other (:mod:`unicron_ctl.controller.sense.outliers`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from unicron_ctl.shared.protocol import wire
from unicron_detector.health.connections import PeerLoss
from unicron_detector.health.symptoms import LEAST, notable
from unicron_detector.iterations.lossy_links import Blame, blame
from unicron_detector.iterations.peer_metrics import Anomaly, PeerWatch

ROUNDS = 3  # in a row
EARLY = 0.8  # of a period: two reports that are closer count once
LOSS_PERIODS = 3.5  # for which lost packets are added up
LAST_LOSS_PERIODS = 1.5  # since which some must have been lost


@dataclass
class Report:
    """The symptoms that one agent has reported."""

    at: float
    """By the controller's clock."""
    node: str
    values: dict[str, float]
    """Symptom -> its last value."""
    measured: frozenset[str]
    """Symptoms of the last report."""
    losses: deque[tuple[float, dict[str, PeerLoss]]] = field(default_factory=lambda: deque(maxlen=ROUNDS + 1))
    addresses: frozenset[str] = frozenset()


@dataclass
class Symptoms:
    """The symptoms of one job's nodes."""

    told: dict[int, Report] = field(default_factory=dict)
    """By element."""
    watch: PeerWatch = field(default_factory=lambda: PeerWatch(rounds=ROUNDS, minima=LEAST), compare=False)
    counted: dict[str, float] = field(default_factory=dict)
    """node -> when what is known of it was last counted."""
    news: bool = False
    ill: set[int] = field(default_factory=set)
    """Elements whose last report was notable."""

    def on_metrics(self, node: str, message: wire.Metrics, values: Mapping[str, float], now: float) -> None:
        """Take in a report. values: its symptoms, without what makes no sense."""
        losses = {peer: PeerLoss(*both) for peer, both in message.losses.items() if both[1] > 0 <= both[0]}
        told = self.told.get(message.element)
        if told is None or told.node != node:
            told = self.told[message.element] = Report(now, node, {}, frozenset())
        told.at, told.measured = now, frozenset(values)
        told.values |= values
        told.addresses = frozenset(message.addresses) or told.addresses
        told.losses.append((now, losses))
        self.news = True
        (self.ill.add if notable(values, losses) else self.ill.discard)(message.element)

    def judge(
        self, members: Iterable[int], period: float, now: float
    ) -> tuple[list[Anomaly], set[str], dict[str, dict[str, float]]]:
        """Return (nodes that stand out, those with news, the values that were compared)."""
        self.news = False
        there = {element: self.told[element] for element in members if element in self.told}
        found = self._blame(there.values(), period, now)
        rows: dict[str, dict[str, float]] = {}
        evidence: dict[str, float] = {}
        for told in there.values():
            new = told.at > self.counted.get(told.node, 0.0)
            row = {name: value for name, value in told.values.items() if not new or name in told.measured}
            rows[told.node] = {"packet_loss": 0.0, "link_loss": 0.0, **row}
            evidence[told.node] = told.at
        for node, share in found.nodes.items():
            rows[node]["packet_loss"] = share
        for link, share in found.links.items():
            for node in rows.keys() & set(link):
                rows[node]["link_loss"] = share
        for node, at in self._last_loss(there.values()).items():
            if node not in rows:
                continue
            if now - at > LAST_LOSS_PERIODS * period:
                rows[node] |= {"packet_loss": 0.0, "link_loss": 0.0}
            elif rows[node]["packet_loss"] or rows[node]["link_loss"]:
                evidence[node] = at  # one burst is one round, whoever has seen it
        fresh = {node for node, at in evidence.items() if at - self.counted.get(node, 0.0) >= EARLY * period}
        self.counted |= {node: evidence[node] for node in fresh}
        return self.watch.judge(rows, fresh), fresh, rows

    def _last_loss(self, told: Collection[Report]) -> dict[str, float]:
        """Return node -> when packets from it or to it were last told lost."""
        names, found = _names(told), dict[str, float]()
        for one in told:
            for at, losses in one.losses:
                for end in (one.node, *(names.get(peer, peer) for peer in losses)) if losses else ():
                    found[end] = max(found.get(end, 0.0), at)
        return found

    def _blame(self, told: Collection[Report], period: float, now: float) -> Blame:
        """Return who loses packets."""
        names = _names(told)
        sums: dict[tuple[str, str], tuple[float, float]] = {}
        for one in told:
            for at, losses in one.losses:
                if now - at > LOSS_PERIODS * period:
                    continue
                for peer, loss in losses.items():
                    link = one.node, names.get(peer, peer)
                    sent, lost = sums.get(link, (0.0, 0.0))
                    sums[link] = sent + loss.sent * period, lost + loss.lost * period
        return blame(sums, {one.node for one in told}) if sums else Blame()


def _names(told: Iterable[Report]) -> dict[str, str]:
    """Return address -> node."""
    return {address: one.node for one in told for address in one.addresses}
