"""One rank of `benchmarks.process_groups`: it joins two others, is in one phase when the last of them is killed, is
told to break off, and joins the one that is left. Its line on standard output says how long each took."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.generations.unblock import Unblocker
from unicron_transition.seams import gloo

LIMIT = datetime.timedelta(seconds=10)
VICTIM = 2
_dist: Any = dist  # with names that torch has from 2.14 on
LARGE = 1 << 26  # elements of four bytes: long enough on its way to be killed in


class Way:
    """How ranks join, break off and join again. `torch.distributed`'s private names are those that its text tells users
    to try (from 2.14 on)."""

    def __init__(self, name: str, rank: int, store: Any):
        self.name, self.rank, self.store = name, rank, store
        self.cut = threading.Event()
        self.unblocker = Unblocker()
        if name == "unicron":
            gloo.abandon_lost_messages(self.cut.is_set)

    def join(self, generation: int, members: list[int]) -> None:
        """Join these ranks: the first time all three, then the two that are left."""
        own = dist.PrefixStore(f"generation {generation}", self.store)
        if self.name == "reconfigure":
            if not dist.is_initialized():
                _dist.init_process_group(
                    "gloo", store=own, rank=self.rank, world_size=len(members), timeout=LIMIT, enable_reconfigure=True
                )
            own.set(str(self.rank), _dist._get_reconfigure_handle())
            handles = [own.get(str(member)).decode() for member in members]
            _dist._reconfigure(generation, handles, timeout=LIMIT).wait()
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        with self.unblocker.building():
            dist.init_process_group("gloo", store=own, rank=self.rank, world_size=len(members), timeout=LIMIT)

    def break_off(self) -> None:
        """End whatever the main thread waits for; from another thread."""
        self.cut.set()
        if self.name == "unicron":
            self.unblocker.unblock()
        else:
            dist.group.WORLD.abort()


def be_in(phase: str, rank: int) -> None:
    """Wait for the victim, which never comes: RuntimeError when the wait ends."""
    large, small = torch.ones(LARGE), torch.zeros(4)
    if phase == "reduce":
        while True:
            dist.all_reduce(large)
    if phase == "barrier":
        if rank == VICTIM:
            time.sleep(600.0)
        dist.barrier()
    if rank == 1:  # waits for a message that was never sent
        dist.irecv(small, VICTIM).wait()
    elif (rank == VICTIM) == (phase == "receive"):
        dist.isend(large, 0 if rank == VICTIM else VICTIM).wait()
    else:
        dist.irecv(large, VICTIM if rank == 0 else 0).wait()


def main() -> None:
    """The rank's life."""
    torch.set_num_threads(1)
    rank, name, phase = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    way = Way(name, rank, dist.TCPStore("127.0.0.1", int(sys.argv[4]), None, False, timeout=LIMIT))
    way.join(1, [0, 1, VICTIM])
    dist.all_reduce(torch.ones(4))
    broken: list[float] = []
    ended: list[float] = []

    def listen() -> None:
        sys.stdin.readline()
        broken.append(time.monotonic())
        way.break_off()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    with contextlib.suppress(RuntimeError):
        be_in(phase, rank)
    ended.append(time.monotonic())
    while not broken:  # gloo itself told this rank, before the order to break off
        time.sleep(0.01)
    began = time.monotonic()
    way.join(2, [0, 1])
    whole = torch.ones(4)
    dist.all_reduce(whole)
    assert whole.tolist() == [2.0] * 4 and dist.get_world_size() == 2
    print(json.dumps({"ended": max(0.0, ended[0] - broken[0]), "joined": time.monotonic() - began}), flush=True)
    os._exit(0)  # a thread may hang in gloo


if __name__ == "__main__":
    main()
