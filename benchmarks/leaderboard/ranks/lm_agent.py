"""`lm_agent.py ARGUMENT...`: torchrun with lm-resiliency's rendezvous backend, and a link to the manager.

The entry point of lm-resiliency 0.2.0 names a function that torch cannot call
(findings/lm-resiliency-backend-cannot-be-registered.sh), so the backend is registered here.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from lm_resiliency.integrations.torchrun import derive_torchrun_node_id, get_rendezvous_handler_creator
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from benchmarks.leaderboard.ranks.lm_link import Link


def keep_link() -> None:
    """Tell the manager of this node, which has just been registered."""
    identity = Path(os.environ["LM_RESILIENCY_MACHINE_ID_PATH"]).read_text().strip()
    link = Link(agent=derive_torchrun_node_id(identity))
    while True:
        link.wait()
        time.sleep(0.2)
        link.say()


def create(params: RendezvousParameters) -> RendezvousHandler:
    handler = get_rendezvous_handler_creator()(params)
    threading.Thread(target=keep_link, daemon=True).start()
    return handler


def main() -> None:
    rendezvous_handler_registry.register("lm_resiliency", create)
    run.main()


if __name__ == "__main__":
    main()
