"""The agent's loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.loop.agent import Agent
from unicron_ctl.agent.loop.plain_ranks import RestartAgent
from unicron_ctl.agent.ranks.fence import CUT_OFF
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.protocol.reach import Reach, reach


@pytest.fixture(params=[Agent, RestartAgent])
def agent(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent without a controller, whose ranks have not begun."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    place = read_place({"SLURM_JOB_ID": "7", "UNICRON_NODE_ADDRESS": "127.0.0.1"}).in_mode(structs.RESTART, "")
    made = request.param(place, ["true"], "tcp://127.0.0.1:1")
    yield made
    made.close()


def members(union: object) -> set[type]:
    """The classes of a union, those of unions within it included."""
    parts = get_args(union)
    return set().union(*map(members, parts)) if parts else {union}  # type: ignore[arg-type]


def test_each_order_of_the_controllers_has_a_handler(agent: Agent) -> None:
    assert agent._orders.keys() == members(wire.ToAgent)


def test_an_order_reaches_its_part(agent: Agent) -> None:
    agent._on_controller(wire.encode(wire.Grace(seconds=7.5)))
    agent._on_controller(wire.encode(wire.Note(text="healed", at_end=True)))
    assert (agent._ending.notice_seconds, agent._ending.summary) == (7.5, "healed")
    agent._on_controller(wire.encode(wire.End(code=3, reason="stop")))
    assert agent.exit_code == 3


def test_whoever_hears_the_break_shuts_the_door_that_the_plan_may_have_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: an agent that the plan had not reached kept its port open, and others with the plan their processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    place = read_place({"SLURM_JOB_ID": "7", "UNICRON_NODE_ADDRESS": "127.0.0.1"}).in_mode(structs.RESTART, "")
    agent = RestartAgent(place, ["true"], "tcp://127.0.0.1:1")
    try:
        ports = [agent._fence.door.port]
        for generation in (3, 3, 2, 4):
            agent._on_controller(wire.encode(wire.Break(generation=generation, lost=[], reason="")))
            ports.append(agent._fence.door.port)
        at = [reach(f"127.0.0.1:{port}", 1.0) for port in dict.fromkeys(ports)]
        assert len({*ports[1:4]}) == 1 and at == [Reach.REFUSED, Reach.REFUSED, Reach.REACHED]
        assert agent._reports.left == agent._left == 4
        ranks = list(agent.ranks.values())
        for code, ended, said in ((-9, CUT_OFF, CUT_OFF), (1, CUT_OFF, "own"), (-9, "", "own")):
            ranks[0].status.exit = structs.Exit(code=code, at=1.0, lived=1.0, last_line="own")
            agent._fence._ended = ended
            agent._explain(ranks[0])
            assert ranks[0].status.exit.last_line == said, "a kill by the lease is the network's doing"
    finally:
        agent.close()
