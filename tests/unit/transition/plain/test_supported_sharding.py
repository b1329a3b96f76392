"""Modules that are sharded otherwise than a session can heal: each is refused at the start, in one line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.texts import raises_text
from unicron_transition.generations import groups
from unicron_transition.generations.layout import Layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.plain.module import Plain
from unicron_transition.seams.table import UnsupportedLayout, numbers

SHAPE = Layout(shard=2, tensor=2)


@pytest.fixture
def meshes(monkeypatch):
    """Those of one rank of two replicas."""
    monkeypatch.setenv("UNICRON_MAX_RANKS", "8")
    groups.init_without_peers(SHAPE, 0)
    yield Meshes(SHAPE, "cpu")
    dist.destroy_process_group()


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def tied() -> nn.Sequential:
    model = two_layers()
    model[1].weight = model[0].weight
    return model


def blocks(model: nn.Module, mesh, **more) -> nn.Module:
    """Each layer in a group of its own, and then the rest."""
    for layer in model:
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def with_replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicas", "shards"))


def without_bias(mesh) -> nn.Module:
    model = two_layers()
    return fully_shard(model, mesh=mesh, ignored_params={model[0].bias})


def told(own, setting: str, value: object) -> nn.Module:
    model = fully_shard(two_layers(), mesh=own.mesh("shard"))
    getattr(model, setting)(value)
    return model


REFUSED = {
    "FSDP1": lambda own: FullyShardedDataParallel(
        nn.Linear(8, 8), process_group=own.mesh("shard").get_group(), device_id=torch.device("cpu")
    ),
    "every rank": lambda own: fully_shard(two_layers()),
    "replicas": lambda own: fully_shard(
        two_layers(), mesh=init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicas", "shards"))
    ),
    "uneven": lambda own: blocks(nn.Sequential(nn.Linear(8, 3)), own.mesh("shard")),
    "ignored": lambda own: without_bias(own.mesh("shard")),
    "rest": lambda own: nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=own.mesh("shard")), nn.Linear(8, 8)),
    "two groups": lambda own: blocks(tied(), own.mesh("shard")),
    "smaller world": lambda own: blocks(two_layers(), init_device_mesh("cpu", (8,)), reshard_after_forward=2),
    "offload": lambda own: fully_shard(two_layers(), mesh=own.mesh("shard"), offload_policy=CPUOffloadPolicy(False)),
    "tensor alone": lambda own: parallelize_module(nn.Linear(8, 8), own.mesh("tensor"), ColwiseParallel()),
    "whole": lambda own: two_layers(),
    "hook": lambda own: told(own, "set_all_reduce_hook", print),
    "own collectives": lambda own: told(own, "set_allocate_memory_from_process_group_for_comm", True),
}


def check(model: nn.Module, own: Meshes, layout: Layout = SHAPE, **more) -> None:
    Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), None, **more).check(layout, own)


@pytest.mark.parametrize("name", REFUSED)
def test_another_sharding_is_refused_in_one_line(meshes, name, snapshot):
    with raises_text(UnsupportedLayout, snapshot) as raised:
        check(REFUSED[name](meshes), meshes)
    assert "\n" not in str(raised.value)


SINCE = {"set_separate_reduce_scatter_group": "2.13", "set_manual_backward_finalization": "2.15"}


def test_settings_of_later_releases_are_refused_too(meshes):
    for setting, since in SINCE.items():
        assert hasattr(FSDPModule, setting) == (numbers(torch.__version__) >= numbers(since))
        if hasattr(FSDPModule, setting):
            with pytest.raises(UnsupportedLayout, match=rf"fully_shard with {setting}\(True\): leave it out"):
                check(told(meshes, setting, True), meshes)


def test_a_torch_that_differs_is_refused_before_a_mesh_is_made_or_a_module_taken(meshes, monkeypatch):
    model = fully_shard(two_layers(), mesh=meshes.mesh("shard"))
    with monkeypatch.context() as patched:
        patched.delattr(FSDPModule, "set_is_last_backward")
        with pytest.raises(UnsupportedLayout, match=r"FSDPModule.set_is_last_backward is not there"):
            check(model, meshes)
    monkeypatch.delattr(DeviceMesh, "_get_root_mesh")
    with pytest.raises(UnsupportedLayout, match=r"DeviceMesh._get_root_mesh is not there"):
        Meshes(SHAPE, "cpu").mesh("shard")


def test_a_scaler_with_a_sharded_module_is_refused(meshes, snapshot):
    with raises_text(UnsupportedLayout, snapshot):
        check(fully_shard(two_layers(), mesh=meshes.mesh("shard")), meshes, scaler=torch.amp.GradScaler("cpu"))


def test_what_a_session_can_heal_is_not_refused(meshes):
    model = two_layers()
    parallelize_module(model, meshes.mesh("tensor"), {"0": ColwiseParallel()})
    check(fully_shard(model, mesh=meshes.mesh("shard")), meshes)
    check(fully_shard(two_layers(), mesh=meshes.mesh("shard"), shard_placement_fn=lambda each: Shard(0)), meshes)
    frozen = two_layers()
    frozen[0].requires_grad_(False)
    check(blocks(frozen, meshes.mesh("shard")), meshes)


def test_a_mesh_comes_before_the_session_and_has_ranks(meshes):
    with pytest.raises(ValueError, match=r"no context ranks: write unicron.Layout\(context=...\)"):
        meshes.mesh("context")
    late = Meshes(SHAPE, "cpu")
    late.settle_groups()
    with pytest.raises(RuntimeError, match=r"before unicron\.Session"):
        late.mesh("shard")


def test_ranks_that_are_no_whole_replicas_are_refused_in_one_line(meshes):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="1 ranks are no whole replicas of TP2 F2: start a multiple of 4 ranks"):
        Meshes(SHAPE, "cpu").mesh("shard")


def test_a_buffer_that_is_distributed_is_sent_as_this_ranks_part(meshes):
    """A plan of tensor parallelism makes such ones, and no transfer is of distributed tensors."""
    model = two_layers()
    model[0].register_buffer("scale", torch.ones(3))
    parallelize_module(model, meshes.mesh("tensor"), {"0": ColwiseParallel()})
    fully_shard(model, mesh=meshes.mesh("shard"))
    assert isinstance(model[0].scale, DTensor)
    state = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), None).state(1)
    assert not any(isinstance(each, DTensor) for each in state.model_tensors())
