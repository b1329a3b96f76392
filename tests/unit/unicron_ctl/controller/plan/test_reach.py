"""Nodes on which Slurm would start an element: partitions, GRES, features, reservations, and rivals in the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.controller.model.view import Listing
from unicron_ctl.controller.plan import eligible_nodes
from unicron_ctl.controller.plan.eligible_nodes import RIVALS, Ground, has_features, has_gres, misfit, one_for_all
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, Needs, NodeInfo, PartitionInfo, Reservation, Size

NODE = NodeInfo("n1", frozenset({"IDLE"}), "", "", 1, 1.0, 8, ("gpu", "all"), frozenset({"a100", "ib"}), "gpu:a100:8")
ASK = ElementInfo(
    "1", 0, "1", "PENDING", None, "", "", "", "", 0, partition="gpu", gres="gpu:8", priority=5, time_limit=3600.0
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"partition": "cpu"}, "not in partition cpu"),
        ({"partition": "cpu,all"}, ""),
        ({"gres": "gpu:h100:1"}, "without gpu:h100:1"),
        ({"gres": "gpu:16"}, "without gpu:16"),
        ({"features": "a100&ib"}, ""),
        ({"features": "h100"}, "without the features h100"),
        ({"reservation": "night"}, "not in reservation night"),
    ],
)
def test_what_slurm_looks_at(changes: dict[str, str], why: str) -> None:
    assert misfit(replace(ASK, **changes), NODE, 1000.0) == why


def test_a_reserved_node_is_out_of_reach_unless_the_element_ends_before_or_has_the_reservation() -> None:
    later = replace(NODE, reservations=(Reservation("night", 5000.0, 9000.0),))
    assert misfit(ASK, later, 1000.0) == ""
    assert misfit(ASK, later, 2000.0) == "reserved (night)"
    assert misfit(replace(ASK, time_limit=None), later, 1000.0) == "reserved (night)"
    assert misfit(ASK, later, 9000.0) == ""
    assert misfit(replace(ASK, reservation="night"), later, 2000.0) == ""


@pytest.mark.parametrize(
    ("asked", "there", "fits"),
    [
        ("", "", True),
        ("gpu", "gpu:1", True),
        ("gpu:4", "gpu:a100:8", True),
        ("gpu:a100:4", "gpu:8", False),
        ("gpu:2,nic:1", "gpu:2", False),
        ("gpu:a100:4,gpu:h100:1", "gpu:a100:4,gpu:h100:4", True),
        ("gpu:5", "gpu:a100:4,gpu:h100:4", True),
        ("shard:1k", "shard:1024", True),
        ("gpu:8", "", False),
    ],
)
def test_gres(asked: str, there: str, fits: bool) -> None:
    assert has_gres(asked, there) is fits


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ("a", True),
        ("c", False),
        ("a&b", True),
        ("a&c", False),
        ("c|b", True),
        ("a|b&c", False),  # from the left, as sbatch(1) says
        ("a|(b&c)", True),
        ("[c|b]", True),
        ("[a*2&c*1]", True),  # seen with 22.05 and 26.05: some nodes with a, one with c
        ("[c*2&d*1]", False),
        ("[(a&c)*1&d*2]", False),
        ("[(a&b)*1&c*2]", True),
        ("a*4", True),
        ("(a|c)&b", True),
        ("a,b", True),
        ("a&", False),
        ("(a", False),
        ("a b&…", False),
        ("a)", False),
    ],
)
def test_features(constraint: str, fits: bool) -> None:
    assert has_features(constraint, {"a", "b"}) is fits


@pytest.mark.parametrize(
    ("constraint", "nodes", "fits"),
    [
        ("[a*1&b*1]", 1, False),  # seen in all releases: one node is not counted twice
        ("[a*1&b*1]", 2, True),
        ("a*2", 1, False),
        ("a*1", 1, True),  # it starts where Slurm would have put it; else the pin is taken back
        ("[(a&b)*1&a*2]", 2, False),
        ("[(a&b)*1&a*2]", 3, True),
        ("[(a&b)|c]", 1, True),
    ],
)
def test_counts_of_features_are_of_different_nodes(constraint: str, nodes: int, fits: bool) -> None:
    ask = replace(ASK, features=constraint, asked=Needs(nodes=nodes, cpus_in_all=nodes))
    node = replace(NODE, features=frozenset({"a", "b"}))
    assert (misfit(ask, node, 0.0) == "") is fits
    assert misfit(replace(ask, asked=Needs()), node, 0.0) == "", "how many nodes it is to have was not said"


@given(st.text("ab()[]&|*2, …", max_size=12))
def test_no_constraint_is_an_error(text: str) -> None:
    assert has_features(text, {"a"}) in (True, False)
    assert all(has_features(choice, {"a"}) in (True, False) for choice in one_for_all(text))


def _ground(*rivals: ElementInfo, nodes: int = 3) -> Ground:
    listed = [replace(NODE, name=f"n{number}") for number in range(1, nodes + 1)]
    return Ground(Listing(0.0, listed, [ASK, *rivals]), {"1"}, 1000.0)


def _reach(ground: Ground, *occupied: str) -> list[str]:
    return sorted(ground.reach([ASK], {"n1", "n2", "n3"}, occupied).nodes)


RIVAL = replace(ASK, job="9", priority=6, reason="Resources")


@pytest.mark.parametrize(
    ("rival", "left"),
    [
        (RIVAL, ["n1"]),
        (replace(RIVAL, planned_nodes=frozenset({"n3"})), ["n1", "n2"]),
        (replace(RIVAL, planned_nodes=frozenset({"n3"}), starts=1000.0 + 3600.0), ["n1", "n2", "n3"]),
        (replace(RIVAL, planned_nodes=frozenset({"n3"}), starts=1000.0 + 3599.0), ["n1", "n2"]),
        (replace(RIVAL, priority=5), ["n1", "n2", "n3"]),
        (replace(RIVAL, reason="Dependency"), ["n1", "n2", "n3"]),
        (replace(RIVAL, reason="JobHeldUser"), ["n1", "n2", "n3"]),
        (replace(RIVAL, state="RUNNING", node="n7"), ["n1", "n2", "n3"]),
        (replace(RIVAL, gres="gpu:h100:8"), ["n1", "n2", "n3"]),
        (replace(RIVAL, excluded_nodes=frozenset({"n2"})), ["n1", "n2"]),
    ],
)
def test_a_pending_job_of_higher_priority_keeps_the_nodes_that_it_may_get(rival: ElementInfo, left: list[str]) -> None:
    """n1 is the job's own and stays so."""
    assert _reach(_ground(rival), "n1") == left


def test_why_nodes_are_out_of_reach_is_counted(snapshot: SnapshotAssertion) -> None:
    ask = replace(ASK, excluded_nodes=frozenset({"n2"}))
    found = _ground(replace(RIVAL, planned_nodes=frozenset({"n3"}))).reach([ask], {"n1", "n2", "n3"}, ())
    assert found.barred == snapshot
    assert found.asks == "partition gpu, gpu:8" and found.peak == 8 * 312e12


RIVALS_OF_ANY_KIND = st.builds(
    lambda job, priority, gres, excluded, planned, starts: replace(
        RIVAL,
        job=str(job),
        priority=priority,
        gres=gres,
        excluded_nodes=excluded,
        planned_nodes=planned,
        starts=starts,
    ),
    st.integers(2, 99),
    st.integers(3, 9),
    st.sampled_from(["gpu:8", "gpu:h100:8"]),
    *[st.frozensets(st.sampled_from(["n1", "n2", "n3"]), max_size=2)] * 2,
    st.none() | st.sampled_from([1000.0, 4000.0, 4600.0, 9000.0]),
)


@given(st.lists(RIVALS_OF_ANY_KIND, max_size=8))
def test_what_rivals_want_is_what_each_alone_wants(rivals: list[ElementInfo]) -> None:
    lost = {name for rival in rivals for name in {"n1", "n2", "n3"} - set(_reach(_ground(rival)))}
    assert _reach(_ground(*rivals)) == sorted({"n1", "n2", "n3"} - lost)


def _of_many_kinds(count: int, **more: object) -> list[ElementInfo]:
    return [replace(RIVAL, job=str(100 + k), gres="gpu:16", time_limit=60.0 * k, **more) for k in range(count)]


def test_only_so_many_kinds_of_pending_elements_are_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever submits jobs of ever other kinds cannot make it take ever longer."""
    looked = []
    monkeypatch.setattr(eligible_nodes, "misfit", lambda *of: looked.append(of) or misfit(*of))
    ground = _ground(*_of_many_kinds(10 * RIVALS))
    assert len(looked) == RIVALS
    assert _reach(ground, "n1") == ["n1"], "beyond, all nodes of their partition count as wanted"
    assert _reach(_ground(*_of_many_kinds(RIVALS)), "n1") == ["n1", "n2", "n3"], "none has so many GPUs"
    assert _reach(_ground(*_of_many_kinds(10 * RIVALS, partition="cpu")), "n1") == ["n1", "n2", "n3"]


def test_the_most_urgent_are_looked_at_first() -> None:
    rivals = [replace(e, priority=4) for e in _of_many_kinds(2 * RIVALS)]
    assert _reach(_ground(*rivals, replace(RIVAL, excluded_nodes=frozenset({"n2"})))) == ["n2"]


SIZED_NODE = replace(NODE, size=Size(cpus=8, sockets=2, cores=2, threads=2, memory=4000, to_give=3500, tmp=100))


@pytest.mark.parametrize(
    ("asked", "fewer_than"),
    [
        (Needs(cpus=8, memory=3500, in_all=3500, tmp=100, sockets=2, cores=2, threads=2), ""),
        (Needs(cpus=9), "9 CPUs"),
        (Needs(cpus=5, threads=1), "5 CPUs"),  # --hint=nomultithread: four cores
        (Needs(cpus=4, threads=1), ""),
        (Needs(tasks=5, tasks_per_core=1), "5 cores"),
        (Needs(tasks=5, tasks_per_socket=2), "3 sockets"),
        (Needs(tasks=1, tasks_per_socket=5), "5 CPUs a socket"),  # seen in all releases
        (Needs(tasks=1, tasks_per_core=4, room=4), ""),
        (Needs(tasks=2, tasks_per_core=8, room=8), ""),  # seen: of the node, and not of a socket
        (Needs(tasks=1, tasks_per_core=9, room=9), "9 CPUs"),
        (Needs(tasks=1, tasks_per_socket=3, room=3, cpus_per_task=3), "9 CPUs"),
        (
            Needs(tasks=3, cpus=3, tasks_per_socket=1),
            "",
        ),  # 22.05 starts it: a core of each socket has two threads
        (Needs(tasks=5, cpus=5, tasks_per_socket=1), "3 sockets"),
        (Needs(tasks=3, cpus=6, tasks_per_socket=1, cpus_per_task=2), "3 sockets"),
        (Needs(sockets=3), "3 sockets"),
        (Needs(cores=3), "3 cores a socket"),
        (Needs(threads=4), "4 threads a core"),
        (Needs(memory=3501), "3501 MB of memory"),
        (
            Needs(cpus=3, memory=900, in_all=2700, per_cpu=900),
            "3600 MB of memory",
        ),  # of whole cores
        (Needs(cpus=3, memory=900, in_all=2700, per_cpu=900, threads=1), ""),
        (
            Needs(cpus=2, tasks=2, memory=900, in_all=1800, per_cpu=900, tasks_per_core=1),
            "3600 MB of memory",
        ),
        (Needs(cpus=2, memory=900, in_all=1800, per_cpu=900, tasks_per_core=1, cpus_per_task=2), ""),
        (Needs(cpus=2, memory=900, in_all=1800, per_cpu=900, tasks_per_core=2), ""),
        (Needs(tmp=101), "101 MB of local disk"),
    ],
)
def test_a_node_is_large_enough(asked: Needs, fewer_than: str) -> None:
    why = f"with fewer than {fewer_than}" if fewer_than else ""
    assert misfit(replace(ASK, asked=asked), SIZED_NODE, 1000.0) == why
    assert misfit(replace(ASK, asked=asked), NODE, 1000.0) == "", "a size that Slurm did not say bars nothing"


def test_where_slurm_deals_out_no_memory_only_the_nodes_own_counts(snapshot: SnapshotAssertion) -> None:
    """Seen in all releases with CR_Core: 4 CPUs of 300 MB each start on a node of 1000 MB, 1500 MB for it do not."""
    node = replace(SIZED_NODE, size=replace(SIZED_NODE.size, memory=1000, to_give=None))
    assert misfit(replace(ASK, asked=Needs(cpus=4, memory=300, in_all=1200, per_cpu=300)), node, 0.0) == ""
    assert misfit(replace(ASK, asked=Needs(memory=1500, in_all=1500)), node, 0.0) == snapshot


@pytest.mark.parametrize(
    ("partition", "limits", "allows"),
    [
        ("gpu", {"max_seconds": 60.0}, True),  # Slurm says it of the whole job, and a QOS may allow it
        ("gpu,other", {"max_seconds": 60.0}, False),
        ("gpu,all", {"max_seconds": 60.0}, True),  # by the other one it may come there
        ("gpu,other", {"max_seconds": 3600.0}, True),
        ("gpu,other", {"max_nodes": 1.0}, False),
        ("gpu,other", {"min_nodes": 3.0}, False),
        ("gpu,other", {"max_memory": 999.0}, False),
        ("gpu", {"max_cpus": 3.0}, True),  # those two nodes may share them
    ],
)
def test_a_partition_allows_it(partition: str, limits: dict[str, float], allows: bool) -> None:
    node = replace(NODE, limits=(PartitionInfo("gpu", 9, "UP", **limits),))
    ask = replace(ASK, partition=partition, asked=Needs(nodes=2, cpus=4, memory=1000, in_all=1000))
    assert misfit(ask, node, 0.0).rpartition(" ")[2] == ("" if allows else partition)


def test_of_too_many_cpus_for_a_partition_slurm_gives_no_reason_of_its_own(snapshot: SnapshotAssertion) -> None:
    node = replace(NODE, limits=(PartitionInfo("gpu", 9, "UP", max_cpus=3.0),))
    assert misfit(replace(ASK, asked=Needs(cpus=4, cpus_in_all=4)), node, 0.0) == snapshot
    assert misfit(replace(ASK, asked=Needs(cpus=4, cpus_in_all=1)), node, 0.0) == "", "--mincpus does not count"


def test_a_pending_job_that_must_have_nodes_gets_no_others() -> None:
    assert _reach(_ground(replace(RIVAL, required_nodes=frozenset({"n3"})))) == ["n1", "n2"]
    two = replace(RIVAL, required_nodes=frozenset({"n3"}), asked=Needs(nodes=2))
    assert _reach(_ground(two), "n1") == ["n1"], "one more, and that may be any"


def _component(slurm_id: int, nodes: int, **more: object) -> ElementInfo:
    return replace(RIVAL, job=str(slurm_id), hetero="9", asked=Needs(nodes=nodes), **more)


@pytest.mark.parametrize(
    ("components", "left"),
    [
        ([_component(9, 2), _component(10, 2)], ["n1", "n2", "n3"]),  # four of three nodes
        ([_component(9, 1), _component(10, 2)], []),
        ([_component(9, 1), _component(10, 1, gres="gpu:h100:8")], ["n1", "n2", "n3"]),
        ([_component(9, 1), replace(_component(10, 3), hetero="10")], []),
        ([_component(9, 2, planned_nodes=frozenset({"n1"})), _component(10, 2)], ["n2", "n3"]),  # as Slurm does
        ([_component(9 + number, 1) for number in range(17)], []),  # more than are looked at
    ],
)
def test_a_heterogeneous_job_wants_nodes_as_a_whole(components: list[ElementInfo], left: list[str]) -> None:
    """Defect: each of its components fitted by itself, so that a job that can never start kept all nodes idle."""
    assert _reach(_ground(*components)) == left


def _choice(features: str, nodes: int, **more: object) -> ElementInfo:
    return replace(RIVAL, features=features, asked=Needs(nodes=nodes, cpus_in_all=nodes), **more)


def _by_features(ask: ElementInfo) -> Ground:
    """Two nodes with a, one with b, one with c; all but the last have x."""
    features = ({"a", "x"}, {"a", "x"}, {"b", "x"}, {"c"})
    listed = [replace(NODE, name=f"n{n}", features=frozenset(has)) for n, has in enumerate(features, start=1)]
    return Ground(Listing(0.0, listed, [ASK, ask]), {"1"}, 1000.0)


# Seen with 22.05: docs/behaviour/squeue-formats.md.
CHOICES = [
    (_choice("[a|b|c]", 2), ["n1", "n2"]),
    (_choice("[c|b|a]", 1), ["n1", "n2", "n3", "n4"]),
    (_choice("a|b|c", 2), ["n1", "n2", "n3", "n4"]),
    (_choice("x&[a|b]", 2), ["n1", "n2"]),
    (_choice("[x|c]", 2), ["n1", "n2", "n3"]),
    (_choice("[(a&x)|c]", 2), ["n1", "n2"]),
    (_choice("[a|b|c]", 2, excluded_nodes=frozenset({"n1"})), []),
    (_choice("[a|b|c]", 3), []),
    (_choice("[a*1&b*1]", 2), ["n1", "n2", "n3"]),
    (
        _choice("[" + "|".join(["a", "b", *(f"d{n}" for n in range(15))]) + "]", 2),
        ["n1", "n2", "n3"],
    ),  # too many choices
]


@pytest.mark.parametrize(("asks", "where"), CHOICES)
def test_of_a_choice_in_brackets_all_nodes_have_the_same(asks: ElementInfo, where: list[str]) -> None:
    """Defect: each node was looked at by itself, so that nodes which such a job can never get stayed idle."""
    everywhere = {"n1", "n2", "n3", "n4"}
    own = replace(asks, job="1", priority=7)
    assert _by_features(asks).reach([ASK], everywhere, ()).nodes == everywhere - set(where)
    assert _by_features(asks).reach([own], everywhere, ()).nodes == set(where)


def test_a_reach_says_that_too_few_nodes_have_the_same_feature(snapshot: SnapshotAssertion) -> None:
    own = replace(_choice("[a|b|c]", 2), job="1")
    barred = _by_features(own).reach([own], {"n1", "n2", "n3", "n4"}, ()).barred
    assert barred == snapshot


def test_a_choice_in_one_component_of_a_heterogeneous_job_counts_for_the_whole() -> None:
    parts = [_choice("[b|c]", 2, hetero="9"), replace(_choice("a", 1, hetero="9"), job="10")]
    listed = [replace(NODE, name=f"n{n}", features=frozenset(has)) for n, has in enumerate(["a", "b", "c"], start=1)]
    ground = Ground(Listing(0.0, listed, [ASK, *parts]), {"1"}, 1000.0)
    assert _reach(ground) == ["n1", "n2", "n3"]


def test_nodes_that_slurm_has_refused_are_out_of_reach() -> None:
    found = _ground().reach([ASK], {"n1", "n2", "n3"}, (), {"n2": "BadConstraints"})
    assert found.nodes == {"n1", "n3"} and found.barred == {"refused by Slurm (BadConstraints)": 1}
