"""`store_host.py PORT`: a TCPStore on the head, which no node's death takes along. torchrun, ft_launcher and the
in-process wrapper meet there; it is their coordinator."""

from __future__ import annotations

import signal
import sys

import torch.distributed as dist


def main() -> None:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False, multi_tenant=True)
    print(f"listening on {store.port}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
