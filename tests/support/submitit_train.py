"""A job as submitit's users submit it: `python submitit_train.py FOLDER NODES` gives it to Slurm. Its function trains
with torch's process group; told to go, it is requeued and goes on from its own checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import submitit


class Train:
    """Goes on until a file `stop` is there. Each rank writes a line per step to FOLDER/steps.RANK."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> str:
        import torch
        import torch.distributed as dist

        around = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        assert around.master_addr == os.environ["SLURM_JOB_NODELIST"].split(",")[0]
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the names of the local cluster's nodes are no hosts' names
        dist.init_process_group("gloo")
        saved = self.folder / "saved"
        step = begun = int(saved.read_text()) if saved.is_file() else 0
        while True:
            told = torch.tensor([float((self.folder / "stop").exists()), float(step)])
            dist.all_reduce(told)
            assert told[1] == step * around.world_size
            step += 1
            if around.rank == 0:
                saved.write_text(str(step))
            said = {"step": step, "begun": begun, "size": around.world_size, "pid": os.getpid()}
            with (self.folder / f"steps.{around.rank}").open("a") as file:
                file.write(json.dumps(said) + "\n")
            if told[0]:
                break
            time.sleep(0.1)
        dist.destroy_process_group()
        return f"rank {around.rank} after step {step}"

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Train(self.folder))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
    executor.update_parameters(
        nodes=int(sys.argv[2]),
        tasks_per_node=1,
        timeout_min=60,
        slurm_additional_parameters={"unicron": True, "requeue": True},
    )
    print(executor.submit(Train(folder)).job_id)
