"""Faults of a cluster's links: nodes that are cut off, pairs that are cut apart, lost packets.

Packets are dropped in the switch, so nobody is told: no FIN, no RST, and the carrier stays. All rules come from one
file that nft(8) takes at once, so no change is ever half done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from unicron_ctl.lab.cluster.network import HEAD, Network
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.whole_file import write_whole

_PARTS = 10_000  # a share of packets is told to the kernel in parts of this


@dataclass
class Faults:
    """Hosts without power, hosts that are cut off, pairs that are cut apart, and the share of packets lost by host."""

    off: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    apart: list[tuple[str, str]] = field(default_factory=list)
    loss: dict[str, float] = field(default_factory=dict)


def rules(faults: Faults) -> str:
    """The switch's whole rule set, for `nft -f`."""
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
    # Added so that it can be deleted: nft has no "delete if there".
    fresh = "add table bridge links\ndelete table bridge links\n"
    return fresh + f"table bridge links {{ chain forward {{ {chain}; }}; }}\n"


def share_of(text: str) -> float:
    """A share of packets as a number from 0 to 1: "10%", "0.5 %". Raises UserError (wrong use)."""
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
        """The faults at present."""
        try:
            known = json.loads(self._file.read_text())
        except FileNotFoundError:
            return Faults()
        return Faults(**known | {"apart": [(a, b) for a, b in known["apart"]]})

    def cut(self, hosts: Iterable[str], others: Iterable[str] = ()) -> None:
        """Cuts each of the hosts off from everything; with `others`, only from those, and those only from them."""
        hosts, others = self._check_hosts(hosts), self._check_hosts(others)
        if both := sorted(hosts & others):
            raise UserError(f"{both[0]} cannot be cut from itself; name different hosts", WRONG_USE)
        with self._change() as faults:
            if others:
                faults.apart = sorted({*faults.apart, *_pairs(hosts, others)})
            else:
                faults.cut = sorted({*faults.cut, *hosts})

    def heal(self, hosts: Iterable[str] = (), others: Iterable[str] = ()) -> None:
        """Mends all that is wrong with the links of the hosts, or of all; with `others`, only what is between them.

        A node without power stays without.
        """
        hosts, others = self._check_hosts(hosts) or {HEAD, *self._nodes}, self._check_hosts(others)
        with self._change() as faults:
            if others:
                faults.apart = [pair for pair in faults.apart if pair not in _pairs(hosts, others)]
                return
            faults.cut = [host for host in faults.cut if host not in hosts]
            faults.apart = [pair for pair in faults.apart if not hosts & set(pair)]
            faults.loss = {host: share for host, share in faults.loss.items() if host not in hosts}

    def loss(self, hosts: Iterable[str], share: float) -> None:
        """Loses that share (0 to 1) of the packets to and from each of the hosts; 0 ends it."""
        hosts = self._check_hosts(hosts)
        with self._change() as faults:
            kept = {host: known for host, known in faults.loss.items() if host not in hosts}
            faults.loss = kept | (dict.fromkeys(sorted(hosts), share) if share else {})

    def power(self, nodes: Iterable[str], on: bool) -> None:
        """Switches a node's link off or on: a node without power neither answers nor refuses, whatever has been done to
        its processes."""
        with self._change() as faults:
            faults.off = sorted(set(faults.off) - set(nodes) if on else {*faults.off, *nodes})

    @contextlib.contextmanager
    def _change(self) -> Iterator[Faults]:
        """Yield the faults to be changed, and give the new ones to the switch."""
        with open(self._file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            faults = self.faults()
            yield faults
            self._network.rules(rules(faults))
            write_whole(self._file, json.dumps(asdict(faults)))

    def _check_hosts(self, hosts: Iterable[str]) -> set[str]:
        found = set(hosts)
        for host in sorted(found):
            check_host(host, self._nodes)
        return found


def check_host(host: str, nodes: Collection[str]) -> None:
    """Raises UserError (wrong use) for a name that is neither a node nor the head."""
    if host != HEAD and host not in nodes:
        raise UserError(f"no node {host!r}; this cluster has n1 to n{len(nodes)} and {HEAD}", WRONG_USE)


def _pairs(hosts: Collection[str], others: Collection[str]) -> set[tuple[str, str]]:
    """Each of the one with each of the other, in the order in which pairs are kept."""
    return {(min(a, b), max(a, b)) for a in hosts for b in others}
