"""An ordinary distributed script, as torchrun would start it: env:// variables, a collective in each step, a checkpoint
of its own. With PLAIN_BACKEND=gloo it uses torch, else sockets, which start at once.

Each rank writes a line per step to PLAIN_OUT/steps.ELEMENT. A file `stop` there ends all ranks after the same step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

OUT = Path(os.environ["PLAIN_OUT"])
ELEMENT = "SLURM_ARRAY_TASK" + "_ID"  # an array whose script names the variable is a sweep
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Sockets:
    """Rank 0 gathers a number from each and hands the sums round."""

    def __init__(self) -> None:
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers = []
        if RANK == 0:
            with socket.create_server(where) as server:
                self.peers = [server.accept()[0] for _ in range(SIZE - 1)]
            return
        for _ in range(400):
            try:
                self.peers = [socket.create_connection(where)]
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("no rank 0")

    def sums(self, *values: float) -> list[float]:
        if RANK:
            self._send(self.peers[0], list(values))
            return self._take(self.peers[0])
        every = [list(values), *(self._take(peer) for peer in self.peers)]
        total = [sum(column) for column in zip(*every, strict=True)]
        for peer in self.peers:
            self._send(peer, total)
        return total

    @staticmethod
    def _send(peer: socket.socket, values: list[float]) -> None:
        peer.sendall(json.dumps(values).encode().ljust(100))

    @staticmethod
    def _take(peer: socket.socket) -> list[float]:
        data = b""
        while len(data) < 100:
            more = peer.recv(100 - len(data))
            if not more:
                raise ConnectionResetError("Connection reset by peer")
            data += more
        return json.loads(data)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


class Gloo:
    """torch's own."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)

    def sums(self, *values: float) -> list[float]:
        tensor = self._torch.tensor(values)
        self._dist.all_reduce(tensor)
        return tensor.tolist()

    def close(self) -> None:
        # what torch asks for: a process that ends without it aborts now and then (pytorch#190489)
        self._dist.destroy_process_group()


def main() -> None:
    assert "UNICRON_AGENT" not in os.environ
    world = Gloo() if os.environ.get("PLAIN_BACKEND") == "gloo" else Sockets()
    checkpoint = OUT / "checkpoint"
    step = begun = int(checkpoint.read_text()) if checkpoint.is_file() else 0
    steps = OUT / f"steps.{os.environ.get(ELEMENT) or os.environ['SLURMD_NODENAME']}"
    while True:
        of_ranks, at, stop = world.sums(RANK + 1, step, (OUT / "stop").exists())
        assert of_ranks == SIZE * (SIZE + 1) / 2 and at == SIZE * step, "all ranks of one world, at the same step"
        step += 1
        if RANK == 0:
            checkpoint.with_suffix(".new").write_text(str(step))
            checkpoint.with_suffix(".new").replace(checkpoint)
        said = {"step": step, "begun": begun, "rank": RANK, "size": SIZE, "pid": os.getpid()}
        said |= {"generation": int(os.environ["UNICRON_GENERATION"]), "port": os.environ["MASTER_PORT"]}
        with steps.open("a") as file:
            file.write(json.dumps(said) + "\n")
        if stop:
            break
        time.sleep(0.02)
    world.close()
    print(f"rank {RANK} of {SIZE} is through after step {step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
