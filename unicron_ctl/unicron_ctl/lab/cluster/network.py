"""The network of a cluster with links: the head and each node have their own namespaces, on one bridge. Needs root.

The bridge is in a namespace too, the switch, so that the machine's own network has only one more interface: the leg by
which ordinary clients reach the head. All names contain the cluster's digest, so clusters live side by side, and names
identify what a crash has left. The registry has the addresses of each cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
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
# RFC 2544's network for testing network devices, and a private one in case the first is in use.
POOLS = (IPv4Network("198.18.0.0/15"), IPv4Network("10.192.0.0/12"))
IPV4, IPV6, BOTH = "ipv4", "ipv6", "both"  # families of the addresses of a cluster's hosts
_LOCAL_IPV6, SIZE_IPV6 = 0xFD75_6E63 << 96, 64  # unique local addresses (RFC 4193), a /64 for each IPv4 network
SIZE = 23  # bits: 510 addresses, for 256 nodes, the head and the leg outside
MOUNTS = Path("/run/netns")  # where ip-netns(8) keeps the names
REGISTRY = Path("/run/unicron-links")
CALL_SECONDS = 20.0  # for one call of ip or nft
_FIRST_NODE = 10
# Processes in a network namespace must not see the machine's own interfaces in /sys/class/net. A new /sys lacks the
# cgroups, which slurmd needs, so they are mounted again. Only this process and its children see these mounts.
_SETTLE = """set -e
hostname "$1"; mount --bind "$2" /etc/hosts
mkdir -p "$3"; mount --rbind /sys/fs/cgroup "$3"; mount -t sysfs sysfs /sys
mount --rbind "$3" /sys/fs/cgroup; umount -l "$3"
shift 3; exec "$@"
"""


class Network:
    """Names and commands of one cluster's network. `digest` names the cluster; `folder` contains its /etc/hosts."""

    def __init__(self, digest: str, folder: Path) -> None:
        self.digest, self.folder = digest, folder
        self.prefix = f"unicron-{digest}-"
        self.leg = f"uc-{digest}"  # an interface's name has 15 characters at most
        self._entry = REGISTRY / f"{digest}.json"

    # --- addresses and names -----------------------------------------------------------------------------------------

    @staticmethod
    def address(network: str, host: str, family: str = IPV4) -> str:
        """Return the address of the head, of a node n1 ... n256 or of the leg outside, in a network such as
        198.18.4.0/23 or in the IPv6 network that belongs to it."""
        place = {HEAD: 1, OUTSIDE: 2}.get(host) or _FIRST_NODE + int(host[1:])
        if family != IPV6:
            return str(IPv4Network(network)[place])
        number = int(IPv4Network(network).network_address)
        return str(IPv6Network((_LOCAL_IPV6 + (number << 64), SIZE_IPV6))[place])

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace, as `ip netns` lists it."""
        return self.prefix + host

    def present(self) -> bool:
        """Whether any part of this network exists, or is in the registry."""
        return self._entry.exists() or bool(self._namespaces())

    def complete(self, hosts: Sequence[str]) -> bool:
        """Whether each of these hosts has its namespace."""
        return {SWITCH, HEAD, *hosts} <= {name.removeprefix(self.prefix) for name in self._namespaces()}

    def _namespaces(self) -> list[str]:
        return [path.name for path in MOUNTS.glob(f"{self.prefix}*")]

    # --- making and removing -----------------------------------------------------------------------------------------

    def register(self, state_dir: Path) -> str:
        """Choose a network that nothing on this machine uses, and write it to the registry. Return it.

        Raises UserError if none is free.
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
        """Make all namespaces and links, and bring them up. Raises UserError with the tool's error."""
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
        """Remove all that `make` has made. The links and the rules go with the namespaces, in which no process may run.

        Raises UserError with the tool's error.
        """
        if not self.present():
            return
        if Path(f"/sys/class/net/{self.leg}").exists():
            _ip([f"link del {self.leg}"])  # it would go with the switch, but some time later
        if names := sorted(self._namespaces()):
            _ip([f"netns del {name}" for name in names])
        self._entry.unlink(missing_ok=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    def command_prefix(self, host: str) -> list[str]:
        """Return the words that make a command run on that host."""
        namespace = f"--net={MOUNTS / self.namespace(host)}"
        settle = ["/bin/sh", "-c", _SETTLE, "sh", host, str(self.folder / "hosts"), str(self.folder / "cgroup")]
        return ["nsenter", namespace, "unshare", "--mount", "--uts", "--propagation", "slave", *settle]

    def rules(self, text: str) -> None:
        """Set the switch's rules, in nft(8)'s language: all of them or none."""
        _call(["nsenter", f"--net={MOUNTS / self.namespace(SWITCH)}", "nft", "-f", "-"], text)


def abandoned_folders() -> list[Path]:
    """Return state folders that are gone while parts of their clusters' networks may still exist."""
    return [folder for _, known in _registry_entries() if not (folder := Path(known["state_dir"])).exists()]


def _registry_entries() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield each cluster's entry in the registry. Other programs may add and remove entries meanwhile."""
    for entry in REGISTRY.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            yield entry, json.loads(entry.read_text())


def _candidates(seed: str) -> Iterator[IPv4Network]:
    """Yield all networks of the pools. The seed decides with which one of each pool it begins."""
    for pool in POOLS:
        networks = list(pool.subnets(new_prefix=SIZE))
        start = zlib.crc32(seed.encode()) % len(networks)
        yield from networks[start:] + networks[:start]


def _routes() -> list[IPv4Network]:
    """Return the networks for which this machine has other routes than the default one."""
    routes = json.loads(_call(["ip", "-json", "-4", "route", "show", "table", "all"], ""))
    found = [IPv4Network(r["dst"], strict=False) for r in routes if r.get("dst", "default") != "default"]
    return [net for net in found if net.prefixlen >= 8]  # a VPN's route for everything loses against a closer one


def _ip(lines: Sequence[str], namespace: str = "") -> None:
    """Run lines of ip(8) in one process."""
    _call(["ip", *(["-netns", namespace] if namespace else []), "-batch", "-"], "\n".join(lines) + "\n")


def _call(command: Sequence[str], text: str) -> str:
    """Run a program with `text` as its input. Raises UserError with its error."""
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
