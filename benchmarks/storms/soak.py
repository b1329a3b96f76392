"""A soak: random faults of a small cluster, after each of which one job must heal."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from statistics import median

from benchmarks.storms.stage import ELEMENTS, HEAL_LIMIT, Storm, stopped
from tests.support.processes import wait_for


def soak(storm: Storm, seconds: float, seed: int) -> None:
    """Draw faults for so long, or until the job does not become whole after one."""
    storm.train()
    chance, done, took = random.Random(seed), Counter[str](), []
    until = time.time() + seconds
    while time.time() < until and not storm.wrong:
        deed = chance.choice(DEEDS)
        deed(storm, chance)
        done[deed.__name__] += 1
        over = time.time()
        try:  # before the next step of all ranks a second fault could take the last copy of the state
            wait_for(lambda since=over + 1.0: _all_step(storm, since), "all ranks step together", HEAL_LIMIT)
        except AssertionError:
            history = " ".join(f"{name} {count}" for name, count in done.items())
            storm.wrong.append(f"whole within {HEAL_LIMIT:g} s of {deed.__name__} (seed {seed}; {history})")
        took.append(time.time() - over)
    storm.figure("deeds", sum(done.values()))
    storm.figure("whole again, median", median(took), "s")
    storm.figure("at most", max(took), "s")
    storm.goes_on()
    storm.no_two_halves()
    storm.nothing_lost()
    storm.nothing_held()
    storm.in_service(but=())


def rank_killed(storm: Storm, chance: random.Random) -> None:
    """Kill a rank."""
    storm.kill_some_rank(chance)


def agent_killed(storm: Storm, chance: random.Random) -> None:
    """Kill an agent: its ranks end with it, and Slurm starts the element again."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(storm.agents()), signal.SIGKILL)


def agents_paused(storm: Storm, chance: random.Random) -> None:
    """Stop one agent after the other, for up to 2 s each."""
    for pid in storm.agents():
        with stopped([pid]):
            time.sleep(chance.uniform(0.5, 2.0))


def node_cut_off(storm: Storm, chance: random.Random) -> None:
    """Cut off a node for up to 20 s."""
    storm.site.cut(_some_node(storm, chance))
    time.sleep(chance.uniform(0.5, 20.0))
    storm.site.heal()


def node_without_power(storm: Storm, chance: random.Random) -> None:
    """Cut a node's power; it boots later, and an admin takes it back if Slurm asks for that."""
    victim = _some_node(storm, chance)
    storm.site.cluster.power_off(victim)
    time.sleep(chance.uniform(3.0, 15.0))
    storm.site.heal()
    storm.site.cluster.power_on(victim)
    time.sleep(3.0)
    if victim in storm.out_of_service():
        storm.site.slurm("scontrol", "update", f"node={victim}", "state=resume")


def nodes_cut_apart(storm: Storm, chance: random.Random) -> None:
    """Cut two of the job's nodes off from each other for up to 15 s."""
    first, second = chance.sample(range(ELEMENTS), 2)
    storm.site.cut(storm.job.node(first), storm.job.node(second))
    time.sleep(chance.uniform(1.0, 15.0))
    storm.site.heal()


def packets_lost(storm: Storm, chance: random.Random) -> None:
    """Lose up to 30 % of one node's packets."""
    storm.site.loss(_some_node(storm, chance), chance.uniform(0.05, 0.3))
    time.sleep(chance.uniform(3.0, 10.0))
    storm.site.heal()


def head_cut_off(storm: Storm, chance: random.Random) -> None:
    """Cut the head off for up to 15 s; half of the times a rank dies meanwhile."""
    storm.site.cut("head")
    time.sleep(chance.uniform(0.5, 7.0))
    if chance.random() < 0.5:
        storm.kill_some_rank(chance)
    time.sleep(chance.uniform(0.5, 8.0))
    storm.site.heal()


def controller_killed(storm: Storm, chance: random.Random) -> None:
    """Kill and start the controller; half of the times a rank dies meanwhile."""
    storm.site.controller.kill()
    if chance.random() < 0.5:
        storm.kill_some_rank(chance)
    time.sleep(chance.uniform(0.0, 8.0))
    storm.site.controller.start()


def controller_stopped(storm: Storm, chance: random.Random) -> None:
    """Stop the controller for up to 10 s, as a machine that swaps does."""
    storm.site.controller.freeze()
    time.sleep(chance.uniform(0.5, 10.0))
    storm.site.controller.thaw()


def _all_step(storm: Storm, since: float) -> bool:
    """Return whether all ranks have stepped since then in one generation."""
    late = [step for step in storm.job.steps() if step["time"] > since]
    newest = max((step["generation"] for step in late), default=0)
    return len({step["slot"] for step in late if step["generation"] == newest}) == ELEMENTS


def _some_node(storm: Storm, chance: random.Random) -> str:
    return storm.job.node(chance.randrange(ELEMENTS))


Deed = Callable[[Storm, random.Random], None]
DEEDS: list[Deed] = [
    rank_killed,
    agent_killed,
    agents_paused,
    node_cut_off,
    node_without_power,
    nodes_cut_apart,
    packets_lost,
    head_cut_off,
    controller_killed,
    controller_stopped,
]
