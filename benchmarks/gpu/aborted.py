"""A collective whose peer is gone, without sessions: the last of three ranks dies or stops.

    python -m benchmarks.gpu.aborted gloo|nccl|apart

It uses the product's `Unblocker` and `Aborter`. Every step has a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from benchmarks.gpu.rows import on_card, patience, row

KINDS = {
    "killed": "the peer is killed",
    "stopped": "the peer is stopped (SIGSTOP)",
    "first": "the peer is killed before the first collective",
}
SIZE = 3
FREED_AFTER = 1.0  # seconds from the beginning of the collective to the abort
KICK = 0.02  # seconds between two aborts
STEP_LIMIT, RUN_LIMIT = 12.0 * patience(), 60.0 * patience()
ELEMENTS = 1 << 20


class Survivor:
    """One rank that goes on, and prints its results as JSON lines."""

    def __init__(self, rank: int, port: int, backend: str):
        import torch
        import torch.distributed as dist

        from unicron_transition.generations.unblock import Unblocker
        from unicron_transition.seams.nccl import Aborter, keep_torch_from_aborting

        self.torch, self.dist = torch, dist
        self.device = torch.device("cuda", 0) if on_card() else torch.device("cpu")
        if on_card():
            torch.cuda.set_device(self.device)
        self.backend = "gloo" if backend == "gloo" or not on_card() else "nccl"
        if self.backend == "nccl":
            keep_torch_from_aborting()
        self.aborter = Aborter()
        self.unblocker = Unblocker(self.aborter.abort)
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))

    def say(self, what: str, **figures: Any) -> None:
        print(json.dumps({"rank": self.rank, "what": what, **figures}), flush=True)

    def limited(self, work: Callable[[], Any], limit: float = STEP_LIMIT) -> dict[str, Any]:
        """Return how `work` ends in a thread ("returned VALUE", "raised ERROR" or "hangs"), and its seconds."""
        found: dict[str, Any] = {"how": "hangs"}

        def target() -> None:
            if on_card():
                self.torch.cuda.set_device(self.device)
            try:
                found["how"] = f"returned {work()}"
            except Exception as error:
                found["how"] = f"raised {type(error).__name__}: {error}".splitlines()[0][:300]

        began = time.monotonic()
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(limit)
        return {"how": found["how"], "seconds": round(time.monotonic() - began, 3)}

    def world(self, name: str, rank: int, size: int) -> None:
        """Form a generation's world."""
        store = self.dist.PrefixStore(name, self.store)
        with self.unblocker.building():
            self.dist.init_process_group(
                self.backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
            )

    def reduce(self) -> float:
        """Return the result of an all-reduce of ones."""
        tensor = self.torch.ones(ELEMENTS, device=self.device)
        self.dist.all_reduce(tensor)
        return float(tensor.cpu()[-1])

    def run(self, kind: str) -> None:
        self.say("world", **self.limited(lambda: self.world("a", self.rank, SIZE), 30.0))
        if kind != "first":
            self.say("collective", **self.limited(self.reduce, 30.0))
            self.say("again", **self.limited(self.reduce))
        if self.rank == SIZE - 1:
            for rank in range(SIZE - 1):
                self.store.wait([f"there.{rank}"])
            self.store.set("gone", "1")
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
            time.sleep(RUN_LIMIT)
        self.store.set(f"there.{self.rank}", "1")
        self.store.wait(["gone"])
        time.sleep(0.1)
        self.freed()
        self.afterwards()

    def freed(self) -> None:
        """Free a collective that lacks a peer by aborts, as the product's watch does."""
        over, aborts = threading.Event(), []

        def kick() -> None:
            if on_card():
                self.torch.cuda.set_device(self.device)
            time.sleep(FREED_AFTER)
            while not over.is_set():
                began = time.monotonic()
                count = self.unblocker.unblock()
                aborts.append((count, round(time.monotonic() - began, 3)))
                time.sleep(KICK)

        kicker = threading.Thread(target=kick, daemon=True)
        kicker.start()
        tensor = self.torch.full((ELEMENTS,), 7.0 + self.rank, device=self.device)
        held: list[Any] = []

        def collective() -> str:
            held.append(self.dist.all_reduce(tensor, async_op=True))
            held[0].wait()
            values = tensor.cpu()
            same = bool((values == 7.0 + self.rank).all())
            return "with the tensor as it was" if same else f"with {float(values[0]):.3g}, {float(values[-1]):.3g}"

        ended = self.limited(collective)
        over.set()
        kicker.join(STEP_LIMIT)
        self.say("freed", **ended, aborts=aborts[:3], count=len(aborts))
        if held:
            work = held[0]
            self.say("completed", **self.limited(work.is_completed))
            self.say("work", **self.limited(lambda: str(work.exception())[:200]))

    def afterwards(self) -> None:
        """Use the device, the dead group, and a new one."""
        ones = self.torch.ones(8, device=self.device)
        self.say("stream", **self.limited(lambda: float(ones.sum())))
        self.say("later", **self.limited(self.reduce, 6.0))
        self.say("stream after it", **self.limited(lambda: float(ones.sum()), 6.0))
        self.say("destroyed", **self.limited(self.dist.destroy_process_group))
        self.unblocker.disarm()
        self.aborter.forget_aborted()
        self.say("rebuilt", **self.limited(lambda: self.world("b", self.rank, SIZE - 1)))
        self.say("first collective", **self.limited(self.reduce, 20.0))
        sys.stdout.flush()
        os._exit(0)


def run(backend: str, kind: str) -> dict[int, dict[str, Any]]:
    """Return each rank's results by name. Raises AssertionError if one has none."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = []
    for rank in range(SIZE):
        apart = {"NCCL_HOSTID": f"rank{rank}"} if backend == "apart" else {}
        command = [sys.executable, "-m", "benchmarks.gpu.aborted", backend, kind, str(rank), str(store.port)]
        ranks.append(
            subprocess.Popen(command, env=os.environ | apart, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + RUN_LIMIT
    for rank, process in enumerate(ranks[:-1]):
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        sys.stderr.write(err[-6000:])
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        found[rank] = {line["what"]: line for line in lines}
        assert "rebuilt" in found[rank], f"rank {rank} ended after {list(found[rank])}: {err[-400:]}"
    ranks[-1].kill()
    sys.stderr.write(ranks[-1].communicate()[1][-3000:])
    return found


def main() -> int:
    backend = sys.argv[1]
    if len(sys.argv) > 2:
        Survivor(int(sys.argv[3]), int(sys.argv[4]), backend).run(sys.argv[2])
        return 0
    for kind, words in KINDS.items():
        with row(f"{backend}, {words}") as saw:
            found = run(backend, kind)
            first = found[0]
            new = [found[rank].get("first collective", {"how": "never", "seconds": 0}) for rank in found]
            parts = [
                f"the collective {first['freed']['how']} after {first['freed']['seconds']} s",
                f"aborts {first['freed']['aborts']}",
                f"work {first.get('work', {}).get('how', 'none')}",
                f"the stream {first['stream']['how']}",
                f"a later collective of the dead group {first['later']['how']} ({first['later']['seconds']} s)",
                f"then the stream {first['stream after it']['how']}",
                f"destroyed: {first['destroyed']['how']} ({first['destroyed']['seconds']} s)",
                f"rebuilt in {first['rebuilt']['seconds']} s: {first['rebuilt']['how']}",
                f"first collective {new[0]['how']} ({new[0]['seconds']} s)",
            ]
            fine = all(each["how"] == f"returned {SIZE - 1:.1f}" for each in new)
            saw("; ".join(parts), ok=fine, ranks=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
