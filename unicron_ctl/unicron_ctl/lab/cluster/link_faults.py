"""Faults of a cluster's links: nodes that are cut off, pairs that are cut apart, lost packets.

The switch drops the packets, so no host sees a FIN or RST, and the carrier stays. nft(8) applies all rules in one
transaction, so no change is ever half done.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from unicron_ctl.lab.cluster.network import HEAD, Network
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.whole_file import write_whole

_PARTS = 10_000  # the kernel counts a share of packets in parts of this


class Faults(msgspec.Struct):
    """All faults at present."""

    off: list[str] = []
    """Hosts without power."""
    cut: list[str] = []
    """Hosts that are cut off."""
    apart: list[tuple[str, str]] = []
    """Pairs that are cut apart."""
    loss: dict[str, float] = {}
    """The share of packets that a host loses."""


def rules(faults: Faults) -> str:
    """Return the switch's whole rule set, for `nft -f`."""
    drops = []
    if silent := sorted({*faults.off, *faults.cut}):
        names = f"{{ {', '.join(silent)} }}"
        drops += [f"iifname {names} drop", f"oifname {names} drop"]
    for a, b in faults.apart:
        drops += [f"iifname {a} oifname {b} drop", f"iifname {b} oifname {a} drop"]
    for host, share in faults.loss.items():
        some = f"numgen random mod {_PARTS} < {round(share * _PARTS)} drop"
        drops += [f"iifname {host} {some}", f"oifname {host} {some}"]
    chain = "; ".join(["type filter hook forward priority 0", *drops])
    # Added first, since nft cannot delete a table that is not there.
    fresh = "add table bridge links\ndelete table bridge links\n"
    return fresh + f"table bridge links {{ chain forward {{ {chain}; }}; }}\n"


def share_of(text: str) -> float:
    """Read a share of packets ("10%", "0.5 %") as a number from 0 to 1. Raises UserError (wrong use)."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?%", text.strip())
    if match is None or float(match[1]) > 100:
        raise UserError(f"a share of packets must be 0% to 100%, not {text!r}", WRONG_USE)
    return float(match[1]) / 100


class Links:
    """The links of one cluster. Hosts are its nodes and `head`; methods raise UserError for others."""

    def __init__(self, network: Network, nodes: Collection[str]) -> None:
        self._network, self._nodes = network, nodes
        self._file: Path = network.folder / "links.json"

    def faults(self) -> Faults:
        """Return the faults at present."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Faults)
        except FileNotFoundError:
            return Faults()

    def cut(self, hosts: Iterable[str], others: Iterable[str] = ()) -> None:
        """Cut each of the hosts off from everything; with `others`, cut the two groups apart."""
        hosts, others = self._check_hosts(hosts), self._check_hosts(others)
        if both := sorted(hosts & others):
            raise UserError(f"{both[0]} cannot be cut from itself; name different hosts", WRONG_USE)
        with self._change() as faults:
            if others:
                faults.apart = sorted({*faults.apart, *_pairs(hosts, others)})
            else:
                faults.cut = sorted({*faults.cut, *hosts})

    def heal(self, hosts: Iterable[str] = (), others: Iterable[str] = ()) -> None:
        """Mend the links of the hosts, or of all; with `others`, only those between the two groups. A node without
        power stays off."""
        hosts, others = self._check_hosts(hosts) or {HEAD, *self._nodes}, self._check_hosts(others)
        with self._change() as faults:
            if others:
                faults.apart = [pair for pair in faults.apart if pair not in _pairs(hosts, others)]
                return
            faults.cut = [host for host in faults.cut if host not in hosts]
            faults.apart = [pair for pair in faults.apart if not hosts & set(pair)]
            faults.loss = {host: share for host, share in faults.loss.items() if host not in hosts}

    def loss(self, hosts: Iterable[str], share: float) -> None:
        """Lose this share (0 to 1) of the packets to and from each of the hosts; 0 ends it."""
        hosts = self._check_hosts(hosts)
        with self._change() as faults:
            kept = {host: known for host, known in faults.loss.items() if host not in hosts}
            faults.loss = kept | (dict.fromkeys(sorted(hosts), share) if share else {})

    def power(self, nodes: Iterable[str], on: bool) -> None:
        """Switch the nodes' links off or on: a node without power neither answers nor refuses."""
        with self._change() as faults:
            faults.off = sorted(set(faults.off) - set(nodes) if on else {*faults.off, *nodes})

    @contextlib.contextmanager
    def _change(self) -> Iterator[Faults]:
        """Yield the faults to be changed, and then apply them."""
        with open(self._file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            faults = self.faults()
            yield faults
            self._network.rules(rules(faults))
            write_whole(self._file, msgspec.json.encode(faults).decode())

    def _check_hosts(self, hosts: Iterable[str]) -> set[str]:
        found = set(hosts)
        for host in sorted(found):
            check_host(host, self._nodes)
        return found


def check_host(host: str, nodes: Collection[str]) -> None:
    """Raise UserError (wrong use) for a name that is neither a node nor the head."""
    if host != HEAD and host not in nodes:
        raise UserError(f"no node {host!r}; this cluster has n1 to n{len(nodes)} and {HEAD}", WRONG_USE)


def _pairs(hosts: Collection[str], others: Collection[str]) -> set[tuple[str, str]]:
    """Return all pairs of a host of each group, each pair in order."""
    return {(min(a, b), max(a, b)) for a in hosts for b in others}
