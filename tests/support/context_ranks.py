"""Output and gradients of attention under torch's `context_parallel`, beside those of one rank, in a line of JSON.
Arguments: words for each case, "flash" or "math", "causal" or "full", "implicit" for implicit replication of
plain tensors, "plain" for no balance of the load.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, LENGTH, WIDTH = 4, 16, 32
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def loss_of(model: torch.nn.ModuleList, inputs: torch.Tensor, wanted: torch.Tensor, causal: bool) -> torch.Tensor:
    """The sum over all positions."""
    parts = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in model[0](inputs).chunk(3, -1)]
    found = functional.scaled_dot_product_attention(*parts, is_causal=causal)
    return (model[1](found.transpose(1, 2).flatten(2)) - wanted).square().sum()


def case(words: list[str], mesh: DeviceMesh) -> dict[str, object]:
    """What was seen: {"error"}, or {"difference"} of the gradients, relative to the largest."""
    torch.manual_seed(1)
    model = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)])
    inputs, wanted, causal = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH), "causal" in words
    loss_of(model, inputs, wanted, causal).backward()
    whole = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    _attention._cp_options.enable_load_balance = "plain" not in words
    implicit = implicit_replication() if "implicit" in words else contextlib.nullcontext()
    both = {"buffers": [inputs, wanted], "buffer_seq_dims": [1, 1]}
    try:
        with sdpa_kernel(KERNELS[words[0]]), implicit, context_parallel(mesh, **both):
            loss_of(model, inputs, wanted, causal).backward()
    except (RuntimeError, NotImplementedError) as error:
        return {"error": str(error)}
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    pairs = zip(model.parameters(), whole, strict=True)
    return {"difference": max(float((each.grad - one).abs().max() / one.abs().max()) for each, one in pairs)}


def main() -> None:
    """All cases."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {words: case(words.split(), mesh) for words in sys.argv[1:]}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
