"""A rank of ``benchmarks.gpu.cost``: of a session, or of Megatron's own loop, in turns."""

from __future__ import annotations

from benchmarks.cost import gates, ranks
from benchmarks.gpu import ranks as on_device

if __name__ == "__main__":
    gates.train(on_device.make() if gates.KIND == "healed" else ranks.plain(on_device.BACKEND))
