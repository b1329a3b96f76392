"""Jobs whose elements have several nodes, beside others: how many nodes each gets, and which."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from tests.support.depth import cases
from tests.support.scenarios import element_row as element
from tests.support.scenarios import labels as said
from tests.support.scenarios import node_row as node
from tests.support.strategies import brute_force
from unicron_ctl.controller.plan import pools
from unicron_ctl.controller.plan.placement import Need, Placement, place
from unicron_ctl.controller.plan.planning import JobInput, plan, scenario
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.squeue import names_of, nodes_of


# ---------------------------------------------------------------- how many
def random_jobs(draw: random.Random) -> list[JobInput]:
    """Up to three jobs with elements of one to three nodes."""
    found = []
    for name in "abc"[: draw.randint(1, 3)]:
        block = draw.choice([1, 2, 2, 3])
        most = draw.randint(1, 4)
        least, had = draw.randint(1, most), draw.randint(0, most)
        rate = draw.choice([0.0, 1e9, 3e9])
        alive = max(0, had - draw.randint(0, 1))
        job = JobInput(name, draw.choice([0.5, 1.0, 2.0]), least * block, most * block, had * block, alive * block)
        job = replace(job, rate=rate * had * block, measured_nodes=had * block, trained=draw.random() < 0.7)
        found.append(replace(job, unit=block, block=block, owner=draw.choice(["", "ann"])))
    return found


def test_a_plan_has_whole_elements_only():
    for seed in range(cases(500)):
        draw = random.Random(seed)
        jobs = random_jobs(draw)
        room = sum(job.alive for job in jobs) + draw.randint(0, 5)
        given = plan(jobs, room, 1000.0, 5.0).assignment
        assert sum(given.values()) <= room
        assert all(given[job.job] % job.block == 0 and given[job.job] <= job.max_nodes for job in jobs), (seed, given)


def test_the_best_of_whole_elements_is_chosen():
    """One owner's jobs of which none has a state to lose: everything tried."""
    for seed in range(cases(300)):
        draw = random.Random(seed)
        jobs = [replace(job, owner="ann", trained=False) for job in random_jobs(draw)]
        room = draw.randint(1, 9)
        best = brute_force(scenario(jobs, room, 1000.0, 5.0))[1]
        assert plan(jobs, room, 1000.0, 5.0).objective == pytest.approx(float(best), rel=1e-9), seed


def test_spares_are_whole_elements():
    job = JobInput("a", 1.0, 2, 6, 4, 4, 4e9, 4, unit=2, block=2, working=4, wait_seconds=1e6)
    job = replace(job, reach=frozenset(f"n{number}" for number in range(7)), spare_nodes=3)
    for count in range(4, 8):
        pool = pools.Pool((job,), frozenset(sorted(job.reach)[:count]))
        given = pools.plan(pool, lambda jobs, nodes, elsewhere: plan(jobs, nodes, 1000.0, 5.0, elsewhere))
        assert given.assignment == {"a": 4 if count < 6 else 6}


# ---------------------------------------------------------------- which
def pending(job: str, number: int, **facts) -> ElementInfo:
    return element(job, number, "PENDING", **facts)


def test_an_element_is_started_on_as_many_nodes_and_has_them_all_or_none():
    nodes = [node(name) for name in "abc"]
    need = Need("1", 2, block=2)
    found = place([need], [pending("1", 0), pending("1", 1)], nodes)
    assert said(found) == ["pin 1_0 to a,b", "start_now 1_0"] and found.allotted == {"1": [0]}
    assert not said(place([need], [pending("1", 0)], nodes[:1]))


def test_it_goes_where_it_was_then_to_nodes_that_fail_together():
    nodes = [node(name) for name in "abcdef"]
    home = {0: frozenset("cd")}
    assert said(place([Need("1", 1, block=2, home=home)], [pending("1", 0)], nodes))[0] == "pin 1_0 to c,d"
    domains = dict(zip("abcdef", "xyyxyy", strict=True))
    assert said(place([Need("1", 1, block=2)], [pending("1", 0)], nodes, domains=domains))[0] == "pin 1_0 to a,d"
    lost = [each for each in nodes if each.name != "c"]
    found = place([Need("1", 1, block=2, home={0: frozenset("ce")})], [pending("1", 0)], lost, domains=domains)
    assert said(found)[0] == "pin 1_0 to b,e", "beside the node that it has left of its own"


def test_one_that_lost_a_node_works_no_more():
    elements = [element("1", 0, where="a,b"), element("1", 1, where="c,d")]
    nodes = [node("a"), node("b"), node("c"), node("d", "DOWN")]
    found = place([Need("1", 2, frozenset({0}), block=2)], elements, nodes)
    assert said(found) == [] and found.allotted == {"1": [0, 1]}, "Slurm requeues it"
    short = [elements[0], element("1", 1, where="c")]
    assert said(place([Need("1", 2, frozenset({0}), block=2)], short, nodes)) == ["requeue 1_1"]
    asked = Need("1", 2, frozenset({0}), block=2, requeued={1: 95.0})
    assert said(place([asked], short, nodes, now=100.0)) == []


def test_whoever_needs_the_nodes_of_two_is_pinned_before_the_first_is_taken():
    elements = [element("1", 0, where="a"), element("1", 1, where="b"), element("1", 2, where="c"), pending("2", 0)]
    needs = [Need("1", 1, frozenset({0})), Need("2", 1, block=2)]
    found = place(needs, elements, [node(name) for name in "abc"])
    assert said(found) == ["pin 2_0 to b,c", "requeue_hold 1_1", "requeue_hold 1_2", "start_now 2_0"]


def test_one_that_leaves_makes_room_for_two():
    elements = [element("1", 0, where="a,b"), pending("2", 0), pending("2", 1)]
    found = place([Need("1", 0, block=2), Need("2", 2)], elements, [node("a"), node("b")])
    assert said(found) == [
        "pin 2_0 to a",
        "pin 2_1 to b",
        "requeue_hold 1_0",
        "start_now 2_0",
        "start_now 2_1",
    ]


@dataclass
class Queue:
    """A Slurm that does at once what it is asked."""

    elements: dict[tuple[str, int], ElementInfo]
    held: set[tuple[str, int]] = field(default_factory=set)
    pins: dict[tuple[str, int], str] = field(default_factory=dict)

    def busy(self) -> set[str]:
        return {name for e in self.elements.values() if e.state == "RUNNING" for name in nodes_of(e)}

    def carry_out(self, found: Placement) -> None:
        for action in found.actions:
            key = action.job, action.element
            e = self.elements[key]
            if action.action in ("requeue_hold", "hold"):
                assert action.action == "hold" or e.state == "RUNNING"
                self.elements[key] = replace(e, state="PENDING", node=None, reason="JobHeldAdmin")
                self.held.add(key)
            elif action.action == "release":
                self.elements[key] = replace(e, reason="Priority")
                self.held.discard(key)
            elif action.action == "pin":
                self.pins[key] = action.node
            elif action.action == "start_now":
                assert self.busy().isdisjoint(names_of(self.pins[key])), "its nodes are free"
                self.elements[key] = replace(e, state="RUNNING", node=self.pins[key])


def queue_of(draw: random.Random, names: list[str]) -> tuple[Queue, list[Need]]:
    """Jobs with elements of one to three nodes, some of which run and are members, and no more wanted than there is."""
    free, room, elements, needs = list(names), len(names), {}, []
    draw.shuffle(free)
    for job in "123":
        block, members = draw.choice([1, 2, 2, 3]), set()
        count = draw.randint(1, 5)
        for number in range(count):
            if len(free) >= block and draw.random() < 0.6:
                where = [free.pop() for _ in range(block)]
                elements[job, number] = element(job, number, where=",".join(sorted(where)))
                members |= {number} if draw.random() < 0.7 else set()
            else:
                held = draw.random() < 0.5
                elements[job, number] = pending(job, number, reason="JobHeldAdmin" if held else "Resources")
        wanted = draw.randint(0, min(count, room // block))
        room -= wanted * block
        needs.append(Need(job, wanted, frozenset(members), block=block))
    held = {key for key, e in elements.items() if e.held}
    return Queue(elements, held), needs


def test_every_job_comes_to_have_what_the_plan_gives_it():
    """Whatever they have at first: where members leave at boundaries, all have what they are to have in the end."""
    names = [f"n{number}" for number in range(8)]
    for seed in range(cases(400)):
        draw = random.Random(seed)
        queue, needs = queue_of(draw, names)
        for _ in range(20):
            found = place(needs, list(queue.elements.values()), [node(name) for name in names], held=queue.held)
            for need in needs:
                taken = {a.element for a in found.actions if a.job == need.job and a.action == "requeue_hold"}
                assert taken.isdisjoint(need.members), "a member leaves by itself"
            queue.carry_out(found)
            needs = [replace(need, members=need.members - {*found.leaving[need.job]}) for need in needs]
            if not found.actions and not any(found.leaving.values()):
                break
        running = [e.job for e in queue.elements.values() if e.state == "RUNNING"]
        assert {need.job: running.count(need.job) for need in needs} == {n.job: n.desired for n in needs}, seed
