"""The TCP sockets of this process, seen from several threads."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from unicron_detector.tcp_sockets import tcp_sockets, view_of

LIMIT = 20.0


def test_a_socket_is_found_at_its_own_descriptor_while_another_thread_looks_at_it():
    """A view has a descriptor for as long as it lasts: whoever took that one would soon break nothing, or another."""
    seen, done = threading.Event(), threading.Event()

    def look(descriptor):
        with view_of(descriptor) as view:
            seen.set()
            done.wait(0.2)
            return view.getsockname()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        inode = os.fstat(listener.fileno()).st_ino
        looking = pool.submit(look, listener.fileno())
        assert seen.wait(LIMIT)
        found = tcp_sockets()
        done.set()
        assert found[inode] == listener.fileno()
        assert looking.result(LIMIT) == listener.getsockname()


def test_a_child_finds_its_sockets_whatever_another_thread_looked_at_when_it_was_forked():
    held, done = threading.Event(), threading.Event()

    def hold(descriptor):
        with view_of(descriptor):
            held.set()
            done.wait(LIMIT)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        looking = pool.submit(hold, listener.fileno())
        assert held.wait(LIMIT)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(LIMIT))
            os._exit(os.fstat(listener.fileno()).st_ino not in tcp_sockets())
        assert os.waitpid(child, 0)[1] == 0
        done.set()
        looking.result(LIMIT)
