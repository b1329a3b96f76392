"""Between owners only weights, which the admin bounds, move nodes: nobody gains by what is said of a job."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.depth import cases
from unicron_planner.ahead.lookahead import Lookahead
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.solver.shares import claim, divide
from unicron_planner.solver.solve import best, by_owner, solve

CLUSTERS = cases(10_000, 12)
FACTORS = (0.0, 0.5, 0.95, 1.05, 1.25, 3.0, 1e3)


def _table(draw: random.Random, sizes: range | list[int]) -> dict[int, float]:
    """FLOP/s of a job by size: a power of it, or anything."""
    power = draw.choice((1.0, 1.0, 0.9, 0.5, None))
    return {size: 1e15 * (draw.uniform(0.2, 9.0) if power is None else size**power) for size in sizes}


def _job(draw: random.Random, name: str, owner: str, plain: bool) -> Job:
    """plain: it runs on any number of nodes from one on."""
    low = 1 if plain else draw.choice((1, 1, 2, 3, 5))
    sizes: range | list[int] = range(low, low + draw.randint(0, 7))
    if not plain and draw.random() < 0.3:
        sizes = sorted(draw.sample(range(1, 10), draw.randint(1, 4)))
    flops = _table(draw, sizes or range(low, low + 1))
    nodes = draw.choice((0, 0, *flops))
    return Job(
        name,
        flops,
        weight=draw.choice((1.0, 1.0, 2.0, 0.5)),
        min_nodes=min(flops),
        max_nodes=max(flops),
        nodes=nodes,
        lost_worker=nodes > 0 and draw.random() < 0.2,
        transition_seconds=draw.choice((None, 0.0, 600.0)),
        keep=min(nodes, draw.choice((0, 0, 1))),
        owner=owner,
    )


def _cluster(draw: random.Random, plain: bool = False) -> Scenario:
    owners = [owner for owner in "abcd"[: draw.randint(2, 4)] for _ in range(draw.choice((1, 1, 2)))]
    jobs = [_job(draw, f"{owner}{i}", owner, plain) for i, owner in enumerate(owners)]
    floor = sum(job.keep for job in jobs)
    return Scenario(draw.randint(max(2, floor), 14), tuple(jobs), draw.choice((1000.0, 1000.0, 1.0)), 60.0)


def _scale_rates(draw: random.Random, job: Job) -> Job:
    factor = draw.choice(FACTORS[1:])
    return replace(job, flops={size: rate * factor for size, rate in job.flops.items()})


def _one_entry(draw: random.Random, job: Job) -> Job:
    size = draw.choice(list(job.flops))
    return replace(job, flops={**job.flops, size: job.flops[size] * draw.choice(FACTORS)})


def _other_table(draw: random.Random, job: Job) -> Job:
    return replace(job, flops=_table(draw, list(job.flops)))


def _other_times(draw: random.Random, job: Job) -> Job:
    kinds = {kind: draw.choice((0.0, 1e3, 1e5)) for kind in ("continue", "move", "grow", "restart")}
    return replace(job, transition_seconds=draw.choice((0.0, 1e4)), transition=kinds, restart_only=draw.random() < 0.3)


def _larger_minimum(draw: random.Random, job: Job) -> Job:
    return replace(job, min_nodes=draw.randint(job.min_nodes, job.max_nodes))


def _smaller_maximum(draw: random.Random, job: Job) -> Job:
    return replace(job, max_nodes=draw.randint(job.min_nodes, job.max_nodes))


def _smaller_minimum(draw: random.Random, job: Job) -> Job:
    sizes = range(1, max(job.flops) + 1)
    return replace(job, min_nodes=1, flops={**_table(draw, sizes), **job.flops})


def _larger_maximum(draw: random.Random, job: Job) -> Job:
    most = max(job.flops) + draw.randint(1, 8)
    return replace(job, max_nodes=most, flops={**_table(draw, range(job.min_nodes, most + 1)), **job.flops})


Lie = Callable[[random.Random, Job], Job]
OF_NUMBERS: tuple[Lie, ...] = (_scale_rates, _one_entry, _other_table, _other_times, _larger_minimum, _smaller_maximum)
OF_SIZES: tuple[Lie, ...] = (_smaller_minimum, _larger_maximum)


def _usable(job: Job, nodes: int) -> int:
    """On so many nodes the job truly runs on as many as this."""
    return max(size for size in job.options(nodes))


def _worth(truth: Scenario, owner: str, assignment: dict[str, int]) -> float:
    """The true worth of the plan to the owner: the sum of G."""
    return sum(truth.g(job, _usable(job, assignment[job.name])) for job in truth.owners[owner])


def _assignments(scenario: Scenario, known: dict[tuple, dict[str, int]]) -> tuple[dict[str, int], dict[str, int]]:
    """The result of `solve` without the words; what the same jobs get of as many nodes is computed once."""

    def assign(jobs, room):
        key = (room, *map(id, jobs))
        if key not in known:
            known[key] = best(scenario, jobs, room)
        return known[key]

    return by_owner(scenario, assign)


def _gains(truth: Scenario, draw: random.Random, lies: tuple[Lie, ...]) -> str:
    """The gain that the owner of the first job has by lies about all of its jobs that honesty does not give; empty if
    nothing."""
    owner = draw.choice(list(truth.owners))
    said = replace(truth, jobs=tuple(draw.choice(lies)(draw, job) if job.owner == owner else job for job in truth.jobs))
    known: dict[tuple, dict[str, int]] = {}
    honest, shares = _assignments(truth, known)
    lied, _ = _assignments(said, known)
    now, then = _worth(truth, owner, honest), _worth(truth, owner, lied)
    if then > now + 1e-9 * (abs(now) + 1e15):
        return f"worth {now:g} to {then:g}"
    nodes = sum(_usable(job, lied[job.name]) for job in truth.owners[owner])
    offered = shares[owner]
    return f"{nodes} nodes of {offered} that honesty was offered" if nodes > offered else ""


@pytest.mark.parametrize("part", range(4))
def test_no_over_or_understatement_gives_its_owner_more_than_honesty(part: int) -> None:
    for seed in range(part, CLUSTERS, 4):
        draw = random.Random(seed)
        truth = _cluster(draw)
        assert not (gained := _gains(truth, draw, OF_NUMBERS)), f"seed {seed}: {gained}: {truth}"


def test_stating_sizes_at_which_a_job_cannot_run_gives_nothing_where_all_others_run_on_any_number() -> None:
    for seed in range(cases(300)):
        draw = random.Random(seed)
        truth = _cluster(draw, plain=True)
        liar = truth.owners["a"][0]
        odd = _job(draw, liar.name, "a", plain=False)
        jobs = [odd if job is liar else replace(job, keep=0) for job in truth.jobs]
        truth = replace(truth, jobs=tuple(replace(job, weight=1.0) if job.owner == "a" else job for job in jobs))
        draw_for_a = _OnlyFirst(seed)
        assert not (gained := _gains(truth, draw_for_a, OF_SIZES)), f"seed {seed}: {gained}: {truth}"


class _OnlyFirst(random.Random):
    """Chooses the first of several owners."""

    def choice(self, seq):
        return "a" if "a" in seq and isinstance(seq[0], str) else super().choice(seq)


def test_who_can_use_what_is_theirs_by_weight_has_it_whatever_others_say() -> None:
    for seed in range(cases(1000)):
        draw = random.Random(seed)
        truth = _cluster(draw)
        truth = replace(truth, jobs=tuple(replace(job, keep=0) for job in truth.jobs))
        weights = {owner: max(job.weight for job in jobs) for owner, jobs in truth.owners.items()}
        given = divide(truth)
        for owner, jobs in truth.owners.items():
            light = all(job.weight == weights[owner] for job in jobs)
            share = int(truth.nodes * weights[owner] / sum(weights.values()) + 1e-9)
            if light:
                assert given[owner] >= claim(owner, jobs, truth.nodes).usable(share), (seed, given, truth)
        assert sum(given.values()) <= truth.nodes


def _linear(name: str, owner: str, most: int = 8, low: int = 1, **more) -> Job:
    return Job(name, {n: 1e15 * n for n in range(1, most + 1)}, min_nodes=low, max_nodes=most, owner=owner, **more)


def test_saying_five_per_cent_more_takes_no_node() -> None:
    fast = Job("m", {n: 1.05e15 * n for n in range(1, 9)}, owner="mallory", nodes=4)
    assert solve(Scenario(8, (_linear("v", "victim", nodes=4), fast))).assignment == {"v": 4, "m": 4}
    together = (_linear("v", "", nodes=4), replace(fast, owner=""))
    assert solve(Scenario(8, together)).assignment == {"v": 0, "m": 8}, "of one owner the faster job gets more"


def test_a_large_minimum_takes_no_share_of_others() -> None:
    large = _linear("m", "mallory", low=6, nodes=8)
    assert solve(Scenario(8, (_linear("v", "victim"), large))).assignment == {"v": 8, "m": 0}
    assert solve(Scenario(8, (_linear("v", "victim", most=2), large))).assignment == {"v": 2, "m": 6}


def test_many_jobs_have_the_share_of_one() -> None:
    many = [_linear(f"m{i}", "mallory") for i in range(7)]
    assert solve(Scenario(8, (_linear("v", "victim"), *many))).assignment["v"] == 4


def test_a_small_job_of_much_weight_raises_no_others_share() -> None:
    """One node is of weight 4, so the other job of its owner has as much as the victim's."""
    jobs = (_linear("v", "victim"), _linear("m", "mallory"), _linear("n", "mallory", most=1, weight=4.0))
    found = solve(Scenario(9, jobs)).assignment
    assert found["v"] == 4 and found["n"] == 1


def test_what_an_owner_leaves_goes_to_others_by_weight() -> None:
    jobs = (_linear("a", "ann", most=1), _linear("b", "bob"), _linear("c", "cleo", weight=2.0))
    assert solve(Scenario(10, jobs)).assignment == {"a": 1, "b": 3, "c": 6}


def test_a_fraction_of_a_node_disturbs_nobody() -> None:
    """15 nodes for two: the one that lost a node does not get the other's."""
    for loser in "ab":
        jobs = [_linear(name, name, nodes=8, lost_worker=name == loser) for name in "ab"]
        assert solve(Scenario(15, tuple(jobs))).assignment == {name: 7 if name == loser else 8 for name in "ab"}


def test_a_job_that_declines_a_node_leaves_it_to_the_one_that_has_it() -> None:
    """Each has 999.5 of 1,999 nodes by weight; the one more would not pay for its transition."""
    table = {n: 1e15 * n for n in range(1, 1002)}
    jobs = (Job("a", table, nodes=1001, owner="a"), Job("b", table, nodes=998, owner="b"))
    plan = solve(Scenario(1999, jobs, transition_seconds=60.0))
    assert plan.assignment == {"a": 1001, "b": 998}


def test_the_look_ahead_is_what_solving_gives() -> None:
    for seed in range(cases(80)):
        draw = random.Random(seed)
        scenario = _cluster(draw)
        table = Lookahead(scenario)
        for event, entry in table.entries.items():
            assert entry.assignment == solve(entry.scenario).assignment, (seed, event)


def test_the_reason_names_the_share_and_owners_have_names(snapshot) -> None:
    plan = solve(Scenario(8, (_linear("v", "victim"), _linear("m", "mallory", low=6, nodes=8))))
    assert plan.reasons["m"] == snapshot
    assert plan.to_dict()["shares"] == {"mallory": 0, "victim": 8}
    with pytest.raises(PlanError, match="owner must be printable"):
        _linear("v", "\n")
