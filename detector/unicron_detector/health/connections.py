"""Packets that the node's TCP connections lost, by peer, from the kernel's socket statistics (sock_diag(7)).

Any user may ask for them. They are of the caller's network namespace. RDMA is not in them. Standard library only; the
layout is in docs/behaviour/node-counters.md.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Generator, Iterator
from typing import NamedTuple

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, INET_DIAG_INFO = 4, 20, 2
_NLM_F_REQUEST, _NLM_F_DUMP, _NLMSG_ERROR, _NLMSG_DONE = 1, 0x300, 2, 3
_STATES = 0b111110  # states of a connection that may still send: 1 (ESTABLISHED) to 5 (FIN_WAIT2)
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2
_MESSAGE = struct.Struct("=4xHH16s16sIII20x")  # struct inet_diag_msg, with its ports as they are
_ATTRIBUTE = struct.Struct("=HH")  # struct rtattr
# struct tcp_info: total_retrans at 100, data_segs_out at 156, dsack_dups at 216 (Linux 5.0)
_TOTAL_RETRANS, _DATA_SEGS_OUT, _DSACK_DUPS = 100, 156, 216
_LEAST_INFO = 220
WAIT_SECONDS = 1.0  # for the kernel's answer
MOST_PEERS = 64  # that are reported, those with the most losses first
MOST_ADDRESSES = 16


class Connection(NamedTuple):
    """One TCP connection."""

    key: tuple[int, int, bytes]
    local: str
    remote: str
    sent: int
    """Segments with data since its begin, repeated ones included."""
    lost: int
    """Segments that were sent again, without those that had arrived all the same."""


class PeerLoss(NamedTuple):
    """The connections to one peer. Segments a second."""

    sent: float
    lost: float


def read_connections() -> Iterator[Connection]:
    """Yield all connections to other hosts. Raises OSError."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(WAIT_SECONDS)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), _STATES)
            size = _HEADER.size + len(body)
            flags = _NLM_F_REQUEST | _NLM_F_DUMP
            kernel.sendall(_HEADER.pack(size, SOCK_DIAG_BY_FAMILY, flags, 1, 0) + body)
            while (data := kernel.recv(1 << 18)) and (yield from _messages(data, family)):
                pass


def _messages(data: bytes, family: int) -> Generator[Connection, None, bool]:
    """Yield the connections of one datagram. Returns whether more follow."""
    while len(data) >= _HEADER.size:
        size, kind, *_ = _HEADER.unpack_from(data)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or size < _HEADER.size:
            return False
        found = parse_connection(data[_HEADER.size : size], family)
        if found is not None:
            yield found
        data = data[(size + 3) & ~3 :]
    return True


def parse_connection(message: bytes, family: int) -> Connection | None:
    """Read a struct inet_diag_msg with its attributes; None for one to this host, or of a kernel that says less."""
    source_port, target_port, source, target, _, cookie, cookie_high = _MESSAGE.unpack_from(message)
    local, remote = (_address(each, family) for each in (source, target))
    if local == remote or remote.is_loopback:
        return None
    rest = message[_MESSAGE.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        if size < _ATTRIBUTE.size:
            return None
        info = rest[_ATTRIBUTE.size : size]
        if kind == INET_DIAG_INFO and len(info) >= _LEAST_INFO:
            again, sent, twice = (
                int.from_bytes(info[at : at + 4], "little") for at in (_TOTAL_RETRANS, _DATA_SEGS_OUT, _DSACK_DUPS)
            )
            key = (cookie, cookie_high, struct.pack("=HH", source_port, target_port))
            return Connection(key, str(local), str(remote), sent, max(0, again - twice))
        rest = rest[(size + 3) & ~3 :]
    return None


def _address(data: bytes, family: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(data[:4])
    six = ipaddress.IPv6Address(data)
    return six.ipv4_mapped or six


class Losses:
    """Follows the connections from one reading to the next."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int, bytes], Connection] = {}
        self._at: float | None = None
        self.addresses: list[str] = []
        """The node's own, as the connections show them."""

    def read(self, now: float) -> dict[str, PeerLoss]:
        """Return what was lost since the last call, by the peer's address; only peers with losses."""
        try:
            seen = {one.key: one for one in read_connections()}
        except OSError:
            return {}
        return self.compare(seen, now)

    def compare(self, seen: dict[tuple[int, int, bytes], Connection], now: float) -> dict[str, PeerLoss]:
        """Take in the present connections."""
        before, last_at = self._last, self._at
        self._last, self._at = seen, now
        self.addresses = sorted({one.local for one in seen.values()})[:MOST_ADDRESSES]
        if last_at is None or now <= last_at:
            return {}
        sums: dict[str, list[int]] = {}
        for key, one in seen.items():
            old = before.get(key)
            both = sums.setdefault(one.remote, [0, 0])
            both[0] += max(0, one.sent - (old.sent if old else 0))
            both[1] += max(0, one.lost - (old.lost if old else 0))
        seconds = now - last_at
        worst = sorted((each for each in sums.items() if each[1][1]), key=lambda each: -each[1][1])[:MOST_PEERS]
        return {peer: PeerLoss(sent / seconds, lost / seconds) for peer, (sent, lost) in worst}
