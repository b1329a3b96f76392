"""A job's agents that decide without the controller, played by a test: their plans, their reports, who they are."""

from __future__ import annotations

from unicron_ctl.shared.consensus.proposals import Membership, proposers_of
from unicron_ctl.shared.protocol import peer_messages, shared_plans, structs, wire

ME = structs.Peer(0, "agent0", "n0:1", "key0")


def plan(generation: int, members: list[int], prefix: str = "", **more) -> wire.Plan:
    name = prefix or f"7.g{generation}"
    return wire.Plan(generation=generation, members=members, store="n0:4000", prefix=name, **more)


def share(made: wire.Plan, count: int = 3) -> wire.PlanShare:
    """As the agent of element 0 is sent it, one of its leaders."""
    everybody = [structs.Peer(e, f"agent{e}", f"n{e}:1", f"key{e}") for e in range(count)]
    encoded = shared_plans.share(made, shared_plans.common(made, everybody), [0], everybody)
    return wire.decode(wire.encode(encoded), wire.ToAgent)


def promise(element: int, **ranks) -> peer_messages.Promise:
    status = structs.RankStatus(**{"state": "stopped", "broken": 1, "micro_batches": 6} | ranks)
    return peer_messages.Promise(
        generation=1, element=element, ballot=(1, 0), store=f"n{element}:4000", ranks={element: status}
    )


def company(count: int, replica: int = 1) -> Membership:
    """A job with one rank a node."""
    everybody = {e: structs.Peer(e, f"agent{e}", f"n{e}:1", f"key{e}") for e in range(count)}
    made = plan(1, list(range(count)), replica=replica)
    return Membership(made, everybody, proposers_of(made, everybody.get, 1), 1)
