"""``python -m unicron_detector.health.pair_probe``: one node's part of a paired test
(:mod:`unicron_detector.health.pair_test`), started once per node.

The nodes of a group connect, agree on the best backend that all have (nccl if all see CUDA, gloo if all have torch,
otherwise plain sockets, so that the base install suffices), then check and measure: an all-reduce of known numbers,
known bytes sent there and back, a matrix product, latency and bandwidth. A line of JSON on stdout reports the start,
and another one the result. Exit status: 0 all as expected, 1 not, 2 wrong use.

``UNICRON_PAIR_FAULT=NODE:FAULT``, for tests only, makes that node do its work wrongly. FAULT is corrupt (bytes are
changed on their way), crash, hang or slow:SECONDS (before each message).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

BACKENDS = ("auto", "nccl", "gloo", "sockets")
MARK = "UNICRON-PAIR "
PORTS = 8  # tried in turn: one may be taken
CONNECT_SECONDS = 20.0
NUMBERS = 1 << 16  # of an all-reduce, 32 bit each
LARGE = 1 << 20  # bytes of one block for the bandwidth
SMALL = 8
PINGS = 50
MAX_BYTES = 1 << 26


class PairError(Exception):
    """The test failed; the text says why."""


def numbers(seed: int, count: int = NUMBERS) -> bytes:
    """Return `count` little-endian 32-bit numbers below 2^16, so that the sum over up to 2^15 ranks fits."""
    return b"".join(struct.pack("<H2x", value) for value in random.Random(seed).choices(range(1 << 16), k=count))


def add_numbers(parts: Sequence[bytes]) -> bytes:
    """Return the sum, number by number. One big integer is added: no number overflows into the next."""
    return sum(int.from_bytes(part, "little") for part in parts).to_bytes(len(parts[0]), "little")


def block(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# ---------------------------------------------------------------------------------------------- connections
class Link:
    """A socket with frames and a time limit per frame."""

    def __init__(self, sock: socket.socket, peer: str, seconds: float) -> None:
        self._sock, self._peer, self._seconds = sock, peer, seconds
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        self._sock.settimeout(self._seconds)
        try:
            self._sock.sendall(struct.pack("<I", len(data)) + data)
        except OSError as error:
            raise PairError(self._why(error)) from None

    def receive(self) -> bytes:
        deadline = time.monotonic() + self._seconds
        (size,) = struct.unpack("<I", self._read(4, deadline))
        if size > MAX_BYTES:
            raise PairError(f"{self._peer} sent a length of {size} bytes")
        return self._read(size, deadline)

    def close(self) -> None:
        self._sock.close()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._sock.recv(min(1 << 20, size - len(data)))
            except OSError as error:
                raise PairError(self._why(error)) from None
            if not part:
                raise PairError(f"{self._peer} closed the connection")
            data += part
        return bytes(data)

    def _why(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"{self._peer} does not answer within {self._seconds:g} s"
        return f"{self._peer}: {error.strerror or error}"


def ports(token: str) -> list[int]:
    """Return ports for rank 0: below the kernel's usual range of ephemeral ports, spread by the token."""
    first = 20000 + zlib.crc32(token.encode()) % 12000
    return [first + 13 * i for i in range(PORTS)]


def connect(rank: int, nodes: Sequence[str], address: str, token: str, seconds: float) -> dict[int, Link]:
    """Return links by rank: rank 0 has one to every other, the others one to rank 0. Raises PairError."""
    deadline = time.monotonic() + CONNECT_SECONDS
    if rank == 0:
        return _accept(nodes, token, seconds, deadline)
    hello = json.dumps([token, rank]).encode()
    while time.monotonic() < deadline:
        for port in ports(token):
            try:
                sock = socket.create_connection((address, port), min(2.0, seconds))
            except OSError:
                continue
            link = Link(sock, nodes[0], 1.0)
            try:
                link.send(hello)
                if link.receive() == token.encode():
                    return {0: Link(sock, nodes[0], seconds)}
            except PairError:
                pass
            link.close()  # something else listens there
        time.sleep(0.1)
    raise PairError(f"cannot reach {nodes[0]} at {address} within {CONNECT_SECONDS:g} s")


def _accept(nodes: Sequence[str], token: str, seconds: float, deadline: float) -> dict[int, Link]:
    links: dict[int, Link] = {}
    with _listener(token) as listener:
        while len(links) < len(nodes) - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except OSError:
                missing = [nodes[rank] for rank in range(1, len(nodes)) if rank not in links]
                raise PairError(f"{', '.join(missing)} did not come within {CONNECT_SECONDS:g} s") from None
            link = Link(sock, "a peer", 1.0)
            try:
                hello = json.loads(link.receive())
                if hello[0] != token or hello[1] not in range(1, len(nodes)):
                    raise ValueError
                link.send(token.encode())
            except (PairError, ValueError, LookupError, TypeError):
                link.close()
                continue
            links[hello[1]] = Link(sock, nodes[hello[1]], seconds)
    return links


def _listener(token: str) -> socket.socket:
    for port in ports(token):
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
            return socket.create_server(("", port), backlog=64)
        except OSError:
            continue
    raise PairError(f"none of the ports {ports(token)[0]} to {ports(token)[-1]} is free here")


# ---------------------------------------------------------------------------------------------- transports
class Sockets:
    """The tests over the links themselves."""

    name = "sockets"

    def __init__(self, rank: int, size: int, links: dict[int, Link]) -> None:
        self.rank, self.size, self._links = rank, size, links

    def all_reduce(self, data: bytes) -> bytes:
        if self.rank:
            self._links[0].send(data)
            return self._links[0].receive()
        total = add_numbers([data, *(self._links[rank].receive() for rank in range(1, self.size))])
        for link in self._links.values():
            link.send(total)
        return total

    def send(self, data: bytes, to: int) -> None:
        self._links[to].send(data)

    def receive(self, size: int, source: int) -> bytes:
        return self._links[source].receive()

    def compute(self) -> str:
        """Check that a checksum comes out the same twice."""
        data = block(7, LARGE)
        return "" if zlib.crc32(data) == zlib.crc32(bytes(data)) == 0x4D02AB7C else "a checksum comes out wrong"

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class Torch:
    """The tests over torch.distributed, on the CPU (gloo) or on one GPU (nccl)."""

    def __init__(self, rank: int, size: int, store: Any, backend: str, device: str, seconds: float) -> None:
        import datetime

        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._device = torch, dist, torch.device(device)
        self.rank, self.size, self.name = rank, size, backend
        if not dist.is_initialized():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds)
            )

    def _tensor(self, data: bytes, kind: str) -> Any:
        return self._torch.frombuffer(bytearray(data), dtype=getattr(self._torch, kind)).to(self._device)

    def _bytes(self, tensor: Any) -> bytes:
        return bytes(tensor.cpu().numpy().tobytes())

    def all_reduce(self, data: bytes) -> bytes:
        tensor = self._tensor(data, "int32")
        self._dist.all_reduce(tensor)
        return self._bytes(tensor)

    def send(self, data: bytes, to: int) -> None:
        self._dist.send(self._tensor(data, "uint8"), to)

    def receive(self, size: int, source: int) -> bytes:
        tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        self._dist.recv(tensor, source)
        return self._bytes(tensor)

    def compute(self) -> str:
        """Check a matrix product of small whole numbers, which is exact on every device."""
        torch = self._torch
        generator = torch.Generator().manual_seed(7)
        left, right = (torch.randint(-8, 8, (512, 512), generator=generator) for _ in range(2))
        product = (left.float().to(self._device) @ right.float().to(self._device)).cpu()
        wrong = int((product.long() != left @ right).sum())
        return f"a matrix product has {wrong} wrong numbers" if wrong else ""

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


class Faulty:
    """A transport that does its work wrongly, for tests (UNICRON_PAIR_FAULT)."""

    def __init__(self, inner: Sockets | Torch, fault: str) -> None:
        self._inner, (self._kind, _, value) = inner, fault.partition(":")
        self._seconds = float(value or 0.1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _spoil(self, data: bytes) -> bytes:
        if self._kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind in ("hang", "slow"):
            time.sleep(3600.0 if self._kind == "hang" else self._seconds)
        return bytes([data[0] ^ 1]) + data[1:] if self._kind == "corrupt" else data

    def all_reduce(self, data: bytes) -> bytes:
        return self._inner.all_reduce(self._spoil(data))

    def send(self, data: bytes, to: int) -> None:
        self._inner.send(self._spoil(data), to)


Transport = Sockets | Torch | Faulty


# ---------------------------------------------------------------------------------------------- the test
def check_results(transport: Transport, nodes: Sequence[str]) -> None:
    """Check the results. Raises PairError with all that is wrong, after all nodes have taken part."""
    wrong = [transport.compute()]
    for turn in range(3):
        parts = [numbers(1000 * turn + rank) for rank in range(transport.size)]
        if transport.all_reduce(parts[transport.rank]) != add_numbers(parts):
            wrong.append("an all-reduce gives a wrong sum")
    for other in range(1, transport.size):
        data = block(other, LARGE)
        if transport.rank == 0:
            transport.send(data, other)
            if transport.receive(LARGE, other) != data:
                wrong.append(f"bytes come back from {nodes[other]} other than they were sent")
        elif transport.rank == other:
            if transport.receive(LARGE, 0) != data:
                wrong.append(f"bytes of {nodes[0]} arrive other than they were sent")
            transport.send(data, 0)
    problems = list(dict.fromkeys(text for text in wrong if text))
    if problems:
        raise PairError("; ".join(problems))


def measure_links(transport: Transport, control: dict[int, Link], seconds: float) -> tuple[float, float]:
    """Return (bytes per second, seconds one way), the worst of rank 0's connections; each tries for `seconds`.

    The best block counts: on a busy machine most of them are slowed by its other work.
    """
    rate, delay = float("inf"), 0.0
    small, large = bytes(SMALL), block(99, LARGE)
    for other in range(1, transport.size):
        if transport.rank not in (0, other):
            continue
        rounds, until = 0, time.monotonic() + seconds
        pings: list[float] = []
        blocks: list[float] = []
        while True:
            if transport.rank == 0:
                go = rounds < 3 or (time.monotonic() < until and rounds < 10000)
                control[other].send(b"go" if go else b"end")
            else:
                go = control[0].receive() == b"go"
            if not go:
                break
            for data, times, count in ((small, pings, PINGS if rounds == 0 else 1), (large, blocks, 1)):
                for _ in range(count):
                    times.append(_there_and_back(transport, other, data) / 2)
            rounds += 1
        rate, delay = min(rate, LARGE / min(blocks)), max(delay, median(pings))
    return rate, delay


def _there_and_back(transport: Transport, other: int, data: bytes) -> float:
    begin = time.perf_counter()
    if transport.rank == 0:
        transport.send(data, other)
        transport.receive(len(data), other)
    else:
        transport.receive(len(data), 0)
        transport.send(data, 0)
    return max(time.perf_counter() - begin, 1e-9)


def usable_backends(wanted: str) -> list[str]:
    """Return the backends that this node could use, best first. torch is imported only if it may be used."""
    backends = ["sockets"] if wanted in ("auto", "sockets") else []
    if wanted == "sockets":
        return backends
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return backends
    if not dist.is_available():
        return backends
    if wanted in ("auto", "gloo"):
        backends.insert(0, "gloo")
    if wanted in ("auto", "nccl") and torch.cuda.is_available() and dist.is_nccl_available():
        backends.insert(0, "nccl")
    return backends


def agree_on_backend(rank: int, nodes: Sequence[str], links: dict[int, Link], wanted: str) -> tuple[str, int, int]:
    """Return (backend, GPUs to test, port of the torch store), the same on all nodes. Raises PairError."""
    mine = usable_backends(wanted)
    gpus = 0
    if "nccl" in mine:
        import torch

        gpus = torch.cuda.device_count()
    if rank:
        links[0].send(json.dumps([mine, gpus]).encode())
        backend, gpus, port = json.loads(links[0].receive())
    else:
        offers = [(mine, gpus), *(json.loads(links[other].receive()) for other in range(1, len(nodes)))]
        common = [name for name in mine if all(name in names for names, _ in offers)]
        backend, gpus = (common[0] if common else ""), min(count for _, count in offers)
        port = _store(len(nodes)) if backend in ("gloo", "nccl") else 0
        for link in links.values():
            link.send(json.dumps((backend, gpus, port)).encode())
    if not backend:
        raise PairError(f"no backend of {wanted} is to be had on all nodes")
    return backend, gpus, port


_stores: list[Any] = []  # rank 0's store must live as long as the process


def _store(size: int) -> int:
    import torch.distributed as dist

    store = dist.TCPStore("0.0.0.0", 0, size, is_master=True, wait_for_workers=False)
    _stores.append(store)
    return store.port


def _transports(options: argparse.Namespace, rank: int, links: dict[int, Link]) -> list[Callable[[], Sockets | Torch]]:
    nodes = options.nodes
    backend, gpus, port = agree_on_backend(rank, nodes, links, options.backend)
    if backend == "sockets":
        return [lambda: Sockets(rank, len(nodes), links)]
    import datetime

    import torch.distributed as dist

    limit = datetime.timedelta(seconds=options.patience)
    store = (
        _stores[0] if rank == 0 else dist.TCPStore(options.address, port, len(nodes), is_master=False, timeout=limit)
    )
    devices = [f"cuda:{i}" for i in range(gpus)] if backend == "nccl" else ["cpu"]
    return [functools.partial(Torch, rank, len(nodes), store, backend, device, options.patience) for device in devices]


def run_test(options: argparse.Namespace) -> dict[str, object]:
    """Run this node's part of the test; return the result as plain data."""
    rank = options.nodes.index(options.node)
    result: dict[str, object] = {"node": options.node, "ok": False, "error": "", "backend": ""}
    name, _, fault = os.environ.get("UNICRON_PAIR_FAULT", "").partition(":")
    try:
        links = connect(rank, options.nodes, options.address, options.token, options.patience)
        rate, delay = float("inf"), 0.0
        for make in _transports(options, rank, links):
            transport: Any = make()
            result["backend"] = transport.name
            if name == options.node and fault:
                transport = Faulty(transport, fault)
            check_results(transport, options.nodes)
            one_rate, one_delay = measure_links(transport, links, options.seconds)
            rate, delay = min(rate, one_rate), max(delay, one_delay)
        result |= {"ok": True, "latency": delay, "bandwidth": None if rate == float("inf") else rate}
    except PairError as error:
        result["error"] = str(error)
    except Exception as error:  # whatever torch raises is a finding as well
        result["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return result


def print_result(**what: object) -> None:
    """Print one line in one write, since lines of several nodes meet in one stream."""
    os.write(1, f"{MARK}{json.dumps(what)}\n".encode())


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.nodes = options.nodes.split(",")
    if options.node not in options.nodes or len(options.nodes) < 2 or len(set(options.nodes)) != len(options.nodes):
        print(f"pair_probe: {options.node} must be one of at least two different --nodes", file=sys.stderr)
        return 2
    print_result(node=options.node, started=True)
    total = CONNECT_SECONDS + 4 * options.patience + options.seconds * len(options.nodes) + 60.0
    box = threading.Timer(total, _give_up, (options.node, total))
    box.daemon = True
    box.start()
    result = run_test(options)
    print_result(**result)
    return 0 if result["ok"] else 1


def _give_up(node: str, seconds: float) -> None:
    print_result(node=node, ok=False, error=f"no end within {seconds:g} s", backend="")
    os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m unicron_detector.health.pair_probe", description="One node's part of a paired test."
    )
    parser.add_argument("--nodes", required=True, metavar="A,B[,C]", help="all nodes of the group; the first leads")
    parser.add_argument("--address", required=True, help="where the first one can be reached")
    parser.add_argument("--token", required=True, help="the same for all of this test, different for every other")
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME", ""), help="this one")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--seconds", type=float, default=2.0, help="to measure with")
    parser.add_argument("--patience", type=float, default=15.0, help="how long a peer may take for one answer")
    return parser


if __name__ == "__main__":
    status = main()
    os._exit(status)  # torch's own end takes seconds, and may wait for a peer that is dead
