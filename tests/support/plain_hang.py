"""An ordinary script with torch's DistributedDataParallel and a checkpoint, one rank of which hangs once.

PLAIN_OUT: its folder. PLAIN_HANG: how it hangs (see HANGS), PLAIN_RANK: who, PLAIN_AT: in which step. PLAIN_STEP:
seconds of a step; PLAIN_TIMEOUT: of the process group's time-out, where it is not to be torch's own. Rank 0 writes each
step's time and its process to PLAIN_OUT/steps, the rank that hangs the time when it begins to PLAIN_OUT/hung, and all
end when there is PLAIN_OUT/stop, or after PLAIN_STEPS.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def spin() -> None:
    while True:
        pass


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Stuck(torch.autograd.Function):
    """Never comes back from its backward."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.0

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(100_000)
        return gradient


HANGS = {
    "sleep": lambda: time.sleep(100_000),
    "deadlock": deadlock,
    "spin": spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "backward": lambda: None,
}


def main() -> None:
    out, how = Path(os.environ["PLAIN_OUT"]), os.environ.get("PLAIN_HANG", "")
    who, when = int(os.environ.get("PLAIN_RANK", "1")), int(os.environ.get("PLAIN_AT", "30"))
    seconds, last = float(os.environ.get("PLAIN_STEP", "0.1")), int(os.environ.get("PLAIN_STEPS", "1000000"))
    limit = os.environ.get("PLAIN_TIMEOUT")
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(limit)) if limit else None)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, first = out / "checkpoint.pt", 0
    if checkpoint.is_file():
        state = torch.load(checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, last):
        time.sleep(seconds)  # a device's work
        stuck = False
        if how and rank == who and step == when and not (out / "hung").exists():
            (out / "hung").write_text(str(time.time()))
            HANGS[how]()
            stuck = how == "backward"
        optimizer.zero_grad()
        result = model(torch.randn(8, 64))
        (Stuck.apply(result) if stuck else result).square().mean().backward()
        optimizer.step()
        if rank == 0:
            with (out / "steps").open("a") as file:
                file.write(f"{step} {time.time()} {os.getpid()}\n")
            if (step + 1) % 10 == 0:
                torch.save(
                    {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                    out / "checkpoint.new",
                )
                (out / "checkpoint.new").replace(checkpoint)
        end = torch.tensor(float((out / "stop").exists()))
        dist.all_reduce(end)
        if end:
            break
    # gloo's thread may still let go of the last tensor, for which it needs the interpreter's lock; torch waits for that
    # thread while it has the lock (2.13).
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
