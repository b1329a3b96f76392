"""The plan of the next event is looked up, and is the one that solving would have given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.processes import wait_for
from unicron_ctl.controller.plan import planning
from unicron_ctl.controller.plan.planning import Ahead, JobInput, event_between

RECKONING = (1000.0, 5.0)


def job(
    name: str, nodes: int, alive: int | None = None, weight: float = 1.0, most: int = 4, owner: str = "ann"
) -> JobInput:
    return JobInput(name, weight, 1, most, nodes, nodes if alive is None else alive, 1e9 * nodes, nodes, owner=owner)


BEFORE = [job("a", 3, weight=2.0), job("b", 2)]


def tables_for(jobs: list[JobInput]) -> Iterator[Ahead]:
    made = Ahead()
    try:
        made.prepare(jobs, {"a": 3, "b": 2}, 6, *RECKONING)
        wait_for(made._keeper._fresh, "the table")
        yield made
    finally:
        made.close()


@pytest.fixture
def ahead():
    yield from tables_for(BEFORE)


EVENTS = {
    ("lost", "a"): ([job("a", 3, 2, weight=2.0), job("b", 2)], 5),
    ("lost", "b"): ([job("a", 3, weight=2.0), job("b", 2, 1)], 5),
    ("spare",): (BEFORE, 5),
    ("join",): (BEFORE, 7),
    ("finish", "b"): ([job("a", 3, weight=2.0)], 6),
}


@pytest.mark.parametrize("owners", ["one", "several"])
@pytest.mark.parametrize("event", EVENTS, ids=" ".join)
def test_a_known_event_is_looked_up_and_equals_solving(event: tuple[str, ...], owners: str) -> None:
    def with_owners(jobs: list[JobInput]) -> list[JobInput]:
        return [replace(job, owner=job.job) for job in jobs] if owners == "several" else jobs

    before, (now, nodes) = with_owners(BEFORE), EVENTS[event]
    now = with_owners(now)
    assert event_between({j.job: j for j in before}, 6, {j.job: j for j in now}, nodes) == event
    for made in tables_for(before):
        plan, looked_up = made.plan(now, nodes, *RECKONING)
        assert looked_up and plan.assignment == planning.plan(now, nodes, *RECKONING).assignment


@pytest.mark.parametrize(
    ("jobs", "nodes"),
    [
        ([*BEFORE, job("c", 0)], 6),  # a job that nobody knew of
        ([replace(BEFORE[0], max_nodes=2), BEFORE[1]], 6),  # its size changed
        ([job("a", 3, 0, weight=2.0), BEFORE[1]], 3),  # three nodes at once
        (BEFORE, 9),
    ],
)
def test_anything_else_is_solved(ahead: Ahead, jobs: list[JobInput], nodes: int) -> None:
    plan, looked_up = ahead.plan(jobs, nodes, *RECKONING)
    assert not looked_up
    assert plan.assignment == planning.plan(jobs, nodes, *RECKONING).assignment


def test_a_job_is_never_planned_away_by_a_look_up(ahead: Ahead) -> None:
    """The table would give all four nodes to the heavier job; the other's training state would be gone."""
    jobs = [job("a", 3, 2, weight=2.0), job("b", 2, 1)]
    assert ahead._look_up(jobs, 4).assignment["b"] == 0
    plan, looked_up = ahead.plan(jobs, 4, *RECKONING)
    assert not looked_up and plan.assignment["b"] == 1


def test_small_drifts_of_speed_do_not_make_a_new_table(ahead: Ahead) -> None:
    before = ahead._keeper._wanted
    ahead.prepare([replace(BEFORE[0], rate=BEFORE[0].rate * 1.01), BEFORE[1]], {"a": 3, "b": 2}, 6, *RECKONING)
    assert ahead._keeper._wanted is before
    ahead.prepare([replace(BEFORE[0], rate=BEFORE[0].rate * 1.5), BEFORE[1]], {"a": 3, "b": 2}, 6, *RECKONING)
    assert ahead._keeper._wanted is not before
