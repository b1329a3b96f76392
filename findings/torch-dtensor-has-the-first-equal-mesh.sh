#!/usr/bin/env bash
# torch 2.13.0, Python 3.11; the same by torch 2.11.0 and 2.15.0: an operation on a distributed tensor may give its result the
# mesh of an earlier, equal one, with the coordinates and groups that the process had there.
#
# Seen: two processes join a world, leave it, and join another one with their ranks swapped, as an elastic restart
# within the process does. A mesh made in the second world is equal to that of the first (same ranks, names and shape;
# this rank is not compared). The first `detach()`, or nn.Parameter(tensor), of a distributed tensor on it finds the
# output of the first world in the cache of sharding propagation:
#   made:     coordinate (0,), its mesh is the new one
#   detached: coordinate (1,), its mesh is the old one
# torch.distributed.checkpoint writes the detached tensor's shards to each other's places: saved [0, 1], loaded [1, 0].
# `full_tensor()` is right all the same, since it gathers by the group's ranks.
# torch.distributed.tensor.debug._clear_sharding_prop_cache() between the worlds is a way out.
# Why it matters: parameters are trained on, and a checkpoint that was saved without an error has their rows swapped.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy
cat >"$folder/join.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def join(process, folder):
    for turn in range(2):
        rank = process if turn == 0 else 1 - process
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{turn}", 2), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        made = DTensor.from_local(torch.full((1, 2), float(rank)), mesh, [Shard(0)])
        dcp.save({"w": made.detach()}, checkpoint_id=f"{folder}/saved{turn}")
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(join, (sys.argv[1],), 2)
    for turn in range(2):
        found = {"w": torch.empty(2, 2)}
        dcp.load(found, checkpoint_id=f"{sys.argv[1]}/saved{turn}", no_dist=True)
        print(found["w"][:, 0].tolist())
PYTHON
found=$("$folder/venv/bin/python" -W ignore "$folder/join.py" "$folder" 2>/dev/null)
echo "rows of rank 0 and 1, saved in the first world and in the second:" $found
[ "$found" = "[0.0, 1.0]
[1.0, 0.0]" ]
