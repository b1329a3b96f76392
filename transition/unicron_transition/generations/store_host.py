"""The rendezvous store of a node: a process of its own that outlives the node's ranks. `python -m
unicron_transition.generations.store_host [forked]`.

It prints `port N` and serves until its standard input closes, so that it never outlives the agent; `forked` from the
agent's zygote, it dies with the agent anyway. It is not part of the agent because importing torch takes seconds.

The import gives way to the ranks, which start at the same time and matter more. The service does not: while groups are
built all ranks wait for it, and on a node whose cores are busy sixteen ranks waited twice as long.

A job that heals for months forms many generations, and no rank goes back to an older one. The keys of older generations
are removed once no new ones are added: kept groups inside a replica may still make connections under theirs.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import select
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unicron_detector.processes.step_signals import ignore_step_signals

KEYS_SECONDS = 10.0  # between two clean-ups
KEPT_KEYS_SECONDS = 60.0  # without a new key; a connection takes at most a third of it (groups.ENTER_TIMEOUT)
_GENERATION = re.compile(r"([^/]+\.g(\d+)[^/]*)/")  # the controller's and the agents' prefixes


class OldKeys:
    """The keys of a store, from one clean-up to the next. Pure; `now` is of a clock that does not jump."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._changed: dict[str, float] = {}  # prefix -> when it got a new key

    def removable(self, keys: Iterable[str], now: float) -> list[str]:
        """Return the keys of generations before the newest that got no new key for KEPT_KEYS_SECONDS."""
        of_prefix: dict[str, list[str]] = {}
        number: dict[str, int] = {}
        for key in keys:
            if match := _GENERATION.match(key):
                of_prefix.setdefault(match[1], []).append(key)
                number[match[1]] = int(match[2])
                if key not in self._known:
                    self._changed[match[1]] = now
        newest = max(number.values(), default=0)
        settled = (prefix for prefix in of_prefix if now - self._changed[prefix] >= KEPT_KEYS_SECONDS)
        old = [prefix for prefix in settled if number[prefix] < newest]
        removed = [key for prefix in old for key in of_prefix[prefix]]
        self._known = {key for found in of_prefix.values() for key in found}.difference(removed)
        self._changed = {prefix: self._changed[prefix] for prefix in of_prefix if prefix not in old}
        return removed


def forget(store: Any, old: OldKeys, now: float) -> None:
    """Remove the keys that no rank needs any more."""
    for key in old.removable(store.list_keys(), now):
        store.delete_key(key)


def serve() -> Any:
    """Return a store that serves on a free port of all interfaces. Its thread has the niceness of the caller's."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))


def main() -> None:
    """Serve until standard input closes; if forked, until the agent dies."""
    ignore_step_signals()  # the agent ends this process
    with ThreadPoolExecutor(1) as usual:
        usual.submit(int).result()  # its thread is there before this one gives way
        os.nice(10)  # Linux: of this thread, and of those that it begins
        import torch.distributed  # noqa: F401

        store = usual.submit(serve).result()
    print(f"port {store.port}", flush=True)
    old = OldKeys()
    inputs = [] if sys.argv[1:] == ["forked"] else [sys.stdin.fileno()]
    while True:
        ready, _, _ = select.select(inputs, [], [], KEYS_SECONDS)
        if ready and not os.read(ready[0], 1 << 16):
            return
        with contextlib.suppress(RuntimeError):  # the ranks need the store more than its memory
            forget(store, old, time.monotonic())


if __name__ == "__main__":
    main()
