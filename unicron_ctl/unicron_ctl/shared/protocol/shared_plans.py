"""Encodes the common part of a plan once for thousands of agents; each agent gets its own micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from unicron_ctl.shared.protocol import ranges, structs, wire
from unicron_detector.words import runs
from unicron_transition.generations import layout


class PlanCommon(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The common part of a plan."""

    generation: ranges.Count
    members: ranges.Runs  # in order, as runs (first, last)
    store: ranges.NoName
    prefix: ranges.Kind
    boundary: bool = False
    joiners: ranges.Runs = []  # as runs, like the members
    source: ranges.Slot | None = None
    step: ranges.Count | None = None
    iteration: ranges.Iteration | None = None
    reason: ranges.Reason = ""
    proposers: Annotated[list[structs.Peer], Meta(max_length=ranges.MOST_PROPOSERS)] = []
    """The agents of the first members' elements, which stand in for the controller while it is away."""
    replica: ranges.Replica = 1
    state: ranges.State | None = None
    nodes: Annotated[list[ranges.Name], Meta(max_length=ranges.MOST_NODES)] = []
    """In restart mode: the names of the members' nodes, in the order of their slots."""


_ALIKE = [name for name in PlanCommon.__struct_fields__ if name not in ("members", "joiners", "proposers", "nodes")]


def expand(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the slots of such runs. Raises :class:`wire.BadMessage` for runs that are backwards, double or too
    long."""
    backwards = any(last < first for first, last in pairs)
    twice = any(after[0] <= before[1] for before, after in pairwise(sorted(pairs)))
    if backwards or twice or sum(last - first + 1 for first, last in pairs) > ranges.MOST_SLOTS:
        raise wire.BadMessage("the plan's members or joiners are not valid runs of slots")
    return [slot for first, last in pairs for slot in range(first, last + 1)]


def common(plan: wire.Plan, proposers: Sequence[structs.Peer] = (), nodes: Sequence[str] = ()) -> msgspec.Raw:
    """Encode the part of the plan that all agents get."""
    alike = {name: getattr(plan, name) for name in _ALIKE}
    members, joiners = runs(plan.members), runs(plan.joiners)
    part = PlanCommon(members=members, joiners=joiners, proposers=list(proposers), nodes=list(nodes), **alike)
    return msgspec.Raw(wire.encode(part))


def share(
    plan: wire.Plan,
    encoded: msgspec.Raw,
    slots: Iterable[int],
    peers: Sequence[structs.Peer] = (),
    heads: Mapping[int, int] | None = None,
    doors: Sequence[str] = (),
) -> wire.PlanShare:
    """Return the message for the agent with these slots. encoded: :func:`common` of the plan. heads:
    :func:`unicron_transition.generations.layout.heads_of` its members, if the caller already has them."""
    own = slots
    if plan.replica > 1:
        heads = heads if heads is not None else layout.heads_of(plan.members, plan.replica)
        own = dict.fromkeys(heads.get(slot, slot) for slot in slots)
    micro_batches = {slot: plan.assignment[slot] for slot in own if slot in plan.assignment}
    return wire.PlanShare(common=encoded, assignment=micro_batches, peers=list(peers), doors=list(doors))


def whole(part: wire.PlanShare) -> wire.Plan:
    """Return the plan for the agent's ranks: all but other agents' micro-batches. Raises :class:`wire.BadMessage`."""
    common = _decode_common(part)
    members = expand(common.members)
    if len(members) % common.replica:
        raise wire.BadMessage(
            f"the plan's {len(members)} members are not a multiple of a replica's {common.replica} ranks"
        )
    alike = {name: getattr(common, name) for name in _ALIKE}
    return wire.Plan(members=members, joiners=expand(common.joiners), assignment=part.assignment, **alike)


def proposers(part: wire.PlanShare) -> list[structs.Peer]:
    """Return the agents that stand in for the controller, in order. Raises :class:`wire.BadMessage`."""
    return _decode_common(part).proposers


def nodes(part: wire.PlanShare) -> list[str]:
    """Return the names of the members' nodes, in the order of their slots. Raises :class:`wire.BadMessage`."""
    return _decode_common(part).nodes


def heads(part: wire.PlanShare, slots: Iterable[int]) -> list[int]:
    """Return the heads of the replicas that have these slots. Raises :class:`wire.BadMessage`."""
    if _decode_common(part).replica == 1:
        return list(slots)
    head_of = _heads_of(bytes(part.common))
    return list(dict.fromkeys(head_of[slot] for slot in slots if slot in head_of))


@lru_cache(maxsize=4)
def _heads_of(common: bytes) -> dict[int, int]:
    plan = whole(wire.PlanShare(common=msgspec.Raw(common)))
    return layout.heads_of(plan.members, plan.replica)


def _decode_common(part: wire.PlanShare) -> PlanCommon:
    try:
        common: PlanCommon = wire.decoder(PlanCommon).decode(part.common)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wire.BadMessage(str(error)) from None
    return common
