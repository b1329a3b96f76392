"""The network that the collectives use, which need not be the one that a node's name leads to."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # where a job says it
_OF_THE_LINK = "20"  # the scope in /proc/net/if_inet6
_SIOCGIFADDR = 0x8915  # netdevice(7)


def collectives_address(environment: Mapping[str, str]) -> str:
    """The address of the first interface that the collectives are told to use, of IPv4 where it has one; empty where
    they are told none, or it has none. As NCCL reads it: prefixes, with = in front whole names; what is to be left out
    (^) says nothing here.
    """
    for variable in VARIABLES:
        text = environment.get(variable, "")
        exact, names = text.startswith("="), text.removeprefix("=").split(",")
        if not text or text.startswith("^"):
            continue
        for wanted in filter(None, names):
            for _, name in socket.if_nameindex():
                if (name == wanted if exact else name.startswith(wanted)) and (found := _address(name)):
                    return found
    return ""


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return _address_of_ipv6(interface)
    return socket.inet_ntoa(answer[20:24])


def _address_of_ipv6(interface: str) -> str:
    """Its first address that is not for its own link only."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for digits, _, _, scope, _, name in map(str.split, lines):
        if name == interface and scope != _OF_THE_LINK:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""
