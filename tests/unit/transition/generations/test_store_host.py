"""The rendezvous store forgets the keys of generations that are over, with torch's own store and groups."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_transition.generations import store_host
from unicron_transition.generations.store_host import KEPT_KEYS_SECONDS, KEYS_SECONDS, OldKeys, forget

LIMIT = datetime.timedelta(seconds=90)
RANKS = 2


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=LIMIT)


def form(store: dist.TCPStore, clients: list[dist.TCPStore], prefix: str) -> None:
    """Form a group of real ranks that meet under this prefix."""
    groups = []

    def join(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(dist.PrefixStore(prefix, clients[rank]), rank, RANKS, LIMIT))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == RANKS


def test_a_thousand_generations_leave_no_more_keys_than_a_few(store):
    clients = [dist.TCPStore("127.0.0.1", store.port, None, False, timeout=LIMIT) for _ in range(RANKS)]
    old, most, of_one = OldKeys(), 0, 0
    for generation in range(1, 1001):
        if generation % 10:
            dist.PrefixStore(f"7.g{generation}", clients[0]).set("open", "1" * 200)
        else:
            form(store, clients, f"7.g{generation}")
        of_one = max(of_one, sum(key.startswith(f"7.g{generation}/") for key in store.list_keys()))
        forget(store, old, generation * KEYS_SECONDS)
        most = max(most, store.num_keys())
    assert 0 < of_one <= most <= of_one * (KEPT_KEYS_SECONDS / KEYS_SECONDS + 2)


def test_the_newest_generation_and_what_still_grows_stay():
    old = OldKeys()
    keys = ["7.g1/a", "7.g2/a", "7.g2.1.0/b", "other"]
    assert not old.removable(keys, 0.0)
    assert not old.removable([*keys, "7.g3/a"], KEPT_KEYS_SECONDS - 1)
    keys = [*keys, "7.g3/a", "7.g1/late"]  # of a group that lives on
    assert sorted(old.removable(keys, KEPT_KEYS_SECONDS)) == ["7.g2.1.0/b", "7.g2/a"]
    keys = ["7.g1/a", "7.g1/late", "7.g3/a", "other"]
    assert not old.removable(keys, 2 * KEPT_KEYS_SECONDS - 1)
    assert sorted(old.removable(keys, 2 * KEPT_KEYS_SECONDS)) == ["7.g1/a", "7.g1/late"]
    assert not old.removable(["7.g3/a", "other"], 100 * KEPT_KEYS_SECONDS)


QUICK = """
from unicron_transition.generations import store_host
store_host.KEYS_SECONDS, store_host.KEPT_KEYS_SECONDS = 0.05, 0.2
store_host.main()
"""


def test_a_nodes_store_does_so_and_ends_with_its_input():
    words = [sys.executable, "-c", QUICK]
    host = subprocess.Popen(
        words, cwd=ROOT, env=outside_slurm(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert host.stdout is not None and host.stdin is not None
        port = int(host.stdout.readline().split()[1])
        client = dist.TCPStore("127.0.0.1", port, None, False, timeout=LIMIT)
        for generation in (1, 2, 3):
            dist.PrefixStore(f"7.g{generation}", client).set("open", "1")
        wait_for(lambda: client.list_keys() == ["7.g3/open"], "the older generations' keys go")
        host.stdin.close()
        assert host.wait(LIMIT.total_seconds()) == 0
    finally:
        host.kill()
        host.wait()


def times_of_threads(pid: int) -> dict[int, tuple[int, int]]:
    """Thread -> its processor's time in nanoseconds, and its niceness."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        ran = int((task / "schedstat").read_text().split()[0])
        found[int(task.name)] = ran, int((task / "stat").read_text().rpartition(")")[2].split()[16])
    return found


def test_the_import_gives_way_to_the_ranks_and_the_service_does_not():
    words = [sys.executable, "-m", "unicron_transition.generations.store_host"]
    host = subprocess.Popen(
        words, cwd=ROOT, env=outside_slurm(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert host.stdout is not None and host.stdin is not None
        port = int(host.stdout.readline().split()[1])
        client = dist.TCPStore("127.0.0.1", port, None, False, timeout=LIMIT)
        before, usual = times_of_threads(host.pid), os.nice(0)

        def served() -> set[int]:
            """Niceness of the threads that have run since: the kernel counts a thread's time by ticks."""
            for number in range(2000):
                client.set("key", str(number))
            after = times_of_threads(host.pid)
            return {after[thread][1] for thread in before if after[thread][0] > before[thread][0]}

        wait_for(lambda: usual in served(), "a thread of the usual niceness served")
        assert before[host.pid][1] == min(usual + 10, 19)
    finally:
        host.kill()
        host.communicate()


def test_a_generation_has_time_to_be_entered():
    from unicron_transition.generations.groups import ENTER_TIMEOUT

    assert 3 * ENTER_TIMEOUT <= store_host.KEPT_KEYS_SECONDS
