#!/usr/bin/env bash
# torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0, Python 3.11: with set_reshard_after_backward(False) a pass of fully_shard's
# computes its output with the parameters of before the last step, and its gradients with those of after it.
#
# Seen: two layers, each sharded, four steps of SGD.
#   usual: losses 1.639 1.3292 1.0814 0.8809
#   with it: losses 1.639 1.639 1.3292 1.055
# The gathered parameters stay after the backward pass, and the next forward pass takes them, whatever the optimizer has
# done to the shards. After that forward pass they are freed, so its backward pass gathers the new ones. The setting is
# described as a trade of memory for communication; nothing says that it must be True in the last pass before a step.
# Why it matters: every step is made from a gradient that belongs to no parameters, and nothing says so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy
cat >"$folder/train.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def losses(reshard):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    mesh, told = init_device_mesh("cpu", (1,)), []
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).set_reshard_after_backward(reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        told.append(round(loss.item(), 4))
    return told


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
usual, late = losses(True), losses(False)
print(f"usual {usual}, without resharding {late}")
assert late[1] == late[0] != usual[1] and late[2] == usual[1] and late[3] != usual[2]
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/train.py"
