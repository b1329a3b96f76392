"""The controller's decisions with a Slurm: lost nodes, spares, nodes that come back, elements held and released."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.scenarios import arrays, boundary, follow, grow_back, power_off, ready, start
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.plan import inputs
from unicron_ctl.controller.plan.eligible_nodes import Ground
from unicron_ctl.controller.plan.slurm_actions import RETRY_SECONDS
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm.slurm_client import MOST_CHARACTERS, SlurmError


def test_a_lost_node_is_set_down_and_its_element_goes_to_the_spare(snapshot):
    world, slurm = arrays(4, ("1", 3, 1.0))
    assert world.job().phase == "running" and len(world.job().members) == 3
    power_off(world, "n2")
    world.run(3.0)
    assert slurm.reasons["n2"] == snapshot
    assert ("pin", "1", 1, "n4") in slurm.calls
    assert slurm.queue["1", 1]["node"] == "n4"
    assert world.job().plan.members == [0, 2], "the survivors did not wait for Slurm"
    grow_back(world, seconds=0.6)
    assert sorted(world.job().members) == [0, 1, 2]
    failure = world.job().failures[-1]
    assert failure.record.severity == 1 and failure.restored_at and len(failure.actions) == 2


def test_without_a_spare_the_plan_moves_a_node_from_the_lighter_job():
    world, slurm = arrays(4, ("1", 2, 2.0), ("2", 2, 1.0))
    for _ in range(3):
        world.iterate("1", world.job("1").iteration + 1)
        world.iterate("2", world.job("2").iteration + 1)
    world.run(2.0)
    assert world.core.state.assignment == {"1": 2, "2": 2}
    power_off(world, "n1")
    world.run(3.5)
    assert world.core.state.assignment == {"1": 2, "2": 1}
    assert world.job("2").phase == "offering" and world.job("2").leaving == [1]
    assert slurm.queue["2", 1]["state"] == "RUNNING", "it trains until the boundary"
    boundary(world, 2.0)
    assert slurm.queue["2", 1]["reason"] == "job requeued in held state" and slurm.queue["2", 1][
        "admin_comment"
    ].startswith("unicron")
    assert slurm.queue["1", 0]["state"] == "RUNNING" and slurm.queue["1", 0]["node"] == "n4"
    order = [call[0] for call in slurm.calls if call[1] in ("1", "2")][-3:]
    assert order == ["pin", "requeue_hold", "start_now"]
    assert sorted(world.job("2").members) == [0] and world.job("2").phase == "running"


def test_a_repaired_node_is_resumed_and_given_to_the_job_that_is_short():
    world, slurm = arrays(3, ("1", 3, 1.0))
    power_off(world, "n2")
    world.run(3.0)
    assert slurm.queue["1", 1]["state"] == "PENDING"
    world.dead_nodes.clear()
    slurm.starts["n2"] = world.now
    world.run(3.0)
    assert ("resume", "", -1, "n2") in slurm.calls and slurm.queue["1", 1]["node"] == "n2"
    assert not world.core.state.nodes["n2"].downed


def test_a_node_that_others_drained_is_left_alone():
    world, slurm = arrays(3, ("1", 3, 1.0))
    slurm.node_states["n2"], slurm.reasons["n2"] = {"IDLE", "DRAIN"}, "bad fan"
    world.run(2.0)
    power_off(world, "n2")
    world.run(3.0)
    assert slurm.reasons["n2"] == "bad fan" and not [c for c in slurm.calls if c[0] in ("down", "resume")]
    assert any("left as it is" in text for text in world.job().failures[-1].actions)


def test_an_agent_that_died_alone_has_its_element_started_again_in_place():
    world, slurm = arrays(3, ("1", 3, 1.0))
    agent = next(a for a in world.agents if a.element == 1)
    agent.silent = True
    world.run(4.0)
    assert ("requeue", "1", 1, "n2") in slurm.calls and not [c for c in slurm.calls if c[0] == "down"]
    assert slurm.queue["1", 1]["state"] == "RUNNING" and slurm.queue["1", 1]["node"] == "n2"
    assert world.job().failures[-1].record.severity == 2


def test_no_answer_of_slurm_is_never_read_as_clean():
    world, slurm = arrays(3, ("1", 3, 1.0))
    slurm.refuse = "squeue: no answer"
    before = len(slurm.calls)
    world.run(6.0)
    power_off(world, "n3")
    world.run(5.0)
    assert world.job().plan.members == [0, 1], "training goes on without Slurm"
    assert [c for c in slurm.calls[before:] if c[0] != "down"] == []
    assert [e.record.reason for e in world.log if e.kind == "slurm_error"] == ["squeue: no answer"]
    slurm.refuse = ""
    world.run(3.0)
    assert [e.kind for e in world.log].count("slurm_back") == 1


def test_elements_that_the_plan_has_no_node_for_are_held_and_those_of_an_ended_job_cancelled():
    world, slurm = arrays(3, ("1", 5, 1.0))
    assert slurm.queue["1", 4]["reason"] == "JobHeldAdmin"
    for agent in world.agents:
        agent.set(agent.slots[0], state="finished", iteration=99, phase="stepped")
    world.run(2.0)
    assert world.job().ended.code == 0 and slurm.queue["1", 4]["state"] == "CANCELLED"


def test_where_the_admin_observes_the_job_is_healed_and_slurm_is_asked_nothing(snapshot):
    slurm = FakeSlurm(3)
    world = World(slurm, observe=True)
    slurm.submit("1", 4)
    follow(world, "1", 4)
    ready(world, world.agents, after=4.0)
    assert world.job().phase == "running" and slurm.calls == []
    observed = [e.record for e in world.log if e.kind == "observed"]
    assert [(record.action, record.nodes, record.element) for record in observed] == [("plan", 3, -1), ("hold", 0, 3)]
    power_off(world, "n2")
    world.run(4.0)
    assert world.job().phase == "running" and world.job().plan.members == [0, 2] and slurm.calls == []
    assert "down n2" in [e.record.would for e in world.log if e.kind == "observed"]
    (failure,) = world.job().failures
    assert failure.actions == snapshot
    assert not world.core.state.out_of_service


def test_a_node_that_comes_back_where_the_admin_observes_is_used_as_slurm_gives_it():
    slurm = FakeSlurm(3)
    world = World(slurm, observe=True)
    slurm.submit("1", 3)
    follow(world, "1", 3)
    ready(world, world.agents, after=4.0)
    power_off(world, "n2")
    slurm.down("n2", "Not responding")  # Slurm itself notices and requeues
    world.run(4.0)
    world.dead_nodes.clear()
    slurm.resume("n2")
    slurm.start_now("1", 1)
    start(world, "1", 3)
    world.run(1.0)
    boundary(world, 1.0)
    assert sorted(world.job().members) == [0, 1, 2]


def test_what_comes_before_a_refused_action_is_not_done_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a release was refused, and the pin before it was asked for in every turn: 20 calls of Slurm a second."""
    world, slurm = arrays(4, ("1", 3, 1.0))
    monkeypatch.setattr(slurm, "release", refuse)
    slurm.requeue_hold("1", 1, "unicron: held")
    world.core.append("1", 1, records.SlurmAction(action="requeue_hold", element=1, node="n2", restarts=0, reason=""))
    world.core.append("1", 1, records.SlurmDone(action="requeue_hold", element=1, node="n2", reason=""))
    power_off(world, "n2")
    world.run(3.0)
    refused = [event for event in world.log if event.kind == "slurm_error" and event.record.action == "release"]
    assert refused
    slurm.calls.clear()
    world.run(3 * RETRY_SECONDS)
    pins = [call[3] for call in slurm.calls if call[0] == "pin"]
    assert 1 <= len(pins) <= 4 * len(set(pins)), "once in a while, of each node that is tried"
    monkeypatch.undo()
    world.run(2 * RETRY_SECONDS)
    assert slurm.queue["1", 1]["state"] == "RUNNING"


def refuse(*words: object) -> None:
    raise SlurmError("slurm_update error: Access/permission denied")


def test_what_others_want_is_worked_out_once_a_listing_for_all_jobs(monkeypatch: pytest.MonkeyPatch):
    world, _ = arrays(6, ("1", 2, 1.0), ("2", 2, 1.0), ("3", 1, 1.0))
    made = []
    monkeypatch.setattr(inputs, "Ground", lambda listing, *of: made.append(listing) or Ground(listing, *of))
    world.run(10.0)
    assert len(made) > 2 and len({id(listing) for listing in made}) == len(made)


def test_a_job_that_registers_while_slurm_is_asked_keeps_its_node() -> None:
    """Defect: a listing before had confirmed the agent, and the next one, asked for when nobody had spoken for the job,
    showed it as others' jobs are; the plan gave it no nodes, and its element was requeued."""
    slurm = FakeSlurm(2)
    world = World(slurm)
    slurm.submit("1", 1)
    agent = FakeAgent(world, "1", 0, "n1", 1, nodes=1)
    world.core.slurm.asked_at = world.now
    world.core.on_listing(slurm.nodes(), slurm.elements())
    world.core.receive(agent.route, agent.registration(), world.now, asker=Asker(0, "ann"))
    assert world.job().agents, "it is taken in at once"
    world.core.on_listing(slurm.nodes(), [replace(e, brief=True, user="", name="") for e in slurm.elements()])
    world.deliver()
    assert not slurm.calls and slurm.queue["1", 0]["state"] == "RUNNING"
    world.run(3.0)
    assert not slurm.calls and world.core.state.assignment == {"1": 1}


def test_ever_other_texts_of_a_slurm_that_fails_are_told_once_a_minute():
    """Defect: each text that differed from the last went into the log, in full, at every poll."""
    world, slurm = arrays(3, ("1", 3, 1.0))

    def errors_logged() -> list[str]:
        return [event.record.reason for event in world.log if event.kind == "slurm_error"]

    for number in range(30):
        slurm.refuse = f"squeue: problem {number}"
        world.run(1.0)
    assert len(errors_logged()) == 1 and world.core.view.slurm.error.startswith("squeue: problem")
    for number in range(60):
        slurm.refuse = f"squeue: other problem {number}"
        world.run(1.0)
    assert len(errors_logged()) == 2 and "other" in errors_logged()[1]
    slurm.refuse = ""
    world.run(3.0)
    slurm.refuse = "squeue: again"
    world.run(3.0)
    assert errors_logged()[2:] == ["squeue: again"], "another outage is told at once"


def test_no_text_of_a_record_is_longer_than_it_may_be():
    """Defect: what Slurm's programs said went into the log as it was, 200 kB at a time."""
    world, _ = arrays(3, ("1", 3, 1.0))
    core, long = world.core, "x" * 200_000
    core.on_slurm_error(f"squeue: {long}")
    core.append("", 0, records.JobSetAside(reason=f"{long} end", input=long, where="short"))
    failed, aside = [event.record for event in core.events][-2:]
    assert len(failed.reason) == len(aside.reason) == records.REASON and aside.reason.endswith(" end")
    assert len(aside.input) == 20_000 and aside.where == "short"
    with pytest.raises(SlurmError) as told:
        raise SlurmError(f"squeue: {long}")
    assert len(str(told.value)) == MOST_CHARACTERS
