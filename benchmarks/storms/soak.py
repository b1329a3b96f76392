"""A soak: what can happen to a small cluster, drawn at random, again and again; one job has to heal each time."""

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
    """Goes on for so long, and ends early at the first deed after which the job does not come to be whole."""
    storm.train()
    chance, done, took = random.Random(seed), Counter[str](), []
    until = time.time() + seconds
    while time.time() < until and not storm.wrong:
        deed = chance.choice(DEEDS)
        deed(storm, chance)
        done[deed.__name__] += 1
        over = time.time()
        try:  # what still seems to be whole is not: a second deed then could take the last copy of the state
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
    """By kill -9."""
    storm.kill_some_rank(chance)


def agent_killed(storm: Storm, chance: random.Random) -> None:
    """Its ranks end with it, and Slurm starts the element again."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(storm.agents()), signal.SIGKILL)


def agents_paused(storm: Storm, chance: random.Random) -> None:
    """One after the other, for up to 2 s each."""
    for pid in storm.agents():
        with stopped([pid]):
            time.sleep(chance.uniform(0.5, 2.0))


def node_cut_off(storm: Storm, chance: random.Random) -> None:
    """Silent for up to 20 s, and back."""
    storm.site.cut(_some_node(storm, chance))
    time.sleep(chance.uniform(0.5, 20.0))
    storm.site.heal()


def node_without_power(storm: Storm, chance: random.Random) -> None:
    """Take its power; it boots later, and an admin takes it back where Slurm wants that."""
    victim = _some_node(storm, chance)
    storm.site.cluster.power_off(victim)
    time.sleep(chance.uniform(3.0, 15.0))
    storm.site.heal()
    storm.site.cluster.power_on(victim)
    time.sleep(3.0)
    if victim in storm.out_of_service():
        storm.site.slurm("scontrol", "update", f"node={victim}", "state=resume")


def nodes_cut_apart(storm: Storm, chance: random.Random) -> None:
    """Two of the job's nodes, for up to 15 s."""
    first, second = chance.sample(range(ELEMENTS), 2)
    storm.site.cut(storm.job.node(first), storm.job.node(second))
    time.sleep(chance.uniform(1.0, 15.0))
    storm.site.heal()


def packets_lost(storm: Storm, chance: random.Random) -> None:
    """Up to 30 of 100, at one node."""
    storm.site.loss(_some_node(storm, chance), chance.uniform(0.05, 0.3))
    time.sleep(chance.uniform(3.0, 10.0))
    storm.site.heal()


def head_cut_off(storm: Storm, chance: random.Random) -> None:
    """For up to 15 s; half of the times a rank dies meanwhile."""
    storm.site.cut("head")
    time.sleep(chance.uniform(0.5, 7.0))
    if chance.random() < 0.5:
        storm.kill_some_rank(chance)
    time.sleep(chance.uniform(0.5, 8.0))
    storm.site.heal()


def controller_killed(storm: Storm, chance: random.Random) -> None:
    """And started again; half of the times a rank dies meanwhile."""
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
    """All ranks have stepped since then, in one generation."""
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
