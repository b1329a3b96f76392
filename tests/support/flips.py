"""What memory or a network may do to an image."""

from __future__ import annotations

from pathlib import Path

from unicron_transition.snapshot.image_format import read_page


def flip(path: Path) -> None:
    """One bit in the middle of its data, in place."""
    found = read_page(path)
    with path.open("r+b") as file:
        file.seek(found.offset + found.data_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
