"""A small GPT that saves or loads its state with megatron-core's own `dist_checkpointing`, as Megatron-LM's
`save_checkpoint` and `load_checkpoint` do. Its WORLD_SIZE ranks are forks of one process, which imports for all.

    megatron_saves.py save|load|begin FOLDER OUT

save: trains ITERATIONS of tiny_gpt's iterations and saves in FOLDER. load: loads from FOLDER. begin: begins from FOLDER
as a session does, and writes a checkpoint of Unicron's in OUT/saves. All leave OUT/RANK.pt: this rank's parameters,
main parameters and optimizer state. With SAVES_MORE, who has saved trains so many iterations more, and leaves their
losses as well. SAVES_FORMAT torch_dist or torch, SAVES_SHARDING a `distrib_optim_sharding_type`.
The layout is tiny_gpt's TINY_LAYOUT, and so on.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
os.environ["TINY_OUT"] = sys.argv[3]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.support import tiny_gpt  # noqa: E402

FORMAT = os.environ.get("SAVES_FORMAT", "torch_dist")
SHARDING = os.environ.get("SAVES_SHARDING", "fully_reshardable")
IMPORTED = (  # once for all ranks
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.optimizer.distrib_optimizer",
    "unicron_transition.snapshot.migrate",
)
ITERATIONS, MORE = 2, int(os.environ.get("SAVES_MORE", "0"))


def arguments() -> argparse.Namespace:
    """What Megatron-LM keeps of its options, as far as a reader wants it."""
    from megatron.core import parallel_state

    return argparse.Namespace(
        tensor_model_parallel_size=tiny_gpt.TENSOR,
        pipeline_model_parallel_size=tiny_gpt.PIPELINE,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        world_size=dist.get_world_size(),
        iteration=ITERATIONS,
        consumed_train_samples=ITERATIONS * tiny_gpt.MICRO_BATCHES * tiny_gpt.SIZE,
        params_dtype=torch.bfloat16 if tiny_gpt.BF16 else torch.float32,
        use_distributed_optimizer=tiny_gpt.DISTOPT,
        untie_embeddings_and_output_weights=tiny_gpt.GATED,
        overlap_grad_reduce=os.environ.get("TINY_OVERLAP") == "1",
        ddp_bucket_size=20000,
        context_parallel_size=1,
        num_layers=tiny_gpt.LAYERS,
    )


def metadata() -> dict:
    """Of the content."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
    return found | ({"distrib_optim_sharding_type": SHARDING} if tiny_gpt.DISTOPT else {})


def state_dict(chunks, optimizer, scheduler, loading: bool) -> dict:
    """As `generate_state_dict`."""
    found = {"args": arguments(), "checkpoint_version": 3.0, "iteration": ITERATIONS}
    for number, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        found[key] = chunk.module.sharded_state_dict(metadata=metadata())
    found["optimizer"] = optimizer.sharded_state_dict(found, is_loading=loading, metadata=metadata())
    found["opt_param_scheduler"] = scheduler.state_dict()
    return found


def save_rank(folder: Path, chunks, optimizer, scheduler) -> None:
    """As `save_checkpoint` with `--ckpt-format torch`: a file of each model-parallel rank."""
    from megatron.core import parallel_state

    found = {"args": arguments(), "checkpoint_version": 3.0, "iteration": ITERATIONS}
    for number, chunk in enumerate(chunks):
        found["model" if len(chunks) == 1 else f"model{number}"] = chunk.state_dict_for_save_checkpoint()
    found |= {"optimizer": optimizer.state_dict(), "opt_param_scheduler": scheduler.state_dict()}
    tensor = parallel_state.get_tensor_model_parallel_rank()
    stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if tiny_gpt.PIPELINE > 1 else ""
    at = folder / f"iter_{ITERATIONS:07d}" / f"mp_rank_{tensor:02d}{stage}"
    at.mkdir(parents=True, exist_ok=True)
    if tiny_gpt.DISTOPT:
        optimizer.save_parameter_state(str(at / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(found, at / "model_optim_rng.pt")


def save(folder: Path, chunks, optimizer, scheduler) -> None:
    """Into `folder`, a new iteration of it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    at = folder / f"iter_{ITERATIONS:07d}"
    if dist.get_rank() == 0:
        at.mkdir(parents=True)
    dist.barrier()
    kept = {key: value for key, value in metadata().items() if key != "dp_cp_group"}
    found = state_dict(chunks, optimizer, scheduler, False)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(found, str(at), strategy, content_metadata=kept)


def loads_without_transformer_engine() -> None:
    """torch's own Adam has its step in each parameter's state, where Megatron's distributed optimizer takes it for a
    tensor that it has to load."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, parameter, tensors):
        group, order = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"].clone()}
        with torch.no_grad():
            return original(self, parameter, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def load(folder: Path, chunks, optimizer, scheduler) -> dict:
    """Everything that Megatron-LM's `--load` takes; returns the common part."""
    from megatron.core import dist_checkpointing

    at = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    common = dist_checkpointing.load_common_state_dict(str(at))
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    print("content", content, flush=True)
    wanted = state_dict(chunks, optimizer, scheduler, True)
    for key in ("args", "checkpoint_version", "iteration"):
        del wanted[key]
    found = dist_checkpointing.load(wanted, str(at))
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(found["model" if len(chunks) == 1 else f"model{number}"], strict=True)
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["opt_param_scheduler"])
    return found


def begin(folder: Path, out: Path, chunks, optimizer, scheduler) -> int:
    """As a session does; returns the iteration."""
    from megatron.core import parallel_state

    from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
    from unicron_transition.snapshot.migrate import TrainingState

    state = TrainingState(chunks, optimizer, scheduler)
    with_ = os.environ.get("SAVES_WITH", "all")
    checkpoints = Checkpoints(out / "saves", begin_from=folder, begin_with=with_)
    iteration = checkpoints.load(state)
    assert iteration is not None
    layout, size = f"TP{tiny_gpt.TENSOR} PP{tiny_gpt.PIPELINE}", tiny_gpt.TENSOR * tiny_gpt.PIPELINE
    place = parallel_state.get_pipeline_model_parallel_rank() * tiny_gpt.TENSOR
    place += parallel_state.get_tensor_model_parallel_rank()
    data, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if state.sharded or data == 0:
        shard = (data, count) if state.sharded else (0, 1)
        checkpoints.save_last(state, iteration, Writer(place, size, *shard, layout=layout))
    return iteration


def held(chunks, optimizer) -> dict:
    """name of the whole tensor -> [(box, begin, end, key -> tensor)], as this project's own checkpoints have it."""
    from unicron_transition.snapshot import parts

    found: dict = {}
    for part in parts.parts(chunks, optimizer):
        tensors = {key: value.clone() for key, value in part.tensors.items()}
        found.setdefault(part.box.name, []).append((tuple(part.box), part.begin, part.end, tensors, part.others))
    return found


def train(chunks, optimizer, scheduler, numbers) -> list[list[float]]:
    """The iterations of these numbers, whatever the layout. Returns each one's losses, in the last stage."""
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    found = []
    for number in numbers:
        mine = range(rank, tiny_gpt.MICRO_BATCHES, ranks)
        losses = tiny_gpt.plain_iteration(chunks, optimizer, scheduler, number, mine)
        found.append([float(loss["lm loss"]) for loss in losses])
    return found


def main() -> None:
    """See above."""
    what, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tiny_gpt.TENSOR,
        pipeline_model_parallel_size=tiny_gpt.PIPELINE,
        virtual_pipeline_model_parallel_size=tiny_gpt.VIRTUAL if tiny_gpt.VIRTUAL > 1 else None,
    )
    chunks, optimizer = tiny_gpt.build()
    scheduler = tiny_gpt.schedule(optimizer)
    told = {}
    if what == "save":
        train(chunks, optimizer, scheduler, range(ITERATIONS))
        (save if FORMAT == "torch_dist" else save_rank)(folder, chunks, optimizer, scheduler)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATIONS))
    elif what == "begin":
        told = {"iteration": begin(folder, out, chunks, optimizer, scheduler)}
    else:
        loads_without_transformer_engine()
        if tiny_gpt.DISTOPT:  # Megatron's looks for the step of a state that is there
            tiny_gpt.plain_iteration(chunks, optimizer, scheduler, 0, range(1))
            scheduler.num_steps = 0
        common = load(folder, chunks, optimizer, scheduler)
        told = {"iteration": common["iteration"], "version": common["checkpoint_version"]}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kept = {"held": held(chunks, optimizer), "groups": groups, "schedule": scheduler.state_dict(), "told": told}
    if what == "save":
        kept["losses"] = train(chunks, optimizer, scheduler, range(ITERATIONS, ITERATIONS + MORE))
    torch.save(kept, out / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def fork_rank(rank: int) -> int:
    """Starts one rank, which ends in here; returns its process id."""
    if pid := os.fork():
        return pid
    os.environ["RANK"] = str(rank)
    main()
    sys.exit()  # not os._exit: Megatron-core's own children end with the interpreter


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    ranks = [fork_rank(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
