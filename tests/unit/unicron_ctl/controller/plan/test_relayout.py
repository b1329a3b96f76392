"""A job that can run in several layouts: the plan chooses one, and another one is a start of all ranks from a
checkpoint."""

from __future__ import annotations

import pytest

from tests.support.questions import told
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api.job_answers import job_answer
from unicron_ctl.controller.job import transitions
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire
from unicron_transition.snapshot.image_format import SHARD, STATE

PAIR = ("TP2", "TP1")
MODEL = {
    "layers": 40,
    "hidden": 5120,
    "heads": 40,
    "seq-length": 2048,
    "vocab": 51200,
    "global-batch": 64,
    "recompute": 1,
}


class Stage:
    """A job of nodes with a rank each, on a Slurm."""

    def __init__(
        self,
        nodes: int = 2,
        elements: int = 2,
        layouts: tuple[str, ...] = PAIR,
        saved: int = 0,
        model: dict[str, int] | None = None,
        gres: str = "gpu:1",
    ):
        self.slurm = FakeSlurm(nodes)
        self.slurm.node_facts = {name: {"gres": gres} for name in self.slurm.node_states}
        self.world = World(self.slurm)
        self.kind, self.model = {"nodes": elements, "layouts": layouts, "saved": saved}, model or {}
        self.slurm.submit("1", elements)
        self.follow()
        self.world.run(0.6)
        self.ready()
        self.world.run(3.0)

    @property
    def job(self):
        return self.world.job()

    def agents(self) -> dict[int, FakeAgent]:
        return {agent.element: agent for agent in self.world.agents if not agent.silent}

    def follow(self) -> None:
        """Agents start where Slurm runs elements and end where it does not."""
        for agent in self.world.agents:
            entry = self.slurm.queue[agent.job, agent.element]
            agent.silent = agent.silent or entry["state"] != "RUNNING" or entry["node"] != agent.node
        for (job, element), entry in self.slurm.queue.items():
            here = any(agent.node == entry["node"] for agent in self.agents().values())
            if entry["state"] == "RUNNING" and not here and entry["node"] not in self.world.dead_nodes:
                agent = FakeAgent(self.world, job, element, entry["node"], **self.kind)
                agent.settings.model = self.model
                agent.register()

    def ready(self) -> None:
        for agent in self.agents().values():
            for slot, rank in agent.ranks.items():
                if rank.state == "starting":
                    agent.set(slot, state="waiting")

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            self.world.iterate("1", self.job.iteration + 1)
            self.world.run(0.2)

    def power_off(self, node: str) -> None:
        self.world.dead_nodes.add(node)
        for agent in self.world.agents:
            agent.silent = agent.silent or agent.node == node
        self.world.run(4.0)

    def messages(self, kind: type) -> list[wire.Message]:
        return [message for _, message in self.world.sent if isinstance(message, kind)]

    def layouts_chosen(self) -> list[str]:
        return [event.record.layout for event in self.world.log if isinstance(event.record, records.LayoutChosen)]

    def status(self) -> dict:
        return job_answer(self.world.core, self.job, EVERYBODY)


def test_a_job_begins_in_the_best_of_its_layouts(snapshot):
    stage = Stage()
    assert (stage.job.phase, stage.job.layout, stage.job.plan.replica) == ("running", "TP2", 2)
    assert stage.job.plan.members == [0, 1]
    assert {message.layout for message in stage.messages(wire.Welcome)} == {"TP2"}
    assert stage.world.core.state.layouts == {"1": "TP2"}
    assert stage.status().layouts == ["TP2", "TP1"] and stage.status().layout == "TP2"
    assert status_tables.replicas(stage.status()) == snapshot
    stage.world.check_replay()


def test_a_job_with_one_node_begins_in_what_fits_it():
    stage = Stage(elements=1, nodes=1)
    assert (stage.job.phase, stage.job.layout, stage.job.plan.members) == ("running", "TP1", [0])


def test_what_a_loss_leaves_goes_on_in_another_layout(snapshot):
    """The plan is the one that says so, and everybody is told why."""
    stage = Stage(saved=2)
    stage.train(4)
    stage.power_off("n2")
    stage.world.run(2.0)
    assert (stage.job.layout, stage.job.phase) == ("TP1", "forming")
    (start,) = [message for message in stage.messages(wire.StartRank) if message.slot == 0]
    assert start.layout == "TP1"
    stage.ready()
    stage.world.run(3.0)
    assert (stage.job.phase, stage.job.plan.members, stage.job.plan.replica) == ("running", [0], 1)
    wanted = next(event.record for event in stage.world.log if isinstance(event.record, records.LayoutWanted))
    assert [start.reason, wanted.reason] == snapshot
    assert wanted.reason in [decided.reason for decided in stage.job.decisions]
    assert [failure.record.kind_of_failure for failure in stage.job.failures] == ["node"], (
        "an end that was asked for is none"
    )
    stage.train(2)
    assert stage.job.by_layout.keys() == {"TP2", "TP1"} and stage.job.by_layout["TP2"].keys() == {2}
    stage.world.check_replay()


def test_with_a_spare_it_stays_as_it_is():
    stage = Stage(nodes=3, saved=2)
    stage.train(4)
    stage.power_off("n2")
    stage.follow()
    for _ in range(2):  # the other half has kept its state, which is of no use by itself
        stage.ready()
        stage.world.run(3.0)
    assert (stage.job.layout, stage.job.phase, stage.job.plan.replica) == ("TP2", "running", 2)
    assert stage.layouts_chosen() == ["TP2"]


def test_who_is_missing_is_waited_for_as_long_as_the_work_is_worth():
    """Twenty iterations of half a second."""
    stage = Stage(saved=0)
    stage.train(20)
    stage.power_off("n2")
    assert stage.job.relayout == "TP1" and stage.job.layout == "TP2"
    stage.world.run(4.0)
    assert stage.job.layout == "TP2"
    stage.world.run(4.0)
    assert stage.job.layout == "TP1"


def test_without_checkpoints_nobody_throws_away_what_was_trained(snapshot):
    stage = Stage(saved=-1)
    stage.train(4)
    stage.power_off("n2")
    stage.world.run(20.0)
    assert stage.job.layout == "TP2" and stage.job.waits == snapshot
    assert stage.agents()[0].ranks[0].incarnation == 0, "its state waits for the other half"
    stage.world.check_replay()


def grown_stage() -> Stage:
    """Two nodes of four are there; a third comes, and TP2 can make no use of it."""
    stage = Stage(nodes=2, elements=4)
    stage.train(4)
    assert stage.job.layout == "TP2" and stage.job.phase == "running"
    stage.slurm.node_states["n3"], stage.slurm.starts["n3"] = {"IDLE"}, 1.0
    stage.slurm.schedule()
    stage.world.run(3.0)
    return stage


def test_a_better_layout_waits_for_its_nodes_and_then_all_save_and_start_again(snapshot):
    stage = grown_stage()
    assert stage.world.core.state.layouts == {"1": "TP1"} and stage.job.relayout == "", "its node has no agent yet"
    assert status_tables.replicas(stage.status()) == snapshot
    stage.follow()
    stage.world.run(2.0)
    saving = [message for message in stage.messages(wire.StopRank) if message.save]
    assert {message.slot for message in saving} == {0, 1}, "who has no state is only started again"
    assert stage.job.layout == "TP1" and stage.agents()[0].saved == stage.job.iteration + 1
    stage.ready()
    stage.world.run(3.0)
    assert (stage.job.phase, stage.job.plan.members, stage.job.plan.replica) == ("running", [0, 1, 2], 1)
    assert not stage.job.failures
    stage.train(1)
    stage.world.run(5.0)
    assert stage.layouts_chosen() == ["TP2", "TP1"], "and so it stays"
    stage.world.check_replay()


def test_ranks_that_stopped_in_a_step_go_on_as_they_are_first():
    """Some may have the state before it and some that after it: what they wrote would be neither."""
    stage = grown_stage()
    for agent in stage.agents().values():
        agent.prompt = False
    stage.follow()
    stage.world.run(1.0)
    generation = stage.job.broken
    assert generation and stage.job.phase == "breaking"
    for slot, phase in enumerate(("synced", "computing")):
        stage.agents()[slot].set(slot, state="stopped", broken=generation, phase=phase)
    for agent in stage.agents().values():
        agent.prompt = True
    stage.world.run(0.2)
    assert stage.layouts_chosen() == ["TP2"] and stage.job.generation > generation
    assert stage.job.relayout == "TP1", "it is still wanted"
    stage.world.check_replay()


def test_who_cannot_save_is_ended_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(transitions, "SAVE_SECONDS", 15.0)
    stage = grown_stage()
    for agent in stage.world.agents:
        agent.can_save = False
    stage.follow()
    stage.world.run(5.0)
    assert stage.agents()[0].ranks[0].state == "stopped"
    assert not stage.messages(wire.StartRank), "nobody begins from what is not whole yet"
    stage.world.run(15.0)
    stage.ready()
    stage.world.run(3.0)
    assert stage.job.phase == "running" and stage.job.plan.members == [0, 1, 2]


def test_a_new_controller_goes_on_where_the_one_before_was():
    stage = grown_stage()
    for agent in stage.world.agents:
        agent.can_save = False
    stage.follow()
    stage.world.run(2.0)
    assert stage.job.layout == "TP1"
    stage.world.restart()
    for agent in stage.world.agents:
        agent.can_save = True
    stage.world.run(5.0)
    stage.ready()
    stage.world.run(5.0)
    assert (stage.job.phase, stage.job.layout, stage.job.plan.members) == ("running", "TP1", [0, 1, 2])


def test_a_rank_of_another_layout_does_not_come_in():
    """Its agent was away while all others were told."""
    stage = Stage(nodes=3, elements=3, layouts=("TP1", "TP2"))
    assert stage.job.plan.members == [0, 1, 2]
    agent = stage.agents()[2]
    agent.die(2)
    stage.world.run(12.0)
    agent.set(2, state="waiting", layout="TP2", replica=2)
    stage.world.run(5.0)
    assert stage.job.plan.members == [0, 1] and stage.job.phase == "running"


@pytest.mark.parametrize(
    "settings",
    [
        {"layouts": ["TP2 nonsense"]},
        {"layouts": ["PP2 TP2"]},
        {"model": {"layers": 3}},
        {"model": MODEL | {"layers": 0}},
    ],
)
def test_nonsense_from_the_wire_is_refused(settings, snapshot):
    world = World()
    agent = FakeAgent(world, "1", 0, "n1")
    for name, value in settings.items():
        setattr(agent.settings, name, value)
    agent.register()
    (refused,) = [message for message in agent.heard if isinstance(message, wire.Refusal)]
    assert refused.reason == snapshot and refused.final and "1" not in world.core.state.jobs


def test_a_model_rules_out_what_does_not_fit():
    """A model of 13 billion parameters on nodes of one GPU."""
    stage = Stage(nodes=4, elements=4, layouts=("TP1", "TP4", "PP4"), model=MODEL, gres="gpu:h100:1")
    assert stage.job.layout == "PP4" and stage.job.plan.members == [0, 1, 2, 3]
    (job,) = told(stage.world.core, "scenario")["job"]
    assert list(job["layouts"]) == ["TP4", "PP4"]


def test_a_model_rules_out_too_few_shards():
    """Its state has 234 GB, and a GPU 80."""
    stage = Stage(nodes=4, elements=4, layouts=("F2", "F4"), model=MODEL, gres="gpu:h100:1")
    assert stage.job.layout == "F4" and stage.job.plan.members == [0, 1, 2, 3]
    (job,) = told(stage.world.core, "scenario")["job"]
    assert list(job["layouts"]) == ["F4"]


def test_the_plan_resizes_the_shard_groups(snapshot):
    """Four nodes with a rank each: one group of four. Without the fourth, one of two, and the third waits."""
    stage = Stage(nodes=4, elements=4, layouts=("F4", "F2"), saved=2)
    assert (stage.job.layout, stage.job.plan.replica) == ("F4", 4)
    assert stage.job.plan.assignment == {0: list(range(8))}
    stage.train(4)
    stage.power_off("n4")
    stage.world.run(2.0)
    assert (stage.job.layout, stage.job.phase) == ("F2", "forming")
    stage.ready()
    stage.world.run(3.0)
    assert (stage.job.phase, stage.job.plan.members, stage.job.plan.replica) == ("running", [0, 1], 2)
    assert stage.job.plan.assignment == {0: list(range(8))}
    assert (stage.status().layout, stage.status().standbys) == ("F2", [2])
    assert status_tables.replicas(stage.status()) == snapshot
    stage.train(2)
    stage.world.check_replay()


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize(("kind", "mark", "fact"), [(STATE, "m", "remembers"), (SHARD, "00000", "sharded")])
def test_nobody_waits_for_the_images_of_the_layout_before(kind, mark, fact, size, monkeypatch):
    """Defect: those of places 0 and 1 of four counted as the newest state of a group of two, which fetched them for two
    minutes in vain. So would those of as many ranks that share the model in another way."""
    monkeypatch.setattr(FakeAgent, "memory", True)
    stage = Stage(nodes=4, elements=4, layouts=("F4", "F2"), saved=2)
    stage.train(4)
    stage.power_off("n4")
    stage.world.run(2.0)
    for element, agent in stage.agents().items():
        agent.images = [structs.Image(kind, element, 4, element % size, size, 0, 1, 1, mark)]
        agent.set(element, state="waiting", iteration=2, **{fact: True})
    stage.world.run(3.0)
    assert not stage.messages(wire.Fetch)
    assert (stage.job.phase, stage.job.plan.members, stage.job.plan.iteration) == ("running", [0, 1], 2)


def test_agents_with_other_layouts_are_refused(snapshot):
    stage = Stage(nodes=3, elements=3)
    late = FakeAgent(stage.world, "1", 2, "n3", nodes=3, layouts=("TP2",), name="late")
    late.register()
    (refused,) = [message for message in late.heard if isinstance(message, wire.Refusal)]
    assert refused.reason == snapshot


@pytest.mark.parametrize("layouts", [(), PAIR])
def test_the_planner_is_told_of_them(layouts):
    stage = Stage(layouts=layouts)
    stage.train(3)
    (job,) = told(stage.world.core, "scenario")["job"]
    assert ("flops" in job) is not bool(layouts)
    if layouts:
        assert job["layout"] == "TP2" and job["layouts"]["TP2"]["1"] == 0.0
        assert job["layouts"]["TP1"]["2"] == pytest.approx(0.9 * job["layouts"]["TP2"]["2"])
        assert job["transition"]["restart"] == pytest.approx(stage.world.config.transition_seconds + 0.5)
