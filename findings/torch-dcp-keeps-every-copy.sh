#!/usr/bin/env bash
# torch 2.13.0, Python 3.11: torch.distributed.checkpoint.FileSystemWriter keeps each tensor that it has written to a file
# until the file is complete.
#
# Seen: 24 tensors of 16 MB, which a planner makes smaller when they are written (the documented use of transform_object):
#   one file a rank (the default): 193 MB more at the peak
#   single_file_per_rank=False: 41 MB more
# Each tensor in turn goes into a dictionary that only the format SAFETENSORS reads. For tensors in main memory that are
# saved as they are this costs nothing, for it is the same memory. For what a planner converts, or reads from elsewhere,
# and for what is copied from a GPU, all copies are in main memory at once, whatever per_thread_copy_ahead says.
# Why it matters: a save of a state that fits into the GPU needs as much main memory again. A planner that reads a large
# model piece by piece does not bound the memory.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy
cat >"$folder/save.py" <<'PYTHON'
import dataclasses
import sys

import torch
import torch.distributed.checkpoint as dcp


class Halves(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        def half(item):
            data = item.tensor_data
            properties = dataclasses.replace(data.properties, dtype=torch.float16)
            return dataclasses.replace(item, tensor_data=dataclasses.replace(data, properties=properties))

        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[half(item) for item in plan.items])
        return self.plan

    def transform_object(self, write_item, object):
        return object.to(torch.float16)


def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024


state = {f"w{number}": torch.ones(4 << 20) for number in range(24)}
dcp.save({"a": torch.ones(1)}, checkpoint_id=sys.argv[1] + "/first", no_dist=True)
before = peak()
writer = dcp.FileSystemWriter(sys.argv[1] + "/out", single_file_per_rank=sys.argv[2] == "one")
dcp.save(state, storage_writer=writer, planner=Halves(), no_dist=True)
print(round(peak() - before))
PYTHON
one=$("$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/1" one)
many=$("$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/2" many)
echo "one file: $one MB more, a file for each tensor: $many MB more"
[ "$one" -gt 150 ] && [ "$many" -lt 100 ]
