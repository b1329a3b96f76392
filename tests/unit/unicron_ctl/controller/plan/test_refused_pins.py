"""A pin that Slurm refuses is taken back, the node is out of reach for the job, and people are told just that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.scenarios import element_row as element
from tests.support.scenarios import grow_back, restart_controller, submit
from tests.support.scenarios import labels as said
from tests.support.scenarios import node_row as node
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.cluster_state import Pin
from unicron_ctl.controller.plan.placement import Need, place
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_ctl.shared.slurm import pending_reasons


def _job_without_its_node(nodes: int, unfit: str, **facts: str) -> tuple[World, FakeSlurm, FakeAgent]:
    """A job of two elements of which one has lost its node, where Slurm starts nothing of it on the nodes `unfit`."""
    slurm = FakeSlurm(nodes)
    world = World(slurm, observe=None, partitions={"default": PartitionConfig(mode="act")})
    slurm.unfit = set(unfit.split())
    first, _ = submit(world, "1", 2, **facts)
    world.run(2.0)
    world.dead_nodes.add("n1")
    first.silent = True
    return world, slurm, first


def _pins(slurm: FakeSlurm) -> list[str]:
    return [call[3] for call in slurm.calls if call[0] == "pin" and call[1:3] == ("1", 0)]


def _bounds_text(world: World) -> str:
    return answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY).bounds  # type: ignore[arg-type]


def test_another_node_is_taken_and_the_first_one_is_not_tried_again(snapshot: SnapshotAssertion) -> None:
    """Defect: the element waited for ever for the node that it could not have, while another one was idle."""
    world, slurm, _ = _job_without_its_node(4, "n3")
    world.run(8.0)
    assert slurm.queue["1", 0]["node"] == "n4" and _pins(slurm) == ["n3", "n4"]
    refused = [event.record for event in world.log if event.kind == "unpinned" and event.record.node]
    assert [(record.node, record.said) for record in refused] == [("n3", "BadConstraints")]
    assert [_bounds_text(world), refused[0].reason] == snapshot


def test_what_slurm_says_of_the_node_before_is_no_word_on_the_next_one() -> None:
    """Defect: while scontrol took its time to name n4, the reason that Slurm gave for n3 was held against n4, too."""
    world, slurm, _ = _job_without_its_node(4, "n3")
    own, late = slurm.pin, list[tuple[str, int, str | None]]()
    slurm.pin = lambda *call: late.append(call) if call[2] == "n4" else own(*call)  # type: ignore[method-assign]
    world.run(8.0)
    assert late and world.core.view.refused_nodes(world.job()) == {"n3": "BadConstraints"}
    own(*late[0])
    slurm.schedule()
    world.run(4.0)
    assert slurm.queue["1", 0]["node"] == "n4" and _pins(slurm) == ["n3", "n4"]


@pytest.mark.parametrize("restarted", [False, True])
def test_without_another_node_the_pin_is_taken_back(restarted: bool) -> None:
    world, slurm, _ = _job_without_its_node(3, "n3")
    world.run(8.0)
    if restarted:
        restart_controller(world)
        world.run(4.0)
    assert _pins(slurm) == ["n3", ""] and slurm.queue["1", 0]["pin"] is None
    assert ("1", 0) not in world.core.state.pins and world.core.view.refused_nodes(world.job()) == {
        "n3": "BadConstraints"
    }
    slurm.node_states["n1"], slurm.starts["n1"] = {"IDLE"}, 9e9
    world.dead_nodes.clear()
    before = len(slurm.calls)
    world.run(30.0)
    assert slurm.queue["1", 0]["node"] == "n1", (slurm.calls[before:], slurm.queue["1", 0])
    grow_back(world, count=2, seconds=4.0)
    world.run(0.3)
    assert world.job().phase == "running" and set(world.job().members) == {0, 1}


@pytest.mark.by_hand
def test_it_is_tried_again_after_a_time() -> None:
    world, slurm, _ = _job_without_its_node(3, "n3")
    world.run(8.0)
    slurm.unfit.clear()
    world.core.state.jobs["1"].refused["n3"] = replace(world.core.state.jobs["1"].refused["n3"], until=world.now + 2.0)
    world.run(6.0)
    assert slurm.queue["1", 0]["node"] == "n3"


@pytest.mark.parametrize(
    ("unfit", "refusal", "state", "pins", "refused"),
    [
        pytest.param("n3", "", "IDLE", ["n3", "n4"], {"n3": "no reason"}, id="no reason with several partitions"),
        # Slurm calls a node of 1000 MB busy for --mem-per-cpu=400 --mincpus=3: the pin was set to it again and again.
        pytest.param("n3", "Resources", "IDLE", ["n3", "n4"], {"n3": "Resources"}, id="an idle node lacks nothing"),
        pytest.param("n3", "Resources", "MIXED", ["n3", "n3"], {}, id="a node that is not idle may lack resources"),
        # 22.05 takes the pin of a held element that asks for more time than its partition allows, then says so.
        pytest.param("n3 n4", "PartitionTimeLimit", "IDLE", ["n3", ""], {}, id="beyond its partition's limit"),
    ],
)
def test_what_a_refusal_says_of_the_node(unfit: str, refusal: str, state: str, pins: list[str], refused: dict) -> None:
    world, slurm, _ = _job_without_its_node(4, unfit, **({} if refusal else {"partition": "main,other"}))
    slurm.refusal, slurm.node_states["n3"] = refusal, {state}
    world.run(20.0)
    if refusal == "Resources" and state == "IDLE":
        assert _pins(slurm) == ["n3"], "it may be busy for a moment"
    world.run(25.0)
    assert _pins(slurm) == pins and world.core.view.refused_nodes(world.job()) == refused
    assert slurm.queue["1", 0]["node"] == ("n4" if "n4" in pins else None)


@pytest.mark.parametrize(
    ("reason", "seconds"),
    [
        ("BadConstraints", 3600.0),
        ("ReqNodeNotAvail, UnavailableNodes:n3", 30.0),
        ("ReqNodeNotAvail, May be reserved for other job", 30.0),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", 30.0),
        ("Resources", 0.0),
        ("None", 0.0),
        ("", 0.0),
    ],
)
def test_how_long_slurms_answer_counts(reason: str, seconds: float) -> None:
    assert pending_reasons.refusal_seconds(reason) == seconds


def test_of_an_element_that_must_start_somewhere_slurms_answer_is_about_that_node(snapshot: SnapshotAssertion) -> None:
    """Defect: "no node is what it asks for" was said of a pin of ours."""
    one = element("1", 0, "PENDING", reason="BadConstraints")
    pinned = replace(one, required_nodes=frozenset({"n3"}))
    assert [pending_reasons.explain_pending(item, 0.0) for item in (one, pinned)] == snapshot


@pytest.mark.parametrize(
    ("reason", "refused", "desired", "actions"),
    [
        ("BadConstraints", "a", 1, ["pin 1_0 to b", "start_now 1_0"]),
        ("BadConstraints", "ab", 1, ["unpin 1_0"]),
        ("BadConstraints", "a", 0, ["hold 1_0", "unpin 1_0"]),
        ("Licenses", "", 1, ["unpin 1_0"]),  # Slurm starts it when it can, and that may be elsewhere
        ("JobHeldAdmin", "", 0, ["unpin 1_0"]),  # it was held since: whoever releases it is not bound to the node
        ("Resources", "", 1, []),
    ],
)
def test_what_becomes_of_a_pin(reason: str, refused: str, desired: int, actions: list[str]) -> None:
    need = Need("1", desired, refused=frozenset(refused))
    pins = {("1", 0): Pin("a", 9.0)}
    listed = [element("1", 0, "PENDING", reason=reason)]
    found = place([need], listed, [node("a"), node("b")], pins, now=10.0, held={("1", 0)})
    assert said(found) == actions and found.unpinned == []
