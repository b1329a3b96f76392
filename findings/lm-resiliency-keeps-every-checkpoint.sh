#!/usr/bin/env bash
# lm-resiliency 0.2.0 with torch 2.13.0: GEMINI writes its checkpoint to the node's disk every `disk_flush_interval` steps.
#
# Seen (2026-11-29): after 300 steps with an interval of 10 all 30 checkpoints are on the disk, and nothing ever removes one.
#   DiskSerializer has a method cleanup_older_than, which nothing in the package calls; no document names an option.
# Expected: the newest few, as each is complete in itself and a recovery takes the newest.
# Why it matters: with SCOUT each accepted check writes two more shards on each node (default: every 10 steps), until the disk
#   is full. Whoever runs it removes old folders himself.
#
# Needs python3 (3.10 to 3.12) with venv, and PyPI. Fails if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy lm-resiliency==0.2.0
cat >train.py <<'PYTHON'
import inspect
from pathlib import Path

import torch
from lm_resiliency import InMemoryCkptConfig, enable_resiliency
from lm_resiliency.checkpointing import buffer, disk, manager, replication

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
config = InMemoryCkptConfig(disk_flush_interval=10, disk_folder="gemini", pin_memory=False, run_id="run")
handle = enable_resiliency(model, optimizer, interval=1, enable_detection=False, checkpoint=config)
for _ in range(300):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
handle.close()
kept = sorted(int(path.name.removeprefix("step-")) for path in Path("gemini").glob("runs/*/*/step-*"))
print(len(kept), "checkpoints on the disk, the oldest of step", kept[0])
assert len(kept) == 30 and kept[0] < 10
package = Path(inspect.getfile(disk)).parent.parent
calls = [path for path in package.rglob("*.py") if ".cleanup_older_than(" in path.read_text()]
print("files that call cleanup_older_than:", len(calls))
assert not calls and hasattr(disk.DiskSerializer, "cleanup_older_than")
PYTHON
timeout 900 env/bin/python train.py
