"""Train inside NVRx's in-process wrapper, as its `optimal_example.py` does.

Model and optimizer are built once, what depends on the process group at every restart. The state is read from the
newest checkpoint, as its usage guide recommends. Rank 0 hosts its store by default, and its loss would end the job;
here `store_host.py` hosts it on the head, by a store class of our own, as the guide's *Restrictions* suggest. Time-outs
are shortened for a job of short iterations; the defaults are 30 to 120 seconds. The wrapper reads annotations, so they
are not postponed here.
"""

import datetime
import logging
import os
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.store import StoreMixin
from torch.nn.parallel import DistributedDataParallel

from benchmarks.leaderboard.ranks import core


class HeadStore(dist.TCPStore, StoreMixin):
    """A client of the store on the head."""

    def __init__(self) -> None:
        address, port = os.environ["LEADERBOARD_STORE"].split(":")
        super().__init__(address, int(port), is_master=False, wait_for_workers=False, multi_tenant=True)


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


@inprocess.Wrapper(
    store_factory=HeadStore,
    store_kwargs={},
    monitor_thread_interval=seconds(0.1),
    monitor_process_interval=seconds(0.1),
    heartbeat_interval=seconds(0.2),
    progress_watchdog_interval=seconds(0.2),
    soft_timeout=seconds(2.5),
    hard_timeout=seconds(5),
    heartbeat_timeout=seconds(2),
    barrier_timeout=seconds(60),
    completion_timeout=seconds(60),
    last_call_wait=seconds(0.2),
    termination_grace_time=seconds(0.5),
)
def train(base: dist.Store, parts: Any, notes: core.Notes, call_wrapper: inprocess.CallWrapper | None = None) -> None:
    """Train from the newest checkpoint; the wrapper calls it again after each fault, with the remaining ranks."""
    assert call_wrapper is not None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"training{call_wrapper.iteration}", base)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=core.START_TIMEOUT)
    group = dist.new_group(timeout=core.TIMEOUT)
    model, optimizer = parts
    files = core.Files()
    first = files.load(model, optimizer)
    ddp = DistributedDataParallel(model, process_group=group)
    for iteration in range(first, core.ITERATIONS):
        optimizer.zero_grad()
        mine, total = core.compute(ddp, iteration, rank, size, notes)
        dist.all_reduce(total, group=group)
        optimizer.step()
        notes.step(iteration, float(total), size, rank, mine)
        call_wrapper.ping()
        with call_wrapper.atomic():
            files.save(model, optimizer, iteration + 1, rank)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    notes = core.Notes(int(os.environ["RANK"]))
    train(HeadStore(), core.build(), notes)


if __name__ == "__main__":
    main()
