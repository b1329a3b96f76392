"""A plain FSDP2 script without Unicron: `save` trains a little and saves in torch's own format, `load` loads that and
compares. Run by each rank with RANK and WORLD_SIZE; the ranks meet in a file.

    python -m tests.support.fsdp_script save FORM FOLDER TENSOR_RANKS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.support.sharded_module import WORDS, Model, optimizer_of, shard

STEPS = 3
WHOLE = "whole.pt"  # all of the state in one file, by torch.save
FORMS = ("two trees", "torchtitan", "flat", "at the top")  # the last as the first, with the model's names at the top
FLAT = ("torchtitan", "flat")


def main(action: str, form: str, folder: Path, tensor: int) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / f"{action}.store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(1 if action == "save" else 2)
    model = shard(Model(), size // tensor, tensor, peers=True)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number in range(STEPS if action == "save" else 1):
        tokens = (torch.arange(6) + 7 * number + rank // tensor) % WORDS
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        schedule.step()
    if action == "save":
        dcp.save(tree(form, model, optimizer, schedule), checkpoint_id=str(folder / "dcp"))
        saved = whole(model, optimizer)
        if rank == 0:
            torch.save(saved, folder / WHOLE)
    else:
        for group in optimizer.param_groups:
            group["weight_decay"] = 9.0
        told = tree(form, model, optimizer, schedule)
        dcp.load(told, checkpoint_id=str(folder / "dcp"))
        adopt(form, told, model, optimizer)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        wanted, found = torch.load(folder / WHOLE), whole(model, optimizer)
        assert set(found) == set(wanted), set(found) ^ set(wanted)
        for name, tensor_ in wanted.items():
            assert torch.equal(found[name], tensor_), name
    dist.barrier()
    dist.destroy_process_group()


def tree(form: str, model: Model, optimizer: Any, schedule: Any) -> dict[str, Any]:
    """What a script saves and loads."""
    flat = StateDictOptions(flatten_optimizer_state_dict=form in FLAT)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=flat)
    if form == "two trees":
        return {"model": of_model, "optimizer": of_optimizer}
    if form != "torchtitan":
        return {**of_model, "optimizer": of_optimizer}
    beside = {"lr_scheduler": schedule.state_dict(), "train_state": {"step": STEPS, "ntokens_seen": 18}}
    return {**of_model, "optimizer": of_optimizer, **beside}


def adopt(form: str, told: dict[str, Any], model: Model, optimizer: Any) -> None:
    of_optimizer = told["optimizer"]
    of_model = told.get("model") or {name: told[name] for name in model.state_dict()}
    flat = StateDictOptions(flatten_optimizer_state_dict=form in FLAT)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=flat)


def whole(model: Model, optimizer: Any) -> dict[str, Any]:
    """All of the state, gathered."""
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found[name] = _whole(tensor)
        found |= {f"{name} {key}": _whole(value) for key, value in optimizer.state.get(tensor, {}).items()}
    return found


def _whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
