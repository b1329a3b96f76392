#!/usr/bin/env bash
# torch 2.13.0, gloo, Python 3.11: the flight recorder (`torch._C._distributed_c10d._dump_fr_trace_json`) of a group that
# has sent a tensor between two collectives.
#
# Each entry has a `collective_seq_id`, and the status of its group (`pg_status`) has `last_enqueued_collective` and
# `last_completed_collective`. One expects that a rank has left collective N when its group's `last_completed_collective`
# has reached N. But those two count sends and receives as well, and `collective_seq_id` does not: after two `all_reduce`
# with one `send` between them, a rank that waits in its third `all_reduce` has
#   collective_seq_id 3, last_enqueued_collective 4, last_completed_collective 3
# so by the names it waits for nothing. After ten sends it seems to be nine collectives ahead of itself. The `send` has no
# entry, and shows in the status with the next collective only. Without a send the numbers agree: 3, 3, 2.
# Why it matters: who hangs is found by comparing what ranks have begun and ended. Pipelines, and `fully_shard` next to
# messages of one's own, send in groups that have collectives as well. The difference of the two numbers of `pg_status`
# is right: it is 0 unless the rank waits.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "torch==${TORCH:-2.13.0}" numpy
cat >"$folder/waits.py" <<'PYTHON'
import json
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import _dump_fr_trace_json


def look(sends):
    time.sleep(2.0)
    trace = json.loads(_dump_fr_trace_json(True, False))
    newest = max((each for each in trace["entries"]), key=lambda each: each["record_id"])
    status = trace["pg_status"][str(newest["pg_id"])]
    print(
        f"{sends} sends, rank 0 waits in its third all_reduce:",
        newest["collective_seq_id"], status["last_enqueued_collective"], status["last_completed_collective"],
    )


def run(rank, folder):
    for sends in (0, 1, 10):
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{sends}", 2), rank=rank, world_size=2)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        for _ in range(sends):
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.all_reduce(tensor)
        if rank == 0:
            watch = threading.Thread(target=look, args=(sends,))
            watch.start()
        else:
            time.sleep(4.0)
        dist.all_reduce(tensor)
        if rank == 0:
            watch.join()
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), 2)
PYTHON
found=$("$folder/venv/bin/python" -W ignore "$folder/waits.py" "$folder" 2>/dev/null)
echo "collective_seq_id, last_enqueued_collective, last_completed_collective:"
echo "$found"
[ "$found" = "0 sends, rank 0 waits in its third all_reduce: 3 3 2
1 sends, rank 0 waits in its third all_reduce: 3 4 3
10 sends, rank 0 waits in its third all_reduce: 3 13 12" ]
