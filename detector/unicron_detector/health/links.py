"""Links that go down and up: counters of network interfaces and InfiniBand ports, read every few seconds."""

from __future__ import annotations

import contextlib
from pathlib import Path


class LinkWatch:
    """Rises of the counters since the last call. Only interfaces of a device count, since a container engine's bridge
    says nothing about the node's network. `root` stands for /sys/class."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path("/sys/class")
        self._last = self._read()

    def new_flaps(self) -> dict[str, int]:
        """Return link -> rise of its counter since the last call; "mlx5_0:1" is port 1 of an InfiniBand adapter."""
        before, self._last = self._last, self._read()
        return {name: now - before[name] for name, now in sorted(self._last.items()) if now > before.get(name, now)}

    def _read(self) -> dict[str, int]:
        files = {path.parent.name: path for path in self._root.glob("net/*/carrier_changes")}
        files = {name: path for name, path in files.items() if path.with_name("device").exists()}
        for path in self._root.glob("infiniband/*/ports/*/counters/link_downed"):
            files[f"{path.parents[3].name}:{path.parents[1].name}"] = path
        counts = {}
        for name, path in files.items():
            with contextlib.suppress(OSError, ValueError):
                counts[name] = int(path.read_text())
        return counts


def describe(name: str, rises: int, seconds: float) -> str:
    """Describe a flap in one line."""
    what = "link_downed rose by" if ":" in name else "carrier changes:"
    return f"link {name}: {what} {rises} within {seconds:.0f} s"
