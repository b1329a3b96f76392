#!/usr/bin/env bash
# accelerate 1.15.0: no file of `Accelerator.save_state` says how many steps were done.
#
# Seen: after two epochs of 8 steps `step` in random_states_0.pkl is 0: it counts micro-batches since the last end of a data
# loader. `last_epoch` in scheduler.bin is 16 with one process and 32 with two, for the schedule is stepped once for each
# process unless split_batches is set. No other file has a count.
#
# Why it matters: who resumes or converts such a folder cannot learn the iteration from it; the script has to save its
# own (`register_for_checkpointing`), or to put it into the folder's name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 accelerate==1.15.0 > "$folder/pip.log" 2>&1 || {
    cat "$folder/pip.log" >&2
    exit 1
}
cd "$folder"
cat > train.py <<'PY'
import os
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
count = 8 * accelerator.num_processes
data = torch.utils.data.DataLoader(torch.ones(count, 2), batch_size=1)
model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
steps = 0
for _ in range(2):
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            steps += 1
accelerator.save_state(sys.argv[1])
if accelerator.is_main_process:
    told = torch.load(f"{sys.argv[1]}/random_states_0.pkl", weights_only=False)
    progress = torch.load(f"{sys.argv[1]}/scheduler.bin", weights_only=False)
    files = sorted(os.listdir(sys.argv[1]))
    print(f"{accelerator.num_processes} processes, {steps} steps:", told["step"], progress["last_epoch"], files)
    assert steps == 16 and told["step"] == 0 and progress["last_epoch"] == 16 * accelerator.num_processes
PY
"$folder/env/bin/python" train.py one
"$folder/env/bin/torchrun" --standalone --nproc-per-node 2 train.py two 2> "$folder/log" || { cat "$folder/log" >&2; exit 1; }
