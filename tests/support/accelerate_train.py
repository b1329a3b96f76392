"""An ordinary Accelerate script: nothing in it knows who launches it. It goes on from its own last checkpoint. Each
rank writes a line per step to OUT/steps.RANK.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

OUT, NODES, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def main() -> None:
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.mixed_precision) == (NODES, "bf16")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = DataLoader(TensorDataset(torch.ones(4096, 4)), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    saved = OUT / "saved"
    step = begun = int(saved.read_text()) if saved.is_file() else 0
    if begun:
        accelerator.load_state(str(OUT / f"checkpoint{begun}"))
    for (batch,) in batches:
        time.sleep(0.05)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            accelerator.save_state(str(OUT / f"checkpoint{step}"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                saved.with_suffix(".new").write_text(str(step))
                saved.with_suffix(".new").replace(saved)
        said = {"step": step, "begun": begun, "size": accelerator.num_processes, "pid": os.getpid()}
        with (OUT / f"steps.{accelerator.process_index}").open("a") as file:
            file.write(json.dumps(said) + "\n")
        if step == STEPS:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
