"""`inject` at the controller."""

from __future__ import annotations

import re

import pytest

from tests.support.questions import told
from tests.support.world import World
from unicron_ctl.controller.api import answers
from unicron_ctl.shared.protocol import wire


@pytest.fixture
def world():
    made = World(allow_inject=True)
    made.start_job()
    return made


def ask(world: World, **args) -> dict:
    done = told(world.core, "inject", **{"job": "1", **args})
    world.deliver()
    return done


def orders(world: World) -> list[wire.Inject]:
    return [message for _, message in world.sent if isinstance(message, wire.Inject)]


def test_a_fault_goes_to_the_agent_of_the_rank_and_into_the_log(world):
    done = ask(world, fault="slow:2", slot=1, seconds=30.0)
    assert done["slot"] == 1 and done["node"] == "n2" and done["seconds"] == 30.0
    assert [(m.fault, m.slot, m.incarnation, m.seconds) for m in orders(world)] == [("slow:2", 1, 0, 30.0)]
    assert [e.record.fault for e in world.log if e.kind == "injected"] == ["slow:2"]


def test_a_node_or_nothing_may_be_named(world):
    assert ask(world, fault="rank-kill", node="n3")["slot"] == 2
    assert ask(world, fault="rank-kill")["slot"] in (0, 1, 2)


def test_a_dry_run_breaks_nothing(world):
    assert ask(world, fault="rank-kill", slot=0, dry_run=True)["dry_run"] is True
    assert not orders(world) and not [e for e in world.log if e.kind == "injected"]


@pytest.mark.parametrize(
    "args",
    [
        {"fault": "typo"},
        {"fault": "rank-kill", "slot": 9},
        {"fault": "rank-kill", "node": "n9"},
        {"fault": "rank-kill", "slot": "1"},
        {"fault": "rank-kill", "seconds": -1},
        {"fault": "rank-kill", "job": "77"},
    ],
)
def test_what_cannot_be_broken_is_said_in_one_line(world, args, snapshot):
    with pytest.raises(answers.Unanswerable) as caught:
        ask(world, **args)
    said = re.sub("Expected .* at", "Expected ... at", str(caught.value))  # msgspec's own words
    assert said == snapshot and "\n" not in said
    assert not orders(world)


def test_it_is_refused_unless_the_configuration_allows_it(world):
    world.core.config.allow_inject = False
    for dry_run in (False, True):
        with pytest.raises(answers.Unanswerable, match="allow_inject = true"):
            ask(world, fault="rank-kill", slot=0, dry_run=dry_run)
    assert not orders(world)


def test_the_next_sender_of_the_state_is_meant_when_nobody_is_named(world):
    assert ask(world, fault="corrupt-checkpoint")["slot"] == 0
    assert ask(world, fault="corrupt-checkpoint", slot=2)["slot"] == 2
    assert [m.slot for m in orders(world)] == [0, 2]


def test_a_nodes_power_is_not_the_agents_matter(world):
    done = ask(world, fault="lost-node", node="n2")
    assert done["node"] == "n2" and not orders(world)
    assert [e.record.fault for e in world.log if e.kind == "injected"] == ["lost-node"]


def test_what_an_agent_cannot_inject_is_an_event(world, snapshot):
    done = ask(world, fault="oom-kill", slot=1)
    world.to_core(world.agents[1], wire.InjectRefused(job="1", slot=1, fault="oom-kill", reason="it takes root"))
    event = world.log[-1]
    assert event.kind == "inject_refused" and event.id > done["event"]
    assert event.record.reason == snapshot
    world.to_core(world.agents[0], wire.InjectRefused(job="1", slot=1, fault="oom-kill", reason="not my slot"))
    assert world.log[-1] == event
