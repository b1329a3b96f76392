#!/usr/bin/env bash
# torch 2.13.0, gloo, Python 3.11; the same by torch 2.11.0 and 2.15.0: `all_reduce` with MAX or MIN and a NaN in one rank.
#
# torch.maximum hands a NaN on, and one expects as much of a sum over ranks. Seen with gloo: the result depends on which
# rank has the NaN, on the place of the number in the tensor, and it can lose the numbers of ranks that have none.
#   maximum of 1, nan, 3 (three ranks):   1   the NaN is gone, and so is the 3
#   maximum of nan, 2, 3:                 nan
#   maximum of 1, 2, nan:                 2
#   300,000 numbers, each 1, nan, 3:      1 in the first third of them, nan in the second, 3 in the last
# No rank raises, and all ranks have the same result. In float32, float64, float16 and bfloat16.
# Why it matters: "is any rank's loss or norm not finite?" is often asked by a maximum over ranks. The answer is no, and
# the largest norm is too small. `all_reduce` with SUM hands the NaN on.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "torch==${TORCH:-2.13.0}" numpy
cat >"$folder/most.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    for who in range(3):
        found = []
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            number = torch.tensor([float("nan") if rank == who else rank + 1.0], dtype=dtype)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            everywhere = [torch.zeros_like(number) for _ in range(3)]
            dist.all_gather(everywhere, number)
            found += [str(float(each)) for each in everywhere]
        if rank == 0:
            print(f"nan in rank {who}:", *sorted(set(found)))
    many = torch.full((300_000,), float("nan") if rank == 1 else rank + 1.0)
    dist.all_reduce(many, op=dist.ReduceOp.MAX)
    if rank == 0:
        print("300,000 of them, nan in rank 1:", *many.nan_to_num(nan=-1.0).unique_consecutive().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), 3)
PYTHON
found=$("$folder/venv/bin/python" -W ignore "$folder/most.py" "$folder" 2>/dev/null)
echo "the maximum of 1, 2 and 3, one of which is nan (printed as -1 in the last line):"
echo "$found"
[ "$found" = "nan in rank 0: nan
nan in rank 1: 1.0
nan in rank 2: 2.0
300,000 of them, nan in rank 1: 1.0 -1.0 3.0" ]
