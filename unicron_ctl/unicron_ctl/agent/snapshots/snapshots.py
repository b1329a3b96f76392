"""The parts of an agent that keep and move its ranks' training state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from unicron_ctl.agent.connections.job_environment import Place, memory_rate
from unicron_ctl.agent.snapshots.checkpoint_files import Files
from unicron_ctl.agent.snapshots.last_checkpoint import Before, LastCheckpoint
from unicron_ctl.agent.snapshots.node_memory import Memory
from unicron_ctl.agent.snapshots.peer_copies import Copies
from unicron_ctl.shared.protocol import wire
from unicron_transition.snapshot.image_format import Key


@dataclass
class Snapshots:
    """The parts that keep and move an agent's training state."""

    memory: Memory
    """The node's shared memory."""
    copies: Copies
    """Copies of it in other nodes, and of theirs here."""
    files: Files
    """Files of checkpoints, from images that ranks have set aside."""
    say: Callable[[str], None]

    def last_checkpoint(self, before: Callable[[Key], Before | None], rests: bool, prunes: bool) -> Callable[[], None]:
        """Return the function that saves this node's part of a job that ends in the middle of its training
        (`loop.plans.Saving`)."""
        last = LastCheckpoint(self.memory.folder, before, self.say, prunes=prunes)
        return partial(last.write, self.copies.whole if rests else [])


def open_snapshots(
    place: Place,
    environment: Mapping[str, str],
    tell: Callable[[wire.Cut | wire.Fetch], None],
    turn: Callable[[Key], Before | None],
    say: Callable[[str], None],
) -> Snapshots:
    """Open them. tell: sends a message to the ranks. turn(key): as for :class:`Files`. say: called with one line for
    the job's log."""
    memory = Memory(place, environment, say)
    copies = Copies(lambda: memory.folder, place, environment, tell, say)
    return Snapshots(memory, copies, Files(memory, turn, memory_rate(environment), say), say)
