"""A network that swallows packets, for fault injection: this process's TCP connections stay open, but nothing gets
through, and no peer sees a reset. Standard library only; any user may do it, to his own sockets alone.

The kernel drops and does not acknowledge what arrives, by a filter that accepts nothing (SO_ATTACH_FILTER, socket(7)).
What leaves is paced down (SO_MAX_PACING_RATE, tcp(7)): a segment or so still gets out. Listening sockets no longer
answer. RDMA is not affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct

from unicron_detector.tcp_sockets import tcp_sockets, view_of

SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MAX_PACING_RATE = 26, 27, 47  # asm-generic/socket.h
_RETURN = 6  # BPF_RET | BPF_K: accept so many bytes, here none
SLOW, UNLIMITED = 1000, 0xFFFFFFFF  # bytes per second


def dig(pace: bool = True) -> set[int]:
    """Cut off every TCP socket of this process; return their inodes, for :func:`fill`. pace: also hold back what leaves
    (not for a process that keeps silent by itself: the kernel makes up for the delay long afterwards)."""
    done = set()
    for inode, descriptor in tcp_sockets().items():
        with contextlib.suppress(OSError), view_of(descriptor) as view:
            deafen(view)
            done.add(inode)
            if pace:
                view.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, SLOW)
    return done


def fill(inodes: set[int]) -> None:
    """Let packets through again; TCP repeats what was lost within some seconds."""
    for inode, descriptor in tcp_sockets().items():
        if inode in inodes:
            with contextlib.suppress(OSError), view_of(descriptor) as view:
                undeafen(view)
                view.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", UNLIMITED))


def deafen(one: socket.socket) -> None:
    """Let nothing reach this socket any more; if it listens, it no longer answers. Raises OSError."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    drop_all = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, drop_all)


def undeafen(one: socket.socket) -> None:
    """Let data reach this socket again. Raises OSError for one that was not deaf."""
    one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
