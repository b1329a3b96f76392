#!/usr/bin/env bash
# torch 2.13.0, gloo, Python 3.11: torch.distributed.tensor.experimental.context_parallel computes causal attention wrongly,
# without an error, with the math kernel.
#
# Seen: two ranks, 16 positions, fp32. On a CPU the math kernel is the only one that context_parallel can run. Causal
# attention needs implicit_replication(), because its mask is a plain tensor. Then the gradients, summed over the
# ranks, differ from those of one rank by 26 % of the largest. By default the sequence is cut head to tail, to balance
# the load of a causal ring; the math kernel does no ring, and its mask knows nothing of that order. With
# _cp_options.enable_load_balance = False the difference is 2e-7.
# The same happens, with any kernel, to a module that has imported scaled_dot_product_attention by its name: only
# torch.nn.functional's attribute is replaced, so each rank attends to its own part alone. Seen: 71 %.
# Why it matters: a training that is tried on CPUs before it goes to GPUs learns something else.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy
cat >"$folder/attend.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel, implicit_replication
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
_attention._cp_options.enable_load_balance = sys.argv[1] == "balanced"
torch.manual_seed(1)
linear = torch.nn.Linear(32, 96)
inputs = torch.randn(2, 16, 32)


early = functional.scaled_dot_product_attention


def attention():
    return early if sys.argv[1] == "early" else functional.scaled_dot_product_attention


def loss(inputs):
    parts = [each.unflatten(-1, (4, 8)).transpose(1, 2) for each in linear(inputs).chunk(3, -1)]
    return attention()(*parts, is_causal=True).square().sum()


loss(inputs).backward()
one, linear.weight.grad = linear.weight.grad, None
with sdpa_kernel(SDPBackend.MATH), implicit_replication(), context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[1]):
    loss(inputs).backward()
dist.all_reduce(linear.weight.grad)
if dist.get_rank() == 0:
    print(float((linear.weight.grad - one).abs().max() / one.abs().max()))
dist.destroy_process_group()
PYTHON
run() { "$folder/venv/bin/python" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/attend.py" "$1"; }
balanced=$(run balanced)
plain=$(run plain)
early=$(run early)
echo "gradients differ by $balanced with the default balance of the load, by $plain without; imported by name: $early"
awk -v balanced="$balanced" -v plain="$plain" -v early="$early" \
    'BEGIN { exit !(balanced > 0.05 && plain < 1e-4 && early > 0.05) }'
