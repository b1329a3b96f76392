"""Links that go down and up: counters of network interfaces and InfiniBand ports, read every few seconds."""

from __future__ import annotations

from pathlib import Path

from unicron_detector.iterations.peer_metrics import link_flaps, read_links


class LinkWatch:
    """Rises of the counters since the last call. Only interfaces of a device count, since a container engine's bridge
    says nothing about the node's network. `root` stands for /sys/class."""

    def __init__(self, root: Path | None = None) -> None:
        folder = root or Path("/sys/class")
        self._net, self._infiniband = folder / "net", folder / "infiniband"
        self._last = self._read()

    def new_flaps(self) -> dict[str, int]:
        """Return link -> rise of its counter since the last call; "mlx5_0:1" is port 1 of an InfiniBand adapter."""
        before, self._last = self._last, self._read()
        return link_flaps(before, self._last)

    def _read(self) -> dict[str, int]:
        found = read_links(self._net, self._infiniband)
        return {name: value for name, value in found.items() if ":" in name or (self._net / name / "device").exists()}


def describe(name: str, rises: int, seconds: float) -> str:
    """Describe a flap in one line."""
    what = "link_downed rose by" if ":" in name else "carrier changes:"
    return f"link {name}: {what} {rises} within {seconds:.0f} s"
