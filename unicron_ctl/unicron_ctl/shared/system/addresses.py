"""Host addresses of both families: how they are written, and all that a name leads to.

A name may have several addresses, and the first need not answer: a head node may have an AAAA record while its network
carries IPv4 only, and a daemon may listen in one family. So all of them are tried.
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
        """The address as ZeroMQ takes it."""
        return f"tcp://{join(self.host, self.port)}"


@functools.lru_cache(maxsize=4096)  # the controller asks at each message
def canonical(host: str) -> str:
    """A numeric address in the form in which addresses are compared: without brackets, and IPv4 as such where a dual-
    stack socket says ::ffff:1.2.3.4. A name stays as it is."""
    bare = host.strip("[]")
    try:
        found = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


@functools.lru_cache(maxsize=4096)  # the controller asks at each message
def origin(address: str) -> str:
    """The quota that a numeric address counts to: for IPv6 its network of 64 bits, for a host has all of it."""
    address = canonical(address)
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return address


def is_loopback(host: str) -> bool:
    """Whether the numeric address is this machine's own, which no other machine reaches."""
    try:
        return ipaddress.ip_address(canonical(host)).is_loopback
    except ValueError:
        return host == "localhost"


def is_numeric(host: str) -> bool:
    """Whether the host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def join(host: str, port: int | str) -> str:
    """host:port, with brackets around an address of IPv6."""
    return f"{in_brackets(host)}:{port}"


def in_brackets(host: str) -> str:
    """The address, with brackets if it is IPv6."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def split(address: str, listens: bool = False) -> tuple[str, int]:
    """Host, without brackets, and port of HOST:PORT. listens: a place to listen at: it may have no host, port 0 takes
    any free one, and a person has written it, so an address of IPv6 must have its brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bare = host.strip("[]")
    sound = colon and port.isascii() and port.isdecimal() and (0 if listens else 1) <= int(port) < 1 << 16
    if not sound or (host != in_brackets(bare) if listens else not bare):
        raise ValueError(f"{address!r} is no host:port")
    return bare, int(port)


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises UserError."""
    try:
        host, port = split(address.removeprefix("tcp://"))
    except ValueError:
        host, port = "", 0
    if not address.startswith("tcp://") or not host:
        raise UserError(f"{address} is not the address of a controller: write tcp://HOST:PORT", WRONG_USE)
    return host, port


def split_addresses(text: str) -> list[str]:
    """The addresses of controllers in a text: one, or several with commas between them. Without any there is none."""
    return [found for one in text.split(",") if (found := one.strip())]


def endpoints(text: str) -> list[tuple[str, int]]:
    """Host and port of each controller in such a text. Raises UserError."""
    return [endpoint(one) for one in split_addresses(text)] or [endpoint(text)]


def name_of(text: str, target: Target) -> str:
    """Return the address in such a text that leads to this target; the target's own where no name does now."""
    for one in split_addresses(text):
        with contextlib.suppress(OSError, UserError):
            if target in resolve(*endpoint(one)):
                return one
    return target.endpoint


def is_own(target: Target) -> bool:
    """Whether this machine has the address: only then may a socket have it as its own."""
    try:
        with socket.socket(target.family, socket.SOCK_DGRAM) as probe:
            probe.bind((target.address[0], 0))
    except OSError:
        return False
    return True


def resolve(host: str, port: int) -> list[Target]:
    """All addresses of the host, in the order in which the system prefers them (getaddrinfo(3)). Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is no host's name
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    return list(dict.fromkeys(Target(family, tuple(address)) for family, _, _, _, address in found))


def listen_at(host: str, backlog: int) -> socket.socket:
    """A listening socket at a free port of the host's first address that is this machine's, or, where no host is named,
    of all addresses of both families. Raises OSError."""
    problem: OSError | None = None
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no address of that family
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    for family, address in (
        [(t.family, t.address[:2]) for t in resolve(host, 0)] if host else [(socket.AF_INET, ("", 0))]
    ):
        try:
            return socket.create_server(address, family=socket.AddressFamily(family), backlog=backlog)
        except OSError as error:
            problem = error
    raise problem or OSError(f"{host}: no address")


def resolve_all(hosts: Sequence[tuple[str, int]]) -> list[Target]:
    """All addresses of several hosts, in their order; a name that is not known now is left out. Raises OSError where
    none is known."""
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
