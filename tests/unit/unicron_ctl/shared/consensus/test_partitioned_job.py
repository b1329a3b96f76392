"""The controller leaves out those it does not hear, and they may agree on a plan: never do both halves go on."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.partitioned_job import PartitionedJob
from unicron_ctl.controller.failure_detector import quorum


def story(count: int, random: Random) -> None:
    """Half of the agents are cut off from the controller. The vote of one more makes them a majority: its rank may have
    died, and it is cut off later, or dies once it may have voted. `PartitionedJob.check` holds at every turn."""
    job = PartitionedJob(count, random, random.choice([0.0, 0.0, 0.1]))
    order = random.sample(range(count), count)
    away, between, here = set(order[: count // 2]), order[count // 2], set(order[count // 2 + 1 :])
    if random.random() < 0.5:
        job.agents[between].die(between)
        job.run(random.uniform(0, 1))
    if random.random() < 0.5:
        job.cut(away | {between}, {-1})
        job.run(random.choice([0.5, 1.0, 1.3, 1.6, 2.0, 3.0]))
        job.cut(away, here | {between})
        if random.random() < 0.5:
            job.agents[between].kill()
        job.mend(between, -1)
    else:
        job.cut(away, {-1, between} | here)
        job.run(random.choice([3.0, 6.0, 9.0]))
        for other in away:
            job.mend(between, other)
        job.cut({between}, {-1} | here)
    if random.random() < 0.3:
        job.world.restart()
    job.run(random.choice([6.0, 12.0]))


@pytest.mark.parametrize("seed", [*range(10), 233])
def test_two_halves_never_both_go_on(seed):
    random = Random(seed)
    story(random.randint(4, 9), random)


def test_without_votes_that_are_given_up_they_would(monkeypatch):
    """The search finds what it is for: one story is known in which an agent without a rank votes for the others."""
    monkeypatch.setattr(quorum, "_goes_on", lambda job, slot: True)
    with pytest.raises(AssertionError, match="two halves go on"):
        random = Random(233)
        story(random.randint(4, 9), random)
