#!/usr/bin/env bash
# torch 2.13.0 (CPU, gloo). DistributedDataParallel cuts its buckets anew after its first iteration, and gloo adds an
# element's terms in an order that depends on the element's place in the bucket. So with three ranks or more the first
# gradient of a new process differs from that of a process that has made an iteration, for the same parameters and
# inputs; the second is equal bit for bit. With find_unused_parameters=True, which keeps the buckets, both are equal.
# Seen (3 ranks): "default: first 5.3e-08, second 0.0; buckets kept: first 0.0, second 0.0".
# It matters to whoever compares a run that was resumed with one that was not: the state is the same, the sum is not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy
cat > "$work/run.py" <<'PYTHON'
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def model():
    torch.manual_seed(0)
    sizes = (256, 1024, 512, 64)
    pairs = zip(sizes, sizes[1:])
    return torch.nn.Sequential(*(layer for a, b in pairs for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())))

def gradient(module, iteration, rank):
    inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(1000 * iteration + rank))
    module.zero_grad()
    module(inputs).square().mean().backward()
    return torch.cat([each.grad.flatten().clone() for each in module.parameters()])

def run(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = []
    for options in ({}, {"find_unused_parameters": True}):
        old = torch.nn.parallel.DistributedDataParallel(model(), **options)
        gradient(old, 1, rank)
        wanted = gradient(old, 2, rank)
        new = torch.nn.parallel.DistributedDataParallel(model(), **options)
        found += [float((gradient(new, 2, rank) - wanted).abs().max() / wanted.abs().max()) for _ in range(2)]
    if rank == 0:
        print("default: first {:.1e}, second {}; buckets kept: first {}, second {}".format(*found))
        assert found[0] > 0 and found[1:] == [0.0, 0.0, 0.0], "the behaviour has changed"
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(run, (3, sys.argv[1]), nprocs=3)
PYTHON
"$work/env/bin/python" "$work/run.py" "$work" 2>"$work/errors" || { cat "$work/errors" >&2; exit 1; }
