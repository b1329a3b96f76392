"""A plain program that only writes: a line every 20 ms at the end of a file that all nodes and all worlds share.

No collective stops it, so only the fence keeps a world that was left behind from writing beside the next one.
"""

from __future__ import annotations

import os
import time


def main() -> None:
    """Write for ever."""
    generation, node = os.environ["UNICRON_GENERATION"], os.environ["SLURMD_NODENAME"]
    file = os.open(os.environ["FENCE_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while True:
        os.write(file, f"{generation} {node} {time.monotonic():.3f}\n".encode())
        time.sleep(0.02)


if __name__ == "__main__":
    main()
