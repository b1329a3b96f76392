"""Megatron's buffers and distributed optimizer after a change of size are those that Megatron builds for that size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sbatch_templates import cpu_adapter
from tests.support.texts import raises_text
from unicron_transition.seams import elastic_buckets, process_groups
from unicron_transition.seams.table import UnsupportedLayout
from unicron_transition.sharded.buffer_pool import BufferPool
from unicron_transition.sharded.shards import STATES, Shards, state_base
from unicron_transition.snapshot import checkpoint_file, contents, image_format
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.frozen import UntrainedTensors
from unicron_transition.snapshot.migrate import TrainingState

MOST = 7
SHAPES = [(100,), (7, 3), (129,), (640,), (1,), (33, 5)]


class Group(SimpleNamespace):
    """The part of a process group that is used when nothing is sent."""

    def size(self) -> int:
        return self.of

    def rank(self) -> int:
        return self.at


class Layers(torch.nn.Module):
    def __init__(self, dtype, frozen=False):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES])
        if frozen:
            self.rest = torch.nn.Module()
            self.rest.weight = torch.nn.Parameter(torch.randn(3, 7).to(dtype), requires_grad=False)
            self.rest.register_buffer("biases", torch.zeros(5))
            self.rest.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
            self.rest.register_buffer("cache", torch.zeros(9), persistent=False)


@pytest.fixture
def build():
    """Return a builder of (DDP, optimizer) in a world without peers."""
    cpu_adapter.install()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    elastic_buckets.prepare()

    def go(size, rank, dtype=torch.float32, wide=False, frozen=False):
        process_groups.tear_down()
        parallel_state.destroy_model_parallel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        torch.manual_seed(1)
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            bucket_size=500,
            grad_reduce_in_fp32=True,
            pad_buckets_for_high_nccl_busbw=wide,
        )
        model = DistributedDataParallel(config, settings, Layers(dtype, frozen))
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=dtype == torch.bfloat16, weight_decay=0.1
        )
        return model, get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)

    yield go
    process_groups.tear_down()
    parallel_state.destroy_model_parallel()


@pytest.fixture
def plain(monkeypatch):
    """Build with the original Megatron."""

    def go(build):
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        lays_out = getattr(DistributedOptimizer, elastic_buckets.LAYS_OUT, None)
        with monkeypatch.context() as patch:
            if lays_out is not None:
                patch.setattr(DistributedOptimizer, elastic_buckets.LAYS_OUT, staticmethod(lays_out.__wrapped__))
            else:
                patch.setattr(_ParamAndGradBuffer, "__init__", _ParamAndGradBuffer.__init__.__wrapped__)
            return build()

    return go


def become(model, optimizer, size, rank):
    group = Group(of=size, at=rank)
    for buffer in model.buffers:
        buffer.data_parallel_group = group
    for each in model.bucket_groups:
        each.intra_distributed_optimizer_instance_group = group
    for each in elastic_buckets.distributed_optimizers(optimizer):
        each.data_parallel_group = group
    elastic_buckets.resize([model], optimizer)


def described(model, optimizer):
    """Return everything that depends on the size and the rank, with names for parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    (each,) = elastic_buckets.distributed_optimizers(optimizer)
    shards = {}
    for parameter in each.model_param_gbuf_map:
        where = each._get_model_param_range_map(parameter)
        main = each._get_main_param_and_optimizer_states(parameter)["param"]
        group, order = each.model_param_group_index_map[parameter]
        local, within = where["gbuf_local"], where["param"]
        shards[names[parameter]] = local.start, local.end, within.start, within.end, main.tolist(), group, order
    return {
        "shards": shards,
        "sizes": [bucket.grad_data.numel() for buffer in model.buffers for bucket in buffer.buckets],
        "numel": each.per_bucket_numel,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "bucket groups": [
            (g.intra_distributed_optimizer_instance_size, g.intra_distributed_optimizer_instance_rank)
            for g in model.bucket_groups
        ],
    }


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_every_size_has_the_shards_that_megatron_makes(build, plain, dtype, wide):
    model, optimizer = build(MOST, 0, dtype, wide)
    assert len(model.buffers[0].buckets) > 1
    parameters = [(parameter, parameter.data_ptr(), parameter.main_grad) for parameter in model.parameters()]
    held = optimizer.param_groups
    for size in [*range(MOST, 0, -1), 5]:
        rank = size // 2
        become(model, optimizer, size, rank)
        elastic = described(model, optimizer)
        fresh = plain(lambda size=size, rank=rank: build(size, rank, dtype, wide))
        assert elastic == described(*fresh)
        for parameter, place, gradient in parameters:
            assert parameter.data_ptr() == place and parameter.main_grad is gradient
        assert all(one is other for one, other in zip(optimizer.param_groups, held, strict=True))


def test_parameters_and_unreduced_gradients_survive(build):
    model, optimizer = build(MOST, 0)
    for parameter in model.parameters():
        parameter.main_grad.normal_()
    before = [(parameter.detach().clone(), parameter.main_grad.clone()) for parameter in model.parameters()]
    for size in (3, 1, 7, 6):
        become(model, optimizer, size, 0)
        for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, value) and torch.equal(parameter.main_grad, gradient)


def test_the_same_place_loses_nothing(build):
    model, optimizer = build(MOST, 0)
    become(model, optimizer, 3, 1)
    state = [value for value in optimizer.chained_optimizers[0].optimizer.state.values() if value["exp_avg"].numel()]
    state[0]["exp_avg"].fill_(1)
    become(model, optimizer, 3, 1)
    assert state[0]["exp_avg"].sum() == state[0]["exp_avg"].numel()
    assert any(value is state[0] for value in optimizer.chained_optimizers[0].optimizer.state.values())


def test_more_replicas_than_there_is_room_for(build):
    model, optimizer = build(2, 0)
    with pytest.raises(UnsupportedLayout, match="9 replicas are more"):
        become(model, optimizer, 9, 0)


@pytest.mark.parametrize(
    ("where", "setting", "value"),
    [
        ("ddp", "use_megatron_fsdp", True),
        ("ddp", "num_distributed_optimizer_instances", 2),
        ("ddp", "reuse_grad_buf_for_mxfp8_param_ag", True),
        ("ddp", "nccl_ub", True),
        ("optimizer", "use_precision_aware_optimizer", True),
        ("optimizer", "optimizer_cpu_offload", True),
        ("optimizer", "overlap_param_gather_with_optimizer_step", True),
    ],
)
def test_what_cannot_be_healed_is_refused_by_name(build, snapshot, where, setting, value):
    model, optimizer = build(2, 0)
    elastic_buckets.check([model], optimizer)
    setattr(model.ddp_config if where == "ddp" else optimizer.chained_optimizers[0].config, setting, value)
    with raises_text(UnsupportedLayout, snapshot):
        elastic_buckets.check([model], optimizer)


def test_an_optimizer_that_was_built_too_early_is_refused(build, snapshot):
    model, optimizer = build(2, 0)
    del optimizer.chained_optimizers[0].unicron_parameters
    with raises_text(UnsupportedLayout, snapshot):
        elastic_buckets.check([model], optimizer)


# ------------------------------------------------------------ shards as files of a checkpoint
def of_the_element(number: int, key: str, numel: int) -> torch.Tensor:
    """Return the made-up state of parameter `number`: each element has a different value."""
    return torch.arange(numel, dtype=torch.float32) + 1000 * number + STATES.index(key) / 4


def held_by(model, optimizer):
    """Yield (number of the parameter, its range, Megatron's tensors of the range) for this rank's parts."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    (each,) = elastic_buckets.distributed_optimizers(optimizer)
    for parameter in each.model_param_gbuf_map:
        within = each._get_model_param_range_map(parameter)["param"]
        tensors = each._get_main_param_and_optimizer_states(parameter)
        yield numbers[id(parameter)], within, tensors


def kept_by(build, memory: Path, dtype, frozen=False) -> None:
    """Make images of three ranks' shards, and of their untrained tensors."""
    memory.mkdir()
    for rank in range(3):
        model, optimizer = build(MOST, 0, dtype, frozen=frozen)
        become(model, optimizer, 3, rank)
        for number, within, tensors in held_by(model, optimizer):
            for key in STATES:
                whole = of_the_element(number, key, torch.Size(SHAPES[number]).numel())
                tensors[key].detach().view(-1).copy_(whole[within.start : within.end])
            if "step" in tensors:
                tensors["step"].fill_(9.0)
        kept = Shards([model], optimizer, pool=BufferPool(memory, rank, torch.device("cpu")))
        kept.base, kept.count, kept.index = state_base(4, 0xABCDE), 3, rank
        state = TrainingState([model], optimizer, None, seed=5)
        if frozen:
            for tensor in not_trained(model):
                tensor.copy_((torch.arange(tensor.numel()) % 3).view_as(tensor))
        rest = UntrainedTensors(state, memory, rank, 0, 1, print)
        mark = rest.update_image(9) if rank == 0 else ""
        kept.export(
            9,
            b"",
            lambda about, step, state=state, mark=mark: contents.head_of(state, about, 9, "TP1", step, mark),
            untrained=rest.offsets() if rank == 0 else None,
        )
        kept.pool.wait_whole()


def not_trained(model) -> list[torch.Tensor]:
    rest = model.module.rest
    return [rest.weight.data, rest.biases, rest.mask]


def shards_in(memory: Path) -> list[image_format.ImagePage]:
    return [found for found in image_format.inventory(memory) if found.key.kind == image_format.SHARD]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_images_of_shards_are_files_that_ranks_of_another_number_read(build, tmp_path, dtype, frozen):
    memory, saves = tmp_path / "memory", tmp_path / "saves"
    kept_by(build, memory, dtype, frozen)
    for found in shards_in(memory):
        checkpoint_file.persist(found, saves)
    model, optimizer = build(MOST, 0, dtype, frozen=frozen)
    become(model, optimizer, 2, 1)
    state = TrainingState([model], optimizer, None)
    assert Checkpoints(saves).load(state) == 9 and state.seed == 5
    for number, within, tensors in held_by(model, optimizer):
        for key in STATES:
            whole = of_the_element(number, key, torch.Size(SHAPES[number]).numel())
            assert torch.equal(tensors[key].view(-1), whole[within.start : within.end])
        assert float(tensors.get("step", 9.0)) == 9.0
    for number, parameter in enumerate(model.module.all):
        assert torch.equal(parameter.detach().view(-1), of_the_element(number, "param", parameter.numel()).to(dtype))
    for tensor in not_trained(model) if frozen else ():
        assert torch.equal(tensor, (torch.arange(tensor.numel()) % 3).view_as(tensor).to(tensor.dtype))


def test_what_is_not_trained_is_checked_with_the_shard_in_front_of_it(build, tmp_path, capfd, snapshot):
    memory, saves = tmp_path / "memory", tmp_path / "saves"
    kept_by(build, memory, torch.float32, frozen=True)
    first = checkpoint_file.persist(shards_in(memory)[0], saves)
    for found in shards_in(memory):
        checkpoint_file.persist(found, saves)
    data = bytearray(first.read_bytes())
    data[image_format.read_page(first).used - 60] ^= 1  # of the biases
    first.write_bytes(data)
    model, optimizer = build(MOST, 0, torch.float32, frozen=True)
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(saves).load(TrainingState([model], optimizer, None))
    assert "passed over" in capfd.readouterr().err


def test_without_what_is_not_trained_there_is_no_file_of_the_first_shard_and_the_set_is_not_whole(
    build, tmp_path, snapshot
):
    memory, saves = tmp_path / "memory", tmp_path / "saves"
    kept_by(build, memory, torch.float32, frozen=True)
    for path in memory.glob("untrained-*"):
        image = bytearray(path.read_bytes())
        path.write_bytes(image[:12] + bytes(4) + image[16:])  # torn
    first, *others = shards_in(memory)
    with raises_text(image_format.BadImage, snapshot, tmp_path):
        checkpoint_file.persist(first, saves)
    assert [checkpoint_file.persist(found, saves).exists() for found in others] == [True, True]
    assert not Checkpoints(saves).whole_ones() and not list(saves.glob("*/*.new"))


def test_a_tensor_that_is_in_no_image_leaves_the_file_to_the_rank(build, tmp_path):
    model, optimizer = build(MOST, 0, frozen=True)
    become(model, optimizer, 3, 0)
    kept = Shards([model], optimizer, pool=BufferPool(tmp_path, 0, torch.device("cpu")))
    kept.count = 3
    offsets = UntrainedTensors(TrainingState([model], optimizer, None), tmp_path, 0, 0, 1, print).offsets()
    offsets.pop(model.module.rest.biases.data_ptr())
    assert kept.about(offsets) == b""
    heads = []
    kept.export(9, b"", lambda about, step: heads.append(about) or b"", untrained=offsets)
    assert not heads and not kept.set_aside(9)


@pytest.mark.parametrize(
    ("sizes", "lanes"),
    [
        ((1, 2, 1), 2),
        ((2, 4, 1), 2),
        ((2, 2, 2), 2),
        ((2, 2, 1), 1),
        ((2, 3, 1), 0),
        ((4, 2, 1), 0),
    ],
    ids=lambda given: "-".join(map(str, given)) if isinstance(given, tuple) else "",
)
def test_data_parallel_ranks_that_share_experts_are_counted_in_megatrons_groups(sizes, lanes):
    """sizes: TP, EP, ETP. 0 is refused: tensor ranks of a replica would have the same experts."""
    from megatron.core import parallel_state

    tensor, expert, expert_tensor = sizes
    process_groups.init_without_peers(0, 2 * tensor * expert * expert_tensor)
    try:
        parallel_state.initialize_model_parallel(
            tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor
        )
        chunk = SimpleNamespace(
            expert_parallel_buffers=["of the experts"],
            intra_dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            intra_expt_dp_group=parallel_state.get_expert_data_parallel_group(),
        )
        assert elastic_buckets.lanes([chunk]) == lanes
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
