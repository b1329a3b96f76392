"""Looks for who spoils the sums of gradients: each rank sends its part to the same place of other replicas, and all
tell each other what did not arrive as it was sent (:func:`unicron_transition.iteration.audits.spoilt_by` decides).

A reduce does not show whose part was spoilt on its way, for what a defective unit sends passes through all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.iteration import audits, flips
from unicron_transition.iteration.accumulation import Accumulation, PeerLost
from unicron_transition.iteration.audits import Verdict
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.session.member import Member
from unicron_transition.snapshot.tensor_transfer import PIECE, checksum, send

SHIFTS = (1, 2)  # two others take what each sends, so that a unit is told from a link


def explain(verdict: Verdict, member: Member, exchange: Exchange, gradients: Accumulation) -> Verdict:
    """Return who is at fault for a wrong sum, if that is found, and other verdicts as they are. Collective."""
    if verdict.what != "sum":
        return verdict
    try:
        found = search(member, exchange, gradients.own_sum())
    except (PeerLost, RuntimeError):  # all go back all the same
        if not member.watch.lost():
            raise  # of this rank alone, as when there is no memory: the others wait for it
        return verdict
    return found if found.among else verdict


def search(member: Member, exchange: Exchange, tensors: Iterable[torch.Tensor]) -> Verdict:
    """Return who spoils what replicas send each other; nobody if all of it arrives. Collective over all members, and
    needed only after a wrong sum: it takes as long as two reduces.

    Parameters
    ----------
    tensors
        What is sent: as many of the same shapes and dtypes at this place of all replicas.

    Raises
    ------
    PeerLost, RuntimeError
        A member is gone.
    """
    replicas, group = member.replicas, exchange.data_parallel
    rank, parts = dist.get_rank(group), list(tensors)
    shifts = [shift for shift in SHIFTS if shift % replicas]
    found = [0.0] * (len(shifts) * replicas)

    def check() -> None:
        if member.watch.lost():
            raise PeerLost("a member was lost while the ranks looked for a damaged link")

    for row, shift in enumerate(shifts):
        target, source = (rank + shift) % replicas, (rank - shift) % replicas
        ends = _Ends(target, source, member.process.device, group, check)
        whole = [ends.pass_on(part) for part in parts]
        found[row * replicas + source] = float(not all(whole))
    told = exchange.most(found)
    damaged = [
        (source, (source + shift) % replicas)
        for row, shift in enumerate(shifts)
        for source in range(replicas)
        if told[row * replicas + source] > 0
    ]
    return audits.spoilt_by(damaged, lambda replica: member.node_of(member.members[replica * member.layout.size]))


@dataclass(frozen=True)
class _Ends:
    """To whom this rank sends, and from whom it receives, as ranks of `group`."""

    target: int
    source: int
    device: torch.device
    group: Any
    check: Callable[[], None]

    def pass_on(self, tensor: torch.Tensor) -> bool:
        """Send the tensor, and receive one of its size; returns whether that one is what was sent."""
        flat = tensor.detach().reshape(-1)
        return all([self._pass_on_piece(each) for each in flat.split(PIECE // tensor.itemsize)])

    def _pass_on_piece(self, whole: torch.Tensor) -> bool:
        sent, received = whole.clone(), torch.empty_like(whole)
        flips.before_reduce(sent)
        sums, theirs = checksum(whole), torch.zeros(2, dtype=torch.int64)
        for outgoing, incoming in ((sent, received), (sums, theirs)):
            send({self.target: [outgoing]}, {self.source: [incoming]}, self.device, self.group, self.check)
        return torch.equal(checksum(received), theirs)
