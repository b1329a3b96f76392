"""One plan over pools of nodes: what is given can always be had, and nothing is wasted that anybody could use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_ctl.controller.plan import planning
from unicron_ctl.controller.plan.planning import JobInput
from unicron_ctl.controller.plan.pools import crowd, join_plans, plan, pools


def _job(name: str, reach: str, nodes: int = 0, most: int = 8, weight: float = 1.0, spare: int = 0) -> JobInput:
    return JobInput(name, weight, 1, most, nodes, nodes, reach=frozenset(reach), spare_nodes=spare)


def _solve(jobs: Sequence[JobInput], nodes: int, elsewhere: Mapping[str, int]):
    return planning.plan(jobs, nodes, 1000.0, 5.0, elsewhere)


def _plan(*jobs: JobInput) -> dict[str, int]:
    found = pools(jobs)
    return join_plans([plan(pool, _solve) for pool in found], 0).assignment


def _matched(jobs: Sequence[JobInput], wanted: dict[str, int]) -> bool:
    """Whether every job can have its nodes: bipartite matching by augmenting paths, node by node."""
    owner: dict[str, str] = {}
    reach = {job.job: job.reach for job in jobs}

    def take_node(job: str, seen: set[str]) -> bool:
        for node in sorted(reach[job] - seen):
            seen.add(node)
            if node not in owner or take_node(owner[node], seen):
                owner[node] = job
                return True
        return False

    return all(take_node(job, set()) for job, count in wanted.items() for _ in range(count))


def test_jobs_that_share_no_node_are_planned_apart() -> None:
    jobs = [_job("1", "ab"), _job("2", "cd"), _job("3", "bx")]
    assert [[job.job for job in pool.jobs] for pool in pools(jobs)] == [["1", "3"], ["2"]]
    assert _plan(*jobs)["2"] == 2


def test_a_job_gets_no_more_than_there_is_for_it() -> None:
    """Six nodes, but only one of them has what the heavy job asks for."""
    assert _plan(_job("1", "a", weight=50.0), _job("2", "abcdef")) == {"1": 1, "2": 5}


def test_two_jobs_that_compete_for_a_part_do_not_get_it_twice() -> None:
    found = _plan(_job("1", "ab", weight=9.0), _job("2", "ab", weight=9.0), _job("3", "abcd"))
    assert found["1"] + found["2"] == 2 and found["3"] == 2


def test_growth_leaves_spare_nodes_but_a_lost_one_is_replaced() -> None:
    assert _plan(_job("1", "abcd", spare=1)) == {"1": 3}
    lost = JobInput("1", 1.0, 1, 8, 4, 3, reach=frozenset("abcd"), spare_nodes=1)
    assert _plan(lost) == {"1": 4}


@st.composite
def _cases(draw: st.DrawFn) -> list[JobInput]:
    jobs = []
    for index in range(draw(st.integers(1, 5))):
        reach = "".join(draw(st.sets(st.sampled_from("abcdefgh"))))
        jobs.append(_job(str(index), reach, most=draw(st.integers(1, 8)), weight=draw(st.floats(0.1, 10.0))))
    return jobs


@settings(max_examples=cases(200), deadline=None)
@given(_cases())
def test_every_plan_can_be_carried_out(jobs: list[JobInput]) -> None:
    wanted = _plan(*jobs)
    assert wanted.keys() == {job.job for job in jobs} and _matched(jobs, wanted)
    for job in jobs:  # linear throughput: a node that a job could still use is never left over
        free = wanted | {job.job: wanted[job.job] + 1}
        assert wanted[job.job] >= job.max_nodes or not _matched(jobs, free)


@settings(max_examples=cases(200), deadline=None)
@given(_cases(), st.data())
def test_a_crowd_is_found_exactly_when_counts_do_not_fit(jobs: list[JobInput], data: st.DataObject) -> None:
    for pool in pools(jobs):
        wanted = {job.job: data.draw(st.integers(0, 4)) for job in pool.jobs}
        found = crowd(pool, wanted) if len({job.reach for job in pool.jobs}) > 1 else set()
        if found:
            nodes = frozenset().union(*(job.reach for job in pool.jobs if job.job in found))
            assert sum(wanted[name] for name in found) > len(nodes)
        elif len({job.reach for job in pool.jobs}) > 1:
            assert _matched(pool.jobs, wanted)
