"""A language model of bytes, in plain PyTorch, that survives the loss of ranks and nodes.

    python train_plain.py --text FOLDER                           (one process)
    torchrun --nproc-per-node 4 train_plain.py --text FOLDER      (plain data parallelism, the same losses)
    sbatch --unicron array.sbatch python train_plain.py --text FOLDER --save checkpoints/first  (healed)

What makes it elastic: `unicron.init_process_group`; a `fetch` that makes any micro-batch again; `unicron.Session`
in place of the loop, which accumulates, reduces and steps. No DistributedDataParallel, no sampler, no `backward()`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from training_metrics import MetricsWriter

import unicron

LENGTH, SIZE = 64, 8  # bytes of a sample, samples of a micro-batch


class Model(nn.Module):
    """A small causal transformer."""

    def __init__(self, width: int = 128, layers: int = 2):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        states = self.bytes(text) + self.places.weight
        return self.head(self.layers(states, mask=self.mask, is_causal=True))


def forward_step(micro_batch: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The mean loss of a micro-batch."""
    return functional.cross_entropy(model(micro_batch[:, :-1]).flatten(0, 1), micro_batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="a folder; all files below it with --suffix are read")
    parser.add_argument("--suffix", default=".py")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--micro-batches", type=int, default=8, help="per iteration, whatever the number of ranks")
    parser.add_argument("--save", help="folder of the checkpoints, which all nodes share")
    parser.add_argument("--metrics", help="prefix of the metrics; training_metrics.py merges them")
    options = parser.parse_args()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a training that could end
    text = b"".join(path.read_bytes() for path in sorted(options.text.rglob(f"*{options.suffix}")))
    if len(text) <= LENGTH:
        raise SystemExit(f"train_plain: no text in {options.text}: give --text a folder with *{options.suffix} files")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    unicron.init_process_group("gloo" if device == "cpu" else "nccl")

    torch.manual_seed(1234)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

    def fetch(iteration: int, index: int) -> torch.Tensor:
        """Micro-batch `index` of `iteration`, whichever rank asks: no state, no rank, no clock."""
        draw = torch.Generator().manual_seed(iteration * options.micro_batches + index)
        starts = torch.randint(len(data) - LENGTH, (SIZE, 1), generator=draw)
        return data[starts + torch.arange(LENGTH + 1)].long().to(device)

    session = unicron.Session(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        micro_batches=options.micro_batches,
        forward_step=forward_step,
        fetch=fetch,
        seq_length=LENGTH,
        micro_batch_size=SIZE,
        train_iterations=options.iterations,
        checkpoints=unicron.Checkpoints(options.save, interval=100) if options.save else None,
        clip_grad=1.0,
    )
    signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())  # all ranks end after the same iteration
    metrics = MetricsWriter(options.metrics, session.slot) if options.metrics else None
    for result in session:
        if metrics:
            metrics.write({**vars(result), "time": time.time()})
        if dist.get_rank() == 0:
            print(f"iteration {result.iteration + 1}: loss {result.loss:.4f}, {result.world_size} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
