"""What memory or a network may do to an image."""

from __future__ import annotations

from unicron_transition.snapshot.image_format import ImagePage


def flip(found: ImagePage) -> None:
    """One bit in the middle of its data, in place."""
    with found.path.open("r+b") as file:
        file.seek(found.offset + found.data_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
