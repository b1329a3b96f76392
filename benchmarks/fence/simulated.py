"""``python -m benchmarks.fence.simulated --count 1000``: random faults in simulated time, with the real controller and
the real lease; never two worlds that write. Exit status 1 if an earlier world wrote after a later one."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable

from tests.support.fenced import Worlds

FAULTS_EACH = 25  # of one job; then another begins


def _cut(world: Worlds, chance: random.Random) -> None:
    """Cut hosts into two groups."""
    names = ["", *(agent.node for agent in world.hosts)]
    chance.shuffle(names)
    at = chance.randrange(1, len(names))
    world.cuts |= {frozenset((one, other)) for one in names[:at] for other in names[at:]}


def _cut_from_head(world: Worlds, chance: random.Random) -> None:
    """Cut some nodes off from the head alone."""
    for agent in chance.sample(world.hosts, chance.randint(1, len(world.hosts))):
        world.cuts.add(frozenset(("", agent.node)))


def _cut_some(world: Worlds, chance: random.Random) -> None:
    """Cut random links."""
    names = ["", *(agent.node for agent in world.hosts)]
    for _ in range(chance.randint(1, 6)):
        world.cuts.add(frozenset(chance.sample(names, 2)))


def _deafen(world: Worlds, chance: random.Random) -> None:
    """Let some nodes be heard by others, and not hear these themselves."""
    names = ["", *(agent.node for agent in world.hosts)]
    for agent in chance.sample(world.hosts, chance.randint(1, len(world.hosts))):
        world.deaf |= {(name, agent.node) for name in ("", *chance.sample(names, chance.randint(0, 2)))}


def _kill_ranks(world: Worlds, chance: random.Random) -> None:
    """Kill the ranks of a node."""
    agent = chance.choice(world.hosts)
    agent.kill_at = world.now


def _split_beginning(world: Worlds, chance: random.Random) -> None:
    """Kill ranks, and cut the hosts into two groups while only a part of the next world has begun."""
    before = world.newest
    chance.choice(world.hosts).kill_at = world.now
    for _ in range(80):
        world.go_on(0.1)
        if sum(agent.process > before for agent in world.hosts) > chance.randint(0, len(world.hosts) - 1):
            break
    _cut(world, chance)


def _lose(world: Worlds, chance: random.Random) -> None:
    """Lose packets of some hosts."""
    for name in ["", *(agent.node for agent in world.hosts)]:
        if chance.random() < 0.4:
            world.lost[name] = chance.uniform(0.1, 0.98)


def _pause_agents(world: Worlds, chance: random.Random) -> None:
    """Pause some agents; their ranks go on."""
    for agent in chance.sample(world.hosts, chance.randint(1, 2)):
        agent.stopped = True


def _pause_nodes(world: Worlds, chance: random.Random) -> None:
    """Pause all of some nodes."""
    for agent in chance.sample(world.hosts, chance.randint(1, 2)):
        agent.stopped = agent.frozen = True


def _pause_ranks(world: Worlds, chance: random.Random) -> None:
    """Pause ranks alone."""
    for agent in chance.sample(world.hosts, 1):
        agent.frozen = True


def _pause_controller(world: Worlds, chance: random.Random) -> None:
    """Pause the controller."""
    world.paused = True


def _restart_controller(world: Worlds, chance: random.Random) -> None:
    """Start another controller."""
    world.begin_again()


FAULTS: tuple[Callable[[Worlds, random.Random], None], ...] = (
    _cut,
    _cut_from_head,
    _cut_some,
    _deafen,
    _lose,
    _kill_ranks,
    _split_beginning,
    _pause_agents,
    _pause_nodes,
    _pause_ranks,
    _pause_controller,
    _restart_controller,
)


def heal(world: Worlds) -> None:
    """End all faults."""
    world.cuts.clear()
    world.deaf.clear()
    world.lost.clear()
    world.paused = False
    for agent in world.hosts:
        agent.stopped = agent.frozen = False


def play(seed: int, faults: int = FAULTS_EACH) -> tuple[Worlds, Counter[str]]:
    """Play one job under so many faults."""
    chance = random.Random(seed)
    world, done = Worlds(chance.randint(2, 6), seed), Counter[str]()
    world.go_on(5.0)
    for _ in range(faults):
        if world.job().over:  # it has broken too often
            break
        for fault in chance.sample(FAULTS, chance.choice((1, 1, 1, 2, 2, 3))):
            fault(world, chance)
            done[fault.__name__.strip("_")] += 1
            world.go_on(chance.choice((0.0, 0.3, 1.0, 3.0)))
        world.go_on(chance.choice((1.0, 3.0, 6.0, 10.0, 30.0, 60.0)))
        heal(world)
        world.go_on(chance.choice((0.0, 0.5, 3.0, 20.0)))
    return world, done


def main() -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(description="random faults in simulated time")
    parser.add_argument("--count", type=int, default=1000, help="of faults")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    done, worlds, seed, wrong = Counter[str](), 0, given.seed, 0
    while sum(done.values()) < given.count:
        world, found = play(seed)
        done, worlds = done + found, worlds + len(world.worlds)
        if world.written:
            wrong += 1
            print(f"seed {seed}: {len(world.written)} lines, first {world.written[0]}", flush=True)
        seed += 1
    print(f"{sum(done.values())} faults, {worlds} worlds, {wrong} jobs with two worlds: {dict(done)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
