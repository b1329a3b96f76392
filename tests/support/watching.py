"""A rank's watch of its generation, told what an agent would tell it."""

from __future__ import annotations

from unicron_detector.processes.rank_messages import Break, Plan, Withdraw
from unicron_transition.generations.watch import Watch


def plan(generation: int, boundary: bool = False, **more) -> Plan:
    return Plan(generation, [0, 2], "h:1", "p/3", boundary=boundary, **more)


def withdrawn(generation: int) -> Withdraw:
    return Withdraw(generation)


def broken(generation: int, *lost: int) -> Break:
    return Break(generation, list(lost or (1,)))


class Kicks:
    """Counts how often the main thread was freed."""

    def __init__(self):
        self.count = 0

    def __call__(self, inside: bool = True):
        self.count += 1


def inside(watch: Watch, generation: int) -> None:
    """The main thread is a member of `generation`."""
    watch.on_message(plan(generation))
    entered = watch.wait_plan(0.0)
    assert entered is not None and entered.generation == generation
    watch.enter_generation(entered)
