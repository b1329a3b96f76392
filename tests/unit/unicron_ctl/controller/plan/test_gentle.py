"""Slurm is asked gently: what keeps elements from starting is read, what comes to nothing is asked for ever more
seldom, and early listings are few, whatever the cause."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.questions import told
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.requests import Action, Poll, Run
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.nodes.isolation import attention
from unicron_ctl.controller.plan import slurm_actions
from unicron_ctl.controller.plan.placement import MOST_HOLDS, Need, place
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo, SlurmError

ADMIN = Asker(uid=0, admin=True)


class LimitedSlurm(FakeSlurm):
    """Job 1 may run `most` elements; more stay pending, for `reason`, whatever is pinned."""

    most, reason = 2, "QOSMaxJobsPerUserLimit"

    def schedule(self) -> None:
        free = dict.fromkeys(self.free())
        for (job, _), e in self.queue.items():
            waits = "held" in e["reason"].lower() or e["reason"] == "BeginTime"
            if e["state"] != "PENDING" or waits:
                continue
            if job == "1" and sum(x["state"] == "RUNNING" for (j, _), x in self.queue.items() if j == "1") >= self.most:
                e["reason"] = self.reason
            elif free and (e["pin"] is None or e["pin"] in free):
                node = e["pin"] or next(iter(free))
                del free[node]
                e.update(state="RUNNING", node=node, reason="")
            elif e["reason"] == self.reason:
                e["reason"] = "Resources"


class CountingWorld(World):
    """Counts what Slurm is asked, and begins an agent on each element that runs."""

    def __init__(self, slurm: FakeSlurm, **settings: object) -> None:
        self.asked: Counter[str] = Counter()
        self.polls: list[float] = []
        super().__init__(slurm, **settings)

    def _perform(self, request: object) -> None:
        if isinstance(request, Poll):
            self.polls.append(self.now)
        if isinstance(request, Run):
            self.asked.update(action.action for action in request.actions)
        super()._perform(request)

    def submit(self, job: str, count: int) -> None:
        self.slurm.submit(job, count)
        self.follow(count)

    def follow(self, count: int = 4) -> None:
        for (job, n), e in self.slurm.queue.items():
            known = any((a.job, a.element, a.node) == (job, n, e["node"]) for a in self.agents)
            if e["state"] == "RUNNING" and not known:
                agent = FakeAgent(self, job, n, e["node"], nodes=count)
                agent.register()
                agent.ready()

    def turns(self, seconds: float, step: float = 1.0) -> None:
        for _ in range(round(seconds / step)):
            self.run(step)
            self.follow()


@pytest.mark.parametrize("reason", ["QOSMaxJobsPerUserLimit", "JobArrayTaskLimit", "Dependency", "PartitionDown"])
def test_elements_that_cannot_start_are_neither_planned_for_nor_asked_to_start(reason: str) -> None:
    """Defect: with a QOS's limit there were 18 listings and 36 calls of scontrol a second."""
    slurm = LimitedSlurm(6)
    slurm.reason = reason
    world = CountingWorld(slurm)
    world.submit("1", 4)
    world.turns(8.0)
    world.asked.clear()
    world.polls.clear()
    world.turns(60.0)
    assert world.core.state.assignment["1"] == 2
    assert not world.asked, "Slurm has said why they cannot start"
    assert len(world.polls) <= 60 / world.config.slurm_poll_seconds + 5


def test_an_element_that_is_let_go_is_noticed_at_the_next_listing() -> None:
    slurm = LimitedSlurm(6)
    world = CountingWorld(slurm)
    world.submit("1", 4)
    world.turns(20.0)
    assert world.core.state.assignment["1"] == 2
    slurm.most = 3
    slurm.schedule()
    world.turns(2.0)
    assert world.core.state.assignment["1"] == 3
    slurm.most = 4
    world.turns(1.0)
    slurm.queue["1", 3]["reason"] = "Priority"  # Slurm's scheduler has seen that it may start, and looks for nodes
    world.turns(2.0)
    assert slurm.queue["1", 3]["state"] == "RUNNING" and world.core.state.assignment["1"] == 4


def test_nodes_that_an_array_under_a_limit_cannot_use_go_to_others() -> None:
    world = CountingWorld(LimitedSlurm(6))
    world.submit("1", 4)
    world.turns(8.0)
    world.submit("2", 4)
    world.turns(10.0)
    assert world.core.state.assignment == {"1": 2, "2": 4} and not world.slurm.free()


def test_what_a_limit_keeps_from_starting_is_held_where_its_job_gives_up_nodes() -> None:
    """Else it would start on the first of these nodes, instead of whom the plan wants there."""
    nodes = [NodeInfo(f"n{i}", frozenset({"IDLE"}), "", f"10.0.0.{i}", 6818, 1.0, 8) for i in range(3)]
    run = [ElementInfo("1", i, str(i), "RUNNING", f"n{i}", "", "", "", "", 0) for i in range(3)]
    wait = [ElementInfo("1", 3, "3", "PENDING", None, "QOSMaxJobsPerUserLimit", "", "", "", 0)]
    other = [ElementInfo("2", 0, "9", "PENDING", None, "Resources", "", "", "", 0)]
    needs = [Need("1", desired=2), Need("2", desired=1)]
    acts = [(a.action, a.job, a.element) for a in place(needs, run + wait + other, nodes).actions]
    assert acts.index(("hold", "1", 3)) < acts.index(("requeue_hold", "1", 2))
    assert not place([Need("1", desired=3)], run + wait, nodes).actions, "where nothing is taken it stays as it is"


def test_explain_and_status_name_the_reason_in_plain_words(snapshot: SnapshotAssertion) -> None:
    world = CountingWorld(LimitedSlurm(6))
    world.submit("1", 4)
    world.turns(8.0)
    said = told(world.core, "explain", ADMIN, job="1")
    (waiting,) = said["waiting"]
    assert waiting | {"words": ""} == {
        "elements": [2, 3],
        "reason": "QOSMaxJobsPerUserLimit",
        "words": "",
        "starts": False,
    }
    assert [waiting["words"], said["bounds"]] == snapshot
    (job,) = told(world.core, "jobs", ADMIN)
    assert job["barred"] == said["waiting"]


class Deaf(FakeSlurm):
    """Slurm takes every call, and what was pinned does not start for a reason that nobody knows."""

    def schedule(self) -> None:
        for (_, element), e in self.queue.items():
            if e["state"] == "PENDING" and element >= 2:
                e["reason"] = "SomethingNew"
        kept = {key: e for key, e in self.queue.items() if key[1] >= 2}
        all_of_them, self.queue = self.queue, {key: e for key, e in self.queue.items() if key not in kept}
        super().schedule()
        self.queue = all_of_them


class Refusing(Deaf):
    def pin(self, job: str, element: int, node: str | None) -> None:
        raise SlurmError("Access/permission denied")


@pytest.mark.parametrize("slurm", [Deaf, Refusing])
def test_what_comes_to_nothing_is_asked_for_ever_more_seldom(slurm: type[FakeSlurm]) -> None:
    world = CountingWorld(slurm(6))
    world.submit("1", 4)
    world.turns(10.0)
    world.asked.clear()
    world.turns(60.0, 2.0)
    first = sum(world.asked.values())
    assert first <= 40, "two elements"
    world.turns(540.0, 10.0)
    world.asked.clear()
    world.turns(600.0, 10.0)
    assert sum(world.asked.values()) <= 24, "two or three times each, pin and start"


def test_a_call_that_slurm_took_again_starts_from_the_beginning() -> None:
    world = CountingWorld(Refusing(6))
    world.submit("1", 4)
    world.turns(60.0, 2.0)
    world.slurm.__class__ = FakeSlurm
    world.turns(100.0, 4.0)
    assert all(e["state"] == "RUNNING" for e in world.slurm.queue.values()), "after the pause it is asked for again"
    assert not world.core.slurm.retries.states


def test_early_listings_are_few_whatever_the_cause() -> None:
    """Whatever asks for them: changes, hints, or actions that are through."""
    world = CountingWorld(FakeSlurm(2), slurm_poll_seconds=20.0)
    world.submit("1", 2)
    world.run(1.0)
    world.polls.clear()
    action = Action("start_now", "1", 0, "n1", "a test")
    for turn in range(600):
        world.core.slurm.hurry(world.now)
        if turn % 2:
            world.core.carry_out(Outcome(requests=[Run((action,), urgent=turn % 4 == 1)]))
        world.deliver()
        world.run(0.1)
    rate, burst = slurm_actions.EARLY
    assert 55 <= len(world.polls) <= 60 * rate + burst + 3


def test_a_large_array_costs_little_and_leads_to_few_calls() -> None:
    nodes = [NodeInfo(f"n{i}", frozenset({"IDLE"}), "", f"10.0.0.{i}", 6818, 1.0, 8) for i in range(64)]
    count = 100_000
    elements = [ElementInfo("7", i, str(i), "PENDING", None, "Resources", "x", "u", "", 0) for i in range(count)]
    start = time.process_time()
    for _ in range(5):
        dict((e.element, (e.state, e.reason, e.node, e.held)) for e in elements)
    calibration = time.process_time() - start  # five looks at each element
    start = time.process_time()
    found = place([Need("7", desired=64)], elements, nodes)
    took = time.process_time() - start
    assert took < 2 * calibration, "a few looks at each element, and no more"
    acts = Counter(action.action for action in found.actions)
    assert acts == {"pin": 64, "start_now": 64, "hold": MOST_HOLDS}


# ---------------------------------------------------------------- power saving
class Sleeping(FakeSlurm):
    """Slurm with power saving: what is given a node that is switched off wakes it, and waits for it."""

    def free(self) -> list[str]:
        used = {e["node"] for e in self.queue.values() if e["node"] and e["state"] in ("RUNNING", "CONFIGURING")}
        return [n for n, states in self.node_states.items() if not states & {"DOWN", "DRAIN"} and n not in used]

    def schedule(self) -> None:
        super().schedule()
        for e in self.queue.values():
            states = self.node_states.get(e["node"] or "", set())
            if "POWERED_DOWN" in states and e["state"] == "RUNNING":
                e["state"] = "CONFIGURING"
                states -= {"POWERED_DOWN", "IDLE"}
                states |= {"ALLOCATED", "POWERING_UP", "NOT_RESPONDING"}

    def boot(self) -> None:
        for e in self.queue.values():
            if e["state"] == "CONFIGURING":
                self.node_states[e["node"]] -= {"POWERING_UP", "NOT_RESPONDING"}
                e["state"] = "RUNNING"


def test_nodes_that_are_switched_off_are_given_to_jobs_and_woken() -> None:
    slurm = Sleeping(8)
    for i in range(3, 9):
        slurm.node_states[f"n{i}"] = {"IDLE", "CLOUD", "POWERED_DOWN"}
    slurm.reasons = {}
    world = CountingWorld(slurm)
    world.slurm.submit("1", 8)
    world.follow(8)
    world.turns(20.0)
    assert world.core.state.assignment["1"] == 8
    assert [e["state"] for e in slurm.queue.values()].count("CONFIGURING") == 6
    assert len(world.job("1").members) == 2, "those that are up train meanwhile"
    world.turns(120.0, 10.0)
    downs = [call for call in slurm.calls if call[0] in ("down", "drain", "requeue", "requeue_hold", "hold")]
    assert not downs and not world.core.state.out_of_service, "nobody is judged for being woken"
    slurm.boot()
    world.turns(6.0)
    assert all(e["state"] == "RUNNING" for e in slurm.queue.values())
    assert sum(agent.ranks[agent.slots[0]].state == "running" for agent in world.agents) >= 2


def test_nodes_that_are_awake_are_taken_first() -> None:
    nodes = [
        NodeInfo("n1", frozenset({"IDLE", "POWERED_DOWN"}), "", "n1", 6818, 1.0, 8),
        NodeInfo("n2", frozenset({"IDLE"}), "", "n2", 6818, 1.0, 8),
    ]
    (first, *_) = place(
        [Need("7", desired=1)], [ElementInfo("7", 0, "7", "PENDING", None, "", "", "", "", 0)], nodes
    ).actions
    assert (first.action, first.node) == ("pin", "n2")


def test_an_admin_is_called_when_slurm_gives_no_answer_for_long(snapshot: SnapshotAssertion) -> None:
    """Its programs hang, for one."""
    world = CountingWorld(FakeSlurm(2))
    world.run(2.0)
    world.slurm.refuse = (
        "scontrol --all: no answer from Slurm within 10 s, and its process does not end when it is killed"
    )
    world.run(30.0)
    assert not attention(world.core.view), "it may be started again"
    world.run(40.0)
    (item,) = attention(world.core.view)
    assert item.reason == snapshot
    world.slurm.refuse = ""
    world.run(5.0)
    assert not attention(world.core.view)
