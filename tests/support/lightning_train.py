"""An ordinary Lightning script, as its manual has it: nothing in it knows who launches it. It goes on from its own last
checkpoint. Each rank writes a line per step to OUT/steps.RANK.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

OUT, NODES, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
GOES_ON = None if sys.argv[4:] == ["requeued"] else "last"  # from what Lightning saves for its requeue, or its callback


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(0.05)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        self.begun = self.global_step

    def on_train_batch_end(self, *_: object) -> None:
        said = {"step": self.global_step, "begun": self.begun, "size": self.trainer.world_size, "pid": os.getpid()}
        with (OUT / f"steps.{self.global_rank}").open("a") as file:
            file.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=NODES,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(OUT / "checkpoints", every_n_train_steps=5, save_last=True)],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(4096, 4)), batch_size=4), ckpt_path=GOES_ON)
