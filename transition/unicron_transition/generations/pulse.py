"""Tells from the kernel's socket statistics whether a collective's network makes progress while the main thread waits.

A slow or lossy link is no hang: bytes move, or packets are sent again and again. A peer that hangs still acknowledges
them, since its kernel does that. A cut link also sends again, so retries count only for a while. Only gloo's sockets
are looked at, not NCCL's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Mapping

from unicron_detector.tcp_sockets import view_of

# Retries count for this long. With the shortest limit of an iteration (1 s) five tries may be lost in a row, the last
# after 6.2 s: at 10 % loss each way that happens once in 4,000 losses that only a time-out shows.
RETRY_SECONDS = 5.5
# struct tcp_info of tcp(7): retransmits, unacked, last_data_sent, last_ack_recv (milliseconds ago), bytes_acked,
# bytes_received
_INFO = struct.Struct("=xxB21xI16xI8xI60xQQ")


class Pulse:
    """The progress of a rank's connections, for one thread."""

    def __init__(self, connections: Callable[[], Mapping[int, int]]):
        self._connections = connections  # returns inode -> file descriptor
        self._bytes = -1
        self._retries = 0
        self._since: dict[int, float] = {}  # inode -> when its retries began

    def measure(self, fresh: bool, now: float | None = None) -> int:
        """Return a number that has changed since the last call if the network makes progress; 0 if it does not. fresh:
        the main thread was busy since, so bytes that have moved prove nothing."""
        now, total, again = time.monotonic() if now is None else now, 0, {}
        for inode, descriptor in self._connections().items():
            with contextlib.suppress(OSError):
                retransmits, unacknowledged, sent, heard, acked, received = _info(descriptor)
                total += acked + received
                if retransmits and unacknowledged and heard > sent:  # a peer with a full buffer still answers
                    again[inode] = self._since.get(inode, now)
        moved = not fresh and 0 <= self._bytes != total
        self._bytes, self._since = total, again
        tries = any(now - since < RETRY_SECONDS for since in self._since.values())
        if not moved and not tries:
            return 0
        self._retries += 1
        return total + self._retries


def _info(descriptor: int) -> tuple[int, ...]:
    with view_of(descriptor) as view:
        data = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    return _INFO.unpack(data)
