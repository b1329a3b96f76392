"""The generation protocol, walked with the real deciders over any interleaving of small cases: replicas of one, two and
four ranks that compute one or several micro-batches at a time, losses at any moment, newcomers, controllers that start
again.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.depth import cases
from tests.support.trainers import TrainingJob
from unicron_transition.generations import layout

MOST_KILLS = 4
ROUNDS = 400
SHAPES = [  # (ranks of a replica, ranks of a node, nodes at the start, nodes at most[, lanes of a replica])
    (1, 1, 2, 3),
    (1, 2, 2, 2),
    (2, 1, 2, 4),
    (2, 1, 4, 4),
    (2, 2, 2, 3),
    (2, 2, 3, 3),
    (2, 4, 1, 1),
    (4, 2, 4, 4),
    (4, 4, 1, 2),
    (2, 1, 4, 4, 2),  # shard groups over two nodes,
    (2, 2, 2, 3, 2),  # inside a node,
    (4, 2, 3, 4, 4),  # over nodes of several ranks,
    (4, 1, 4, 4, 2),  # and beside tensor parallelism
]


class Generations(RuleBasedStateMachine):
    """What may happen, and what must hold at every moment."""

    @initialize(shape=st.sampled_from(SHAPES), sharded=st.booleans(), remembers=st.booleans())
    def begin(self, shape: tuple[int, ...], sharded: bool, remembers: bool) -> None:
        size, per_node, started, nodes, *lanes = shape
        self.training = TrainingJob(size, per_node, nodes, started, sharded, remembers, *lanes)
        self.kills = 0
        self.settle(2.0)

    def settle(self, seconds: float) -> None:
        """Everybody does what it can, for so long."""
        for _ in range(round(seconds / 0.1)):
            self.all_obey()
            self.all_move()
            self.training.world.run(0.1)

    def all_obey(self) -> None:
        while waiting := self.training.processing():
            for trainer in waiting:
                trainer.process()

    def all_move(self) -> None:
        for slot in self.training.slots:
            self.training.trainer(slot).move(slot)

    # ------------------------------------------------------------ what may happen
    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0]))
    def goes_well(self, seconds: float) -> None:
        self.settle(seconds)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.training.world.run(seconds)

    @precondition(lambda self: self.training.processing())
    @rule(data=st.data())
    def one_agent_obeys(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.training.processing())).process()

    @rule(data=st.data(), times=st.integers(1, 4))
    def one_rank_moves(self, data: st.DataObject, times: int) -> None:
        slot = data.draw(st.sampled_from(self.training.slots))
        for _ in range(times):
            self.training.trainer(slot).move(slot)

    @rule()
    def all_ranks_move(self) -> None:
        self.all_move()

    @precondition(lambda self: self.kills < MOST_KILLS)
    @rule(data=st.data())
    def a_rank_dies(self, data: st.DataObject) -> None:
        training = self.training
        living = [slot for slot in training.slots if training.rank(slot) is not None]
        living = [slot for slot in living if slot not in training.killed]  # who dies again and again is put aside
        if living:
            self.kills += 1
            self.training.kill(data.draw(st.sampled_from(living)))

    @precondition(lambda self: self.kills < MOST_KILLS)
    @rule(
        data=st.data(),
        phase=st.sampled_from(["computing", "reducing", "synced", "stepped", "entering"]),
        most=st.integers(1, 60),
        obey=st.booleans(),
        another=st.integers(0, 6),
    )
    def a_rank_dies_at(self, data: st.DataObject, phase: str, most: int, obey: bool, another: int) -> None:
        """The ranks move one after the other until one of them is at that point; some are ahead of it then."""
        training = self.training
        order = data.draw(st.permutations(training.slots))
        watched = order[data.draw(st.integers(0, len(order) - 1))]
        for number in range(most * len(order)):
            slot = order[number % len(order)]
            if obey and training.trainer(slot).inbox and not training.trainer(slot).silent:
                training.trainer(slot).process()
            training.trainer(slot).move(slot)
            rank = training.rank(watched)
            if number >= most and rank is not None and phase in (rank.phase, rank.state):
                break
        living = [s for s in order if training.rank(s) is not None and s not in training.killed]
        for victim in living[: 1 + bool(another)]:  # the second one dies while the first Break is under way
            self.kills += 1
            training.kill(victim)
            for slot in data.draw(st.permutations(training.slots))[: another or 1]:
                if training.trainer(slot).inbox and not training.trainer(slot).silent:
                    training.trainer(slot).process()
                training.trainer(slot).move(slot)

    @precondition(lambda self: self.kills < MOST_KILLS)
    @rule(data=st.data())
    def a_node_dies(self, data: st.DataObject) -> None:
        training = self.training
        living = [e for e, trainer in training.trainers.items() if training.killed.isdisjoint(trainer.slots)]
        if living:
            self.kills += 1
            training.lose(data.draw(st.sampled_from(living)))

    @precondition(lambda self: self.training.lost_elements)
    @rule()
    def a_lost_element_starts_elsewhere(self) -> None:
        for element in self.training.lost_elements:
            self.training.replace(element)

    @precondition(lambda self: len(self.training.trainers) < self.training.nodes)
    @rule()
    def a_node_is_added(self) -> None:
        self.training.add(len(self.training.trainers))

    @rule()
    def the_controller_starts_again(self) -> None:
        self.training.world.restart()

    # ------------------------------------------------------------ what must hold
    @invariant()
    def only_the_dead_have_failed(self) -> None:
        for failure in self.training.world.job().failures:
            assert set(failure.record.slots) <= self.training.killed, failure

    @invariant()
    def members_are_complete_replicas(self) -> None:
        job, size = self.training.world.job(), self.training.size
        assert not job.set_aside and job.ended is None
        for plan in (job.plan, job.offer):
            if plan is not None:
                assert len(set(plan.members)) == len(plan.members)
                for replica in layout.replicas(plan.members, size):
                    assert [slot % size for slot in replica] == list(range(size))
                dealt = sorted(index for indices in plan.assignment.values() for index in indices)
                assert plan.boundary or dealt == list(range(8))

    @invariant()
    def numbers_and_members_fit_the_phase(self) -> None:
        """The head of `job/transitions` has it in words."""
        job = self.training.world.job()
        plan, offer = (one.generation if one is not None else 0 for one in (job.plan, job.offer))
        members, joining = job.members.keys(), job.joining.keys()
        assert {
            "forming": not (plan or offer or members or joining or job.lost),
            "entering": plan == job.generation > job.broken and not (offer or joining),
            "running": job.generation >= plan > job.broken and not (offer or joining or job.lost),
            "offering": offer == job.generation > plan > job.broken and members.isdisjoint(joining),
            "breaking": job.generation == job.broken >= plan and job.lost.keys() <= members and not (offer or joining),
        }[job.phase], self.shown()
        assert job.plan is None or job.phase == "breaking" or members == set(job.plan.members)

    @invariant()
    def no_standby_is_banished(self) -> None:
        job = self.training.world.job()
        for slot in self.training.slots:
            rank = self.training.rank(slot)
            if rank is not None and slot in job.banished:
                assert job.banished[slot] != (self.training.trainer(slot).agent, rank.incarnation), slot

    def teardown(self) -> None:
        """When nothing more happens all ranks come to train, and go on training."""
        if not hasattr(self, "training"):
            return
        training, job = self.training, self.training.world.job()
        for element in training.lost_elements:
            training.replace(element)
        whole = len(training.slots) // training.size * training.size
        for _ in range(ROUNDS):
            self.settle(0.5)
            self.only_the_dead_have_failed()
            self.members_are_complete_replicas()
            job = training.world.job()
            if job.phase == "running" and len(job.order) == whole:
                break
        assert (job.phase, len(job.order)) == ("running", whole), self.shown()
        before = {slot: training.body(slot).version for slot in job.order}
        self.settle(3.0)
        after = {slot: training.body(slot).version for slot in job.order}
        assert all(after[slot] > before[slot] for slot in job.order), self.shown()
        training.world.check_replay()

    def shown(self) -> str:
        job, ranks = self.training.world.job(), {slot: self.training.rank(slot) for slot in self.training.slots}
        lines = [f"{slot}: {rank} {self.training.body(slot)}" for slot, rank in ranks.items()]
        told = [str(event.record) for event in self.training.world.log]
        return "\n".join([f"{job.phase} {job.order} {job.waits}", *lines, *told])


Generations.TestCase.settings = settings(max_examples=cases(100), stateful_step_count=40, deadline=None)
test_the_generation_protocol = pytest.mark.filterwarnings("ignore")(Generations.TestCase)
