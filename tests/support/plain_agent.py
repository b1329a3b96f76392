"""An agent in restart mode, in the hands of a unit test."""

from __future__ import annotations

import msgspec

from tests.support.world import FakeAgent, World
from unicron_ctl.shared.protocol import structs, wire


class PlainAgent(FakeAgent):
    """What `RestartAgent` does, at once."""

    restarts = True
    lease = 30.0  # longer than by default, so that a test can be in the midst of it

    def __init__(self, world: World, job: str, element: int, node: str, mode: str = "restart", **more):
        super().__init__(world, job, element, node, **more)
        self.settings = msgspec.structs.replace(self.settings, mode=mode, mode_reason="train.py does not import it")
        for slot in self.slots:
            self.ranks[slot] = structs.RankStatus(state="waiting")

    def get(self, message: wire.Message) -> None:
        if not self.obedient or self.silent or not isinstance(message, wire.Break | wire.Plan | wire.StartRank):
            super().get(message)
            return
        self.heard.append(message)
        if isinstance(message, wire.Break):
            self.left = max(self.left, message.generation)
        for slot, rank in list(self.ranks.items()):
            match message:
                case wire.Break() if rank.broken < message.generation and rank.state != "exited":
                    self.set(slot, state="waiting", broken=message.generation, generation=0)
                case wire.Plan() if rank.state == "waiting" and slot in message.members:
                    if rank.broken < message.generation:
                        self.set(slot, state="running", generation=message.generation)
                case wire.StartRank() if slot == message.slot and rank.incarnation < message.incarnation:
                    self.ranks[slot] = structs.RankStatus(
                        state="waiting", incarnation=message.incarnation, changed=self.world.now
                    )
                    self.status()
