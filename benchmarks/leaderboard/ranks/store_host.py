"""`store_host.py PORT`: a TCPStore on the head, which survives any node; the coordinator of torchrun and NVRx."""

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
