"""Host addresses of both families: how they are written, and what a name resolves to.

A name may have several addresses, of which the first need not answer: a head node may have an AAAA record while its
network carries only IPv4, and a daemon may listen in one family. So all are tried.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unicron_ctl.shared.system.errors import WRONG_USE, UserError


@dataclass(frozen=True)
class Target:
    """One numeric address with its port, as sockets of its family take it."""

    family: int
    address: tuple[Any, ...]

    @property
    def host(self) -> str:
        return canonical(str(self.address[0]))

    @property
    def port(self) -> int:
        return int(self.address[1])

    @property
    def endpoint(self) -> str:
        """The address in ZeroMQ's form."""
        return f"tcp://{join(self.host, self.port)}"


@functools.lru_cache(maxsize=4096)  # the controller asks at each message
def canonical(host: str) -> str:
    """Return a numeric address in the form in which addresses are compared: without brackets, and as IPv4 if a
    dual-stack socket says ::ffff:1.2.3.4. A name stays as it is."""
    bare = host.strip("[]")
    try:
        found = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


@functools.lru_cache(maxsize=4096)  # the controller asks at each message
def origin(address: str) -> str:
    """Return the quota of a numeric address: its network of 64 bits for IPv6, since a host has all of it."""
    address = canonical(address)
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return address


def is_loopback(host: str) -> bool:
    """Say whether the numeric address is this machine's own, which no other machine reaches."""
    try:
        return ipaddress.ip_address(canonical(host)).is_loopback
    except ValueError:
        return host == "localhost"


def is_numeric(host: str) -> bool:
    """Say whether the host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def join(host: str, port: int | str) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"{in_brackets(host)}:{port}"


def in_brackets(host: str) -> str:
    """Return the address, with brackets if it is IPv6."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def split(address: str, listens: bool = False) -> tuple[str, int]:
    """Split HOST:PORT; the host has no brackets then. listens: a place to listen at, which may have no host, or port 0
    for any; since a person has written it, an IPv6 address must have brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bare = host.strip("[]")
    sound = colon and port.isascii() and port.isdecimal() and (0 if listens else 1) <= int(port) < 1 << 16
    if not sound or (host != in_brackets(bare) if listens else not bare):
        raise ValueError(f"{address!r} is no host:port")
    return bare, int(port)


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT. Raises UserError."""
    try:
        host, port = split(address.removeprefix("tcp://"))
    except ValueError:
        host, port = "", 0
    if not address.startswith("tcp://") or not host:
        raise UserError(f"{address} is not the address of a controller: write tcp://HOST:PORT", WRONG_USE)
    return host, port


def split_addresses(text: str) -> list[str]:
    """Return the addresses of controllers in a text with commas between them; [] without any."""
    return [found for one in text.split(",") if (found := one.strip())]


def endpoints(text: str) -> list[tuple[str, int]]:
    """Return host and port of each controller in such a text. Raises UserError."""
    return [endpoint(one) for one in split_addresses(text)] or [endpoint(text)]


def name_of(text: str, target: Target) -> str:
    """Return the address in such a text that resolves to this target; the target's own if none does now."""
    for one in split_addresses(text):
        with contextlib.suppress(OSError, UserError):
            if target in resolve(*endpoint(one)):
                return one
    return target.endpoint


def is_own(target: Target) -> bool:
    """Say whether this machine has the address: only then may a socket use it as its own."""
    try:
        with socket.socket(target.family, socket.SOCK_DGRAM) as probe:
            probe.bind((target.address[0], 0))
    except OSError:
        return False
    return True


def resolve(host: str, port: int) -> list[Target]:
    """Return all addresses of the host, in the system's order of preference (getaddrinfo(3)). Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is no host's name
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    return list(dict.fromkeys(Target(family, tuple(address)) for family, _, _, _, address in found))


def listen_at(host: str, backlog: int, port: int = 0) -> socket.socket:
    """Return a listening socket at this port, or a free one, of the host's first address that this machine has; without
    a host, of all addresses of both families. Raises OSError."""
    problem: OSError | None = None
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no address of that family
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    wanted = (
        [(target.family, target.address[:2]) for target in resolve(host, port)]
        if host
        else [(socket.AF_INET, ("", port))]
    )
    for family, address in wanted:
        try:
            return socket.create_server(address, family=socket.AddressFamily(family), backlog=backlog)
        except OSError as error:
            problem = error
    raise problem or OSError(f"{host}: no address")


def resolve_all(hosts: Sequence[tuple[str, int]]) -> list[Target]:
    """Return all addresses of several hosts, in their order, without unknown names. Raises OSError if none is known."""
    found, problem = list[Target](), OSError("no host is named")
    for host, port in hosts:
        try:
            found += resolve(host, port)
        except OSError as error:
            problem = error
    if not found:
        raise problem
    return list(dict.fromkeys(found))


def reason_of(error: OSError) -> str:
    """Return what went wrong, in words; never empty."""
    return error.strerror or str(error) or type(error).__name__
