"""Filters choose among what the asker sees anyway, and tell nobody more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.questions import told
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers, filters
from unicron_ctl.controller.model.asker import NOBODY, Asker
from unicron_ctl.shared.log import naming, records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Store

ANN, BOB, ZOE = Asker(1000, "ann"), Asker(1001, "bob"), Asker(1002, "zoe")
ROOT = Asker(0, "root", admin=True)
Site = tuple[World, Store]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Ann's job on n1 and n2, bob's on n3; n4 is idle. Ann's rank on n2 dies; n4 was lost once."""
    world = World(FakeSlurm(4))
    world.slurm.node_facts["n3"] = {"partitions": ("main", "other")}
    agents = {}
    for job, uid, user, partition, names in (
        ("1", 1000, "ann", "main", ["n1", "n2"]),
        ("2", 1001, "bob", "other", ["n3"]),
    ):
        world.slurm.submit(job, len(names), uid=uid, user=user, partition=partition)
        for element, name in enumerate(names):
            agents[name] = FakeAgent(world, job, element, name, nodes=len(names))
            agents[name].settings.user = user
            agents[name].register()
            agents[name].ready()
    world.run(3.0)
    agents["n2"].die(1, 1, last_line="RuntimeError: x")
    world.run(2.0)
    world.core.append("", 0, records.NodeLost(node="n4", element=0, reason="n4 is lost"))
    store = Store(tmp_path / "events.sqlite")
    store.append(world.log + world.core.events)
    yield world, store
    store.close()


def ask(site: Site, what: str, asker: Asker = ROOT, **args: Any) -> Any:
    return told(site[0].core, what, asker, site[1], **args)


def jobs(site: Site, asker: Asker = ROOT, **args: Any) -> list[str]:
    return [job["job"] for job in ask(site, "jobs", asker, **args)]


def nodes(site: Site, asker: Asker = ROOT, **args: Any) -> list[str]:
    return [node["node"] for node in ask(site, "nodes", asker, **args)]


def test_a_wrong_name_is_compared_with_few_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    known = {f"gpu-{number:05}" for number in range(16384)}
    assert [filters.near(word, known, "nodes") for word in ("gpu-100000", "zzz")] == snapshot
    looked: list[int] = []
    monkeypatch.setattr(filters.difflib, "get_close_matches", lambda word, names, most: looked.append(len(names)) or [])
    for word in ("", "gpu-99999", "gpu-08000", "zzz", "x" * 5000):
        filters.near(word, known, "nodes")
    assert max(looked) <= filters.MOST_COMPARED
    filters.near("b", {"a", "c"}, "nodes")
    assert looked[-1] == 2


def test_an_admin_chooses_jobs_nodes_and_failures(site: Site) -> None:
    assert jobs(site) == ["1", "2"] and nodes(site) == ["n1", "n2", "n3", "n4"]
    assert jobs(site, user="bob") == ["2"] and jobs(site, nodes="n[2,4]") == ["1"] and jobs(site, nodes="n4") == []
    assert jobs(site, partition="other") == ["2"] and jobs(site, user="ann", partition="other") == []
    assert nodes(site, user="ann") == ["n1", "n2"] and nodes(site, nodes="n[3-4]") == ["n3", "n4"]
    assert nodes(site, partition="main") == ["n1", "n2", "n3", "n4"]
    shown = ask(site, "status", nodes="n2")
    assert [job["job"] for job in shown["jobs"]] == ["1"] and [node["node"] for node in shown["nodes"]] == ["n2"]
    assert {failure["node"] for failure in shown["failures"]} == {"n2"}
    assert ask(site, "status", user="bob")["failures"] == [] == ask(site, "status", since=site[0].now + 9)["failures"]


def test_jobs_that_have_run_since(site: Site) -> None:
    world = site[0]
    world.core.append("2", 1, records.JobEnded(code=0))
    ended = world.core.state.jobs["2"].ended
    assert ended and jobs(site, since=ended.time) == ["1", "2"] and jobs(site, since=ended.time + 1.0) == ["1"]


def test_what_needs_an_admin_is_never_filtered(site: Site) -> None:
    world = site[0]
    world.core.append("1", 1, records.IsolationWithheld(node="n2", slots=[], reason="n2: 4 nodes are out already"))
    whole = ask(site, "status")["attention"]
    assert whole and ask(site, "status", user="bob", nodes="n4")["attention"] == whole


def test_events_that_are_chosen(site: Site) -> None:
    def seen(asker: Asker = ROOT, **args: Any) -> set[tuple[str, str]]:
        return {(event["job"], event["kind"]) for event in ask(site, "events", asker, limit=5000, **args)}

    everything = seen()
    assert seen(user="ann") == {one for one in everything if one[0] == "1"}
    assert seen(partition="other") == {one for one in everything if one[0] == "2"}
    assert seen(nodes="n4") == {("", "node_lost")} == seen(kinds="node_lost")
    assert ("", "node_lost") in seen(partition="main") and seen(partition="other", nodes="n4") == set()
    assert ("1", "failure_detected") in seen(nodes="n2") and not any(one[0] == "2" for one in seen(nodes="n2"))
    assert seen(ANN, nodes="n2") == {one for one in seen(nodes="n2") if one[0] == "1"}
    assert seen(ANN, kinds="node_lost") == set() == seen(BOB, nodes="n2") == seen(BOB, partition="main")


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "user": ("", "ann", "bob", "nobody-is-called-so"),
    "partition": ("", "other", "no-such"),
    "nodes": ("", "n2", "n[1-4]", "x9"),
    "kinds": ("", "failure_detected"),
}


@pytest.mark.parametrize("asker", [BOB, NOBODY], ids=str)
@pytest.mark.parametrize(
    "private", [frozenset(), frozenset({"jobs"}), frozenset({"nodes"}), frozenset({"jobs", "nodes"})]
)
def test_with_every_filter_a_stranger_sees_a_part_of_what_he_sees_without(
    site: Site, asker: Asker, private: frozenset[str]
) -> None:
    """And what is refused is the same whether or not there is something that he may not see."""
    site[0].core.view.slurm.private = private
    whole = {what: ask(site, what, asker) for what in ("jobs", "nodes", "events")}
    visible = {"user": {"ann", "bob"} if "jobs" not in private else {"bob"} if asker is BOB else set()}
    visible["nodes"] = {"n1", "n2", "n3", "n4"} if "nodes" not in private else {"n3"} if asker is BOB else set()
    for values in itertools.product(*ARGUMENTS.values()):
        args = dict(zip(ARGUMENTS, values, strict=True))
        for what, everything in whole.items():
            chosen = {name: value for name, value in args.items() if name != "kinds" or what == "events"}
            try:
                found = ask(site, what, asker, **chosen)
            except answers.Unanswerable as error:
                said = str(error)
                for name in ("ann", "bob", "zoe"):
                    if name not in visible["user"]:
                        assert name not in said.replace(repr(args["user"]), "").replace(
                            f"{args['user']}'s", ""
                        ).replace(str(asker), ""), said
                for name in ("n1", "n2", "n3", "n4"):
                    assert name in visible["nodes"] or name not in said.replace(repr(name), ""), said
            else:
                assert all(item in everything for item in found)


@pytest.mark.parametrize("asker", [ZOE, NOBODY], ids=str)
def test_a_hidden_user_and_one_who_has_no_job_are_refused_in_the_same_words(site: Site, asker: Asker) -> None:
    site[0].core.view.slurm.private = frozenset({"jobs", "nodes"})
    for what, name, hidden, strange in (
        *((what, "user", "ann", "zed") for what in ("jobs", "nodes", "status", "events")),
        *((what, "nodes", "n1", "z1") for what in ("jobs", "nodes", "status", "events")),
    ):
        said = []
        for value in (hidden, strange):
            with pytest.raises(answers.Unanswerable) as refused:
                ask(site, what, asker, **{name: value})
            said.append(str(refused.value).replace(value, "IT"))
        assert said[0] == said[1]


def test_of_anothers_job_it_is_said_who_may_read_its_events(site: Site, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(answers.Unanswerable) as refused:
        ask(site, "events", BOB, user="ann")
    assert str(refused.value) == snapshot
    assert ask(site, "events", ROOT, user="ann", partition="other") == []


@pytest.mark.parametrize(
    "args", [{"user": "x" * 300}, {"nodes": "n" * 70000}, {"since": -1.0}, {"nodes": "n[0-99999999]"}]
)
def test_what_is_too_large_is_refused(site: Site, args: dict[str, Any]) -> None:
    for what in ("jobs", "nodes", "status", "events"):
        with pytest.raises(answers.Unanswerable):
            ask(site, what, **args)


def test_an_ended_jobs_partition_is_that_of_its_nodes_for_those_who_may_know(site: Site) -> None:
    world = site[0]
    world.core.append("2", 1, records.JobEnded(code=0))
    del world.slurm.queue["2", 0]
    world.run(3.0)
    (mine,) = (job for job in ask(site, "jobs", BOB) if job["job"] == "2")
    (his,) = (job for job in ask(site, "jobs", ZOE) if job["job"] == "2")
    assert (mine["partitions"], his["partitions"]) == (["main", "other"], [])


def test_which_records_name_a_node() -> None:
    culprit = records.HangCulprit(slot=1, node="n2", phase="backward")
    assert naming.nodes_of(records.Hang(iteration=1, seconds=2.0, culprits=[culprit])) == ["n2"]
    assert naming.nodes_of(records.NodeLost(node="n1", element=0)) == ["n1"]
    assert naming.nodes_of(records.NoCopies(nodes=["n1", "n2"], places=[0])) == ["n1", "n2"]
    assert naming.nodes_of(records.ActionObserved(would="drain", nodes=3)) == [], "there it is a number"
    assert "step" not in naming.KINDS_WITH_NODES and "most_silent" not in naming.KINDS_WITH_NODES


def test_since_is_found_by_halving(tmp_path: Path) -> None:
    store = Store(tmp_path / "events.sqlite")
    assert store._first_since(5.0) == 0
    store.append([Event(n, 10.0 * n, "1", 0, records.WorldProved()) for n in range(1, 2000, 3)])
    for at in (1.0, 10.0, 11.0, 5000.0, 19970.0, 19990.0, 1e9):
        expected = next((n for n in range(1, 2000, 3) if 10.0 * n >= at), None)
        found = store._first_since(at)
        assert (found <= expected and found > expected - 3) if expected else found > 1997
