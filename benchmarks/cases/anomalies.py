"""From a real fault of a node to the event that names it. As root.

A job trains on a cluster whose nodes have links of their own. One node after the other loses packets, has one lossy
link, a slow disk, or a throttled processor. The kernel makes all faults: packets are dropped by nft(8) on the switch,
and limits of control groups slow the disk and the processor down. The time runs from just before the fault to the
event `anomaly` or `degraded`. No other node may be named, and none before the first fault.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.report import Report
from tests.support.jobs import TINY_PLAIN
from tests.support.links import LinksCluster, LinksJob

GOAL = 10.0  # seconds, of the median
LIMIT = 30.0  # after which a fault counts as not found
LEARNED = 20  # iterations before the first fault
GROUPS = Path("/sys/fs/cgroup")
NODES = 5


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    rounds: int = 3
    """Faults of each kind, on different nodes."""
    quiet_seconds: float = 60.0
    """Without a fault, before the first one."""
    only: str = ""
    """The faults to make, with commas between them; all by default."""
    rest_seconds: float = 40.0
    """From one fault to the next: an anomaly is over after three quiet rounds."""


SMALLEST = Sizes(1, 5.0, rest_seconds=0.0)


@dataclass(frozen=True)
class Found:
    """One fault."""

    fault: str
    node: str
    seconds: float | None
    """Until an event named the node; None if none did."""
    says: str
    others: list[str]
    """Why other nodes were named meanwhile."""


def measure(sizes: Sizes, report: Report) -> None:
    """Make each fault by turns."""
    if os.getuid():
        report.figure("faults made: they need root", 0)
        return
    with tempfile.TemporaryDirectory() as folder, LinksCluster(Path(folder), NODES) as site:
        job = site.submit(NODES, TINY_PLAIN, TINY_SLOW="0.05")
        job.whole(NODES, 120.0)
        job.reached(LEARNED)
        time.sleep(sizes.quiet_seconds)
        report.figure("nodes named without a fault", len(_named(site, 0.0)), "", 0)
        found = list(_play(site, job, sizes))
    for name in _chosen(sizes):
        rounds = [one for one in found if one.fault == name]
        times = [one.seconds if one.seconds is not None else LIMIT for one in rounds]
        for one in rounds:
            report.text(f"{name} of {one.node}: {one.says}{f'; also named: {one.others}' if one.others else ''}")
        report.figure(f"{name}: the node is named, median", statistics.median(times), "s", GOAL)
    right = sum(one.seconds is not None and not one.others for one in found)
    report.figure("faults whose node alone is named", 100.0 * right / len(found), "%", least=95.0)
    report.details = found


def _play(site: LinksCluster, job: LinksJob, sizes: Sizes) -> Iterator[Found]:
    nodes = itertools.cycle(f"n{number}" for number in range(1, NODES + 1))
    for _ in range(sizes.rounds):
        for name, fault in _chosen(sizes).items():
            node = next(nodes)
            job.reached(LEARNED)
            began = time.time()
            with fault(site, node) as blamed:
                yield _wait(site, name, blamed, began)
            time.sleep(sizes.rest_seconds)


def _wait(site: LinksCluster, name: str, blamed: set[str], began: float) -> Found:
    """Wait until one of the nodes that may be blamed is named."""
    seconds, says = None, "not found"
    while seconds is None and time.time() - began < LIMIT:
        for at, node, text in _named(site, began):
            if node in blamed and seconds is None:
                seconds, says = at - began, f"{at - began:.1f} s, {text}"
        time.sleep(1.0)
    time.sleep(2.0)  # another node may be named with it
    others = [text[:120] for _, node, text in _named(site, began) if node not in blamed]
    return Found(name, "+".join(sorted(blamed)), seconds, says, others)


def _named(site: LinksCluster, since: float) -> list[tuple[float, str, str]]:
    """Return (when, node, reason) of all events since then that name a node."""
    found = [event for kind in ("anomaly", "degraded") for event in site.controller.events(kind)]
    return sorted((e["time"], e["node"], e["reason"]) for e in found if e["time"] >= since and e["node"])


# ---------------------------------------------------------------- faults
@contextlib.contextmanager
def _loses_packets(site: LinksCluster, node: str) -> Iterator[set[str]]:
    site.loss(node, 0.2)
    try:
        yield {node}
    finally:
        site.loss(node, 0.0)


@contextlib.contextmanager
def _lossy_link(site: LinksCluster, node: str) -> Iterator[set[str]]:
    """20 % are lost between the node and the next one alone: either end may be blamed."""
    network, other = site.cluster.layout.network, f"n{int(node[1:]) % NODES + 1}"
    pairs = ((node, other), (other, node))
    drops = "; ".join(f"iifname {a} oifname {b} numgen random mod 100 < 20 drop" for a, b in pairs)
    chain = "type filter hook forward priority 1"
    network.rules(f"table bridge lossy {{ chain forward {{ {chain}; {drops}; }}; }}\n")
    try:
        yield {node, other}
    finally:
        network.rules("delete table bridge lossy\n")


@contextlib.contextmanager
def _slow_disk(site: LinksCluster, node: str) -> Iterator[set[str]]:
    """The disk does four operations a second for this node."""
    device = os.stat(site.folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    limits = {f"blkio.throttle.{way}_iops_device": f"{name} 4" for way in ("read", "write")}
    with _limited(site, node, "blkio", limits, {"io.max": f"{name} riops=4 wiops=4"}):
        yield {node}


@contextlib.contextmanager
def _throttled_processor(site: LinksCluster, node: str) -> Iterator[set[str]]:
    """The node's processes get a twentieth of a core."""
    limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "5000"}
    with _limited(site, node, "cpu", limits, {"cpu.max": "5000 100000"}):
        yield {node}


FAULTS: dict[str, Callable[[LinksCluster, str], contextlib.AbstractContextManager[set[str]]]] = {
    "20 % packet loss": _loses_packets,
    "lossy link": _lossy_link,
    "slow disk": _slow_disk,
    "throttled processor": _throttled_processor,
}


def _chosen(sizes: Sizes) -> dict[str, Callable[[LinksCluster, str], contextlib.AbstractContextManager[set[str]]]]:
    return {name: FAULTS[name] for name in (sizes.only.split(",") if sizes.only else FAULTS)}


@contextlib.contextmanager
def _limited(site: LinksCluster, node: str, controller: str, v1: dict[str, str], v2: dict[str, str]) -> Iterator[None]:
    """Put the node's processes into a control group with limits."""
    old = (GROUPS / controller).is_dir()
    parent = GROUPS / controller if old else GROUPS
    group = parent / f"unicron-anomalies-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in (v1 if old else v2).items():
            (group / name).write_text(value)
        for pid in _processes(site, node):
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()


def _processes(site: LinksCluster, node: str) -> list[int]:
    """Return the processes on the node's network."""
    network = os.stat(Path("/run/netns") / site.cluster.layout.network.namespace(node)).st_ino
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.stat(entry / "ns" / "net").st_ino == network:
                found.append(int(entry.name))
    return found
