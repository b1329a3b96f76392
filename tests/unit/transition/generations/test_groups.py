"""The connections of a generation's groups: what a Break cuts, and what is kept inside a replica."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from unicron_transition.generations import groups
from unicron_transition.generations.layout import Layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.generations.unblock import Unblocker
from unicron_transition.seams import megatron_core, process_groups
from unicron_transition.seams.nccl import Aborter

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
SHAPE = Layout(tensor=2, pipeline=2)
PLACES = {  # of Megatron's groups, as rank 0 of two replicas sees them
    "_TENSOR_MODEL_PARALLEL_GROUP": [0, 1],
    "_MODEL_PARALLEL_GROUP": [0, 1, 4, 5],
    "_DATA_PARALLEL_GROUP": [0, 2],
    "_EVERYBODY_GROUP": list(range(8)),
    "_ALL_OF_A_STAGE_GROUP": [0, 1, 2, 3],  # comes first by name, and has the tensor group's ranks in one replica
}


@pytest.fixture
def built(monkeypatch):
    """built(replicas) -> (parallel_state, the groups inside the replica) of the first rank, without peers."""
    state = SimpleNamespace()
    monkeypatch.setattr(
        megatron_core, "module", lambda module: state if module == "parallel_state" else SimpleNamespace()
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    for name, ranks in PLACES.items():
        setattr(state, name, dist.new_group(ranks))
    aborter = Aborter()
    made = groups.Groups(SHAPE, Unblocker(), aborter, Meshes(SHAPE, "cpu"))

    def build(replicas: int):
        made.tear_down()
        made.build("fake", dist.HashStore(), list(range(replicas * SHAPE.size)), 0, lambda: False)
        return state, aborter.inside

    build.groups = made
    yield build
    process_groups.tear_down()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_schedule_never_goes_over_what_a_break_cuts(built, replicas):
    """Defect: the only replica's ranks are the world's, so its groups were the world."""
    state, inside = built(replicas)
    assert {state._TENSOR_MODEL_PARALLEL_GROUP, state._MODEL_PARALLEL_GROUP} == inside
    across = {state._DATA_PARALLEL_GROUP, state._ALL_OF_A_STAGE_GROUP, dist.group.WORLD}
    assert across.isdisjoint(inside)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_all_ranks_share_is_the_world(built, replicas):
    state, _ = built(replicas)
    assert state._EVERYBODY_GROUP is dist.group.WORLD and dist.get_world_size() == 4 * replicas


def test_optimizers_ask_their_ranks_again_in_each_generation(built):
    """Defect: Megatron 0.19 remembers an answer of its first step. A rank that joined asked, and got no answer."""
    asking = SimpleNamespace(has_grad_norm_group=None, _has_grad_norm_group_cache={"mtp": False})
    silent = SimpleNamespace()
    built.groups.note_holders([silent, asking])
    built(2)
    assert asking._has_grad_norm_group_cache is None and not vars(silent)
