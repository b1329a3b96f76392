#!/usr/bin/env bash
# torch 2.13.0 and 2.14.1, Python 3.11: FSDPModule.reset_iter_state() keeps the gradients of the batch that failed.
#
# It is for a forward or backward pass that an exception has ended, and says that gradients on the way are dropped.
# Seen: two layers in one group of parameters; an exception ends the backward pass between them; then reset_iter_state(),
# zero_grad() and another batch.
#   the second layer's gradient: 1616.7 in place of 16.0: that of the failed batch and of the new one
# The gradient of a layer that was done is on its gathered parameter, where neither function looks, until the whole group
# is done; the next batch's is added to it and reduced. torch 2.15.0 drops it, but with it what earlier batches have
# added to the shards' gradients, which 2.13.0 keeps.
# Why it matters: a loop that leaves a batch out after an error trains with it all the same, and nothing says so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy
cat >"$folder/reset.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        middle = self.first(x)
        middle.register_hook(fail)
        return self.second(middle)


def fail(_):
    if failing:
        raise RuntimeError("a batch that fails")


def gradients(batches):
    global failing
    torch.manual_seed(0)
    model = fully_shard(Two(), mesh=init_device_mesh("cpu", (1,)))
    for batch, failing in batches:
        try:
            model(batch).sum().backward()
        except RuntimeError:
            model.reset_iter_state()
            model.zero_grad()
    return [float(each.weight.grad.full_tensor().abs().sum()) for each in (model.first, model.second)]


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
usual = gradients([(torch.ones(2, 4), False)])
after = gradients([(torch.full((2, 4), 100.0), True), (torch.ones(2, 4), False)])
print(f"without a failed batch {usual}, after one {after}")
assert usual[0] == after[0] and after[1] > 100 * usual[1]
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/reset.py"
