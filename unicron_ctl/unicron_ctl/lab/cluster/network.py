"""The network of a cluster with links: the head and each node in a namespace of its own, all on one bridge. Needs root.

A third kind of namespace, the switch, holds the bridge, so that only one interface shows in the machine's own network:
the leg by which ordinary clients reach the head. All names hold the cluster's digest, so clusters live side by side,
and what a crash has left is known by its name. The registry says which cluster has which addresses.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from unicron_ctl.lab.cluster import binaries
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_ctl.shared.system.whole_file import write_whole

HEAD, SWITCH, OUTSIDE = "head", "switch", "outside"
# RFC 2544's network for testing network devices, which nobody routes, and a private one where somebody does.
POOLS = (IPv4Network("198.18.0.0/15"), IPv4Network("10.192.0.0/12"))
IPV4, IPV6, BOTH = "ipv4", "ipv6", "both"  # families of addresses that a cluster's hosts may have
_LOCAL_IPV6, SIZE_IPV6 = 0xFD75_6E63 << 96, 64  # unique local addresses (RFC 4193), one /64 for each network of IPv4
SIZE = 23  # bits: 510 addresses, for 256 nodes, the head and the leg outside
MOUNTS = Path("/run/netns")  # where ip-netns(8) keeps the names
REGISTRY = Path("/run/unicron-links")
CALL_SECONDS = 20.0  # for one call of ip or nft
_FIRST_NODE = 10
# A network namespace's processes must not see the machine's own interfaces in /sys/class/net. A new /sys comes without
# the cgroups below it, which slurmd needs: they are put back. Mounts are of this process and its children only.
_SETTLE = """set -e
hostname "$1"; mount --bind "$2" /etc/hosts
mkdir -p "$3"; mount --rbind /sys/fs/cgroup "$3"; mount -t sysfs sysfs /sys
mount --rbind "$3" /sys/fs/cgroup; umount -l "$3"
shift 3; exec "$@"
"""


class Network:
    """Names and commands of one cluster's network. `digest` names the cluster, `folder` holds /etc/hosts and so on."""

    def __init__(self, digest: str, folder: Path) -> None:
        self.digest, self.folder = digest, folder
        self.prefix = f"unicron-{digest}-"
        self.leg = f"uc-{digest}"  # an interface's name has 15 characters at most
        self._entry = REGISTRY / f"{digest}.json"

    # --- addresses and names -----------------------------------------------------------------------------------------

    @staticmethod
    def address(network: str, host: str, family: str = IPV4) -> str:
        """The address of the head, of a node n1 ... n256 or of the leg outside, in a network such as 198.18.4.0/23, or
        in the one of IPv6 that belongs to it."""
        place = {HEAD: 1, OUTSIDE: 2}.get(host) or _FIRST_NODE + int(host[1:])
        if family != IPV6:
            return str(IPv4Network(network)[place])
        number = int(IPv4Network(network).network_address)
        return str(IPv6Network((_LOCAL_IPV6 + (number << 64), SIZE_IPV6))[place])

    def namespace(self, host: str) -> str:
        """The name of a host's namespace, as `ip netns` lists it."""
        return self.prefix + host

    def present(self) -> bool:
        """True when there is anything of this network, or the registry says that there was to be."""
        return self._entry.exists() or any(True for _ in self._namespaces())

    def complete(self, hosts: Sequence[str]) -> bool:
        """True when each of these hosts has its namespace."""
        return {SWITCH, HEAD, *hosts} <= {name.removeprefix(self.prefix) for name in self._namespaces()}

    def _namespaces(self) -> Iterator[str]:
        try:
            names = os.listdir(MOUNTS)
        except OSError:
            return
        yield from (name for name in names if name.startswith(self.prefix))

    # --- making and removing -----------------------------------------------------------------------------------------

    def register(self, state_dir: Path) -> str:
        """Takes a network that nobody on this machine uses, and notes it before anything is made of it; returns it.

        Raises UserError when none is free.
        """
        REGISTRY.mkdir(mode=0o755, exist_ok=True)
        with open(REGISTRY / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            others = (IPv4Network(known["network"]) for entry, known in _registry_entries() if entry != self._entry)
            taken = [*_routes(), *others]
            free = (net for net in _candidates(self.digest) if not any(net.overlaps(other) for other in taken))
            network = next(free, None)
            if network is None:
                pools = " and ".join(map(str, POOLS))
                raise UserError(f"no free /{SIZE} in {pools}: end a cluster with 'unicronctl cluster down'")
            write_whole(self._entry, json.dumps({"state_dir": str(state_dir), "network": str(network)}))
            return str(network)

    def make(self, network: str, nodes: Sequence[str], family: str = IPV4) -> None:
        """Makes all namespaces and links, and brings them up. Raises UserError with the tool's word."""
        hosts = (HEAD, *nodes)
        kinds = [kind for kind in (IPV6, IPV4) if family in (kind, BOTH)]
        hosts_file = [f"{self.address(network, host, kind)} {host}" for host in (*hosts, OUTSIDE) for kind in kinds]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *hosts_file]) + "\n")

        def has(host: str, interface: str) -> list[str]:
            six = f"addr add {self.address(network, host, IPV6)}/{SIZE_IPV6} dev {interface} nodad"
            four = f"addr add {self.address(network, host)}/{SIZE} dev {interface}"
            return [{IPV6: six, IPV4: four}[kind] for kind in kinds]

        _ip([f"netns add {self.namespace(host)}" for host in (SWITCH, *hosts)])
        switch = ["link add br0 type bridge", "link set br0 up", "link set lo up"]
        for host in hosts:
            switch += [f"link add {host} type veth peer name eth0 netns {self.namespace(host)}"]
            switch += [f"link set {host} master br0 up"]
        switch += [f"link add {OUTSIDE} type veth peer name {self.leg} netns {os.getpid()}"]
        switch += [f"link set {OUTSIDE} master br0 up"]
        _ip(switch, self.namespace(SWITCH))
        for host in hosts:
            _ip([*has(host, "eth0"), "link set eth0 up", "link set lo up"], self.namespace(host))
        _ip([*has(OUTSIDE, self.leg), f"link set {self.leg} up"])

    def remove(self) -> None:
        """Removes all that `make` has made, or has begun to; the links and the rules go with the namespaces.

        Processes in them must have been ended before. Raises UserError with the tool's word.
        """
        if not self.present():
            return
        if Path(f"/sys/class/net/{self.leg}").exists():
            _ip([f"link del {self.leg}"])  # now: it would go with the switch, but some time later
        if names := sorted(self._namespaces()):
            _ip([f"netns del {name}" for name in names])
        self._entry.unlink(missing_ok=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    def command_prefix(self, host: str) -> list[str]:
        """Return what to put before a command's words so that it runs on that host."""
        namespace = f"--net={MOUNTS / self.namespace(host)}"
        settle = ["/bin/sh", "-c", _SETTLE, "sh", host, str(self.folder / "hosts"), str(self.folder / "cgroup")]
        return ["nsenter", namespace, "unshare", "--mount", "--uts", "--propagation", "slave", *settle]

    def rules(self, text: str) -> None:
        """Gives the switch these rules, in nft(8)'s language; all of them at once or none."""
        command = ["nsenter", f"--net={MOUNTS / self.namespace(SWITCH)}", "nft", "-f", "-"]
        _call(command, text)


def abandoned_folders() -> list[Path]:
    """State folders that are gone while parts of their clusters' networks may still be there."""
    return [folder for _, known in _registry_entries() if not (folder := Path(known["state_dir"])).exists()]


def _registry_entries() -> Iterator[tuple[Path, dict[str, str]]]:
    """Each cluster's entry in the registry; others may come and go meanwhile."""
    for entry in REGISTRY.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            yield entry, json.loads(entry.read_text())


def _candidates(seed: str) -> Iterator[IPv4Network]:
    """All networks of the pools, each pool from a place given by `seed`."""
    for pool in POOLS:
        networks = list(pool.subnets(new_prefix=SIZE))
        start = zlib.crc32(seed.encode()) % len(networks)
        yield from networks[start:] + networks[:start]


def _routes() -> list[IPv4Network]:
    """Return where this machine sends packets to elsewhere than by its default route."""
    routes = json.loads(_call(["ip", "-json", "-4", "route", "show", "table", "all"], ""))
    found = [ipaddress.ip_network(r["dst"], strict=False) for r in routes if r.get("dst", "default") != "default"]
    # A VPN's "everything" is no reason: a closer route wins.
    return [net for net in found if isinstance(net, IPv4Network) and net.prefixlen >= 8]


def _ip(lines: Sequence[str], namespace: str = "") -> None:
    """Runs lines of ip(8) in one process."""
    _call(["ip", *(["-netns", namespace] if namespace else []), "-batch", "-"], "\n".join(lines) + "\n")


def _call(command: Sequence[str], text: str) -> str:
    """Runs a program with `text` as its input. Raises UserError with its last word."""
    environment = {"PATH": binaries.SEARCH_PATH, "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"'{' '.join(command)}' took more than {CALL_SECONDS:.0f} s; try again") from None
    if done.returncode:
        raise UserError(f"'{' '.join(command)}' says: {one_line(done.stderr)[:300] or done.returncode}")
    return done.stdout
