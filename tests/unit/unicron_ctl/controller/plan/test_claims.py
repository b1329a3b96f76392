"""A job that is over, or cannot start, claims no node: nothing is taken from a healthy job for it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.world import FakeAgent, FakeSlurm, World

LISTINGS = ROOT / "docs" / "behaviour" / "slurm-jobs.toml"
LAST_WORD = "stopped by SIGTERM"


class Site(World):
    """Five nodes: job 1 trains on three of them, job 2 on the other two; job 3 of the same owner is to have these."""

    def __init__(self, of_others: bool = False) -> None:
        super().__init__(FakeSlurm(5))
        self.assigned: list[int] = []
        self.submit("1", 3)
        self.slurm.submit("2", 2, **({"user": "bob", "array": False} if of_others else {}))
        self.turns(8.0, "12" if not of_others else "1")
        for iteration in range(3):
            for job in "12" if not of_others else "1":
                self.iterate(job, iteration)
        self.slurm.calls.clear()
        self.assigned.clear()

    def submit(self, job: str, count: int) -> None:
        self.slurm.submit(job, count)
        self.turns(1.0, job)

    def turns(self, seconds: float, jobs: str, least: int = 1) -> None:
        """Time passes; each element of these jobs that begins to run has an agent. least: nodes that they need."""
        for _ in range(round(seconds / 0.5)):
            for (job, element), e in self.slurm.queue.items():
                known = any((a.job, a.element, a.node) == (job, element, e["node"]) for a in self.agents)
                if job in jobs and e["state"] == "RUNNING" and not known:
                    count = sum(one == job for one, _ in self.slurm.queue)
                    agent = FakeAgent(self, job, element, e["node"], nodes=count, min_nodes=least)
                    agent.register()
                    agent.ready()
            self.run(0.5)
            self.assigned.append(self.core.state.assignment["1"])

    def cancel(self, *elements: int, leaving: str = LAST_WORD) -> None:
        """Slurm ends elements of job 2. leaving: the last word of their agents, where they have one."""
        for agent in self.agents:
            if agent.job == "2" and agent.element in elements:
                agent.noticed = True
                agent.status(leaving)
                agent.silent = agent.killed = True
        for element in elements:
            self.slurm.queue["2", element].update(state="COMPLETING")

    def end(self, *elements: int) -> None:
        for element in elements:
            self.slurm.queue["2", element].update(state="CANCELLED", exit_code="0:15")
        self.slurm.schedule()

    def forget(self) -> None:
        for element in (0, 1):
            del self.slurm.queue["2", element]


def at_once(site: Site) -> None:
    site.cancel(0, 1)
    site.end(0, 1)


def slurm_forgets(site: Site) -> None:
    at_once(site)
    site.turns(1.0, "3")
    site.forget()


def one_after_the_other(site: Site) -> None:
    site.cancel(0, 1)
    site.end(0)
    site.turns(8.0, "3", least=2)
    site.end(1)


def one_still_saves(site: Site) -> None:
    site.cancel(0)
    for agent in site.agents:
        agent.noticed = agent.noticed or agent.job == "2"
    site.run(1.0)
    site.slurm.queue["2", 1].update(state="COMPLETING")
    site.end(0)
    site.turns(8.0, "3", least=2)
    site.cancel(1)
    site.end(1)


def agents_die(site: Site) -> None:
    site.cancel(0, 1, leaving="")
    site.run(1.0)
    site.end(0, 1)


def trained_to_the_end(site: Site) -> None:
    site.cancel(0, 1, leaving="finished")
    site.end(0, 1)


def held_by_its_user(site: Site) -> None:
    site.cancel(0, 1)
    for element in (0, 1):
        reason = "job requeued in held state"
        site.slurm.queue["2", element].update(state="PENDING", node=None, reason=reason, restarts=1)
    site.slurm.schedule()


WAYS = (at_once, slurm_forgets, one_after_the_other, one_still_saves, agents_die, trained_to_the_end, held_by_its_user)


@pytest.mark.parametrize("ends", WAYS)
def test_a_job_that_was_cancelled_costs_its_owners_healthy_job_no_node(ends: Callable[[Site], None]) -> None:
    """Defect: `scancel B; sbatch C` took a node from A for half a minute: B stayed in the plan with one node."""
    site = Site()
    site.slurm.submit("3", 2)
    ends(site)
    site.turns(30.0, "3", least=2)
    assert set(site.assigned) == {3}, site.assigned
    assert site.core.state.assignment["3"] == 2
    assert not {call for call in site.slurm.calls if call[1] == "1"}, site.slurm.calls
    assert not [call for call in site.slurm.calls if call[0] in ("requeue", "requeue_hold")], site.slurm.calls


def test_a_node_that_another_users_job_is_leaving_is_as_good_as_free() -> None:
    site = Site(of_others=True)
    site.slurm.submit("3", 2)
    for element in (0, 1):
        site.slurm.queue["2", element].update(state="COMPLETING")
    site.end(0)
    site.turns(6.0, "3", least=2)
    site.end(1)
    site.turns(10.0, "3", least=2)
    assert set(site.assigned) == {3} and site.core.state.assignment["3"] == 2


@pytest.mark.parametrize("seen", tomllib.loads(LISTINGS.read_text())["completing"], ids=lambda seen: seen["command"])
def test_an_element_that_slurm_requeues_keeps_its_place_while_it_completes(seen: dict[str, Any]) -> None:
    """Slurm counts a requeue at once, and shows the same state for what it requeues and what it cancels."""
    site = Site()
    site.cancel(0, 1)
    for element in (0, 1):
        site.slurm.queue["2", element].update(state=seen["state"], restarts=seen["restarts"])
    site.turns(3.0, "")
    assert site.core.state.assignment == {"1": 3, "2": 0 if seen["command"] == "scancel" else 2}


def test_an_element_whose_agent_died_keeps_its_place_while_it_completes() -> None:
    """Slurm starts it again."""
    site = Site()
    for agent in site.agents:
        if agent.job == "2":
            agent.silent = agent.killed = True
    for element in (0, 1):
        site.slurm.queue["2", element].update(state="COMPLETING")
    site.turns(10.0, "")
    assert site.core.state.assignment["2"] == 2
