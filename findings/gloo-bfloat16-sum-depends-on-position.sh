#!/usr/bin/env bash
# torch 2.13.0, gloo, 8 ranks: all_reduce(SUM) of a bfloat16 tensor in which every element is the same in each rank.
#
# Seen: rank 0 holds 256 everywhere, the seven others 1. The exact sum is 263; bfloat16 counts there in steps of 2. The result
#   has three values, 256, 260 and 264, each at fixed positions, equal in all ranks: gloo's ring adds each part of the tensor
#   in another order, and rounds to bfloat16 after each addition.
# Expected: one value everywhere, since all elements are alike.
# Why it matters: the sum of a gradient in bfloat16 depends on *where* in a bucket it lies. A change of the bucket's layout (other
#   parameters before it, another number of ranks) changes results by far more than the last bit.
#
# Needs python3 with venv, and PyPI. Fails if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat >sums.py <<'PYTHON'
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=8)
    given = torch.full((1024,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(given)
    everybody = [torch.empty_like(given) for _ in range(8)]
    dist.all_gather(everybody, given)
    if rank == 0:
        counts = {float(value): int((given == value).sum()) for value in given.unique()}
        alike = all(torch.equal(given, other) for other in everybody)
        print("torch", torch.__version__, "| value -> how many of 1,024:", counts, "| equal in all ranks:", alike)
        if set(counts) != {256.0, 260.0, 264.0} or not alike:
            raise SystemExit("the behaviour has changed")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, ("meet",), nprocs=8)
PYTHON
sed -i "s#(\"meet\",)#(\"$folder/meet\",)#" sums.py
timeout 300 env OMP_NUM_THREADS=1 venv/bin/python sums.py
