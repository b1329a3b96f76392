"""From the plan and what Slurm shows to Slurm actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scenarios import element_row as element
from tests.support.scenarios import labels as said
from tests.support.scenarios import node_row as node
from unicron_ctl.controller.model.cluster_state import Pin
from unicron_ctl.controller.plan.placement import Need, Placement, place, usable
from unicron_ctl.shared.slurm.slurm_client import ElementInfo


def test_nothing_to_do_means_no_action():
    elements = [element("1", 0, where="a"), element("1", 1, where="b")]
    found = place([Need("1", 2, frozenset({0, 1}))], elements, [node("a"), node("b"), node("c")])
    assert found.actions == [] and found.allotted == {"1": [0, 1]} and found.leaving == {"1": []}


def test_a_requeued_element_goes_before_held_ones_and_home_if_it_can():
    elements = [
        element("1", 0, "PENDING", reason="JobHeldAdmin", comment="unicron: x"),
        element("1", 1, "PENDING", reason="BeginTime", restarts=1),
    ]
    found = place([Need("1", 1, home={1: frozenset("b")})], elements, [node("a"), node("b")])
    assert said(found) == ["pin 1_1 to b", "start_now 1_1"]


def test_nothing_is_started_where_its_former_self_still_lives():
    """Defect, found by the soak on links: Slurm drained the node for a duplicate job id, and held the element."""
    elements = [element("1", 0, "PENDING", reason="BeginTime", restarts=1), element("1", 1, "PENDING")]
    need = Need("1", 2, home={0: frozenset("a")}, lives={0: frozenset("a")})
    assert said(place([need], elements, [node("a")])) == ["pin 1_1 to a", "start_now 1_1"]
    assert "pin 1_0 to b" in said(place([need], elements, [node("a"), node("b")]))


def test_replicas_over_several_nodes_are_kept_whole():
    """Elements 0 and 1 hold one, 2 and 3 another: whoever has no mate leaves first, and a mate starts first."""
    elements = [element("1", number, where=name) for number, name in ((0, "a"), (1, "b"), (2, "c"))]
    nodes = [node(name) for name in "abc"]
    found = place([Need("1", 2, frozenset({0, 1, 2}), unit=2)], elements, nodes)
    assert found.leaving == {"1": [2]}
    whole = [*elements, element("1", 3, where="d")]
    found = place([Need("1", 2, frozenset(range(4)), unit=2)], whole, [*nodes, node("d")])
    assert found.leaving == {"1": [2, 3]}
    mates = [element("1", 4, where="a"), *(element("1", number, "PENDING") for number in (1, 2, 5))]
    found = place([Need("1", 2, frozenset({4}), unit=2)], mates, nodes)
    assert said(found)[0] == "pin 1_5 to b"


def test_what_a_user_holds_is_not_ours():
    elements = [element("1", 0, where="a"), element("1", 1, "PENDING", reason="JobHeldUser", comment="mine")]
    assert said(place([Need("1", 2, frozenset({0}))], elements, [node("a"), node("b")])) == []


def test_a_pinned_element_is_waited_for_then_pushed_then_moved():
    elements = [element("1", 0, "PENDING", reason="Priority")]
    pins = {("1", 0): Pin("a", 100.0)}
    nodes = [node("a"), node("b")]
    assert said(place([Need("1", 1)], elements, nodes, pins, now=101.0)) == []
    assert said(place([Need("1", 1)], elements, nodes, pins, now=105.0)) == ["start_now 1_0"]
    assert "pin 1_0 to a" in said(place([Need("1", 1)], elements, nodes, pins, now=140.0))
    assert "pin 1_0 to b" in said(place([Need("1", 1)], elements, [node("a", "DOWN"), node("b")], pins, now=101.0))


def test_a_member_leaves_by_itself_before_its_node_is_taken():
    elements = [element("1", 0, where="a"), element("1", 1, where="b"), element("2", 0, "PENDING", reason="Resources")]
    needs = [Need("1", 1, frozenset({0, 1})), Need("2", 1)]
    first = place(needs, elements, [node("a"), node("b")])
    assert first.actions == [] and first.leaving["1"] == [1] and first.allotted["1"] == [0]
    then = place([Need("1", 1, frozenset({0})), Need("2", 1)], elements, [node("a"), node("b")])
    assert said(then) == ["pin 2_0 to b", "requeue_hold 1_1", "start_now 2_0"]


def test_a_free_node_that_a_job_avoids_goes_to_another_which_leaves_one_for_it():
    """Defect, found by the torture: the node stood idle for a day, with the one job a node short and the other full."""
    nodes = [node(name) for name in "abcde"]
    large = [element("1", 0, where="a"), element("1", 1, where="b"), element("1", 2, "PENDING", reason="JobHeldAdmin")]
    small = [element("2", 0, where="d"), element("2", 1, where="e"), element("2", 2, "PENDING", reason="JobHeldAdmin")]
    held = {("1", 2), ("2", 2)}
    needs = [Need("1", 3, frozenset({0, 1}), avoid=frozenset("c")), Need("2", 2, frozenset({0, 1}))]
    first = place(needs, [*large, *small], nodes, held=held)
    assert said(first) == ["pin 2_2 to c", "release 2_2", "start_now 2_2"] and first.leaving == {"1": [], "2": []}
    small[2] = element("2", 2, "PENDING", reason="Priority")
    assert said(place(needs, [*large, *small], nodes, {("2", 2): Pin("c", 0.0)}, held=held)) == []
    small[2] = element("2", 2, where="c")
    then = place([needs[0], Need("2", 2, frozenset({0, 1, 2}))], [*large, *small], nodes, held=held)
    assert then.actions == [] and then.leaving == {"1": [], "2": [1]}
    last = place([needs[0], Need("2", 2, frozenset({0, 2}))], [*large, *small], nodes, held=held)
    assert said(last) == ["pin 1_2 to e", "release 1_2", "requeue_hold 2_1", "start_now 1_2"]


def test_where_nobody_waits_one_leaves_first_but_never_the_last():
    nodes = [node(name) for name in "abc"]
    short = [element("2", 0, "PENDING", reason="JobHeldAdmin")]
    full = [element("1", 0, where="a"), element("1", 1, where="b")]
    needs = [Need("1", 2, frozenset({0, 1})), Need("2", 1, avoid=frozenset("c"))]
    first = place(needs, [*full, *short], nodes, held={("2", 0)})
    assert first.actions == [] and first.leaving == {"1": [1], "2": []}
    then = place([Need("1", 2, frozenset({0})), needs[1]], [*full, *short], nodes, held={("2", 0)})
    assert said(then) == ["pin 2_0 to b", "release 2_0", "requeue_hold 1_1", "start_now 2_0"]
    alone = place([Need("1", 1, frozenset({0})), needs[1]], [full[0], *short], [nodes[0], nodes[2]], held={("2", 0)})
    assert alone.actions == [] and alone.leaving == {"1": [], "2": []}


def waits(job: str, number: int) -> ElementInfo:
    return element(job, number, "PENDING", reason="JobHeldAdmin", comment="unicron: held")


def exchange(full: Need, where: str, elements: list[ElementInfo], **more) -> Placement:
    """Job 2 is a node short and may not have c; job 1 is full, on the nodes that `where` names."""
    there = [element("1", number, where=name) for number, name in enumerate(where)]
    short = Need("2", 1, **(more or {"avoid": frozenset("c")}))
    nodes = [node(name) for name in "abcd"[: len(where) + 1]]
    return place([full, short], [*there, *elements, waits("2", 0)], nodes, held={("2", 0), ("1", 9)})


@pytest.mark.parametrize("elements", [[], [waits("1", 9)]])
def test_no_job_is_shrunk_below_its_least_for_another(elements):
    """Also where a newcomer is started first: one that trains may leave before it has joined."""
    found = exchange(Need("1", 2, frozenset({0, 1}), least=2), "ab", elements)
    assert found.actions == [] and found.leaving == {"1": [], "2": []}
    found = exchange(Need("1", 2, frozenset({0, 1}), least=1), "ab", elements)
    assert found.leaving["1"] == [1] if not elements else said(found)[0] == "pin 1_9 to c"


def test_who_does_not_train_leaves_for_another_first():
    found = exchange(Need("1", 3, frozenset({1, 2}), least=2), "abd", [])
    assert said(found) == ["pin 2_0 to a", "release 2_0", "requeue_hold 1_0", "start_now 2_0"]
    found = exchange(Need("1", 3, frozenset({1, 2}), least=2), "abd", [], avoid=frozenset("ac"))
    assert found.actions == [] and found.leaving["1"] == [], "of two that train none leaves"


def test_a_free_node_of_no_use_to_anybody_hides_no_other():
    nodes = [node(name) for name in "abcdef"]
    large = [element("1", 0, where="a"), element("1", 1, where="b"), waits("1", 2)]
    small = [element("2", 0, where="d"), element("2", 1, where="e"), waits("2", 2), waits("2", 3)]
    nodes.append(node("g"))
    needs = [Need("1", 3, frozenset({0, 1}), avoid=frozenset("cfg"))]
    needs.append(Need("2", 2, frozenset({0, 1}), avoid=frozenset("c")))
    found = place(needs, [*large, *small], nodes, held={("1", 2), ("2", 2), ("2", 3)})
    assert said(found) == ["pin 2_2 to f", "release 2_2", "start_now 2_2"], "and one exchange is enough"


def test_the_reason_tells_what_is_avoided_from_what_is_out_of_reach(snapshot):
    full = Need("1", 2, frozenset({0, 1}))
    avoided = exchange(full, "ab", [waits("1", 9)]).actions[0].reason
    outside = exchange(full, "ab", [waits("1", 9)], reach=frozenset("ab")).actions[0].reason
    assert [avoided, outside] == snapshot


def test_nodes_of_other_peoples_jobs_are_not_given_out():
    elements = [element("1", 0, where="a"), element("9", 0, where="b")]
    assert usable([node("a"), node("b"), node("c"), node("d", "IDLE", "DRAIN")], elements, ["1"], {"c"}) == ["a"]


def test_an_element_on_a_draining_node_trains_on():
    found = place([Need("1", 0, frozenset({0}))], [element("1", 0, where="a")], [node("a", "MIXED", "DRAIN")])
    assert found.actions == [] and found.leaving["1"] == [] and found.allotted["1"] == [0]


@st.composite
def queues(draw):
    names = [f"n{i}" for i in range(draw(st.integers(1, 6)))]
    free = list(names)
    elements, needs = [], []
    for job in ("1", "2", "3")[: draw(st.integers(1, 3))]:
        members = set()
        for number in range(draw(st.integers(1, 4))):
            state = draw(st.sampled_from(["RUNNING", "PENDING", "HELD", "COMPLETED", "COMPLETING"]))
            if state in ("RUNNING", "COMPLETING") and free:
                elements.append(element(job, number, state, free.pop()))
                if state == "RUNNING" and draw(st.booleans()):
                    members.add(number)
            elif state == "HELD":
                elements.append(element(job, number, "PENDING", reason="JobHeldAdmin", comment="unicron: held"))
            else:
                elements.append(element(job, number, "PENDING" if state != "COMPLETED" else state, reason="Resources"))
        avoid = frozenset(draw(st.lists(st.sampled_from(names), max_size=2)))
        needs.append(Need(job, draw(st.integers(0, 4)), frozenset(members), avoid=avoid))
    nodes = [node(name, *(["IDLE"] if draw(st.integers(0, 4)) else ["DOWN"])) for name in names]
    return needs, elements, nodes


@given(queues())
def test_placement_never_overbooks_and_never_stops_a_member(case):
    needs, elements, nodes = case
    found = place(needs, elements, nodes)
    members = {(need.job, number) for need in needs for number in need.members}
    pinned = [action for action in found.actions if action.action == "pin"]
    assert len({action.node for action in pinned}) == len(pinned), "one element per node"
    assert not [
        a
        for a in found.actions
        if a.action in ("requeue_hold", "requeue", "cancel", "down") and (a.job, a.element) in members
    ]
    given_up = {action.node for action in found.actions if action.action == "requeue_hold"}
    busy = {e.node for e in elements if e.node and e.state in ("RUNNING", "COMPLETING")}
    healthy = {n.name for n in nodes if n.healthy}
    assert all(action.node in healthy and (action.node not in busy or action.node in given_up) for action in pinned)
    for need in needs:
        assert not set(found.allotted[need.job]) & set(found.leaving[need.job])
    assert place(needs, elements, nodes) == found
